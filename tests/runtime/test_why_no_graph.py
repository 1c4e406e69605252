"""What a call that no graph serves says: in what it differs from those with graphs, which constant changes each time,
and whether graphs serve at all; and what to do about that."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphOptions, Graphed, Reason, graphed
from graphdispatch.engines import CUDAGraphWrapper, Health
from graphdispatch.errors import FallbackError

from ..helpers import Spy, check_rows

X = torch.randn(3, 8)


class Model(nn.Module):
    """Its arguments are optional, and it holds a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor, mask: Tensor | None = None, mode: str = "a") -> Tensor:
        """The answer depends on all of them."""
        y = self.layer((x - self.mean).to(self.layer.weight.dtype))
        y = y if mask is None else y * mask
        return y if mode == "a" else -y


def prewarmed(*example: Any, **settings: Any) -> Graphed[..., Any]:
    """A served model with graphs for calls like the example."""
    step = graphed(Model().eval(), dynamic={"x": 0}, sizes=(4,), **settings)
    step.prewarm(*example)
    return step


OTHERS: dict[str, tuple[tuple[Any, ...], Callable[[Any], Any], str, Callable[[], AbstractContextManager[Any]]]] = {
    "dtype": ((X,), lambda f: f(X.double()), "input 'x' must be a tensor of dtype torch.float32", nullcontext),
    "shape": ((X, X[:1]), lambda f: f(X, X[0]), "input 'mask' must be a tensor of shape (1, 8), got (8,)", nullcontext),
    "layout": ((X,), lambda f: f(X.t().contiguous().t()), "input 'x' must be contiguous in memory", nullcontext),
    "given": ((X,), lambda f: f(X, mode="b"), "argument 'mode' must be left out", nullcontext),
    "left out": ((X, X[:1]), lambda f: f(X), "argument 'mask' must be given", nullcontext),
    "by name": ((X,), lambda f: f(x=X), "the arguments given by name must be: none", nullcontext),
    "inference mode": ((X,), lambda f: f(X), "torch.inference_mode must be off", torch.inference_mode),
    "autocast": (
        (X,),
        lambda f: f(X),
        "autocast must be off, got torch.bfloat16",
        lambda: torch.autocast("cpu", torch.bfloat16),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_from_the_calls_with_graphs_is_named(name: str) -> None:
    """By ``explain``, the decision and ``health``; and prewarm() with such a call is right."""
    example, call, said, around = OTHERS[name]
    step = prewarmed(*example)
    with around():
        assert f"there are graphs for other calls ({said}" in call(step.explain)
        call(step)
        assert step.last_decision.reason is Reason.FIRST_SIGHTING
        assert said in step.last_decision.detail
        assert said in str(step.health())
        call(step.prewarm)
        torch.testing.assert_close(call(step), call(step.unwrap()))
    assert step.last_decision.reason is Reason.PADDED


ENDED: dict[str, tuple[Callable[[Any], object], str]] = {
    "a buffer": (
        lambda model: setattr(model, "mean", model.mean + 1),
        "mean: another tensor in its place; copy_() into the old one keeps its graphs)",
    ),
    "a module": (
        lambda model: setattr(model, "layer", nn.Linear(8, 8).eval()),
        "layer: another object in its place (a torch.nn.modules.linear.Linear)",  # both would look the same in words
    ),
    "a type": (torch.nn.Module.double, ""),
}


@pytest.mark.parametrize("name", ENDED)
def test_graphs_that_a_change_ended_are_named(name: str) -> None:
    """By ``explain``, the decision and ``health``, with what changed, also for a call of another signature; prewarm()
    captures again. Writing in place keeps them."""
    change, said = ENDED[name]
    step = prewarmed(X)
    model = step.unwrap()
    model.mean.copy_(model.mean + 1)
    step(X)
    assert step.last_decision.reason is Reason.PADDED
    change(model)
    x = X.to(model.layer.weight.dtype)
    why = f"its graphs are gone, since the callable changed ({said}"
    assert why in step.explain(x)
    step(x)
    assert why in step.last_decision.detail
    assert "or by prewarm()" in step.last_decision.detail
    assert f"1 of 1 graphs are gone (changed: {said}" in str(step.health())
    step.prewarm(x)
    torch.testing.assert_close(step(x), model(x))
    assert step.last_decision.reason is Reason.PADDED


def test_numbers_of_rows_that_differ_are_named_with_what_to_do() -> None:
    """An int stands for the first dimension that is named; with a name of its own, each number is padded by itself."""

    def of_edges(x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, edges * 3

    batch = torch.randn(4, 3), torch.randn(12, 3)
    step = graphed(of_edges, dynamic={"x": 0, "edges": {0: "edges"}}, sizes=(4, 16))
    assert "name each number, as {0: 'nodes'}, {0: 'edges'}" in step.explain(*batch)
    step = graphed(of_edges, dynamic={"x": {0: "nodes"}, "edges": {0: "edges"}}, sizes=(4,))
    step.prewarm(*batch)
    assert step.explain(*batch).startswith("FULL graph, 4 x 12 -> 4 x 16 rows")


def test_a_cache_that_each_run_empties_is_named() -> None:
    """Its key is a tensor that the call makes, so that no other call finds it."""

    @lru_cache(maxsize=1)
    def wave(mask: torch.Tensor) -> torch.Tensor:
        return mask.cumsum(1).sin()

    step = graphed(lambda x: x + wave(torch.ones_like(x)), dynamic={"x": 0}, sizes=(2, 4))
    report = step.prewarm(torch.randn(4, 3))
    assert set(report.reasons.values()) == {Reason.STATE_REBOUND}
    assert all("a functools.lru_cache lost what it held" in why for why in report.left_out.values())
    check_rows(step, 4, 4)
    assert "a functools.lru_cache lost what it held" in step.explain(torch.randn(4, 3))


def loose(x: Tensor) -> Tensor:
    """What it reads belongs to no module."""
    return x * PROMPT


PROMPT = torch.ones(8, requires_grad=True)
TRAINS: dict[str, tuple[Callable[..., Any], Tensor, str]] = {
    "argument": (Model().eval(), X.clone().requires_grad_(), "argument 'x' requires one; detach() it"),
    "module": (Model(), X, "Linear 'layer' is in training mode; call eval()"),
    "beside": (loose, X, "a tensor that it reads beside its modules requires one; use torch.no_grad()"),
}


@pytest.mark.parametrize("name", TRAINS)
def test_what_needs_gradients_is_named(name: str) -> None:
    """By ``explain``, the decision and the error of a strict callable; the remedies are right."""
    fn, x, said = TRAINS[name]
    step, strict = (graphed(fn, dynamic={"x": 0}, sizes=(4,), strict=is_strict) for is_strict in (False, True))
    with torch.enable_grad():
        assert step.explain(x).startswith(f"eager: the call needs gradients: {said}")
        step(x)
        assert said in step.last_decision.detail
        with pytest.raises(FallbackError, match="the call needs gradients"):
            strict(x)
    step.prewarm(x.detach())
    step(x.detach())
    assert step.last_decision.reason is Reason.PADDED
    if isinstance(fn, nn.Module):
        fn.eval()
        step.prewarm(x.detach())
        with torch.enable_grad():
            step(x.detach())
        assert step.last_decision.reason is Reason.PADDED


class Step(torch.nn.Module):
    """A step of a diffusion: its time is a number, or a tensor."""

    def forward(self, x: torch.Tensor, *, t: float | torch.Tensor, others: tuple[int, ...] = ()) -> torch.Tensor:
        """The next sample."""
        return x * t + sum(others)


def make(**settings: object) -> Graphed[..., torch.Tensor]:
    """The step, which keeps four signatures."""
    options = CUDAGraphOptions(max_signatures=4)
    return graphed(Step(), dynamic={"x": 0}, sizes=(4,), **{"options": options, **settings})


def run(step: Graphed[..., torch.Tensor], count: int) -> list[Reason]:
    """The reason of each of so many calls, each at a time of its own."""
    reasons = []
    for number in range(count):
        step(torch.ones(4, 2), t=number / 100)
        reasons.append(step.last_decision.reason)
    return reasons


def test_the_argument_and_its_values_are_named() -> None:
    """By the decision of each call from the second on, by ``explain``, ``health`` and the report."""
    step = make()
    assert run(step, 30) == [Reason.FIRST_SIGHTING] * 4 + [Reason.CONSTANT_CHANGES] * 26
    said = "argument 't' was 0.28, and is 0.29, which needs a graph for each value: pass it as a tensor"
    assert step.last_decision.detail.startswith(said)
    first = said.replace("0.29", "0.01").replace("0.28", "0.0")
    assert first in str(step.health())
    assert first in str(step.report())
    assert "argument 't' was 0.29, and is 5.0" in step.explain(torch.ones(4, 2), t=5.0)
    few = make()
    run(few, 2)
    assert "argument 't' was 0.0, and is 0.01" in few.last_decision.explain()  # type: ignore[union-attr]
    assert "argument 't' was 0.0, and is 0.01" in str(few.health())


def test_its_remedies_are_right() -> None:
    """A tensor is one graph for all values; values that come again are served where there is room for their graphs."""
    step = make()
    for number in range(10):
        answer = step(torch.ones(4, 2), t=torch.tensor(number / 100))
        torch.testing.assert_close(answer, torch.full((4, 2), number / 100))
    assert step.stats.hits == 7
    roomy = make(options=CUDAGraphOptions(max_signatures=32, capture_after=1))
    for _ in range(3):
        reasons = run(roomy, 10)
    assert reasons == [Reason.EXACT] * 10


def test_strict_raises_beyond_the_signatures_that_are_kept() -> None:
    """The message names the argument; up to there graphs may still come."""
    step = make(strict=True)
    run(step, 4)
    with pytest.raises(FallbackError, match=r"argument 't' was 0.03, and is 0.04, .* pass it as a tensor"):
        run(step, 30)


def test_calls_that_differ_in_more_are_no_change_of_a_constant() -> None:
    """In the type of a tensor, in its shape, or in their structure."""
    step = make()
    for number, dtype in enumerate((torch.float32, torch.float64, torch.float16) * 4):
        step(torch.ones(4, 2 + number, dtype=dtype), t=number / 100)
    assert step.stats.reasons == {Reason.FIRST_SIGHTING: 12}
    step = make()
    for number in range(12):
        step(torch.ones(4, 2), t=number / 100, others=(1,) * number)
    assert step.stats.reasons == {Reason.FIRST_SIGHTING: 12}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings so far."""
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def step_with(**options: object) -> Graphed[..., torch.Tensor]:
    """One that serves up to 4 rows."""
    return graphed(lambda x: x * 2, dynamic={"x": 0}, sizes=(4,), options=CUDAGraphOptions(**options))


def test_every_front_end_with_counters_tells() -> None:
    """Before the first call nothing is served, and nothing is lost."""
    health = CUDAGraphWrapper(torch.relu).health()
    assert health == Health(0, 0.0, 0, 0, ())
    assert str(health) == "no call came yet"


def test_graphs_that_never_engaged_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """After the thousandth call at the latest, with the reason and its remedy."""
    step = step_with()
    for _ in range(500):
        step(torch.zeros(5, 2))
    assert not lines(caplog)
    for _ in range(1000):
        step(torch.zeros(5, 2))
    (line,) = lines(caplog)
    assert "graphs serve 0.0 % of 501 calls; above_largest_size, 501 times" in line
    assert Reason.ABOVE_LARGEST_SIZE.text in line
    assert not step.health().is_well
    assert step.health().causes == ((Reason.ABOVE_LARGEST_SIZE, 1500),)


def test_nothing_is_logged_where_graphs_serve(caplog: pytest.LogCaptureFixture) -> None:
    """Not even if half of the calls behind the first thousand run eagerly."""
    step = step_with()
    for rows in [*[4] * 1000, *[5, 4] * 1000]:
        step(torch.randn(rows, 2))
    assert not lines(caplog)
    health = step.health()
    assert health.is_well
    assert (health.calls, health.captures, health.lost) == (3000, 1, 0)
    assert "graphs serve 66.6 % of 3,000 calls; above_largest_size, 1,000 times" in str(health)


def test_graphs_that_do_not_stay_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """After 32 captures, of which half are gone."""
    layer = torch.nn.Linear(2, 2).eval().requires_grad_(False)
    step = graphed(layer, dynamic={"input": 0}, sizes=(4,), options=CUDAGraphOptions(capture_after=1))
    for turn in range(80):
        if turn % 2 == 0:
            layer.weight = torch.nn.Parameter(torch.randn(2, 2), requires_grad=False)
        step(torch.randn(4, 2))
    (line,) = lines(caplog)
    assert "of 32 graphs are gone" in line
    assert not step.health().is_well


RUNS, COUNTED = Spy(), list[int]()


def _fails_again(x: Tensor) -> Tensor:
    RUNS.append(1)  # which nobody compares
    if len(RUNS) > 1:
        raise ValueError("no more")
    return x * 2


def _differs(x: Tensor) -> Tensor:
    RUNS.append(1)
    return x * len(RUNS)


def _rebinds(x: Tensor, y: Tensor) -> Tensor:
    COUNTED.append(len(COUNTED))
    return x + y


PADDING, LACKS, DIFFERS = "; if that is for padding rows", "; dynamic= may lack 'y': 0", "; call eval(), give a mask"
LENGTHS, Y = torch.tensor([1, 2, 1]), torch.ones(3, 8)
ADVICE: dict[str, tuple[Callable[..., Any], dict[str, Tensor], list[str], int, str, str]] = {
    "padding": (lambda x, n: x.gather(1, (n - 1)[:, None]), {"n": LENGTHS}, ["x", "n"], 4, "index -1", PADDING),
    "no batch": (lambda x, y: x + y, {"y": Y}, ["x"], 4, "The size of tensor", LACKS),
    "a full batch": (_fails_again, {}, ["x"], 3, "no more (while capturing 3 rows)", ""),
    "rows": (lambda x: (x * 2).repeat(2, 1)[: len(x) + 1], {}, ["x"], 4, "output 0 has shape", ""),
    "rebound": (_rebinds, {"y": Y}, ["x"], 4, "COUNTED", ""),
    "a full batch differs": (_differs, {}, ["x"], 3, "output 0", ""),
}
"""Callables and further arguments, those with rows, the size; and words of the reason, and its remedy if it has one."""


@pytest.mark.parametrize("name", ADVICE)
def test_a_reason_has_its_own_remedy(name: str) -> None:
    """And no other's."""
    fn, further, with_rows, size, said, remedy = ADVICE[name]
    RUNS.clear()
    step = graphed(fn, dynamic=dict.fromkeys(with_rows, 0), sizes=(size,), options=CUDAGraphOptions(capture_after=1))
    step(x=X, **further)
    detail = step.last_decision.detail
    assert said in detail
    assert [one for one in (PADDING, LACKS, DIFFERS) if one in detail] == [remedy] * bool(remedy), detail


@pytest.mark.parametrize(("kind", "remedy"), [(torch.optim.Adam, "Adam(fused=True)"), (torch.optim.NAdam, "")])
def test_an_optimizer_is_made_as_its_class_allows(kind: Any, remedy: str) -> None:
    """One that has no such option is not said to have it."""
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = kind([weight])
    optimizer.step()
    step = graphed(lambda x: (optimizer.step(), x * 2)[1], dynamic={"x": 0}, options=CUDAGraphOptions(capture_after=1))
    step(X)
    assert step.last_decision.reason is Reason.CAPTURE_UNSAFE, step.last_decision
    assert ("make the optimizer as" in step.last_decision.detail) is bool(remedy)
    assert remedy in step.last_decision.detail


def test_an_array_is_named_beside_the_models_own_error() -> None:
    """The error is the model's, unchanged; a note of it says which argument is no tensor, and what makes one of it."""
    step = graphed(torch.nn.Linear(2, 2).eval(), dynamic={"input": 0}, sizes=(4,))
    array = torch.zeros(4, 2).numpy()
    with pytest.raises(TypeError) as caught:
        step(array)
    (note,) = caught.value.__notes__
    assert note == (
        "graphdispatch: no argument is a tensor; argument 'input' is a numpy.ndarray (torch.from_numpy makes a tensor "
        "of it)"
    )
    assert step(torch.from_numpy(array)).shape == (4, 2)
