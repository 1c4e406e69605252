"""Runs a function in a forked child, and says what it reported."""

import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..helpers import library_locks

__all__ = ["all_locks_held", "in_child"]

_HANGS_S = 30


def in_child(work: Callable[[], None]) -> None:
    """Fork, and run ``work`` in the child. Raises ``AssertionError`` with the child's traceback, or if it hangs."""
    reader, writer = os.pipe()
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
            os.write(writer, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(status)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader) as report:
        told = report.read()
    assert os.WIFEXITED(status), f"the child hung: signal {status}"
    assert not status, told


@contextmanager
def all_locks_held() -> Iterator[None]:
    """Within the block another thread holds every lock that the library has made."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        locks = library_locks()
        for lock in locks:
            lock.acquire()
        held.set()
        done.wait()
        for lock in locks:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(_HANGS_S)
    try:
        yield
    finally:
        done.set()
        thread.join()
