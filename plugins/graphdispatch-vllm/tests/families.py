"""Serves random models of many families by vLLM's own eager and by graphs, and keeps what came out.

    python tests/families.py --requests 500                     all families and modes, to families.json
    python tests/families.py --families GPT2 --modes FULL       some, and prints
    python tests/families.py --table                            the table of the README

Each engine is a process of its own. Requests have mixed lengths, arrive while others run, and share prefixes. Prompts
are longer than a step has tokens, so that they are prefilled in chunks.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

MODES = ("FULL", "PIECEWISE", "FULL_AND_PIECEWISE")
RESULTS = Path(__file__).with_name("families.json")
TOKENS = 512
_SMALL = {
    "vocab_size": TOKENS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
}
_GROUPED = _SMALL | {"num_key_value_heads": 1}
_HEADS = _GROUPED | {"head_dim": 32}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
_GEMMA = _HEADS | {"sliding_window": 24, "query_pre_attn_scalar": 32}
_GPT2 = {"vocab_size": TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "initializer_range": 0.25}
_OPT = _SMALL | {"ffn_dim": 128, "word_embed_proj_dim": 64, "init_std": 0.25}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": _HEADS,
    "Mistral": _HEADS | {"sliding_window": 24},
    "Qwen2": _GROUPED,
    "Qwen3": _HEADS,
    "Qwen2Moe": _GROUPED | _EXPERTS | {"num_experts": 4, "decoder_sparse_step": 1},
    "Mixtral": _HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "Gemma2": _GEMMA,
    "Gemma3": _GEMMA | {"layer_types": ["sliding_attention", "full_attention"]},
    "GPT2": _GPT2,
    "OPT": _OPT,
    "Phi3": _GROUPED | {"pad_token_id": 1},
}
"""Options of each family's configuration in transformers. Weights are so large that a wrong value changes tokens."""


def make(name: str, place: str) -> None:
    """A checkpoint of random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    kind = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    own = getattr(transformers, kind)(**{"bos_token_id": 0, "eos_token_id": 1, **FAMILIES[name]})
    transformers.AutoModelForCausalLM.from_config(own).float().save_pretrained(place)


def requests(count: int) -> tuple[list[tuple[list[int], int]], random.Random]:
    """Prompts with the numbers of tokens to generate, and the generator that says when each arrives."""
    rng = random.Random(1)
    shared = [rng.randrange(2, TOKENS) for _ in range(70)]
    return [
        (
            shared[: rng.choice([0, 0, 37, 70])] + [rng.randrange(2, TOKENS) for _ in range(rng.randint(1, 30))],
            rng.randint(1, 24),
        )
        for _ in range(count)
    ], rng


def serve(mode: str, place: str, dtype: str, count: int, sizes: list[int]) -> dict[str, Any]:
    """Serve the requests by one engine in this process: their tokens, and what graphs did after the warm-up."""
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(1)
    graphs = {"mode": 3 if "PIECEWISE" in mode else 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": sizes}
    llm = LLM(
        model=place,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=32,
        kv_cache_memory_bytes=16 << 20,
        **({"enforce_eager": True} if mode == "eager" else {"compilation_config": graphs}),
    )
    before = {} if mode == "eager" else llm.collective_rpc("graph_totals")[0]
    todo, rng = requests(count)
    engine, tokens, cached, sent = llm.llm_engine, dict[str, list[int]](), 0, 0
    while sent < count or engine.has_unfinished_requests():
        for _ in range(min(rng.choice([0, 0, 1, 3]), count - sent)):
            prompt, length = todo[sent]
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            engine.add_request(str(sent), {"prompt_token_ids": prompt}, params)
            sent += 1
        for done in engine.step():
            if done.finished:
                tokens[done.request_id] = list(done.outputs[0].token_ids)
                cached += done.num_cached_tokens or 0
    after = {} if mode == "eager" else llm.collective_rpc("graph_totals")[0]
    late = {kind: _less(total, before[kind]) for kind, total in after.items() if kind != "NONE" or any(total["eager"])}
    return {"tokens": [tokens[str(i)] for i in range(count)], "cached": cached, "graphs": late}


def _less(total: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What graphs of one mode did between two totals; how many there are."""
    eager = {why: more for why, count in total["eager"].items() if (more := count - before["eager"].get(why, 0))}
    return {
        "graphs": total["graphs"],
        "replays": total["hits"] - before["hits"],
        "captures": total["captures"] - before["captures"],
        "eager": eager,
    }


SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}


def run_engines(jobs: list[list[Any]]) -> None:
    """A process that has imported vLLM, with or without the plug-in, and has a copy of itself serve each job."""
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    for out, job in jobs:
        child = os.fork()
        if child == 0:
            try:
                Path(out).write_text(json.dumps(serve(*job)))
            except BaseException:  # to the parent's errors, and not up into what the parent would do
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


def compare(
    families: list[str], modes: list[str], dtypes: list[str], count: int, sizes: list[int]
) -> dict[str, dict[str, dict[str, Any]]]:
    """By family, dtype and mode: how many requests have eager's tokens, and what graphs did.

    Raises ``RuntimeError`` if an engine failed.
    """
    # Once, and waited for: an engine of few requests would end before its graphs are run by compiled code.
    subprocess.run([sys.executable, "-m", "graphdispatch.native"], capture_output=True, check=True)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as place:
        for name in families:
            _process("make", name, f"{place}/{name}")
        keys = [(name, dtype, mode) for name in families for dtype in dtypes for mode in ("eager", *modes)]
        for is_ours in (False, True):
            jobs = [
                (f"{place}/{'-'.join(key)}", (key[2], f"{place}/{key[0]}", key[1], count, sizes))
                for key in keys
                if (key[2] != "eager") == is_ours
            ]
            _process("engines", json.dumps(jobs), **({"GRAPHDISPATCH_VLLM": "graphs"} if is_ours else {}))
        got = {key: json.loads(Path(place, "-".join(key)).read_text()) for key in keys}
    for name, dtype, mode in keys:
        if mode == "eager":
            continue
        own, eager = got[name, dtype, mode], got[name, dtype, "eager"]
        equal = sum(a == b for a, b in zip(own["tokens"], eager["tokens"], strict=True))
        result = {"requests": count, "equal": equal, "cached": own["cached"], "graphs": own["graphs"]}
        different = len({token for tokens in eager["tokens"] for token in tokens})
        found.setdefault(name, {}).setdefault(dtype, {})[mode] = result | {"different tokens": different}
    return found


def _process(*words: str, **variables: str) -> None:
    plain = {name: value for name, value in os.environ.items() if name != "GRAPHDISPATCH_VLLM"}
    done = subprocess.run(
        [sys.executable, __file__, "--child", *words],
        env={**plain, **SETTINGS, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or "Traceback" in done.stderr:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-6000:])


def is_right(result: dict[str, Any] | None) -> bool:
    """Whether all tokens are eager's, and graphs of the mode served every step, none captured late."""
    return (
        result is not None
        and result["equal"] == result["requests"]
        and bool(result["graphs"].keys() - {"NONE"})
        and all(
            each["graphs"] > 0 and each["replays"] > 0 and not each["eager"] and not each["captures"]
            for kind, each in result["graphs"].items()
            if kind != "NONE" or each["eager"]
        )
    )


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The README's table: of so many requests, how many have eager's tokens, where every step was by graphs."""
    lines = ["| family | " + " | ".join(("dtype", *MODES)) + " |", "|---" * (2 + len(MODES)) + "|"]
    for name, dtypes in found.items():
        for dtype, modes in dtypes.items():
            cells = [_cell(modes.get(mode)) for mode in MODES]
            lines.append(f"| {' | '.join((name, dtype, *cells))} |")
    return "\n".join(lines)


def _cell(result: dict[str, Any] | None) -> str:
    return f"{result['equal']} of {result['requests']}" if result is not None and is_right(result) else "not shown"


def main() -> None:
    """Run what the arguments ask for."""
    if sys.argv[1:2] == ["--child"]:
        what, *words = sys.argv[2:]
        if what == "make":
            make(*words)
        else:
            run_engines(json.loads(*words))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--json", type=Path, help=f"add the results to this file, as {RESULTS.name}")
    parser.add_argument("--table", action="store_true", help="print the table of the kept results")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(RESULTS.read_text())))
        return
    found = compare(args.families, args.modes, args.dtypes, args.requests, args.sizes)
    for name, dtypes in found.items():
        for dtype, modes in dtypes.items():
            for mode, result in modes.items():
                print(name, dtype, mode, "right" if is_right(result) else "WRONG", json.dumps(result))
    if args.json is not None:
        kept = json.loads(args.json.read_text()) if args.json.exists() else {}
        for name, dtypes in found.items():
            for dtype, modes in dtypes.items():
                kept.setdefault(name, {}).setdefault(dtype, {}).update(modes)
        args.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
