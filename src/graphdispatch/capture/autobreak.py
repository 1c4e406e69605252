"""Automatic breaks: if a capture fails inside a module, that module runs eagerly and the rest is captured around it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..call.breaks import eager_break, is_marked, remove_eager_break
from ..errors import CaptureError
from ..reasons import Reason
from .advice import modules_within

__all__ = ["AutoBreaks"]

_MOST_SHARE = 0.75


class AutoBreaks:
    """The modules of a callable that no graph can hold, with the reasons; at most ``max_breaks``.

    Its owner changes it with the lock of its graphs held.
    """

    def __init__(self, fn: Callable[..., Any], max_breaks: int) -> None:
        self._served = (fn, getattr(fn, "__self__", None))
        self._max_breaks = max_breaks
        self.reasons: dict[nn.Module, str] = {}
        """For each module the error, which names the operator and the line."""

    def add(self, error: CaptureError) -> bool:
        """Break at the innermost module in which the capture failed. Returns False if there is none to break at.

        The served module itself does not count, nor does one with most of its parts: graphs of the little that
        is left would not pay.
        """
        if error.reason is not Reason.CAPTURE_UNSAFE or len(self.reasons) >= self._max_breaks:
            return False
        for module in modules_within(error):
            if module in (*self._served, *self.reasons) or is_marked(module):
                continue
            if self._share_of([*self.reasons, module]) > _MOST_SHARE:
                return False
            self.reasons[module] = str(error)
            return True
        return False

    def _share_of(self, modules: list[nn.Module]) -> float:
        """The share of the served module's parts that lie in these modules; 0 where no module is served."""
        root = next((served for served in self._served if isinstance(served, nn.Module)), None)
        if root is None:
            return 0.0
        inside = {part for module in modules for part in module.modules()}
        return sum(part in inside for part in root.modules()) / len(list(root.modules()))

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Mark the modules as breaks within the block; marks of the user stay as they are."""
        fresh = [module for module in self.reasons if not is_marked(module)]
        try:
            for module in fresh:
                eager_break(module)
            yield
        finally:
            for module in fresh:
                remove_eager_break(module)

    def __len__(self) -> int:
        return len(self.reasons)
