"""Mistakes in arguments of public methods: one line that names the argument, before anything has happened."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch import CUDAGraphMode
from graphdispatch.engines import BatchDescriptor, DispatchKey

from ..helpers import AT_ONCE

KEY = DispatchKey(3, 3)
FULL = CUDAGraphMode.FULL


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def double(x: torch.Tensor) -> torch.Tensor:
    """A callable."""
    return x * 2


X = torch.ones(3, 3)


def served() -> Any:
    """A graphed callable with a graph."""
    step = gd.graphed(double, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    for rows in (3, 4, 3):
        step(torch.ones(rows, 3))
    return step


def wrapper() -> Any:
    """A wrapper."""
    return gd.CUDAGraphWrapper(double)


def manager() -> Any:
    """A manager."""
    return gd.CUDAGraphManager(gd.CUDAGraphConfig(capture_sizes=(4,), max_batch_size=4))


def streams() -> Any:
    """A dispatcher over one stream."""
    return gd.StreamDispatcher(double, 1)


def dispatcher() -> Any:
    """A dispatcher."""
    return gd.CudagraphDispatcher(double)


def composite() -> Any:
    """A composite with one member."""
    one = gd.CompositeDispatcher()
    one.add_dispatcher("a", dispatcher())
    return one


MISTAKES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "prewarm sizes a number": (served, lambda s: s.prewarm(X, sizes=3), "sizes"),
    "prewarm sizes text": (served, lambda s: s.prewarm(X, sizes="12"), "sizes must be several"),
    "prewarm sizes bytes": (served, lambda s: s.prewarm(X, sizes=b"12"), "sizes must be several"),
    "prewarm sizes a mapping": (served, lambda s: s.prewarm(X, sizes={4: 1}), "sizes"),
    "prewarm sizes a tensor": (served, lambda s: s.prewarm(X, sizes=torch.tensor([4])), "sizes"),
    "prewarm sizes true": (served, lambda s: s.prewarm(X, sizes=[True]), "sizes"),
    "estimate sizes a number": (served, lambda s: s.estimate_memory(X, sizes=3), "sizes"),
    "estimate sizes text": (served, lambda s: s.estimate_memory(X, sizes="4"), "sizes must be several"),
    "use_sizes a number": (served, lambda s: s.use_sizes(3), "sizes"),
    "capture_size text": (served, lambda s: s.capture_size("4"), "size"),
    "invalidate a number": (served, lambda s: s.invalidate(3), "tag"),
    "invalidate nothing": (served, lambda s: s.invalidate(None), "tag"),
    "sleep a list": (served, lambda s: s.sleep(["x"]), "tag"),
    "entry inputs": (lambda: served().entries[0], lambda e: e.replay([X]), "inputs"),
    "wrapper invalidate": (wrapper, lambda w: w.invalidate(3), "tag"),
    "wrapper descriptor a list": (
        wrapper, lambda w: w(X, batch_descriptor=[3], cudagraph_runtime_mode=FULL), "batch_descriptor",
    ),
    "wrapper variant a list": (
        wrapper,
        lambda w: w(X, batch_descriptor=BatchDescriptor(3, variant=[]), cudagraph_runtime_mode=FULL),  # type: ignore[arg-type]
        "batch_descriptor",
    ),
    "wrapper get_entry": (wrapper, lambda w: w.get_entry([3]), "descriptor"),
    "wrapper budget": (wrapper, lambda w: gd.CUDAGraphWrapper(double, options=gd.CUDAGraphOptions(budget=3)), "budget"),  # type: ignore[arg-type]
    "wrapper backend": (wrapper, lambda w: gd.CUDAGraphWrapper(double, backend="cpu", pool=3), "backend"),  # type: ignore[arg-type]
    "manager tag": (manager, lambda m: m.invalidate(3), "tag"),
    "manager sleep tag": (manager, lambda m: m.sleep(None), "tag"),
    "manager names": (manager, lambda m: m.execute_or_capture(3, 1, double, {3: X}), "name of an input"),
    "manager dynamic a number": (
        manager, lambda m: m.execute_or_capture(3, 1, double, {"x": X}, dynamic=3), "dynamic",
    ),
    "manager dynamic a list": (
        manager, lambda m: m.capture_graph(3, 1, double, inputs={"x": X}, dynamic=["x"]), "dynamic",
    ),
    "manager dynamic text": (
        manager, lambda m: m.execute_or_capture(3, 1, double, {"x": X}, dynamic={"x": "a"}), "dynamic",
    ),
    "manager dtypes": (manager, lambda m: m.capture_graph(3, 1, double, {"x": (3, 3)}, dtypes=3), "dtypes"),
    "manager a dtype": (manager, lambda m: m.capture_graph(3, 1, double, {"x": (3, 3)}, dtypes={"x": "f"}), "dtypes"),
    "registry size": (manager, lambda m: m.registry.capture(3, 1, double, inputs={"x": X}, size="3"), "size"),
    "registry seq_len": (manager, lambda m: m.registry.capture(3, None, double, inputs={"x": X}), "seq_len"),
    "registry mode": (manager, lambda m: m.registry.capture(3, 1, double, inputs={"x": X}, mode="x"), "mode"),
    "dispatch key": (dispatcher, lambda d: d.dispatch([1], X), "key"),
    "has_graph key": (dispatcher, lambda d: d.has_graph([1]), "key"),
    "get_entry mode": (dispatcher, lambda d: d.get_entry(KEY, 3), "mode"),
    "explain key": (dispatcher, lambda d: d.explain({}, X), "key"),
    "run_eagerly key": (dispatcher, lambda d: d.run_eagerly(3, gd.Reason.POLICY, (X,), {}), "key"),
    "streams args": (streams, lambda s: s.capture(KEY, 3), "args"),
    "streams kwargs": (streams, lambda s: s.capture(KEY, (X,), 3), "kwargs"),
    "streams workers": (streams, lambda s: s.capture(KEY, (X,), workers=3), "workers"),
    "streams key": (streams, lambda s: s.capture(None, (X,)), "key"),
    "composite key": (composite, lambda c: c.dispatch(3, X), "key"),
    "composite accepts": (composite, lambda c: c.add_dispatcher("b", dispatcher(), accepts=3), "accepts"),
    "composite seconds": (composite, lambda c: gd.CompositeDispatcher(backoff_s="a"), "backoff_s"),  # type: ignore[arg-type]
    "composite clock": (composite, lambda c: gd.CompositeDispatcher(clock=3), "clock"),  # type: ignore[arg-type]
    "composite on_evict": (composite, lambda c: gd.CompositeDispatcher(on_evict=3), "on_evict"),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake: str) -> None:
    """A wrong argument is a ``ConfigError`` (``GuardError`` for an input) of one line that names it."""
    make, call, name = MISTAKES[mistake]
    target = make()
    with pytest.raises((gd.ConfigError, gd.errors.GuardError), match=name) as caught:
        call(target)
    assert "\n" not in str(caught.value)


class Unprintable:
    def __repr__(self) -> str:
        raise KeyError("repr")


@pytest.mark.parametrize("mistake", ["tag", "sizes", "fn", "key"])
def test_a_mistake_that_cannot_be_printed(mistake: str) -> None:
    """The message does not depend on the ``repr`` of the user's object."""
    thing: Any = Unprintable()
    calls: dict[str, Callable[[], Any]] = {
        "tag": lambda: served().invalidate(thing),
        "sizes": lambda: served().prewarm(X, sizes=[thing]),
        "fn": lambda: gd.graphed(thing, dynamic={}),
        "key": lambda: dispatcher().dispatch(thing, X),
    }
    with pytest.raises(gd.ConfigError, match="Unprintable"):
        calls[mistake]()
