"""The capturer that makes graphs right for callables that nobody vouches for."""

from collections.abc import Callable, Iterable
from typing import Any

from ..config import CUDAGraphOptions
from ..runtime.entry import CUDAGraphEntry
from ..runtime.protocols import Capturer, CaptureRequest, CaptureResult, Guard
from .check.compare import gap_between
from .check.pipeline import capture_entry, verify_entry
from .state.guards import StateGuard


class ProvingCapturer(Capturer):
    """Watches the call, proves its rows and its path, records it, and compares each graph with eager. Has no state."""

    may_pad_otherwise = True

    def reach(self, fn: Callable[..., Any], *, by_names: bool = False) -> Guard:
        """As ``Capturer.reach``."""
        return StateGuard([fn], by_names=by_names)

    def capture(self, request: CaptureRequest) -> CaptureResult:
        """As ``capture_entry``."""
        return capture_entry(request)

    def check(self, request: CaptureRequest, entry: CUDAGraphEntry) -> CaptureResult:
        """As ``verify_entry``."""
        return verify_entry(request, entry)

    def gap(self, want: Iterable[Any], got: Iterable[Any], entry: CUDAGraphEntry, options: CUDAGraphOptions) -> str:
        """As ``Capturer.gap``."""
        return gap_between(want, got, entry, options)
