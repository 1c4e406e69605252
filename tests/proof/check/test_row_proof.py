"""Rows that mix, whatever the batches hold, and rows that do not: what is padded, and that the answers are eager's."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphdispatch as gd
from graphdispatch import Reason

from ...helpers import AT_ONCE, check_calls, check_rows, make, shown_of

NEAR = {"rtol": 1e-5, "atol": 1e-8}
IN_TWO = {0: gd.Dim("batch", [4]), 1: gd.Dim("seq", [8])}


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


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32)),
    "batch norm": lambda: nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 8)), nn.TransformerEncoderLayer(8, 1, 16, batch_first=True), nn.Flatten()
    ),
    "experts": Experts,
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (4, 8)), nn.Conv1d(4, 8, 3), nn.SiLU(), nn.Flatten()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_independent_rows_are_served_padded(model: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    """No model whose rows are independent is refused."""
    served = model().to(dtype).eval()
    step = make(lambda x: served(x), sizes=(8,))
    reasons = check_calls(step, *(torch.randn(rows, 32).to(dtype) for rows in (5, 8, 3, 5, 3)), rtol=2e-2, atol=2e-2)
    assert reasons[-1] is Reason.PADDED, step.last_decision


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
    batches = [torch.rand(rows, 3) * 7 for rows in (first, 4, 3, 3, 2, 3)]
    step, mixing = make(fn, sizes=(4,)), make(lambda x: fn(x) - x.amax(0), sizes=(4,))
    is_ruled = fn not in (PARTICULAR["check"], PARTICULAR["probability"])  # what checks all rows, and has no rule
    assert check_calls(step, *batches)[-1] is (Reason.PADDED if is_ruled else Reason.PADDING_UNPROVEN)
    assert not check_calls(mixing, *batches)[-1].is_graph


PLAIN = {"plain": lambda x: (x.softmax(-1).argmax(-1) > 1).to(torch.float32)}


@pytest.mark.parametrize("name", [*PARTICULAR, *PLAIN])
def test_numbers_that_no_batch_held_are_not_tried_where_a_gpu_would_fail_for_good(name: str) -> None:
    """A GPU that meets a failing check, or an index out of range, is of no use to the process any more."""
    step = make((PARTICULAR | PLAIN)[name], sizes=(4,))
    step(torch.rand(4, 3))
    assert shown_of(step).operators.limits_values is (name != "plain")


def test_the_reason_names_the_operator_and_the_line() -> None:
    """``explain`` prints it; full batches are served."""
    step = make(lambda x: (x * 2, x - x.amax(0)), sizes=(4,))
    check_calls(step, torch.rand(4, 3), torch.rand(3, 3), torch.rand(4, 3))
    assert not shown_of(step).proof.independent
    assert re.search(r"rows mix in aten::amax.*, test_row_proof\.py:\d+", step.explain(torch.rand(3, 3)))
    assert check_rows(step, 4) == [Reason.EXACT]


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

    step = make(fn, dynamic={"x": 0, "slots": 0}, sizes=(4,), mode=mode, padding_writes="allow")
    check_calls(step, *((torch.rand(3, 4) + 1, torch.randperm(8)[:3] + 1) for _ in range(3)))
    check_calls(step, (-torch.rand(3, 4) - 1, torch.tensor([1, 2, 3])))
    assert not shown_of(step).proof.independent


@pytest.mark.parametrize("mixes", [False, True])
def test_groups_of_rows_are_compared_within_the_tolerance(mixes: bool) -> None:
    """A grouped product computes a row with its group, whose size is data: other padding, other last bits."""
    gate, experts = torch.randn(64, 4), torch.randn(4, 64, 48)

    def fn(x: Tensor) -> Tensor:
        chosen = (x @ gate).argmax(-1)
        order = chosen.argsort(stable=True)
        ends = torch.histc(chosen[order].float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        sums = torch._grouped_mm(x[order], experts, ends)[order.argsort()]
        return sums - sums.amax(0) if mixes else sums

    step = make(fn, sizes=(8,))
    reasons = check_calls(step, *(torch.randn(5, 64) for _ in range(5)), rtol=1e-4, atol=1e-4)
    assert reasons[-1] is (Reason.ROWS_MIX if mixes else Reason.PADDED), step.last_decision


EMBEDDINGS = torch.randn(50, 16, generator=torch.Generator().manual_seed(5), device="cpu").to(
    torch.get_default_device()
)
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
    "largest_embedding": lambda x, ids: x + EMBEDDINGS[ids].amax(0)[:3],
    "row_of_minimum": lambda x, ids: x * EMBEDDINGS[ids.amin()][:3],
}
HOW: dict[str, dict[str, Any]] = {
    "default": {},
    "rule": {"pad": {"ids": 0}},
    "scratch_row": {"options": gd.CUDAGraphOptions(padding_writes="allow")},
}


@pytest.mark.parametrize("ahead", [False, True], ids=["served", "prewarmed"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", BY_IDS)
def test_zeros_in_each_early_batch(name: str, how: str, ahead: bool) -> None:
    """Padding of zeros is neutral while each batch holds a zero, and later it is not."""
    step = make(BY_IDS[name], dynamic={"x": 0, "ids": 0}, sizes=(4, 8), **HOW[how])
    if ahead:
        step.prewarm(torch.randn(3, 3), torch.tensor([0, 3, 5]))
    check_calls(step, *((torch.randn(3, 3), torch.tensor([0, 3, 5])[torch.randperm(3)]) for _ in range(4)))
    later = [(torch.randn(rows, 3), torch.randint(2, 9, (rows,))) for rows in (3, 5, 1, 7, 2, 6) * 2]
    check_calls(step, *later, **NEAR)


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
@pytest.mark.parametrize("pad", [{}, {"x": 0.0}, {"x": "leave"}], ids=["default", "rule", "left"])
@pytest.mark.parametrize("name", BY_NUMBERS)
def test_small_numbers_in_each_early_batch(name: str, pad: Any, ahead: bool) -> None:
    """Padding of zeros is neutral while each batch holds numbers near zero, and later it is not."""
    step, place = make(BY_NUMBERS[name], sizes=(4, 8), pad=pad), torch.tensor([[0.01], [1.0], [1.0]])
    if ahead:
        step.prewarm(torch.rand(3, 3) * 9 * place)
    check_calls(step, *(torch.rand(3, 3) * 9 * place[torch.randperm(3)] for _ in range(4)))
    check_calls(step, *(torch.rand(rows, 3) * 9 + 2 for rows in (3, 5, 1, 7, 2, 6) * 2), **NEAR)


@pytest.mark.parametrize(("kind", "hiding"), [(torch.int64, 2), (torch.float32, 2), (torch.int64, 6)])
def test_what_one_batch_hides_the_next_one_shows(kind: torch.dtype, hiding: int) -> None:
    """Numbers that may become indices come from batches. So padded ones are served after two that proved, at least."""
    step, batches = make(lambda x: x + x.long().amin(), sizes=(4,)), torch.randint(2, 9, (8, 3, 3)).to(kind)
    batches[:hiding, :, 0] = 0  # as padding is
    assert check_calls(step, *batches)[-1] is Reason.ROWS_MIX


@pytest.mark.parametrize(
    "dynamic", [{0: "batch", 1: gd.Dim("seq", [4, 8])}, {0: "n", 1: "n"}], ids=["two dimensions", "one twice"]
)
@pytest.mark.parametrize("extreme", [torch.amin, torch.amax])
def test_a_gate_of_zeros_beside_several_dimensions(dynamic: Any, extreme: Callable[..., Tensor]) -> None:
    """Padding of both signs is tried in each place, so that an extreme over the batch shows behind the gate."""
    gate, sign = torch.zeros(1), -1 if extreme is torch.amin else 1
    step = make(lambda x: x + gate * extreme(x[:, 0], 0), dynamic={"x": dynamic}, sizes=(4, 8))
    check_calls(step, *(sign * (torch.rand(6, 2, 2) + 1)))
    gate.fill_(1.0)
    check_calls(step, -sign * (torch.rand(2, 2) + 1))


def test_a_mask_of_other_numbers_later_keeps_the_proof() -> None:
    """The second batch asks for what the first one has shown, whether or not its mask holds zeros and ones alone."""
    table = torch.randn(16, 3)

    def fn(x: Tensor, mask: Tensor) -> Tensor:
        return (table[(x.abs() * 4).clamp(max=15).long()] * mask[:, :, None]).sum(1)

    dims = {0: "batch", 1: gd.Dim("seq", [4, 8])}
    step = make(fn, dynamic={"x": dims, "mask": {0: "batch", 1: "seq"}})
    masks = (1.0, 1.0, 0.5, 0.5, 0.5, 0.5)
    reasons = check_calls(step, *((torch.randn(1, 1), torch.full((1, 1), mask)) for mask in masks), atol=1e-6)
    assert reasons[-1] is Reason.PADDED, step.last_decision


@pytest.mark.parametrize("rows", [(3, 3, 1, 1, 1, 3), (4, 1, 1, 4)])
def test_one_row_of_an_output_with_gaps(rows: tuple[int, ...]) -> None:
    """A tensor of one element has any strides, and is compared all the same."""
    step = make(lambda x: (x * 2)[:, 0], sizes=(4,))
    assert check_rows(step, *rows)[-1].is_graph, step.last_decision


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize("pad", [{}, {"mask": 0}], ids=["default", "rule"])
@pytest.mark.parametrize("size", [4, 8], ids=["one-of-padding", "five-of-padding"])
def test_each_early_mask_hides_something(kind: torch.dtype, pad: dict[str, Any], size: int) -> None:
    """Whether all is shown is a question to all rows, padding included."""
    step = make(lambda x, mask: x * (1 + (mask == 1).all()), dynamic={"x": 0, "mask": 0}, sizes=(size,), pad=pad)
    masks = [torch.ones(3, 5).index_put_((torch.arange(3), torch.randperm(5)[:3]), torch.tensor(0.0)) for _ in "four"]
    check_calls(step, *((torch.randn(3, 3), mask.to(kind)) for mask in (*masks, torch.ones(3, 5))))


@pytest.mark.parametrize("size", [4, 8], ids=["one-of-padding", "five-of-padding"])
def test_a_mask_of_padding_hides_no_large_numbers(size: int) -> None:
    """Each early batch hides something, so that padding that is hidden changes nothing."""
    step = make(
        lambda x, mask: x + x.masked_fill(mask == 0, -1e9).sum(0).relu(), dynamic={"x": 0, "mask": 0}, sizes=(size,)
    )
    early = (torch.ones(3, 4, dtype=torch.int64).scatter_(0, torch.randint(3, (1, 4)), 0) for _ in "five")
    check_calls(step, *((-torch.rand(3, 4) - 1, mask) for mask in early))
    check_calls(step, (torch.rand(3, 4), torch.ones(3, 4, dtype=torch.int64)), **NEAR)


BY_TOKENS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "minimum_of_a_row": lambda ids, mask: EMBEDDINGS[ids] + ids.amin(1)[:, None, None],
    "minimum_of_all": lambda ids, mask: EMBEDDINGS[ids] + ids.amin(),
    "any_zero": lambda ids, mask: EMBEDDINGS[ids] + (ids == 0).any(1)[:, None, None],
    "all_shown_in_a_row": lambda ids, mask: EMBEDDINGS[ids] * (1 + mask.all(1)[:, None, None].float()),
    "all_shown": lambda ids, mask: EMBEDDINGS[ids] * (1 + mask.all().float()),
    "smallest_of_the_mask": lambda ids, mask: EMBEDDINGS[ids] * (1 + mask.amin().float()),
}


@pytest.mark.parametrize("rule", [False, True], ids=["default", "rule"])
@pytest.mark.parametrize("name", BY_TOKENS)
def test_along_a_sequence(name: str, rule: bool) -> None:
    """The same along a second dynamic dimension, where each early row holds a zero and hides a token."""
    seq = gd.Dim("seq", sizes=[8, 16], pad={"mask": 0} if rule else {})
    step = make(BY_TOKENS[name], dynamic={"ids": {0: "batch", 1: seq}, "mask": {0: "batch", 1: "seq"}})
    for number in range(60):
        rows, length = (int(torch.randint(low, high, ())) for low, high in ((1, 5), (2, 17)))
        ids = torch.randint(int(number >= 20), 50, (rows, length))
        mask = torch.ones_like(ids)
        if number < 20:
            ids[:, 0] = 0
        if number < 30:
            mask[:, length // 2 :] = 0
        check_calls(step, (ids, mask), rtol=1e-5, atol=1e-5)


def test_a_large_sum_that_counts_rows() -> None:
    """A few rows more are small beside it."""
    seen = torch.tensor(50_000.0)
    check_rows(make(lambda x: (seen.add_(len(x)), x * 2)[1]), 4, 4, 3, 3, 3, fn=lambda x: x * 2)
    assert float(seen) == 50_017.0


def _mean(h: Tensor, lengths: Tensor) -> Tensor:
    return (h * (torch.arange(h.shape[1]) < lengths[:, None])[..., None]).sum(1) / lengths[:, None]


def _last(h: Tensor, lengths: Tensor) -> Tensor:
    return h.cumsum(1)[torch.arange(len(h)), lengths - 1]


@pytest.mark.parametrize(("fn", "first"), [(_mean, 0), (_mean, 5), (_mean, 8), (_last, 0), (_last, 5)])
def test_lengths_that_the_first_batch_fills(fn: Callable[..., Tensor], first: int) -> None:
    """Such a batch cannot tell; later ones can, and a prewarm does not cut its example shorter than they say."""
    step = gd.graphed(fn, dynamic={"h": IN_TWO, "lengths": 0}, options=AT_ONCE)
    if not first:
        step.prewarm(torch.randn(4, 8, 3), torch.tensor([1, 2, 3, 4]))
    lengths = [first or 8] * 2 + [8, 8, 5, 5, 5, 5]
    reasons = check_calls(step, *((torch.randn(3, n, 3), torch.tensor([n, 1, 2])) for n in lengths), **NEAR)
    assert reasons[-1] is Reason.PADDED, step.last_decision


def _encoded(ids: Tensor) -> Tensor:
    h = EMBEDDINGS[ids] + EMBEDDINGS[: ids.shape[1]]
    return (h @ h.mT).masked_fill((ids == 0)[:, None], -1e9).softmax(-1) @ h


def test_ids_whose_mask_is_made_of_them_are_served() -> None:
    """Under a pad rule of zero, where ragged batches hold zeros themselves, and positions are added."""
    step = gd.graphed(_encoded, dynamic={"ids": IN_TWO}, pad={"ids": 0}, options=AT_ONCE)
    ragged = (torch.randint(1, 50, shape).tril(2) for shape in [(4, 8), (3, 5), (2, 6)] * 3)
    assert check_calls(step, *ragged, rtol=1e-4, atol=1e-4)[-1] is Reason.PADDED, step.last_decision


def test_rows_that_do_not_depend_are_served() -> None:
    """Embeddings, a table of one entry, ranges of a begin and an end: all are graphs still."""

    def fn(ids: Tensor, spans: Tensor, kinds: Tensor) -> Tensor:
        inside = (torch.arange(9) >= spans[:, :1]) & (torch.arange(9) < spans[:, 1:])
        return EMBEDDINGS[ids] + EMBEDDINGS[:1][kinds] + inside.float().sum(1, keepdim=True)

    step = make(fn, dynamic={"ids": 0, "spans": 0, "kinds": 0}, sizes=(4,))
    for _ in range(8):
        begin = torch.randint(0, 4, (3, 1))
        spans = torch.cat([begin, begin + torch.randint(1, 5, (3, 1))], 1)
        check_calls(step, (torch.randint(0, 50, (3,)), spans, torch.zeros(3, dtype=torch.int64)))
    assert shown_of(step).proof.independent


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float16, torch.uint16, torch.uint8])
def test_narrow_types_are_served(kind: torch.dtype) -> None:
    """Numbers of which integers are made, and flags, in types that torch can do little with."""

    def fn(x: Tensor, flags: Tensor) -> Tensor:
        return (x.to(torch.float32).to(torch.int64) % 5) * flags.to(torch.int64)

    step = make(fn, dynamic={"x": 0, "flags": 0}, sizes=(4,))
    batches = (((torch.rand(3, 4) * 9).to(kind), torch.randint(0, 2, (3, 4)).to(kind)) for _ in range(5))
    assert check_calls(step, *batches)[-1].is_graph, step.last_decision


GATES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "gate": (lambda x, a: x + a * x.mean(0), torch.zeros(4)),
    "number": (lambda x, a: x + a * x.amax(0), torch.tensor(0.0)),
    "double": (lambda x, a: x + (a * x.amin(0)).float(), torch.tensor(0.0, dtype=torch.float64)),
    "half": (lambda x, a: x + a * x.std(0, unbiased=False), torch.zeros(4, dtype=torch.bfloat16)),
    "view": (lambda x, a: x + a[0].view(-1).expand(4) * x.mean(0), torch.zeros(2, 1)),
    "flag": (lambda x, a: torch.where(a, x.softmax(0), x), torch.tensor(False)),
    "flag_on": (lambda x, a: torch.where(a, x, x.softmax(0)), torch.tensor(True)),
    "flag_as_number": (lambda x, a: x + a.float() * x.mean(0), torch.tensor(False)),
    "integer": (lambda x, a: x + a * x.mean(0), torch.tensor(0)),
    "product": (lambda x, a: x + x.mean(0) @ a, torch.zeros(4, 4)),
}


@pytest.mark.parametrize("rows", [3, 4], ids=["padded-first", "full-first"])
@pytest.mark.parametrize("is_argument", [False, True], ids=["state", "argument"])
@pytest.mark.parametrize("name", GATES)
def test_zeros_and_flags_hide_nothing(name: str, is_argument: bool, rows: int) -> None:
    """Padded batches run eagerly, before and after state or an argument without rows holds other numbers; full ones
    are served."""
    fn, zeros = GATES[name]
    gate = zeros.clone()
    step = gd.graphed((lambda x, a: fn(x, a)) if is_argument else lambda x: fn(x, gate), dynamic={"x": 0}, sizes=[4])

    def check(*rows: int) -> None:
        more = (gate.clone(),) if is_argument else ()
        check_calls(step, *((torch.randn(one, 4), *more) for one in rows), **NEAR)

    check(rows, rows, rows, 3, 4, 3)
    assert step.last_decision.reason in (Reason.ROWS_MIX, Reason.PADDING_UNPROVEN)
    assert torch.equal(gate, zeros)
    gate.copy_(~zeros if zeros.dtype is torch.bool else zeros + 1)
    check(3, 4, 4, 4, 2)
    assert is_argument or step.stats.hits > 0


@pytest.mark.parametrize("rows", [3, 4], ids=["padded-first", "full-first"])
@pytest.mark.parametrize("pad", [None, {"x": "repeat_last"}, {"x": 7.0}], ids=["zeros", "repeat_last", "number"])
@pytest.mark.parametrize("level", [torch.full((4,), 20.0), torch.tensor(20)], ids=["numbers", "count"])
def test_what_is_written_hides_nothing(level: Tensor, pad: Any, rows: int) -> None:
    """State that the call writes is large at first, and keeps a bounded function from telling rows apart."""
    if not (level.is_floating_point() or torch.zeros(()).is_cpu):
        pytest.skip("integers change on the CPU alone: elsewhere they may be indices that nobody checks")

    def bounded(x: Tensor, level: Tensor) -> Tensor:
        level.add_(1)
        x = torch.tanh(x + level)
        return x + x.mean(0)

    ours, eagers = level.clone(), level.clone()
    step = gd.graphed(lambda x: bounded(x, ours), dynamic={"x": 0}, sizes=[4], pad=pad)
    check_calls(step, *(torch.rand(one, 4) for one in (rows, rows, rows, 3, 4, 3)), fn=lambda x: bounded(x, eagers))
    assert step.last_decision.reason is Reason.ROWS_MIX
    for one in (ours, eagers):
        one.fill_(-1)
    check_calls(step, torch.rand(3, 4), fn=lambda x: bounded(x, eagers))


@pytest.mark.parametrize("rows", [3, 4], ids=["padded-first", "full-first"])
def test_what_is_written_shows_it(rows: int) -> None:
    """Rows that would mix in state alone are found in the state."""

    rate, mean, expected = torch.zeros(()), torch.ones(4), torch.ones(4)

    def fn(x: Tensor) -> Tensor:
        mean.add_(rate * x.sum(0))
        return x * 2

    step = gd.graphed(fn, dynamic={"x": 0}, sizes=[4])
    for one in (rows, rows, rows, 3, 4, 3):
        step(torch.rand(one, 4))
    assert torch.equal(mean, expected)
    rate.fill_(1)
    for x in (torch.rand(rows, 4) + 1 for rows in (3, 2, 3)):
        assert torch.equal(step(x), x * 2)
        expected += x.sum(0)
        assert torch.allclose(mean, expected), step.last_decision


def test_rows_apart_are_served() -> None:
    """Layers with zero biases, zero statistics, integer buffers and a state of zeros are served padded, as ever."""

    layer, norm, kinds = nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.Embedding(1, 4)
    layer.bias.zero_()
    places, mask, steps = torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.bool), torch.zeros(())

    def plain(x: Tensor) -> Tensor:
        steps.add_(1)
        y = norm(layer(x)) + kinds(places[0])
        return y.masked_fill(~mask, -1.0)[:, places]

    step = gd.graphed(plain, dynamic={"x": 0}, sizes=[4])
    for calls, rows in enumerate((3, 3, 4, 3, 3), 1):
        reasons = check_rows(step, rows, width=4, **NEAR)
        assert int(steps) == 2 * calls  # eager's are half
    assert reasons == [Reason.PADDED]
    assert not bool(norm.running_mean.any())
    assert not bool(layer.bias.any())


def test_a_size_with_other_tensors_is_proven_by_itself() -> None:
    """The same operators in the same order, of which one reads other rows for a larger size: it shares no proof."""
    weight = torch.full((4, 3), -9.0)

    def fn(x: Tensor) -> Tensor:
        of_rows, of_weight = x.amax(0), weight.amax(0)
        return x + (of_rows if x.shape[0] > 8 else of_weight)

    step = make(fn, sizes=(8, 16))
    check_calls(step, *(torch.rand(rows, 3) for rows in (8, 8, 6, 6, 16, 16, 12, 12)))
    check_calls(step, -torch.rand(12, 3), -torch.rand(12, 3))


@pytest.mark.filterwarnings("ignore")
def test_an_operand_of_compiled_code_is_not_compared() -> None:
    """Torch's packed weights of eight bits raise when they are; each size is proven by itself."""
    with torch.device("cpu"):
        model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear}, torch.qint8)
    step = make(model, dynamic={"input": 0}, sizes=(8, 16, 32))
    check_calls(step, *(torch.randn(rows, 8, device="cpu") for rows in (8, 16, 32) * 3))
    assert step.captured_sizes == (8, 16, 32)


COMPARISONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "all larger": lambda x, y: (x > y).all(0),
    "least difference": lambda x, y: (x - y).amin(0).relu(),
    "all smaller": lambda x, y: (x < y).all(0),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_of_two_arguments_over_rows_is_found(name: str) -> None:
    """Of which ordinary batches show nothing."""
    step = make(lambda x, y: x + COMPARISONS[name](x, y).float(), dynamic={"x": 0, "y": 0}, sizes=(8,))
    check_calls(step, *((torch.randn(5, 3), torch.randn(5, 3)) for _ in range(4)))
    check_calls(step, *((x, x + shift) for x, shift in zip(torch.randn(2, 5, 3), (-1.0, 1.0), strict=True)))


def test_two_batches_that_each_hide_an_argument_prove_nothing_together() -> None:
    """One hides what padding of the one does, the other what that of the other does."""
    dynamic = {"x": 0, "ids": 0, "mask": 0}
    step = make(lambda x, ids, mask: x + (ids.amin() * mask)[:, None], dynamic=dynamic, sizes=(4,))
    for ids, mask in ([0, 0], [1, 1]), ([0, 0], [1, 1]), ([3, 5], [0, 0]), ([3, 5], [1, 1]), ([4, 2], [0, 1]):
        check_calls(step, (torch.randn(2, 3), torch.tensor(ids), torch.tensor(mask)))


def _beside_the_next(x: Tensor) -> Tensor:
    """Rows mix in pairs, of which the last may have padding in it."""
    pairs = nn.functional.max_pool1d(x.t()[None], 2, 2, ceil_mode=True)[0].t()
    return x - pairs.repeat_interleave(2, 0)[: len(x)]


@pytest.mark.parametrize("fn", [_beside_the_next, lambda x: x - x[:4].amax(0)], ids=["pairs", "the first four"])
@pytest.mark.parametrize("first", [6, 8])
def test_rows_that_mix_for_some_numbers_of_them_are_found(fn: Callable[[Tensor], Tensor], first: int) -> None:
    """Whatever the numbers hide."""
    step = make(fn, sizes=(8,))
    if first == 8:
        step.prewarm(torch.rand(8, 3) + 1)
    check_calls(step, *(sign * (torch.rand(rows, 3) + 1) for sign in (1, -1) for rows in (8, 8, first, 5, 3, 5, 3)))
    assert step.last_decision.reason in (Reason.ROWS_MIX, Reason.PADDING_UNPROVEN)


def test_a_maximum_over_what_a_mask_makes_zero_is_found() -> None:
    """Positive numbers hide the zeros of a padded length."""
    length = gd.Dim("length", sizes=[4, 8])
    fn: Callable[..., Tensor] = lambda x, mask: x - (x * mask[..., None]).amax(1, keepdim=True)  # noqa: E731
    step = make(fn, dynamic={"x": {0: "batch", 1: length}, "mask": {0: "batch", 1: "length"}}, sizes=(2,))
    shapes = [(2, 8), (2, 8), (2, 8), (2, 7), (2, 7), (1, 6), (1, 7)]
    check_calls(step, *((sign * (torch.rand(*s, 3) + 1), torch.ones(s)) for sign in (1, -1) for s in shapes))
    assert step.last_decision.reason is Reason.ROWS_MIX


def test_gates_that_are_zero_or_one_in_each_early_batch() -> None:
    """Floats that look like flags may hold other numbers later, by which what padding does shows."""

    def fn(x: Tensor, gate: Tensor) -> Tensor:
        return x + (gate * (1 - gate))[:, None] * (x.amax(0) - x.amin(0) > 2)

    step = make(fn, dynamic={"x": 0, "gate": 0}, sizes=(8,))
    check_calls(step, *((torch.randn(5, 3), torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0])) for _ in range(5)))
    check_calls(step, *((torch.rand(rows, 3) + 5, torch.rand(rows)) for rows in (5, 6, 7) * 2), **NEAR)


def test_a_mask_of_what_to_skip_is_tried_beside_several_rows() -> None:
    """Nothing is skipped in some early batches, and only their last row shows what padding does."""

    def fn(x: Tensor, skip: Tensor) -> Tensor:
        return (~skip)[:, None] * (1 + x * (x.sum(-1) > 0.5).all())

    step = make(fn, dynamic={"x": 0, "skip": 0}, sizes=(8,))
    early = torch.tensor([[-1.0], [2.0], [-3.0], [1.0], [4.0]]).expand(5, 3)
    for skipped in [[0, 0, 0, 0, 0], [1, 0, 0, 1, 0]] * 3:
        check_calls(step, (early * (1 + torch.rand(5, 1)), torch.tensor(skipped).bool()))
    check_calls(step, *((torch.rand(5, 3) + 1, torch.zeros(5).bool()) for _ in range(3)), **NEAR)


def test_images_keep_their_order_in_memory() -> None:
    """A run of other rows is made of images that lie in memory as the batch's do, so it dispatches the same operators:
    padded batches are served."""
    step = make(nn.AdaptiveAvgPool2d(1), sizes=(8,), dynamic={"input": 0})
    images = [torch.randn(rows, 3, 4, 4).contiguous(memory_format=torch.channels_last) for rows in (8, 8, 7, 7, 3)]
    assert check_calls(step, *images, rtol=1e-5, atol=1e-6)[-1] is Reason.PADDED
