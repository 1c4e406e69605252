"""20,000 random decisions beside vLLM 0.11.1's own dispatcher, whose sources pip fetches."""

import random
from collections import Counter
from types import SimpleNamespace as Config

import pytest

import graphdispatch as gd

from .sources import OLD, Mode, kept, old_dispatcher


def test_every_decision_is_that_of_0_11_1() -> None:
    """``CudagraphKeyDispatcher(vllm_config)`` and the class of vLLM 0.11.1 give the same mode and key."""
    folder = kept(OLD)
    if folder is None:
        pytest.skip(f"needs the sources of {OLD.requirement}; python tests/sources.py fetches them")
    their_class, their_key = old_dispatcher(folder)
    rng, seen = random.Random(11), Counter[str]()
    for _ in range(400):
        mode = rng.choice(list(Mode))
        lora = rng.choice([None, None, Config(max_loras=4)])
        compilation = Config(
            cudagraph_mode=mode,
            cudagraph_capture_sizes=sorted(rng.sample(range(1, 200), rng.randint(1, 20))),
            cudagraph_specialize_lora=rng.random() < 0.5,
            is_attention_compiled_piecewise=lambda: True,
        )
        config = Config(
            compilation_config=compilation, scheduler_config=Config(max_num_seqs=rng.randint(1, 64)), lora_config=lora
        )
        theirs, ours = their_class(config), gd.CudagraphKeyDispatcher(config)
        if rng.random() < 0.95:
            query_len = rng.choice([1, 1, 2, 4])
            theirs.initialize_cudagraph_keys(mode, query_len)
            ours.initialize_cudagraph_keys(gd.CUDAGraphMode[mode.name], query_len)
        for _ in range(50):
            tokens = rng.choice([*compilation.cudagraph_capture_sizes, rng.randint(1, 260)])
            uniform, active = rng.random() < 0.5, lora is not None and rng.random() < 0.5
            cascade = rng.random() < 0.2
            want_mode, want = theirs.dispatch(their_key(tokens, uniform, active), cascade)
            variant = active if lora is not None else None
            got_mode, got = ours.dispatch(gd.BatchDescriptor(tokens, None, uniform, variant), cascade)
            assert got_mode.name == want_mode.name
            seen[want_mode.name] += 1
            assert (got and (got.num_tokens, got.is_uniform_decode, bool(got.variant))) == (want and tuple(want))
    assert seen.keys() == {"NONE", "PIECEWISE", "FULL"}
    assert seen.total() == 20_000
    print(f"vLLM 0.11.1: {seen.total()} decisions equal:", dict(seen))
