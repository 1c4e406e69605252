"""Callables without tensor arguments: they read and write buffers that they hold."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Reason
from graphdispatch.engines import BatchDescriptor, DispatchKey

from ..helpers import AT_ONCE


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


class Engine:
    """A runner as engines write it: it fills its buffers, calls a closure without arguments, and reads a result."""

    def __init__(self) -> None:
        self.ids = torch.zeros(4, 3)
        self.logits = torch.zeros(4, 3)
        self.steps = torch.zeros(1)
        self.layer = torch.nn.Linear(3, 3).eval()
        ids, logits, steps, layer = self.ids, self.logits, self.steps, self.layer

        def forward() -> torch.Tensor:
            steps.add_(1)
            logits.copy_(layer(ids) + steps)
            return logits * 2

        self.forward = forward


def graphed(engine: Engine) -> tuple[Callable[[], Any], Callable[[], int]]:
    """``graphed`` with no batch dimension."""
    step = gd.graphed(engine.forward, dynamic={}, options=AT_ONCE)
    return step, lambda: step.stats.hits


def wrapper(engine: Engine, **options: Any) -> tuple[Callable[[], Any], Callable[[], int]]:
    """A wrapper."""
    front_end = gd.CUDAGraphWrapper(engine.forward, options=CUDAGraphOptions(**options))
    call = {"batch_descriptor": BatchDescriptor(4), "cudagraph_runtime_mode": CUDAGraphMode.FULL}
    return lambda: front_end(**call), lambda: front_end.get_stats().hits  # type: ignore[arg-type]


def engine_wrapper(engine: Engine) -> tuple[Callable[[], Any], Callable[[], int]]:
    """A wrapper as engines use it."""
    return wrapper(engine, inputs="static", outputs="static")


def manager(engine: Engine) -> tuple[Callable[[], Any], Callable[[], int]]:
    """A manager, with no inputs."""
    config = gd.CUDAGraphConfig(capture_sizes=(4,), max_batch_size=4, options=AT_ONCE)
    front_end = gd.CUDAGraphManager(config)
    return lambda: front_end.execute_or_capture(4, 1, engine.forward, {}), lambda: front_end.stats.hits


def streams(engine: Engine) -> tuple[Callable[[], Any], Callable[[], int]]:
    """A graph on a stream, captured ahead."""
    front_end = gd.StreamDispatcher(engine.forward, 1)
    front_end.capture(DispatchKey(4, 4))
    return lambda: front_end.dispatch(DispatchKey(4, 4)), lambda: front_end.stats.graph


FRONT_ENDS = {one.__name__: one for one in (graphed, wrapper, engine_wrapper, manager, streams)}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_buffers_are_read_and_written_once_a_call(front_end: str) -> None:
    """Each call reads what the buffers hold now, writes them once, and is served by a graph from the third on."""
    engine = Engine()
    call, hits = FRONT_ENDS[front_end](engine)
    for steps in range(1, 7):
        engine.ids.copy_(torch.randn(4, 3))
        answer = call()
        expected = engine.layer(engine.ids) + steps
        assert engine.steps.item() == steps
        assert torch.equal(engine.logits, expected)
        assert torch.equal(answer, expected * 2)
    assert hits() >= 4


def test_constants_select_the_graph() -> None:
    """``forward_fn(mode)``: each constant has a graph of its own."""
    held = torch.ones(4, 3)
    step = gd.graphed(lambda mode: held * (2 if mode == "two" else 3), dynamic={}, options=AT_ONCE)
    for number in range(8):
        held.add_(1)
        mode = "two" if number % 2 else "three"
        assert torch.equal(step(mode), held * (2 if number % 2 else 3))
    assert step.stats.hits == 4
    assert len(step.entries) == 2


def test_a_frozen_value_is_found_by_the_second_call() -> None:
    """What the capture froze differs from eager when it is compared again."""
    values = iter(range(100))
    held = torch.ones(3)

    class Odd:
        def __call__(self) -> torch.Tensor:
            return held * torch.from_numpy(__import__("numpy").full(3, float(next(values))))

    step = gd.graphed(Odd(), dynamic={}, options=AT_ONCE)
    for _ in range(4):
        step()
    assert step.stats.hits == 0


def test_a_buffer_that_is_replaced_is_captured_anew() -> None:
    """Replaced buffers are state that moved."""

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ids", torch.ones(4))

        def forward(self) -> torch.Tensor:
            return self.ids * 2

    model = Holder()
    step = gd.graphed(model, dynamic={}, options=AT_ONCE)
    for _ in range(3):
        step()
    model.ids = torch.full((4,), 5.0)
    for _ in range(4):
        assert torch.equal(step(), torch.full((4,), 10.0))
    assert step.stats.hits == 3
    assert step.stats.captures == 2


def test_nothing_to_read_is_refused() -> None:
    """A callable with no tensor among its arguments and in its reach has no device to be captured for."""
    step = gd.graphed(lambda n: n + 1, dynamic={}, options=AT_ONCE)
    assert [step(3), step(3)] == [4, 4]
    assert step.stats.reasons == {Reason.NO_TENSORS: 2}
    padded = gd.graphed(torch.nn.Linear(3, 3), dynamic={"input": 0})
    assert "no argument is a tensor" in padded.explain()
