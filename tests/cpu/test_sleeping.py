"""``sleep``, ``wake`` and what is asked for in between, behind each door that has them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch import BatchDescriptor, CUDAGraphMode

SIZE = 4


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


class Sleeper:
    """One module behind a door that sleeps."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.model = torch.nn.Linear(3, 3).eval()
        self.x = torch.randn(SIZE, 3)
        if kind == "graphed":
            self.door: Any = gd.graphed(self.model, dynamic={"input": 0}, sizes=(SIZE,), capture_after=1)
        elif kind == "manager":
            config = gd.CUDAGraphConfig(capture_sizes=(SIZE,), max_batch_size=SIZE, capture_after=1)
            self.door = gd.CUDAGraphManager(config)
        else:
            wrapper = gd.CUDAGraphWrapper if kind == "wrapper" else gd.AdaptiveCUDAGraphWrapper
            self.door = wrapper(self.model)

    def __call__(self) -> torch.Tensor:
        x = torch.randn(SIZE, 3)
        answer = self.serve(x)
        assert torch.equal(answer, self.model(x))
        return answer

    def serve(self, x: torch.Tensor) -> Any:
        if self.kind == "graphed":
            return self.door(x)
        if self.kind == "manager":
            return self.door.execute_or_capture(SIZE, 1, self.model, {"input": x})
        mode = CUDAGraphMode.FULL
        return self.door(x, batch_descriptor=BatchDescriptor(SIZE), cudagraph_runtime_mode=mode)

    def settle(self) -> "Sleeper":
        for _ in range(3):
            self()
        assert self.graphs == 1
        return self

    @property
    def graphs(self) -> int:
        if self.kind == "manager":
            return self.door.registry.num_graphs
        return len(self.door._graphs.cache)

    def capture_ahead(self) -> list[Callable[[], Any]]:
        """Everything that captures on purpose."""
        if self.kind == "graphed":
            return [lambda: self.door.prewarm(self.x), lambda: self.door.estimate_memory(self.x)]
        if self.kind == "manager":
            example = {"input": self.x}
            return [
                lambda: self.door.capture_graph(SIZE, 1, self.model, inputs=example),
                lambda: self.door.registry.capture(SIZE, 1, self.model, inputs=example),
            ]
        if self.kind == "adaptive":
            return [lambda: self.door.prewarm([SIZE], lambda _: self.x)]
        return []


@pytest.fixture(params=["graphed", "wrapper", "adaptive", "manager"])
def sleeper(request: pytest.FixtureRequest) -> Sleeper:
    """Each door in turn, with a graph that serves."""
    return Sleeper(request.param).settle()


def test_nothing_is_captured_asleep(sleeper: Sleeper) -> None:
    """Whatever is asked for between ``sleep`` and ``wake``: captures on purpose are refused, and calls run eagerly."""
    sleeper.door.sleep()
    for capture in sleeper.capture_ahead():
        with pytest.raises((gd.ConfigError, gd.CaptureError), match=r"wake\(\)"):
            capture()
    for _ in range(4):
        sleeper()
    assert sleeper.graphs == 0
    sleeper.door.wake()
    sleeper.settle()


def test_sleeping_twice_and_invalidating_asleep(sleeper: Sleeper) -> None:
    """A second ``sleep`` and an ``invalidate`` in between do no harm and wake nothing; one ``wake`` is enough."""
    sleeper.door.sleep("first")
    sleeper.door.sleep("second")
    sleeper.door.invalidate("weights")
    for _ in range(4):
        sleeper()
    assert sleeper.graphs == 0
    sleeper.door.wake()
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
    sleeper.door.wake()
    sleeper.settle()


def test_weights_replaced_asleep(sleeper: Sleeper) -> None:
    """Weights that are replaced asleep serve after ``wake``, and those that move again after it too."""
    sleeper.door.sleep()
    sleeper.model.weight.data = torch.randn(3, 3)
    sleeper.door.wake()
    sleeper.settle()
    sleeper.model.weight.data = torch.randn(3, 3)
    sleeper.door.wake()
    sleeper.settle()
