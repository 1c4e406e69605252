"""Faults of the CPU backend on purpose, and what must be as before once one is over."""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from graphdispatch.backends import Capture, Pool, get_backend
from graphdispatch.backends.cpu.backend import CPUBackend, CPUGraph, CPUPool
from graphdispatch.backends.cpu.program import Step

from ..helpers import are_free, may_capture

ROWS, WIDTH = 3, 4


class Faults:
    """Makes the CPU backend fail, on whichever thread it works.

    Its points are: a capture begins (``begin``), ends (``end``) and takes memory (``arena``), and a graph is replayed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plan: dict[str, set[int]] = {}
        """The numbers (from 1) of the visits of each point that raise."""
        self.error: Callable[[], BaseException] = ArithmeticError
        self.visits: Counter[str] = Counter()
        self.replays: list[tuple[int, BaseException | None]] = []
        """What the next replays do: run so many operators, and then raise, or stop without a word."""
        begin, take, replay = CPUBackend.begin_capture, CPUPool.take_arena, CPUGraph.replay

        def begin_capture(backend: CPUBackend, pool: Pool) -> Capture:
            self.visit("begin")
            capture: Any = begin(backend, pool)
            finish = capture.end

            def end() -> Any:
                try:
                    self.visit("end")
                except BaseException:
                    capture.abort()
                    raise
                return finish()

            capture.end = end
            return capture

        def take_arena(pool: CPUPool, nbytes: int) -> Tensor:
            self.visit("arena")
            return take(pool, nbytes)

        def replay_some(graph: CPUGraph) -> None:
            self.visit("replay")
            if not self.replays:
                return replay(graph)
            count, error = self.replays.pop(0)
            steps, tape = graph.steps, graph.tape
            assert steps is not None
            fault = [Step(partial(_raise, error), _raise)] if error is not None else []
            graph.steps, graph.tape = [*steps[:count], *fault], None
            try:
                replay(graph)
            finally:
                graph.steps, graph.tape = steps, tape

        monkeypatch.setattr(CPUBackend, "begin_capture", begin_capture)
        monkeypatch.setattr(CPUPool, "take_arena", take_arena)
        monkeypatch.setattr(CPUGraph, "replay", replay_some)

    def set(self, point: str, *visits: int, error: Callable[[], BaseException] = ArithmeticError) -> None:
        """Fail at these visits of ``point``, counted from now on."""
        self.plan, self.error = {point: set(visits)}, error
        self.visits.clear()

    def visit(self, point: str) -> None:
        """The backend has come to ``point``."""
        self.visits[point] += 1
        if self.visits[point] in self.plan.get(point, ()):
            raise self.error()


def _raise(error: BaseException) -> None:
    raise error


def batch(number: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """The arguments of one call; each number gives others. Slot 7 is left to padding."""
    x = torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH) * (number + 1)
    return x, (torch.arange(rows) + number) % 7


def ambient(backend: Any) -> tuple[Any, ...]:
    """What the calling thread and the process have set."""
    hooks = torch.nn.modules.module
    return (
        gc.isenabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_cache_enabled(),
        torch.get_default_device(),
        len(hooks._global_forward_hooks) + len(hooks._global_forward_pre_hooks),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        backend.current_stream(),
        backend.is_capturing(),
        backend.is_watched(),
        # where the library listens to code, which it must not go on with
        sys.getprofile(),
        sys.gettrace(),
    )


@contextmanager
def nothing_left_behind(step: Any) -> Iterator[None]:
    """The block leaves the ambient state, the locks and the cache of ``step`` as they must be, whatever it raises."""
    backend = get_backend("cpu")
    before = ambient(backend)
    try:
        yield
    finally:
        assert ambient(backend) == before
        graphs = step._graphs
        assert may_capture()
        assert are_free(graphs.lock, *([graphs.cache.pool.lock] if graphs.cache.pool is not None else []))
        step.check_integrity()
        for group in graphs.groups.values():
            for entry in group.all_entries:
                assert any(entry is kept for kept in graphs.cache), "an entry that its cache does not know"
