"""Call signatures beyond what is kept, or that do not pay: none is locked out for good, and all are answered."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Graphed, Reason, graphed
from graphdispatch.call.spec import FlatCall
from graphdispatch.engines import BatchDescriptor, CUDAGraphConfig, CUDAGraphManager, CUDAGraphWrapper
from graphdispatch.errors import ConfigError

from ..helpers import AT_ONCE, with_options

ROWS = 4


def twice(x: torch.Tensor, other: Any = None) -> torch.Tensor:
    """It ignores its second argument."""
    return x * 2


def serve(fn: Callable[..., Any] = twice, **options: Any) -> Graphed[..., Any]:
    """A served callable that keeps few kinds of calls; those with other numbers of columns are other ones."""
    return graphed(
        fn, dynamic={"x": 0}, sizes=(ROWS,), **with_options({"max_signatures": 2, "capture_after": 1} | options)
    )


def call(step: Graphed[..., Any], columns: int, *others: Any) -> Reason:
    """The reason of one call, answered as eager answers."""
    x = torch.randn(ROWS, columns)
    assert torch.equal(step(x, *others), x * 2)
    return step.last_decision.reason


def calls_until_graph(step: Graphed[..., Any], columns: int, most: int = 5000) -> int:
    """How many calls of a kind are refused before it gets a graph."""
    for number in range(most):
        if call(step, columns) is Reason.CAPTURED_NOW:
            return number
    raise AssertionError("it never got a graph")


def test_a_kind_that_is_used_no_more_gives_way() -> None:
    """The one used least recently; a kind that is in use stays."""
    step = serve()
    for columns in (3, 5, 3, 3):
        call(step, columns)
    refused = [call(step, 7) for _ in range(16) if call(step, 3) is Reason.EXACT]
    assert refused == [Reason.TOO_MANY_SIGNATURES] * 16
    assert call(step, 7) is Reason.CAPTURED_NOW
    assert call(step, 3) is Reason.EXACT
    assert call(step, 5) is Reason.TOO_MANY_SIGNATURES
    assert len(step.entries) == 2
    assert step.memory_bytes == step.memory_report().total
    step.check_integrity()


def test_kinds_in_use_stay() -> None:
    """However often another one comes."""
    step = serve()
    for _ in range(3):
        call(step, 3)
        call(step, 5)
    for _ in range(60):
        assert (call(step, 3), call(step, 5)) == (Reason.EXACT, Reason.EXACT)
        assert call(step, 7) is Reason.TOO_MANY_SIGNATURES


def test_each_replacement_makes_the_next_one_rarer() -> None:
    """Kinds that come in turns do not have a graph captured each time."""
    step = serve(max_signatures=1)
    call(step, 3)
    waits = [calls_until_graph(step, columns) for columns in (5, 3, 5, 3)]
    assert waits == [16, 32, 64, 128]


@pytest.mark.parametrize(
    ("others", "what"),
    [
        (lambda number: (3, number), "argument 'other' had other values; pass it as a tensor"),
        (lambda number: (3, str(number)), "argument 'other' had other values; pass it as a tensor"),
        (lambda number: (1 + number,), "argument 'x' had other shapes; name the dimension in dynamic="),
        (lambda number: (3, type("Made", (), {})), "argument 'other' was another object; pass the same one"),
    ],
)
@pytest.mark.parametrize("capture_after", [1, 2])
def test_calls_that_always_change_are_left_eager(
    others: Callable[[int], tuple[Any, ...]], what: str, capture_after: int
) -> None:
    """No graph is captured for them any more, and the reason names the argument and a remedy."""
    step = serve(max_signatures=8, capture_after=capture_after)
    found = [call(step, *others(number)) for number in range(300)]
    assert set(found[70:]) == {Reason.SIGNATURE_CHANGES}
    assert step.stats.captures <= 10  # two came in the place of others
    assert what in step.explain(torch.randn(ROWS, others(300)[0]), *others(300)[1:])


def test_calls_that_change_no_more_are_served_in_time() -> None:
    """After 1,024 refusals the next kinds are looked at."""
    step = serve(max_signatures=8, capture_after=2)
    for number in range(100):
        call(step, 3, number)
    found = [call(step, 3, "same") for _ in range(1100)]
    assert found[-1] is Reason.EXACT
    assert found.count(Reason.SIGNATURE_CHANGES) < 1024


@pytest.mark.parametrize("end", ["invalidate", "sleep"])
def test_what_releases_all_graphs_ends_the_rest(end: str) -> None:
    """Then new kinds are looked at again, as soon as graphs may be captured."""
    step = serve(max_signatures=8, capture_after=2)
    for number in range(100):
        call(step, 3, number)
    assert call(step, 3, -1) is Reason.SIGNATURE_CHANGES
    getattr(step, end)()
    assert call(step, 3, -2) is (Reason.ASLEEP if end == "sleep" else Reason.FIRST_SIGHTING)
    if end == "sleep":
        step.wake()
        assert call(step, 3, -2) is Reason.FIRST_SIGHTING
    assert call(step, 3, -2) is Reason.CAPTURED_NOW


EAGER_S, REPLAY_S, SPENT_S = 2e-3, 1e-3, 0.1
FREE = 8  # graphs that need not pay
# A kind of calls is captured at one call and compared at another: so many replays, or calls without a graph, pay that.
PRICE = round(2 * SPENT_S / (EAGER_S - REPLAY_S))


def _time(clock: Any, run: Any, values: Any) -> float:
    del clock, values
    return EAGER_S if isinstance(run, FlatCall) else REPLAY_S


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs take as long as above, and so does each capture and each comparison."""
    monkeypatch.setattr("graphdispatch.capture.gain._time", _time)
    readings = itertools.count()
    monkeypatch.setattr("graphdispatch.serve.ledger.perf_counter", lambda: next(readings) * SPENT_S)


def settled(**options: Any) -> Graphed[..., Any]:
    """A callable with as many kinds of calls as need not pay, each captured and compared, and a few replays."""
    step = serve(**{"max_signatures": 64, "capture_after": 2} | options)
    for columns in range(1, FREE + 1):
        found = [call(step, columns) for _ in range(4)]
        assert Reason.CAPTURED_NOW in found
        assert found[-1] is Reason.EXACT
    return step


@pytest.mark.usefixtures("clocks")
def test_a_further_kind_waits_until_its_own_calls_pay() -> None:
    """It is refused so long as its calls would have gained less than a graph costs; why is said with the figures."""
    step = settled()
    found = [call(step, 20) for _ in range(2 * PRICE)]
    assert found[0] is Reason.FIRST_SIGHTING
    assert found[1 : PRICE - 1] == [Reason.PAYS_LATER] * (PRICE - 2)
    assert Reason.CAPTURED_NOW in found[PRICE - 1 : PRICE + 2]
    assert found[-1] is Reason.EXACT
    call(step, 21)
    text = step.explain(torch.ones(ROWS, 21))
    assert f"a replay gains 1 ms, and a graph takes 200 ms, which {PRICE} calls would have" in text
    assert "name what varies in dynamic=" in text


@pytest.mark.usefixtures("clocks")
def test_graphs_that_have_paid_let_others_be_captured() -> None:
    """What all graphs gained together counts, also what one gained that is gone."""
    step = settled(max_cached_graphs=FREE)
    for _ in range(2 * FREE * PRICE):
        call(step, 1)
    for columns in (20, 21):
        assert [call(step, columns) for _ in range(2)] == [Reason.FIRST_SIGHTING, Reason.CAPTURED_NOW]
    step = settled()
    for _ in range(FREE * PRICE):
        call(step, 1)
    step.invalidate()
    assert [call(step, 20) for _ in range(2)] == [Reason.FIRST_SIGHTING, Reason.CAPTURED_NOW]


FULL = CUDAGraphMode.FULL


def call_wrapper(wrapper: CUDAGraphWrapper, rows: int) -> None:
    """One call of its own descriptor, compared with eager."""
    x = torch.randn(rows, 3)
    with torch.no_grad():
        got = wrapper(x, batch_descriptor=BatchDescriptor(rows), cudagraph_runtime_mode=FULL)
    assert torch.equal(got, x * 2)


def test_a_wrapper_remembers_so_many_descriptors() -> None:
    """Those without a graph make way; the graphs stay, and serve."""
    wrapper = CUDAGraphWrapper(twice, max_cached_graphs=4)
    server, routes = wrapper._server, wrapper._routes
    server.max_groups = routes._most = 8
    for rows in range(1, 30):
        call_wrapper(wrapper, rows)
    assert len(server.graphs.groups) <= 8
    assert len(routes) <= 8 + 1
    kept = wrapper.get_cached_descriptors()
    assert len(kept) == 4
    for _ in range(2):
        for descriptor in kept:
            call_wrapper(wrapper, descriptor.num_tokens)
    assert wrapper.get_stats().hits >= 4


def test_a_manager_remembers_so_many_lengths() -> None:
    """Many sequence lengths share one guard, one server and one set of static inputs."""
    manager = CUDAGraphManager(
        CUDAGraphConfig(capture_sizes=(4,), max_batch_size=4, options=CUDAGraphOptions(capture_after=1000))
    )
    x = torch.randn(4, 3)
    with torch.no_grad():
        manager.execute_or_capture(4, 1, twice, {"x": x})
        latest = manager.registry.latest()
        latest.server.max_groups = latest.routes._most = 16
        for seq_len in range(1, 60):
            manager.execute_or_capture(4, seq_len, twice, {"x": x})
    assert len(latest.server.graphs.groups) <= 16
    assert len(latest.routes) <= 16 + 1
    assert len({id(group.inputs) for group in latest.server.graphs.groups.values()}) == 1


def test_a_server_that_was_forgotten_captures_no_more() -> None:
    """A call that found its server just before ``sleep`` runs eagerly, and leaves nothing in the pool."""
    manager = CUDAGraphManager(CUDAGraphConfig(capture_sizes=(4,), max_batch_size=4, options=AT_ONCE))
    x = torch.randn(4, 3)
    with torch.no_grad():
        manager.execute_or_capture(4, 1, twice, {"x": x})
        latest = manager.registry.latest()
        route = next(iter(latest.routes.values()))
        manager.sleep()
        assert torch.equal(latest.server.serve(route, (), {"x": x}), x * 2)
    assert latest.server.decision.reason is Reason.ASLEEP
    assert (manager.registry.num_graphs, manager.registry.memory_bytes) == (0, 0)


def test_nothing_is_prewarmed_while_asleep() -> None:
    """``sleep`` says that weights are elsewhere, so that a capture would hold their old memory."""
    step = gd.graphed(twice, dynamic={"x": 0}, sizes=(4,))
    step.sleep()
    with pytest.raises(ConfigError, match=r"prewarm cannot capture now: .*sleep"):
        step.prewarm(torch.randn(2, 3))
    step.wake()
    assert step.prewarm(torch.randn(2, 3)).captured == {FULL: (4,)}
    wrapper = gd.AdaptiveCUDAGraphWrapper(twice)
    wrapper.sleep()
    with pytest.raises(ConfigError, match=r"prewarm cannot capture now: .*sleep"):
        wrapper.prewarm([4], lambda descriptor: torch.randn(descriptor.num_tokens, 3))
