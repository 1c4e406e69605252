"""The two-step comparison with eager: on the first batch, on a different one, and on the first padded one."""

import re
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from graphdispatch import CUDAGraphOptions, Graphed, OutputView, Pad, Reason
from graphdispatch.engines import EntryState
from graphdispatch.proof.check.compare import Tolerance, difference, tolerance_for

from ... import helpers
from ...helpers import Spy, check_calls


def make(fn: Callable[..., Any], **options: Any) -> Graphed[..., Any]:
    """A step of one size, four rows, captured at the first sighting."""
    return helpers.make(fn, **{"sizes": (4,)} | options)


@pytest.mark.parametrize("first", [1.0, float("nan")])
def test_identical_batches_stay_pending(first: float) -> None:
    """The same batch again is served, but proves nothing: the comparison waits for a different one, of other bits."""
    step, x = make(lambda x: x.nan_to_num() * 2), torch.randn(4, 3)
    x[0, 0] = first
    assert check_calls(step, x, x.clone(), x) == [Reason.CAPTURED_NOW, Reason.EXACT, Reason.EXACT]
    assert step.entries[0].state is EntryState.CAPTURED
    assert check_calls(step, x + 1, x) == [Reason.VERIFIED_NOW, Reason.EXACT]
    assert step.entries[0].state is EntryState.VERIFIED


def test_weights_of_inference_mode_cost_no_call_more() -> None:
    """They count no versions, so that each compared call is watched; the second batch is compared at once."""
    with torch.inference_mode():
        model = torch.nn.Linear(3, 3).eval()
        step, batches = make(model, dynamic={"input": 0}), torch.randn(4, 4, 3).unbind()
        assert check_calls(step, *batches) == [Reason.CAPTURED_NOW, Reason.VERIFIED_NOW, Reason.EXACT, Reason.EXACT]


@pytest.mark.parametrize("outputs", ["view", "static"])
@pytest.mark.parametrize("feeds_back", [False, True], ids=["the same tensor", "the last answer"])
def test_a_batch_made_of_a_call_leaves_its_answer(outputs: Literal["view", "static"], feeds_back: bool) -> None:
    """Where all calls are alike, a graph is compared on a batch that is made; answers in its memory stay right."""
    step = make(lambda x: x * 1, outputs=outputs)
    x = batch = torch.randn(4, 3)
    for _ in range(20):
        answer = step(batch)
        got = answer.get() if isinstance(answer, OutputView) else answer
        assert torch.equal(got, x)
        batch = got if feeds_back else x
    assert step.entries[0].state is EntryState.VERIFIED


def test_a_batch_made_of_a_call_may_show_a_difference() -> None:
    """The call of whose batch it is made then runs eagerly, with the reason."""
    step = make(lambda x: x * torch.get_num_threads())  # which no guard sees
    x, threads = torch.randn(4, 3), torch.get_num_threads()
    assert check_calls(step, *[x] * 8) == [Reason.CAPTURED_NOW, *[Reason.EXACT] * 7]
    torch.set_num_threads(threads + 1)
    try:
        check_calls(step, x)
        assert step.last_decision.reason is Reason.VERIFICATION_FAILED
    finally:
        torch.set_num_threads(threads)


def test_first_padded_batch_is_compared() -> None:
    """Then all others are hits; a single row, of which sizes are broadcast, is compared once more."""
    step = make(lambda x: x * 2)
    full, padded = torch.randn(2, 4, 3), torch.randn(3, 3)
    assert check_calls(step, *full, full[0]) == [Reason.CAPTURED_NOW, Reason.VERIFIED_NOW, Reason.EXACT]
    assert check_calls(step, padded, padded, full[0]) == [Reason.VERIFIED_NOW, Reason.PADDED, Reason.EXACT]
    assert check_calls(step, padded[:2], padded) == [Reason.PADDED, Reason.PADDED]
    assert check_calls(step, padded[:1], padded[:1]) == [Reason.VERIFIED_NOW, Reason.PADDED]


@pytest.mark.parametrize("what", ["state of shape (4, 3)", "argument 'x', which the call writes,"])
def test_what_is_written_is_compared_too(what: str) -> None:
    """A graph whose outputs agree and whose state, or an argument, does not is found."""
    total, hidden = torch.zeros(4, 3), Spy([1.0])  # no guard looks into it

    def fn(x: torch.Tensor) -> torch.Tensor:
        (x if "argument" in what else total).copy_(x.abs() * hidden[0])
        return x.new_ones(4)

    step = make(fn)
    batches = torch.randn(2, 4, 3)
    step(batches[0])
    hidden[0], expected = 3.0, batches[1].abs() * 3
    step(batches[1])
    assert step.last_decision.reason is Reason.VERIFICATION_FAILED
    assert what in step.last_decision.detail
    assert torch.equal(batches[1] if "argument" in what else total, expected)


def test_a_number_among_outputs_is_compared() -> None:
    """One that no guard sees change is the caller's all the same."""
    hidden = Spy([1])
    step = make(lambda x: (x * 2, hidden[0]))
    for hidden[0], reason in ((1, Reason.CAPTURED_NOW), (2, Reason.OUTPUT_UNSUPPORTED)):
        assert check_calls(step, torch.randn(4, 3)) == [reason]


def test_rounding_has_its_remedy() -> None:
    """The graph of the same rows is to have the same bits; the reason says which tolerance serves others, and each that
    is given does, or no comparison."""
    rounding = Spy([0.0])  # no guard looks into it
    for given in ({}, {"rtol": 1e-4}, {"atol": 1e-3}, {"verify": False}):
        step = make(lambda x: x * (1 + rounding[0]), options=CUDAGraphOptions(**given))
        for rounding[0] in (0.0, 1e-5, 1e-5):
            step(torch.rand(4, 3) + 1)
        text = step.last_decision.explain()
        assert ("as rounding makes it; CUDAGraphOptions(rtol=0.0001) serves it" in text) is (not given)
        assert (step.last_decision.reason is Reason.EXACT) is bool(given)


def test_a_tolerance_is_offered_with_its_condition() -> None:
    """What eager itself gives anew each time is no rounding, however small it is."""
    step = make(lambda x: x + time.perf_counter() * 1e-3 % 1)
    for _ in range(3):
        step(torch.rand(4, 3))
    assert step.last_decision.reason is Reason.VERIFICATION_FAILED
    assert "unless eager itself gives another result for the same batch (it reads a clock" in step.last_decision.detail


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2], ids=str)
def test_what_is_moved_in_the_narrowest_types_is_served(dtype: torch.dtype) -> None:
    """Torch tells the resolution of some of them, and of others it does not."""
    packed = torch.randint(0, 100, (3, 3), dtype=torch.uint8).view(dtype)
    step = make(lambda x: x @ packed.clone().view(torch.uint8).float())
    assert check_calls(step, *torch.rand(4, 4, 3))[-1] is Reason.EXACT


@pytest.mark.parametrize("written", [False, True], ids=["returned", "written to state"])
@pytest.mark.parametrize(
    ("coarse", "fine"),
    [
        (torch.float32, torch.float64),
        (torch.float32, torch.complex128),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
def test_a_wider_type_makes_no_result_more_exact(coarse: torch.dtype, fine: torch.dtype, written: bool) -> None:
    """What a model computes in bfloat16 is compared as such after ``.float()``: padding may change its last bits."""
    kept, last_bits = torch.zeros(4, 3, dtype=fine), Spy([0.0])  # no guard looks into it

    def make_step(dtype: torch.dtype, multiplies: bool) -> Graphed[..., Any]:
        def fn(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            y = (x.to(dtype) * (1 + last_bits[0])).to(fine)
            if multiplies:
                y = y + (x.to(dtype) @ torch.eye(3, dtype=dtype)).to(fine)
            if written:
                kept[places] = y
            return x * 0 if written else y

        return make(fn, dynamic={"x": 0, "places": 0}, pad={"x": "repeat_last", "places": "repeat_last"})

    # A coarse type in which nothing is added up, as that of a mask, makes no result less exact.
    failed = Reason.VERIFICATION_FAILED
    expected = {(coarse, True): Reason.PADDED, (coarse, False): failed, (torch.float64, False): failed}
    for (dtype, multiplies), reason in expected.items():
        step, last_bits[0] = make_step(dtype, multiplies), 0.0
        for rows in (4, 4, 4, 3, 3, 3):
            if rows == 3:
                last_bits[0] = torch.finfo(coarse).eps
            step(torch.rand(rows, 3, dtype=torch.float64) + 1, torch.arange(rows))
        assert step.last_decision.reason is reason, step.last_decision.detail


def test_tolerances() -> None:
    """Integers must be equal; so must what promises eager's bits, but for as much as the user allows."""
    for dtype in (torch.int64, torch.bool, torch.uint8):
        assert tolerance_for(dtype, exact=False, rtol=1.0, atol=1.0).is_exact
    assert tolerance_for(torch.float32, exact=True).is_exact
    assert tolerance_for(torch.float32, exact=True, rtol=1e-3) == Tolerance(1e-3, 0.0)


EXACT = Tolerance(0.0, 0.0)
LOOSE = Tolerance(1e-2, 0.0)
FINE = Tolerance(1e-4, 0.0)
NAN, INF = float("nan"), float("inf")
QUARTILE_3 = [float(value) for value in range(1, 10)]
SCORES = [[1.0, 1000.0, 1001.0], [1.5, 2000.0, 2001.0]]  # beside coordinates


@pytest.mark.parametrize(
    ("eager", "graph", "tolerance", "words"),
    [
        ([1.0, 2.0], [1.0, 2.0], EXACT, None),
        ([100.0, 0.0], [100.0, 0.5], LOOSE, None),
        ([100.0, 0.0], [100.0, 1.5], LOOSE, "largest difference 1.5 where eager's largest value is 100"),
        (QUARTILE_3, [1.2, *QUARTILE_3[1:]], LOOSE, None),
        (SCORES, [[1.00645, *SCORES[0][1:]], SCORES[1]], FINE, None),
        (SCORES, [[1.00655, *SCORES[0][1:]], SCORES[1]], FINE, "largest difference 0.00655"),
        ([0.0], [-0.0], EXACT, "bits differ"),
        ([0.0], [-0.0], LOOSE, None),
        ([NAN, 1.0], [NAN, 1.0], EXACT, None),
        ([NAN, 1.0], [1.0, NAN], LOOSE, "not finite"),
        ([INF], [-INF], LOOSE, "not finite"),
        ([NAN], [INF], LOOSE, "not finite"),
        ([], [], EXACT, None),
        ([1, 2, 3], [1, 0, 0], LOOSE, "^2 of 3 elements differ$"),
        ([1.0], [1.0, 2.0], LOOSE, r"\(2,\) torch.float32 instead of \(1,\)"),
    ],
)
def test_difference(eager: list[Any], graph: list[Any], tolerance: Tolerance, words: str | None) -> None:
    """Two tensors agree within a tolerance of eager's largest value, or the sentence says how they do not."""
    found = difference(torch.tensor(eager), torch.tensor(graph), tolerance)
    assert found is None if words is None else re.search(words, found)


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


@pytest.mark.parametrize("rows", [4, 3])
def test_one_call_in_n_is_compared(rows: int) -> None:
    """The first two calls capture and verify; then each fourth runs eagerly beside the replay."""
    step = make(lambda x: x * 2, verify_every=3)
    found = check_calls(step, *torch.randn(14, rows, 2))
    hit = Reason.EXACT if rows == 4 else Reason.PADDED
    assert found[2:] == [hit, hit, hit, Reason.VERIFIED_NOW] * 3
    assert step.stats.captures == 1


ENOUGH = 12  # calls with one batch, more than are served before the comparison


@pytest.mark.parametrize("rows", [4, 3])
@pytest.mark.parametrize("batch", [torch.randn, lambda *shape: torch.randint(0, 99, shape)])
def test_calls_that_are_all_alike_are_verified(rows: int, batch: Callable[..., torch.Tensor]) -> None:
    """After some calls, be they of floats or integers, padded or not."""
    step, x = make(lambda x: x * 2), batch(rows, 3)
    check_calls(step, *[x] * ENOUGH)
    assert step.entries[0].state is EntryState.VERIFIED
    assert step.stats.hits == ENOUGH - 1
    check_calls(step, batch(rows, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex128], ids=str)
def test_memory_that_nothing_wrote_is_not_compared(dtype: torch.dtype) -> None:
    """Half of an output and half of the state come from ``torch.empty``; what was written is compared, and served.

    A frozen value is found on the second batch, the first that differs from its own.
    """
    state, hidden = torch.zeros(4, 6, dtype=dtype), Spy([1])  # no guard looks into it

    def fn(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), 6, dtype=dtype)
        out[:, :3] = x * hidden[0]
        state.copy_(torch.empty(4, 6, dtype=dtype))
        state[:, 1] = 7
        return torch.cat([out, out], 1)

    step = make(fn)
    for rows in (4, 4, 4, 3, 3, 3):
        x = torch.randn(rows, 3).mul(9).to(dtype)
        assert torch.equal(step(x)[:, 6:9], x)
        assert state[:, 1].eq(7).all()
    assert step.last_decision.reason is Reason.PADDED
    frozen, x = make(fn), torch.randn(2, 4, 3).mul(9).to(dtype)
    assert helpers.reason(frozen, x[0]) is Reason.CAPTURED_NOW
    hidden[0] = 3
    assert torch.equal(frozen(x[1])[:, :3], x[1] * 3)
    assert frozen.last_decision.reason is Reason.VERIFICATION_FAILED


def _partly(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(len(x), 6)
    out[:, :2] = x[:, :2]
    return out


def _reused(x: torch.Tensor) -> torch.Tensor:
    first = (x.sin() * 3).cos() * 2
    second = first.exp()
    del first
    out = torch.empty_like(x)
    out[:, :2] = second[:, :2]
    return out


KINDS = (torch.int16, torch.bool, torch.complex64, torch.bfloat16)
BLANK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "partly written": _partly,
    "reused": _reused,
    "grown": lambda x: x.new_zeros(1, 4).resize_(len(x), 4),
    "permuted": lambda x: torch.empty_permuted(x.shape, (1, 0)),
    "strided": lambda x: torch.empty_strided((len(x), 3), (5, 1)),
    **{str(kind): lambda x, kind=kind: torch.empty(x.shape, dtype=kind) for kind in KINDS},
}


@pytest.mark.parametrize("name", BLANK)
@pytest.mark.parametrize("toggled", [False, True])
def test_deterministic_torch_fills_new_memory(name: str, toggled: bool) -> None:
    """With deterministic algorithms torch fills new memory; so do the watched run and each replay, bit for bit."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return BLANK[name](x), (x * 2).exp()

    step = make(fn)
    try:
        for call in range(10):
            torch.use_deterministic_algorithms(not toggled or call >= 4)
            torch.utils.deterministic.fill_uninitialized_memory = call < 8
            x = torch.randn(3 + call % 2, 4)
            got, want = step(x), fn(x)
            if torch.are_deterministic_algorithms_enabled() and call < 8:
                torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    assert step.stats.hits or (toggled and name in ("grown", "torch.bool"))  # nothing distinguishes these from values


@pytest.mark.parametrize(
    ("dtype", "rtol", "far", "is_served"),
    [
        (torch.bfloat16, None, 0.1, True),
        (torch.bfloat16, None, 0.5, False),
        (torch.bfloat16, 2e-2, 0.1, False),
        (torch.float32, None, 4e-4, False),
    ],
    ids=["kernels", "too far", "a tolerance that was given", "float32"],
)
@pytest.mark.parametrize("is_written", [False, True], ids=["returned", "written"])
def test_kernels_of_another_size_may_round_otherwise(
    dtype: torch.dtype, rtol: float | None, far: float, is_served: bool, is_written: bool
) -> None:
    """In bfloat16 a padded batch may be further from eager than usual, where its rows are proven: then nothing but the
    kernels makes the difference. So it is where there are two rows for each."""
    cache, rounding = torch.zeros(16, 16, dtype=dtype), Spy([0.0])  # no guard looks into it

    def fn(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        y = x @ torch.eye(16, dtype=dtype) * (1 + rounding[0])
        return cache.index_copy_(0, slots, y)[slots] if is_written else y.repeat_interleave(2, 0)

    options = CUDAGraphOptions(rtol=rtol, padding_writes="allow")
    step = make(fn, sizes=(8,), dynamic={"x": 0, "slots": 0}, pad={"slots": Pad.value(15)}, options=options)
    for rows in (8, 8, 3, 3, 3):
        rounding[0] = far if rows < 8 else 0.0
        step(torch.randn(rows, 16, dtype=dtype), torch.randperm(15)[:rows])
    assert step.last_decision.reason is (Reason.PADDED if is_served else Reason.VERIFICATION_FAILED)
    assert ("; call eval(), give a mask or a pad rule" in step.last_decision.detail) is not is_served
