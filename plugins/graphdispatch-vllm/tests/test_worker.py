"""The warm-up of the CPU's model runner: which graphs are kept."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM; make vllm-test makes an environment that has it")

from vllm.compilation import monitor
from vllm.config import CUDAGraphMode as Mode

from graphdispatch_vllm import engine, worker
from graphdispatch_vllm.core import Reason
from graphdispatch_vllm.dispatcher import CudagraphDispatcher

from .test_decisions import SIZES, config


def test_a_graph_that_another_rank_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again, and then its steps are padded to the next size on all ranks; nothing is captured later."""
    runner: Any = worker.GraphCpuModelRunner.__new__(worker.GraphCpuModelRunner)
    both = config(Mode.FULL, SIZES, 64)
    runner.compilation_config, runner.lora_config = both.compilation_config, None
    runner.load_config = SimpleNamespace(use_tqdm_on_load=False)
    runner.model_config, runner.attn_groups = SimpleNamespace(max_model_len=128), []
    runner.cudagraph_dispatcher = CudagraphDispatcher(both)
    runner.cudagraph_dispatcher.initialize_cudagraph_keys(Mode.FULL)
    ran: list[int] = []

    def run(tokens: int, mode: Mode, **how: Any) -> None:
        assert monitor.cudagraph_capturing_enabled
        assert mode is Mode.FULL
        ran.append(tokens)

    def vote(votes: list[torch.Tensor], op: Any) -> SimpleNamespace:
        votes[0] *= ran[-1] != 16
        return SimpleNamespace(wait=lambda: None)

    group = SimpleNamespace(world_size=2, cpu_group=SimpleNamespace(allreduce=vote))
    monkeypatch.setattr(engine, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(engine, "get_tp_group", lambda: group)
    for name, stand_in in {"_dummy_run": run, "_fill_buffers": lambda step: None}.items():
        monkeypatch.setattr(runner, name, stand_in, raising=False)
    monkeypatch.setattr(runner, "maybe_remove_all_loras", lambda config: None, raising=False)
    runner.model = torch.nn.Linear(1, 1)
    assert runner.capture_model() == 0
    assert not monitor.cudagraph_capturing_enabled
    assert {size: ran.count(size) for size in SIZES} == {size: 6 if size == 16 else 3 for size in SIZES}
    assert runner.cudagraph_dispatcher.dispatch(16)[1].num_tokens == 24
    assert runner.why_eager() is None
    runner.cudagraph_dispatcher.dispatch(65)
    assert runner.why_eager() is Reason.ABOVE_LARGEST_SIZE


def test_a_reload_that_fails_leaves_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs read the memory of the old weights, of which some may be replaced."""
    runner: Any = worker.GraphCpuModelRunner.__new__(worker.GraphCpuModelRunner)
    happened: list[str] = []

    def fail(*args: Any, **kwargs: Any) -> None:
        happened.append("reload")
        raise ValueError("a weight is missing")

    monkeypatch.setattr(worker.CPUModelRunner, "reload_weights", fail)
    monkeypatch.setattr(worker.StaticGraphWrapper, "clear_all_graphs", lambda: happened.append("clear"))
    with pytest.raises(ValueError, match="a weight is missing"):
        runner.reload_weights()
    assert happened[0] == "clear"
