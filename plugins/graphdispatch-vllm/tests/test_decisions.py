"""20,000 random decisions beside each of the installed vLLM's dispatchers: V1's, and that of Model Runner V2."""

import logging
import random
from collections import Counter
from types import SimpleNamespace as Config
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM; make vllm-test makes an environment that has it")

from vllm.config import CUDAGraphMode as Mode
from vllm.forward_context import BatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher as RunnerV1
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager as RunnerV2

from graphdispatch_vllm.core import ConfigError, Reason
from graphdispatch_vllm.dispatcher import CudagraphDispatcher
from graphdispatch_vllm.runner_v2 import GraphManager, StepDecisions

SIZES = [1, 2, 4, *range(8, 65, 8)]


def config(mode: Mode, sizes: list[int], max_num_seqs: int, query_len: int = 1, **lora: Any) -> Config:
    """What the dispatchers read of a ``VllmConfig``."""
    compilation = Config(
        cudagraph_mode=mode,
        cudagraph_capture_sizes=list(sizes),
        max_cudagraph_capture_size=max(sizes),
        compile_sizes=[],
        mode=3,
        splitting_ops=["attention"],
        cudagraph_specialize_lora=lora.get("specialize", True),
        is_attention_compiled_piecewise=lambda: True,
    )
    adapters = Config(max_loras=lora["loras"], specialize_active_lora=lora["counts"]) if lora.get("loras") else None
    return Config(
        compilation_config=compilation,
        scheduler_config=Config(max_num_seqs=max_num_seqs),
        lora_config=adapters,
        num_speculative_tokens=query_len - 1,
        speculative_config=None,
        cache_config=Config(use_kda_recoverssm=False),
        parallel_config=Config(tensor_parallel_size=1, use_ubatching=False, data_parallel_size=1),
    )


def show(whose: str, seen: Counter[Mode]) -> None:
    """Print how many decisions were compared; each mode was among them."""
    assert seen.keys() == {Mode.NONE, Mode.PIECEWISE, Mode.FULL}
    assert seen.total() == 20_000
    print(f"{whose}: {seen.total()} decisions equal:", {mode.name: count for mode, count in seen.items()})


def test_every_decision_is_that_of_v1() -> None:
    """Modes, sizes, query lengths, adapters, allowed and excluded modes; and what there is to capture."""
    rng, seen = random.Random(7), Counter[Mode]()
    for _ in range(400):
        mode, query_len = rng.choice(list(Mode)), rng.choice([1, 1, 2, 4])
        sizes = sorted({-(-size // query_len) * query_len for size in rng.sample(range(1, 200), rng.randint(1, 20))})
        loras = rng.choice([0, 0, 1, 4, 8])
        lora = {"loras": loras, "specialize": rng.random() < 0.5, "counts": rng.random() < 0.5}
        both = config(mode, sizes, rng.randint(1, 64), query_len, **lora)
        theirs, ours = RunnerV1(both), CudagraphDispatcher.from_vllm_config(both)
        for each in (theirs, ours):
            each.initialize_cudagraph_keys(mode, query_len)
        assert [(m, set(keys)) for m, keys in ours.get_capture_descs()] == [
            (m, set(keys)) for m, keys in theirs.get_capture_descs()
        ]
        for _ in range(50):
            tokens, uniform = rng.choice([*sizes, rng.randint(1, 260)]), rng.random() < 0.5
            active = rng.randint(0, loras)
            step = {
                "num_tokens": -(-tokens // query_len) * query_len if uniform else tokens,
                "uniform_decode": uniform,
                "has_lora": active > 0 if rng.random() < 0.9 else not active,
                "num_active_loras": active,
            }
            valid = rng.choice([None, None, {Mode.NONE, Mode.PIECEWISE}, {Mode.NONE}, {Mode.NONE, Mode.FULL}])
            invalid = rng.choice([None, {Mode.FULL}]) if valid is None else None
            want = theirs.dispatch(**step, valid_modes=valid and set(valid), invalid_modes=invalid)
            assert ours.dispatch(**step, valid_modes=valid, invalid_modes=invalid) == want
            seen[want[0]] += 1
    show("vLLM's V1", seen)


def manager(kind: type[Any], both: Config, mode: Mode, query_len: int, loras: list[int], **how: Any) -> Any:
    """A manager of Runner V2 without a device; only what decides is made."""
    made = kind.__new__(kind)
    made.vllm_config, made.compilation_config = both, both.compilation_config
    made.max_num_reqs, made.cudagraph_mode, made.decode_query_len = both.scheduler_config.max_num_seqs, mode, query_len
    made.varlen_decode, made.ubatch_runner, made.lora_capture_cases = how.get("varlen", False), None, loras
    made.lowers_sizes = how.get("lowers_sizes", False)
    made._lora_dispatch_map, made._max_lora_case = made._build_lora_dispatch_map()
    made._candidates, made._capture_descs, made._graphs_captured, made.graphs = {}, {}, True, {}
    made._init_candidates()
    return made


def test_every_decision_is_that_of_runner_v2() -> None:
    """Uniform, mixed and varlen batches; batches of other query lengths than the captured one; adapters."""
    rng, seen = random.Random(8), Counter[Mode]()
    for _ in range(400):
        mode, query_len = rng.choice(list(Mode)), rng.choice([1, 1, 2, 3, 4])
        sizes = sorted(rng.sample(range(1, 200), rng.randint(1, 20)))
        both, cases = config(mode, sizes, rng.randint(1, 64), query_len), rng.choice([[0], [0, 1, 2, 5], [5]])
        theirs, ours = (
            manager(kind, both, mode, query_len, cases, varlen=varlen)
            for varlen in [rng.random() < 0.3]
            for kind in (RunnerV2, GraphManager)
        )
        for _ in range(50):
            reqs = rng.randint(1, both.scheduler_config.max_num_seqs)
            length = rng.choice([query_len, query_len, 1, 2, None])
            tokens = reqs * length if length else rng.choice([*sizes, rng.randint(1, 260)])
            longest = rng.choice([None, length, query_len])
            step = (min(reqs, tokens), tokens, length, rng.choice([0, 0, 1, 3, 9]), longest)
            want = theirs.dispatch(*step)
            assert ours.dispatch(*step) == want
            seen[want.cg_mode] += 1
    show("vLLM's Runner V2", seen)


def test_answers_of_runner_v2_are_bounded() -> None:
    """Traffic has more combinations of tokens, requests and lengths than there is memory for."""
    decisions = StepDecisions([], 64)
    for tokens in range(1, 70_000):
        assert decisions.find(1, tokens, None, 0, None, 1) is None
    assert len(decisions._found) < 69_999


def test_the_largest_decode_batches_of_runner_v2_may_have_a_graph() -> None:
    """With ``lowers_sizes``, and only with it, there is a full graph at ``max_num_reqs`` requests."""
    both = config(Mode.FULL_AND_PIECEWISE, SIZES, 30)
    step = (30, 30, 1, 0)
    plain = manager(GraphManager, both, Mode.FULL_AND_PIECEWISE, 1, [0])
    assert plain.dispatch(*step).cg_mode is Mode.PIECEWISE
    more = manager(GraphManager, both, Mode.FULL_AND_PIECEWISE, 1, [0], lowers_sizes=True)
    assert (more.dispatch(*step).cg_mode, more.dispatch(*step).num_tokens) == (Mode.FULL, 30)


def test_the_keys_decide() -> None:
    """``gpu_model_runner`` empties the sets after it has measured memory; a key that is added serves at once."""
    ours = CudagraphDispatcher(config(Mode.FULL, SIZES, 64))
    assert ours.dispatch(8) == (Mode.NONE, BatchDescriptor(8))
    ours.initialize_cudagraph_keys(Mode.FULL)
    assert ours.dispatch(7) == (Mode.FULL, BatchDescriptor(8, 8))
    for keys in ours.cudagraph_keys.values():
        keys.clear()
    assert ours.dispatch(7) == (Mode.NONE, BatchDescriptor(7))
    ours.add_cudagraph_key(Mode.FULL, BatchDescriptor(16, 16))
    assert ours.dispatch(7) == (Mode.FULL, BatchDescriptor(16, 16))
    ours.cudagraph_keys[Mode.FULL] |= {BatchDescriptor(8, 8)}
    assert ours.dispatch(7) == (Mode.FULL, BatchDescriptor(8, 8))
    ours.cudagraph_keys[Mode.FULL].difference_update({BatchDescriptor(8, 8)})
    assert ours.dispatch(7) == (Mode.FULL, BatchDescriptor(16, 16))
    ours.keys_initialized = False
    assert ours.get_capture_descs() == []


def test_every_step_without_a_graph_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Counted, and logged once; what vLLM itself wants to be eager is only counted."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    ours = CudagraphDispatcher(config(Mode.FULL_DECODE_ONLY, SIZES, 8))
    ours.dispatch(8)
    ours.initialize_cudagraph_keys(Mode.FULL_DECODE_ONLY)
    for _ in range(2):
        ours.dispatch(8, uniform_decode=True)
        ours.dispatch(40)
        ours.dispatch(65)
        ours.dispatch(8, valid_modes={Mode.NONE})
    assert ours.eager == {Reason.MIXED_BATCH: 2, Reason.ABOVE_LARGEST_SIZE: 2, Reason.MODE_EXCLUDED: 2}
    assert caplog.messages == [
        "graphdispatch: a step ran eagerly: the batch is mixed, and only uniform decode batches have graphs",
        "graphdispatch: a step ran eagerly: 65 tokens are more than the largest of cudagraph_capture_sizes, 64",
    ]


def test_no_mode_left_is_an_error() -> None:
    """As in vLLM, if no graph serves the step and NONE is excluded."""
    ours = CudagraphDispatcher(config(Mode.FULL_DECODE_ONLY, SIZES, 8))
    ours.initialize_cudagraph_keys(Mode.FULL_DECODE_ONLY)
    with pytest.raises(AssertionError, match="NONE"):
        ours.dispatch(60, valid_modes={Mode.FULL})


def test_unsplit_models_have_no_pieces() -> None:
    """The constructor names the remedy."""
    both = config(Mode.PIECEWISE, SIZES, 8)
    both.compilation_config.is_attention_compiled_piecewise = lambda: False
    with pytest.raises(ConfigError, match="splitting_ops"):
        CudagraphDispatcher(both)
