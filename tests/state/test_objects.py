"""How state is read: tables at one moment."""

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from graphdispatch.state import objects


@contextmanager
def written_by_another_thread(write: Callable[[int], object]) -> Iterator[None]:
    """A thread that writes all the time, and is let in as often as possible."""
    stop, before = threading.Event(), sys.getswitchinterval()

    def run() -> None:
        number = 0
        while not stop.is_set():
            write(number := number + 1)

    thread = threading.Thread(target=run)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)


@pytest.mark.parametrize("kind", [dict, OrderedDict, type("Table", (dict,), {})])
def test_a_dict_is_read_as_it_is_at_one_moment(kind: type[dict[int, int]]) -> None:
    """Each key with its own value, whatever another thread adds and removes meanwhile."""
    table = kind()

    def write(number: int) -> None:
        table[number] = -number
        if number > 3:
            del table[number - 3]

    with written_by_another_thread(write):
        for _ in range(5_000):
            entries = objects.content(table)
            half = len(entries) // 2
            assert entries[half:] == [-key for key in entries[:half]]
