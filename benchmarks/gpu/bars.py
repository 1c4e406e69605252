"""The bars: what the figures of each section must be, as data, and which of them a run's rows reach."""

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import NamedTuple

__all__ = ["BARS", "Bar", "Outcome", "Row", "Verdict", "judge"]


class Row(NamedTuple):
    """One line of a section's table: what was done, by whom, and the figures by name (the unit is in the name)."""

    case: str
    side: str
    figures: dict[str, float | str]


class Outcome(StrEnum):
    """What became of a bar. What was not measured is not reached."""

    REACHED = "reached"
    MISSED = "missed"
    NOT_MEASURED = "not measured"


class Bar(NamedTuple):
    """A figure of the rows whose case and side match the patterns; without a limit it must only be there."""

    case: str
    side: str
    figure: str
    least: float | None = None
    most: float | None = None
    aim: float | None = None
    """A better value, which the run is compared with, too; to miss it does not fail."""

    def is_reached_by(self, value: float) -> bool:
        """Whether the value is within the limits; what is not a number never is."""
        return not math.isnan(value) and _within(value, self.least, self.most)

    def reaches_aim(self, value: float) -> bool:
        """Whether the value is as good as the aim."""
        return _within(value, self.aim, None) if self.least is not None else _within(value, None, self.aim)

    def __str__(self) -> str:
        limits = "" if self.least is None else f" >= {self.least:g}"
        limits += "" if self.most is None else f" <= {self.most:g}"
        return f"{self.figure}{limits}" + (f" (aim {self.aim:g})" if self.aim is not None else "")


class Verdict(NamedTuple):
    """A bar beside what one row has; its text begins with ``bar``, the outcome and a colon."""

    outcome: Outcome
    what: str
    found: str

    def __str__(self) -> str:
        return f"bar {self.outcome}: {self.what}: {self.found}"


def judge(section: str, rows: Sequence[Row]) -> list[Verdict]:
    """What a section's rows make of its bars; a side that raised is a miss of its own."""
    verdicts = [verdict for bar in BARS[section] for verdict in _of(bar, rows)]
    for row in rows:
        if "error" in row.figures:
            verdicts.append(Verdict(Outcome.MISSED, f"{row.case}, {row.side}: no error", str(row.figures["error"])))
    return verdicts


def _of(bar: Bar, rows: Sequence[Row]) -> Iterator[Verdict]:
    """A verdict for each row with the bar's figure; one that says so, if none has it."""
    found = False
    for row in rows:
        value = row.figures.get(bar.figure)
        if fnmatchcase(row.case, bar.case) and fnmatchcase(row.side, bar.side) and isinstance(value, (int, float)):
            found = True
            reached = bar.is_reached_by(value)
            less = "" if bar.aim is None or not reached else f", the aim {_is(bar.reaches_aim(value))}"
            outcome = Outcome.REACHED if reached else Outcome.MISSED
            yield Verdict(outcome, f"{row.case}, {row.side}: {bar}", f"{value:.4g}{less}")
    if not found:
        yield Verdict(Outcome.NOT_MEASURED, f"{bar.case}, {bar.side}: {bar}", "no row")


def _is(reached: bool) -> str:
    return "reached" if reached else "not reached"


def _within(value: float, least: float | None, most: float | None) -> bool:
    return (least is None or value >= least) and (most is None or value <= most)


_FARTHEST = 2.0**-5
"""How far an answer in bf16, which has 8 bits, may be from eager's after all layers; a wrong row is farther."""
_HAND, _FULL = "hand-written loop", "graphed() FULL"
_GENERATIONS = tuple(f"{model}, batch {rows}" for model in ("1B", "8B") for rows in (1, 8))
_TRACES = ("8B, [0-9]*", "8B, batch 1, *", "1B, [0-9]*", "0.1B, [0-9]*")
_CALL = "4 inputs, 300 parameters"
_CAPTURE = "1B, 51 sizes to 512"


def _generate() -> Iterator[Bar]:
    for case in _GENERATIONS:
        is_judged = case == "1B, batch 1"
        limits = {"least": 0.75, "aim": 0.9} if is_judged else {}
        yield Bar(case, f"graphed_generation() over {_HAND}", "tokens_per_s_ratio", **limits)
        yield Bar(case, "graphed_generation()", "by_graphs", least=1.0)
        yield Bar(case, "graphed_generation()", "same_tokens", least=1.0)
        yield Bar(case, "default cache", "tokens_per_s")
    yield Bar("1B, batch 1, beside torch.compile", "static cache, compiled", "tokens_per_s")


def _decode() -> Iterator[Bar]:
    for case in _TRACES:
        yield Bar(case, _FULL, "by_graphs", least=1.0)
        yield Bar(case, f"{_FULL} over raw graphs by hand", "tokens_per_s_ratio", least=0.97)
        yield Bar(case, _FULL, "difference", most=_FARTHEST)
    yield Bar("8B, batch 1, *", f"{_FULL} over eager", "tokens_per_s_ratio", least=1.25)


def _overhead() -> Iterator[Bar]:
    yield Bar(_CALL, "graphed()", "host_us", most=14.0, aim=12.0)
    for side in ("bare replay", "bare replay, copies in and out", "tensordict CudaGraphModule"):
        yield Bar(_CALL, side, "host_us")
    yield Bar(f"{_CALL}, beside torch.compile", "torch.compile reduce-overhead", "host_us")


def _copies() -> Iterator[Bar]:
    kernel = "graphed(), two launches"
    yield Bar(_CALL, kernel, "host_us", most=14.0, aim=12.0)
    yield Bar("random batches", kernel, "wrong", most=0.0)
    yield Bar("random batches", kernel, "cases", least=100.0)
    for side in ("graphed()", "bare replay", "bare replay, copies in and out", "new tensor for the output"):
        yield Bar(_CALL, side, "host_us")
    for side in ("graphed()", kernel):
        yield Bar(f"{_CALL}, each second batch padded", side, "host_us")


BARS: Mapping[str, tuple[Bar, ...]] = {
    "generate": tuple(_generate()),
    "decode": tuple(_decode()),
    "compiled": (
        Bar("*", "graphed(), compiled", "by_graphs", least=1.0),
        Bar("*", "graphed(), compiled", "difference", most=_FARTHEST),
        Bar("*", "graphed(), compiled over compiled", "tokens_per_s_ratio", least=1.0),
        Bar("*", "reduce-overhead", "tokens_per_s"),
    ),
    "capture": (
        Bar(_CAPTURE, "graphed().prewarm over torch's graphs in a loop", "seconds_ratio", most=2.5, aim=1.5),
        Bar(f"{_CAPTURE}, then batches of 512 sizes", "graphed()", "by_graphs", least=1.0),
        Bar(f"{_CAPTURE}, then batches of 512 sizes", "graphed()", "comparisons", most=0.0),
    ),
    "overhead": tuple(_overhead()),
    "copies": tuple(_copies()),
    "fields": (Bar("*", "graphed()", "difference", most=_FARTHEST),),
    "adaptive": (Bar("*", "adaptive", "over_oracle"),),
}
"""The bars of each section, on a GPU and with its full sizes."""
