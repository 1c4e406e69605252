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


_LOCK = threading.Lock()
_PAUSES: list[
    bool
] = []  # for each pause under way, whether the collector ran before it; the last to end pops the first


@contextmanager
def paused_collector(enabled: bool = True) -> Iterator[None]:
    """Pause the collector within the block. Its former state comes back when the last of all threads' blocks ends."""
    if not enabled:
        yield
        return
    with _LOCK:
        _PAUSES.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _LOCK:
            if _PAUSES.pop():
                gc.enable()


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
