"""What a callable holds besides its arguments, and what a run changes of it."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ..state.guards import StateGuard
from ..state.walk import StateWalk

__all__ = ["CallableState"]


class CallableState:
    """The Python state of a callable as it is now, and the names of its modules and tensors."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._walk = StateWalk(fn)
        self._guard = StateGuard(fn)
        self.modules: list[nn.Module] = self._walk.modules

    def changed(self) -> tuple[str, ...]:
        """What is not as it was, by name."""
        return tuple(self._walk.changes())

    def restore(self) -> None:
        """Put everything back."""
        self._walk.restore(generators=True)

    def guarded(self) -> tuple[str, ...]:
        """What a guard of the callable compares at each hit."""
        return (f"the addresses of {len(self._guard)} tensors",) if len(self._guard) else ()
