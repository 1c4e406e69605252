"""Serves random models of many families by vLLM's own eager and by graphs, and counts what is equal.

    python tests/families.py --requests 100 --keep              all, to families.json and to the README's table
    python tests/families.py --families GPT2 --modes FULL       some, and prints

Of each family, dtype, mode and number of OpenMP's threads it counts the requests that have eager's tokens, and those
that have eager's logprobs to the last bit, too. Where some have other bits, eager serves the requests once more, one
at a time: PyTorch's kernels may round otherwise for another number of rows.

Each engine is a process of its own. Requests have mixed lengths, arrive while others run, and share prefixes. Prompts
are longer than a step has tokens, so that they are prefilled in chunks. The last ones are longer than a window and
come when no other runs, so that threads share the keys of one request.
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
from typing import Any, NamedTuple

MODES = ("FULL", "PIECEWISE", "FULL_AND_PIECEWISE")
EAGER, ALONE = "eager", "eager-alone"
"""vLLM without the plug-in; and that with one request at a time."""
THREADS = ("1", "2")
RESULTS = Path(__file__).with_name("families.json")
README = Path(__file__).parents[1] / "README.md"
TOKENS = 512
LAST = 3
"""So many requests come when no other runs."""
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
_GEMMA = _HEADS | {"sliding_window": 128, "query_pre_attn_scalar": 32}
_GPT2 = {"vocab_size": TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "initializer_range": 0.25}
_OPT = _SMALL | {"ffn_dim": 128, "word_embed_proj_dim": 64, "init_std": 0.25}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": _HEADS,
    "Mistral": _HEADS | {"sliding_window": 128},
    "Qwen2": _GROUPED,
    "Qwen3": _HEADS,
    "Qwen2Moe": _GROUPED | _EXPERTS | {"num_experts": 4, "decoder_sparse_step": 1},
    "Mixtral": _HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "Gemma2": _GEMMA,
    "Gemma3": _GEMMA | {"layer_types": ["full_attention", "sliding_attention"]},
    "Granite": _GROUPED | {"embedding_multiplier": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "GPT2": _GPT2,
    "OPT": _OPT,
    "Phi3": _GROUPED | {"pad_token_id": 1},
}
"""Options of each family's configuration in transformers. Weights are so large that a wrong value changes tokens."""


class Engine(NamedTuple):
    """One engine: what it serves, and how."""

    family: str
    dtype: str
    mode: str
    threads: str

    def __str__(self) -> str:
        return " ".join(self)


Results = dict[str, dict[str, Any]]
"""By the engine, what was counted of it."""


def make(place: str, *names: str) -> None:
    """A checkpoint of random weights for each family."""
    import torch
    import transformers

    for name in names:
        torch.manual_seed(0)
        kind = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
        own = getattr(transformers, kind)(**{"bos_token_id": 0, "eos_token_id": 1, **FAMILIES[name]})
        transformers.AutoModelForCausalLM.from_config(own).float().save_pretrained(f"{place}/{name}")


def requests(count: int) -> tuple[list[tuple[list[int], int]], random.Random]:
    """Prompts with the numbers of tokens to generate, and the generator that says when each arrives."""
    rng = random.Random(1)
    shared = [rng.randrange(2, TOKENS) for _ in range(170)]
    prefixes = [rng.choice([0, 0, 37, 70]) if i < count - LAST else len(shared) for i in range(count)]
    return [
        (shared[:prefix] + [rng.randrange(2, TOKENS) for _ in range(rng.randint(1, 30))], rng.randint(1, 24))
        for prefix in prefixes
    ], rng


def serve(mode: str, place: str, dtype: str, count: int, sizes: list[int]) -> dict[str, Any]:
    """Serve the requests by one engine in this process: tokens, logprobs, and what graphs did after the warm-up."""
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    graphs = {"mode": 3 if "PIECEWISE" in mode else 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": sizes}
    llm = LLM(
        model=place,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=256,
        max_num_seqs=1 if mode == ALONE else 8,
        max_num_batched_tokens=64,
        block_size=32,
        kv_cache_memory_bytes=16 << 20,
        **({"compilation_config": graphs} if mode in MODES else {"enforce_eager": True}),
    )
    before = llm.collective_rpc("graph_totals")[0] if mode in MODES else {}
    todo, rng = requests(count)
    engine, found, cached, sent = llm.llm_engine, dict[str, tuple[list[int], list[float]]](), 0, 0
    while sent < count or engine.has_unfinished_requests():
        arriving = rng.choice([0, 0, 1, 3]) if sent < count - LAST else int(not engine.has_unfinished_requests())
        for _ in range(min(arriving, count - sent)):
            prompt, length = todo[sent]
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0)
            engine.add_request(str(sent), {"prompt_token_ids": prompt}, params)
            sent += 1
        for done in engine.step():
            if done.finished:
                output = done.outputs[0]
                logprobs = [each.logprob for one in output.logprobs or () for each in one.values()]
                found[done.request_id] = (list(output.token_ids), logprobs)
                cached += done.num_cached_tokens or 0
    after = llm.collective_rpc("graph_totals")[0] if mode in MODES else {}
    late = {kind: _less(total, before[kind]) for kind, total in after.items() if kind != "NONE" or any(total["eager"])}
    return {"found": [found[str(i)] for i in range(count)], "cached": cached, "graphs": late}


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
    "OMP_WAIT_POLICY": "PASSIVE",
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
    families: list[str], modes: list[str], dtypes: list[str], threads: list[str], count: int, sizes: list[int]
) -> Results:
    """Serve the requests by each engine with graphs, and by eager for each family, dtype and number of threads.

    Raises ``RuntimeError`` if an engine failed.
    """
    # Once, and waited for: an engine of few requests would end before its graphs are run by compiled code.
    subprocess.run([sys.executable, "-m", "graphdispatch.native"], capture_output=True, check=True)
    with tempfile.TemporaryDirectory() as place:
        _process("make", place, *families)

        def run(engines: list[Engine]) -> dict[Engine, dict[str, Any]]:
            for number in threads:
                for has_graphs in (False, True):
                    own = {"OMP_NUM_THREADS": number} | ({"GRAPHDISPATCH_VLLM": "graphs"} if has_graphs else {})
                    jobs = [
                        (f"{place}/{each}.json", (each.mode, f"{place}/{each.family}", each.dtype, count, sizes))
                        for each in engines
                        if each.threads == number and (each.mode in MODES) == has_graphs
                    ]
                    if jobs:
                        _process("engines", json.dumps(jobs), **own)
            return {each: json.loads(Path(place, f"{each}.json").read_text()) for each in engines}

        plain = [Engine(name, dtype, EAGER, number) for name in families for dtype in dtypes for number in threads]
        eager = run(plain)
        found = run([each._replace(mode=mode) for each in plain for mode in modes])
        results = {str(each): _result(got, eager[each._replace(mode=EAGER)]) for each, got in found.items()}
        rounded = {each._replace(mode=ALONE): None for each in found if not has_bits(results[str(each)])}
        alone = run(list(rounded))
        return results | {str(each): _result(got, eager[each._replace(mode=EAGER)]) for each, got in alone.items()}


def _result(own: dict[str, Any], eager: dict[str, Any]) -> dict[str, Any]:
    """What is kept of an engine, beside eager."""
    pairs = list(zip(own["found"], eager["found"], strict=True))
    same = [(mine, theirs) for (tokens, mine), (expected, theirs) in pairs if tokens == expected]
    return {
        "requests": len(pairs),
        "tokens": len(same),
        "logprobs": sum(mine == theirs for mine, theirs in same),
        "largest difference": max((abs(a - b) for both in same for a, b in zip(*both, strict=True)), default=0.0),
        "different tokens": len({token for tokens, _ in eager["found"] for token in tokens}),
        "cached": own["cached"],
        "graphs": own["graphs"],
    }


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


def is_right(result: dict[str, Any]) -> bool:
    """Whether all tokens are eager's, and graphs of the mode served every step, none captured late."""
    return (
        result["tokens"] == result["requests"]
        and bool(result["graphs"].keys() - {"NONE"})
        and all(
            each["graphs"] > 0 and each["replays"] > 0 and not each["eager"] and not each["captures"]
            for kind, each in result["graphs"].items()
            if kind != "NONE" or each["eager"]
        )
    )


def has_bits(result: dict[str, Any]) -> bool:
    """Whether all logprobs are eager's to the last bit."""
    return bool(result["logprobs"] == result["requests"])


def table(found: Results) -> str:
    """The README's table: of so many requests, how many have eager's tokens, and eager's bits of logprobs.

    A cell has the fewest of all numbers of threads, and only where graphs served every step.
    """
    lines = ["| family | dtype | requests | " + " | ".join((*MODES, "eager, one at a time")) + " |", "|---" * 7 + "|"]
    kinds = {(each.family, each.dtype): None for each in (Engine(*key.split()) for key in found)}
    for family, dtype in kinds:
        cells = [_cell(found, [Engine(family, dtype, mode, n) for n in THREADS]) for mode in (*MODES, ALONE)]
        count = next(each["requests"] for key, each in found.items() if key.startswith(f"{family} {dtype} "))
        lines.append(f"| {' | '.join((family, dtype, str(count), *cells))} |")
    return "\n".join(lines)


def _cell(found: Results, engines: list[Engine]) -> str:
    results = [found[str(each)] for each in engines if str(each) in found]
    if engines[0].mode == ALONE:
        if not results:
            return ""
    elif len(results) < len(engines) or not all(map(is_right, results)):
        return "not shown"
    return " / ".join(str(min(each[what] for each in results)) for what in ("tokens", "logprobs"))


def keep(found: Results) -> None:
    """Put the results of whole families in the place of those that were kept, and their table in the README."""
    kept: Results = json.loads(RESULTS.read_text())
    again = {Engine(*key.split()).family for key in found}
    new = {key: each for key, each in kept.items() if Engine(*key.split()).family not in again} | found
    new = dict(sorted(new.items()))
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(each)}" for key, each in new.items())
    RESULTS.write_text(f"{{\n{lines}\n}}\n")
    README.write_text(README.read_text().replace(table(kept), table(new)))


def main() -> None:
    """Run what the arguments name."""
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
    parser.add_argument("--threads", nargs="+", choices=THREADS, default=list(THREADS))
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64])
    parser.add_argument(
        "--keep", action="store_true", help=f"add the results to {RESULTS.name} and to the README's table"
    )
    args = parser.parse_args()
    found = compare(args.families, args.modes, args.dtypes, args.threads, args.requests, args.sizes)
    for key, each in found.items():
        verdict = "" if Engine(*key.split()).mode == ALONE else "right" if is_right(each) else "WRONG"
        print(key, verdict, json.dumps(each))
    if args.keep:
        keep(found)


if __name__ == "__main__":
    main()
