"""Replays with other padding: what they find, what they must not refuse, and that the caller sees one execution."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphdispatch as gd
from graphdispatch import Graphed, Reason
from graphdispatch.capture.effects import EffectRecorder

from ..helpers import AT_ONCE


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def reason(step: Graphed[..., Any]) -> Reason:
    """Of the latest call."""
    assert step.last_decision is not None
    return step.last_decision.reason


@torch.library.custom_op("graphdispatch_test::store_rows", mutates_args=("cache",))
def store_rows(cache: torch.Tensor, slot: torch.Tensor, x: torch.Tensor) -> None:
    """Its schema says that it writes the whole cache."""
    cache[slot] = x


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "custom operator": store_rows,
    "scatter_": lambda cache, slot, x: cache.scatter_(0, slot[:, None].expand(-1, 3), x),
    "index_copy_": lambda cache, slot, x: cache.index_copy_(0, slot, x),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("first", [3, 4], ids=["padded-first", "full-first"])
def test_a_slot_that_padding_overwrites_is_noticed_while_it_holds_zeros(write: Any, first: int) -> None:
    """Zero padding writes zeros to slot 0, where zeros are; other padding shows the write."""
    cache, eager = torch.zeros(10, 3), torch.zeros(10, 3)

    def fn(x: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        write(cache, slot, x)
        return x * 2

    step = gd.graphed(fn, dynamic={"x": 0, "slot": 0}, sizes=(4,), options=AT_ONCE)
    for slots in ([5, 6, 7, 8][:first], [1, 2, 3, 4], [5, 6, 7], [0, 1, 2], [5, 6, 7], [3, 4]):
        x, slot = torch.randn(len(slots), 3), torch.tensor(slots)
        step(x, slot)
        write(eager, slot, x)
        assert torch.equal(cache, eager)
    assert reason(step) is Reason.PADDING_WRITES_STATE


class Experts(nn.Module):
    """Each row goes to its best expert; rows are sorted by expert in between."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.weights = nn.Linear(32, 4), nn.Parameter(torch.randn(4, 32, 32) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows in, rows out."""
        best = self.gate(x).argmax(-1)
        order = best.argsort(stable=True)
        y = torch.bmm(x[order][:, None], self.weights[best[order]])[:, 0]
        return torch.empty_like(y).index_copy_(0, order, y)


class Attention(nn.Module):
    """Each row of the batch is a sequence of four."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attends within each row."""
        q, k, v = self.qkv(x.view(-1, 4, 8)).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v).reshape(-1, 32)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32)),
    "batch norm": lambda: nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)),
    "attention": Attention,
    "experts": Experts,
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (4, 8)), nn.Conv1d(4, 8, 3), nn.SiLU(), nn.Flatten()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_independent_rows_are_served_padded(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    """No model whose rows are independent is refused."""
    model = make().to(dtype).eval()
    step = gd.graphed(lambda x: model(x), dynamic={"x": 0}, sizes=(8,), options=AT_ONCE)
    for rows in (5, 8, 3, 5, 3):
        x = torch.randn(rows, 32).to(dtype)
        torch.testing.assert_close(step(x), model(x), rtol=2e-2, atol=2e-2)
    assert reason(step) is Reason.PADDED
    assert step.entries[0].proof is not None
    assert step.entries[0].proof.is_complete


def test_a_given_pad_rule_is_kept() -> None:
    """Rows of one segment attend to each other, and padding rows have a segment of their own."""
    first = nn.Linear(8, 24)

    def fn(x: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
        q, k, v = first(x).chunk(3, -1)
        scores = (q @ k.T).masked_fill(segment[:, None] != segment[None], torch.finfo(x.dtype).min)
        return scores.softmax(-1) @ v

    for sizes in ((5, 8, 3, 5, 3), (8, 8, 5, 5, 3, 5)):
        step = gd.graphed(fn, dynamic={"x": 0, "segment": 0}, pad={"segment": -1}, sizes=(8,), options=AT_ONCE)
        for rows in sizes:
            x, segment = torch.randn(rows, 8), torch.arange(rows) // 2
            torch.testing.assert_close(step(x, segment), fn(x, segment))
        assert reason(step) is Reason.PADDED


def test_rows_that_are_left_may_hold_anything() -> None:
    """``Pad.leave`` promises nothing: what an earlier, larger batch left there must not change real rows either."""
    step = gd.graphed(lambda x: x + x.amax(0) * 0.1, dynamic={"x": 0}, pad={"x": "leave"}, sizes=(5,), options=AT_ONCE)
    for rows in (4, 4, 5, 4):
        x = torch.rand(rows, 3) + (9 if rows == 5 else 1)
        assert torch.equal(step(x), x + x.amax(0) * 0.1)


TABLE = torch.randn(12, 3)
PARTICULAR: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "check": lambda x: (torch._assert_async(((x >= 0) & (x < 8)).all()), x * 2)[1],
    "index": lambda x: TABLE[x[:, 0].long()] + x,
    "written index": lambda x: TABLE[torch.empty(len(x), dtype=torch.int64).copy_(x[:, 0])] + x,
    "bits of a number": lambda x: TABLE[((x[:, 0] + 1).view(torch.int32) >> 23).long() - 126] + x,
    "exponent": lambda x: TABLE[torch.frexp(x[:, 0] + 1).exponent.long() * 3 - 3] + x,
    "probability": lambda x: nn.functional.binary_cross_entropy(x / 8, x / 8, reduction="none"),
}


@pytest.mark.parametrize("fn", PARTICULAR.values(), ids=PARTICULAR)
@pytest.mark.parametrize("first", [3, 4], ids=["padded-first", "full-first"])
def test_a_callable_may_refuse_numbers_that_no_batch_held(
    fn: Callable[[torch.Tensor], torch.Tensor], first: int
) -> None:
    """Such a failure says nothing about its rows; rows that depend on each other are found all the same."""
    step = gd.graphed(fn, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    mixing = gd.graphed(lambda x: fn(x) - x.amax(0), dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    for rows in (first, 4, 3, 3, 2, 3):
        x = torch.rand(rows, 3) * 7
        assert torch.equal(step(x), fn(x))
        assert torch.equal(mixing(x), fn(x) - x.amax(0))
    assert reason(step) is Reason.PADDED
    assert reason(mixing) is Reason.VERIFICATION_FAILED


@pytest.mark.parametrize("name", PARTICULAR)
def test_numbers_that_no_batch_held_are_not_tried_where_a_gpu_would_fail_for_good(name: str) -> None:
    """A GPU that meets a failing check, or an index out of range, is of no use to the process any more."""
    effects = EffectRecorder(1 << 20)
    with effects:
        PARTICULAR[name](torch.rand(3, 3))
    assert effects.limits_values is (name != "exponent")
    with EffectRecorder(1 << 20) as plain:
        (torch.rand(3, 3).softmax(-1).argmax(-1) > 1).to(torch.float32)
    assert not plain.limits_values


def test_the_caller_sees_one_execution() -> None:
    """State, arguments and the random generator are as after one eager call, whatever is replayed."""
    count, ours = torch.zeros((), dtype=torch.int64), torch.Generator().manual_seed(1)

    def fn(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        x.mul_(2)
        return x + torch.rand(3) + torch.rand(3, generator=ours)

    step = gd.graphed(fn, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    theirs = torch.Generator().manual_seed(1)
    torch.manual_seed(7)
    got = []
    for _ in range(5):
        x = torch.ones(3, 3)
        got.append(step(x))
        assert torch.equal(x, torch.full((3, 3), 2.0))
    torch.manual_seed(7)
    for answer in got:
        assert torch.equal(answer, torch.full((3, 3), 2.0) + torch.rand(3) + torch.rand(3, generator=theirs))
    assert int(count) == 5


def test_the_proof_says_what_changed() -> None:
    """The entry keeps it, and ``explain`` prints it."""
    step = gd.graphed(lambda x: (x * 2, x - x.amax(0)), dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    step(torch.rand(3, 3))
    proof = step.entries[0].proof
    assert proof is not None
    assert (proof.independent, proof.deterministic, proof.perturbation) == (False, True, "large numbers")
    assert proof.what.startswith("output 1 changes")
    assert "with large numbers in the padding rows, output 1 changes" in step.explain(torch.rand(3, 3))


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_bounded_maximum_beside_a_cache(mode: str) -> None:
    """The real rows reach the bound, so that padding shows only behind smaller ones; also where rows are kept."""
    scale, cache = torch.full((4,), 3.0), torch.zeros(9, 4)

    def fn(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        h = x * scale
        h = h + h.amax(0).clamp(max=0.3)
        if mode == "PIECEWISE":
            h = gd.eager_break(torch.neg)(h)
        cache[slots] = h
        return cache[slots]

    options = gd.CUDAGraphOptions(padding_writes="allow")
    step = gd.graphed(fn, dynamic={"x": 0, "slots": 0}, sizes=(4,), mode=mode, options=options.replace(capture_after=1))
    for _ in range(3):
        x, slots = torch.rand(3, 4) + 1, torch.randperm(8)[:3] + 1
        assert torch.equal(step(x, slots), fn(x, slots))
    x, slots = -torch.rand(3, 4) - 1, torch.tensor([1, 2, 3])
    assert torch.equal(step(x, slots), fn(x, slots))
    assert step.entries[0].proof is not None
    assert not step.entries[0].proof.independent
    assert "small ones in the real rows" in step.entries[0].proof.perturbation


@pytest.mark.parametrize("mixes", [False, True])
def test_groups_of_rows_are_compared_within_the_tolerance(mixes: bool) -> None:
    """A grouped product computes a row with its group, whose size is data: other padding, other last bits."""
    table, experts = torch.randn(100, 64), torch.randn(4, 64, 48)

    def fn(ids: torch.Tensor) -> torch.Tensor:
        chosen = ids % 4
        order = chosen.argsort(stable=True)
        ends = (chosen[:, None] == torch.arange(4)).sum(0).cumsum(0).to(torch.int32)
        sums = torch.empty(len(ids), 48).index_copy(0, order, torch._grouped_mm(table[ids][order], experts, ends))
        return sums - sums.amax(0) if mixes else sums

    step = gd.graphed(fn, dynamic={"ids": 0}, sizes=(8,), options=AT_ONCE)
    for _ in range(5):
        ids = torch.randint(0, 100, (5,))
        assert torch.allclose(step(ids), fn(ids), rtol=1e-4, atol=1e-4)
    assert reason(step) is (Reason.VERIFICATION_FAILED if mixes else Reason.PADDED)
    if not mixes:
        assert step.entries[0].proof is not None
        assert not step.entries[0].proof.deterministic
