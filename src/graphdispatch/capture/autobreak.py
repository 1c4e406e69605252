"""Automatic breaks: if a capture fails inside a module, that module runs eagerly and the rest is captured around it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

from torch import nn

from ..call.breaks import eager_break, is_marked, remove_eager_break
from ..errors import CaptureError
from ..reasons import Reason

__all__ = ["AutoBreaks"]


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

        The served module itself does not count: nothing would be left to capture.
        """
        if error.reason is not Reason.CAPTURE_UNSAFE or len(self.reasons) >= self._max_breaks:
            return False
        cause = error.__cause__ if error.__cause__ is not None else error
        for frame, _ in reversed(list(walk_tb(cause.__traceback__))):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module not in (*self._served, *self.reasons) and not is_marked(module):
                self.reasons[module] = str(error)
                return True
        return False

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
