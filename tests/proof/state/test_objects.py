"""How state is read: tables at one moment, and what lies beside it is no obstacle."""

import copy
import functools
import itertools
import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Annotated, Any, ClassVar
from xml.etree import ElementTree

import pytest
import sympy
import torch
from torch import nn

from graphdispatch import Reason
from graphdispatch.proof.state import objects
from graphdispatch.proof.state.walk import StateWalk
from graphdispatch.runtime.attributes import content

from ...behaviour.cases import Box
from ...helpers import check_rows, in_threads, make, switching_often


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


READS: dict[str, tuple[Callable[[Any], float], Reason]] = {
    "as a whole": (lambda h: vars(h)["scale"], Reason.STATE_UNSEEN),
    "copied": (lambda h: copy.copy(h).scale, Reason.STATE_UNSEEN),
    "by its name": (lambda h: h.scale, Reason.EXACT),
    "an attribute that a generator has, too": (lambda h: h.state, Reason.EXACT),
}


@pytest.mark.parametrize("name", READS)
def test_what_is_not_named_is_no_obstacle(name: str) -> None:
    """An event, a generator and a thread beside what is read: others set the one and draw from the other. Code that
    reads their holder as a whole may use them."""
    unused = {"event": threading.Event(), "random": random.Random(0), "thread": threading.Thread()}
    holder = Box(scale=2.0, state=3.0, **unused)
    number, reason = READS[name]
    step = make(lambda x: x * number(holder), sizes=(4,))
    for _ in range(6):
        check_rows(step, 4)
        holder.random.random()
    assert step.last_decision.reason is reason, step.last_decision


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


class Refusing(torch.Tensor):
    """A tensor that takes no function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


NESTED = partial(torch.nested.nested_tensor, [torch.ones(2), torch.ones(3)])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("held", [NESTED, partial(nn.LazyLinear, 2), partial(Refusing, torch.ones(3))])
def test_what_a_model_holds_unused_is_no_obstacle(held: Callable[[], Any]) -> None:
    """Tensors without sizes, without memory yet, or that refuse functions."""
    model = nn.ReLU().eval()
    model.held = held()
    assert check_rows(make(model, dynamic={"input": 0}), 4, 4, 4)[-1] is Reason.EXACT


@pytest.mark.parametrize("folder", ["networkx", "jinja2", "triton"])
def test_code_in_a_folder_of_a_librarys_name_is_the_users(folder: str) -> None:
    """What it reads is compared: the library is where its package was loaded from."""
    module = ModuleType("users_model")
    module.__file__ = f"/home/{folder}/model.py"
    exec(compile("K = 2.0\ndef scaled(x): return x * K", module.__file__, "exec"), vars(module))
    step = make(module.scaled)
    check_rows(step, 4, 4, 4)
    assert step.stats.hits
    module.K = 5.0
    check_rows(step, 4, 4)
