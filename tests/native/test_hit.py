"""A hit in the core answers, counts and fails as one in Python, and copies bytes only where that is the same."""

import gc
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphdispatch import Graphed, Reason, ReplayError, graphed
from graphdispatch.backends.tracing import compiler_at_work
from graphdispatch.engines import EntryState
from graphdispatch.native.bound import CORE
from graphdispatch.runtime.replay import ReplayPlan
from graphdispatch.runtime.server import Server

from ..helpers import AT_ONCE, check_calls, check_rows, frames_of, in_threads, serve_in_python, with_options
from ..runtime.test_inputs import RULES

pytestmark = pytest.mark.skipif(CORE is None, reason="the native core is not compiled, or turned off")
ROWS = 4


@pytest.fixture(params=["core", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Hits in the core, and in Python."""
    if request.param == "python":
        serve_in_python(monkeypatch)
    return str(request.param)


def settled(fn: Callable[..., Any], *example: Any, dynamic: dict[str, int] | None = None, **options: Any) -> Any:
    """``fn`` served by graphs of four rows, with a verified graph of calls like the example."""
    step = graphed(fn, dynamic=dynamic or {"x": 0}, sizes=(ROWS,), **with_options(options, capture_after=1))
    for shift in range(4):
        step(*(value + shift if isinstance(value, Tensor) and not value.is_complex() else value for value in example))
    return step


def served(step: Graphed[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, bool]:
    """The answer of a call, and whether it was a hit."""
    hits = step.stats.hits
    answer = step(*args, **kwargs)
    return answer, step.stats.hits == hits + 1


VIEWS: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "plain": (lambda: torch.randn(ROWS, 6), True),
    "a lazy negative": (lambda: torch._neg_view(torch.randn(ROWS, 6)), False),
    "a lazy conjugate": (lambda: torch.randn(ROWS, 6, dtype=torch.complex64).conj(), False),
    "an imaginary part": (lambda: torch.randn(ROWS, 6, dtype=torch.complex64).conj().imag.contiguous(), True),
    "a parameter, which is another kind of call": (lambda: torch.nn.Parameter(torch.randn(ROWS, 6)), False),
    "a view": (lambda: torch.randn(2 * ROWS, 6)[2 : ROWS + 2], True),
    "made in inference mode": (lambda: torch.inference_mode()(lambda: torch.randn(ROWS, 6))(), True),
    "shared memory": (lambda: torch.randn(ROWS, 6).share_memory_(), True),
}


@pytest.mark.parametrize("name", VIEWS)
def test_values_are_copied_as_torch_copies_them(way: str, name: str) -> None:
    """Whatever a tensor's memory means, the answer is eager's; what is plain is a hit."""
    make, is_plain = VIEWS[name]
    x = make()
    step = settled(lambda x: x * 3, torch.randn(ROWS, 6, dtype=x.dtype))
    answer, is_hit = served(step, x)
    assert torch.equal(answer, x * 3)
    assert is_hit or not is_plain


@pytest.mark.parametrize("rule", RULES)
def test_padding_follows_its_rule(way: str, rule: str) -> None:
    """After larger and smaller batches in any order the rows behind the batch hold what the rule says."""
    pad, model = RULES[rule]
    step = graphed(lambda x: x * 2, dynamic={"x": 0}, sizes=(ROWS,), pad={"x": pad}, options=AT_ONCE)
    check_rows(step, *(1, 2, 3, 4, 3, 2, 1, 4, 1, 2, 3), width=3)
    for rows in (4, 1, 3, 2, 2, 4, 1):
        x = torch.randn(rows, 3)
        answer, is_hit = served(step, x)
        assert is_hit
        assert torch.equal(answer, x * 2)
        held = step.entries[0].inputs.views(ROWS)[0][rows:]
        expected = model(x, ROWS - rows)
        assert expected is None or torch.equal(held, expected)


def test_the_static_input_itself_can_be_given(way: str) -> None:
    """A tensor that is the graph's own input is copied onto itself."""
    step = settled(lambda x: x + 1, torch.randn(ROWS, 3))
    own = step.entries[0].inputs.views(ROWS)[0]
    own.copy_(torch.arange(ROWS * 3.0).view(ROWS, 3))
    expected = own + 1
    assert torch.equal(step(own), expected)
    assert torch.equal(step(own.flip(0)), expected.flip(0))


def test_a_replay_that_fails_is_as_in_python(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call runs eagerly, gradients and the lock are as before, and graphs serve again."""
    step = settled(lambda x: x + 1, torch.randn(ROWS, 3))
    entry, x = step.entries[0], torch.randn(ROWS, 3)
    with torch.enable_grad():
        with monkeypatch.context() as patch:
            patch.setattr(entry.graph, "replay", lambda: 1 / 0)
            answer, is_hit = served(step, x)
        assert not is_hit
        assert torch.equal(answer, x + 1)
        assert torch.is_grad_enabled()
    assert not entry.pool.lock._is_owned()
    check_rows(step, *[ROWS] * 40)
    assert served(step, x)[1]


def test_an_error_keeps_its_cause(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay's error comes with the one behind it, and with the place where that was raised."""
    step = settled(lambda x: x + 1, torch.randn(ROWS, 3))
    entry = step.entries[0]

    def broken() -> None:
        raise ArithmeticError("here")

    monkeypatch.setattr(entry.graph, "replay", broken)
    with pytest.raises(ReplayError) as caught:
        entry.plan(ROWS).run([torch.randn(ROWS, 3)], step.stats)
    cause = caught.value.__cause__
    assert isinstance(cause, ArithmeticError)
    assert "broken" in {frame.name for frame in traceback.extract_tb(cause.__traceback__)}


def test_an_evicted_entry_is_never_replayed(way: str) -> None:
    """A hit that was prepared before its entry was released is refused, and copies nothing."""
    step = settled(lambda x: x + 1, torch.randn(ROWS, 3))
    entry = step.entries[0]
    plan, batch = entry.plan(ROWS), torch.randn(ROWS, 3)
    entry.release()
    with pytest.raises(ReplayError, match="evicted"):
        plan.run([batch], step.stats)
    assert not torch.equal(entry.inputs.views(ROWS)[0], batch)


def test_outputs_and_front_ends_are_collected() -> None:
    """Neither an argument nor the callable is held after its last reference, nor an output without its graph."""
    layer = torch.nn.Linear(3, 3).eval()
    step = settled(layer, torch.randn(ROWS, 3), dynamic={"input": 0})
    out = weakref.ref(step(torch.randn(ROWS, 3)))
    x = torch.randn(ROWS, 3)
    step(x)
    argument = weakref.ref(x)
    del x
    assert argument() is None
    front_end, entry, module = weakref.ref(step), weakref.ref(step.entries[0]), weakref.ref(layer)
    del step, layer
    gc.collect()
    assert (front_end(), entry(), module(), out()) == (None, None, None, None)


def test_wrong_inputs_to_the_core_are_refused() -> None:
    """It raises where Python would; it never reads what is not there."""
    start, spans = (1, False, 0, None), ((0, 0, -1),)

    def signature(tensor: Any) -> Any:
        return CORE.Signature(*start, (tensor,), (), (), 0)

    keywords: Any = {1: torch.ones(2)}
    wrong: list[tuple[Any, str | None, Callable[[], Any]]] = [
        (TypeError, None, lambda: Server.serve(object(), None, (), {})),
        ((TypeError, ValueError), None, lambda: signature((5, torch.ones(2), (0,), (0,), spans, True, True))),
        (ValueError, "dimension", lambda: signature((0, torch.ones(2), (0,), (0,), ((1, 0, -1),), True, True))),
        (TypeError, None, lambda: signature((0, object(), (0,), (0,), spans, True, True))),
        (ValueError, "place", lambda: CORE.Signature(*start, (), ((3, int, 1),), (), 0)),
        (TypeError, "must be strings", lambda: settled(lambda x: x * 2, torch.randn(ROWS, 3))(**keywords)),
        (KeyError, None, lambda: CORE.run_method(ReplayPlan, {"nonsense": 1})),
    ]
    for kind, message, call in wrong:
        with pytest.raises(kind, match=message):
            call()


def test_each_thread_has_its_own_decision(way: str) -> None:
    """Threads that take turns on one server read their own latest decision, and one that captures does not hit."""
    step = settled(lambda x: x * 2, torch.ones(ROWS, 2))
    turn = threading.Barrier(2)
    backend = step.entries[0].backend

    def work(me: int) -> list[int]:
        decided = []
        for number in range(6):
            turn.wait()
            if number % 2 == me:
                step(torch.ones(ROWS - me, 2))
            turn.wait()
            decided.append(0 if step.last_decision is None else step.last_decision.rows)
        return decided

    step(torch.ones(ROWS - 1, 2))  # compares the padded batch
    assert in_threads(lambda: work(0), lambda: work(1)) == [[ROWS] * 6, [0] + [ROWS - 1] * 5]
    hits = step.stats.hits
    with backend.watched():
        step(torch.ones(ROWS, 2))
        in_threads(lambda: step(torch.ones(ROWS, 2)))
    assert step.stats.hits == hits + 1


def test_calls_that_are_all_alike_become_hits(way: str) -> None:
    """Of one row of whole numbers no other batch can be made; another one of the caller's is compared as ever."""
    table = torch.rand(5, 2)
    step = graphed(lambda ids: table[ids], dynamic={"ids": 0}, sizes=(1,), options=AT_ONCE)
    alike = torch.tensor([3])
    check_calls(step, *[alike] * 20)
    (entry,) = step.entries
    assert entry.state is EntryState.CAPTURED
    if way == "core":
        assert "step" not in frames_of(lambda: step(alike))
    rows = (torch.tensor([row]) for row in (3, 1, 2))
    assert check_calls(step, *rows) == [Reason.EXACT, Reason.VERIFIED_NOW, Reason.EXACT]
    assert entry.state is EntryState.VERIFIED


def test_arguments_between_written_memory_are_hits() -> None:
    """An argument may lie between tensors that the graph writes, as in a heap; in one of them it is refused."""
    memory = bytearray(3 * 4 * ROWS)
    low, between, high = (
        torch.frombuffer(memory, dtype=torch.float32, count=ROWS, offset=4 * ROWS * place) for place in range(3)
    )

    def fn(x: Tensor) -> Tensor:
        low.add_(1)
        high.add_(2)
        return x + low[0] + high[0]

    step = settled(fn, torch.zeros(ROWS))
    assert frames_of(lambda: step(between)) == []
    for x, is_hit in ((between, True), (low.detach(), False), (high.detach(), False), (between, True)):
        expected = x + low[0] + high[0] + 3
        if not is_hit:
            expected = x + (1 if x.data_ptr() == low.data_ptr() else 2) + low[0] + high[0] + 3
        answer, was_hit = served(step, x)
        assert was_hit == is_hit
        assert torch.equal(answer, expected)


def test_a_replaced_call_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sets ``Graphed.__call__``, or the method of the server's class, is heard."""
    x = torch.randn(ROWS, 3)
    step = settled(lambda x: x * 2, x)
    inside = Graphed.__call__
    with monkeypatch.context() as patch:
        patch.setattr(Graphed, "__call__", lambda self, *args: inside(self, *args) + 1)
        assert torch.equal(step(x), x * 2 + 1)
    assert torch.equal(step(x), x * 2)
    CORE.take_calls(Graphed, compiler_at_work)  # as it was
    with monkeypatch.context() as patch:
        patch.setattr(type(step._server), "serve", lambda *_: "somebody else's")
        assert step(x) == "somebody else's"
    assert served(step, x)[1]


def test_signatures_in_turns_are_hits_without_a_frame() -> None:
    """Calls of several kinds, of which each is another one than the call before."""
    step = settled(lambda x, k=1: x * k, torch.randn(ROWS, 1), max_signatures=8)
    x = torch.randn(ROWS, 2)
    kinds: list[tuple[Any, ...]] = [(x[:, :1].clone(),), (x,), (x, 3), (x.double(), 3), (x, 3.0)]
    check_calls(step, *((x + shift, *rest) for shift in range(3) for x, *rest in kinds))
    for x, *rest in kinds * 2:
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                assert frames_of(lambda x=x, rest=rest: step(x, *rest)) == []
        assert check_calls(step, (x, *rest))[0].is_graph
