"""Serves prompts beyond a model's window, one after the other; prints tokens, logprobs and what graphs did as JSON.

One request in a decode step has its keys split over the threads, and layers with a window split fewer.
"""

import json
import random
import sys

import torch
from vllm import LLM, SamplingParams

COUNT = 24
"""Tokens of each request."""
LENGTHS = (60, 160, 300, 440)
"""Of the prompts; the window has 128 tokens."""


def serve(kind: str, place: str) -> None:
    """The requests, by an engine in this process."""
    graphs = {"mode": 3 if "PIECEWISE" in kind else 0, "cudagraph_mode": kind, "cudagraph_capture_sizes": [1, 4, 128]}
    llm = LLM(
        model=place,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=16 << 20,
        **({"enforce_eager": True} if kind == "eager" else {"compilation_config": graphs}),
    )
    assert torch.get_num_threads() > 1
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, detokenize=False, logprobs=3)
    rng, found = random.Random(0), []
    before = llm.collective_rpc("graph_totals")[0]
    for length in LENGTHS:
        prompt = {"prompt_token_ids": [rng.randrange(2, 1000) for _ in range(length)]}
        output = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
        logprobs = [sorted((token, each.logprob) for token, each in one.items()) for one in output.logprobs or ()]
        found.append((list(output.token_ids), logprobs))
    steps = sum(-(-length // 128) + COUNT - 1 for length in LENGTHS)
    after = llm.collective_rpc("graph_totals")[0]
    print(json.dumps({"found": found, "before": before, "after": after, "steps": steps}))


if __name__ == "__main__":
    serve(*sys.argv[1:])
