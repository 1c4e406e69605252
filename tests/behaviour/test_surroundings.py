"""What happens around a served callable: copies, pickles, forks, odd objects, static outputs."""

import contextlib
import copy
import gc
import os
import pickle
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

import graphdispatch as gd

from ..helpers import Seen, in_threads
from .features import needs
from .forks import all_locks_held, in_child
from .front_end import FrontEnd, Open, one_tensor


def twin_of(step: FrontEnd, made: Any, fn: Callable[..., Any]) -> FrontEnd:
    """The same adapter around another object of the same kind, which serves ``fn``."""
    twin = copy.copy(step)
    twin.front, twin.fn = made, fn
    return twin


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "copy"])
def test_copied_with_its_model(settled: Open, how: str) -> None:
    """A copy of what holds a served callable serves the copied model, from the beginning, and this one goes on. A
    shallow copy serves the same callable by graphs of its own. What cannot be copied says so."""
    model = torch.nn.Linear(3, 3).eval()
    step = settled(model, dynamic={"input": 0})
    front = next(iter(step.entries.values())) if step.name == "entry" else step.front
    hits = step.hits
    held = {"model": model, "front": front, "again": front}

    def copied() -> Any:
        if how == "copy":
            again = copy.copy(front)
            return {"model": model, "front": again, "again": again}
        return copy.deepcopy(held) if how == "deepcopy" else pickle.loads(pickle.dumps(held))

    if step.name == "entry":
        with pytest.raises(gd.errors.CopyError, match="CUDAGraphEntry"):
            copied()
        return
    other = copied()
    assert other["front"] is other["again"]
    assert other["front"] is not front
    if how != "copy":
        other["model"].weight.mul_(2)
    twin = twin_of(step, other["front"], other["model"])
    for rows in (3, 4, 3, 4, 3):
        x = torch.randn(rows, 3)
        assert torch.allclose(twin(x), other["model"](x))
        assert torch.allclose(step(x), model(x))
    assert step.hits > hits


def test_fork_while_locks_are_held(settled: Open) -> None:
    """A child that was forked while other threads held all locks serves, by its graphs or eagerly."""
    step = settled(torch.nn.Linear(3, 3).eval(), dynamic={"input": 0})

    def serve() -> None:
        for rows in (3, 4, 1, 9, 3):
            x = torch.randn(rows, 3)
            assert torch.allclose(step(x), step.fn(x))

    with all_locks_held():
        in_child(serve)
    serve()


def test_fork_while_a_thread_captures(opened: Open) -> None:
    """A child that was forked in the middle of another thread's capture serves and captures."""
    inside, go_on, parent = threading.Event(), threading.Event(), os.getpid()

    def fn(x: torch.Tensor) -> torch.Tensor:
        if os.getpid() == parent:
            inside.set()
            go_on.wait()
        return x * 2

    step = opened(fn)

    def serve() -> None:
        assert gc.isenabled()
        with contextlib.suppress(gd.errors.BackendError):  # a stream's thread stayed in the parent
            step.settle(one_tensor)
        step.check_calls(3, fn=lambda x: x * 2)

    def fork() -> None:
        assert inside.wait(60)
        try:
            in_child(serve)
        finally:
            go_on.set()

    in_threads(lambda: step.settle(one_tensor), fork)


# Objects that answer wrongly, or not at all, to what Python asks objects in general.


def fails(self: Any, *args: Any) -> Any:
    """A method that raises."""
    raise ValueError("odd")


def has_no_key(self: Any, *args: Any) -> Any:
    """A method that raises what looks like a missing key."""
    raise KeyError("odd")


_METHODS: dict[str, dict[str, Any]] = {
    "EqRaises": {"__eq__": fails, "__hash__": None},
    "EqArray": {"__eq__": lambda self, other: np.array([True, False]), "__hash__": object.__hash__},
    "EqTensor": {"__eq__": lambda self, other: torch.ones(3), "__hash__": object.__hash__},
    "BoolRaises": {"__bool__": fails},
    "LenLies": {"__len__": lambda self: 5, "__iter__": lambda self: iter(())},
    "LenRaises": {"__len__": fails},
    "GetattrKey": {"__getattr__": has_no_key},
    "GetattrAnything": {"__getattr__": lambda self, name: self},
    "ReprRaises": {"__repr__": fails},
    "HashRaises": {"__hash__": fails},
    "ClassLies": {"__class__": property(lambda self: torch.Tensor)},
    "ClassRaises": {"__class__": property(has_no_key)},
}
_PLAIN = {name: type(name, (), methods) for name, methods in _METHODS.items()}
_NUMBER = {"__eq__": fails, "__ne__": fails, "__repr__": fails, "__hash__": int.__hash__}


class OddMember(Enum):
    ONE = 1
    __eq__ = fails

    def __hash__(self) -> int:
        return 3


class OddDict(dict[str, Any]):
    __eq__, __getattr__ = fails, has_no_key  # type: ignore[assignment]


ODD: dict[str, Callable[[], Any]] = {
    **_PLAIN,
    "OddNumber": lambda: type("OddNumber", (int,), _NUMBER)(3),
    "OddMember": lambda: OddMember.ONE,
    "OddDict": lambda: OddDict(a=1),
    "array": lambda: np.ones(3),
}
"""How to make each of them, by name."""
_CALLED = {"GetattrKey": {}, "GetattrAnything": {}, "EqRaises": {}, "LenRaises": {"__bool__": fails}}
ODD_CALLABLES: dict[str, Callable[[], Any]] = {
    name: type(f"Call{name}", (_PLAIN[name],), {"__call__": lambda self, x: x * 2, **more})
    for name, more in _CALLED.items()
}
"""Callables of the same kinds: each doubles ``x``."""


def called(step: FrontEnd, *more: Any) -> None:
    """Prepare and call a front end of a callable that doubles ``x``; every answer is right."""
    for rows in (3, 4):
        step.prepare(torch.randn(rows, 3), *more)
    for rows in (3, 4, 3, 4, 3, 3):
        x = torch.randn(rows, 3)
        answer = step(x, *more)
        assert torch.equal(answer[0] if isinstance(answer, tuple) else answer, x * 2)
        step.explanation(x, *more)


@pytest.mark.parametrize("kind", sorted(set(ODD) - {"ClassRaises"}))
def test_odd_object_held(opened: Open, kind: str) -> None:
    """The callable holds an object that cannot be compared, printed or measured: it is served, or runs."""
    thing = ODD[kind]()
    called(opened(lambda x, kept=thing: x * 2, dynamic={"x": 0}))


@pytest.mark.parametrize("kind", ODD)
@needs("constants")
def test_odd_object_passed(opened: Open, kind: str) -> None:
    """Such an object is an argument: the call runs eagerly, and no method of the object is called."""
    called(opened(lambda x, y: x * 2), ODD[kind]())
    called(opened(lambda x, y: x * 2), [ODD[kind]()])


@pytest.mark.parametrize("kind", sorted(set(ODD) - {"ClassRaises"}))
def test_odd_object_returned(opened: Open, kind: str) -> None:
    """Such an object is an output beside a tensor: the same one each time, or a new one."""
    thing, make = ODD[kind](), ODD[kind]
    called(opened(lambda x: (x * 2, thing)))
    called(opened(lambda x: (x * 2, make())))


@pytest.mark.parametrize("kind", ODD_CALLABLES)
def test_odd_callable(opened: Open, kind: str) -> None:
    """The callable itself is such an object."""
    called(opened(ODD_CALLABLES[kind]()))


def test_static_outputs_stay_where_they_are(opened: Open) -> None:
    """With ``outputs="static"`` each call answers in the same tensors: one that captures or compares, too. A cache that
    the callable returns is given itself."""
    count, cache = torch.zeros(1), torch.zeros(4, 3)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]:
        count.add_(1)
        return x * count, x.sum(1), 5, cache.add_(1)

    step = opened(fn, outputs="static")
    step.prepare(torch.randn(4, 3))
    places = set()
    for calls in range(1, 6):
        x = torch.randn(4, 3)
        first, second, five, kept = step(x)
        assert torch.equal(first, x * calls)
        assert torch.equal(second, x.sum(1))
        assert (five, float(cache[0, 0]), kept.data_ptr()) == (5, calls, cache.data_ptr())
        places.add((first.data_ptr(), second.data_ptr()))
    assert step.was_hit()
    assert len(places) == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_around(settled: Open) -> None:
    """``torch.compile`` around a served callable compiles what is around it, and nothing inside."""
    step, seen = settled(lambda x: x * 2), Seen()
    plain = step.plain
    compiled = torch.compile(lambda x: plain(x - 1) - 1, backend=seen)
    hits = step.hits
    for rows in (3, 4, 3, 4):
        x = torch.randn(rows, 3)
        assert torch.equal(compiled(x), (x - 1) * 2 - 1)
    assert step.hits == hits + 4
    assert {name.partition("_")[0] for name in seen.operators} <= {"sub"}
