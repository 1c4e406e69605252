"""Times calls side by side: the sides take turns, so that what disturbs the machine disturbs them alike."""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any, NamedTuple

from graphdispatch import Graphed

__all__ = ["Effort", "Row", "Seconds", "compared", "in_python", "interleaved", "row"]

_TURN_SECONDS = 0.001  # a turn of one side lasts about this long, short beside the slices that a system hands out


@dataclass(frozen=True)
class Effort:
    """How much to measure: turns of each side, captures of each size, and traces to simulate (none: generated ones)."""

    turns: int = 101
    captures: int = 3
    traces: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Row:
    """One line of the table: what a case takes, in ``unit``, and what it is compared with takes (None: nothing)."""

    case: str
    value: float
    base: float | None = None
    unit: str = "us"
    least: float | None = None
    base_least: float | None = None
    """The shortest turns, where ``value`` and ``base`` are medians."""

    @property
    def extra(self) -> float | None:
        """How much more the case takes."""
        return None if self.base is None else self.value - self.base

    @property
    def speedup(self) -> float | None:
        """How many times less the case takes than what it is compared with."""
        return None if self.base is None else self.base / self.value if self.value else math.inf


class Seconds(NamedTuple):
    """What one call takes: the median of its turns, and the shortest of them."""

    median: float
    least: float


def interleaved(sides: Sequence[Callable[[], object]], turns: int) -> list[Seconds]:
    """Seconds of processor that one call of each side takes, over ``turns`` turns, the garbage collector off."""
    calls = [_calls_in_a_turn(side) for side in sides]
    times: list[list[float]] = [[] for _ in sides]
    was_on = gc.isenabled()
    gc.disable()
    try:
        for _ in range(turns):
            for side, count, kept in zip(sides, calls, times, strict=True):
                kept.append(_seconds(side, count) / count)
    finally:
        if was_on:
            gc.enable()
    return [Seconds(median(kept), min(kept)) for kept in times]


def compared(case: str, took: Seconds, base: Seconds, calls: int = 1) -> Row:
    """The line for what one of so many calls takes, beside another's."""
    figures = [seconds / calls * 1e6 for seconds in (*took, *base)]
    return Row(case, figures[0], figures[2], least=figures[1], base_least=figures[3])


def in_python(step: Graphed[..., Any]) -> Callable[..., Any]:
    """A served callable whose calls are served in Python, as where there is no core."""
    server, route = step._server, step._route
    return lambda *args, **kwargs: server.serve_in_python(route, args, kwargs)


def row(case: str, call: Callable[[], object], base: Callable[[], object], turns: int) -> Row:
    """The line for a call compared with another one."""
    return compared(case, *interleaved([call, base], turns))


def _calls_in_a_turn(side: Callable[[], object]) -> int:
    once = min(_seconds(side, 1) for _ in range(3))
    return max(1, int(_TURN_SECONDS / once))


def _seconds(side: Callable[[], object], count: int) -> float:
    side()  # so that no side pays for the caches that another one filled
    start = thread_time()
    for _ in range(count):
        side()
    return thread_time() - start
