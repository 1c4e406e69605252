"""Automatic breaks: if a capture fails inside a method of a module, it runs eagerly and the rest is captured around it.

A module's ``forward`` is one of its methods: then the whole module runs eagerly.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..call.breaks import eager_break, is_marked, unmark
from ..errors import CaptureError
from ..reasons import Reason
from .advice import places_within

__all__ = ["AutoBreaks"]


class AutoBreaks:
    """The methods of a callable's modules that no graph can hold, with the reasons; at most ``max_breaks``.

    Its owner changes it with the lock of its graphs held.
    """

    def __init__(self, fn: Callable[..., Any], max_breaks: int, max_eager_share: float) -> None:
        self._served = (fn, getattr(fn, "__self__", None))
        self._max_breaks = max_breaks
        self._max_eager_share = max_eager_share
        self.reasons: dict[tuple[nn.Module, str], str] = {}
        """For each module and method the error, which names the operator and the line."""

    def add(self, error: CaptureError) -> bool:
        """Break at the innermost method of a module in which the capture failed. Returns False if there is none.

        The served module as a whole, or the method of it that is served, does not count.
        """
        if error.reason is not Reason.CAPTURE_UNSAFE or len(self.reasons) >= self._max_breaks:
            return False
        for module, method in places_within(error):
            is_served = module in self._served and method in ("forward", getattr(self._served[0], "__name__", ""))
            if is_served or (module, method) in self.reasons or is_marked(module, method):
                continue
            self.reasons[module, method] = str(error)
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
        """Mark the methods as breaks within the block; marks of the user stay as they are."""
        fresh = [(module, method) for module, method in self.reasons if not is_marked(module, method)]
        try:
            for module, method in fresh:
                eager_break(module, method)
            yield
        finally:
            for module, method in fresh:
                unmark(module, method)

    def __len__(self) -> int:
        return len(self.reasons)
