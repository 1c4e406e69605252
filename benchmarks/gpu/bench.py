"""What a section is given and gives back, and how calls are timed: sides take turns, inputs rotate, medians count."""

import csv
import gc
import gzip
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from graphdispatch.backends import Backend, get_backend
from graphdispatch.demo import generate_trace
from graphdispatch.reasons import Reason
from graphdispatch.stats import CUDAGraphStats

from .bars import Row

if TYPE_CHECKING:  # it needs transformers
    from graphdispatch.integrations.transformers import GenerationStats

__all__ = [
    "Bench",
    "Call",
    "Figures",
    "Row",
    "Served",
    "Timing",
    "by_graphs",
    "difference",
    "interleaved",
    "latencies",
    "percentile",
    "served",
]

Call = Callable[[], object]
Figures = dict[str, float | str]
T = TypeVar("T")
_TURN_SECONDS = 0.002
_MOST_CALLS = 20
"""A stream queues about a thousand kernels before a launch waits for the device, and so many calls of few kernels are
below that: the graphs' own kernels count as well."""


@dataclass(frozen=True)
class Bench:
    """The device, how much to do, and until when; a section hands each row to ``emit`` as soon as it has it."""

    device: torch.device
    quick: bool
    compiles: bool
    trace: Path | None
    deadline: float
    emit: Callable[[Row], None]

    @property
    def backend(self) -> Backend:
        """The device's backend."""
        return get_backend(self.device.type, self.device)

    @property
    def turns(self) -> int:
        """How often each side is timed."""
        return 3 if self.quick else 51

    @property
    def dtype(self) -> torch.dtype:
        """What models compute in."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def attempt(self, case: str, side: str, make: Callable[[], T]) -> T | None:
        """What ``make`` gives; if it raises, the error becomes the side's row, and the others go on."""
        try:
            return make()
        except Exception as error:
            text = (str(error).splitlines() or [""])[0].replace("|", "/")
            self.emit(Row(case, side, {"error": f"{type(error).__name__}: {text[:200]}"}))
            return None

    def has_time(self, seconds: float = 0.0, case: str = "") -> bool:
        """Whether ``seconds`` are left before the section's end; if not, a row says that the case is left out."""
        is_left = time.monotonic() + seconds < self.deadline
        if case and not is_left:
            self.emit(Row(case, "all", {"left_out": "no time"}))
        return is_left

    def requests(self, count: int) -> list[int]:
        """How many requests each step has: steps of the trace that was given, or of a generated one, from all of it."""
        if self.trace is None:
            found = [step.num_reqs for step in generate_trace(4000, 64, seed=1, window=256)]
        else:
            with gzip.open(self.trace, "rt") if self.trace.suffix == ".gz" else self.trace.open() as file:
                found = [int(row["num_reqs"]) for row in csv.DictReader(file)]
        return found[:: max(1, len(found) // count)][:count]

    def synchronize(self) -> None:
        """Wait for the device."""
        self.backend.synchronize()

    def empty_cache(self) -> None:
        """Give what is no longer used back to the device, cycles of objects included."""
        gc.collect()
        self.synchronize()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()


class Timing(NamedTuple):
    """Microseconds of a call: on the calling thread, from start to end on the device, and the quartiles of the latter.

    On a CPU both are one.
    """

    host_us: float
    device_us: float
    low_us: float
    high_us: float

    def figures(self) -> Figures:
        """As a row's figures."""
        return self._asdict()


@contextmanager
def _quiet_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def interleaved(bench: Bench, sides: Mapping[str, Sequence[Call]]) -> dict[str, Timing]:
    """Time each side's calls (the same work on different inputs), all sides in turns; the order rotates."""
    names = list(sides)
    counts = {name: _calls_in_a_turn(bench, sides[name]) for name in names}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with _quiet_collector():
        for turn in range(bench.turns):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                taken[name].append(_turn(bench, sides[name], counts[name]))
    return {name: _summary(times) for name, times in taken.items()}


def latencies(bench: Bench, sides: Mapping[str, Sequence[Call]]) -> dict[str, list[float]]:
    """Seconds from each call to the end of its work, a call of every side for each step in turn; the order rotates."""
    names = list(sides)
    taken: dict[str, list[float]] = {name: [] for name in names}
    with _quiet_collector():
        for number in range(len(sides[names[0]])):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                bench.synchronize()
                start = time.perf_counter()
                sides[name][number]()
                bench.synchronize()
                taken[name].append(time.perf_counter() - start)
    return taken


class Served(NamedTuple):
    """The hits so far, and why other calls were none."""

    hits: int
    reasons: Counter[Reason]


def served(stats: "CUDAGraphStats | GenerationStats") -> Served:
    """What graphs have served by now."""
    return Served(stats.hits, stats.reasons.copy())


def by_graphs(stats: "CUDAGraphStats | GenerationStats", before: Served, calls: int) -> Figures:
    """The share that graphs served of so many calls since then; and why the others were eager."""
    now = served(stats)
    figures: Figures = {"by_graphs": (now.hits - before.hits) / calls}
    if more := now.reasons - before.reasons:
        figures["reasons"] = ", ".join(f"{reason}: {count}" for reason, count in more.items())
    return figures


def percentile(times: Sequence[float], percent: int) -> float:
    """The ``percent``-th percentile."""
    return quantiles(times, n=100, method="inclusive")[percent - 1] if len(times) > 1 else times[0]


def difference(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """The norm of the difference over the norm of what is wanted."""
    wanted = wanted.double()
    return float((wanted - got.double()).norm() / wanted.norm().clamp_min(1e-30))


def _turn(bench: Bench, calls: Sequence[Call], count: int) -> tuple[float, float]:
    calls[0]()
    bench.synchronize()
    begin, end = (bench.backend.make_event(timing=True) for _ in range(2))
    begin.record(bench.backend.current_stream())
    start = time.perf_counter()
    for number in range(count):
        calls[number % len(calls)]()
    host = time.perf_counter() - start
    end.record(bench.backend.current_stream())
    end.synchronize()
    return host / count, begin.elapsed_time(end) / 1e3 / count


def _calls_in_a_turn(bench: Bench, calls: Sequence[Call]) -> int:
    for call in calls:
        call()
    once = min(max(_turn(bench, calls, 1)) for _ in range(3))
    return max(1, min(_MOST_CALLS, int(_TURN_SECONDS / once)))


def _summary(times: Sequence[tuple[float, float]]) -> Timing:
    device = [1e6 * seconds for _, seconds in times]
    low, _, high = quantiles(device, n=4, method="inclusive")
    return Timing(1e6 * median(seconds for seconds, _ in times), median(device), low, high)
