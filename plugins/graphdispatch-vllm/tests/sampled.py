"""Serves requests that sample in several ways, and prints their tokens and what graphs did as JSON."""

import json
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import LLM, SamplingParams

COUNT = 48
"""Tokens of each request; more than a sliding window has."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0},
    "penalties": {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 5},
    "plain again": {"temperature": 0},
}


def make(place: str) -> None:
    """A checkpoint of random weights so large that a wrong token of attention changes what comes out."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place)).float().save_pretrained(place)


def serve(kind: str, place: str, dtype: str) -> None:
    """Four requests in each way, one way after the other, by an engine in this process."""
    graphs = {"mode": 0, "cudagraph_mode": kind, "cudagraph_capture_sizes": [4, 32]}
    llm = LLM(
        model=place,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=16 << 20,
        **({"enforce_eager": True} if kind == "eager" else {"compilation_config": graphs}),
    )
    prompts = [{"prompt_token_ids": [7 + i, 9, 30 + i, 50, 3 * i + 5]} for i in range(4)]
    found = {}
    for way, how in WAYS.items():
        params = SamplingParams(max_tokens=COUNT, ignore_eos=True, detokenize=False, **how)
        tokens = [list(done.outputs[0].token_ids) for done in llm.generate(prompts, params, use_tqdm=False)]
        found[way] = {"tokens": tokens, "totals": llm.collective_rpc("graph_totals")[0]}
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(sys.argv[2])
    else:
        serve(*sys.argv[1:])
