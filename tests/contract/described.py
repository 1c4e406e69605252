"""The names and signatures of four module descriptions, which the library keeps; ``test_signatures.py`` checks them."""

__all__ = ["ATTRIBUTES", "PROPERTIES", "SIGNATURES"]

_KEY = "num_tokens, num_reqs, max_seq_len=0, is_prefill=False"
_BATCH = "batch_size, seq_len"
_SHAPES = "input_shapes, output_shapes"
_WRAPPER = "runnable, runtime_mode=CUDAGraphMode.FULL, options=None, max_cached_graphs=100"

_WITHOUT_PARAMETERS = {
    "BatchDescriptor": "relaxed",
    "CUDAGraphConfig": "to_dict disabled",
    "CUDAGraphEntry": "increment_replay",
    "CUDAGraphManager": "reset",
    "CUDAGraphMode": "has_graphs has_full_cudagraphs decode_mode mixed_mode separate_routine",
    "CUDAGraphRegistry": "clear",
    "CUDAGraphWrapper": "unwrap get_cached_descriptors clear_cache get_stats",
    "CudagraphDispatcher": "clear_cache",
    "MockCUDAGraph": "capture_begin capture_end replay",
}
SIGNATURES = {f"{owner}.{name}": "" for owner, names in _WITHOUT_PARAMETERS.items() for name in names.split()} | {
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
    "BatchDescriptor": "num_tokens, num_reqs=None, is_uniform_decode=False",
    "CUDAGraphEntry.replay": "inputs",
    "MockCUDAGraph": "",
    "CUDAGraphWrapper": _WRAPPER,
    "CUDAGraphWrapper.__call__": "*args, batch_descriptor=None, cudagraph_runtime_mode=None, **kwargs",
    "AdaptiveCUDAGraphWrapper": f"{_WRAPPER}, min_replays_to_keep=3",
    "AdaptiveCUDAGraphWrapper.get_hot_shapes": "top_k",
    "AdaptiveCUDAGraphWrapper.prewarm": "shapes, dummy_fn",
    "cudagraph_context": "mode, descriptor",
    "get_cudagraph_sizes": "capture_sizes, max_num_reqs, max_num_tokens, mode",
    "CUDAGraphConfig.should_use_cudagraph": _BATCH,
    "CUDAGraphConfig.get_padded_batch_size": "batch_size",
    "CUDAGraphConfig.from_dict": "d",
    "CUDAGraphRegistry": "config",
    "CUDAGraphRegistry.capture": f"{_BATCH}, capture_fn, {_SHAPES}",
    "CUDAGraphRegistry.get": _BATCH,
    "CUDAGraphRegistry.has": _BATCH,
    "CUDAGraphRegistry.remove": _BATCH,
    "CUDAGraphManager": "config",
    "CUDAGraphManager.should_capture": _BATCH,
    "CUDAGraphManager.get_mode_for_batch": _BATCH,
    "CUDAGraphManager.capture_graph": f"{_BATCH}, capture_fn, {_SHAPES}",
    "CUDAGraphManager.replay_graph": f"{_BATCH}, inputs",
    "CUDAGraphManager.execute_or_capture": f"{_BATCH}, execute_fn, inputs, {_SHAPES}",
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
