"""A fault at each step of a capture and of a comparison, read off the code: nothing is left behind, and the next calls
are served.

A step is a function that ``proof/check/pipeline.py`` or ``record.py`` calls: one of the package, or a method of what
they work with. A step that no program below reaches fails the tests.
"""

import ast
import inspect
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import cycle
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from graphdispatch import CUDAGraphOptions, Graphed, eager_break, graphed, record
from graphdispatch.backends import get_backend
from graphdispatch.backends.tracing import UntracedMode
from graphdispatch.errors import DeviceLostError, ReplayError
from graphdispatch.proof.check import attempt, pipeline
from graphdispatch.runtime import windows
from graphdispatch.runtime.entry import CUDAGraphEntry
from graphdispatch.runtime.protocols import CaptureRequest
from graphdispatch.runtime.static_inputs import StaticInputs
from graphdispatch.runtime.windows import Windows, storages_of

from ..behaviour.inject import ambient, batch
from ..helpers import Spy, are_free, assert_same, may_capture

WIDTH = 4
OPERATORS = 12
"""At so many of a call there is a fault, or some more."""
DEVICE = torch.get_default_device()
BACKEND = get_backend(DEVICE.type)
RECEIVERS: dict[str, type[Any]] = {
    "attempt": attempt.CaptureAttempt,
    "entry": CUDAGraphEntry,
    "request": CaptureRequest,
    "request.backend": type(BACKEND),
    "backend": type(BACKEND),
    "self._request.backend": type(BACKEND),
    "request.inputs": StaticInputs,
    "request.pool": type(BACKEND.make_pool()),
    "self": record._Recording,
    "WINDOWS": Windows,
}
"""The objects whose methods are steps, as the two modules name them."""


ON_DEVICE = {type(BACKEND), type(BACKEND.make_pool()), StaticInputs}
ON_HOST = {"classify_error", "raise_if_lost", "mark_dirty"}
"""The classes whose methods work on the device, and methods of them that do not."""


class Step(NamedTuple):
    """A function that is called, and where it is looked up."""

    home: Any
    name: str

    def __str__(self) -> str:
        return f"{getattr(self.home, '__name__', self.home).rpartition('.')[2]}.{self.name}"


def steps_of(module: ModuleType) -> Iterator[Step]:
    """The functions of the package, and the methods of ``RECEIVERS``, that a module calls."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        found = getattr(module, called, None)
        if inspect.isfunction(found) and found.__module__.startswith("graphdispatch"):
            yield Step(module, called)
        receiver, _, method = called.rpartition(".")
        home = RECEIVERS.get(receiver)
        if home is not None and inspect.isfunction(getattr(home, method, None)):
            yield Step(home, method)


STEPS = sorted({*steps_of(pipeline), *steps_of(record)}, key=str)


class TroubleError(Exception):
    """What the handler of a signal raises."""


def out_of_time(number: int, frame: Any) -> None:
    """A handler, as that of a time limit."""
    raise TroubleError


class LostError(Exception):
    """The device is lost."""


def _signal() -> None:
    signal.raise_signal(signal.SIGUSR1)


def _raise(error: type[BaseException]) -> None:
    raise error("injected")


FAULTS: dict[str, tuple[type[BaseException], Callable[[], None]]] = {
    "error": (ArithmeticError, partial(_raise, ArithmeticError)),
    "memory": (torch.OutOfMemoryError, partial(_raise, torch.OutOfMemoryError)),
    "signal": (TroubleError, _signal),
    "lost": (LostError, partial(_raise, LostError)),
    "interrupt": (KeyboardInterrupt, partial(_raise, KeyboardInterrupt)),
}
PASSING = {"signal", "lost", "interrupt"}
"""They always are the caller's; the others only where eager has no answer."""


class Model:
    """A callable, the tensors that it writes, and how many of its runs began and ended."""

    def __init__(self, fn: Callable[..., Any], *state: Tensor) -> None:
        self.state, self.begun, self.ended, self.number = list(state), Spy([0]), Spy([0]), Spy([0])
        begun, ended = self.begun, self.ended

        def call(x: Tensor, slots: Tensor) -> Any:
            begun[0] += 1
            answer = fn(x, slots)
            ended[0] += 1
            return answer

        self.call = call

    def values(self) -> list[Tensor]:
        """Copies of what it wrote; the last row of each is padding's."""
        return [one[:-1].clone() for one in self.state]


def counts(middle: Callable[[Tensor], Tensor] = torch.relu) -> Model:
    """Writes a cache by index and a counter, and draws random numbers."""
    cache, ticks = torch.zeros(8, WIDTH), torch.zeros(2)

    def step(x: Tensor, slots: Tensor) -> Tensor:
        cache.index_copy_(0, slots, x * 2)
        ticks.add_(1)
        return middle(x + 1) + cache[slots] * ticks[0] + torch.rand(1)

    return Model(step, cache, ticks)


def halve(h: Tensor) -> Tensor:
    """What is a break in PIECEWISE mode."""
    return h / 2


def writes_argument() -> Model:
    """Writes its argument and a counter."""
    ticks = torch.zeros(2)

    def step(x: Tensor, slots: Tensor) -> Tensor:
        ticks.add_(1)
        return x.add_(1) * slots[:, None]

    return Model(step, ticks)


def pure() -> Model:
    """Writes nothing."""
    weight = torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH)
    return Model(lambda x, slots: (x @ weight).relu() * slots[:, None])


def branches() -> Model:
    """Takes another path for a single row, where it does the same."""
    return Model(lambda x, slots: (x * 2 if len(x) > 1 else x.mul(2)) + slots[:, None])


def reads_metadata() -> Model:
    """Reads more of an argument than values."""
    return Model(lambda x, slots: x * (3 if x.storage_offset() else 2) + slots[:, None])


def refused() -> Model:
    """Reads a number, which no graph can hold."""
    return Model(lambda x, slots: x * float(slots[0].item()))


def rounds() -> Model:
    """Gives a little more from its second call on, as no guard can see."""
    model = Model(lambda x, slots: x * (1 + 1e-5 * min(number[0], 1)))
    number = model.number
    return model


def differs() -> Model:
    """Gives something else from its third call on."""
    model = Model(lambda x, slots: x * (1.5 if number[0] > 1 else 1))
    number = model.number
    return model


def turns() -> Model:
    """Runs other operators from its sixth run on, with the same result."""
    model = Model(lambda x, slots: x * 2 if begun[0] < TURN else x + x)
    begun = model.begun
    return model


TURN = 4


@contextmanager
def other_window(model: Model) -> Iterator[None]:
    """Another thread captures meanwhile what writes the same memory, for longer than anybody waits."""
    window = (-1, storages_of(model.state))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "_CAPTURE_WAITS_S", 0.001)
        patch.setattr(windows, "_RUN_WAITS_S", 0.001)
        windows.WINDOWS.open.append(window)
        try:
            yield
        finally:
            windows.WINDOWS.open.remove(window)


class Program(NamedTuple):
    """A call in which there is a fault: of which model, served how, after how many calls, or a prewarm."""

    make: Callable[[], Model]
    before: int | None
    """The calls before it; None for a prewarm."""
    how: dict[str, Any] = {}  # noqa: RUF012
    batch: Callable[[int], tuple[Tensor, Tensor]] | None = None
    serves: bool = True
    """Whether later calls are served."""
    undoes: bool = True
    """Whether what runs before the fault is undone; a plain capture undoes nothing."""
    around: Callable[[Model], AbstractContextManager[Any]] = nullcontext
    """What surrounds the call."""


def with_gaps(number: int) -> tuple[Tensor, Tensor]:
    """The same in memory with gaps."""
    x, slots = batch(number)
    return torch.cat([x, x], 1)[:, :WIDTH], slots


PADDED = {"sizes": (4,), "pad": {"slots": 7}}
WRITES = CUDAGraphOptions(capture_after=1, padding_writes="allow")
PLAIN = CUDAGraphOptions(capture_after=1, verify=False, guard_weights=False)
PROGRAMS = {
    **{f"counts {number}": Program(counts, number, PADDED | {"options": WRITES}) for number in (0, 1, 2, None)},
    **{
        f"breaks {number}": Program(
            lambda: counts(eager_break(halve)), number, PADDED | {"options": WRITES, "mode": "PIECEWISE"}
        )
        for number in (0, 1, 2)
    },
    **{f"pure {number}": Program(pure, number, {"sizes": (3, 4)}) for number in (0, 1, None)},
    **{f"argument {number}": Program(writes_argument, number, {"sizes": (4,)}) for number in (0, 1)},
    "gaps": Program(pure, 0, {"sizes": (4,)}, with_gaps),
    "reads": Program(reads_metadata, 0, {"sizes": (3,)}),
    "refused": Program(refused, 0, serves=False),
    "rounds": Program(rounds, 1, {"sizes": (3,)}),
    "differs": Program(differs, 2, {"sizes": (4,)}, lambda number: batch(number, 4 if number < 2 else 3)),
    "turns": Program(turns, None, {"sizes": (3, 4)}),
    "trusts": Program(pure, 0, {"options": CUDAGraphOptions(capture_after=1, verify=False)}),
    "shared": Program(counts, 0, PADDED | {"options": WRITES}, around=other_window),
    "plain 0": Program(counts, 0, PADDED | {"options": PLAIN}, undoes=BACKEND.capture_executes),
    "plain None": Program(counts, None, PADDED | {"options": PLAIN}, undoes=False),
    "plain argument": Program(
        writes_argument, 0, {"sizes": (4,), "options": PLAIN, "outputs": "static"}, undoes=BACKEND.capture_executes
    ),
    "plain refused": Program(lambda: Model(lambda x, slots: np.float64(2)), 0, {"options": PLAIN}, serves=False),
}


class Plan:
    """Fails once: before a step, after it, or at the first ``operator`` in it; or at the operator of this number."""

    def __init__(self, kind: str, place: str, operator: int = 0) -> None:
        self.kind, self.place, self.operator = kind, place, operator
        self.error, self.fire = FAULTS.get(kind, (Exception, lambda: None))
        self.visits: Counter[Step] = Counter()
        self.operators: Counter[Step | None] = Counter()
        self.within: list[Step] = []
        self.is_armed = self.has_fired = self.is_open = False

    def _fire(self) -> None:
        self.has_fired, self.is_armed = True, False
        self.fire()

    def _stay_lost(self) -> None:
        if self.has_fired and self.is_open and self.kind == "lost":
            self.fire()

    def wrap(self, step: Step) -> Callable[..., Any]:
        original = getattr(step.home, step.name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            self._stay_lost()
            if not self.is_armed:
                return original(*args, **kwargs)
            self.visits[step] += 1
            is_due = self.visits[step] == 1
            if is_due and self.place == "before":
                self._fire()
            self.within.append(step)
            try:
                result = original(*args, **kwargs)
            finally:
                self.within.remove(step)
            if is_due and self.place == "after" and self.is_armed and not hasattr(result, "__exit__"):
                self._fire()
            return result

        return failing

    def see_operator(self) -> None:
        """An operator is about to run."""
        self._stay_lost()
        if not self.is_armed:
            return
        self.operators.update({None, *self.within})
        if self.place == "operator" and (self.within or self.operators[None] == self.operator):
            self._fire()

    @contextmanager
    def at(self, *steps: Step) -> Iterator[None]:
        """Within the block the steps are the plan's."""
        with pytest.MonkeyPatch.context() as patch, Operators(self):
            for step in steps:
                patch.setattr(step.home, step.name, self.wrap(step))
            self.is_armed = self.is_open = True
            try:
                yield
            finally:
                self.is_armed = self.is_open = False


class Operators(UntracedMode):
    """Lets a plan see each operator."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.plan.see_operator()
        return func(*args, **(kwargs or {}))


class Call:
    """A program up to the call in question, beside the same model eagerly."""

    def __init__(self, program: Program) -> None:
        self.program, self.number = program, 0
        self.model, self.twin = program.make(), program.make()
        how: dict[str, Any] = {"options": CUDAGraphOptions(capture_after=1)} | program.how
        self.served: Graphed[..., Any] = graphed(self.model.call, dynamic={"x": 0, "slots": 0}, max_size=4, **how)
        for _ in range(program.before or 0):
            self.agrees()

    def arguments(self) -> tuple[Tensor, Tensor]:
        """Those of the next call."""
        self.model.number[0] = self.twin.number[0] = self.number
        return (self.program.batch or batch)(self.number)

    def eager(self) -> tuple[Any, Any]:
        """What eager gives, and the generator after it."""
        BACKEND.set_rng_state(SEEDED)
        arguments = self.arguments()
        answer = self.twin.call(*arguments)
        return (answer, *arguments), BACKEND.rng_state()

    def run(self) -> Any:
        """What the graphed call gives, and its arguments after it; nothing of a prewarm."""
        arguments = self.arguments()
        if self.program.before is None:
            self.served.prewarm(*arguments)
            return None
        return self.served(*arguments), *arguments

    def agrees(self) -> None:
        """One call without a fault."""
        want = self.eager()
        BACKEND.set_rng_state(SEEDED)
        arguments = self.arguments()
        answer = self.served(*arguments)
        assert_same(((answer, *arguments), BACKEND.rng_state(), self.model.values()), (*want, self.twin.values()))
        self.number += 1


SEEDED = BACKEND.rng_state()


def same(got: Any, want: Any) -> bool:
    """Whether two trees of tensors hold the same bits."""
    try:
        assert_same(got, want)
    except AssertionError:
        return False
    return True


def fault(program: Program, plan: "Plan", *steps: Step) -> str:
    """One call with a fault, and those after it. Returns how it ended; empty if the fault was never reached."""
    call, kind = Call(program), plan.kind
    model, twin = call.model, call.twin
    before, ambient_before = model.values(), ambient(BACKEND)
    model.ended[0] = 0
    want = call.eager() if program.before is not None else (None, SEEDED)
    after = twin.values()
    BACKEND.set_rng_state(SEEDED)
    got: Any = None
    raised: BaseException | None = None
    try:
        with plan.at(*steps), program.around(model):
            got = call.run()
    except BaseException as caught:
        raised = caught
        if not plan.has_fired:
            raise
    if not plan.has_fired:
        return ""
    now, has_answered = model.values(), bool(model.ended[0])
    assert ambient(BACKEND) == ambient_before
    assert may_capture()
    graphs = call.served._graphs
    assert are_free(graphs.lock, *([graphs.cache.pool.lock] if graphs.cache.pool is not None else []))
    call.served.check_integrity()
    if raised is None:
        assert kind not in PASSING
        if program.undoes:
            assert_same((got, BACKEND.rng_state(), now), (*want, after))
    else:
        assert kind in PASSING or not has_answered, "eager has the answer"
        check_error(raised, plan, has_answered=has_answered)
        if kind == "lost":
            pass  # nobody can put anything back
        elif program.before is None:
            assert not program.undoes or same(now, before)
        else:
            assert same(now, after) or (not has_answered and all(map(is_between, now, before, after)))
    check_later(call)
    return type(raised).__name__ if raised is not None else "answered"


def check_error(raised: BaseException, plan: "Plan", *, has_answered: bool) -> None:
    """It is the fault's own; or says that the device is lost, or that a replay stopped behind a write."""
    if isinstance(raised, ReplayError):
        assert raised.had_effects
        raised = raised.__cause__ or raised
    if plan.kind == "lost" and has_answered:
        assert isinstance(raised, DeviceLostError)
        assert "restart" in str(raised)
    else:
        assert isinstance(raised, (plan.error, DeviceLostError) if plan.kind == "lost" else plan.error)


def check_later(call: Call) -> None:
    """Later calls are eager's, and a graph serves one of them."""
    for mine, its in zip(call.model.state, call.twin.state, strict=True):
        its.copy_(mine)
    call.number += 1
    call.served.invalidate("a new try")
    hits = call.served.stats.hits
    for _ in range(4):
        call.agrees()
    assert call.served.stats.hits > hits or not call.program.serves


def is_between(now: Tensor, before: Tensor, after: Tensor) -> bool:
    """Whether each number is one from before the call or one from after it."""
    return bool(((now == before) | (now == after)).all())


def places_of(step: Step, *, has_operators: bool) -> Iterator[tuple[str, str]]:
    """What may happen at a step, and where: a signal anywhere, and what torch raises where it works."""
    for kind in FAULTS:
        if has_operators:
            yield kind, "operator"
        if kind in ("signal", "interrupt") and step.name != "restore":  # what puts back cannot be put back
            yield kind, "before"
            if step.name != "run_eagerly":  # what it did is undone by what begins after it
                yield kind, "after"
        elif step.home in ON_DEVICE and step.name not in ON_HOST:
            yield kind, "before"


@cache
def reached(name: str) -> tuple[Counter[Step], Counter[Step]]:
    """How often a program comes to each step, and the operators in each."""
    call = Call(PROGRAMS[name])
    plan = Plan("", "")
    with plan.at(*STEPS), call.program.around(call.model):
        call.run()
    return plan.visits, plan.operators


@pytest.fixture(autouse=True)
def able_to_fail(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device is lost where the test says so, and a signal raises."""
    monkeypatch.setattr(type(BACKEND), "is_lost", lambda _, error: isinstance(error, LostError))
    before = signal.signal(signal.SIGUSR1, out_of_time)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_fault_at_a_step(step: Step) -> None:
    """Before it, after it, or at its first operator: what was set is as before, the caller has eager's answer or the
    error that is its own, and later calls are served. Each kind of fault, in one program after the other."""
    programs = [name for name in PROGRAMS if reached(name)[0][step]]
    if not (programs or BACKEND.capture_executes):
        pytest.skip("comes only where a capture executes what it records, and has eager's bits")
    assert programs, "no program comes to this step; add one that does"
    first = STEPS.index(step)
    ended = set()
    for number, kind in enumerate(FAULTS, first):
        name = programs[number % len(programs)]
        places = [place for one, place in places_of(step, has_operators=bool(reached(name)[1][step])) if one == kind]
        end = ""
        while places and not end:  # nothing comes behind what begins a block
            end = fault(PROGRAMS[name], Plan(kind, places.pop(number % len(places))), step)
        ended.add(end)
    assert ended - {""}


@pytest.mark.parametrize("name", ["counts 0", "counts 1", "counts 2", "breaks 0", "breaks 1", "breaks 2", "pure 0"])
def test_a_fault_at_an_operator(name: str) -> None:
    """The same at operators of a capture, a comparison and a replay, one kind of fault after the other."""
    operators = reached(name)[1][None]
    chosen = range(1, operators + 1, max(operators // OPERATORS, 1))
    ended = Counter(fault(PROGRAMS[name], Plan(kind, "operator", at)) for at, kind in zip(chosen, cycle(FAULTS)))
    assert len(ended) > 1
    assert not ended[""]
