"""Keeps Python's garbage collector out of captures.

A finaliser that runs during a CUDA capture can free a graph or unload a module, which invalidates the capture. A
collection for each capture would make a batch of captures several times slower (pytorch#158193, sglang#8577), so a
batch collects once, after the last.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from ..forking import make_lock, renew_in_child

__all__ = ["paused_collector", "swept_collector"]


class _Pauses(threading.local):
    """The pauses under way, of this thread and of all together."""

    own = 0
    lock = make_lock()
    states: ClassVar[list[bool]] = []
    """For each pause of any thread, whether the collector ran before it; the last to end pops the first."""

    def begin(self) -> None:
        with self.lock:
            self.own += 1
            self.states.append(gc.isenabled())
            gc.disable()

    def end(self) -> None:
        with self.lock:
            self.own -= 1
            if self.states.pop():
                gc.enable()

    def after_fork(self) -> None:
        """Only the pauses of this thread go on: see Note [after a fork] in ``forking.py``."""
        if self.states and not self.own and self.states[0]:
            gc.enable()
        del self.states[self.own :]


_PAUSES = _Pauses()
renew_in_child(_PAUSES)


@contextmanager
def paused_collector(enabled: bool = True) -> Iterator[None]:
    """Pause the collector within the block. Its former state comes back when the last of all threads' blocks ends."""
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
    """For a batch of captures: collect once after the block, and not within it."""
    if not enabled:
        yield
        return
    try:
        with paused_collector():
            yield
    finally:
        gc.collect()
