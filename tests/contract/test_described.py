"""What front ends, entries and statistics of engines do, beside their signatures."""

import gc
import time
import weakref
from typing import Any

import pytest
import torch

import graphdispatch as gd

FULL = gd.CUDAGraphMode.FULL


def wrapped(**options: Any) -> gd.CUDAGraphWrapper:
    """A wrapper that has a verified graph for four tokens."""
    wrapper = gd.CUDAGraphWrapper(torch.nn.Linear(3, 3).eval(), options=gd.CUDAGraphOptions(**options))
    for _ in range(2):
        step(wrapper)
    return wrapper


def step(wrapper: gd.CUDAGraphWrapper) -> torch.Tensor:
    """One step of four tokens."""
    how: Any = {"batch_descriptor": gd.BatchDescriptor(4), "cudagraph_runtime_mode": FULL}
    return wrapper(torch.randn(4, 3), **how)  # type: ignore[no-any-return]


def test_an_entry_has_its_fields_under_both_names() -> None:
    """``descriptor`` and ``graph``, and what vLLM calls them; when it was captured, and how long that took."""
    before = time.time()
    entry = wrapped().get_entry(gd.BatchDescriptor(4))
    assert entry is not None
    assert entry.batch_descriptor is entry.descriptor
    assert entry.cudagraph is entry.graph
    assert before <= entry.capture_time <= time.time()
    assert entry.capture_time_ms > 0


@pytest.mark.parametrize("weak", [True, None])
def test_an_entry_does_not_keep_its_output_alive(weak: bool | None) -> None:
    """There while the graph is there; gone after ``clear_cache`` and a collection, though the entry is still held."""
    wrapper = wrapped(weak_ref_output=weak)
    entry = wrapper.get_entry(gd.BatchDescriptor(4))
    assert entry is not None
    assert entry.output.shape == (4, 3)
    output = weakref.ref(entry.output)
    wrapper.clear_cache()
    gc.collect()
    assert output() is None
    assert entry.output is None


def test_a_wrapper_has_every_attribute_of_its_runnable() -> None:
    """Private ones of a module too, through all wrappers; what neither has is an ``AttributeError``."""
    wrapper = gd.CUDAGraphWrapper(wrapped(), gd.CUDAGraphMode.PIECEWISE)
    assert isinstance(wrapper.unwrap(), torch.nn.Linear)
    assert list(wrapper._parameters) == ["weight", "bias"]
    assert wrapper.in_features == 3
    with pytest.raises(AttributeError, match="nothing"):
        _ = wrapper.nothing
    assert list(gd.graphed(torch.nn.Linear(3, 3), dynamic={"input": 0})._parameters) == ["weight", "bias"]
    with pytest.raises(AttributeError):
        _ = gd.CUDAGraphWrapper.__new__(gd.CUDAGraphWrapper)._parameters


def test_a_manager_s_entry_is_named_by_batch_size_and_sequence_length() -> None:
    """That is its key, and its descriptor tells both: requests, and tokens."""
    manager = gd.CUDAGraphManager()
    for seq_len in (7, 1):
        entry = manager.capture_graph(3, seq_len, lambda x: x * 2, {"x": (3, 5)})
        assert entry.key == (4, seq_len)
        descriptor = entry.batch_descriptor
        assert descriptor == gd.BatchDescriptor(4 * seq_len, 4, seq_len == 1)
        assert (descriptor.num_reqs, descriptor.num_tokens // 4) == entry.key
    other = manager.capture_graph(3, 7, lambda x: x * 3, {"x": (3, 5)})
    assert other.key == (4, 7)
    assert manager.num_graphs == 2
