"""Keeps Python's garbage collector out of captures.

A finaliser that runs during a CUDA capture can free a graph or unload a module, which invalidates the capture. Nothing
is collected in place of that: a collection for each capture would make a batch of captures several times slower
(pytorch#158193, sglang#8577), and what a capture left behind is young, so that the collector finds it once it runs.
"""

import gc
from contextlib import AbstractContextManager, nullcontext

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


def paused_collector(enabled: bool = True) -> AbstractContextManager[object]:
    """Pause the collector within the block. Its former state comes back when the last of all threads' blocks ends."""
    return _PAUSES if enabled else nullcontext()
