"""The calls that a replay makes instead of an operator: they give its bits for all values, and prepare nothing."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from graphdispatch.backends.cpu.graph import parts_of
from graphdispatch.backends.operators import bits_equal
from graphdispatch.native.tape import TAPE

from ..helpers import recorded

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)


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
        part.func(*part.args, **part.kwargs)
    assert bits_equal(want, got), (func, args, want, got)
    return True


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


@pytest.mark.parametrize("dtype", DTYPES[:6], ids=str)
def test_relu(dtype: torch.dtype) -> None:
    """It is a clamp, also of what is no number and of negative zeros, and in any memory order."""
    x = values(dtype, 3, 5)
    for given in (x, x.t(), x[:, ::2], x[0, 0]):
        assert compare(aten.relu.out, (given,), aten.relu(given))


def names_within(call: Callable[[], object]) -> list[str]:
    """The names of all operators that run within the call, its own first."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        call()
    return [event.name.removeprefix("aten::") for event in profiler.events() if event.name.startswith("aten::")]


@pytest.mark.skipif(not TAPE.wait(), reason="in Python, torch makes tensors of the numbers that operators are given")
def test_a_replay_makes_no_tensor() -> None:
    """Not of a copy or a cast, not of zeros, and not of a number that is compared or a mean's count."""
    x = torch.randn(4, 8)

    def run() -> tuple[torch.Tensor, ...]:
        mean = x.mean(-1, keepdim=True).masked_fill(x[:, :1] > x[:, 1:2], 1)
        filled = torch.zeros_like(x).add_(x) + torch.full((4, 8), 2.0).mul_(x)
        return mean, x.t().contiguous(), filled.double(), ((x > x[:1]) & (x < 0.5)).float().relu()

    graph, out = recorded(run)
    graph.replay()
    made = {"empty", "empty_strided", "empty_like", "clone", "_to_copy", "to"}
    assert made.isdisjoint(names_within(graph.replay))
    assert bits_equal(out[1], x.t())
    assert bits_equal(out[2], (x + 2 * x).double())
    assert bits_equal(out[3], ((x > x[:1]) & (x < 0.5)).float())
