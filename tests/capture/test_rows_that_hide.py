"""Numbers and masks by which rows depend on each other, in batches that hide what padding does."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import graphdispatch as gd

from ..helpers import AT_ONCE, with_options

TABLE = torch.randn(50, 16, generator=torch.Generator().manual_seed(5))
BY_IDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "minimum": lambda x, ids: x + ids.amin(),
    "maximum_of_negatives": lambda x, ids: x + (-ids).amax(),
    "any_zero": lambda x, ids: x + (ids == 0).any(),
    "zeros_up_to_one": lambda x, ids: x + (ids == 0).sum().clamp(max=1),
    "first_of_sorted": lambda x, ids: x + ids.sort().values[0],
    "place_of_zero": lambda x, ids: x + (ids == 0).to(torch.int64).argmax(),
    "product": lambda x, ids: x + ids.prod(),
    "scattered": lambda x, ids: x + torch.zeros(50).scatter(0, ids, 1.0)[0],
    "running_minimum": lambda x, ids: x + ids.cummin(0).values[-1],
    "largest_embedding": lambda x, ids: x + TABLE[ids].amax(0)[:3],
    "row_of_minimum": lambda x, ids: x * TABLE[ids.amin()][:3],
}
HOW: dict[str, dict[str, Any]] = {
    "default": {},
    "rule": {"pad": {"ids": 0}},
    "scratch_row": {"options": gd.CUDAGraphOptions(padding_writes="allow")},
}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("ahead", [False, True], ids=["served", "prewarmed"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", BY_IDS)
def test_zeros_in_each_early_batch(name: str, how: str, ahead: bool) -> None:
    """Padding of zeros is neutral while each batch holds a zero, and later it is not."""
    fn = BY_IDS[name]
    step = gd.graphed(fn, dynamic={"x": 0, "ids": 0}, sizes=(4, 8), **with_options(HOW[how], capture_after=1))
    if ahead:
        step.prewarm(torch.randn(3, 3), torch.tensor([0, 3, 5]))
    for _ in range(4):
        x, ids = torch.randn(3, 3), torch.tensor([0, 3, 5])[torch.randperm(3)]
        assert torch.equal(step(x, ids), fn(x, ids))
    for rows in (3, 5, 1, 7, 2, 6) * 2:
        x, ids = torch.randn(rows, 3), torch.randint(2, 9, (rows,))
        assert torch.allclose(step(x, ids), fn(x, ids)), step.last_decision


BY_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "smallest_integer": lambda x: x + x.long().amin(),
    "any_rounded_to_zero": lambda x: x + (x.to(torch.int32) == 0).any(),
    "lowest_bucket": lambda x: x + torch.bucketize(x, torch.tensor([1.0, 2.0, 3.0])).amin(),
    "smallest_index": lambda x: x + torch.arange(50.0)[x.long().clamp(0, 49)].amin(0),
    "smallest_positive": lambda x: x + x.clamp(min=0).amin(),
    "any_small": lambda x: x + (x.abs() < 0.5).any(),
    "first_of_sorted": lambda x: x + x.abs().sort(0).values[0].round(),
}


@pytest.mark.parametrize("ahead", [False, True], ids=["served", "prewarmed"])
@pytest.mark.parametrize("how", ["default", "rule", "left"])
@pytest.mark.parametrize("name", BY_NUMBERS)
def test_small_numbers_in_each_early_batch(name: str, how: str, ahead: bool) -> None:
    """Padding of zeros is neutral while each batch holds numbers near zero, and later it is not."""
    fn, numbers = BY_NUMBERS[name], torch.Generator().manual_seed(1)
    pad: Any = {"default": {}, "rule": {"x": 0.0}, "left": {"x": "leave"}}[how]
    step = gd.graphed(fn, dynamic={"x": 0}, sizes=(4, 8), options=AT_ONCE, pad=pad)
    place = torch.tensor([[0.01], [1.0], [1.0]])
    if ahead:
        step.prewarm(torch.rand(3, 3, generator=numbers) * 9 * place)
    for _ in range(4):
        x = torch.rand(3, 3, generator=numbers) * 9 * place[torch.randperm(3, generator=numbers)]
        assert torch.equal(step(x), fn(x))
    for rows in (3, 5, 1, 7, 2, 6) * 2:
        x = torch.rand(rows, 3, generator=numbers) * 9 + 2
        assert torch.allclose(step(x), fn(x)), step.last_decision


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize("how", ["default", "rule"])
def test_each_early_mask_hides_something(kind: torch.dtype, how: str) -> None:
    """Whether all is shown is a question to all rows, padding included."""

    def fn(x: Tensor, mask: Tensor) -> Tensor:
        return x * (1 + (mask == 1).all())

    pad = {"pad": {"mask": 0}} if how == "rule" else {}
    step = gd.graphed(fn, dynamic={"x": 0, "mask": 0}, sizes=(4,), **with_options(pad, capture_after=1))
    for _ in range(4):
        mask = torch.ones(3, 5).index_put_((torch.arange(3), torch.randperm(5)[:3]), torch.tensor(0.0)).to(kind)
        x = torch.randn(3, 3)
        assert torch.equal(step(x, mask), fn(x, mask))
    x, mask = torch.randn(3, 3), torch.ones(3, 5).to(kind)
    assert torch.equal(step(x, mask), fn(x, mask))


BY_TOKENS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "minimum_of_a_row": lambda ids, mask: TABLE[ids] + ids.amin(1)[:, None, None],
    "minimum_of_all": lambda ids, mask: TABLE[ids] + ids.amin(),
    "any_zero": lambda ids, mask: TABLE[ids] + (ids == 0).any(1)[:, None, None],
    "all_shown_in_a_row": lambda ids, mask: TABLE[ids] * (1 + mask.all(1)[:, None, None].float()),
    "all_shown": lambda ids, mask: TABLE[ids] * (1 + mask.all().float()),
    "smallest_of_the_mask": lambda ids, mask: TABLE[ids] * (1 + mask.amin().float()),
}


@pytest.mark.parametrize("rule", [False, True], ids=["default", "rule"])
@pytest.mark.parametrize("name", BY_TOKENS)
def test_along_a_sequence(name: str, rule: bool) -> None:
    """The same along a second dynamic dimension, where each early row holds a zero and hides a token."""
    fn, numbers = BY_TOKENS[name], torch.Generator().manual_seed(1)
    seq = gd.Dim("seq", sizes=[8, 16], pad={"mask": 0} if rule else {})
    dynamic = {"ids": {0: "batch", 1: seq}, "mask": {0: "batch", 1: "seq"}}
    step = gd.graphed(fn, dynamic=dynamic, sizes=(2, 4), options=AT_ONCE)
    for number in range(60):
        rows, length = (int(torch.randint(low, high, (), generator=numbers)) for low, high in ((1, 5), (2, 17)))
        ids = torch.randint(int(number >= 20), 50, (rows, length), generator=numbers)
        mask = torch.ones_like(ids)
        if number < 20:
            ids[:, 0] = 0
        if number < 30:
            mask[:, length // 2 :] = 0
        assert torch.allclose(step(ids, mask), fn(ids, mask), atol=1e-5), (number, step.last_decision)


def test_rows_that_do_not_depend_are_served() -> None:
    """Embeddings, a table of one entry, ranges of a begin and an end: all are graphs still."""

    def fn(ids: Tensor, spans: Tensor, kinds: Tensor) -> Tensor:
        inside = (torch.arange(9) >= spans[:, :1]) & (torch.arange(9) < spans[:, 1:])
        return TABLE[ids] + TABLE[:1][kinds] + inside.float().sum(1, keepdim=True)

    step = gd.graphed(fn, dynamic={"ids": 0, "spans": 0, "kinds": 0}, sizes=(4,), options=AT_ONCE)
    for _ in range(8):
        begin = torch.randint(0, 4, (3, 1))
        spans = torch.cat([begin, begin + torch.randint(1, 5, (3, 1))], 1)
        ids = torch.randint(0, 50, (3,))
        kinds = torch.zeros(3, dtype=torch.int64)
        assert torch.equal(step(ids, spans, kinds), fn(ids, spans, kinds))
    assert step.entries[0].proof is not None
    assert step.entries[0].proof.independent


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float16, torch.uint16, torch.uint8])
def test_narrow_types_are_served(kind: torch.dtype) -> None:
    """Numbers of which integers are made, and flags, in types that torch can do little with."""

    def fn(x: Tensor, flags: Tensor) -> Tensor:
        return (x.to(torch.float32).to(torch.int64) % 5) * flags.to(torch.int64)

    step = gd.graphed(fn, dynamic={"x": 0, "flags": 0}, sizes=(4,), options=AT_ONCE)
    for _ in range(5):
        x, flags = (torch.rand(3, 4) * 9).to(kind), torch.randint(0, 2, (3, 4)).to(kind)
        assert torch.equal(step(x, flags), fn(x, flags))
    assert step.last_decision is not None
    assert step.last_decision.reason.is_graph, step.last_decision
