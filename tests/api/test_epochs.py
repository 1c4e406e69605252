"""``invalidate``, ``sleep`` and ``wake`` at every front end: nothing stale is served, nothing stays behind."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphMode, Graphed, Reason, graphed
from graphdispatch.engines import BatchDescriptor, CUDAGraphConfig, CUDAGraphManager, CUDAGraphWrapper
from graphdispatch.errors import CaptureError
from graphdispatch.stats import EvictionReason

from ..helpers import AT_ONCE


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


class Packed:
    """Keeps packed weights where no guard looks, as kernels do."""

    def __init__(self) -> None:
        self.store = {"deep": {"factor": 2.0}}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.store["deep"]["factor"]


def make() -> tuple[Packed, Graphed[..., Any]]:
    """A callable and its graphed form, warm at two sizes."""
    packed = Packed()
    step = graphed(packed, dynamic={"x": 0}, sizes=(2, 4), options=AT_ONCE)
    for rows in (4, 4, 2, 2):
        step(torch.randn(rows, 3))
    assert len(step.entries) == 2
    return packed, step


def reason(step: Graphed[..., Any]) -> Reason:
    """The reason of the latest call."""
    assert step.last_decision is not None
    return step.last_decision.reason


def test_invalidate_releases_and_captures_anew() -> None:
    """What was frozen is recorded again; the evictions say why and with which tag."""
    packed, step = make()
    packed.store["deep"]["factor"] = 5.0
    step.invalidate("weights of step 7")
    assert step.entries == []
    for _ in range(3):
        x = torch.randn(4, 3)
        assert torch.equal(step(x), x * 5)
    assert reason(step) is Reason.EXACT
    gone = step.stats.last_evictions
    assert [(e.reason, e.tag) for e in gone] == [(EvictionReason.INVALIDATED, "weights of step 7")] * 2


def test_sleep_gives_all_memory_back() -> None:
    """Asleep, calls are eager and nothing is held; awake, sizes are captured as they come."""
    packed, step = make()
    awake = step.memory_bytes
    step.sleep()
    assert step.memory_bytes == 0 < awake
    packed.store["deep"]["factor"] = 7.0
    for _ in range(3):
        x = torch.randn(4, 3)
        assert torch.equal(step(x), x * 7)
        assert reason(step) is Reason.ASLEEP
    assert "wake()" in step.explain(x)
    assert step.entries == []
    step.wake()
    found = []
    for _ in range(3):
        x = torch.randn(3, 3)
        assert torch.allclose(step(x), x * 7)
        found.append(reason(step))
    assert found == [Reason.CAPTURED_NOW, Reason.VERIFIED_NOW, Reason.PADDED]
    assert step.memory_bytes <= awake


def test_weights_may_move_in_sleep() -> None:
    """The usual reason to sleep: weights go away and come back elsewhere."""
    model = torch.nn.Linear(3, 3).eval()
    step = graphed(model, dynamic={"input": 0}, sizes=(4,), options=AT_ONCE)
    for _ in range(3):
        step(torch.randn(4, 3))
    step.sleep("offload")
    model.weight = torch.nn.Parameter(torch.randn(3, 3))
    step.wake()
    for _ in range(3):
        x = torch.randn(4, 3)
        assert torch.equal(step(x), model(x))
    assert reason(step) is Reason.EXACT
    assert step.stats.captures == 2


def test_the_wrapper_sleeps_and_forgets() -> None:
    """The same at the engines' front end."""
    packed = Packed()
    wrapper = CUDAGraphWrapper(packed)
    call = {"batch_descriptor": BatchDescriptor(4), "cudagraph_runtime_mode": CUDAGraphMode.FULL}
    for _ in range(3):
        wrapper(torch.randn(4, 3), **call)
    packed.store["deep"]["factor"] = 5.0
    wrapper.invalidate("reload")
    x = torch.randn(4, 3)
    assert torch.equal(wrapper(x, **call), x * 5)
    wrapper.sleep()
    assert wrapper.get_cached_descriptors() == []
    assert torch.equal(wrapper(x, **call), x * 5)
    assert wrapper.get_stats().reasons[Reason.ASLEEP] == 1
    wrapper.wake()
    for _ in range(3):
        x = torch.randn(4, 3)
        assert torch.equal(wrapper(x, **call), x * 5)
    assert wrapper.get_stats().hits == 2
    assert [e.reason for e in wrapper.get_stats().last_evictions] == [EvictionReason.INVALIDATED, EvictionReason.ASLEEP]


def test_the_manager_sleeps_and_forgets() -> None:
    """The same by batch size and sequence length; an explicit capture says that it is asleep."""
    packed = Packed()
    manager = CUDAGraphManager(CUDAGraphConfig(capture_sizes=(4,), max_batch_size=4, options=AT_ONCE))

    def run(x: torch.Tensor) -> Any:
        return manager.execute_or_capture(len(x), 1, packed, {"x": x})

    for _ in range(3):
        run(torch.randn(4, 3))
    packed.store["deep"]["factor"] = 5.0
    manager.invalidate("reload")
    x = torch.randn(4, 3)
    assert torch.equal(run(x), x * 5)
    manager.sleep()
    assert manager.registry.num_graphs == 0
    assert manager.registry.memory_bytes == 0
    assert torch.equal(run(x), x * 5)
    assert manager.stats.reasons[Reason.ASLEEP] == 1
    with pytest.raises(CaptureError, match=r"wake\(\)"):
        manager.capture_graph(4, 1, packed, inputs={"x": x})
    manager.wake()
    for _ in range(3):
        x = torch.randn(4, 3)
        assert torch.equal(run(x), x * 5)
    assert manager.stats.hits == 2
    assert manager.stats.last_evictions[-1].reason is EvictionReason.ASLEEP
