"""Python state: what a call reads is compared, and what it writes is written once.

The cases are those of ``table.py``; rows of ``docs/footguns.md`` run through every front end.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import graphdispatch as gd
from graphdispatch.native.bound import GUARD

from ..helpers import assert_same, assert_served, check_calls, check_rows, native_answers
from .cases import Box, put_back
from .front_end import Open
from .table import KEPT, READS, WRITES
from .ways import WAYS


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with put_back():
        yield


def graphs_of(fn: Any, *, capture_after: int | None = None, **settings: Any) -> Any:
    """A callable with graphs of four rows; no collection of all memory at each capture."""
    options = gd.CUDAGraphOptions(gc_disable=False, capture_after=capture_after)
    return gd.graphed(fn, dynamic={"x": 0}, sizes=(4,), options=options, **settings)


def check(step: Any, calls: int) -> None:
    """Call it so often: each time it answers as eager does."""
    check_rows(step, *[4] * calls)


def served(fn: Any, **settings: Any) -> Any:
    """Such a callable after four calls."""
    step = graphs_of(fn, **settings)
    check(step, 4)
    return step


@pytest.fixture
def answers(pytestconfig: pytest.Config) -> Callable[[Any], set[bool]]:
    """Whether a guard holds: what Python says alone, and the core alone, in each way of skipping dicts."""
    has_native = GUARD is not None and not pytestconfig.pluginmanager.has_plugin("twins")

    def found(guard: Any) -> set[bool]:
        native, guard.native = guard.native, None
        said = {guard.holds()} | (native_answers(native) if has_native else set())
        guard.native = native
        return said

    return found


@pytest.mark.parametrize("name", READS)
def test_what_is_read_is_compared(name: str, answers: Callable[[Any], set[bool]]) -> None:
    """Graphs serve, the state changes, both guards notice, the answers are eager's from the next call on, and graphs
    serve again."""
    fn, change, _ = READS[name].make()
    step, x = served(fn, **READS[name].options), torch.randn(4, 3)
    assert_served(step, x)
    guard, before = step.entries[0].guard, step.unwrap()(x)
    assert answers(guard) == {True}
    change()
    with pytest.raises(AssertionError):  # eager notices
        assert_same(step.unwrap()(x), before)
    assert answers(guard) == {False}
    check(step, 4)
    if READS[name].serves:
        assert_served(step, x)


@pytest.mark.parametrize("name", KEPT)
def test_what_changes_nothing_ends_no_graph(name: str, answers: Callable[[Any], set[bool]]) -> None:
    """Writes in place, equal constants and what no code reads: the one graph serves on, with eager's answers. Both
    guards hold; an equal container has a successor of theirs, which is another."""
    fn, change, _ = KEPT[name].make()
    step = served(fn, **KEPT[name].options)
    assert step.stats.captures == 1, step.explain(torch.randn(4, 3))
    guard = step.entries[0].guard
    assert answers(guard) == {True}
    change()
    assert answers(guard) == {not name.endswith("in its place")}
    for _ in range(3):
        assert_served(step, torch.randn(4, 3))
    assert answers(step.entries[0].guard) == {True}
    assert step.stats.captures == 1


def left(name: str, wrap: Callable[[Any], Any], sizes: tuple[int, ...]) -> tuple[list[Any], Any, Any]:
    """The answers to batches of these sizes, the state after them, and what was called; each time from the start."""
    fn, _, tell = WRITES[name].make()
    step = wrap(fn)
    torch.manual_seed(1)
    answers = [step(torch.randn(rows, 3)) for rows in sizes]
    return answers, tell(), step


SIZES = (3, 4, 3, 4)


@pytest.mark.parametrize("name", WRITES)
def test_each_call_writes_once(name: str) -> None:
    """Answers and state are as eager calls leave them, and the calls say why no graph serves them."""
    with torch.inference_mode() if name.startswith("host:") else torch.no_grad():
        answers, state, step = left(name, graphs_of, SIZES)
        expected, eager_state, _ = left(name, lambda fn: fn, SIZES)
    assert_same(answers, expected)
    assert state == eager_state
    assert not step.stats.hits
    assert step.last_decision.reason is WRITES[name].reason, step.last_decision.explain()


@pytest.mark.parametrize("name", WRITES)
def test_a_capture_ahead_writes_nothing(name: str) -> None:
    """Its runs are undone, or refused before they change what nobody can put back."""
    fn, _, tell = WRITES[name].make()
    step = graphs_of(WAYS["module"](fn))
    step.prewarm(torch.randn(4, 3))
    assert not step.entries
    if not WRITES[name].is_shared:
        state = tell()
        assert state == WRITES[name].make().tell()


def broken(fn: Any) -> Any:
    """A callable with a break, after which something is left to do."""
    part = gd.eager_break(fn)
    return lambda x: part(x) * 1


@pytest.mark.parametrize("name", WRITES)
def test_what_only_a_run_with_padding_writes_is_put_back(name: str) -> None:
    """The caller's runs of three rows leave all as it was; those of four, for the graph's sake, leave nothing."""
    for options in ({}, {"mode": "PIECEWISE"})[: 1 + WRITES[name].in_breaks]:
        fn, _, tell = WRITES[name].make()
        padded = partial(lambda fn, x: fn(x) if len(x) == 4 else x * 7, fn)
        step = graphs_of(broken(padded) if options else lambda x, padded=padded: padded(x), capture_after=1, **options)
        for _ in range(2):
            x = torch.randn(3, 3)
            assert_same(step(x), x * 7, step.explain(x))
        assert not step.stats.hits
        if not WRITES[name].is_shared:
            state = tell()
            assert state == WRITES[name].make().tell()


@pytest.mark.parametrize("name", [name for name, case in WRITES.items() if case.in_breaks])
def test_a_break_writes_once(name: str) -> None:
    """What runs in a break runs in each replay, and no capture runs it more often."""
    answers, state, _ = left(name, lambda fn: graphs_of(broken(fn), mode="PIECEWISE"), SIZES)
    expected, eager_state, _ = left(name, broken, SIZES)
    assert_same(answers, expected)
    assert state == eager_state


def rows_in(table: dict[str, Any]) -> list[str]:
    """The cases that run through every front end."""
    return [name for name, case in table.items() if case.row]


@pytest.mark.parametrize("name", rows_in(READS | KEPT))
def test_every_front_end_compares_what_is_read(name: str, settled: Open) -> None:
    """A graph serves the call after the change only if that changes nothing, and the answers are eager's."""
    fn, change, _ = (READS | KEPT)[name].make()
    step = settled(fn)
    change()
    step.check_calls(4)
    assert step.was_hit() is (name in KEPT)
    step.check_calls(4)


@pytest.mark.parametrize("name", rows_in(WRITES))
def test_every_front_end_writes_once(name: str, tried: Open) -> None:
    """No graph serves it; answer and state are eager's after as many calls, failed captures included."""
    x = torch.randn(4, 3)
    fn, _, tell = WRITES[name].make()
    step = tried(fn)
    answer, state, reason = step(x), tell(), step.reason()
    step.check(WRITES[name].reason)
    eager, _, eager_tell = WRITES[name].make()
    expected = [eager(x) for _ in range(step.calls)][-1]
    if not WRITES[name].is_shared:
        assert_same(answer, expected, f"{step.name}: {reason}")
        assert state == eager_tell()


EQUALS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [2.0], lambda k: k.append(3.0)),
    "dict of lists": (lambda: {"a": [2.0]}, lambda k: k["a"].append(3.0)),
    "tuple": (lambda: ([2.0], 1.0), lambda k: k[0].append(3.0)),
    "dict": (lambda: {"a": 2.0}, lambda k: k.update(b=3.0)),
}
"""Containers, and what changes one."""
HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "nothing": (lambda one: None, lambda held: 1.0),
    "tuple": (lambda one: (one,), lambda held: held[0]),
    "nest": (lambda one: (1, frozenset({(one.__len__,)})), lambda held: next(iter(held[1]))[0]()),
    "partial": (lambda one: partial(len, one), lambda held: held()),
    "method": (lambda one: MethodType(lambda self: self, one), lambda held: held()),
    "builtin": (lambda one: one.__len__, lambda held: held()),
}
"""What else may hold such a container, where nothing can take its place, and how code reads it there."""


@pytest.mark.parametrize(("name", "holder"), [*product(EQUALS, ["nothing"]), *product(["dict"], [*HOLDERS][1:])])
def test_what_is_in_the_place_of_its_equal_is_watched(name: str, holder: str) -> None:
    """A write to it ends the graph as a write to the first would have. A write to the first one counts only where
    something that code reads still holds it; then the graph ends, since it may be read in both places."""
    make, write = EQUALS[name]
    hold, read = HOLDERS[holder]
    held, first = SimpleNamespace(k=make()), make()
    held.k, held.other = first, hold(first)
    step = served(lambda x: x * float(len(f"{held.k}{read(held.other)}")))
    for _ in range(3):
        held.k = make()
        check(step, 1)
        assert step.last_decision.reason.is_graph is (holder == "nothing")
        if holder != "nothing":
            held.k = first
            assert_served(step, torch.randn(4, 3))
    held.k = make()
    write(first)
    check(step, 4)
    assert_served(step, torch.randn(4, 3))
    captures = step.stats.captures
    assert captures == (1 if holder == "nothing" else 3)
    write(held.k)
    check(step, 1)
    assert not step.last_decision.reason.is_graph
    check(step, 4)
    assert step.stats.captures == captures + 1


@pytest.mark.parametrize("kind", ["_parameters", "_buffers", "_modules"])
def test_members_in_the_place_of_their_equal_are_watched(kind: str) -> None:
    """The table of a module's members gives way to an equal one, and a member of that to another."""
    net = torch.nn.Module()
    net.scale, net.offset = torch.nn.Parameter(torch.ones(3), requires_grad=False), torch.nn.Buffer(torch.ones(3))
    net.layer = torch.nn.Linear(3, 3).requires_grad_(False)
    step = served(lambda x: net.layer(x) * net.scale + net.offset)
    vars(net)[kind] = dict(vars(net)[kind])
    for _ in range(3):
        assert_served(step, torch.randn(4, 3))
    ((name, member),) = vars(net)[kind].items()
    other = torch.nn.Linear(3, 3).requires_grad_(False) if kind == "_modules" else type(member)(member.data * 5)
    vars(net)[kind][name] = other
    check(step, 2)


@pytest.mark.parametrize("make", [list, set, lambda: {"a": [1]}, lambda: ([], torch.device("cpu"))])
def test_a_call_that_rebinds_to_an_equal_container_is_served(make: Callable[[], Any]) -> None:
    """As hooks do that begin each call with an empty list; what the call adds is a change, and what it makes of the
    batch is that of the latest call."""
    held = SimpleNamespace(k=make(), rows=[4], log=[])

    def fn(x: torch.Tensor) -> torch.Tensor:
        held.k = make()
        return x * 2

    def logged(x: torch.Tensor) -> torch.Tensor:
        held.log = [*held.log, 1]
        return x * 2

    def counted(x: torch.Tensor) -> torch.Tensor:
        held.rows = [len(x)]
        return x * 2

    step = served(fn)
    assert_served(step, torch.randn(4, 3))
    other = graphs_of(logged)
    check(other, 4)
    assert other.last_decision.reason is gd.Reason.STATE_REBOUND
    assert len(held.log) == 8  # each call is made by ``check`` once more
    other = graphs_of(counted)
    for rows in (4, 4, 4, 4, 3, 4, 3, 3, 4, 4):
        other(torch.randn(rows, 3))
        assert held.rows == [rows]


@pytest.mark.parametrize("new", ["one", "other", "same"])
@pytest.mark.parametrize("written", ["a", "b"])
def test_what_was_in_two_places_is_watched_in_both(new: str, written: str) -> None:
    """One list under two names: where both get the same equal one it is the same state. Where one gets it, or each gets
    another, it is another: code may ask whether they are one."""
    held = SimpleNamespace(a=[2.0])
    held.b = held.a
    step = served(lambda x: x * len(held.a) + len(held.b))
    held.a = [2.0]
    held.b = {"one": held.b, "other": [2.0], "same": held.a}[new]
    if new != "same":
        check(step, 4)
    assert_served(step, torch.randn(4, 3))
    getattr(held, written).append(3.0)
    check(step, 4)


def test_what_ended_a_graph_is_named() -> None:
    """By ``explain`` and in the counters: the attribute, and what it held and holds."""
    held = SimpleNamespace(active=["a"], scale=2.0, net=torch.nn.Linear(3, 3).requires_grad_(False))
    step = served(lambda x: held.net(x) * len(held.active) * held.scale)
    changes: dict[str, Callable[[], None]] = {
        "active: ['a'] -> ['a', 'b']": lambda: setattr(held, "active", ["a", "b"]),
        "scale: 2.0 -> 3.0": lambda: setattr(held, "scale", 3.0),
    }
    for what, change in changes.items():
        change()
        assert f"its graphs are of another state of the callable ({what})" in step.explain(torch.randn(4, 3))
        check(step, 4)
    held.net = torch.nn.ReLU()
    check(step, 4)
    what = "net: a torch.nn.modules.linear.Linear -> a torch.nn.modules.activation.ReLU"
    assert step.stats.state_changes == dict.fromkeys([*changes, what], 1)
    assert set(step.stats.eviction_reasons) == {"stale"}


def test_another_change_beside_an_equal_container_is_seen() -> None:
    """Of each kind that a guard compares: a new attribute that hides one of a class, an array, a weight, a number."""

    class Settings:
        scale = 2.0

        def __init__(self) -> None:
            self.k, self.numbers, self.factor, self.weight = [1.0], np.ones(2), 3.0, torch.ones(3)

    changes: list[Callable[[Settings], object]] = [
        lambda held: setattr(held, "scale", 5.0),
        lambda held: held.numbers.__setitem__(0, 5.0),
        lambda held: setattr(held, "factor", 5.0),
        lambda held: setattr(held, "weight", torch.full((3,), 5.0)),
        lambda held: setattr(Settings, "scale", 7.0),
    ]
    held = Settings()
    step = graphs_of(lambda x: x * held.k[0] * held.scale * float(held.numbers.sum()) * held.factor * held.weight)
    for change in changes:
        check(step, 4)
        held.k = [1.0]
        change(held)
        check(step, 2)


def test_a_first_import_is_no_change_of_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a module assigns while the captured run imports it counts as having been there."""
    source = "number = 0\n\n\ndef count():\n    global number\n    number += 1\n\n\ncount()\n"
    (tmp_path / "imported_at_first.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    def fn(x: torch.Tensor) -> torch.Tensor:
        import imported_at_first

        return x * imported_at_first.number

    step = graphs_of(fn, capture_after=1)
    check(step, 1)
    assert step.stats.captures == 1, step.last_decision


def test_an_argument_that_the_host_writes_is_written_once() -> None:
    """So is an argument of the caller's."""
    step = graphs_of(lambda x: (x.numpy().__iadd__(1), x * 2)[1])
    for rows in (4, 4, 3, 4):
        x = torch.zeros(rows, 3)
        assert_same((step(x), x), (torch.full((rows, 3), 2.0), torch.ones(rows, 3)))


def says_capturing() -> bool:
    """Whether torch says that somebody captures; a torch without CUDA raises while nobody does."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        return False


def test_code_that_reads_only_while_nobody_captures_is_served() -> None:
    """It reads an argument and a buffer with NumPy in eager runs; neither counts as written."""
    table = torch.ones(3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        if not says_capturing():
            assert np.asarray(x).size == x.numel()
            assert table.numpy().sum() == 3
            assert x.data_ptr() != table.untyped_storage().data_ptr()
        return x * table

    before = vars(torch.Tensor).get("numpy")
    step = served(fn)
    assert_served(step, torch.randn(4, 3))
    assert vars(torch.Tensor).get("numpy") is before


def test_too_much_to_save_is_said() -> None:
    """What cannot be saved cannot be undone: nothing is run again, and the reason names the option."""
    state = torch.zeros(2)

    def fn(x: torch.Tensor) -> torch.Tensor:
        if not says_capturing():
            state.numpy()[:] += 1
        return x * 2

    step = gd.graphed(fn, dynamic={"x": 0}, sizes=[4], options=gd.CUDAGraphOptions(state_limit_bytes=7))
    for _ in range(4):
        step(torch.randn(4, 3))
    assert state.tolist() == [4.0, 4.0]
    assert step.stats.reasons[gd.Reason.STATE_TOO_LARGE]
    assert "state_limit_bytes" in step.explain(torch.randn(4, 3))


def test_the_default_generator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callable that draws nothing never has it set, so that no other thread draws the same numbers twice."""
    weight, states = torch.ones(3), []
    step = graphs_of(lambda x: (x * weight).relu())
    for owner in (torch, torch.random):
        monkeypatch.setattr(owner, "set_rng_state", states.append)
    before = torch.get_rng_state()
    check_calls(step, *(torch.ones(rows, 3) for rows in (1, 4, 2, 4, 3)))
    step.prewarm(torch.ones(4, 3), sizes=(4,))
    assert step.stats.captures
    assert not states
    assert torch.equal(torch.get_rng_state(), before)


def test_a_second_run_that_fails_leaves_nothing() -> None:
    """The first of two runs in a prewarm changes a counter, and the second one fails for it."""
    model = Box(count=0)

    def fn(x: torch.Tensor) -> torch.Tensor:
        model.count += 1
        torch._assert_async(torch.tensor(model.count < 2))
        return x * 2

    graphs_of(fn).prewarm(torch.randn(4, 3))
    assert model.count == 0


def test_what_cannot_be_put_back_is_an_error() -> None:
    """An array that a prewarm gave other memory has another length for good, and nobody learns of it elsewhere."""
    held = np.zeros(4)
    step = graphs_of(lambda x: (held.resize(8, refcheck=False), x * 2)[1])
    with pytest.raises(gd.CaptureError, match="could not be put back"):
        step.prewarm(torch.randn(4, 3))


def test_an_attribute_of_an_argument_that_a_break_reads() -> None:
    """A break gets the graph's own copy of the argument, without its attributes; so such a call runs eagerly."""
    step = graphs_of(gd.eager_break(lambda x: x * getattr(x, "tag", 1.0)), mode="PIECEWISE", capture_after=1)
    for tag in (None, None, None, 0.5, None, 0.25):
        x = torch.ones(4, 3)
        if tag is not None:
            x.tag = tag
        check_calls(step, x)
