"""Serves requests, has the engine reload its weights from another checkpoint, and serves as many again.

Prints the tokens of both halves, and what graphs did until each of them, as JSON. Some requests are in the middle of
their tokens when the weights change.
"""

import json
import random
import sys
from typing import Any

import torch
from vllm import LLM, SamplingParams


def serve(kind: str, first: str, second: str, count: str) -> None:
    """The requests, by an engine in this process."""
    graphs = {"mode": 3 if "PIECEWISE" in kind else 0, "cudagraph_mode": kind, "cudagraph_capture_sizes": [1, 4, 32]}
    llm = LLM(
        model=first,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        enable_prefix_caching=False,  # a cached prefix is of the weights before
        kv_cache_memory_bytes=16 << 20,
        **({"enforce_eager": True} if kind == "eager" else {"compilation_config": graphs}),
    )
    torch.set_num_threads(1)
    rng, engine, found, totals = random.Random(0), llm.llm_engine, dict[str, Any](), []
    half = int(count) // 2
    for end in (half, 2 * half):
        totals.append(llm.collective_rpc("graph_totals")[0])
        for number in range(end - half, end):
            prompt = {"prompt_token_ids": [rng.randrange(2, 1000) for _ in range(rng.randint(1, 40))]}
            params = SamplingParams(temperature=0, max_tokens=rng.randint(4, 24), ignore_eos=True, detokenize=False)
            engine.add_request(str(number), prompt, params)
        # Of the first half the latest are still at work when the weights change.
        while engine.has_unfinished_requests() and (end > half or len(found) < half - 3):
            for done in engine.step():
                if done.finished:
                    found[done.request_id] = list(done.outputs[0].token_ids)
        if end == half:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": second})
    totals.append(llm.collective_rpc("graph_totals")[0])
    print(json.dumps({"tokens": [found[str(i)] for i in range(2 * half)], "totals": totals}))


if __name__ == "__main__":
    serve(*sys.argv[1:])
