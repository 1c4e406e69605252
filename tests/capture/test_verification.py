"""The two-step comparison with eager: on the first batch, on a different one, and on the first padded one."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphOptions, Graphed, Reason, graphed
from graphdispatch.capture.verify import Tolerance, difference, tolerance_for
from graphdispatch.engines import EntryState

from ..helpers import AT_ONCE, with_options
from ..spy import Spy


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def make(fn: Callable[[torch.Tensor], Any], **options: Any) -> Graphed[..., Any]:
    """A step of one size, four rows, captured at the first sighting."""
    return graphed(fn, dynamic={"x": 0}, sizes=(4,), **with_options(options, capture_after=1))


def reasons(step: Graphed[..., Any], *batches: torch.Tensor) -> list[Reason]:
    """The reason of each call."""
    found = []
    for batch in batches:
        step(batch)
        assert step.last_decision is not None
        found.append(step.last_decision.reason)
    return found


def test_frozen_value_is_found_on_the_second_batch() -> None:
    """A value that the capture froze agrees with eager on its own batch, and is found on the next, different one."""
    hidden = Spy([2.0])  # no guard looks into it
    step = make(lambda x: x * hidden[0])
    first, second = torch.randn(2, 4, 3)
    assert reasons(step, first) == [Reason.CAPTURED_NOW]
    hidden[0] = 3.0
    assert torch.equal(step(second), second * 3.0)
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.VERIFICATION_FAILED


def test_identical_batches_stay_pending() -> None:
    """The same batch again is served, but proves nothing: the comparison waits for a different one."""
    step = make(lambda x: x * 2)
    x = torch.randn(4, 3)
    assert reasons(step, x, x.clone(), x) == [Reason.CAPTURED_NOW, Reason.EXACT, Reason.EXACT]
    assert step.entries[0].state is EntryState.CAPTURED
    assert reasons(step, x + 1, x) == [Reason.VERIFIED_NOW, Reason.EXACT]
    assert step.entries[0].state is EntryState.VERIFIED


def test_first_padded_batch_is_compared() -> None:
    """The first batch of each number of rows is compared; full batches need it once."""
    step = make(lambda x: x * 2)
    full, padded = torch.randn(2, 4, 3), torch.randn(3, 3)
    assert reasons(step, *full, full[0]) == [Reason.CAPTURED_NOW, Reason.VERIFIED_NOW, Reason.EXACT]
    assert reasons(step, padded, padded, full[0]) == [Reason.VERIFIED_NOW, Reason.PADDED, Reason.EXACT]
    assert reasons(step, padded[:2], padded[:2], padded) == [Reason.VERIFIED_NOW, Reason.PADDED, Reason.PADDED]
    assert reasons(step, padded[:1], padded[:2]) == [Reason.VERIFIED_NOW, Reason.PADDED]


def test_a_batch_with_nan_is_the_same_batch_again() -> None:
    """A batch is another one if its bits are; the same one again proves nothing, and is served unpublished."""
    step = make(lambda x: x.nan_to_num())
    x = torch.tensor([[float("nan"), 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]])
    assert reasons(step, x, x, x + 1) == [Reason.CAPTURED_NOW, Reason.EXACT, Reason.VERIFIED_NOW]


def test_padded_capture_proves_padding() -> None:
    """A capture from a padded batch compared padding at once."""
    step = make(lambda x: x * 2)
    batches = torch.randn(3, 3), torch.randn(4, 3), torch.randn(3, 3)
    assert reasons(step, *batches) == [Reason.CAPTURED_NOW, Reason.VERIFIED_NOW, Reason.PADDED]


def test_failed_comparison_releases_the_graph() -> None:
    """A graph that differs from eager is gone, and its size stays eager."""
    step = make(lambda x: x * (3 if x.shape[0] == 3 else 2))
    full, padded = torch.randn(2, 4, 3), torch.randn(3, 3)
    reasons(step, *full)
    assert len(step.entries) == 1
    assert reasons(step, padded, full[0]) == [Reason.VERIFICATION_FAILED] * 2
    assert step.entries == []
    step.check_integrity()


def test_state_is_compared_too() -> None:
    """A graph whose outputs agree and whose state does not is found."""
    total = torch.zeros(3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        total.copy_(x.softmax(0).amax(0))
        return x * 2

    step = make(fn)
    x = torch.randn(3, 3)
    assert reasons(step, x) == [Reason.VERIFICATION_FAILED]
    assert "state of shape (3,)" in step.explain(x)
    assert torch.equal(total, x.softmax(0).amax(0))


def test_verification_can_be_switched_off() -> None:
    """With ``verify=False`` a graph serves from the second call, unproven."""
    step = make(lambda x: x * 2, options=CUDAGraphOptions(verify=False))
    assert reasons(step, *torch.randn(2, 4, 3), torch.randn(2, 3)) == [
        Reason.CAPTURED_NOW,
        Reason.EXACT,
        Reason.PADDED,
    ]


def test_tolerance_is_the_users() -> None:
    """Given tolerances take the place of those by dtype."""
    loose = make(lambda x: x - x.mean(0), options=CUDAGraphOptions(rtol=10.0, atol=10.0))
    assert reasons(loose, torch.randn(3, 3)) == [Reason.CAPTURED_NOW]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_integers_must_be_equal(dtype: torch.dtype) -> None:
    """There is no tolerance for integers."""
    assert tolerance_for(dtype, exact=False, rtol=1.0, atol=1.0).is_exact


EXACT = Tolerance(0.0, 0.0)
LOOSE = Tolerance(1e-2, 0.0)
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("eager", "graph", "tolerance", "words"),
    [
        ([1.0, 2.0], [1.0, 2.0], EXACT, None),
        ([100.0, 0.0], [100.0, 0.5], LOOSE, None),
        ([100.0, 0.0], [100.0, 1.5], LOOSE, "largest difference 1.5 where eager's largest value is 100"),
        ([0.0], [-0.0], EXACT, "bits differ"),
        ([0.0], [-0.0], LOOSE, None),
        ([NAN, 1.0], [NAN, 1.0], EXACT, None),
        ([NAN, 1.0], [1.0, NAN], LOOSE, "not finite"),
        ([INF], [-INF], LOOSE, "not finite"),
        ([NAN], [INF], LOOSE, "not finite"),
        ([], [], EXACT, None),
        ([1.0], [1.0, 2.0], LOOSE, r"\(2,\) torch.float32 instead of \(1,\)"),
    ],
)
def test_difference(eager: list[float], graph: list[float], tolerance: Tolerance, words: str | None) -> None:
    """Two tensors agree within a tolerance of eager's largest value, or the sentence says how they do not."""
    found = difference(torch.tensor(eager), torch.tensor(graph), tolerance)
    if words is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(words, found)


@pytest.mark.parametrize("mask", [torch.finfo(torch.float32).min, -1e9, 0.0])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.95], ids=str)
@pytest.mark.parametrize("shape", [(4, 512), (8, 16), (4096,)], ids=str)
def test_masked_logits_hide_nothing(mask: float, share: float, shape: tuple[int, ...]) -> None:
    """However many logits are masked, an error of 0.7 in another one is found, and rounding is none."""
    eager = torch.randn(shape).masked_fill(torch.rand(shape) < share, mask)
    live = eager.ne(mask).nonzero()[0]
    wrong = eager.clone()
    wrong[tuple(live)] += 0.7
    tolerance = tolerance_for(torch.float32, exact=False)
    assert difference(eager, wrong, tolerance) is not None
    assert difference(eager, eager + eager.ne(mask) * 1e-6 * torch.randn(shape), tolerance) is None


def test_an_outlier_hides_nothing() -> None:
    """One element of a cache that is a million times the others does not loosen the comparison of its row."""
    eager = torch.randn(10, 64)
    eager[3, 5] = 1e6
    for at in ((3, 6), (4, 5)):
        wrong = eager.clone()
        wrong[at] += 0.7
        assert difference(eager, wrong, tolerance_for(torch.float32, exact=False)) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 3, 512])
def test_rounding_of_sums_that_cancel_is_no_difference(dtype: torch.dtype, width: int) -> None:
    """Products summed in another order agree, also where the sum is a thousandth of its terms; one wrong term of a
    hundred does not."""
    terms, weights = torch.randn(16, 2048, dtype=torch.float64), torch.randn(2048, width, dtype=torch.float64)
    terms[:, ::2] = terms[:, 1::2] + torch.randn(16, 1024) * 1e-2
    weights[::2] = -weights[1::2]
    narrow = terms.to(dtype).float(), weights.to(dtype).float()
    eager, graph = ((narrow[0][:, order] @ narrow[1][order]).to(dtype) for order in (slice(None), torch.randperm(2048)))
    tolerance = tolerance_for(dtype, exact=False)
    assert difference(eager, graph, tolerance) is None
    assert difference(eager, graph.roll(1, 0), tolerance) is not None


def test_given_tolerances_hold_where_bits_are_promised() -> None:
    """An unpadded replay may differ from eager as far as the user allows."""
    assert tolerance_for(torch.float32, exact=True).is_exact
    assert tolerance_for(torch.float32, exact=True, rtol=1e-3) == Tolerance(1e-3, 0.0)


def test_difference_counts_integers() -> None:
    """For integers the number of differing elements is told."""
    assert difference(torch.tensor([1, 2, 3]), torch.tensor([1, 0, 0]), EXACT) == "2 of 3 elements differ"


@pytest.mark.parametrize(
    ("first", "pad"),
    [(torch.zeros(3, 3), "zero"), (torch.ones(1, 3), "repeat_last")],
    ids=["zeros padded by zeros", "one row repeated"],
)
def test_a_batch_of_equal_rows_proves_nothing(first: torch.Tensor, pad: str) -> None:
    """Where real and padding rows are all alike, a model that mixes rows shows nothing; the next batch is compared."""

    def mixes(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 + x.mean(0)

    step = graphed(mixes, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE, pad={"x": pad})
    for x in (first, torch.randn(4, 3), torch.randn(3, 3), torch.randn(3, 3)):
        assert torch.equal(step(x), mixes(x))


def test_each_argument_must_tell_its_rows_apart() -> None:
    """A batch whose rows differ in another argument proves nothing about one whose rows are all alike."""

    def mixes(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x.flip(0) + ids[:, None]

    step = graphed(
        mixes, dynamic={"x": 0, "ids": 0}, sizes=(4,), options=AT_ONCE, pad={"x": "repeat_last", "ids": "zero"}
    )
    ids = torch.arange(1, 5)
    for rows in (1, 1, 1, 3, 3, 2):
        x = torch.randn(rows, 3)
        assert torch.equal(step(x, ids[:rows]), mixes(x, ids[:rows]))


@pytest.mark.parametrize("others_differ", [True, False], ids=["others differ", "a dummy batch"])
def test_a_constant_argument_does_not_keep_padded_batches_eager(others_differ: bool) -> None:
    """An argument that was alike and the same in 16 compared batches is taken for a constant; dummies do not count."""

    def embed(ids: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        return (ids + kinds)[:, None] * 0.5

    step = graphed(embed, dynamic={"ids": 0, "kinds": 0}, sizes=(4,), options=AT_ONCE)
    found = []
    for _ in range(20):
        ids = torch.randint(1, 9, (3,)) if others_differ else torch.zeros(3, dtype=torch.int64)
        step(ids, torch.zeros(3, dtype=torch.int64))
        assert step.last_decision is not None
        found.append(step.last_decision.reason)
    first_hit = 16 if others_differ else 20
    assert found[1:first_hit] == [Reason.VERIFIED_NOW] * (first_hit - 1)
    assert found[first_hit:] == [Reason.PADDED] * (20 - first_hit)
