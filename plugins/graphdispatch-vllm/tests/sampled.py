"""Serves requests that sample in several ways, and prints their tokens and what graphs did as JSON."""

import json
import sys
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

COUNT = 48
"""Tokens of each request; more than a sliding window has."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0},
    "penalties": {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 5},
    "structured": {"temperature": 0, "structured_outputs": StructuredOutputsParams(regex="([0-9a-f]{2} )+")},
    "plain again": {"temperature": 0},
}


def make(place: str, seed: str = "0") -> None:
    """A checkpoint of random weights so large that a wrong token of attention changes what comes out.

    Its tokenizer has a token for each byte.
    """
    torch.manual_seed(int(seed))
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place)).float().save_pretrained(place)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(["<s>", "</s>", *letters])}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(place)


def numbers(logprobs: dict[int, Any]) -> list[tuple[int, float]]:
    """The tokens of one place with their logprobs, which JSON keeps to the last bit."""
    return sorted((token, each.logprob) for token, each in logprobs.items())


def serve(kind: str, place: str, dtype: str) -> None:
    """Four requests in each way, one way after the other, by an engine in this process."""
    graphs = {"mode": 3 if "PIECEWISE" in kind else 0, "cudagraph_mode": kind, "cudagraph_capture_sizes": [4, 32]}
    llm = LLM(
        model=place,
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
        outputs = [done.outputs[0] for done in llm.generate(prompts, params, use_tqdm=False)]
        tokens = [[list(output.token_ids), *map(numbers, output.logprobs or ())] for output in outputs]
        found[way] = {"tokens": tokens, "totals": llm.collective_rpc("graph_totals")[0]}
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(*sys.argv[2:])
    else:
        serve(*sys.argv[1:])
