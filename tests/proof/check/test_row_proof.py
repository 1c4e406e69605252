"""What the proof of rows does for calls: what is padded, what is not and why, and masks that hide a length.

Which programs mix rows, ``tests/proof/rows`` says; here is what becomes of their calls.
"""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphdispatch as gd
from graphdispatch import Reason

from ...helpers import AT_ONCE, Spy, check_calls, check_rows, make, shown_of

NEAR = {"rtol": 1e-5, "atol": 1e-8}
IN_TWO = {0: gd.Dim("batch", [4]), 1: gd.Dim("seq", [8])}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32)),
    "batch norm": lambda: nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 8)), nn.TransformerEncoderLayer(8, 1, 16, batch_first=True), nn.Flatten()
    ),
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


def test_a_graph_of_one_row_shows_nothing_of_the_rows_of_another() -> None:
    """Its outputs do not show which of their dimensions follow the batch."""
    assert check_rows(make(sizes=(1, 4)), 1, 1, 4, 4, 3, 3)[-1] is Reason.PADDED


def test_rows_are_followed_in_one_run() -> None:
    """It shows which dimension of an output has them, too; beside it are eager's run, one recorded and one timed, and a
    warm-up where a capture executes nothing."""
    runs = Spy([])  # no guard looks into it
    step = make(lambda x: (runs.append(1), x.repeat_interleave(2, 0))[1], sizes=(8,))
    step(torch.randn(8, 3))
    assert len(runs) == (4 if step.entries[0].backend.capture_executes else 5)


TABLE = torch.randn(12, 3)
PARTICULAR: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "check": lambda x: (torch._assert_async(((x >= 0) & (x < 8)).all()), x * 2)[1],
    "index": lambda x: TABLE[x[:, 0].long()] + x,
    "written index": lambda x: TABLE[torch.empty(len(x), dtype=torch.int64).copy_(x[:, 0])] + x,
    "bits of a number": lambda x: TABLE[((x[:, 0] + 1).view(torch.int32) >> 23).long() - 126] + x,
    "exponent": lambda x: TABLE[torch.frexp(x[:, 0] + 1).exponent.long() * 3 - 3] + x,
    "probability": lambda x: nn.functional.binary_cross_entropy(x / 8, x / 8, reduction="none"),
}


@pytest.mark.parametrize("name", PARTICULAR)
def test_a_callable_may_refuse_numbers_that_no_batch_held(name: str) -> None:
    """The run that is followed has the numbers of the batch."""
    reasons = check_calls(make(PARTICULAR[name], sizes=(4,)), *(torch.rand(rows, 3) * 7 for rows in (4, 3, 3, 2, 3)))
    has_rule = name not in ("check", "probability")  # which check all rows
    assert reasons[-1] is (Reason.PADDED if has_rule else Reason.PADDING_UNPROVEN)


def test_the_reason_names_the_operator_and_the_line() -> None:
    """``explain`` prints it; full batches are served."""
    step = make(lambda x: (x * 2, x - x.amax(0)), sizes=(4,))
    check_calls(step, torch.rand(4, 3), torch.rand(3, 3), torch.rand(4, 3))
    assert not shown_of(step).proof.independent
    assert re.search(r"rows mix in aten::amax.*, test_row_proof\.py:\d+", step.explain(torch.rand(3, 3)))
    assert check_rows(step, 4) == [Reason.EXACT]


def test_rows_are_followed_through_a_break() -> None:
    """What mixes them before it is found, also where it is kept behind it, and while it changes no row."""
    cache = torch.zeros(9, 4)

    def fn(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        cache[slots] = gd.eager_break(torch.neg)(x + x.amax(0).clamp(max=0.3))
        return cache[slots]

    step = make(fn, dynamic={"x": 0, "slots": 0}, sizes=(4,), mode="PIECEWISE", padding_writes="allow")
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


@pytest.mark.parametrize("rows", [(3, 3, 1, 1, 1, 3), (4, 1, 1, 4)])
def test_one_row_of_an_output_with_gaps(rows: tuple[int, ...]) -> None:
    """A tensor of one element has any strides, and is compared all the same."""
    step = make(lambda x: (x * 2)[:, 0], sizes=(4,))
    assert check_rows(step, *rows)[-1].is_graph, step.last_decision


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


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float16, torch.uint16, torch.uint8])
def test_narrow_types_are_served(kind: torch.dtype) -> None:
    """Numbers of which integers are made, and flags, in types that torch can do little with."""

    def fn(x: Tensor, flags: Tensor) -> Tensor:
        return (x.to(torch.float32).to(torch.int64) % 5) * flags.to(torch.int64)

    step = make(fn, dynamic={"x": 0, "flags": 0}, sizes=(4,))
    batches = (((torch.rand(3, 4) * 9).to(kind), torch.randint(0, 2, (3, 4)).to(kind)) for _ in range(5))
    assert check_calls(step, *batches)[-1].is_graph, step.last_decision


def test_a_size_with_other_tensors_is_proven_by_itself() -> None:
    """The same operators in the same order, of which one reads other rows for a larger size: it shares no proof."""
    weight = torch.full((4, 3), -9.0)

    def fn(x: Tensor) -> Tensor:
        of_rows, of_weight = x.amax(0), weight.amax(0)
        return x + (of_rows if x.shape[0] > 8 else of_weight)

    step = make(fn, sizes=(8, 16))
    check_calls(step, *(torch.rand(rows, 3) for rows in (8, 8, 6, 6, 16, 16, 12, 12)))
    check_calls(step, -torch.rand(12, 3), -torch.rand(12, 3))


def test_a_batch_with_other_repeats_is_no_batch_of_the_graph() -> None:
    """An operator takes its repeats from another tensor of the call for some rows. That is no other length, though it
    has the same numbers when the batch is compared."""

    def fn(x: Tensor, counts: Tensor) -> Tensor:
        plain, turned = counts + 0, counts.flip(0)
        return x.repeat_interleave(plain if len(x) < 4 else turned, 1, output_size=3)

    step = make(fn, dynamic={"x": 0}, sizes=(8,))
    check_calls(step, *((torch.rand(rows, 3), torch.ones(3, dtype=torch.long)) for rows in (8, 8, 3, 3)))
    check_calls(step, (torch.rand(3, 3), torch.tensor([2, 1, 0])))


@pytest.mark.filterwarnings("ignore")
def test_an_operand_of_compiled_code_is_not_compared() -> None:
    """Torch's packed weights of eight bits raise when they are; each size is proven by itself."""
    with torch.device("cpu"):
        model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear}, torch.qint8)
    step = make(model, dynamic={"input": 0}, sizes=(8, 16, 32))
    check_calls(step, *(torch.randn(rows, 8, device="cpu") for rows in (8, 16, 32) * 3))
    assert step.captured_sizes == (8, 16, 32)


def test_images_keep_their_order_in_memory() -> None:
    """A run of other rows is made of images that lie in memory as the batch's do, so it dispatches the same operators:
    padded batches are served."""
    step = make(nn.AdaptiveAvgPool2d(1), sizes=(8,), dynamic={"input": 0})
    images = [torch.randn(rows, 3, 4, 4).contiguous(memory_format=torch.channels_last) for rows in (8, 8, 7, 7, 3)]
    assert check_calls(step, *images, rtol=1e-5, atol=1e-6)[-1] is Reason.PADDED


def test_lengths_from_an_example_with_a_short_row() -> None:
    """The batches that are made of an example hide no row of it altogether: its mask hides padding then, too."""
    table = torch.randn(50, 8)

    def fn(ids: Tensor, mask: Tensor) -> Tensor:
        x = table[ids]
        scores = x @ x.mT + (1.0 - mask[:, None, :].float()) * torch.finfo(torch.float32).min
        return scores.softmax(-1) @ x

    length = gd.Dim("length", sizes=[8, 16], pad={"mask": 0})
    dynamic = {"ids": {0: "batch", 1: length}, "mask": {0: "batch", 1: "length"}}
    step = gd.graphed(fn, dynamic=dynamic, sizes=(4,))
    shown = torch.arange(16) < torch.tensor([16, 1, 3, 9])[:, None]
    ids = torch.randint(0, 49, (4, 16))
    ids[1, 9] = 49  # the largest, and hidden
    step.prewarm(ids, shown.long())
    batches = [
        (ids[:rows, :long].clone(), shown[:rows, :long].clone().long())
        for rows, long in ((3, 9), (4, 5), (2, 16), (3, 2))
    ]
    reasons = check_calls(step, *batches, rtol=1e-4, atol=1e-5)
    assert set(reasons) == {Reason.PADDED}, step.last_decision.explain()
