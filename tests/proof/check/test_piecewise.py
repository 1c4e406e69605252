"""PIECEWISE captures: graphs and eager parts in turn give eager's answer, or a clear error, and nothing in between."""

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphMode, Graphed, Reason, eager_break, graphed, remove_eager_break
from graphdispatch.backends import get_backend
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper
from graphdispatch.errors import ReplayError
from graphdispatch.proof.breaks import ACTIVE

from ...helpers import AT_ONCE, Spy, check_calls, in_threads, make

PIECEWISE, FULL = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
ONE = BatchDescriptor(1)


def pieces(fn: Callable[..., Any], *, ahead: bool = True, **options: Any) -> Graphed[..., Any]:
    """``fn`` of one tensor ``x`` whose rows are dimension 0, served in pieces and captured ahead, or at once."""
    served = make(fn, **{"sizes": (4,), "mode": "PIECEWISE"} | options)
    if ahead:
        served.prewarm(x=torch.linspace(-1, 1, 12).view(4, 3))
    return served


def graph_of(served: Graphed[..., Any]) -> Any:
    """The graph of the only entry."""
    (entry,) = served.entries
    assert entry.mode is PIECEWISE
    return entry.graph


@eager_break
def host_scale(x: Tensor) -> Tensor:
    """Reads a value back, which no graph can; one of the first row, since padding rows shall not count."""
    return x * (1.0 if float(x[0, 0]) > 0 else 3.0)


# What a capture consists of.


def test_graphs_and_breaks_alternate() -> None:
    """Two breaks make three graphs around them, in order; ``explain`` says how many, and where it breaks."""
    served = pieces(lambda x: host_scale((y := host_scale(x + 1)) * 2) - y)
    graph = graph_of(served)
    assert (len(graph.graphs), len(graph.breaks)) == (3, 2)
    assert "3 graphs, 2 breaks" in repr(graph)
    assert "; graphs: 3, breaks: 2 x host_scale at test_piecewise.py:" in served.explain(x=torch.randn(4, 3))
    assert len(graph_of(pieces(lambda x: x * 2 + 1)).graphs) == 1


def test_what_a_graph_in_pieces_holds() -> None:
    """What one part makes and a later one reads keeps its memory: here what breaks give, ``y``, and twice that. The
    bytes are those of the graphs, of what breaks made, and of the arguments that they are given, which are compared."""
    graph = graph_of(pieces(lambda x: host_scale((y := host_scale(x) * 2) * 2) - y))
    assert len(graph._held) == 4
    assert graph.nbytes == sum(part.nbytes for part in graph.graphs) + 3 * 4 * 12


# What a break returns.


def test_a_replay_retains_no_fresh_tensor() -> None:
    """What a break makes at a replay is let go as soon as it was copied."""
    made = Spy()

    @eager_break
    def note(x: Tensor) -> Tensor:
        result = x * 2
        made.append(weakref.ref(result))
        return result

    served = pieces(lambda x: note(x + 1) + 1)
    made.clear()
    for x in torch.randn(3, 4, 3):
        assert torch.equal(served(x=x), served.unwrap()(x=x))
        assert served.last_decision.reason is Reason.EXACT
    gc.collect()
    assert [ref() for ref in made] == [None] * 6


# Values that live across breaks.


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("second", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_graph_may_be_replayed_in_another_mode(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    """Breaks run in the mode of their capture, so that tensors across them can be written in place."""
    weight = nn.Linear(3, 3)
    in_place = eager_break(lambda x: (x.mul_(2), weight(x)))

    def model(x: Tensor) -> Tensor:
        h, fresh = in_place(x + 1)
        return fresh.add_(1) + h  # type: ignore[no-any-return]

    with first():
        (entry,) = pieces(lambda x: model(x)).entries
        x = torch.randn(4, 3)
        expected = model(x)
    with second():
        got = entry.replay({"x": x})
    assert torch.equal(got, expected)
    assert not got.requires_grad


# What a break must not do.


CHANGES = {
    "shape": (lambda x: x * 2, lambda x: x[:2] * 2, "a break must keep its shapes"),
    "dtype": (lambda x: x * 2, lambda x: (x * 2).double(), "a break must keep its shapes"),
    "structure": (lambda x: (x * 2,), lambda x: [x * 2], "another structure"),
    "value": (lambda x: (x * 2, 1), lambda x: (x * 2, 2), r"returned 2 where it returned 1"),
    "tensor to value": (lambda x: (x * 2, x + 1), lambda x: (x * 2, 2), "share memory otherwise"),
    "fresh to argument": (lambda x: x * 2, lambda x: x, "return a copy of it"),
    "argument to fresh": (lambda x: x, lambda x: x * 2, "return a copy of it"),
    "another view": (lambda x: x[:2], lambda x: x[2:], "return a copy of it"),
    "sharing": (lambda x: (x * 2, x * 3), lambda x: ((y := x * 2), y), "share memory otherwise"),
}


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_result_is_no_answer(change: str, writes: bool) -> None:
    """It is an error, since nobody knows what the break has done by then; so is a write to memory that the caller sees,
    which a second run would write twice."""
    before, after, message = CHANGES[change]
    steps = torch.zeros(1)
    flip = eager_break(lambda x: before(x) if float(x.sum()) > 0 else after(x))

    def model(x: Tensor) -> Tensor:
        if writes:
            steps.add_(1)
        got = flip(x * 1)
        return x + steps + (got[0] if isinstance(got, (tuple, list)) else got).sum()

    served = pieces(model, ahead=False)
    for scale in (1.0, 2.0, 3.0):
        served(x=torch.full((4, 3), scale))
    assert served.last_decision.reason is Reason.EXACT
    with pytest.raises(ReplayError, match=message) as caught:
        served(x=-torch.ones(4, 3))
    assert caught.value.had_effects
    assert float(steps) == 4.0 * writes
    # The next call compares the graph with eager once more; it fits again, and serves.
    for count, reason in ((5.0, Reason.VERIFIED_NOW), (6.0, Reason.EXACT)):
        served(x=torch.ones(4, 3))
        assert float(steps) == count * writes
        assert served.last_decision.reason is reason


UNNOTED: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda state: setattr(state, "limit", state.limit + 1),
    "method": lambda state: state.grow(),
    "list": lambda state: state.seen.append(1),
    "numpy": lambda state: state.table.numpy().__iadd__(1),
    "data": lambda state: state.table.data.add_(1),
    "draw": lambda state: torch.rand((), generator=state.generator),
}


class Effects:
    """What a break may change."""

    def __init__(self) -> None:
        self.limit, self.seen, self.table = 0, list[int](), torch.zeros(1)
        self.generator = torch.Generator().manual_seed(0)

    def grow(self) -> None:
        """Count."""
        self.limit += 1

    def state(self) -> tuple[Any, ...]:
        """All of it."""
        return self.limit, len(self.seen), float(self.table), self.generator.get_state().tolist()


@pytest.mark.parametrize("read_by", ["breaks", "graphs"])
@pytest.mark.parametrize("effect", UNNOTED)
def test_an_effect_of_a_break_that_no_capture_saw_happens_once(effect: str, read_by: str) -> None:
    """For some values a break has an effect, and the graph cannot go on: another break returns another value, or the
    graphs read what has changed. The call is an error, since a second run would have the effect once more."""
    (state, plain), change = (Effects(), Effects()), UNNOTED[effect]

    def model_of(state: Effects) -> Callable[[Tensor], Tensor]:
        note = eager_break(lambda x: (change(state) if float(x.sum()) < 0 else None, x * 1)[1])
        sign = eager_break(lambda x: (x * 2, 1 if float(x.sum()) > 0 or read_by == "graphs" else 2))

        def model(x: Tensor) -> Tensor:
            x, factor = sign(note(x * 1))
            return x * factor + (state.limit if read_by == "graphs" else 0)

        return model

    served, eager = pieces(model_of(state), ahead=False), model_of(plain)
    for scale in (1.0, 2.0, 3.0):
        served(x=torch.full((4, 3), scale))
    assert served.last_decision.reason is Reason.EXACT
    for x in (-torch.ones(4, 3), torch.ones(4, 3)):
        expected = eager(x)
        with suppress(ReplayError):
            assert torch.equal(served(x=x), expected)
        assert state.state() == plain.state()


def test_a_replay_whose_breaks_are_operators_alone_runs_again() -> None:
    """Their schemas say that they write nothing."""
    eager_break("aten::nonzero")
    try:
        served = pieces(lambda x: torch.nonzero(x).shape[0] * x, ahead=False)
        for scale in (1.0, 2.0, 3.0):
            served(x=torch.full((4, 3), scale))
        assert served.last_decision.reason is Reason.EXACT
        x = torch.zeros(4, 3).fill_diagonal_(2)
        assert torch.equal(served(x=x), 3 * x)
        assert served.last_decision.reason is Reason.REPLAY_FAILED
    finally:
        remove_eager_break("aten::nonzero")


KEPT_BY_BREAK = Spy()
HELD = {
    "itself": lambda state: state,
    "view": lambda state: state[:2],
    "alias": lambda state: state.detach(),
    "kept": lambda state: (KEPT_BY_BREAK.__setitem__(slice(None), [state * 1]), KEPT_BY_BREAK[0])[1],
    "kept by a view": lambda state: (KEPT_BY_BREAK.__setitem__(slice(None), [(new := state * 1)[:1]]), new)[1],
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", HELD)
def test_what_somebody_holds_is_not_written_in_the_place_of_a_new_tensor(
    how: str, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    """A break that made its result at the capture, and which a later part writes to, returns state of its own, or a
    tensor that it goes on holding: eager writes to that, and no graph can."""
    with mode():
        state, held = torch.ones(3), HELD[how]
        pick = eager_break(lambda x: x.sum(0)[: 3 - (how == "view")] if float(x[0, 0]) > 0 else held(state))
        served = pieces(lambda x: pick(x).mul_(2).sum() + x, ahead=False)
        for scale in (1.0, 2.0, 3.0):
            served(x=torch.full((4, 3), scale))
        assert served.last_decision.reason is Reason.EXACT
        with pytest.raises(ReplayError, match="held elsewhere"):
            served(x=-torch.ones(4, 3))
        assert state.tolist() == [1.0, 1.0, 1.0]


# Exceptions.


class Fuse:
    """A break that raises when it shall."""

    blown = only_in_capture = False

    @eager_break
    def __call__(self, x: Tensor) -> Tensor:
        """Twice the argument."""
        if self.blown and (ACTIVE.get() is not None or not self.only_in_capture):
            raise ValueError("the fuse is blown")
        return x * 2


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("raises_in", ["break", "graph", "graph with state"])
def test_what_a_call_wrote_to_its_argument_before_it_raised_stays(raises_in: str, rows: int) -> None:
    """As eagerly: the argument was written before the error, so the caller finds it written, padded or not."""
    fuse, table, steps = Fuse(), torch.randn(5, 3), torch.zeros(1)

    def with_break(x: Tensor, ids: Tensor) -> Tensor:
        return fuse(x.mul_(0.5) * 1) + table[ids]

    def with_state(x: Tensor, ids: Tensor) -> Tensor:
        steps.add_(1)
        return x.mul_(0.5) * 1 + table[ids]

    model, mode = (with_state, "FULL") if raises_in == "graph with state" else (with_break, "PIECEWISE")
    served = graphed(model, dynamic={"x": 0, "ids": 0}, sizes=(4,), mode=mode, options=AT_ONCE)
    for number in range(4):
        served(torch.randn(rows, 3), torch.full((rows,), number))
    assert served.last_decision.reason in (Reason.EXACT, Reason.PADDED)
    x, ids = torch.randn(rows, 3), torch.full((rows,), 1 if raises_in == "break" else 5)
    halved, fuse.blown = x * 0.5, raises_in == "break"
    with pytest.raises(ValueError if raises_in == "break" else IndexError):
        served(x, ids)
    assert torch.equal(x, halved)
    fuse.blown = False
    x, ids = torch.randn(rows, 3), torch.arange(rows)
    assert torch.equal(served(x.clone(), ids), model(x, ids))


KEPT, BLOWN = Spy(), Fuse()  # without the spy the write itself is refused
BLOWN.blown = BLOWN.only_in_capture = True


@eager_break
def keep(x: Tensor) -> None:
    """Keeps a tensor, and does not return it."""
    KEPT[:] = [x * 2]


def reads_what_was_kept(x: Tensor) -> Tensor:
    """A later part reads it, which would be stale."""
    keep(x + 1)
    return x + KEPT[0]  # type: ignore[no-any-return]


def gives_what_was_kept(x: Tensor) -> Tensor:
    """Another break reads it."""
    keep(x + 1)
    return x + host_scale(KEPT[0])


def gives_an_iterator(x: Tensor) -> Tensor:
    """Nobody can compare it, and each replay would give the break the same one."""
    return x + eager_break(lambda parts: next(parts) * 2)(iter([x * 2, x * 3]))


def catches(x: Tensor) -> Tensor:
    """What the model does instead was not recorded."""
    try:
        return BLOWN(x + 1) + 1
    except ValueError:
        return (x + 1) * 2 + 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (reads_what_was_kept, "return it from the break"),
        (gives_what_was_kept, "return it from the break"),
        (gives_an_iterator, "such as iterators; make them in the break"),
        (lambda x: host_scale(x) + x.sum().item(), "test_piecewise.py"),
        (catches, "raised and the callable went on"),
    ],
    ids=[
        "a tensor that a break keeps",
        "given to a break",
        "an iterator",
        "an unsafe operator between breaks",
        "a break's exception that is caught",
    ],
)
def test_what_no_graph_in_pieces_can_hold_is_refused(model: Callable[[Tensor], Tensor], message: str) -> None:
    """Marks do not allow the parts around them more than a FULL capture does, and the detail says what is at fault."""
    served = pieces(model, ahead=False)
    check_calls(served, torch.randn(4, 3))
    assert served.last_decision.reason in (Reason.CAPTURE_UNSAFE, Reason.STATE_UNSEEN)
    assert message in served.last_decision.detail
    assert not get_backend("cpu").is_capturing()


def test_an_inner_call_waits_for_no_one() -> None:
    """A break runs with the pool's lock held, so that its calls must not want the lock under which graphs are made:
    whoever has that one may be waiting for the pool."""

    @eager_break
    def part(h: Tensor) -> Tensor:
        return h + served(x=h[:1]) if len(h) > 1 else h

    served = graphed(lambda x: part(x * 2) + x, dynamic={"x": 0}, sizes=(1, 4), mode="PIECEWISE", options=AT_ONCE)
    served.prewarm(x=torch.linspace(-1, 1, 12).view(4, 3))
    x = torch.randn(4, 3)
    with served._graphs.lock:
        (result,) = in_threads(lambda: served(x=x))
    assert torch.equal(result, x * 2 + (x[:1] * 2 * 2 + x[:1] * 2) + x)


def nested_wrappers(pool_is_shared: bool) -> tuple[CUDAGraphWrapper, CUDAGraphWrapper]:
    """A PIECEWISE wrapper, and the FULL one that its break calls."""
    backend = get_backend("cpu")
    pools = [backend.make_pool()] * 2 if pool_is_shared else [backend.make_pool(), backend.make_pool()]
    inner = CUDAGraphWrapper(lambda x: (x * 3).sin() + x, FULL, backend=backend, pool=pools[0])

    @eager_break
    def part(x: Tensor) -> Tensor:
        return inner(x, batch_descriptor=ONE, cudagraph_runtime_mode=FULL) * 1  # type: ignore[no-any-return]

    outer = CUDAGraphWrapper(lambda x: part(x + 1) * (x - 1), PIECEWISE, backend=backend, pool=pools[1])
    for _ in range(3):
        x = torch.randn(4, 3)
        inner(x, batch_descriptor=ONE, cudagraph_runtime_mode=FULL)
        outer(x, batch_descriptor=ONE, cudagraph_runtime_mode=PIECEWISE)
    return outer, inner


@pytest.mark.parametrize("pool_is_shared", [False, True])
def test_a_break_may_call_another_graph(pool_is_shared: bool) -> None:
    """It is replayed where it has memory of its own, and runs eagerly where it shares the outer one's."""
    outer, inner = nested_wrappers(pool_is_shared)
    figures, outer_figures = inner.get_stats(), outer.get_stats()
    hits, outer_hits = figures.hits, outer_figures.hits
    for _ in range(3):
        x = torch.randn(4, 3)
        h = x + 1
        got = outer(x, batch_descriptor=ONE, cudagraph_runtime_mode=PIECEWISE)
        assert torch.equal(got, ((h * 3).sin() + h) * (x - 1))
    assert figures.hits == hits + (0 if pool_is_shared else 3)
    assert (figures.reasons[Reason.INSIDE_REPLAY] > 0) is pool_is_shared
    assert outer_figures.hits == outer_hits + 3
