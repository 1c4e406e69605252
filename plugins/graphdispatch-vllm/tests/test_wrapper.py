"""The wrapper of FULL graphs: what the warm-up compares, and with what."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM; make vllm-test makes an environment that has it")

from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, override_forward_context

from graphdispatch.runtime.ranks import Ranks
from graphdispatch_vllm import engine, wrapper
from graphdispatch_vllm.core import Reason
from graphdispatch_vllm.platform import GraphCpuPlatform
from graphdispatch_vllm.steps import Schedule, Schedules
from graphdispatch_vllm.wrapper import StaticGraphWrapper

from .test_steps import context

INPUTS = torch.tensor([1.0, 2.0])
"""At the same address in each step, as vLLM's own buffers."""


class TwoGroups(torch.nn.Module):
    """Reads the first number of the schedules of two groups of layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = get_forward_context().attn_metadata
        first, second = (found[layer].scheduler_metadata.view(torch.int64)[0] for layer in "ac")
        return x * first + second


class OneForAll(Schedules):
    """Gives every group the same memory, so that the schedule that is loaded last is the one that all read."""

    def __missing__(self, layer: str) -> Schedule:
        self[layer] = next(iter(self.values()), None) or Schedule()
        return self[layer]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> StaticGraphWrapper:
    """A wrapper of FULL graphs, as vLLM makes it."""
    monkeypatch.setattr(wrapper, "current_platform", GraphCpuPlatform())
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=0, block_size=4))
    return StaticGraphWrapper(TwoGroups(), config, CUDAGraphMode.FULL)


def serve(full: StaticGraphWrapper, *numbers: tuple[int, int]) -> list[float]:
    """One step, by vLLM's own context for it."""
    with override_forward_context(context(2, [5, 6], *numbers, layers=("ab", "c"))):
        return list(full(INPUTS).tolist())


def warm_up(full: StaticGraphWrapper) -> None:
    """The steps of a warm-up: a capture, a comparison, and a replay."""
    set_cudagraph_capturing_enabled(True)
    try:
        for round_ in range(3):
            assert serve(full, (3 + round_, 0), (10, 0)) == [13.0 + round_, 16.0 + 2 * round_]
    finally:
        set_cudagraph_capturing_enabled(False)


def test_after_the_warm_up_each_group_reads_its_own_schedule(full: StaticGraphWrapper) -> None:
    """A replay gives what the metadata of its step says."""
    warm_up(full)
    assert serve(full, (2, 0), (5, 0)) == [7.0, 9.0]
    assert full.why_eager is None
    assert full.get_stats().graphs == 1


def test_metadata_that_a_graph_reads_wrongly_fails_the_comparison(
    full: StaticGraphWrapper, caplog: pytest.LogCaptureFixture
) -> None:
    """Eager by vLLM's own metadata does not read the memory that is in question. Its values are the answers, no graph
    is kept, and the log says why."""
    full._schedules = OneForAll()
    with caplog.at_level(logging.WARNING):
        warm_up(full)
    assert serve(full, (2, 0), (5, 0)) == [7.0, 9.0]
    assert full.why_eager is Reason.VERIFICATION_FAILED
    assert full.get_stats().graphs == 0
    assert "a FULL step ran eagerly: the graph's result differed from eager's" in caplog.text


def test_a_wrapper_whose_graphs_were_cleared_captures_anew(full: StaticGraphWrapper) -> None:
    """The fault may be gone with them."""
    full._schedules = OneForAll()
    warm_up(full)
    full._schedules = Schedules()
    full.clear_graphs()
    warm_up(full)
    assert full.get_stats().graphs == 1


def test_a_graph_that_another_rank_refuses_is_none(full: StaticGraphWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the other rank stops behind its eager run, this one makes no further run, and gives its reason. After the
    warm-up ranks agree on nothing."""
    refused: list[int] = []
    Ranks(lambda numbers: refused.extend(numbers) or numbers).end(Reason.STATE_UNSEEN, is_good=False)
    said: list[list[int]] = []

    def vote(votes: list[torch.Tensor], op: Any) -> SimpleNamespace:
        said.append(votes[0].tolist())
        if len(said) == 3:  # the metadata is loaded, and a capture is wanted
            torch.minimum(votes[0], torch.tensor(refused), out=votes[0])
        return SimpleNamespace(wait=lambda: None)

    group = SimpleNamespace(world_size=2, cpu_group=SimpleNamespace(allreduce=vote))
    monkeypatch.setattr(engine, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(engine, "get_tp_group", lambda: group)
    set_cudagraph_capturing_enabled(True)
    try:
        assert serve(full, (3, 0), (10, 0)) == [13.0, 16.0]
    finally:
        set_cudagraph_capturing_enabled(False)
    assert full.why_eager is Reason.STATE_UNSEEN
    assert full.get_stats().graphs == 0
    assert len(said) == 4  # and whether eager by vLLM's own metadata gave the same
    assert serve(full, (2, 0), (5, 0)) == [7.0, 9.0]
    assert len(said) == 4
