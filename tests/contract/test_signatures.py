"""The signatures that engines call by position and by name: parameters may be added behind, never moved or renamed."""

import inspect
from abc import ABC
from enum import Enum, IntEnum
from typing import Any

import pytest

import graphdispatch as gd

REQUIRED = inspect.Parameter.empty
FULL = gd.CUDAGraphMode.FULL
CALLS: dict[str, tuple[Any, list[tuple[str, Any]]]] = {
    "DispatchKey": (
        gd.DispatchKey,
        [("num_tokens", REQUIRED), ("num_reqs", REQUIRED), ("max_seq_len", 0), ("is_prefill", False)],
    ),
    "create_dispatch_key": (
        gd.create_dispatch_key,
        [("num_tokens", REQUIRED), ("num_reqs", REQUIRED), ("max_seq_len", 0), ("is_prefill", False)],
    ),
    "get_padded_key": (gd.get_padded_key, [("key", REQUIRED), ("pad_to", 8)]),
    "DispatchPolicy.should_use_graph": (
        gd.DispatchPolicy.should_use_graph,
        [("self", REQUIRED), ("key", REQUIRED), ("graph_available", REQUIRED)],
    ),
    "DispatchPolicy.select_mode": (
        gd.DispatchPolicy.select_mode,
        [("self", REQUIRED), ("key", REQUIRED), ("available_modes", REQUIRED)],
    ),
    "DefaultDispatchPolicy": (
        gd.DefaultDispatchPolicy,
        [("min_tokens_for_graph", 1), ("max_tokens_for_graph", 8192), ("prefer_piecewise", False)],
    ),
    "CudagraphDispatcher": (
        gd.CudagraphDispatcher,
        [("eager_runner", REQUIRED), ("policy", None), ("max_cached_graphs", 64)],
    ),
    "CudagraphDispatcher.register_graph": (
        gd.CudagraphDispatcher.register_graph,
        [("self", REQUIRED), ("key", REQUIRED), ("graph", REQUIRED), ("input_ptrs", None)],
    ),
    "CudagraphDispatcher.has_graph": (gd.CudagraphDispatcher.has_graph, [("self", REQUIRED), ("key", REQUIRED)]),
    "CudagraphDispatcher.get_graph": (gd.CudagraphDispatcher.get_graph, [("self", REQUIRED), ("key", REQUIRED)]),
    "CudagraphDispatcher.dispatch": (
        gd.CudagraphDispatcher.dispatch,
        [("self", REQUIRED), ("key", REQUIRED), ("args", REQUIRED), ("kwargs", REQUIRED)],
    ),
    "CudagraphDispatcher.clear_cache": (gd.CudagraphDispatcher.clear_cache, [("self", REQUIRED)]),
    "CudagraphDispatcher.enable_mode": (gd.CudagraphDispatcher.enable_mode, [("self", REQUIRED), ("mode", REQUIRED)]),
    "CudagraphDispatcher.disable_mode": (
        gd.CudagraphDispatcher.disable_mode,
        [("self", REQUIRED), ("mode", REQUIRED)],
    ),
    "BatchDescriptor": (
        gd.BatchDescriptor,
        [("num_tokens", REQUIRED), ("num_reqs", None), ("is_uniform_decode", False)],
    ),
    "CUDAGraphEntry.increment_replay": (gd.CUDAGraphEntry.increment_replay, [("self", REQUIRED)]),
    "CUDAGraphEntry.replay": (gd.CUDAGraphEntry.replay, [("self", REQUIRED), ("inputs", None)]),
    "CUDAGraphWrapper": (
        gd.CUDAGraphWrapper,
        [("runnable", REQUIRED), ("runtime_mode", FULL), ("options", None), ("max_cached_graphs", 100)],
    ),
    "AdaptiveCUDAGraphWrapper": (
        gd.AdaptiveCUDAGraphWrapper,
        [
            ("runnable", REQUIRED),
            ("runtime_mode", FULL),
            ("options", None),
            ("max_cached_graphs", 100),
            ("min_replays_to_keep", 3),
        ],
    ),
    "AdaptiveCUDAGraphWrapper.get_hot_shapes": (
        gd.AdaptiveCUDAGraphWrapper.get_hot_shapes,
        [("self", REQUIRED), ("top_k", 10)],
    ),
    "AdaptiveCUDAGraphWrapper.prewarm": (
        gd.AdaptiveCUDAGraphWrapper.prewarm,
        [("self", REQUIRED), ("shapes", REQUIRED), ("dummy_fn", REQUIRED)],
    ),
    "cudagraph_context": (gd.cudagraph_context, [("mode", REQUIRED), ("descriptor", None)]),
    "get_cudagraph_sizes": (
        gd.get_cudagraph_sizes,
        [("capture_sizes", REQUIRED), ("max_num_reqs", REQUIRED), ("max_num_tokens", REQUIRED), ("mode", REQUIRED)],
    ),
    "CUDAGraphConfig.should_use_cudagraph": (
        gd.CUDAGraphConfig.should_use_cudagraph,
        [("self", REQUIRED), ("batch_size", REQUIRED), ("seq_len", REQUIRED)],
    ),
    "CUDAGraphConfig.get_padded_batch_size": (
        gd.CUDAGraphConfig.get_padded_batch_size,
        [("self", REQUIRED), ("batch_size", REQUIRED)],
    ),
    "CUDAGraphRegistry": (gd.CUDAGraphRegistry, [("config", None)]),
    "CUDAGraphManager": (gd.CUDAGraphManager, [("config", None)]),
    "CUDAGraphManager.reset": (gd.CUDAGraphManager.reset, [("self", REQUIRED)]),
}
KEYED = [("self", REQUIRED), ("batch_size", REQUIRED), ("seq_len", REQUIRED)]
SHAPES = [("input_shapes", None), ("output_shapes", None)]
CALLS |= {
    "CUDAGraphRegistry.capture": (gd.CUDAGraphRegistry.capture, [*KEYED, ("capture_fn", REQUIRED), *SHAPES]),
    "CUDAGraphRegistry.get": (gd.CUDAGraphRegistry.get, KEYED),
    "CUDAGraphRegistry.has": (gd.CUDAGraphRegistry.has, KEYED),
    "CUDAGraphRegistry.remove": (gd.CUDAGraphRegistry.remove, KEYED),
    "CUDAGraphManager.should_capture": (gd.CUDAGraphManager.should_capture, KEYED),
    "CUDAGraphManager.get_mode_for_batch": (gd.CUDAGraphManager.get_mode_for_batch, KEYED),
    "CUDAGraphManager.capture_graph": (gd.CUDAGraphManager.capture_graph, [*KEYED, ("capture_fn", REQUIRED), *SHAPES]),
    "CUDAGraphManager.replay_graph": (gd.CUDAGraphManager.replay_graph, [*KEYED, ("inputs", REQUIRED)]),
    "CUDAGraphManager.execute_or_capture": (
        gd.CUDAGraphManager.execute_or_capture,
        [*KEYED, ("execute_fn", REQUIRED), ("inputs", REQUIRED), *SHAPES],
    ),
}
MEMBERS: dict[type, set[str]] = {
    gd.DispatchStats: {"eager", "graph", "piecewise", "fallbacks", "graph_ratio", "dispatch_time_ns"},
    gd.CUDAGraphStats: {"captures", "replays", "hits", "misses", "fallbacks", "hit_rate"},
    gd.MockCUDAGraph: {"capture_begin", "capture_end", "replay"},
    gd.BatchDescriptor: {"relaxed", "non_uniform"},
    gd.CUDAGraphEntry: {"increment_replay", "replay", "avg_replay_time_ms", "input_addresses", "output"},
    gd.CUDAGraphConfig: {"to_dict", "from_dict", "disabled"},
    gd.CUDAGraphRegistry: {"clear", "num_graphs"},
    gd.CUDAGraphManager: {"mode", "is_enabled", "stats", "reset"},
    gd.CUDAGraphWrapper: {"unwrap", "get_cached_descriptors", "clear_cache", "get_stats"},
    gd.CUDAGraphMode: {
        "has_graphs", "has_full_cudagraphs", "decode_mode", "mixed_mode", "separate_routine",
    },
}  # fmt: skip
FIELDS = {"descriptor", "graph", "key", "capture_time_ms", "replay_count", "last_used"}
OPTIONS = {"debug_log_enable", "gc_disable", "weak_ref_output", "validate_addresses"}


@pytest.mark.parametrize("name", CALLS)
def test_parameters_keep_name_place_and_default(name: str) -> None:
    """What comes after them has a default or is keyword-only."""
    made, expected = CALLS[name]
    parameters = list(inspect.signature(made).parameters.values())
    assert [(p.name, p.default) for p in parameters[: len(expected)]] == expected
    for extra in parameters[len(expected) :]:
        assert extra.default is not REQUIRED or extra.kind is extra.KEYWORD_ONLY


@pytest.mark.parametrize(("owner", "names"), MEMBERS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_members_are_there(owner: type, names: set[str]) -> None:
    """On the class, or on a fresh instance."""
    missing = {name for name in names if not hasattr(owner, name)}
    assert not missing or all(hasattr(owner(), name) for name in missing)


def test_a_graph_s_entry_has_its_fields() -> None:
    """There is one entry class, under two names."""
    assert set(gd.CUDAGraphEntry.__dataclass_fields__) >= FIELDS
    assert gd.GraphEntry is gd.CUDAGraphEntry


def test_options_of_the_wrapper_are_there() -> None:
    """Logging, garbage collection, weak outputs and addresses."""
    assert set(gd.CUDAGraphOptions.model_fields) >= OPTIONS


def test_kinds_of_the_vocabulary() -> None:
    """Modes are enumerations, of integers where they are compared; a policy is abstract; keys are hashable."""
    assert issubclass(gd.CUDAGraphMode, IntEnum)
    assert issubclass(gd.DispatchMode, Enum)
    assert issubclass(gd.DispatchPolicy, ABC)
    assert {gd.DispatchKey(4, 4): 1}[gd.create_dispatch_key(4, 4)] == 1
    assert {mode.name for mode in gd.DispatchMode} == {"EAGER", "CUDAGRAPH", "PIECEWISE", "HYBRID"}
    assert {mode.name for mode in gd.CUDAGraphMode} == {
        "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE",
    }  # fmt: skip


def test_the_registry_has_statistics() -> None:
    """Its own from the beginning; the manager shows the same ones."""
    manager = gd.CUDAGraphManager()
    assert isinstance(gd.CUDAGraphRegistry().stats, gd.CUDAGraphStats)
    assert manager.stats is manager.registry.stats
