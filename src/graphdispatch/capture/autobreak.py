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


class AutoBreaks:
    """The modules of a callable that no graph can hold, with the reasons; at most ``max_breaks``.

    Its owner changes it with the lock of its graphs held.
    """

    def __init__(self, fn: Callable[..., Any], max_breaks: int, max_eager_share: float) -> None:
        self._served = (fn, getattr(fn, "__self__", None))
        self._max_breaks = max_breaks
        self._max_eager_share = max_eager_share
        self.reasons: dict[nn.Module, str] = {}
        """For each module the error, which names the operator and the line."""

    def add(self, error: CaptureError) -> bool:
        """Break at the innermost module in which the capture failed. Returns False if there is none to break at.

        The served module itself does not count.
        """
        if error.reason is not Reason.CAPTURE_UNSAFE or len(self.reasons) >= self._max_breaks:
            return False
        for module in modules_within(error):
            if module in (*self._served, *self.reasons) or is_marked(module):
                continue
            self.reasons[module] = str(error)
            return True
        return False

    def check_share(self, eager_share: float) -> None:
        """Raise ``CaptureError`` if breaks run more than the allowed share of the operators: graphs of the little that
        is left would not pay."""
        if eager_share > self._max_eager_share:
            raise CaptureError(
                f"breaks would run {100 * eager_share:.0f} % of the operators, and max_eager_share allows "
                f"{100 * self._max_eager_share:.0f} %; {'; '.join(self.reasons.values())}",
                Reason.CAPTURE_UNSAFE,
            )

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
