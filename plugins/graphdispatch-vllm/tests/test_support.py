"""What graphs serve of vLLM, by its own configuration; and that vLLM stays as it is with anything else."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM; make vllm-test makes an environment that has it")

from vllm import platforms
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform

from graphdispatch_vllm.platform import GraphCpuPlatform
from graphdispatch_vllm.support import FREE_OPTIONS

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
}
LLAMA = SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
BERT = SMALL | {"architectures": ["BertModel"], "model_type": "bert"}
QWEN = SMALL | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
NEOX = SMALL | {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}
LATENT = SMALL | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
HYBRID = SMALL | {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1"}
SINKS = SMALL | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 32}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
GRAPHS = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [4, 32]}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is downloaded; what vLLM sets for its processes is taken back."""
    before = dict(os.environ)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    yield
    os.environ.clear()
    os.environ.update(before)


def configure(
    monkeypatch: pytest.MonkeyPatch, place: Path, platform: Platform, model: dict[str, Any] = LLAMA, **options: Any
) -> VllmConfig:
    """The configuration that vLLM makes of options on a platform."""
    monkeypatch.setattr(platforms, "_current_platform", platform)
    (place / "config.json").write_text(json.dumps(model))
    plain = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 16 << 20, "compilation_config": GRAPHS}
    return EngineArgs(model=str(place), skip_tokenizer_init=True, **(plain | options)).create_engine_config()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"enable_prefix_caching": False, "max_num_seqs": 8, "max_num_batched_tokens": 256},
        {"load_format": "dummy", "cudagraph_metrics": True, "seed": 1},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "compilation_config": GRAPHS | {"cudagraph_mode": "FULL", "mode": 0}},
    ],
    ids=str,
)
def test_what_the_tests_run_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, options: dict[str, Any]
) -> None:
    """vLLM keeps the graphs that the user wants, and its worker has them; also when the process of an engine shows the
    platform its configuration once more, with what vLLM has derived."""
    got = configure(monkeypatch, tmp_path, GraphCpuPlatform(), **options)
    check_served(got, options)
    got.cache_config.kv_cache_layout = "LBHNC"
    with caplog.at_level(logging.WARNING):
        got.__post_init__()
    assert GraphCpuPlatform.support_static_graph_mode()
    check_served(got, options)
    assert not [record for record in caplog.records if record.name == "vllm.graphdispatch"]


def check_served(got: VllmConfig, options: dict[str, Any]) -> None:
    """The worker, the graphs and the compiler are those of the options."""
    assert got.parallel_config.worker_cls.endswith(".GraphCpuWorker")
    wanted = options.get("compilation_config", GRAPHS)["cudagraph_mode"]
    assert got.compilation_config.cudagraph_mode == CUDAGraphMode[wanted]
    assert got.compilation_config.cudagraph_capture_sizes == [4, 32]
    is_split = got.compilation_config.mode == CompilationMode.VLLM_COMPILE
    assert is_split == ("PIECEWISE" in wanted)


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (LLAMA, {"enable_lora": True}, "lora_config"),
        (LLAMA, {"runner": "pooling"}, "runner pooling"),
        (BERT, {"runner": "pooling"}, "architecture BertModel"),
        (NEOX, {}, "architecture GPTNeoXForCausalLM"),
        (LATENT, {}, "architecture DeepseekV2ForCausalLM"),
        (HYBRID, {}, "architecture FalconH1ForCausalLM"),
        (SINKS, {}, "architecture GptOssForCausalLM"),
        (QWEN, {"tensor_parallel_size": 2}, "architecture in parallel Qwen2ForCausalLM"),
        (LLAMA, {"dtype": "bfloat16", "data_parallel_size": 2}, "dtype of pieces in parallel bfloat16"),
        (LLAMA, {"dtype": "float16"}, "dtype float16"),
        (LLAMA, {"pipeline_parallel_size": 2}, "parallel_config.pipeline_parallel_size=2"),
        (LLAMA, {"speculative_config": DRAFTS}, "speculative_config"),
        (LLAMA, {"kv_cache_dtype": "fp8"}, "cache_config.cache_dtype='fp8'"),
        (LLAMA, {"scheduling_policy": "priority"}, "scheduler_config.policy='priority'"),
        (LLAMA, {"worker_cls": "own.Worker"}, "parallel_config.worker_cls='own.Worker'"),
        (LLAMA, {"compilation_config": GRAPHS | {"mode": 2}}, "compilation mode DYNAMO_TRACE_ONCE with pieces"),
        (
            LLAMA,
            {"compilation_config": GRAPHS | {"cudagraph_mode": "FULL"}},
            "compilation mode VLLM_COMPILE without pieces",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_anything_else_is_declined_and_vllm_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    model: dict[str, Any],
    options: dict[str, Any],
    reason: str,
) -> None:
    """One line names the feature. Every option is as vLLM's own platform leaves it, the compiler's too."""
    with caplog.at_level(logging.WARNING):
        got = configure(monkeypatch, tmp_path, GraphCpuPlatform(), model, **options)
    ours = [record.getMessage() for record in caplog.records if record.name == "vllm.graphdispatch"]
    assert ours == [f"graphdispatch does not serve this vLLM: {reason}"]
    want = configure(monkeypatch, tmp_path, CpuPlatform(), model, **options)
    assert got.compilation_config == want.compilation_config
    assert got.compute_hash() == want.compute_hash()
    own = {"vllm.v1.worker.cpu_worker.CPUWorker": "graphdispatch_vllm.plain.PlainCpuWorker"}
    worker = want.parallel_config.worker_cls
    assert got.parallel_config.worker_cls == own.get(worker, worker)


def test_an_engine_without_graphs_is_not_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """What the user wants to run eagerly needs no line, whatever it is."""
    with caplog.at_level(logging.WARNING):
        got = configure(monkeypatch, tmp_path, GraphCpuPlatform(), NEOX, enforce_eager=True)
    assert got.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    assert not [record for record in caplog.records if record.name == "vllm.graphdispatch"]


def test_every_option_that_may_change_is_one_of_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An option that vLLM renames is seen, and does not go unasked."""
    config = configure(monkeypatch, tmp_path, CpuPlatform())
    fields = {part: set(type(getattr(config, part)).__pydantic_fields__) for part in FREE_OPTIONS}
    assert {part: options - fields[part] for part, options in FREE_OPTIONS.items() if options - fields[part]} == {}
