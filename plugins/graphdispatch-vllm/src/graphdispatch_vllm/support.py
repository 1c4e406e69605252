"""What graphs serve of vLLM: an allowlist, read before anything is changed.

Only what the tests run is on it. With anything else graphdispatch declines, and vLLM runs as if it were not there.
"""

import dataclasses
from typing import Any

__all__ = ["FREE_OPTIONS", "SERVED", "why_not"]

SERVED: dict[str, frozenset[Any]] = {
    "architecture": frozenset(
        {
            "GPT2LMHeadModel",
            "Gemma2ForCausalLM",
            "Gemma3ForCausalLM",
            "GraniteForCausalLM",
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "MixtralForCausalLM",
            "OPTForCausalLM",
            "Phi3ForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3ForCausalLM",
        }
    ),
    "architecture in parallel": frozenset({None, "LlamaForCausalLM", "MistralForCausalLM"}),
    "dtype of pieces in parallel": frozenset({None, "float32"}),
    "runner": frozenset({"generate"}),
    "attention": frozenset({"decoder"}),
    "dtype": frozenset({"float32", "bfloat16"}),
    "executor": frozenset({None, "uni", "mp"}),
    "compilation mode": frozenset({"VLLM_COMPILE with pieces", "NONE without pieces"}),
    "model runner": frozenset({"V1"}),
}
"""The kinds of models and engines that are served."""

FREE_OPTIONS: dict[str, frozenset[str]] = {
    part: frozenset(names.split())
    for part, names in {
        "model_config": "code_revision config_format disable_sliding_window dtype enforce_eager generation_config "
        "hf_config_path hf_overrides hf_token max_logprobs max_model_len model model_weights "
        "override_generation_config revision runner seed served_model_name skip_tokenizer_init tokenizer "
        "tokenizer_mode tokenizer_revision trust_remote_code",
        "cache_config": "_block_size_resolved block_size enable_prefix_caching gpu_memory_utilization "
        "kv_cache_memory_bytes num_gpu_blocks_override sliding_window user_specified_block_size",
        "parallel_config": "_api_process_count _api_process_rank _coord_store_port _data_parallel_master_port_list "
        "cpu_distributed_timeout_seconds data_parallel_index data_parallel_master_ip "
        "data_parallel_master_port data_parallel_rank data_parallel_rank_local data_parallel_rpc_port "
        "data_parallel_size data_parallel_size_local dcp_comm_backend dcp_q_replicate "
        "disable_custom_all_reduce disable_nccl_for_dp_synchronization distributed_executor_backend "
        "distributed_timeout_seconds elastic_ep_max_dp_size is_moe_model master_addr master_port rank "
        "tensor_parallel_size world_size",
        "scheduler_config": "async_scheduling enable_chunked_prefill encoder_cache_size max_num_batched_tokens "
        "max_num_encoder_input_tokens max_num_seqs",
        "compilation_config": "backend cache_dir cudagraph_capture_sizes cudagraph_mode inductor_compile_config "
        "local_cache_dir max_cudagraph_capture_size mode",
        "device_config": "device",
        "load_config": "download_dir ignore_patterns load_format safetensors_load_strategy use_tqdm_on_load",
        "logging_config": "configure_logging formatter log_level pylogging_config_file",
        "observability_config": "cudagraph_metrics",
    }.items()
}
"""The options that may differ from vLLM's defaults, by the part of its configuration. All others may not."""

_FREE_PARTS = frozenset({"instance_id", "shutdown_timeout"})


def why_not(config: Any) -> str | None:
    """Why graphs do not serve a ``VllmConfig``, as one phrase that names the feature; None if they do.

    ``config`` is as vLLM has made it from the user's options, before a platform has changed it.
    """
    if config.model_config is None:
        return "there is no model"
    for what, found in _kinds(config).items():
        if found not in SERVED[what]:
            return f"{what} {found}"
    return _changed_option(config)


def _kinds(config: Any) -> dict[str, Any]:
    model, mode, graphs = config.model_config, config.compilation_config.mode, config.compilation_config.cudagraph_mode
    has_pieces = graphs is None or graphs.has_piecewise_cudagraphs()  # None stands for FULL_AND_PIECEWISE
    dtype, parallel = str(model.dtype).removeprefix("torch."), config.parallel_config
    is_parallel = parallel.tensor_parallel_size > 1 or parallel.data_parallel_size > 1
    compiled = "VLLM_COMPILE" if mode is None else mode.name  # as vLLM has it by default
    return {
        "architecture": model.architecture,
        "architecture in parallel": model.architecture if is_parallel else None,
        "dtype of pieces in parallel": dtype if is_parallel and has_pieces else None,
        "runner": model.runner_type,
        "attention": "MLA" if model.use_mla else model.attn_type,
        "dtype": dtype,
        "executor": parallel.distributed_executor_backend,
        "compilation mode": f"{compiled} {'with' if has_pieces else 'without'} pieces",
        "model runner": "V2" if config.use_v2_model_runner else "V1",
    }


def _changed_option(config: Any) -> str | None:
    """The first option that is neither free nor at its default."""
    for part, plain in _defaults(config).items():
        value, free = getattr(config, part), FREE_OPTIONS.get(part, frozenset())
        if part in _FREE_PARTS:
            continue
        if not dataclasses.is_dataclass(value) or (plain is None and not free):
            if value != plain:
                return part
            continue
        for option, default in _defaults(value).items():
            if option not in free and getattr(value, option) != default:
                return f"{part}.{option}={getattr(value, option)!r}"
    return None


def _defaults(config: Any) -> dict[str, Any]:
    """The options of a configuration, or of a part of it, with their defaults; but for those that vLLM derives."""
    fields = type(config).__pydantic_fields__
    names = (field.name for field in dataclasses.fields(config))
    return {name: fields[name].get_default(call_default_factory=True) for name in names if name in fields}
