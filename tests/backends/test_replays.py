"""Replays of CPU graphs give eager's bits, by Python's loop and by the tape: one table of programs for all operators.

Random programs of these are in ``tests/property/test_programs.py``.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from graphdispatch.backends.cpu.backend import loop
from graphdispatch.backends.operators import bits_equal, tensors_in
from graphdispatch.native.tape import TAPE

from ..helpers import recorded

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NUMBERS = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)
ROWS, COLUMNS = 4, 6
ROW, FEW, IDS = torch.tensor([0]), torch.tensor([1, 0]), torch.tensor([[1, 0], [2, 2]])
MASK = torch.rand(7, ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) > 0.5
LINE = [1.5, 2.5, 3.5, 0.5, 0.25, 2.0]
GENERATOR = torch.Generator()


def values(dtype: torch.dtype, rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    """Numbers of a dtype, large and small, some of them negative; floats have zeros and what is no number, too."""
    x = torch.randn(rows, columns, dtype=torch.float64).exp() * torch.randn(rows, columns)
    if dtype.is_floating_point:
        x[0, :4] = torch.tensor([0.0, -0.0, math.inf, math.nan])
    return (x * 10 + 0.25).to(dtype)


def resized(x: Tensor) -> Tensor:
    """New memory that grows."""
    own = torch.zeros(2, dtype=x.dtype)
    own.resize_(ROWS, COLUMNS)
    return own.copy_(x).add_(1)


def with_data(x: Tensor) -> Tensor:
    """A tensor that gets the memory of another."""
    y = torch.zeros(2, dtype=x.dtype)
    y.data = x * 2
    return y + 1


def out_that_grows_late(x: Tensor) -> Tensor:
    """A result in a part of other memory, which grows."""
    out = torch.ones(1, dtype=x.dtype)[:0]
    return torch.mul(torch.add(x[:1], 1, out=out), 2) + out.sum() + x


def kept(x: Tensor) -> Tensor:
    """A literal that somebody keeps."""
    KEPT[:] = [torch.tensor([1.0, 2.0])]
    return KEPT[0].mul_(x[1, :2]) + 1


KEPT: list[Tensor] = []
CASES: dict[str, tuple[Callable[[Tensor], Any], tuple[torch.dtype, ...]]] = {
    "numbers": (lambda x: (x * 2 + 1, 3 - x, x / 2, x**2), NUMBERS[:-2]),
    "complex numbers": (
        lambda x: (x * (1 + 2j), x.abs(), x.conj() + x, x.real * 2),
        (torch.complex64, torch.complex128),
    ),
    "comparisons": (lambda x: (x > 0.5, torch.where(x > 0, x, x + x), x.eq(x.flip(0))), NUMBERS[:-2]),
    "lists": (lambda x: (torch.cat([x, x + 1], 1), torch.stack([x, x * 2])), NUMBERS),
    "indices": (lambda x: (x[:, [2, 0]] + x[:, :2], x[FEW, FEW + 1] * 2), NUMBERS),
    "reductions": (lambda x: (x.sum(1), x.amax(0), x.max(1), (x[:, ::2] + 1).amin(-1, keepdim=True)), FLOATS),
    "integer reductions": (lambda x: (x.sum(), x.sum(0, dtype=torch.float32), x.argmax(1)), NUMBERS[4:7]),
    "means": (lambda x: (x.mean(), x.mean([]), x.mean(-1, keepdim=True), x.mean([0, 1]), x[0, 0].mean()), FLOATS),
    "means of views": (
        lambda x: (x.t().mean(0), x[:, ::2].mean(0), x[:1, :1].mean([0]), x.view(2, 2, COLUMNS).mean([1, -1])),
        FLOATS,
    ),
    "means of nothing and of another type": (
        lambda x: (x[:0].mean(0), x.int().float().mean([0]), x.int().mean([0], dtype=torch.float32)),
        FLOATS,
    ),
    "products": (lambda x: (x @ x.t(), torch.addmm(x @ x.t(), x, x.t(), beta=2)), FLOATS[:3]),
    "sorts": (lambda x: (x.sort(1), x.topk(2, 1), x.cumsum(0)), FLOATS),
    "casts": (lambda x: (x.to(torch.float64), x.to(torch.int32) + 1, x.bool()), NUMBERS[:-1]),
    "copies": (
        lambda x: (
            x.clone(),
            x.t().clone(),
            x.t().contiguous(),
            x[:, :1].expand(-1, 9).clone(),
            torch.embedding(x, IDS),
        ),
        NUMBERS,
    ),
    "one row": (lambda x: (torch.embedding(x, IDS[0, 0]), x.masked_fill(MASK, 2)), NUMBERS),
    "fills": (
        lambda x: (
            torch.zeros_like(x) + x,
            torch.ones_like(x) + x,
            torch.full_like(x, 3) + x,
            x.new_full([6], True) + x,
        ),
        NUMBERS,
    ),
    "made anew": (lambda x: (torch.arange(6) + x, torch.full((2,), 7.5) * x.sum(), x.new_zeros(6) + x), FLOATS),
    "relu": (lambda x: (x.relu(), x.t().relu(), x[:, ::2].relu(), x[0, 0].relu()), NUMBERS[:6]),
    "softmax": (lambda x: (x.softmax(1), x.log_softmax(0), nn.functional.gelu(x, approximate="tanh")), FLOATS),
    "norms": (lambda x: (nn.functional.layer_norm(x, (COLUMNS,)), x.norm(dim=1)), FLOATS[:2]),
    "convolution": (lambda x: nn.functional.conv1d(x[None], x[:, :ROWS, None].contiguous()), FLOATS[:2]),
    "views": (lambda x: (x.t().contiguous() + 1, x.expand(2, ROWS, COLUMNS).clone(), x[1:, ::2] * 2), NUMBERS[:-2]),
    "formats": (lambda x: x.view(1, 1, 4, 6).contiguous(memory_format=torch.channels_last) * 2, FLOATS),
    "in place": (lambda x: x.clone().mul_(2).add_(x, alpha=3).clamp_(min=-1).masked_fill_(x > 1, 5), FLOATS),
    "indexed writes": (lambda x: x.clone().index_put_((FEW[:1],), x[0]).index_fill_(1, ROW, 2), NUMBERS),
    "a literal that is written": (lambda x: x + torch.tensor(LINE).mul_(x.sum()), FLOATS),
    "a literal that is returned": (
        lambda x: (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]).add_(x[:2, 0])),
        FLOATS,
    ),
    "a literal that is written later": (
        lambda x: (literal := torch.tensor([1.0, 2.0])) * 2 + literal.mul_(x[1, 1]),
        FLOATS,
    ),
    "a literal that is kept": (kept, FLOATS[:1]),
    "several results of one operator": (
        lambda x: (
            torch.linalg.qr(x[1:])[1],
            torch.cat(torch.linalg.qr(x[1:]), 1),
            torch.stack([one.float() for one in x.max(1)]),
        ),
        FLOATS[:1],
    ),
    "draws": (lambda x: (torch.rand_like(x), nn.functional.dropout(x, 0.5), x.clone().normal_()), FLOATS),
    "draws that nobody reads": (
        lambda x: (torch.rand(7), torch.rand(2, out=torch.empty(2)), x + torch.rand(6))[2],
        FLOATS,
    ),
    "a generator": (lambda x: x + torch.rand(6, generator=GENERATOR), FLOATS[:1]),
    "unsqueeze_": (lambda x: (x * 2).unsqueeze_(0) + 1, FLOATS[:1]),
    "t_": (lambda x: (x * 2).t_() @ x, FLOATS[:1]),
    "squeeze_ and unsqueeze_": (lambda x: (x[:1] * 2).squeeze_(0).unsqueeze_(1).mul_(3), FLOATS[:1]),
    "resize_": (resized, FLOATS[:1]),
    "set_": (lambda x: torch.empty(0).set_(x * 2) + 1, FLOATS[:1]),
    "data": (with_data, FLOATS[:1]),
    "out= that grows": (lambda x: torch.add(x, 1, out=torch.empty(0)) * 2, FLOATS[:1]),
    "out= that grows late": (out_that_grows_late, FLOATS[:1]),
}
"""Programs of a tensor, and the types of numbers that it may have."""


def outcomes(fn: Callable[[Tensor], Any], x: Tensor) -> list[Any]:
    """What eager, Python's loop and a replay give of new values, from the same state, and the generator after it."""
    graph, out = recorded(lambda: fn(x))
    seen = []
    for run in (None, partial(loop, graph.steps), graph.replay):
        torch.manual_seed(3)
        GENERATOR.manual_seed(3)
        kept = []
        for shift in range(2):
            x.copy_(values(x.dtype) + shift)
            got = fn(x) if run is None else (run(), out)[1]
            kept += [one.clone() for one in tensors_in(got)]
        seen.append([*kept, torch.get_rng_state()])
    return seen


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")  # as torch 2.15 says
@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, (_, of) in CASES.items() for dtype in of], ids=str)
def test_bits(name: str, dtype: torch.dtype) -> None:
    """Both give the bits of eager, and draw as it does."""
    eager, *replays = outcomes(CASES[name][0], values(dtype))
    for replay in replays:
        assert len(replay) == len(eager) > 1
        assert all(map(bits_equal, eager, replay))


@pytest.mark.skipif(not TAPE.wait(), reason=repr(TAPE))
def test_the_tape_takes_common_operators() -> None:
    """None of a usual program is left to Python."""
    x = values(torch.float32)
    usual = [
        fn for name, (fn, _) in CASES.items() if name not in ("a generator", "complex numbers") and "_" not in name
    ]
    graph, _ = recorded(lambda: [fn(x) for fn in usual])
    made = TAPE.module.Tape(print, print)
    for one in graph.steps:
        schema = one.func._schema
        assert made.add(print, schema.name, schema.overload_name, *one.operands, one.outs), schema


def names_within(call: Callable[[], object]) -> list[str]:
    """The names of all operators that run within the call, its own first."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        call()
    return [event.name.removeprefix("aten::") for event in profiler.events() if event.name.startswith("aten::")]


@pytest.mark.skipif(not TAPE.wait(), reason="in Python, torch makes tensors of the numbers that operators are given")
def test_a_replay_makes_no_tensor() -> None:
    """Not of a copy or a cast, not of zeros, and not of a number that is compared or a mean's count."""
    x = torch.randn(4, 8)

    def run() -> tuple[Tensor, ...]:
        mean = x.mean(-1, keepdim=True).masked_fill(x[:, :1] > x[:, 1:2], 1)
        filled = torch.zeros_like(x).add_(x) + torch.full((4, 8), 2.0).mul_(x)
        return mean, x.t().contiguous(), filled.double(), ((x > x[:1]) & (x < 0.5)).float().relu()

    graph, _ = recorded(run)
    made = {"empty", "empty_strided", "empty_like", "clone", "_to_copy", "to"}
    assert made.isdisjoint(names_within(graph.replay))
