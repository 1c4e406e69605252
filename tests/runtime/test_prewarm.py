"""Captures made before batches need them: within budgets of time and memory, one at a time in pauses, other sizes."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch import CUDAGraphOptions, Graphed, Reason, graphed
from graphdispatch.engines import named_sizes
from graphdispatch.errors import ConfigError

from ..helpers import assert_served, check_calls, check_rows

SIZES = (1, 2, 4, 8, 16)


@pytest.fixture
def model() -> torch.nn.Module:
    """Rows are independent of each other."""
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).eval()


def make(model: torch.nn.Module, **options: Any) -> Graphed[..., Any]:
    """The model with the sizes of these tests."""
    return graphed(model, dynamic={"input": 0}, **({"sizes": SIZES} | options))


def serves(step: Graphed[..., Any], *rows: int) -> list[Reason]:
    """The reason of each call of so many rows, whose answer is eager's."""
    return check_rows(step, *rows, width=8, rtol=1.3e-6, atol=1e-5)


def test_the_report_says_what_was_captured(model: torch.nn.Module) -> None:
    """Largest first; all of it is served at once."""
    step = make(model)
    report = step.prewarm(torch.randn(4, 8))
    assert report.captured == (16, 8, 4, 2, 1)
    assert (report.left_out, report.memory_bytes) == ({}, step.memory_bytes)
    assert "5 FULL graphs captured: 16 8 4 2 1" in str(report)
    assert serves(step, 1, 3, 16) == [Reason.EXACT, Reason.PADDED, Reason.EXACT]
    assert step.prewarm(torch.randn(4, 8)).captured == ()


@pytest.mark.parametrize("other", ["ids", "lengths"])
def test_a_length_is_proven_beside_integers_that_do_not_follow_it(other: str) -> None:
    """As of a decoder beside its encoder, or numbers of elements: then no service compares a padded length."""
    table = torch.randn(10, 4)

    def attend(x: torch.Tensor, mask: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        keys, hidden = table[x], mask == 0
        if other == "lengths":
            hidden = hidden | (torch.arange(x.shape[1]) >= others[:, :1])
        scores = (table[others] @ keys.mT).masked_fill(hidden[:, None], float("-inf"))
        return scores.softmax(-1) @ keys

    length = gd.Dim("length", sizes=(4, 8), pad={"mask": 0})
    dynamic = {"x": {0: "rows", 1: length}, "mask": {0: "rows", 1: "length"}, "others": {0: "rows"}}
    step = graphed(attend, dynamic=dynamic, sizes=(2, 4))
    step.prewarm(torch.randint(10, (4, 8)), torch.ones(4, 8), torch.randint(7, 9, (4, 3)))
    step.freeze()
    for rows, tokens in (1, 3), (2, 4), (3, 7), (4, 8), (4, 5):
        call = torch.randint(10, (rows, tokens)), torch.ones(rows, tokens), torch.randint(1, tokens + 1, (rows, 3))
        torch.testing.assert_close(step(*call), attend(*call))
    assert step.stats.hits == step.stats.calls == 5


def test_a_budget_of_time_leaves_sizes_for_later(model: torch.nn.Module) -> None:
    """Nothing is begun after the time is up; what was left out is captured as it comes."""
    step = make(model, options=CUDAGraphOptions(capture_after=1))
    report = step.prewarm(torch.randn(4, 8), max_seconds=1e-9)
    assert report.captured == ()
    assert list(report.left_out) == [16, 8, 4, 2, 1]
    assert "max_seconds" in str(report)
    assert serves(step, 8) == [Reason.CAPTURED_NOW]


def test_one_size_in_a_pause(model: torch.nn.Module) -> None:
    """Nothing else is captured, and no call is counted."""
    step = make(model)
    serves(step, 4)
    calls = step.stats.calls
    assert step.prewarm(torch.randn(2, 8), sizes=[8]).captured == (8,)
    assert (step.stats.captures, step.stats.calls) == (1, calls)
    assert {*serves(step, 5, 6, 7, 8)} <= {Reason.PADDED, Reason.EXACT}
    with pytest.raises(ConfigError, match=r"among the capture sizes \(1, 2, 4, 8, 16\), got 17"):
        step.prewarm(torch.randn(2, 8), sizes=[17])


LADDER = sorted(named_sizes("vllm", 64), reverse=True)


def constants(x: torch.Tensor) -> torch.Tensor:
    """A constant of each size's own, in proportion to it."""
    return x * torch.arange(len(x) * 8.0).view(-1, 8)


def surprise(x: torch.Tensor) -> torch.Tensor:
    """For batches below the two largest sizes, a constant that their graphs do not have."""
    return x + (0 * torch.arange(2.0**15)[:8] if len(x) <= 4 else 0)


def needs_large(x: torch.Tensor) -> torch.Tensor:
    """No graph can hold it at the largest size."""
    return surprise(x) if len(x) < 16 else x * x.sum().item()


def prewarmed(
    fn: Callable[..., Any], sizes: Sequence[int], budget: int | None
) -> tuple[tuple[int, ...], list[int], int]:
    """The sizes that a prewarm captures within a budget, those that do not fit, and the bytes held."""
    options = CUDAGraphOptions(memory_budget_bytes=budget)
    step = graphed(fn, dynamic={"x": 0}, sizes=sorted(sizes), backend="cpu", options=options)
    done = step.prewarm(x=torch.randn(max(sizes), 8))
    left_out = [size for size, reason in done.reasons.items() if reason is Reason.CACHE_FULL]
    return done.captured, left_out, done.memory_bytes


def test_capturing_stops_before_the_budget() -> None:
    """What is held stays within the budget, most of which is used, and the sizes that did not fit are named."""
    *_, budget = prewarmed(constants, LADDER, None)
    budget = budget * 2 // 3
    captured, left_out, held = prewarmed(constants, LADDER, budget)
    assert sorted([*captured, *left_out], reverse=True) == LADDER
    assert left_out
    assert 0.8 * budget < held <= budget


@pytest.mark.parametrize("budget", [None, 2**30])
def test_a_budget_of_memory_is_none_of_graphs(budget: int | None) -> None:
    """Graphs of another type, of which there are as many as there may be, give way where memory has room."""
    options = CUDAGraphOptions(memory_budget_bytes=budget, max_cached_graphs=2)
    step = graphed(constants, dynamic={"x": 0}, sizes=(2, 4), options=options)
    for dtype in (torch.float32, torch.float64):
        report = step.prewarm(torch.randn(2, 8, dtype=dtype))
        assert (report.captured, report.left_out) == ((4, 2), {})


def test_what_a_prewarm_captured_stays() -> None:
    """The graphs of other calls give way, though those of its own that it finds were used before them."""
    step = graphed(constants, dynamic={"x": 0}, sizes=(1, 2, 4), options=CUDAGraphOptions(max_cached_graphs=4))
    x = torch.randn(4, 8)
    step.prewarm(x, sizes=(4,))
    step.prewarm(x.double())
    assert step.prewarm(x).captured == (2, 1)
    assert "FULL graph" in step.explain(x)


def test_a_graph_that_a_prewarm_displaces_is_left_out() -> None:
    """Where there may be fewer graphs than it wants, one that was there before is in its report, too."""
    step = graphed(constants, dynamic={"x": 0}, sizes=(1, 2, 4, 8), options=CUDAGraphOptions(max_cached_graphs=3))
    step.prewarm(torch.randn(4, 8), sizes=(8,))
    report = step.prewarm(torch.randn(4, 8))
    assert report.captured == (4, 2, 1)
    assert report.reasons == {8: Reason.CACHE_FULL}


@pytest.mark.parametrize("fn", [surprise, needs_large])
def test_captures_correct_what_is_expected(fn: Callable[..., Any]) -> None:
    """After a size that took far more than the one before it, the next one must have room for as much."""
    sizes = [16, 8, 4, 2, 1]
    *_, enough = prewarmed(fn, sizes, None)
    without_last = prewarmed(fn, sizes[:-1], None)[2]
    assert enough - without_last > 2**15
    captured, left_out, held = prewarmed(fn, sizes, (enough + without_last) // 2)
    assert captured[-2:] == (4, 2)
    assert left_out == [1]
    assert held == without_last


def test_a_function_learns_how_far_a_prewarm_is(model: torch.nn.Module) -> None:
    """It is called after each size; none is left at the end, and what it raises ends the prewarm."""
    step, said = make(model), list[tuple[int, int, float]]()
    step.prewarm(torch.randn(4, 8), progress=lambda *one: said.append(one))
    assert [(done, total) for done, total, _ in said] == [(done, 5) for done in (1, 2, 3, 4, 5)]
    assert said[-1][2] == 0.0 < said[0][2]

    def stop(done: int, total: int, seconds_left: float) -> None:
        raise TimeoutError

    step.clear()
    with pytest.raises(TimeoutError):
        step.prewarm(torch.randn(4, 8), progress=stop)
    assert step.captured_sizes == (16,)


def test_a_bar_is_shown_on_stderr(model: torch.nn.Module, capfd: pytest.CaptureFixture[str]) -> None:
    """Where rich is installed."""
    make(model).prewarm(torch.randn(4, 8), progress=True)
    out, err = capfd.readouterr()
    assert "capturing graphs" in err
    assert "5/5" in err
    assert not out


def test_a_bar_without_rich_says_what_to_do(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """As does anything that is neither a flag nor a function."""
    with pytest.raises(ConfigError, match=r"progress must be True for a bar, or a function .* got 'yes'"):
        make(model).prewarm(torch.randn(4, 8), progress="yes")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ConfigError, match=r"which is not installed: pip install rich, or give a function"):
        make(model).prewarm(torch.randn(4, 8), progress=True)


def test_a_budget_of_time_first_has_sizes_that_serve_every_batch() -> None:
    """The largest, its half and so on along each dimension; then the others, the largest first."""
    clock = {"dynamic": {"input": 0}, "sizes": (1, 2, 4, 8, 16, 24, 32, 40)}
    report = graphed(torch.nn.ReLU(), **clock).prewarm(torch.randn(2, 3), max_seconds=60)
    assert report.captured == (40, 16, 8, 4, 2, 1, 32, 24)
    dims = {"input": {0: "rows", 1: gd.Dim("length", (2, 3, 4))}}
    report = graphed(torch.nn.ReLU(), dynamic=dims, sizes=(1, 2, 3)).prewarm(torch.randn(2, 3), max_seconds=60)
    order = [getattr(size, "lengths") for size in report.captured]  # noqa: B009
    assert order == [(3, 4), (3, 2), (1, 4), (1, 2), (3, 3), (2, 4), (2, 3), (2, 2), (1, 3)]


def test_what_fails_alike_is_said_once() -> None:
    """With the line of the model; a size that fails for another reason has a line of its own."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item() if len(x) > 2 else x + len(list(torch.unique(x)))

    report = graphed(fn, dynamic={"x": 0}, sizes=SIZES).prewarm(torch.randn(4, 8))
    lines = [line for line in str(report).splitlines() if "left out" in line]
    assert len(report.left_out) == 5
    assert [line.partition(":")[0] for line in lines] == ["FULL 16, 8, 4 left out", "FULL 2, 1 left out"]
    assert all("test_prewarm.py" in line for line in lines)
    assert report._repr_html_().count("test_prewarm.py") == 2


def test_a_prewarm_of_a_model_that_trains_warns(caplog: pytest.LogCaptureFixture) -> None:
    """Its calls will run eagerly; not where there are no gradients, nor behind ``eval()``, which is the remedy."""
    model = torch.nn.Linear(8, 8)
    with torch.no_grad():
        make(model).prewarm(torch.randn(4, 8))
    assert not caplog.records
    with torch.enable_grad():
        make(model).prewarm(torch.randn(4, 8))
    why = "the call needs gradients: Linear is in training mode; call eval(), or use torch.no_grad()"
    assert f"Linear is prewarmed with a call that will run eagerly: {why}" in caplog.text
    caplog.clear()
    step = make(model.eval())
    with torch.enable_grad():
        step.prewarm(torch.randn(4, 8))
        assert serves(step, 4) == [Reason.EXACT]
    assert not caplog.records


def test_very_many_graphs_are_not_captured_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """All combinations of two dimensions are counted, with the time that they may take; fewer sizes are silent."""
    dims = {"input": {0: "rows", 1: "length"}}
    step = graphed(torch.nn.ReLU(), dynamic=dims, max_size=64)
    step.prewarm(torch.randn(2, 3), max_seconds=1e-9)
    (line,) = caplog.messages
    assert f"prewarm captures {len(step.sizes)} graphs, one for each combination of sizes" in line
    caplog.clear()
    dims = {"input": {0: "rows", 1: gd.Dim("length", [64, 256])}}
    graphed(torch.nn.ReLU(), dynamic=dims, sizes=(8,)).prewarm(torch.randn(2, 3))
    assert not caplog.records


def test_what_is_not_padded_is_said_with_its_line() -> None:
    """Full batches are served; ``health`` says the same of the others, and nothing is said of a model whose rows are
    independent."""
    step = graphed(lambda x: x - x.mean(0), dynamic={"x": 0}, sizes=(2, 4))
    report = step.prewarm(torch.randn(4, 8))
    assert report.captured == (4, 2)
    assert report.padding.startswith("rows mix in aten::mean")
    assert "test_prewarm.py" in report.padding
    assert f"batches that would be padded run eagerly: {report.padding}" in str(report)
    assert check_rows(step, 3, width=8) == [Reason.ROWS_MIX]
    assert report.padding in str(step.health())
    assert graphed(lambda x: x * 2, dynamic={"x": 0}, sizes=(2, 4)).prewarm(torch.randn(4, 8)).padding == ""


@pytest.mark.parametrize("example", [torch.randn(3, 7), torch.randn(3, 8).double()])
def test_what_the_callable_raises_for_the_example_passes_through(example: torch.Tensor) -> None:
    """Also where no size has as many rows: the example itself is at fault, not what it was cut to."""
    step = graphed(torch.nn.Linear(8, 8).eval(), dynamic={"input": 0}, sizes=(2, 4))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        step.prewarm(example)
    assert not step.entries
    assert step.prewarm(torch.randn(3, 8)).captured == (4, 2)


def over_edges(x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """A sum over the neighbours of each node: edges point to nodes of the same batch."""
    return torch.zeros_like(x).index_add(0, edges[1] % 100, x[edges[0] % 100] * 2)


def test_a_size_whose_cut_example_raises_is_left_out() -> None:
    """Edges point to nodes that were cut off: the report says so in words, and the size of the example is captured."""
    nodes, edges = gd.Dim("nodes", sizes=[3, 6]), gd.Dim("edges", sizes=[4, 8])
    serve = gd.graphed(over_edges, dynamic={"x": {0: nodes}, "edges": {1: edges}})
    x, pairs = torch.randn(6, 2), torch.full((2, 8), 104)
    report = serve.prewarm(x, pairs)
    assert Reason.CALL_RAISED in report.reasons.values()
    assert "raises IndexError for the example cut to this size" in str(report)
    assert "give prewarm an example of each size" in str(report)
    assert_served(serve, x, pairs)
    assert_served(serve, torch.randn(6, 2), torch.randint(0, 5, (2, 8)))
    smaller = torch.randn(3, 2), torch.full((2, 4), 2)
    serve.prewarm(*smaller)
    assert_served(serve, *smaller)


@pytest.mark.parametrize("dynamic", [{"x": 0}, {"x": 0, "parents": 0}])
def test_an_example_whose_integers_point_into_it_is_cut(dynamic: dict[str, int]) -> None:
    """They then point at what is left: a device would stop at others. The example stays as it is."""
    step, parents = graphed(lambda x, parents: x[parents], dynamic=dynamic, sizes=(2, 3, 8)), torch.tensor([3, 1, 2, 0])
    assert not step.prewarm(torch.randn(4, 3), parents).left_out
    assert parents.tolist() == [3, 1, 2, 0]


def test_lengths_in_an_example_stay_as_they_are_where_no_rows_mix() -> None:
    """They may be smaller than its number of rows, and none would be a row of no elements."""

    def last(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        place = (lengths - 1)[:, None, None].expand(-1, 1, x.shape[2])
        return torch.linalg.qr(x)[0].gather(1, place)[:, 0]  # no rule says whether its rows mix

    step = graphed(last, dynamic={"x": 0, "lengths": 0}, sizes=(1, 2, 4))
    assert not step.prewarm(torch.randn(4, 3, 3), torch.tensor([3, 1, 2, 3])).left_out


def test_lengths_in_an_example_are_cut_with_its_sequence() -> None:
    """Else they would name elements that are gone."""

    def last(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x.gather(1, (lengths - 1)[:, None])

    dynamic = {"x": {0: "batch", 1: gd.Dim("length", sizes=(4, 8))}, "lengths": {0: "batch"}}
    step = graphed(last, dynamic=dynamic, pad={"lengths": 1}, sizes=(1, 2))
    assert not step.prewarm(torch.randn(2, 8), torch.tensor([8, 3])).left_out
    check_calls(step, (torch.randn(2, 3), torch.tensor([3, 1])), (torch.randn(1, 7), torch.tensor([7])))
    assert step.stats.hits == 2


def test_an_example_that_leaves_gaps() -> None:
    """Batches that are made of it leave gaps in memory, too: code may read how far its rows lie apart."""
    for fn, is_served in ((lambda x: x * x.stride(0), False), (lambda x: x * 2, True)):
        step = graphed(fn, dynamic={"x": 0}, sizes=(2, 4))
        step.prewarm(torch.randn(4, 6)[:, :3])
        check_calls(step, *(torch.randn(rows, 6)[:, :3] for rows in (4, 3, 4)))
        assert bool(step.stats.hits) is is_served


class Backend:
    """A base class, as of a library that looks for its backends in its first call."""


class Doubles(Backend):
    """The only one."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Twice as much."""
        return x * 2


@pytest.mark.parametrize("looks", [False, True])
def test_what_a_first_call_keeps_a_prewarm_from_is_made_up_for(looks: bool) -> None:
    """Behind that call, each size is captured as soon as it comes again, however short the calls are."""
    backends: list[Backend] = []

    def first_sets_up(x: torch.Tensor) -> torch.Tensor:
        if not backends:
            backends.extend(kind() for kind in (Backend.__subclasses__() if looks else [Doubles]))
        return backends[0].run(x)  # type: ignore[attr-defined, no-any-return]

    step = graphed(first_sets_up, dynamic={"x": 0}, sizes=(1, 2, 4))
    report = step.prewarm(torch.ones(4, 3))
    assert set(report.reasons.values()) == {Reason.STATE_UNSEEN if looks else Reason.STATE_REBOUND}
    check_rows(step, *[4, 2] * 4, 3)
    assert check_rows(step, 4, 2, 3) == [Reason.EXACT, Reason.EXACT, Reason.PADDED]
