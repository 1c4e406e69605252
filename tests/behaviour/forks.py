"""Runs a function in a forked child, and says what it reported."""

import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ..helpers import library_locks

__all__ = ["all_locks_held", "in_child"]

_HANGS_S = 30


def in_child(work: Callable[[], None]) -> None:
    """Fork, and run ``work`` in the child. Raises ``AssertionError`` if that fails, with a traceback, or hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of any fork of a process with threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_HANGS_S)
            work()
            status = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status), f"the child hung: signal {status}"
    assert not status, "the child wrote why to stderr"


@contextmanager
def all_locks_held() -> Iterator[None]:
    """Within the block another thread holds every lock that the library has made."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in library_locks():
                stack.enter_context(lock)
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(_HANGS_S)
    try:
        yield
    finally:
        done.set()
        thread.join()
