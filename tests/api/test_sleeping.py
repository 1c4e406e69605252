"""``sleep``, ``wake`` and what is asked for in between, behind each front end that has them."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch import CUDAGraphMode
from graphdispatch.capture.attempt import CaptureAttempt
from graphdispatch.engines import BatchDescriptor

from ..helpers import AT_ONCE

SIZE = 4


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


class Sleeper:
    """One module behind a front end that sleeps."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.model = torch.nn.Linear(3, 3).eval()
        self.x = torch.randn(SIZE, 3)
        if kind == "graphed":
            self.front_end: Any = gd.graphed(self.model, dynamic={"input": 0}, sizes=(SIZE,), options=AT_ONCE)
        elif kind == "manager":
            config = gd.CUDAGraphConfig(capture_sizes=(SIZE,), max_batch_size=SIZE, options=AT_ONCE)
            self.front_end = gd.CUDAGraphManager(config)
        else:
            wrapper = gd.CUDAGraphWrapper if kind == "wrapper" else gd.AdaptiveCUDAGraphWrapper
            self.front_end = wrapper(self.model)

    def __call__(self) -> torch.Tensor:
        x = torch.randn(SIZE, 3)
        answer = self.serve(x)
        assert torch.equal(answer, self.model(x))
        return answer

    def serve(self, x: torch.Tensor) -> Any:
        if self.kind == "graphed":
            return self.front_end(x)
        if self.kind == "manager":
            return self.front_end.execute_or_capture(SIZE, 1, self.model, {"input": x})
        mode = CUDAGraphMode.FULL
        return self.front_end(x, batch_descriptor=BatchDescriptor(SIZE), cudagraph_runtime_mode=mode)

    def settle(self) -> "Sleeper":
        for _ in range(3):
            self()
        assert self.graphs == 1
        return self

    @property
    def graphs(self) -> int:
        if self.kind == "manager":
            return self.front_end.registry.num_graphs
        return len(self.front_end._graphs.cache)

    def capture_ahead(self) -> list[Callable[[], Any]]:
        """Everything that captures on purpose."""
        if self.kind == "graphed":
            return [lambda: self.front_end.prewarm(self.x), lambda: self.front_end.estimate_memory(self.x)]
        if self.kind == "manager":
            example = {"input": self.x}
            return [
                lambda: self.front_end.capture_graph(SIZE, 1, self.model, inputs=example),
                lambda: self.front_end.registry.capture(SIZE, 1, self.model, inputs=example),
            ]
        if self.kind == "adaptive":
            return [lambda: self.front_end.prewarm([SIZE], lambda _: self.x)]
        return []


@pytest.fixture(params=["graphed", "wrapper", "adaptive", "manager"])
def sleeper(request: pytest.FixtureRequest) -> Sleeper:
    """Each front end in turn, with a graph that serves."""
    return Sleeper(request.param).settle()


def test_nothing_is_captured_asleep(sleeper: Sleeper) -> None:
    """Whatever is asked for between ``sleep`` and ``wake``: captures on purpose are refused, and calls run eagerly."""
    sleeper.front_end.sleep()
    for capture in sleeper.capture_ahead():
        with pytest.raises((gd.ConfigError, gd.CaptureError), match=r"wake\(\)"):
            capture()
    for _ in range(4):
        sleeper()
    assert sleeper.graphs == 0
    sleeper.front_end.wake()
    sleeper.settle()


def test_sleeping_twice_and_invalidating_asleep(sleeper: Sleeper) -> None:
    """A second ``sleep`` and an ``invalidate`` in between do no harm and wake nothing; one ``wake`` is enough."""
    sleeper.front_end.sleep("first")
    sleeper.front_end.sleep("second")
    sleeper.front_end.invalidate("weights")
    for _ in range(4):
        sleeper()
    assert sleeper.graphs == 0
    sleeper.front_end.wake()
    sleeper.settle()


@pytest.mark.parametrize("change", ["assigned", "data", "in place", "loaded"])
def test_waking_awake_serves_the_present_weights(sleeper: Sleeper, change: str) -> None:
    """``wake`` without a ``sleep`` before it hides no change of the weights."""
    weight = torch.randn(3, 3)
    if change == "assigned":
        sleeper.model.weight = torch.nn.Parameter(weight)
    elif change == "data":
        sleeper.model.weight.data = weight
    elif change == "in place":
        sleeper.model.weight.copy_(weight)
    else:
        sleeper.model.load_state_dict({"weight": weight, "bias": torch.zeros(3)}, assign=True)
    sleeper.front_end.wake()
    sleeper.settle()


def test_weights_replaced_asleep(sleeper: Sleeper) -> None:
    """Weights that are replaced asleep serve after ``wake``, and those that move again after it too."""
    sleeper.front_end.sleep()
    sleeper.model.weight.data = torch.randn(3, 3)
    sleeper.front_end.wake()
    sleeper.settle()
    sleeper.model.weight.data = torch.randn(3, 3)
    sleeper.front_end.wake()
    sleeper.settle()


def _large(least: int) -> list[torch.Tensor]:
    """The tensors that keep so many bytes or more each."""
    tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    return [one for one in tensors if one.untyped_storage().nbytes() >= least]


@pytest.fixture
def _without_collector() -> Iterator[None]:
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@pytest.mark.usefixtures("_without_collector")
@pytest.mark.parametrize("how", ["sleep", "clear", "invalidate"])
def test_memory_is_given_back_at_once(how: str) -> None:
    """No cycle of objects keeps inputs, outputs or plans until Python's collector runs."""
    width = 20_011
    before = len(_large(SIZE * width * 4))
    step = gd.graphed(lambda x: x.cos() + 1, dynamic={"x": 0}, sizes=(1, SIZE), options=AT_ONCE)
    for rows in (SIZE, SIZE, SIZE, 1, 1, 1, SIZE):
        step(torch.randn(rows, width))
    assert len(_large(SIZE * width * 4)) > before
    getattr(step, how)()
    if how == "invalidate":
        step.sleep()
    assert len(_large(SIZE * width * 4)) == before


@pytest.mark.usefixtures("_without_collector")
def test_a_capture_that_fails_late_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph was made, replayed, and then found to be of no use."""
    made: list[Any] = []

    def judge(_: CaptureAttempt, entry: Any) -> None:
        entry.plan(SIZE).run_in_python(None)
        made.append(weakref.ref(entry))
        raise gd.CaptureError("no use", gd.Reason.NO_GAIN)

    monkeypatch.setattr(CaptureAttempt, "_judge", judge)
    step = gd.graphed(lambda x: x.cos() + 1, dynamic={"x": 0}, sizes=(SIZE,), options=AT_ONCE)
    for _ in range(3):
        step(torch.randn(SIZE, 3))
    assert step.stats.captures == 0
    assert [one() for one in made] == [None]
