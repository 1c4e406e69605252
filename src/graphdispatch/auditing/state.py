"""What a callable holds besides its arguments, and what a run changes of it."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ..state.discovery import StateDiscovery
from ..state.guards import StateGuard, same_objects

__all__ = ["CallableState"]


class CallableState:
    """The Python state of a callable as it is now, and the names of its modules and tensors."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._guard = StateGuard(fn)
        self._before = self._guard.attributes()
        self._snapshot = self._guard.snapshot()
        self.modules: list[nn.Module] = StateDiscovery(fn).modules

    def changed(self) -> tuple[str, ...]:
        """What is not as it was, by name."""
        same = same_objects(self._before, self._guard.attributes())
        return () if same else ("an attribute or captured variable",)

    def restore(self) -> None:
        """Put everything back."""
        self._snapshot.restore()

    def guarded(self) -> tuple[str, ...]:
        """What a guard of the callable compares at each hit."""
        return (f"the addresses of {len(self._guard)} tensors",) if len(self._guard) else ()
