"""vLLM on the CPU, served by this library's graphs: eager's tokens, the hit rate, and the speed beside inductor.

    pip install . ./plugins/graphdispatch-vllm
    python examples/vllm_cpu.py --modes FULL PIECEWISE --requests 48

Each engine runs in a process of its own: vLLM eagerly, vLLM with the code that inductor compiles, and vLLM with our
graphs in each of the modes. The model is a tiny Llama with random weights, so nothing is downloaded.
``--tensor-parallel 2`` splits it over two processes that talk by gloo; ``--spawn`` gives the engine's core a process of
its own. ``--sizes`` takes other capture sizes, as those of a plan that ``graphdispatch plan`` has made, and
``--threads`` another number of OpenMP's threads.

Speeds are in time of the processor, so that other work on the machine counts little: the thread's for a forward, the
process's for tokens. A start-up includes the imports of torch and vLLM. With ``--rounds`` the engines take turns, and
the best round of each counts.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODES = ("FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY")
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}
SIZES = [1, 2, 4, 8, 16, 24, 32, 64, 128, 256]
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONHASHSEED": "0",
}


def main() -> None:
    """Run every engine, compare tokens, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--spawn", action="store_true", help="put the engine's core into a process of its own")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="the capture sizes")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP's threads of each process")
    parser.add_argument("--no-inductor", action="store_true", help="leave out vLLM with compiled code")
    parser.add_argument("--repeats", type=int, default=3, help="how often each speed is measured; 0: not at all")
    parser.add_argument("--rounds", type=int, default=1, help="how often each engine is started")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        run_engine(args)
        return
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(MODEL))
        found = {dtype: run_all(args, dtype, place) for dtype in args.dtypes}
    if args.json is not None:
        args.json.write_text(json.dumps(found))
    if any(each[kind]["tokens"] != each["eager"]["tokens"] for each in found.values() for kind in args.modes):
        sys.exit("some tokens are not those of eager")


def run_all(args: argparse.Namespace, dtype: str, place: str) -> dict[str, Any]:
    """Every engine with one dtype; prints a line for each, and the table."""
    print(f"{dtype}:")
    found: dict[str, Any] = {}
    for _ in range(args.rounds):
        for kind in ["eager", *([] if args.no_inductor else ["inductor"]), *args.modes]:
            got = start(kind, dtype, place, args.threads)
            if kind not in found:
                found[kind] = got
                report(kind, got, found["eager"])
            elif got["tokens"] != found[kind]["tokens"]:
                sys.exit(f"{kind}: some tokens differ from those of the round before")
            found[kind]["startup"] = [min(both) for both in zip(got["startup"], found[kind]["startup"], strict=True)]
            for count, (forward, rate) in got["speed"].items():
                before = found[kind]["speed"][count]
                found[kind]["speed"][count] = [min(before[0], forward), max(before[1], rate)]
    print("ms a forward, tokens/s, at 1, 4 and 16 requests; seconds of start-up, and of the processor for it:")
    for kind, got in found.items():
        speeds = [f"{forward:9.3f} {rate:6.0f}" for forward, rate in got["speed"].values()]
        print(f"{kind:>20}", *speeds, *(f"{seconds:8.1f}" for seconds in got["startup"]))
    return found


def start(kind: str, dtype: str, place: str, threads: int) -> dict[str, Any]:
    """One engine in a process of its own."""
    own = {"OMP_NUM_THREADS": str(threads)} | ({"GRAPHDISPATCH_VLLM": "graphs"} if kind in MODES else {})
    command = [sys.executable, __file__, *sys.argv[1:], "--child", f"{kind}:{dtype}:{place}"]
    done = subprocess.run(command, env={**os.environ, **SETTINGS, **own}, capture_output=True, text=True, check=False)
    result = Path(place) / f"{kind}.json"
    if not result.exists():
        sys.exit(f"{kind}: the engine failed\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return dict(json.loads(result.read_text()))


def report(kind: str, got: dict[str, Any], eager: dict[str, Any]) -> None:
    """Print one engine's lines."""
    pairs = list(zip(got["tokens"], eager["tokens"], strict=True))
    print(f"{kind}: {sum(a == b for a, b in pairs)} of {len(pairs)} requests have eager's tokens")
    for mode, total in (got["totals"][0] if got["totals"] else {}).items():
        late = total["captures"] - got["warm"][0][mode]["captures"]
        served = total["hits"] - got["warm"][0][mode]["hits"]
        before = got["warm"][0][mode]["eager"]
        why = {reason: count - before.get(reason, 0) for reason, count in total["eager"].items()}
        eager = ", ".join(f"{count} {reason}" for reason, count in why.items() if count) or "none"
        print(f"  {mode}: {total['graphs']} graphs, {served} replays, eager: {eager}; {late} captured late")
    if got["steps"]:
        print(f"  {got['graph_steps']} of {got['steps']} steps by graphs, {got['padding']:.1%} of their tokens padding")
    sys.stdout.flush()


def run_engine(args: argparse.Namespace) -> None:
    """The child: serve the requests, write what came out."""
    began, worked = time.perf_counter(), time.process_time()
    kind, dtype, place = args.child.split(":", 2)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(args.spawn or args.tensor_parallel > 1))
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(args.threads)
    how: dict[str, Any] = {"enforce_eager": True}
    if kind == "inductor":
        how = {"compilation_config": {"mode": 3}}
    elif kind in MODES:
        mode = 3 if "PIECEWISE" in kind else 0
        how = {"compilation_config": {"mode": mode, "cudagraph_mode": kind, "cudagraph_capture_sizes": args.sizes}}
    llm = LLM(
        model=place,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=dtype,
        seed=0,
        max_model_len=256,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=48 << 20,
        tensor_parallel_size=args.tensor_parallel,
        **how,
    )
    startup = [time.perf_counter() - began, time.process_time() - worked]
    steps = watch_steps(llm) if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" else Steps()
    ours = kind in MODES
    warm = llm.collective_rpc("graph_totals") if ours else []

    def serve(count: int, lengths: tuple[int, int], seed: int = 0) -> list[list[int]]:
        rng = random.Random(seed)
        prompts = [
            {"prompt_token_ids": [rng.randrange(2, 1000) for _ in range(rng.randint(4, 40))]} for _ in range(count)
        ]
        limits = [rng.randint(*lengths) for _ in range(count)]
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in limits]
        return [list(done.outputs[0].token_ids) for done in llm.generate(prompts, params, use_tqdm=False)]

    tokens = serve(args.requests, (4, 32))
    totals = llm.collective_rpc("graph_totals") if ours else []
    result = {"tokens": tokens, "warm": warm, "totals": totals, **steps.figures(), "speed": {}, "startup": startup}
    for count in (1, 4, 16) if args.repeats else ():
        serve(count, (8, 8))
        steps.forward.clear()
        rates = []
        for _ in range(args.repeats):
            began = time.process_time()
            made = sum(map(len, serve(count, (64, 64))))
            rates.append(made / (time.process_time() - began))
        result["speed"][count] = (steps.median_decode(count), max(rates))
    (Path(place) / f"{kind}.json").write_text(json.dumps(result))


class Steps:
    """What an engine in this process did, step by step."""

    def __init__(self) -> None:
        self.forward: list[tuple[int, float]] = []
        self.counts = {"steps": 0, "graph_steps": 0, "real": 0, "padded": 0}

    def figures(self) -> dict[str, Any]:
        """Steps, steps by graphs, and the share of padding in those."""
        padded = self.counts["padded"]
        share = 1 - self.counts["real"] / padded if padded else 0.0
        return {"steps": self.counts["steps"], "graph_steps": self.counts["graph_steps"], "padding": share}

    def median_decode(self, count: int) -> float:
        """The median time of a forward of ``count`` requests with one token each, in milliseconds; 0.0 if unseen."""
        times = [seconds for tokens, seconds in self.forward if tokens == count]
        return 1e3 * statistics.median(times) if times else 0.0


def watch_steps(llm: Any) -> Steps:
    """Count and time the steps of an engine that runs in this process."""
    steps = Steps()
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    decide, forward = runner._determine_batch_execution_and_padding, runner._model_forward
    latest = [0]

    def decided(*args: Any, **kwargs: Any) -> Any:
        answer = decide(*args, **kwargs)
        tokens, (mode, descriptor, *_) = kwargs["num_tokens"], answer
        latest[0] = tokens
        steps.counts["steps"] += 1
        if mode.value:
            steps.counts["graph_steps"] += 1
            steps.counts["real"] += tokens
            steps.counts["padded"] += descriptor.num_tokens
        return answer

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        result = forward(*args, **kwargs)
        steps.forward.append((latest[0], time.thread_time() - began))
        return result

    runner._determine_batch_execution_and_padding, runner._model_forward = decided, timed
    return steps


if __name__ == "__main__":
    main()
