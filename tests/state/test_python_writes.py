"""Python state that a callable changes is refused, and a failed capture leaves it as one execution does."""

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphdispatch import Reason, graphed
from graphdispatch.state.trace import CodeTrace
from graphdispatch.state.walk import StateWalk

from ..helpers import AT_ONCE
from ..python_objects import Box, Slotted, served


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


class Layer:
    """One layer of a cache, as a plain object."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None

    def update(self, k: torch.Tensor) -> torch.Tensor:
        """Append, and give all of it."""
        self.keys = k if self.keys is None else torch.cat([self.keys, k], 0)
        return self.keys


class Cache:
    """A list of layers that grows, as ``DynamicCache`` does."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []

    def update(self, k: torch.Tensor) -> torch.Tensor:
        """Append to the first layer."""
        if not self.layers:
            self.layers.append(Layer())
        return self.layers[0].update(k)


class Set:
    """Has a property with a setter."""

    def __init__(self) -> None:
        self._held: Any = None

    @property
    def held(self) -> Any:
        """What was set."""
        return self._held

    @held.setter
    def held(self, value: Any) -> None:
        self._held = value


def _write(act: Callable[[Any, torch.Tensor], Any], **attributes: Any) -> Callable[[], tuple[Any, Any]]:
    """A callable that does something to an object, and what reads how often it was done."""

    def make() -> tuple[Any, Any]:
        owner = Box(**{name: value() for name, value in attributes.items()})

        def fn(x: torch.Tensor) -> torch.Tensor:
            act(owner, x)
            return x * 2

        return fn, owner

    return make


def _count_in_class(owner: Any, x: torch.Tensor) -> None:
    type(owner.inner).number = getattr(type(owner.inner), "number", 0) + 1


class Hooked(nn.Module):
    """Its hook keeps features."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.features: dict[str, Any] = {}
        self.inner.register_forward_hook(lambda module, args, output: self.features.__setitem__("h", output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice what is positive."""
        return self.inner(x) * 2


def _hook_that_writes() -> tuple[Any, Any]:
    model = Hooked(nn.ReLU()).eval()
    return model, model


def _hook_that_keeps_the_input() -> tuple[Any, Any]:
    model = Hooked(nn.Identity()).eval()
    return model, model


def _nonlocal_counter() -> tuple[Any, Any]:
    count = 0

    def fn(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return x * count

    return fn, None


WRITES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "cache of objects": _write(lambda o, x: o.cache.update(x[:1]), cache=Cache),
    "attribute of an entry": _write(lambda o, x: setattr(o.caches[0], "k", x[:1] * 1), caches=lambda: [Box(k=None)]),
    "written and never read": _write(lambda o, x: setattr(o.context, "hidden", x * 1), context=Box),
    "class attribute": _write(_count_in_class, inner=lambda: type("Inner", (Box,), {"__module__": __name__})()),
    "setter": _write(lambda o, x: setattr(o.inner, "held", x * 1), inner=Set),
    "slot": _write(lambda o, x: setattr(o.inner, "k", x * 1), inner=lambda: Slotted(None)),
    "gradient": _write(lambda o, x: setattr(o.w, "grad", x[0] * 1), w=lambda: nn.Parameter(torch.ones(3))),
    "attribute of a tensor": _write(lambda o, x: setattr(o.w, "tag", x[0] * 1), w=lambda: torch.ones(3)),
    "hook": _hook_that_writes,
    "hook that keeps the input": _hook_that_keeps_the_input,
    "counter in a closure": _nonlocal_counter,
    "list in a list": _write(lambda o, x: o.a[0].append(1), a=lambda: [[]]),
    "dict": _write(lambda o, x: o.a.update(n=len(o.a), **{str(len(o.a)): 1}), a=dict),
    "set": _write(lambda o, x: o.a.add(len(o.a)), a=set),
    "array": _write(lambda o, x: o.a.__iadd__(1), a=lambda: np.zeros(2)),
    "bytes": _write(lambda o, x: o.a.append(1), a=bytearray),
}


@pytest.mark.parametrize("make", WRITES.values(), ids=WRITES.keys())
def test_what_is_changed_is_refused(make: Callable[[], tuple[Any, Any]]) -> None:
    """With the reason, after one run of the callable: an attempt to capture leaves nothing behind."""
    fn, _ = make()
    step = served(fn)
    for _ in range(5):
        step(torch.ones(4, 3))
        assert not step.last_decision.reason.is_graph
    assert step.stats.capture_failures
    assert step.stats.reasons[Reason.STATE_REBOUND]


class Decoder(nn.Module):
    """Appends the first row of each call to its cache, and answers with how many rows that has."""

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.cache = cache

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The number of rows."""
        return x * 0 + len(self.cache.update(x[:1]))


CACHES: dict[str, Callable[[Cache], Callable[..., Any]]] = {
    "closure": lambda cache: lambda x: x * 0 + len(cache.update(x[:1])),
    "module": lambda cache: Decoder(cache).eval(),
    "in a module": lambda cache: nn.Sequential(nn.Identity(), Decoder(cache)).eval(),
}


@pytest.mark.parametrize("seen", [0, 1], ids=["empty", "begun"])
@pytest.mark.parametrize("hold", CACHES.values(), ids=CACHES.keys())
def test_failed_captures_leave_python_as_it_is(hold: Callable[[Cache], Callable[..., Any]], seen: int) -> None:
    """Six calls that each append to a cache of plain objects give what eager gives."""
    cache = Cache()
    for _ in range(seen):
        cache.update(torch.ones(1, 3))
    fn = hold(cache)
    name = "input" if isinstance(fn, nn.Sequential) else "x"
    step = graphed(fn, dynamic={name: 0}, sizes=(4,))
    answers = [int(step(torch.ones(4, 3))[0, 0]) for _ in range(6)]
    assert answers == [seen + n for n in range(1, 7)]
    assert cache.layers[0].keys is not None
    assert len(cache.layers[0].keys) == seen + 6


@pytest.mark.parametrize("make", WRITES.values(), ids=WRITES.keys())
def test_prewarm_leaves_python_as_it_is(make: Callable[[], tuple[Any, Any]]) -> None:
    """The runs for a capture that fails are undone, those of the warm-up included."""
    fn, owner = make()
    before = _picture(owner)
    served(fn).prewarm(torch.ones(4, 3), sizes=(4,))
    assert _picture(owner) == before


def _picture(value: Any, depth: int = 6) -> Any:
    """What an object holds, by value; tensors by identity."""
    if isinstance(value, torch.Tensor):
        return id(value), None if not value.is_leaf else id(value.grad), _picture(vars(value), depth - 1)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _picture(held, depth - 1) for key, held in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_picture(held, depth - 1) for held in value]
    if isinstance(value, Slotted):
        return id(value.k)
    if isinstance(value, (Box, Cache, Layer, Set, Hooked)) and depth:
        return _picture(vars(value), depth - 1), getattr(type(value), "number", None)
    return repr(value)


def _draws(draw: Callable[[], float]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * 2 if draw() < 2 else x


def _steps(iterator: Iterator[Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * float(next(iterator))


UNSEEN: dict[str, Callable[[], Callable[..., Any]]] = {
    "random": lambda: _draws(random.random),
    "own generator of Python": lambda: _draws(random.Random(0).random),
    "numpy.random": lambda: _draws(np.random.random),
    "own generator of NumPy": lambda: _draws(np.random.default_rng(0).random),
    "generator": lambda: _steps(float(n) for n in range(1, 1000)),
    "iterator": lambda: _steps(iter(list(range(1, 1000)))),
}


@pytest.mark.parametrize("make", UNSEEN.values(), ids=UNSEEN.keys())
def test_draws_and_steps_are_refused(make: Callable[[], Callable[..., Any]]) -> None:
    """A number that Python or NumPy draws, and what an iterator gives next, differ from call to call."""
    step = served(make())
    for _ in range(4):
        step(torch.ones(4, 3))
        assert not step.last_decision.reason.is_graph
    assert step.stats.reasons[Reason.STATE_UNSEEN]


def test_an_iterator_moves_once_for_each_call() -> None:
    """The refusal comes before a second run."""
    step = served(_steps(iter(list(range(1, 1000)))))
    answers = [float(step(torch.ones(1, 1))[0]) for _ in range(5)]
    assert answers == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_the_default_generator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callable that draws nothing never has it set, so that no other thread draws the same numbers twice."""
    weight = torch.ones(3)
    step = served(lambda x: (x * weight).relu())
    states: list[Any] = []
    for owner, name in ((torch, "set_rng_state"), (torch.random, "set_rng_state")):
        monkeypatch.setattr(owner, name, states.append)
    default, before = torch.default_generator, torch.get_rng_state()
    for rows in (1, 4, 2, 4, 3):
        step(torch.ones(rows, 3))
    step.prewarm(torch.ones(4, 3), sizes=(4,))
    assert step.stats.captures
    assert not states
    assert torch.equal(default.get_state(), before)


class Engine:
    """Serves steps, and has a queue that other threads fill."""

    def __init__(self) -> None:
        self.queue: list[int] = []
        self.busy = False

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.busy = True
        y = x + len(x) if len(x) < 4 else x + x.sum().item()
        self.busy = False
        return y


def test_environment_variables_that_a_call_sets_are_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a call is refused, and each call sets them once."""
    monkeypatch.setenv("GD_TURNS", "0")

    def fn(x: torch.Tensor) -> torch.Tensor:
        os.environ["GD_TURNS"] = str(int(os.environ["GD_TURNS"]) + 1)
        return x * 2

    step = graphed(fn, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    with torch.no_grad():
        for _ in range(3):
            step(torch.randn(3, 3))
    assert os.environ["GD_TURNS"] == "3"
    assert set(step.stats.reasons) == {Reason.STATE_REBOUND}


def test_what_another_thread_changes_meanwhile_stays() -> None:
    """A capture that fails half-way puts back what the callable's code names, and nothing that only others change."""
    engine = Engine()
    step = graphed(engine.step, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    with torch.no_grad():
        step(torch.randn(3, 3))
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.CAPTURE_UNSAFE
    assert not engine.busy
    walk = StateWalk(engine.step)
    with CodeTrace(walk) as trace:
        engine.step(torch.randn(3, 3))
    engine.busy = True
    engine.queue.append(1)  # by another thread
    walk.restore(names=trace.touched)
    assert not engine.busy
    assert engine.queue == [1]
