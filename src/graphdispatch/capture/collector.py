"""Keeps Python's garbage collector out of captures.

A finaliser that runs during a CUDA capture can free a graph or unload a module and so invalidate the capture, and
collecting once per capture makes a batch of captures several times slower (pytorch#158193, sglang#8577).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["frozen_collector", "paused_collector"]


@contextmanager
def paused_collector(enabled: bool = True) -> Iterator[None]:
    """No collection within the block; the collector's former state comes back on every way out."""
    was_running = gc.isenabled()
    if enabled:
        gc.disable()
    try:
        yield
    finally:
        if enabled and was_running:
            gc.enable()


@contextmanager
def frozen_collector(enabled: bool = True) -> Iterator[None]:
    """For a batch of captures: collect before, take what exists out of the collector's sight, collect after."""
    if not enabled:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        with paused_collector():
            yield
    finally:
        gc.unfreeze()
        gc.collect()
