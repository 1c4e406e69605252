"""``CUDAGraphWrapper``: one callable, one graph for each descriptor, in one mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Reason
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper
from graphdispatch.errors import ConfigError, StaleOutputError

from ..spy import Spy

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


class Runs:
    """Doubles, and counts how often Python ran."""

    def __init__(self) -> None:
        self.log = Spy()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(len(x))
        return x * 2


def full(rows: int) -> dict[str, Any]:
    """What a FULL step of ``rows`` tokens passes."""
    return {"batch_descriptor": BatchDescriptor(rows), "cudagraph_runtime_mode": FULL}


def warm(wrapper: CUDAGraphWrapper, rows: int = 4) -> None:
    """Two calls: the capture and the comparison on another batch."""
    for _ in range(2):
        wrapper(torch.randn(rows, 3), **full(rows))


def test_third_call_replays() -> None:
    """The first call captures, the second compares, from the third on Python does not run."""
    log = Spy()

    def fn(x: torch.Tensor) -> torch.Tensor:
        print("run", end="", file=Sink(log.append))
        return x * 2

    wrapper = CUDAGraphWrapper(fn)
    warm(wrapper)
    runs = len(log)
    x = torch.randn(4, 3)
    assert torch.equal(wrapper(x, **full(4)), x * 2)
    assert len(log) == runs
    assert wrapper.get_stats().hits == 1


class Sink:
    """A file that calls a function for each write."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[int], None]) -> None:
        self._call = call

    def write(self, text: str) -> None:
        self._call(len(text))


@pytest.mark.parametrize("how", [{}, {"cudagraph_runtime_mode": FULL}, {"batch_descriptor": BatchDescriptor(4)}])
def test_no_instructions_pass_through(how: dict[str, Any]) -> None:
    """Without a mode or without a descriptor the runnable is called and nothing is counted."""
    wrapper = CUDAGraphWrapper(lambda x: x * 2)
    x = torch.randn(4, 3)
    assert torch.equal(wrapper(x, **how), x * 2)
    assert wrapper.get_stats().calls == 0


@pytest.mark.parametrize("mode", [NONE, PIECEWISE])
def test_other_mode_passes_through(mode: CUDAGraphMode) -> None:
    """A FULL wrapper leaves a step of another mode alone."""
    wrapper = CUDAGraphWrapper(lambda x: x * 2)
    for _ in range(3):
        wrapper(torch.randn(4, 3), batch_descriptor=BatchDescriptor(4), cudagraph_runtime_mode=mode)
    assert wrapper.get_cached_descriptors() == []


@pytest.mark.parametrize("mode", [NONE, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_wrapper_has_a_runtime_mode(mode: CUDAGraphMode) -> None:
    """A wrapper acts in one runtime mode; others are refused."""
    with pytest.raises(ConfigError, match="runtime_mode must be PIECEWISE or FULL"):
        CUDAGraphWrapper(lambda x: x, mode)


def test_runnable_must_be_callable() -> None:
    """What cannot be called cannot be wrapped."""
    with pytest.raises(ConfigError, match="runnable must be callable, got 3"):
        CUDAGraphWrapper(3)  # type: ignore[arg-type]


def test_nested_wrappers_act_in_their_mode() -> None:
    """A FULL wrapper around PIECEWISE ones: each captures in its own mode, and only there."""
    inner = CUDAGraphWrapper(lambda x: x + 1, PIECEWISE)
    outer = CUDAGraphWrapper(lambda x, **how: inner(x, **how) * 2, FULL)
    whole = CUDAGraphWrapper(lambda x: inner(x) * 2, FULL)
    x = torch.randn(4, 3)
    for _ in range(3):
        assert torch.equal(whole(x, **full(4)), (x + 1) * 2)
    assert inner.get_cached_descriptors() == []
    how = {"batch_descriptor": BatchDescriptor(4), "cudagraph_runtime_mode": PIECEWISE}
    for _ in range(3):
        assert torch.equal(inner(x, **how) * 2, (x + 1) * 2)
    assert inner.get_cached_descriptors() == [BatchDescriptor(4)]
    assert outer.get_cached_descriptors() == []
    assert whole.get_cached_descriptors() == [BatchDescriptor(4)]


def test_unwrap_reaches_the_innermost() -> None:
    """``unwrap`` goes through all wrappers."""
    model = nn.Linear(3, 3)
    assert CUDAGraphWrapper(CUDAGraphWrapper(model, PIECEWISE)).unwrap() is model


def test_attributes_are_the_runnables() -> None:
    """What a wrapper has not itself is looked up on the runnable."""
    assert CUDAGraphWrapper(nn.Linear(3, 5)).out_features == 5
    with pytest.raises(AttributeError, match="nothing_like_it"):
        CUDAGraphWrapper(nn.Linear(3, 5)).nothing_like_it  # noqa: B018


def test_a_graph_for_each_descriptor() -> None:
    """Descriptors that differ in any field have graphs of their own."""
    wrapper = CUDAGraphWrapper(lambda x: x * 2)
    descriptors = [BatchDescriptor(4), BatchDescriptor(4, 2), BatchDescriptor(4, 2, True)]
    for descriptor in descriptors:
        wrapper(torch.randn(4, 3), batch_descriptor=descriptor, cudagraph_runtime_mode=FULL)
    assert wrapper.get_cached_descriptors() == descriptors
    assert wrapper.get_entry(BatchDescriptor(8)) is None


def test_eviction_at_capacity() -> None:
    """The graph that was used least recently makes room, and its descriptor is captured anew when it comes."""
    wrapper = CUDAGraphWrapper(lambda x: x * 2, max_cached_graphs=2)
    for rows in (1, 2):
        warm(wrapper, rows)
    wrapper(torch.randn(1, 3), **full(1))
    warm(wrapper, 3)
    assert wrapper.get_cached_descriptors() == [BatchDescriptor(1), BatchDescriptor(3)]
    assert wrapper.get_stats().evictions == 1
    x = torch.randn(2, 3)
    assert torch.equal(wrapper(x, **full(2)), x * 2)
    wrapper.check_integrity()


def test_clear_cache() -> None:
    """After ``clear_cache`` nothing is kept, and the next call captures."""
    wrapper = CUDAGraphWrapper(lambda x: x * 2)
    warm(wrapper)
    wrapper.clear_cache()
    assert wrapper.get_cached_descriptors() == []
    warm(wrapper)
    assert wrapper.get_stats().captures == 2


CHANGES: dict[str, Callable[[torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "shape": lambda x: ((x[:2],), {}),
    "dtype": lambda x: ((x.double(),), {}),
    "layout": lambda x: ((x.t().contiguous().t(),), {}),
    "spelling": lambda x: ((), {"x": x}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_arguments_run_eagerly(change: Callable[[torch.Tensor], tuple[Any, Any]]) -> None:
    """Arguments unlike those of the descriptor's graph are served eagerly, with a reason."""
    wrapper = CUDAGraphWrapper(lambda x: x * 2)
    warm(wrapper)
    x = torch.randn(4, 3)
    args, kwargs = change(x)
    got = wrapper(*args, **kwargs, **full(4))
    assert torch.equal(got, (args or (kwargs["x"],))[0] * 2)
    assert wrapper.get_stats().reasons[Reason.ARGUMENTS_CHANGED] == 1


def test_static_inputs_are_the_callers() -> None:
    """With static inputs and outputs the caller's tensors are the buffers: fill, call, read."""
    wrapper = CUDAGraphWrapper(lambda x: x * 2, options=CUDAGraphOptions(inputs="static", outputs="static"))
    x = torch.randn(4, 3)
    for _ in range(3):
        x.normal_()
        out = wrapper(x, **full(4))
        assert torch.equal(out, x * 2)
    x.fill_(1.0)
    assert wrapper(x, **full(4)).data_ptr() == out.data_ptr()
    assert wrapper.get_stats().hits == 2


def test_static_input_address_is_checked() -> None:
    """A static input at another address is not served by the graph of the old one."""
    wrapper = CUDAGraphWrapper(lambda x: x * 2, options=CUDAGraphOptions(inputs="static"))
    x = torch.randn(4, 3)
    wrapper(x, **full(4))
    other = torch.randn(4, 3)
    assert torch.equal(wrapper(other, **full(4)), other * 2)
    assert wrapper.get_stats().reasons[Reason.ARGUMENTS_CHANGED] == 1


def test_view_outputs_go_stale() -> None:
    """With ``outputs="view"`` the handle of the last call but one raises."""
    wrapper = CUDAGraphWrapper(lambda x: x * 2, options=CUDAGraphOptions(outputs="view"))
    warm(wrapper)
    handles = [wrapper(torch.randn(4, 3), **full(4)) for _ in range(2)]
    assert not handles[1].is_stale
    with pytest.raises(StaleOutputError, match="stale"):
        handles[0].get()


def test_view_outputs_from_the_first_call() -> None:
    """With ``outputs="view"`` every call gives a handle, the eager ones included."""
    wrapper = CUDAGraphWrapper(lambda x: x * 2, options=CUDAGraphOptions(outputs="view"))
    x = torch.randn(4, 3)
    assert torch.equal(wrapper(x, **full(4)).get(), x * 2)


def test_gradients_run_eagerly() -> None:
    """A step that must be differentiated runs eagerly, with a reason."""
    wrapper = CUDAGraphWrapper(nn.Linear(3, 3))
    assert wrapper(torch.randn(4, 3), **full(4)).requires_grad
    assert wrapper.get_stats().reasons[Reason.NEEDS_GRADIENTS] == 1


def test_error_of_the_runnable_passes_through() -> None:
    """An error of the runnable is raised unchanged, and the wrapper stays usable."""
    wrapper = CUDAGraphWrapper(lambda x: x @ x.new_ones(3))
    with pytest.raises(RuntimeError, match="size mismatch"):
        wrapper(torch.randn(4, 2), **full(2))
    warm(wrapper)
    assert wrapper.get_cached_descriptors() == [BatchDescriptor(4)]


def test_repr_is_a_status_line() -> None:
    """``repr`` tells the mode, the graphs and the counts."""
    wrapper = CUDAGraphWrapper(nn.ReLU())
    warm(wrapper)
    assert repr(wrapper) == "<CUDAGraphWrapper FULL ReLU: 1 graphs, 0 hits, 1 misses>"
