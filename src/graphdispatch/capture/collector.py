"""Keeps Python's garbage collector out of captures.

A finaliser that runs during a CUDA capture can free a graph or unload a module, which invalidates the capture. A
collection for each capture would make a batch of captures several times slower (pytorch#158193, sglang#8577), so a
batch collects once before and once after.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused_collector", "swept_collector"]


class _Pauses:
    """Counts the pauses of the process's one collector. Several threads may pause it; the last to end resumes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._was_running = False

    def begin(self) -> None:
        with self._lock:
            if not self._count:
                self._was_running = gc.isenabled()
                gc.disable()
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count and self._was_running:
                gc.enable()


_PAUSES = _Pauses()


@contextmanager
def paused_collector(enabled: bool = True) -> Iterator[None]:
    """Pause the collector within the block. Its former state comes back on every way out."""
    if not enabled:
        yield
        return
    _PAUSES.begin()
    try:
        yield
    finally:
        _PAUSES.end()


@contextmanager
def swept_collector(enabled: bool = True) -> Iterator[None]:
    """For a batch of captures: collect once before and once after the block, and not within it."""
    if not enabled:
        yield
        return
    gc.collect()
    try:
        with paused_collector():
            yield
    finally:
        gc.collect()
