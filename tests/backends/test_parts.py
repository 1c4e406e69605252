"""The calls that a replay makes instead of an operator: they give its bits for all values, and prepare nothing."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from graphdispatch.backends import get_backend
from graphdispatch.backends.cpu.parts import parts_of
from graphdispatch.backends.cpu.program import Program, Step
from graphdispatch.backends.operators import bits_equal
from graphdispatch.native import tape

from ..helpers import recorded

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
NUMBERS = (0, 1, -3, 1e-5, 0.1, -0.0, 2.5, 1e300, -1e300, 1e-310, math.inf, math.nan, 2**24 + 1, 2**62 + 1, 2**63, True)
BINARY = (aten.add, aten.sub, aten.mul, aten.div)
COMPARISONS = (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Numbers of a dtype: large and small, negative, zero, and what is no number."""
    x = torch.randn(shape, dtype=torch.float64).exp() * torch.randn(shape)
    if dtype.is_floating_point and x.numel() > 4:
        x.view(-1)[:4] = torch.tensor([0.0, -0.0, math.inf, math.nan])
    return (x * 10).to(dtype)


def compare(func: Any, args: tuple[Any, ...], out: torch.Tensor, **kwargs: Any) -> bool:
    """Call the overload, and its parts, into twins of ``out``: the bits are equal. Whether there are parts."""
    want, got = out.clone(), out.clone()
    parts = parts_of(func, args, {**kwargs, "out": got})
    if parts is None:
        return False
    func(*args, **kwargs, out=want)
    for part in parts:
        part.run()
    assert bits_equal(want, got), (func, args, want, got)
    got.copy_(out)
    for part in parts:  # as a tape calls them
        part.func(*part.args, **part.kwargs)
    assert bits_equal(want, got), (func, args, want, got)
    return True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers(dtype: torch.dtype) -> None:
    """A number becomes a tensor only where every bit stays, whatever the number and its type."""
    taken = 0
    for x in (values(dtype, 3, 40), values(dtype)):
        for number in NUMBERS:
            for packet in (*BINARY, *COMPARISONS):
                try:
                    out = packet(x, number)
                except (RuntimeError, OverflowError):  # torch has no such operation
                    continue
                for name in ("out", "Scalar_out"):
                    if name in packet.overloads():
                        taken += compare(getattr(packet, name), (x, number), out)
    assert (taken > 0) == (dtype in (torch.float32, torch.float64, torch.int64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alpha", [1, 3, -2])
def test_numbers_with_alpha(dtype: torch.dtype, alpha: int) -> None:
    """The factor of a sum stays what it was, by position and by name."""
    for x in (values(dtype, 3, 40), values(dtype)):
        for number in (2, 0.1, 7):
            if dtype is torch.bool:
                continue
            for packet in (aten.add, aten.sub):
                out = packet.Scalar(x, number, alpha)
                compare(packet.Scalar_out, (x, number, alpha), out)
                compare(packet.out, (x, number), out, alpha=alpha)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_in_place(dtype: torch.dtype) -> None:
    """An operator in place with a number does the same."""
    for number in NUMBERS:
        for packet in (aten.add_, aten.sub_, aten.mul_, aten.div_):
            for overload in (packet.Tensor, packet.Scalar):
                want, got = (x := values(dtype, 3, 40)), x.clone()
                parts = parts_of(overload, (got, number), {})
                if parts is None:
                    continue
                try:
                    overload(want, number)
                except (RuntimeError, OverflowError):  # torch has no such operation; neither has the replay
                    with pytest.raises((RuntimeError, OverflowError)):
                        parts[0].run()
                    continue
                for part in parts:
                    part.run()
                assert bits_equal(want, got), (overload, number)


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
def test_mean(dtype: torch.dtype) -> None:
    """A mean is a sum and a division, over all dimensions and over some."""
    x = torch.randn(3, 65, 7).to(dtype)
    layouts = (x, x.transpose(0, 2), x[:, ::2], x[:1, :1, :1], x[0, 0, 0])
    taken = 0
    for given in layouts:
        dims = [None, [], [-1], [0]] + [[0, 1], [1, -1], [0, 1, 2]] * (given.dim() == 3)
        for dim in dims:
            for keep in (False, True):
                taken += compare(aten.mean.out, (given, dim, keep), aten.mean.dim(given, dim, keep))
        taken += compare(aten.mean.dtype_out, (given,), aten.mean.default(given))
    assert (taken > 0) == (dtype in (torch.float32, torch.float64))
    assert parts_of(aten.mean.out, (x.int(), [0]), {"dtype": torch.float32, "out": torch.empty(65, 7)}) is None
    assert parts_of(aten.mean.out, (x[:0], [0]), {"out": torch.empty(65, 7, dtype=dtype)}) is None


COPIES: dict[str, Callable[[torch.Tensor], tuple[Any, ...]]] = {
    "clone": lambda x: (aten.clone, (x,), {"memory_format": torch.contiguous_format}),
    "a strided clone": lambda x: (aten.clone, (x.t(),), {}),
    "an expanded clone": lambda x: (aten.clone, (x[:, :1].expand(-1, 9),), {}),
    "a cast": lambda x: (aten._to_copy, (x,), {"dtype": torch.float64}),
    "zeros": lambda x: (aten.zeros_like, (x,), {}),
    "ones": lambda x: (aten.ones_like, (x,), {}),
    "full": lambda x: (aten.full_like, (x, 3), {}),
    "new full": lambda x: (aten.new_full, (x, [2, 3], True), {}),
    "new zeros": lambda x: (aten.new_zeros, (x, [4]), {}),
    "masked fill": lambda x: (aten.masked_fill, (x, torch.rand(7, *x.shape) > 0.5, 2), {}),
    "embedding": lambda x: (aten.embedding, (x, torch.tensor([[1, 0], [2, 2]])), {}),
    "embedding of one": lambda x: (aten.embedding, (x, torch.tensor(1)), {}),
}


@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")  # as torch 2.15 says
@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
@pytest.mark.parametrize("name", list(COPIES))
def test_copies_and_fills(name: str, dtype: torch.dtype) -> None:
    """What torch would make anew and copy is written where it belongs."""
    packet, args, kwargs = COPIES[name](values(dtype, 3, 5))
    functional = packet.Scalar if name == "masked fill" else packet.default
    out_overload = packet.Scalar_out if name == "masked fill" else packet.out
    expected = functional(*args, **kwargs)
    assert compare(out_overload, args, torch.empty_like(expected), **{k: v for k, v in kwargs.items() if k != "dtype"})


def names_within(call: Callable[[], object]) -> list[str]:
    """The names of all operators that run within the call, its own first."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        call()
    return [event.name.removeprefix("aten::") for event in profiler.events() if event.name.startswith("aten::")]


def test_a_replay_prepares_nothing() -> None:
    """A replay makes no tensor: not of a number, not of a copy, not of a mean's count."""
    x = torch.randn(4, 8)
    graph, out = recorded(
        lambda: (
            ((x * 2.5).mean(-1, keepdim=True).add_(1e-5) > 0.5).masked_fill(x > 0, True),
            x.t().contiguous() + 1,
        )
    )
    graph.replay()
    made = {"empty", "empty_strided", "empty_like", "clone", "_to_copy", "to"}
    assert made.isdisjoint(names_within(graph.replay))
    assert bits_equal(out[1], x.t() + 1)


needs_tape = pytest.mark.skipif(not tape.TAPE.wait(), reason=repr(tape.TAPE))


@needs_tape
@pytest.mark.parametrize("is_hidden", [False, True])
def test_versions_of_what_others_see_are_counted(is_hidden: bool) -> None:
    """A replay counts the versions of what others see, as torch's writes do."""
    x = torch.ones(4)
    program = Program([Step(print, aten.mul_.Tensor, ((x, x), {}), is_hidden=is_hidden)])
    before = x._version
    program.run()
    assert (x._version > before) == (not is_hidden)


def test_what_others_see() -> None:
    """Others may hold only the shared outputs of a graph: for all else that it writes, it has tensors of its own."""
    state, x = torch.zeros(4), torch.randn(4)
    backend = get_backend("cpu")
    with backend.begin_capture(backend.make_pool()) as capture:
        capture.set_outputs(state.add_(x.exp() * 2).relu(), shared=True)
    graph, before = capture.graph, state._version
    graph.replay()
    assert [step.func._schema.name for step in graph.program.steps if not step.is_hidden] == ["aten::relu"]
    assert state._version == before
    assert bits_equal(graph.outputs, state.relu())


@needs_tape
def test_a_kernel_that_is_registered_later_is_seen() -> None:
    """The dispatcher looks the kernel up at each replay."""
    x = torch.randn(4)
    graph, kept = recorded(lambda: x.exp().erf().exp())
    seen: list[str] = []

    def mine(given: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        seen.append("mine")
        return out.fill_(0.5)

    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings(action="ignore"):
            library.impl("erf.out", mine, "CPU")
        graph.replay()
    finally:
        library._destroy()
    assert seen == ["mine"]
    assert bits_equal(kept, torch.full((4,), 0.5).exp())
    graph.replay()
    assert bits_equal(kept, x.exp().erf().exp())
