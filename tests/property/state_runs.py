"""Runs random programs with Python state on two twins, one eager, one behind a front end; makes failures small."""

import contextlib
import dataclasses
import linecache
import os
import random
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import graphdispatch
from graphdispatch import CUDAGraphOptions, GraphDispatchError
from graphdispatch.engines import OutputView

from ..behaviour.front_ends import FRONT_ENDS, GraphedFrontEnd
from ..helpers import with_options
from .state_compare import Twins
from .state_programs import AHEAD, Program, Step, draw, listing, mutation_source, render

CONTEXTS: dict[str, Any] = {"": torch.no_grad, "inference": torch.inference_mode, "enable_grad": torch.enable_grad}
_ERRORS = (LookupError, RuntimeError, TypeError, AttributeError, AssertionError, StopIteration)
"""What programs themselves raise."""
_CALLABLES = {"call": "FN", "other": "OTHER"}
_DYNAMIC = {"x": 0, "ids": 0, "slots": 0}


@dataclass(frozen=True)
class Violation:
    """What differed, and after which step. ``kind`` names what was compared."""

    kind: str
    step: int
    text: str


def _is_inside(error: Exception) -> bool:
    """Whether an exception comes from the library's own code, and not from what it called."""
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    file = where.tb_frame.f_code.co_filename if where is not None else ""
    return file.startswith(os.path.dirname(graphdispatch.__file__))


class Ambient:
    """The process-wide settings of one twin: random generators and the default dtype."""

    def __init__(self) -> None:
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)
        self.read()

    def read(self) -> None:
        """Note the settings as they are now."""
        self.python, self.numpy = random.getstate(), np.random.get_state()
        self.torch, self.dtype = torch.get_rng_state(), torch.get_default_dtype()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Make them the process's for a while."""
        outer = Ambient.__new__(Ambient)
        outer.read()
        self.set()
        try:
            yield
        finally:
            self.read()
            outer.set()

    def set(self) -> None:
        """Make them the process's."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        torch.set_default_dtype(self.dtype)

    def difference(self, other: "Ambient", *, exact: bool) -> str | None:
        """Which setting differs."""
        if self.python != other.python:
            return "the state of random"
        if self.numpy[2:] != other.numpy[2:] or (self.numpy[1] != other.numpy[1]).any():  # type: ignore[index]
            return "the state of numpy.random"
        if exact and not torch.equal(self.torch, other.torch):
            return "the state of torch's generator"
        return None if self.dtype == other.dtype else "the default dtype"


class Twin:
    """One execution of a program's source, with its own modules and settings."""

    def __init__(self, program: Program, name: str) -> None:
        self.program = program
        self.helper = types.ModuleType(f"gdfuzz_helper_{program.seed}_{name}")
        self.module = types.ModuleType(f"gdfuzz_{program.seed}_{name}")
        for module in (self.helper, self.module):
            module.__file__ = f"/gdfuzz/{module.__name__}.py"
            sys.modules[module.__name__] = module
        self.ambient = Ambient()
        self.failed_inside = False
        """Whether the latest error of a call came from the library's own code."""
        self._files = 0
        with self.ambient():
            self.execute(render(program))

    def execute(self, source: str) -> None:
        """Execute source in the twin's module; its lines can be shown in tracebacks."""
        source = re.sub(r"\bHELPER\b", self.helper.__name__, source)
        file = f"/gdfuzz/{self.module.__name__}_{self._files}.py"
        self._files += 1
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec"), self.module.__dict__)

    def do(self, step: Step) -> str | None:
        """Make a mutation. Returns the name of the exception that it raised."""
        with self.ambient(), torch.no_grad():
            try:
                self.execute(mutation_source(self.program, step))
            except Exception as error:
                return type(error).__name__
        return None

    def call(self, fn: Any, args: tuple[Tensor, ...], context: str = "") -> tuple[Any, Exception | None]:
        """Call ``fn``. Returns its answer or its error."""
        with self.ambient(), CONTEXTS[context]():
            try:
                answer = fn(*args)
                return answer.get() if isinstance(answer, OutputView) else answer, None
            except Exception as error:
                self.failed_inside = _is_inside(error)
                return None, error.with_traceback(None)

    @property
    def state(self) -> dict[str, Any]:
        """All that the twin's modules hold."""
        own = {k: v for k, v in self.module.__dict__.items() if not k.startswith("__")}
        return own | {"helper": {k: v for k, v in self.helper.__dict__.items() if not k.startswith("__")}}

    def close(self) -> None:
        """Forget its modules."""
        for module in (self.helper, self.module):
            del sys.modules[module.__name__]
        for number in range(self._files):
            linecache.cache.pop(f"/gdfuzz/{self.module.__name__}_{number}.py", None)


@torch.library.custom_op("gdfuzz::write_slots", mutates_args={"memory"})
def write_slots(memory: Tensor, slots: Tensor, rows: Tensor) -> None:
    """An operator of one's own that writes rows at slots."""
    memory[slots] = rows


@torch.library.custom_op("gdfuzz::count_rows", mutates_args={"total"})
def count_rows(total: Tensor, rows: Tensor) -> None:
    """An operator of one's own that writes something about the whole batch."""
    total += (rows.float() > 0).sum(0)


@torch.library.custom_op("gdfuzz::largest", mutates_args=())
def largest(rows: Tensor) -> Tensor:
    """An operator of one's own that mixes rows."""
    return rows.amax(0, keepdim=True) * 0.1


_LIBRARY = torch.library.Library("gdfuzz", "FRAGMENT")
_LIBRARY.define("composed(Tensor(a!) memory, Tensor slots, Tensor rows) -> ()")
_LIBRARY.impl("composed", lambda memory, slots, rows: memory.__setitem__(slots, rows), "CompositeImplicitAutograd")


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of a call; some batches have equal rows, zeros or large values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float32)
    if seed % 11 == 0:
        x = x[:1].repeat(rows, 1)
    if seed % 13 == 0:
        x = x * 4
    if seed % 17 == 0:
        x.zero_()
    ids = torch.randint(0, 8, (rows,), generator=generator)
    slots = ids if seed % 19 == 0 else torch.randperm(8, generator=generator)[:rows]
    if seed % 7 == 0:
        ids.tag = slots.tag = 0.5  # type: ignore[attr-defined]
    return x, ids, slots


class _Lengths:
    """``graphed``, called like the callable itself: each call has another batch beside it."""

    def __init__(self, graphed: Any) -> None:
        self._graphed, self._calls = graphed, 0

    def __call__(self, *args: Any) -> Any:
        self._calls += 1
        return self._graphed(torch.ones(self._calls % 3 + 1), *args)[0]

    def prewarm(self, *args: Any) -> Any:
        return self._graphed.prewarm(torch.ones(3), *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graphed, name)


class LengthsFrontEnd(GraphedFrontEnd):
    """``graphed`` with two dimensions: the rows of a program are lengths, beside a batch of which it knows nothing."""

    name = "lengths"

    def _open(self, pad: dict[str, Any] | None = None, **more: Any) -> None:
        fn = self.fn

        def both(batch: Tensor, x: Tensor, ids: Tensor, slots: Tensor) -> Any:
            return fn(x, ids, slots), batch * 2

        rows = {0: graphdispatch.Dim("length", sizes=list(self.sizes), pad=pad or {})}
        dynamic: dict[str, Any] = {"batch": {0: "batch"}, "x": rows, "ids": {0: "length"}, "slots": {0: "length"}}
        how: dict[str, Any] = {"sizes": [3], "mode": self.mode, "options": self.options}
        served = graphdispatch.graphed(both, dynamic=dynamic, **with_options(how | more, capture_after=1))
        self.front = _Lengths(served)  # type: ignore[assignment]


class Run:
    """One run of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.want, self.got = Twin(program, "a"), Twin(program, "b")
        options = CUDAGraphOptions(**dict(program.options), gc_disable=False)
        settings: dict[str, Any] = {"sizes": program.sizes, "mode": program.mode, "options": options}
        with self.got.ambient():
            self.front_ends = {
                name: (FRONT_ENDS | {"lengths": LengthsFrontEnd})[program.front_end](
                    getattr(self.got.module, name), dynamic=_DYNAMIC, **settings, **dict(program.more)
                )
                for name in {_CALLABLES.get(step.kind, "FN") for step in program.steps} | {"FN"}
            }
        self.front_end = self.latest = self.front_ends["FN"]
        self.buffers: dict[tuple[bool, str, int], tuple[Tensor, ...]] = {}
        self.static = options.inputs == "static"
        self.exact = program.is_exact
        self.keeps = options.outputs == "clone" and not self.static
        self.kept: list[tuple[int, Any, Any]] = []
        self.has_raised = False
        """Whether a call raised, after which the twins need not be alike."""

    def run(self) -> Violation | None:
        """Make all steps, up to the first difference."""
        try:
            for number, step in enumerate(self.program.steps):
                found = self._step(number, step)
                # What a graph that is replayed alone wrote before it raised is not what eager wrote.
                found = None if self.has_raised else found or self._compare(number)
                if found is not None or self.has_raised:
                    return found
            return None
        finally:
            for front_end in self.front_ends.values():
                front_end.close()
            self.want.close()
            self.got.close()

    def _step(self, number: int, step: Step) -> Violation | None:
        if step.kind == "do":
            want, got = self.want.do(step), self.got.do(step)
            return None if want == got else Violation("mutation", number, f"raised {want} and {got}")
        if step.kind == "manage":
            eval(f"front_end.{step.code}", {"front_end": self.front_end.front})
            return None
        if step.kind in _CALLABLES:
            return self._call(number, step, _CALLABLES[step.kind])
        how = {"prepare": self.front_end.prepare, "renew": self.front_end.renew}.get(step.kind)
        _, error = self.got.call(how or self.front_end.front.prewarm, batch(step.rows, step.seed))
        if error is None or isinstance(error, GraphDispatchError):
            return None
        # The callable's own error, as eager would have raised it here; what it did before is undone.
        is_known = isinstance(error, _ERRORS) and not self.got.failed_inside
        return None if is_known else Violation(step.kind, number, f"raised {error!r}")

    def _call(self, number: int, step: Step, name: str) -> Violation | None:
        mine, others = batch(step.rows, step.seed), batch(step.rows, step.seed)
        if self.static:  # the caller fills the same tensors in place each time, and state may keep them
            mine, others = self._filled(False, name, mine), self._filled(True, name, others)
        want, error = self.want.call(getattr(self.want.module, name), mine, step.code)
        self.latest = self.front_ends[name]
        got, raised = self.got.call(self.latest, others, step.code)
        self.has_raised = error is not None and raised is not None and self.program.front_end in AHEAD
        if self.has_raised:
            return None
        if type(error) is not type(raised):
            if "require" in f"{error}" and " grad" in f"{error}":  # footgun row ``gradients_on_by_default``
                self.has_raised = True
                return None
            kind = "refused" if isinstance(raised, GraphDispatchError) else "error"
            return Violation(kind, number, f"eager raised {error!r}, the front end {raised!r}")
        # Footgun rows ``output_is_argument`` and ``output_is_view_of_argument``: outputs are copies, equal but apart.
        twins = Twins(exact=self.exact, shared=False)
        text = twins.difference([*mine, want], [*others, got], "(*args, output)")
        if text is not None:
            return Violation("output", number, f"{self._how()}: {text}")
        if self.keeps and error is None:
            self.kept = [*self.kept[-2:], (number, want, got)]
        return None

    def _filled(self, served: bool, name: str, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The caller's own tensors of these shapes, which now hold the values."""
        buffers = self.buffers.setdefault((served, name, len(values[0])), tuple(value.clone() for value in values))
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
            buffer.__dict__.clear()
            buffer.__dict__.update(value.__dict__)
        return buffers

    def _how(self) -> str:
        return f"{'hit' if self.latest.was_hit() else 'eager'} ({self.latest.reason()})"

    def _compare(self, number: int) -> Violation | None:
        text = self.want.ambient.difference(self.got.ambient, exact=self.exact)
        if text is not None:
            return Violation("ambient", number, f"{self._how()}: {text}")
        text = Twins(exact=self.exact).difference(self.want.state, self.got.state)
        if text is not None:
            return Violation("state", number, f"{self._how()}: {text}")
        for since, want, got in self.kept:
            text = Twins(exact=self.exact, shared=False).difference(want, got, f"output of #{since}")
            if text is not None:
                return Violation("kept", number, f"{self._how()}: {text}")
        return None


def minimised(program: Program, violation: Violation) -> tuple[Program, Violation]:
    """The program without the steps that it can do without, failing in the same kind of way."""
    size = len(program.steps) // 2
    while size:
        for start in range(0, len(program.steps), size):
            steps = program.steps[:start] + program.steps[start + size :]
            smaller = dataclasses.replace(program, steps=steps)
            with contextlib.suppress(Exception):  # what cannot be run without these steps
                found = Run(smaller).run()
                if found is not None and found.kind == violation.kind:
                    program, violation = smaller, found
                    break
        else:
            size //= 2
    return program, violation


def failure(seed: int, *, only: tuple[str, ...] = ()) -> str | None:
    """What is wrong with the program of a seed, for people: the fewest steps that show it; None if nothing is."""
    program = draw(seed, only=only)
    found = Run(program).run()
    if found is None:
        return None
    smallest, violation = minimised(program, found)
    return f"{listing(smallest)}\n\nafter step #{violation.step}: {violation.kind}: {violation.text}"


if __name__ == "__main__":
    for number in map(int, sys.argv[1:]):
        print(listing(draw(number)), failure(number) or "eager's in every step", sep="\n\n")
