"""What a run of the demo measured: a record for each step, and figures computed from the records."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..capture.piecewise import BreakFigures
from ..modes import CUDAGraphMode
from ..reasons import Reason

__all__ = ["DemoResult", "DemoSettings", "Pieces", "StepRecord", "StepTimes"]


@dataclass(frozen=True)
class DemoSettings:
    """What to run.

    ``preset`` is the decoder's name and ``device`` is ``auto``, ``cpu`` or ``cuda``. ``seed`` sets weights and tokens.
    ``mode`` is the mode of the graphed side, ``max_size`` the largest size to capture, in rows.
    """

    preset: str = "tiny"
    device: str = "auto"
    seed: int = 0
    mode: CUDAGraphMode = CUDAGraphMode.FULL
    max_size: int = 512

    def has_graphs(self, uniform_decode: bool) -> bool:
        """Whether the mode has graphs for uniform decode steps, or for mixed steps."""
        return (self.mode.decode_mode() if uniform_decode else self.mode.mixed_mode()).has_graphs()


class StepRecord(NamedTuple):
    """What one step did. Times are in seconds.

    ``rows`` is the graph's size (0: eager). ``difference`` has the unit of the tolerance. ``mode`` is the runtime mode
    that served the step (``NONE``: eager).
    """

    num_tokens: int
    uniform_decode: bool
    reason: Reason
    rows: int
    eager_s: float
    graphed_s: float
    difference: float
    mode: CUDAGraphMode


class Pieces(NamedTuple):
    """How many graphs one replay in a mode has, and how many breaks between them."""

    graphs: int
    breaks: int


class StepTimes(NamedTuple):
    """The median or mean time of some steps, eager and graphed, in milliseconds."""

    eager_ms: float
    graphed_ms: float

    @property
    def ratio(self) -> float:
        """How many times faster the graphed side was."""
        return self.eager_ms / self.graphed_ms


@dataclass(frozen=True)
class DemoResult:
    """The record of every step, and the figures of the run."""

    settings: DemoSettings
    device: str
    dtype: str
    threads: int
    largest: int
    captures: int
    capture_time_ms: float
    tolerance: float
    records: tuple[StepRecord, ...]
    pieces: Mapping[CUDAGraphMode, Pieces]
    """The pieces of each mode that has a graph."""
    breaks: tuple[BreakFigures, ...] = ()
    """The breaks of the graphs, the longest first. Their runs include the checks of the captures."""

    @property
    def served(self) -> tuple[StepRecord, ...]:
        """The steps that a graph served."""
        return tuple(r for r in self.records if r.reason.is_graph)

    @property
    def hit_rate(self) -> float:
        """The share of steps that a graph served."""
        return len(self.served) / len(self.records)

    @property
    def padding(self) -> float:
        """Padding rows as a share of real rows, over the steps that a graph served; 0.0 if there are none."""
        real = sum(r.num_tokens for r in self.served)
        return sum(r.rows for r in self.served) / real - 1.0 if real else 0.0

    @property
    def eager_reasons(self) -> Counter[Reason]:
        """The reasons of the eager steps, with counts."""
        return Counter(r.reason for r in self.records if not r.reason.is_graph)

    @property
    def steps_by_mode(self) -> Counter[CUDAGraphMode]:
        """How many steps each runtime mode served. ``NONE`` counts the eager steps."""
        return Counter(r.mode for r in self.records)

    @property
    def missed(self) -> int:
        """The number of steps that a graph should have served, by their kind and size, but did not."""
        small = [r for r in self.records if r.num_tokens <= self.largest]
        return sum(self.settings.has_graphs(r.uniform_decode) and not r.reason.is_graph for r in small)

    @property
    def differing(self) -> int:
        """The number of steps whose output differs by more than the tolerance, or is not a number."""
        return sum(not r.difference <= self.tolerance for r in self.records)

    @property
    def largest_difference(self) -> float:
        """The largest difference of any step; NaN if any difference is NaN."""
        return max((r.difference for r in self.records), key=lambda d: (math.isnan(d), d))

    def times(
        self,
        middle: Callable[[Iterable[float]], float],
        *,
        served: bool = False,
        mode: CUDAGraphMode | None = None,
    ) -> StepTimes:
        """The ``middle`` (``statistics.median`` or ``mean``) of the step times; 0 if there are no steps.

        By default all steps count; ``served`` and ``mode`` select those that a graph, or one runtime mode, served.
        """
        records = [r for r in (self.served if served else self.records) if mode is None or r.mode is mode]
        if not records:
            return StepTimes(0.0, 0.0)
        return StepTimes(1e3 * middle([r.eager_s for r in records]), 1e3 * middle([r.graphed_s for r in records]))

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data, for JSON. A difference that is not finite becomes null."""
        worst = self.largest_difference
        return {
            "preset": self.settings.preset,
            "seed": self.settings.seed,
            "mode": self.settings.mode.name,
            "device": self.device,
            "dtype": self.dtype,
            "threads": self.threads,
            "torch": torch.__version__,
            "steps": len(self.records),
            "decode_steps": sum(r.uniform_decode for r in self.records),
            "largest_size": self.largest,
            "hit_rate": self.hit_rate,
            "padding": self.padding,
            "captures": self.captures,
            "capture_time_ms": self.capture_time_ms,
            "missed_steps": self.missed,
            "differing_steps": self.differing,
            "largest_difference": worst if math.isfinite(worst) else None,
            "tolerance": self.tolerance,
            "modes": {
                mode.name: {"steps": count, **self.pieces.get(mode, Pieces(0, 0))._asdict()}
                for mode, count in sorted(self.steps_by_mode.items(), reverse=True)
            },
            "breaks": [figures._asdict() for figures in self.breaks],
            "eager_reasons": {reason.value: count for reason, count in self.eager_reasons.items()},
            "step_time_ms": {
                f"{group}_{name}": _plain(self.times(middle, served=group == "served"))
                for group in ("all", "served")
                for name, middle in (("median", statistics.median), ("mean", statistics.fmean))
            },
        }


def _plain(times: StepTimes) -> dict[str, float | None]:
    ratio = times.ratio if times.graphed_ms else None
    return {"eager": times.eager_ms, "graphed": times.graphed_ms, "ratio": ratio}
