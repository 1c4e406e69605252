"""A call that no graph can serve runs eagerly with its reason, for as long as its refusal stands and no longer. Soon it
is no longer looked at each time, and still counted, timed and looked at again."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from graphdispatch import CUDAGraphOptions, Decision, FallbackError, Graphed, Reason, graphed
from graphdispatch.runtime import server
from graphdispatch.runtime.group import Countdown

from ..helpers import check_rows, double, serve_in_python

ROWS = 4


class Opaque:
    """An object that nobody can compare."""

    def __init__(self) -> None:
        self.held: Any = 1


class Sub(torch.Tensor):
    """A subclass of no use."""


def first(x: Any, more: Any = None) -> Any:
    """The first argument."""
    return x


def unsafe(x: torch.Tensor, more: Any = None) -> torch.Tensor:
    """It reads a value on the host."""
    return x * 2 if x.sum().item() > -1e9 else x


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Reason]] = {
    "an object": (first, (torch.ones(ROWS, 3), Opaque()), Reason.UNGUARDED_ARGUMENT),
    "an object in a nest": (first, (torch.ones(ROWS, 3), {"a": [1, Opaque()]}), Reason.UNGUARDED_ARGUMENT),
    "a sparse tensor": (first, (torch.ones(ROWS, 3).to_sparse(),), Reason.TENSOR_SUBCLASS),
    "a lazy conjugate": (first, (torch.ones(ROWS, 3, dtype=torch.complex64).conj(),), Reason.TENSOR_SUBCLASS),
    "a lazy negative": (first, (torch.ones(ROWS, dtype=torch.complex64).conj().imag,), Reason.TENSOR_SUBCLASS),
    "a subclass": (first, (torch.ones(ROWS, 3), torch.ones(3).as_subclass(Sub)), Reason.TENSOR_SUBCLASS),
    "a set": (first, (torch.ones(ROWS, 3), {1, 2}), Reason.UNGUARDED_ARGUMENT),
    "a generator": (first, (torch.ones(ROWS, 3), torch.Generator()), Reason.UNGUARDED_ARGUMENT),
    "two devices": (first, (torch.ones(ROWS, 3), torch.ones(ROWS, device="meta")), Reason.DEVICES_DISAGREE),
    "no tensor": (first, (3,), Reason.NO_TENSORS),
    "too many rows": (first, (torch.ones(ROWS + 1, 3),), Reason.ABOVE_LARGEST_SIZE),
    "no rows": (first, (torch.ones(0, 3),), Reason.NO_ROWS),
    "a read on the host": (unsafe, (torch.ones(ROWS, 3),), Reason.CAPTURE_UNSAFE),
}


def serve(fn: Callable[..., Any]) -> Graphed[..., Any]:
    """A graphed callable whose first argument has the batch."""
    options = CUDAGraphOptions(max_failures=1)
    return graphed(fn, dynamic={"x": 0}, sizes=(ROWS,), options=options.replace(capture_after=1))


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_tensor_is_refused() -> None:
    """Its scale is no part of a signature. Torch warns that such tensors will go."""
    step, x = serve(lambda x: x.dequantize()), torch.quantize_per_tensor(torch.ones(ROWS), 0.5, 0, torch.qint8)
    assert torch.equal(step(x), torch.ones(ROWS))
    assert step.last_decision.reason is Reason.TENSOR_SUBCLASS
    assert "is a quantized tensor" in step.last_decision.detail


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("gradients", [False, True])
def test_a_refused_call_is_remembered(name: str, gradients: bool) -> None:
    """It is counted, and says why, each time, with gradients and without."""
    fn, args, reason = CALLS[name]
    step = serve(fn)
    with torch.set_grad_enabled(gradients):
        for _ in range(5):
            step(*args)
        counted = step.stats.reasons[reason]
        step(*args)
        assert step.last_decision.reason is reason
        assert step.stats.reasons[reason] == counted + 1
        assert (step.stats.misses, step.stats.captures) == (6, 0)
        assert step.explain(*args) == step.last_decision.explain()


@pytest.mark.parametrize("name", [name for name, (_, args, _) in CALLS.items() if isinstance(args[0], torch.Tensor)])
@torch.enable_grad()
def test_gradients_are_seen_in_a_refused_call(name: str) -> None:
    """A call that comes to need gradients gets them, and so does one whose object comes to hold such a tensor."""
    fn, (x, *others), _ = CALLS[name]
    step, odd = serve(fn), Opaque()
    for _ in range(3):
        step(x, *others)
        step(x, odd)
    assert step(x.clone().requires_grad_(), *others).requires_grad
    assert step.last_decision.reason is Reason.NEEDS_GRADIENTS
    assert not step(x, *others).requires_grad
    odd.held = torch.ones(3, requires_grad=True)
    step(x, odd)
    assert step.last_decision.reason is Reason.NEEDS_GRADIENTS


class Weighted(torch.nn.Linear):
    """A layer that takes something else, too."""

    def forward(self, x: torch.Tensor, more: Any = None) -> torch.Tensor:
        """The layer's output."""
        return super().forward(x)


@pytest.mark.parametrize("args", [(torch.ones(ROWS + 1, 3),), (torch.ones(ROWS, 3), Opaque())], ids=["rows", "look"])
def test_weights_that_moved_are_released_in_a_refused_call(args: tuple[Any, ...]) -> None:
    """A call that no graph serves lets go of graphs that can serve no more."""
    model = Weighted(3, 3).eval()
    step = serve(model)
    for _ in range(3):
        step(torch.randn(ROWS, 3))
        step(*args)
    assert len(step.entries) == 1
    model.weight = torch.nn.Parameter(torch.zeros(3, 3))
    assert torch.equal(step(*args), model(*args))
    assert not step.entries


X = torch.ones(ROWS, 3)
LOOKS: dict[str, tuple[Any, ...]] = {
    "no object": (X, {"a": [1, 2]}),
    "an object elsewhere": (X, {"a": [Opaque(), 1]}),
    "another key": (X, {"b": [1, Opaque()]}),
    "another nest": (X, {"a": (1, Opaque())}),
    "more in a nest": (X, {"a": [1, Opaque(), 2]}),
    "a nest in a nest": (X, {"a": [1, [Opaque()]]}),
    "one argument": (X,),
    "other rows": (torch.ones(2, 3), {"a": [1, Opaque()]}),
    "too many rows": (torch.ones(ROWS + 1, 3), {"a": [1, Opaque()]}),
    "a row": (torch.ones(3), {"a": [1, Opaque()]}),
    "no tensor": (3, {"a": [1, Opaque()]}),
    "a parameter": (torch.nn.Parameter(X, requires_grad=False), {"a": [1, Opaque()]}),
    "a sparse tensor": (X.to_sparse(), {"a": [1, Opaque()]}),
    "a lazy conjugate": (X.to(torch.complex64).conj(), {"a": [1, Opaque()]}),
    "another device": (torch.ones(ROWS, 3, device="meta"), {"a": [1, Opaque()]}),
}


@pytest.mark.parametrize("name", LOOKS)
def test_calls_of_other_looks_are_distinguished(name: str) -> None:
    """What is known of one look says nothing of another."""
    refused = (X, {"a": [1, Opaque()]})
    reasons = []
    for before in (0, 5):
        step = serve(first)
        for _ in range(before):
            step(*refused)
        for _ in range(3):
            step(*LOOKS[name])
        reasons.append(step.last_decision.reason)
    assert reasons[0] is reasons[1]


def test_a_look_tells_nothing_of_the_thread() -> None:
    """Within somebody's mode the reason is the mode."""
    fn, args, reason = CALLS["an object"]
    step = serve(fn)
    for _ in range(5):
        step(*args)
    with BaseTorchFunctionMode():
        step(*args)
    assert step.last_decision.reason is Reason.MODE_ACTIVE
    step(*args)
    assert step.last_decision.reason is reason


@pytest.mark.parametrize("prewarms", [False, True])
def test_memory_that_moves_to_other_processes_is_refused(prewarms: bool) -> None:
    """What was noted of it is gone afterwards."""
    weight = torch.ones(3)
    options = CUDAGraphOptions(capture_share=None)
    serve = graphed(lambda x: x * weight.clone().share_memory_(), dynamic={"x": 0}, max_size=4, options=options)
    if prewarms:
        assert Reason.CAPTURE_UNSAFE in serve.prewarm(torch.ones(4, 3)).reasons.values()
    assert check_rows(serve, 2, 2, 2)[-1] is Reason.CAPTURE_UNSAFE


MANY = 400


class Looks:
    """Counts the calls that a server looked at."""

    def __init__(self, step: Graphed[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        perform = step._server.perform

        def counted(choice: Any) -> Any:
            self.count += 1
            return perform(choice)

        monkeypatch.setitem(vars(step._server), "perform", counted)


def mixes(x: Tensor) -> Tensor:
    """Something that cannot be padded."""
    return x - x.mean(0)


class Calls(NamedTuple):
    """Calls that run eagerly for one reason: after what, of how many rows, and how many of them are looked at."""

    fn: Callable[[Tensor], Tensor]
    before: Callable[[Any], object]
    rows: Sequence[int]
    reason: Reason
    looks: int
    how: dict[str, Any] = {}  # noqa: RUF012


def called(*rows: int) -> Callable[[Any], object]:
    """Calls with so many rows."""
    return lambda step: check_rows(step, *rows)


OFTEN = {
    "what no graph holds": Calls(unsafe, called(*[4] * 30), [4] * MANY, Reason.CAPTURE_UNSAFE, MANY // 20),
    "what cannot be padded": Calls(mixes, called(*[3] * 30), [3] * MANY, Reason.ROWS_MIX, MANY // 20),
    "what no size holds": Calls(double, called(*[9] * 30), [9] * MANY, Reason.ABOVE_LARGEST_SIZE, MANY // 20),
    "batches of many sizes": Calls(
        mixes,
        called(*[16] * 4),
        [*range(1, 16)] * 20,
        Reason.ROWS_MIX,
        60,
        {"sizes": (16,), "options": CUDAGraphOptions(capture_share=None)},
    ),
    "a failed capture that waits for time": Calls(
        unsafe,
        lambda step: step.prewarm(torch.ones(4, 3)),
        [4] * MANY,
        Reason.CAPTURE_UNSAFE,
        MANY // 10,
        {"options": CUDAGraphOptions(capture_share=1e-9)},
    ),
}


@pytest.mark.parametrize("in_python", [False, True])
@pytest.mark.parametrize("name", OFTEN)
def test_most_calls_are_not_looked_at(name: str, in_python: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has eager's answer and is counted with its reason, rows and decision; where there is no core, too."""
    case = OFTEN[name]
    if in_python:
        serve_in_python(monkeypatch)
    step = graphed(case.fn, **({"dynamic": {"x": 0}, "sizes": (4,)} | case.how))
    case.before(step)
    looks, reasons, rows = Looks(step, monkeypatch), step.stats.reasons[case.reason], Counter(step.stats.rows)
    assert set(check_rows(step, *case.rows)) == {case.reason}
    assert looks.count <= case.looks
    assert step.stats.reasons[case.reason] == reasons + len(case.rows)
    assert Counter(step.stats.rows) - rows == Counter(case.rows)


def test_a_size_that_failed_is_tried_again_in_time() -> None:
    """What could not be captured is captured once it can be, after as many calls as the quarantine says."""
    is_bad = [True]

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return unsafe(x) if is_bad[0] else x * 2

    step = graphed(Model(), dynamic={"x": 0}, sizes=(4,))
    check_rows(step, *[4] * 10)
    is_bad[0] = False
    found = check_rows(step, *[4] * 30)
    assert found.index(Reason.CAPTURED_NOW) <= 16
    assert found[-1] is Reason.EXACT


def test_no_other_batch_is_looked_at_while_the_first_capture_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits as they do, and is counted with its rows; once there is a graph, each batch is looked at."""
    step = graphed(double, dynamic={"x": 0}, sizes=(8,), options=CUDAGraphOptions(capture_share=1e-9))
    step._server.graphs.budget.first_capture_s = 1e9
    step._server.graphs.budget.clock = iter(range(10**9)).__next__
    assert check_rows(step, 8, 8, 8) == [Reason.FIRST_SIGHTING, *[Reason.CAPTURE_WAITS] * 2]
    looks = Looks(step, monkeypatch)
    assert set(check_rows(step, *range(1, 8))) == {Reason.CAPTURE_WAITS}
    assert looks.count == 0
    assert step.stats.rows == dict.fromkeys(range(1, 8), 1) | {8: 3}
    step.prewarm(torch.ones(8, 3))
    assert set(check_rows(step, *range(1, 8))) == {Reason.PADDED}


@pytest.mark.parametrize("is_asleep", [False, True])
def test_answers_need_no_gradients_where_graphs_give_none(is_asleep: bool) -> None:
    """Of a module in ``eval()``, though gradients are on; but a call that needs them gets them, with its reason."""
    layer = nn.Linear(3, 3).eval()
    step = graphed(lambda x: mixes(layer(x)), dynamic={"x": 0}, sizes=(4,))
    if is_asleep:
        step.sleep()
    with torch.enable_grad():
        for _ in range(40):
            assert not step(torch.ones(3, 3)).requires_grad
        assert step(torch.ones(3, 3, requires_grad=True)).requires_grad
    assert step.last_decision.reason is Reason.NEEDS_GRADIENTS


def test_forms_without_end_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of calls that name other arguments each time is bounded."""
    monkeypatch.setattr(server, "_MOST_FORMS", 40)
    step = graphed(lambda x, **scales: x * sum(scales.values()), dynamic={"x": 0}, sizes=(4,))
    x = torch.ones(4, 3)
    for number in range(100):
        assert torch.equal(step(x, **{f"scale_{number}": 2.0}), x * 2)
    assert len(step._route.unmatched) <= 40


def test_strict_raises_each_time() -> None:
    """No call stays eager in silence."""
    step = graphed(unsafe, dynamic={"x": 0}, sizes=(4,), strict=True)
    x = torch.ones(4, 3)
    step(x)
    for _ in range(40):
        with pytest.raises(FallbackError):
            step(x)


def test_the_next_look_comes_after_twice_as_many_calls() -> None:
    """The first ones in a row are all looked at; another reason begins anew; there are at most so many. Where it is
    clear how long nothing changes, none is."""
    first, other = (Decision.eager(reason, 3) for reason in (Reason.ROWS_MIX, Reason.NO_GAIN))
    countdown = Countdown(first, 8)
    found = []
    for _ in range(20):
        countdown.again(first)
        found.append(countdown.left)
    assert found == [0] * 8 + [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024]
    countdown.again(other)
    assert (countdown.left, countdown.decision) == (0, other)
    countdown.again(other, 100)
    assert countdown.left == 100
