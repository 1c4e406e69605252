"""Keeps Python's garbage collector out of captures.

A finaliser that runs during a CUDA capture can free a graph or unload a module, which invalidates the capture. A
collection for each capture would make a batch of captures several times slower (pytorch#158193, sglang#8577), so a
batch collects once, after the last.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from ..copying import make_lock, renew_in_child


class _Pauses:
    """The pauses under way in all threads. The first one stops the collector, and the last one starts it again."""

    def __init__(self) -> None:
        self._lock = make_lock()
        self._number = 0
        self._was_enabled = False
        renew_in_child(self)

    def __enter__(self) -> None:
        with self._lock:
            if not self._number:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._number += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._number = max(self._number - 1, 0)
            if not self._number and self._was_enabled:
                gc.enable()

    def after_fork(self) -> None:
        """No pause goes on in a child, which has one thread: see Note [after a fork] in ``copying.py``."""
        if self._number and self._was_enabled:
            gc.enable()
        self._number = 0


_PAUSES = _Pauses()


@contextmanager
def paused_collector(enabled: bool = True, *, sweeps: bool = False) -> Iterator[None]:
    """Pause the collector within the block. Its former state comes back when the last of all threads' blocks ends.

    ``sweeps`` is for a batch of captures: it collects once, after the block.
    """
    try:
        with _PAUSES if enabled else nullcontext():
            yield
    finally:
        if enabled and sweeps:
            gc.collect()
