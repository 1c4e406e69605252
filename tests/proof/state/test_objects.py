"""How state is read: tables at one moment, what lies beside it is no obstacle, and what may come to it without
telling anything."""

import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar
from xml.etree import ElementTree

import pytest
import sympy
import torch
from torch import nn

from graphdispatch.proof.state import objects
from graphdispatch.proof.state.guards import StateGuard
from graphdispatch.proof.state.reads import Results
from graphdispatch.proof.state.walk import StateWalk
from graphdispatch.runtime.attributes import content

from ...behaviour.cases import Box
from ...helpers import in_threads, switching_often


@pytest.mark.parametrize("kind", [dict, OrderedDict, type("Table", (dict,), {})])
def test_a_dict_is_read_as_it_is_at_one_moment(kind: type[dict[int, int]]) -> None:
    """Each key with its own value, whatever another thread adds and removes meanwhile, let in as often as possible."""
    table, stop = kind(), threading.Event()

    def write() -> None:
        for number in itertools.count():
            table[number] = -number
            if number > 3:
                del table[number - 3]
            if stop.is_set():
                return

    def read() -> None:
        try:
            for _ in range(5_000):
                entries = content(table)
                half = len(entries) // 2
                assert entries[half:] == [-key for key in entries[:half]]
        finally:
            stop.set()

    with switching_often(1e-6):
        in_threads(write, read)


def test_what_describes_a_class_is_not_walked() -> None:
    """Fields and annotations of a dataclass are many objects and no state; its data is state, whatever its name."""

    @dataclass
    class Settings:
        width: Annotated[int, object()] = field(default=4, metadata={"unit": "columns"})
        __registry__: ClassVar[dict[str, int]] = {"calls": 0}

    walk = StateWalk(Settings())
    assert not walk.has_met(Settings.__dataclass_fields__["width"])
    Settings.__registry__["calls"] = 1
    assert "__registry__" in str(walk.change())


ANSWERS: list[tuple[Callable[[Any], Any], Any, Any]] = [
    (objects.role_of, ElementTree.Element, "opaque"),
    (objects.role_of, type("Element", (), {}), "instance"),
    (objects.hides, object.__eq__, True),
    (objects.hides, float.__eq__, False),
    (objects.hides, object.__init__, False),
    (objects.slots_of, Box, {}),
    (objects.is_library_code, sympy.__file__, True),
]


@pytest.mark.parametrize(("question", "of", "answer"), ANSWERS)
def test_what_classes_functions_and_files_are(question: Callable[[Any], Any], of: Any, answer: Any) -> None:
    """Their names alone make them nothing in particular."""
    assert question(of) == answer


def test_a_cache_holds_its_function_and_its_results() -> None:
    """Each by itself, and not in the table that the cache writes."""
    result = object()
    cached = functools.lru_cache(fn := lambda _: result)
    cached(0)
    held = set(map(id, objects.referents(cached)))
    assert {id(result), id(fn)} <= held
    assert id(objects.results_of(cached)) not in held


def with_attribute() -> torch.Tensor:
    """A tensor that holds an iterator."""
    tensor = torch.ones(1)
    tensor.held = iter([1.0])  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize("make", [lambda: [[iter([1.0])]], with_attribute, lambda: functools.lru_cache(len)])
def test_what_a_cache_comes_to_hold_is_looked_at(make: Callable[[], Any]) -> None:
    """However deep something lies there that nobody can compare, or a cache that may come to hold such."""
    cached = functools.lru_cache(lambda make: make())
    walk = StateWalk(cached)
    cached(lambda: [[1.0]])
    assert not walk.reaches_opaque()
    cached(make)
    assert walk.reaches_opaque()


WEIGHT = nn.Parameter(torch.ones(1))
VALUES: dict[str, tuple[Any, bool]] = {
    "a weight": (WEIGHT, True),
    "a module": (nn.ReLU(), True),
    "nested lists": ([[[[WEIGHT]]]], True),
    "an object": (Box(k=WEIGHT), True),
    "a list": ([], True),
    "a text": ("text", False),
    "a number": (2.5, False),
}
PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "attribute": lambda held, value: setattr(held, "k", value),
    "entry": lambda held, value: held.many.append(value),
    "first entry": lambda held, value: held.none.update(key=value),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("value", "is_noticed"), VALUES.values(), ids=VALUES)
def test_what_may_train_in_the_place_of_a_constant_is_noticed(place: str, value: Any, is_noticed: bool) -> None:
    """By a guard of what is reached; further constants tell nothing."""
    held = Box(k=None, many=[1, 2], none={}, layer=nn.ReLU())
    guard = StateGuard([held], by_names=True)
    assert guard.holds()
    PLACES[place](held, value)
    assert guard.holds() is not is_noticed


def test_another_module_in_the_place_of_one_is_noticed() -> None:
    """So is another tensor."""
    held = Box(layer=nn.ReLU(), weight=torch.ones(1))
    for value in (nn.ReLU(), torch.ones(1)):
        for name in vars(held):
            guard = StateGuard([held], by_names=True)
            assert guard.holds()
            setattr(held, name, value)
            assert not guard.holds()


def test_further_results_of_a_cache_tell_nothing() -> None:
    """Results that are no longer there do, though others are in their places."""
    cached = functools.lru_cache(lambda _: object())
    cached(1)
    holds = Results(cached)
    for key in (1, 2, 2, 3):
        cached(key)
        assert holds()
    cached.cache_clear()
    assert not holds()
    for key in (1, 2, 3):
        cached(key)
        assert not holds()
