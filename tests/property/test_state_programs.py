"""Random programs of the cases of Python state: behind every front end, answers and state are eager's.

A program is data: some cases, the ways in which its callable reaches them, a front end, and steps. It runs twice from
the start, eagerly and behind the front end, and after each step both have the same answers, state and settings. Where
they differ, hypothesis makes the program small and prints it. ``make fuzz`` draws new ones.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphdispatch import CUDAGraphOptions, GraphDispatchError
from graphdispatch.engines import OutputView

from ..behaviour.cases import Made, put_back
from ..behaviour.front_end import FrontEnd
from ..behaviour.front_ends import FRONT_ENDS
from ..behaviour.table import KEPT, MIXED, READS, WRITES
from ..behaviour.ways import IN_ONE_PLACE, PIECEWISE, WAYS
from ..helpers import assert_same

CASES = READS | KEPT | MIXED | {name: one for name, one in WRITES.items() if one.in_breaks and not one.is_shared}
"""The cases whose state is put back after a capture."""
ALL_SIZES = (1, 2, 3, 4, 5)
PIECES = ("graphed", "wrapper", "adaptive_wrapper")
"""The front ends that have PIECEWISE graphs."""
EXACT = ("wrapper", "adaptive_wrapper", "streams")
"""The front ends that pad no batch."""
MANAGED = (("sleep", "wake"), ("wake",), ("clear",), ("invalidate",), ("sleep",))
"""What may happen to graphs between calls."""


@dataclass(frozen=True)
class Use:
    """A case in a program: the way in which the callable reaches it, and the only number of rows that does; 0: all."""

    name: str
    way: str = "itself"
    rows: int = 0


@dataclass(frozen=True)
class Step:
    """A call, or what happens between calls, to a case (``change``) or to the graphs."""

    kind: str
    number: int = 0
    """The number of rows, or that of the use."""
    is_other: bool = False
    """Whether the call is one of the second callable, which uses the same cases."""


@dataclass(frozen=True)
class Program:
    """A program as data."""

    uses: tuple[Use, ...]
    steps: tuple[Step, ...]
    front_end: str = "graphed"
    way: str = "itself"
    sizes: tuple[int, ...] = (4,)
    mode: str = "FULL"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether no batch is padded, so that all numbers are eager's very bits."""
        return self.front_end in EXACT or (self.sizes == ALL_SIZES and not FRONT_ENDS[self.front_end].captures_ahead)


@st.composite
def programs(draw: Callable[..., Any]) -> Program:
    """Programs of one to four cases; most of them write nothing, so that graphs serve."""
    front_end = draw(st.sampled_from(["graphed"] * 5 + [*FRONT_ENDS]))
    pieces = front_end in PIECES and draw(st.integers(0, 3)) == 0
    ways = st.sampled_from([way for way in WAYS if way != "graphs of its own" and (pieces or way not in PIECEWISE)])
    writes = draw(st.integers(0, 4)) == 0
    cases = st.sampled_from([*(CASES if writes else READS | KEPT | MIXED)])
    rows = st.sampled_from([0] * 9 + [*ALL_SIZES])
    uses = tuple(
        Use(name, draw(ways), draw(rows)) for name in draw(st.lists(cases, min_size=1, max_size=4, unique=True))
    )
    options = draw(st.lists(st.sampled_from(_options(front_end, uses)), max_size=2, unique_by=lambda one: one[0]))
    sizes = draw(st.sampled_from([(4,), (2, 4), (1, 2, 4), (3, 5), (5,), ALL_SIZES]))
    steps = tuple(draw(_steps(front_end)))
    mode = "PIECEWISE" if pieces else "FULL"
    taken = IN_ONE_PLACE.intersection(use.way for use in uses)  # again, the program would call itself
    return Program(uses, steps, front_end, draw(ways.filter(lambda way: way not in taken)), sizes, mode, tuple(options))


def _options(front_end: str, uses: tuple[Use, ...]) -> list[tuple[str, Any]]:
    """The options that a program may have."""
    options: list[tuple[str, Any]] = [
        ("verify_every", 1),
        ("verify_every", 3),
        ("outputs", "view"),
        ("outputs", "static"),
    ]
    if not any(use.rows for use in uses):  # nothing else finds such a branch
        options += [("verify", False)]
    if front_end == "graphed":
        options += [("max_cached_graphs", 1), ("max_cached_graphs", 2), ("capture_after", 2)]
    return options


@st.composite
def _steps(draw: Callable[..., Any], front_end: str) -> list[Step]:
    """Calls of few sizes, in runs with changes between them."""
    ahead = FRONT_ENDS[front_end].captures_ahead
    common = draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
    rows = st.sampled_from([*common * 5, *ALL_SIZES])
    others = st.booleans() if not ahead and draw(st.integers(0, 6)) == 0 else st.just(False)
    call = st.builds(Step, st.just("call"), rows, others)
    between = ["change"] * 8 + (["renew"] * 2 if ahead else ["manage", "prewarm"] if front_end == "graphed" else [])
    change = st.builds(Step, st.sampled_from(between), st.integers(1, 5))
    steps = [Step("prepare", size) for size in (*common, 5)] if ahead else []
    for _ in range(draw(st.integers(2, 5))):
        steps += draw(st.lists(call, min_size=2, max_size=6))
        steps += draw(st.lists(change, min_size=1, max_size=2))
    return steps + draw(st.lists(call, min_size=2, max_size=6))


def gated(fn: Any, rows: int) -> Any:
    """A callable that reaches another one for some batches alone."""
    return (lambda x: fn(x) if len(x) == rows else x * 7) if rows else fn


def settings() -> list[Any]:
    """What a run must leave as eager calls do, besides the state of the cases."""
    _, numbers, *place = np.random.get_state()
    drawn = (random.getstate(), numbers.tobytes(), place, torch.get_rng_state().numpy().tobytes())
    return [hash(str(drawn)), torch.get_default_dtype()]


class Run:
    """One run of a program, eagerly or behind its front end."""

    def __init__(self, program: Program, *, is_served: bool) -> None:
        self.program = program
        self.made: list[Made] = [CASES[use.name].make() for use in program.uses]
        parts = [gated(WAYS[use.way](one.fn), use.rows) for use, one in zip(program.uses, self.made, strict=True)]
        whole = WAYS[program.way](lambda x: [part(x) for part in parts])
        self.callables: list[Any] = [whole, lambda x: [part(x * 0.5) for part in parts]]
        self.front_ends: list[FrontEnd] = []
        if is_served:
            opening = partial(FRONT_ENDS[program.front_end], dynamic={"x": 0}, sizes=program.sizes, mode=program.mode)
            known = {name: value for name, value in program.options if name in CUDAGraphOptions.model_fields}
            more = {name: value for name, value in program.options if name not in known}
            options = CUDAGraphOptions(**known, gc_disable=False)
            self.front_ends = [opening(fn, options=options, **more) for fn in self.callables]
            self.callables = [*self.front_ends]
        self.keeps = "outputs" not in dict(program.options)

    def states(self) -> list[Any]:
        """What each case that writes says of its state."""
        return [made.tell() for made in self.made]

    def steps(self) -> Iterator[tuple[Step, Any, list[Any], list[Any]]]:
        """The steps in turn, with what comes of each: answer or error, state, and settings."""
        for number, step in enumerate(self.program.steps):
            yield step, self.outcome(number, step), self.states(), settings()

    def outcome(self, number: int, step: Step) -> Any:
        """The answer of a call, or the kind of its error."""
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(step.number, 3, generator=generator, dtype=torch.float32)
        try:
            if step.kind == "call":
                return self.called(step, x)
            if step.kind == "change":
                self.made[step.number % len(self.made)].change()
            elif self.front_ends:
                with suppress(GraphDispatchError):  # a capture ahead may be refused
                    self.manage(step, number, x)
        except Exception as error:  # the program's own, if eager calls raise it, too
            return type(error)
        return None

    def called(self, step: Step, x: Tensor) -> Any:
        """The answer of a call; where the front end reuses its memory, a copy."""
        answer = self.callables[step.is_other](x)
        if isinstance(answer, OutputView):
            answer = answer.get()
        return answer if self.keeps else torch.utils._pytree.tree_map(torch.clone, answer)

    def manage(self, step: Step, number: int, x: Tensor) -> None:
        """Do to the graphs what a step says."""
        (front_end, *_) = self.front_ends
        if step.kind in ("prepare", "renew"):
            getattr(front_end, step.kind)(x)
        elif step.kind == "prewarm":
            front_end.front.prewarm(x)
        else:
            for how in MANAGED[number % len(MANAGED)]:
                getattr(front_end.front, how)(*(["a test"] if how in ("invalidate", "sleep") else []))

    def close(self) -> None:
        """Release its graphs."""
        for front_end in self.front_ends:
            front_end.close()


def run(program: Program, *, is_served: bool) -> list[Any]:
    """What comes of each step of a program; answers that are kept are seen as they are at the end."""
    with put_back():
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(7)
        one = Run(program, is_served=is_served)
        try:
            return list(one.steps())
        finally:
            one.close()


def check(program: Program) -> None:
    """A program behind its front end is eager's in every step, up to an error of its own."""
    near = {} if program.is_exact else {"rtol": 1e-4, "atol": 1e-4}
    served, eager = (run(program, is_served=is_served) for is_served in (True, False))
    for number, (got, want) in enumerate(zip(served, eager, strict=True)):
        assert repr(got[2:]) == repr(want[2:]), f"the state after step {number}"
        if isinstance(want[1], type):
            assert got[1] is want[1]
        else:
            assert_same(got[1], want[1], f"step {number}", **near)


ALL_STEPS = tuple(Step(kind, 4 - place % 2) for place, kind in enumerate(["call"] * 4 + ["change"] + ["call"] * 4))


@pytest.mark.parametrize("name", MIXED)
def test_what_is_read_and_written_is_eagers(name: str) -> None:
    """Each case of state that a call reads and writes, alone, before and after a change."""
    check(Program((Use(name),), ALL_STEPS))


@given(program=programs())
def test_random_programs_are_eagers(program: Program) -> None:
    """Programs of several cases, through a random front end with random options."""
    check(program)
