"""What the library was described to have: names, signatures, and what is deliberately different, with the reason.

``python -m tests.contract.described`` writes ``docs/reference.md``; ``test_signatures.py`` compares it, and checks all.
"""

from pathlib import Path

import graphdispatch as gd

__all__ = ["ATTRIBUTES", "DIFFERENCES", "DOCUMENT", "PROPERTIES", "SIGNATURES", "document"]

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "reference.md"

_KEY = "num_tokens, num_reqs, max_seq_len=0, is_prefill=False"
_BATCH = "batch_size, seq_len"
_SHAPES = "input_shapes, output_shapes"
_WRAPPER = "runnable, runtime_mode=CUDAGraphMode.FULL, options=None, max_cached_graphs=100"

SIGNATURES = {
    "DispatchKey": _KEY,
    "DispatchPolicy.should_use_graph": "key, graph_available",
    "DispatchPolicy.select_mode": "key, available_modes",
    "DefaultDispatchPolicy": "min_tokens_for_graph=1, max_tokens_for_graph=8192, prefer_piecewise=False",
    "AdaptiveDispatchPolicy": "history_size=1000",
    "AdaptiveDispatchPolicy.record": "key, mode, latency",
    "CudagraphDispatcher": "eager_runner, policy=None, max_cached_graphs=64",
    "CudagraphDispatcher.register_graph": "key, graph, input_ptrs=None",
    "CudagraphDispatcher.has_graph": "key",
    "CudagraphDispatcher.get_graph": "key",
    "CudagraphDispatcher.dispatch": "key, *args, **kwargs",
    "CudagraphDispatcher.clear_cache": "",
    "CudagraphDispatcher.enable_mode": "mode",
    "CudagraphDispatcher.disable_mode": "mode",
    "CompositeDispatcher": "",
    "CompositeDispatcher.add_dispatcher": "name, dispatcher, priority=0",
    "CompositeDispatcher.dispatch": "key, *args, **kwargs",
    "StreamDispatcher": "eager_runner, num_streams=2",
    "create_dispatch_key": _KEY,
    "get_padded_key": "key, pad_to=8",
    "CudagraphKeyDispatcher": "vllm_config",
    "CudagraphKeyDispatcher.add_cudagraph_key": "runtime_mode, batch_descriptor",
    "CudagraphKeyDispatcher.initialize_cudagraph_keys": "cudagraph_mode, uniform_decode_query_len",
    "CudagraphKeyDispatcher.dispatch": "batch_descriptor, use_cascade_attn=False",
    "CUDAGraphMode.has_graphs": "",
    "CUDAGraphMode.has_full_cudagraphs": "",
    "CUDAGraphMode.decode_mode": "",
    "CUDAGraphMode.mixed_mode": "",
    "CUDAGraphMode.separate_routine": "",
    "BatchDescriptor": "num_tokens, num_reqs=None, is_uniform_decode=False",
    "BatchDescriptor.relaxed": "",
    "CUDAGraphEntry.increment_replay": "",
    "CUDAGraphEntry.replay": "inputs",
    "MockCUDAGraph": "",
    "MockCUDAGraph.capture_begin": "",
    "MockCUDAGraph.capture_end": "",
    "MockCUDAGraph.replay": "",
    "CUDAGraphWrapper": _WRAPPER,
    "CUDAGraphWrapper.__call__": "*args, batch_descriptor=None, cudagraph_runtime_mode=None, **kwargs",
    "CUDAGraphWrapper.unwrap": "",
    "CUDAGraphWrapper.get_cached_descriptors": "",
    "CUDAGraphWrapper.clear_cache": "",
    "CUDAGraphWrapper.get_stats": "",
    "AdaptiveCUDAGraphWrapper": f"{_WRAPPER}, min_replays_to_keep=3",
    "AdaptiveCUDAGraphWrapper.get_hot_shapes": "top_k",
    "AdaptiveCUDAGraphWrapper.prewarm": "shapes, dummy_fn",
    "cudagraph_context": "mode, descriptor",
    "get_cudagraph_sizes": "capture_sizes, max_num_reqs, max_num_tokens, mode",
    "CUDAGraphConfig.should_use_cudagraph": _BATCH,
    "CUDAGraphConfig.get_padded_batch_size": "batch_size",
    "CUDAGraphConfig.to_dict": "",
    "CUDAGraphConfig.from_dict": "d",
    "CUDAGraphConfig.disabled": "",
    "CUDAGraphRegistry": "config",
    "CUDAGraphRegistry.capture": f"{_BATCH}, capture_fn, {_SHAPES}",
    "CUDAGraphRegistry.get": _BATCH,
    "CUDAGraphRegistry.has": _BATCH,
    "CUDAGraphRegistry.remove": _BATCH,
    "CUDAGraphRegistry.clear": "",
    "CUDAGraphManager": "config",
    "CUDAGraphManager.should_capture": _BATCH,
    "CUDAGraphManager.get_mode_for_batch": _BATCH,
    "CUDAGraphManager.capture_graph": f"{_BATCH}, capture_fn, {_SHAPES}",
    "CUDAGraphManager.replay_graph": f"{_BATCH}, inputs",
    "CUDAGraphManager.execute_or_capture": f"{_BATCH}, execute_fn, inputs, {_SHAPES}",
    "CUDAGraphManager.reset": "",
}
"""What can be called, with its parameters in order. One without a default here may have one."""

PROPERTIES = (
    "BatchDescriptor.non_uniform", "CUDAGraphStats.hit_rate", "DispatchStats.graph_ratio", "CudagraphDispatcher.stats",
    "CUDAGraphRegistry.num_graphs", "CUDAGraphRegistry.stats", "CUDAGraphManager.mode", "CUDAGraphManager.is_enabled",
    "CUDAGraphManager.stats",
)  # fmt: skip
"""What is read without parentheses."""

ATTRIBUTES = {
    "DispatchKey": "num_tokens num_reqs max_seq_len is_prefill",
    "DispatchStats": "eager graph piecewise fallbacks dispatch_time_ns avg_dispatch_time_us",
    "BatchDescriptor": "num_tokens num_reqs is_uniform_decode",
    "CUDAGraphEntry": "descriptor batch_descriptor graph cudagraph output input_addresses capture_time capture_time_ms "
    "replay_count last_used key avg_replay_time_ms",
    "CUDAGraphOptions": "debug_log_enable gc_disable weak_ref_output validate_addresses",
    "CUDAGraphStats": "captures replays hits misses fallbacks",
    "CudagraphKeyDispatcher": "cudagraph_keys",
    "CUDAGraphMode": "NONE PIECEWISE FULL FULL_DECODE_ONLY FULL_AND_PIECEWISE",
    "DispatchMode": "EAGER CUDAGRAPH PIECEWISE HYBRID",
}
"""What else objects have."""

DIFFERENCES = {
    "DispatchMode": "",
    "DispatchKey": (
        'It has a fifth field, `kind`, always `"batch"`, so that it never equals a `BatchDescriptor` with the same '
        "numbers."
    ),
    "DispatchStats": (
        "A call that compares a graph with eager counts as eager, and is no fallback: a graph is on its way."
    ),
    "DispatchPolicy": "If `should_use_graph` says no, `select_mode` is not asked. A policy that learns has `record`.",
    "DefaultDispatchPolicy": "",
    "AdaptiveDispatchPolicy": "`min_tokens_for_graph` and `max_tokens_for_graph` are what it has learnt.",
    "GraphEntry": "It is `CUDAGraphEntry`. Its input pointers are `input_addresses`.",
    "CudagraphDispatcher": (
        "An entry of this library is compared with the runner before it serves, since nothing else shows that both "
        "mean the same. A graph that cannot be replayed is dropped, and the call runs eagerly. `EAGER` cannot be "
        "disabled: it serves whatever no graph can. It can also capture: `capture`, `prewarm`."
    ),
    "CompositeDispatcher": (
        "The chain goes over graphs; then one runner runs. If that raises, the call ends: what it wrote is not undone, "
        "and another runner would do a part of the step twice. `next_on=` names errors after which the next runner is "
        "tried all the same."
    ),
    "StreamDispatcher": (
        "A step without a graph stays on the caller's stream, since a runner may write state of its own, and would do "
        'so on two streams at once. `eager="worker"` runs it on the workers.'
    ),
    "create_dispatch_key": "It refuses counts that no batch can have.",
    "get_padded_key": "Tokens and longest sequence are rounded up. A decode key stays one: its requests grow too.",
    "CudagraphKeyDispatcher": (
        "vLLM calls it `CudagraphDispatcher`, a name that the dispatcher which runs graphs has here. It takes an "
        "object of the shape of vLLM's configuration, or keywords. `cudagraph_keys` is a live view of immutable "
        "tables, so that a decision needs no lock; `add_cudagraph_key` is the way to change them."
    ),
    "CUDAGraphMode": "",
    "BatchDescriptor": (
        "`variant` takes the place of vLLM's `has_lora`: any hashable value that the captured code depends on."
    ),
    "CUDAGraphEntry": (
        "`capture_time` says when, `capture_time_ms` how long. `output` is None once the graph is released. `replay` "
        "raises `ReplayError` for a batch whose padding no comparison has tested, since it has no eager path that "
        "could. `key` is what the door calls the graph: (batch size, sequence length) for a manager's."
    ),
    "CUDAGraphOptions": (
        "Frozen, by keyword. `weak_ref_output=None` lets graphs share output memory wherever outputs are copied."
    ),
    "CUDAGraphStats": (
        "All shares are properties, so that each can be compared as it stands. A call that compares a graph is counted "
        "in `verifications`: it found its graph, so it is no miss, but its answer is eager's. `graph_ratio` leaves it "
        "out, `hit_rate` does not."
    ),
    "MockCUDAGraph": "It takes outputs and the errors that it shall raise.",
    "CUDAGraphWrapper": (
        'Arguments and outputs are copied, unless `CUDAGraphOptions` says `"static"`. A call that does not fit runs '
        "eagerly, with a reason. The first two batches of a descriptor get eager's answer, while the graph is captured "
        "and compared. Names in double underscores are the wrapper's own."
    ),
    "AdaptiveCUDAGraphWrapper": (
        "When the cache is full, a descriptor is captured when it comes again, so that those that come once displace "
        "nothing."
    ),
    "cudagraph_context": "`rows=` says how many rows of a padded batch are real.",
    "get_cudagraph_sizes": (
        "Sizes that no batch reaches are dropped, with a warning if they are above `max_num_tokens`; it is an error if "
        "none is left, since that would switch graphs off silently. `query_len=` is for speculative decoding."
    ),
    "CUDAGraphConfig": "Frozen, by keyword: what decides never changes under a running server.",
    "CUDAGraphRegistry": "Shapes may be left out where they can be read off `inputs=`.",
    "CUDAGraphManager": (
        "A size is captured when it comes the second time (`capture_after=1` for the first), since a size that comes "
        "once does not pay. `replay_graph` compares a batch first where that is due. NumPy arrays are taken and given "
        "back."
    ),
    "SizePredictor": "It forecasts sizes from the keys so far.",
    "Prewarmer": (
        "It finds pauses and has forecast sizes captured in them, by `graphed`, an adaptive wrapper, a manager or a "
        "dispatcher. It captures when it is called, and starts no thread: a capture beside a running step would slow "
        "it down."
    ),
}
"""Every name, and what is different from the plain description; nothing where nothing is."""

HEAD = """# Reference: the names, and what is deliberately different

The library began as a description of four modules: a dispatcher, vLLM's key dispatcher, a graph manager, and a graph
configuration. Each name of it is importable from `graphdispatch`. Signatures keep its parameters, in its order and by
its names; there may be more. This table says where each name lives, and where the library deliberately does something
else, with the reason. `python -m tests.contract.described` writes it. A test compares it, and each signature.

| name | in | members | what is different, and why |
|---|---|---|---|
"""


def document() -> str:
    """The text of ``docs/reference.md``."""
    lines = []
    for name, difference in DIFFERENCES.items():
        dotted = [one.partition(".") for one in (*SIGNATURES, *PROPERTIES)]
        members = [member for owner, _, member in dotted if owner == name and member and member != "__call__"]
        members += [one for one in ATTRIBUTES.get(name, "").split() if one not in members]
        home = gd._HOME_OF[name].replace(".", "/") + ".py"
        lines.append(f"| `{name}` | `{home}` | {', '.join(f'`{one}`' for one in members)} | {difference} |\n")
    return HEAD + "".join(lines)


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
