"""Automatic breaks: a module in which a capture fails runs eagerly, and the rest is captured around it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from torch import nn

from ..call.breaks import eager_break, is_marked, remove_eager_break
from ..errors import CaptureError
from ..reasons import Reason

__all__ = ["AutoBreaks"]


class AutoBreaks:
    """The modules that cost a callable its full graph, with what each of them did. Changed under its owner's lock."""

    def __init__(self, fn: Callable[..., Any], most: int) -> None:
        self._roots = (fn, getattr(fn, "__self__", None))
        self._most = most
        self.reasons: dict[nn.Module, str] = {}
        """By module: the error, which names the operator and the line."""

    def add(self, error: CaptureError) -> bool:
        """Break at the innermost module in which a capture failed; False if there is none that is not broken yet.

        The module that is served itself is none: nothing would be left to capture.
        """
        if error.reason is not Reason.CAPTURE_UNSAFE or len(self.reasons) >= self._most:
            return False
        cause = error.__cause__ if error.__cause__ is not None else error
        for module in _modules_of(cause.__traceback__):
            if module not in self._roots and module not in self.reasons and not is_marked(module):
                self.reasons[module] = str(error)
                return True
        return False

    @contextmanager
    def marked(self) -> Iterator[None]:
        """The modules are marked within the block, and as they were after it."""
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


def _modules_of(trace: TracebackType | None) -> list[nn.Module]:
    """The modules whose methods were running where an exception was raised, innermost first."""
    found: list[nn.Module] = []
    while trace is not None:
        holder = trace.tb_frame.f_locals.get("self")
        if isinstance(holder, nn.Module):
            found.append(holder)
        trace = trace.tb_next
    return list(dict.fromkeys(reversed(found)))
