"""How state is read: tables at one moment."""

import itertools
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import pytest
import torch

import graphdispatch as gd
from graphdispatch.state import objects
from graphdispatch.state.walk import StateWalk


@pytest.mark.parametrize("kind", [dict, OrderedDict, type("Table", (dict,), {})])
def test_a_dict_is_read_as_it_is_at_one_moment(kind: type[dict[int, int]]) -> None:
    """Each key with its own value, whatever another thread adds and removes meanwhile, let in as often as possible."""
    table, stop, before = kind(), threading.Event(), sys.getswitchinterval()

    def write() -> None:
        for number in itertools.count():
            table[number] = -number
            if number > 3:
                del table[number - 3]
            if stop.is_set():
                return

    thread = threading.Thread(target=write)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(5_000):
            entries = objects.content(table)
            half = len(entries) // 2
            assert entries[half:] == [-key for key in entries[:half]]
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)


def test_what_describes_a_class_is_not_walked() -> None:
    """Fields and annotations of a dataclass are many objects and no state; its data is state, whatever its name."""

    @dataclass
    class Settings:
        width: Annotated[int, object()] = field(default=4, metadata={"unit": "columns"})
        __registry__: ClassVar[dict[str, int]] = {"calls": 0}

    walk = StateWalk(Settings())
    assert not walk.knows(Settings.__dataclass_fields__["width"])
    Settings.__registry__["calls"] = 1
    assert "__registry__" in str(walk.change())


def test_what_describes_a_class_counts_where_code_spells_it() -> None:
    """A call that writes there is refused, and does so once."""

    class Counts:
        __parameters__: ClassVar[dict[str, int]] = {"calls": 0}

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.__parameters__["calls"] += 1
            return x * 2

    serve = gd.graphed(Counts(), dynamic={"x": 0}, sizes=(4,))
    serve.prewarm(torch.ones(4, 3))
    assert Counts.__parameters__["calls"] == 0
    for call in range(1, 5):
        serve(torch.ones(4, 3))
        assert Counts.__parameters__["calls"] == call
    assert serve.stats.reasons[gd.Reason.STATE_REBOUND]
