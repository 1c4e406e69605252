"""Python that runs within a replay, between the copies in and out: a pad function, or a finalizer that the collector
calls. A served call that it makes runs eagerly, since its graph would overwrite what the replay under way reads."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphdispatch import Graphed, Reason, eager_break, graphed
from graphdispatch.errors import CaptureError

from ..helpers import AT_ONCE, collecting, in_threads, serve_in_python

OF_PAD: list[Callable[[], object]] = []
"""What the pad function does besides."""


def pad(padding: Tensor, real: Tensor) -> None:
    """Fill with zeros."""
    padding.zero_()
    if OF_PAD:
        OF_PAD.pop()()


@pytest.fixture(name="step", params=["native", "python"])
def of_pad(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Graphed[[Tensor], tuple[Tensor, Tensor]]:
    """A served callable, where batches of three rows are hits whose padding is the function's."""
    if request.param == "python":
        serve_in_python(monkeypatch)
    step = graphed(lambda x: (x * 2, x * 3), dynamic={"x": 0}, sizes=[4], pad={"x": pad}, options=AT_ONCE)
    for rows in (4, 3) * 4:
        step(torch.randn(rows, 2))
    assert step.last_decision.reason is Reason.PADDED
    return step


def check(step: Graphed[[Tensor], tuple[Tensor, Tensor]], x: Tensor) -> None:
    """A call gets its own answer."""
    double, triple = step(x)
    assert torch.equal(double, x * 2)
    assert torch.equal(triple, x * 3)


@pytest.mark.parametrize("columns", [2, 5], ids=["a hit", "a miss"])
def test_a_pad_function_calls_the_callable(step: Graphed[[Tensor], tuple[Tensor, Tensor]], columns: int) -> None:
    """Both calls are right, the outer one by its graph."""
    inner = torch.full((4, columns), 100.0)
    hits = step.stats.hits
    OF_PAD.append(lambda: check(step, inner))
    check(step, torch.ones(3, 2))
    assert not OF_PAD
    assert step.stats.reasons[Reason.INSIDE_REPLAY] == 1
    assert step.stats.hits == hits + 1
    check(step, torch.ones(3, 2))
    assert step.stats.hits == hits + 2


def test_a_finalizer_calls_the_callable(step: Graphed[[Tensor], tuple[Tensor, Tensor]]) -> None:
    """The collector calls it at any place of a hit."""

    inner, outer = torch.full((4, 2), 100.0), torch.ones(3, 2)
    collecting(lambda: check(step, outer), lambda: step(inner))


def raises(change: Callable[[Graphed[..., Any]], object]) -> Callable[[Graphed[..., Any]], None]:
    """A change of the graphs, which is refused."""

    def changes(step: Graphed[..., Any]) -> None:
        with pytest.raises(CaptureError, match="graphs cannot be changed now"):
            change(step)

    return changes


def knows_sizes(step: Graphed[..., Any]) -> None:
    """It reads which sizes have graphs."""
    assert step.captured_sizes == (4,)


WITHIN: dict[str, Callable[[Graphed[..., Any]], object]] = {
    "a call": lambda step: check(step, torch.ones(4, 5)),
    "captured_sizes": knows_sizes,
    "prewarm": raises(lambda step: step.prewarm(torch.ones(4, 2))),
    "invalidate": raises(Graphed.invalidate),
    "sleep": raises(Graphed.sleep),
    "wake": raises(Graphed.wake),
    "freeze": raises(Graphed.freeze),
    "unfreeze": raises(Graphed.unfreeze),
    "clear": raises(Graphed.clear),
}
"""What a pad function may do while another thread makes graphs."""


@pytest.mark.parametrize("name", WITHIN)
def test_it_waits_for_no_lock_and_changes_no_graphs(step: Graphed[[Tensor], tuple[Tensor, Tensor]], name: str) -> None:
    """A thread that captures holds the server's lock and waits for the pool's, which the replay holds: what calls,
    looks at sizes, or makes and releases graphs, does so at once or raises. The replay has its graph until it ends,
    and no flag is left that says otherwise."""
    is_held, is_done, done = threading.Event(), threading.Event(), list[object]()
    step._graph_cache.is_asleep = name == "wake"  # which does nothing when awake
    hits = step.stats.hits

    def holds() -> bool:
        with step._server.lock:
            is_held.set()
            return is_done.wait(10)

    def calls() -> None:
        assert is_held.wait(10)
        OF_PAD.append(lambda: done.append(WITHIN[name](step)))
        check(step, torch.ones(3, 2))
        is_done.set()

    assert in_threads(holds, calls)[0]
    assert (len(done), step.stats.hits, step.is_frozen) == (1, hits + 1, False)
    assert step._graph_cache.is_asleep is (name == "wake")


def test_a_break_releases_no_graph() -> None:
    """Its error is the call's, and the graph serves on."""
    releases = list[Callable[[], None]]()

    @eager_break
    def part(h: Tensor) -> Tensor:
        while releases:
            releases.pop()()
        return h + 1

    step = graphed(lambda x: part(x * 2) + x, dynamic={"x": 0}, sizes=[4], mode="PIECEWISE", options=AT_ONCE)
    for _ in range(4):
        step(torch.randn(4, 2))
    (entry,) = step.entries
    releases.append(entry.release)
    with pytest.raises(CaptureError, match="graphs cannot be changed now"):
        step(torch.ones(4, 2))
    hits, x = step.stats.hits, torch.randn(4, 2)
    assert torch.equal(step(x), x * 2 + 1 + x)
    assert step.stats.hits == hits + 1
