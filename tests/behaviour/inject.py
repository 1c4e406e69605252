"""Faults on purpose: at an operator, or at a point of the CPU backend; and what must be as before once one is over."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphdispatch import eager_break
from graphdispatch.backends import Capture, Pool, get_backend
from graphdispatch.backends.cpu.backend import CPUBackend
from graphdispatch.backends.cpu.graph import CPUGraph
from graphdispatch.backends.cpu.program import Program, Step
from graphdispatch.backends.operators import OperatorKind, kind_of

from ..helpers import are_free, may_capture
from ..spy import Spy

ROWS, WIDTH = 3, 4


class FailAt(TorchDispatchMode):
    """Raises ``error`` at the operator of number ``index`` (from 0), views not counted: they do no work on a device."""

    def __init__(self, index: int | None, error: BaseException | None = None) -> None:
        super().__init__()
        self.index = index
        self.error = error
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kind_of(func) is not OperatorKind.VIEW:
            self.seen += 1
            if self.seen - 1 == self.index:
                raise self.error
        return func(*args, **(kwargs or {}))


class Faults:
    """At which points of a backend to fail: ``plan[point]`` holds the numbers (from 1) of the visits that raise."""

    def __init__(self) -> None:
        self.plan: dict[str, set[int]] = {}
        self.error: Callable[[], BaseException] = ArithmeticError
        self.visits: Counter[str] = Counter()

    def set(self, point: str, *visits: int, error: Callable[[], BaseException] = ArithmeticError) -> None:
        """Fail at these visits of ``point``, counted from now on."""
        self.plan, self.error = {point: set(visits)}, error
        self.visits.clear()

    def visit(self, point: str) -> None:
        """The backend has come to ``point``."""
        self.visits[point] += 1
        if self.visits[point] in self.plan.get(point, ()):
            raise self.error()


class DeviceGoneError(RuntimeError):
    """What a faulty device raises when it is lost."""


class FaultyBackend(CPUBackend):
    """The CPU backend, failing where its ``faults`` say; registered, and available only while a test uses it."""

    name = "faulty"
    in_use = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.faults = Faults()

    @classmethod
    def is_available(cls) -> bool:
        return cls.in_use

    def is_lost(self, error: BaseException) -> bool:
        return isinstance(error, DeviceGoneError)

    def make_pool(self) -> Pool:
        pool: Any = super().make_pool()
        pool.take_arena = self._after("arena", pool.take_arena)
        return pool

    def begin_capture(self, pool: Pool) -> Capture:
        self.faults.visit("begin")
        capture: Any = super().begin_capture(pool)

        def end(finish: Callable[[], Any] = capture.end) -> Any:
            try:
                self.faults.visit("end")
            except BaseException:
                capture.abort()
                raise
            graph = finish()
            graph.replay = self._after("replay", graph.replay)
            return graph

        capture.end = end
        return capture

    def _after(self, point: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.faults.visit(point)
            return function(*args)

        return call


class DeviceFaults:
    """Makes the CPU backend fail once, on whichever thread it works: at a capture, or at an operator of a replay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures: list[BaseException] = []
        """What the next captures raise when they begin."""
        self.replays: list[tuple[int, BaseException | None]] = []
        """What the next replays do: run so many operators, and then raise, or stop without a word."""
        begin, replay = CPUBackend.begin_capture, CPUGraph.replay

        def begin_capture(backend: CPUBackend, pool: Pool) -> Capture:
            if self.captures:
                raise self.captures.pop(0)
            return begin(backend, pool)

        def replay_some(graph: CPUGraph) -> None:
            if not self.replays:
                return replay(graph)
            count, error = self.replays.pop(0)
            program = graph.program
            fault = [Step(partial(_raise, error), _raise)] if error is not None else []
            graph.program = Program([*program.steps[:count], *fault])
            try:
                replay(graph)
            finally:
                graph.program = program

        monkeypatch.setattr(CPUBackend, "begin_capture", begin_capture)
        monkeypatch.setattr(CPUGraph, "replay", replay_some)

    @property
    def is_over(self) -> bool:
        """Whether every fault has happened."""
        return not (self.captures or self.replays)


def _raise(error: BaseException) -> None:
    raise error


class Model:
    """One step and its state. ``pure`` draws random numbers and writes nothing; ``stateful`` writes a cache by index
    and a counter; ``broken`` is stateful with a break in the middle."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state = [torch.zeros(8, WIDTH), torch.zeros(1)] if kind != "pure" else []
        self.runs = Spy([0])
        self.step = self._make()

    def _make(self) -> Callable[[Tensor, Tensor], Tensor]:
        weight = torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH)
        runs = self.runs
        if self.kind == "pure":

            def pure(x: Tensor, slots: Tensor) -> Tensor:
                runs[0] += 1
                return (x @ weight + torch.rand(1)).relu() * slots[:, None]

            return pure
        cache, ticks = self.state
        halve = eager_break(lambda h: h / 2) if self.kind == "broken" else lambda h: h / 2

        def stateful(x: Tensor, slots: Tensor) -> Tensor:
            runs[0] += 1
            hidden = x @ weight
            cache.index_copy_(0, slots, hidden)
            ticks.add_(1)
            return halve(hidden + 1) + cache[slots] * ticks

        return stateful

    def copy(self) -> "Model":
        """Another model with the same values."""
        twin = Model(self.kind)
        for mine, its in zip(self.state, twin.state, strict=True):
            its.copy_(mine)
        return twin

    def same_state(self, other: "Model") -> bool:
        """Whether two models hold the same values."""
        return all(torch.equal(a, b) for a, b in zip(self.state, other.state, strict=True))

    def is_between(self, before: "Model", after: "Model") -> bool:
        """Whether each value is one from before a run or one from after it."""
        return all(
            bool(((now == a) | (now == b)).all())
            for now, a, b in zip(self.state, before.state, after.state, strict=True)
        )


def batch(number: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """The arguments of one call; each number gives others. Slot 7 is left to padding."""
    x = torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH) * (number + 1)
    return x, (torch.arange(rows) + number) % 7


def ambient(backend: Any) -> tuple[Any, ...]:
    """What the calling thread and the process have set."""
    return (
        gc.isenabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        backend.current_stream(),
        backend.is_capturing(),
        backend.is_watched(),
    )


@contextmanager
def nothing_left_behind(step: Any, backend: Any | None = None) -> Iterator[None]:
    """The block leaves the ambient state, the locks and the cache of ``step`` as they must be, whatever it raises."""
    backend = backend if backend is not None else get_backend("cpu")
    before = ambient(backend)
    try:
        yield
    finally:
        assert ambient(backend) == before
        graphs = step._graphs
        assert may_capture()
        assert are_free(graphs.lock, *([graphs.pool.lock] if graphs.pool is not None else []))
        step.check_integrity()
        for group in graphs.groups.values():
            for entry in group.entries.values():
                assert any(entry is kept for kept in graphs.cache), "an entry that its cache does not know"
