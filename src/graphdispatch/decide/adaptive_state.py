"""What an adaptive policy learnt: its places with their orders of preference, and all of it as validated plain data."""

from collections.abc import Mapping
from math import inf
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from ..modes import DispatchMode
from ..plan.storage import parse_document
from .estimates import CellState, CostCurve, Estimate

__all__ = ["GRAPHS", "MODES", "Place", "PolicyState", "Standing", "parse_state"]

GRAPHS = (DispatchMode.CUDAGRAPH, DispatchMode.PIECEWISE)
MODES = (*GRAPHS, DispatchMode.EAGER)
"""The modes that a step runs in; in this order until measurements say otherwise."""

_CONFIDENCE = 1.0  # standard errors by which a mode must be faster to take another's place, at a review
_REVIEW_GAP = 16  # sightings of a place between two reviews of its order, at most


class Place(NamedTuple):
    """Batches that share one choice: the same kind, the same graph, about the same number of tokens."""

    prefill: bool
    graph_size: int
    bucket: int


class Standing:
    """What is remembered of a place: the order of preference, its sightings, and the probe under way.

    ``curves`` are those of the place's kind of batch, by mode as in ``MODES``; ``stamp`` is the record that came last,
    ``version`` the state of the news by which the order was made. After ``due`` sightings the order is reviewed; the
    next review is twice as far away each time that there was nothing new.
    """

    __slots__ = ("_gap", "curves", "due", "next_probe", "order", "place", "probing", "sightings", "stamp", "version")

    def __init__(
        self, place: Place, curves: tuple[CostCurve, ...], order: tuple[DispatchMode, ...] = MODES, sightings: int = 0
    ) -> None:
        self.place = place
        self.curves = curves
        self.order = order
        self.sightings = sightings
        self.stamp = 0
        self.version = -1
        self.due: float = sightings
        self._gap = 1
        self.next_probe = 0
        self.probing: DispatchMode | None = None

    def estimates(self, tokens: int, now: int) -> dict[DispatchMode, Estimate]:
        """What a batch of ``tokens`` costs here in each measured mode; a graph's cost is that of its own size."""
        _, size, bucket = self.place
        full, piecewise, eager = self.curves
        at = (full.at(size, size, now), piecewise.at(size, size, now), eager.at(bucket, max(1, tokens), now))
        return {mode: estimate for mode, estimate in zip(MODES, at, strict=True) if estimate is not None}

    def ranked(self, found: Mapping[DispatchMode, Estimate]) -> tuple[DispatchMode, ...]:
        """The order, changed where estimates contradict it for sure; modes without any stay just before eager.

        A place without earlier records has no order worth defending: the better guess is enough.
        """
        confidence = _CONFIDENCE if self.sightings else 0.0
        known: list[DispatchMode] = []
        for mode in self.order:
            if mode not in found:
                continue
            spot = len(known)
            while spot and found[mode].beats(found[known[spot - 1]], confidence):
                spot -= 1
            known.insert(spot, mode)
        unknown = [mode for mode in MODES if mode not in found]
        spot = known.index(DispatchMode.EAGER) if DispatchMode.EAGER in found else len(known)
        return (*known[:spot], *unknown, *known[spot:])

    def reviewed(self, news: bool) -> None:
        """Set the next review: one sighting on after ``news``, else twice as far as the last time, at most 16."""
        self._gap = 1 if news else min(2 * self._gap, _REVIEW_GAP)
        self.due = self.sightings + self._gap


class _CurveState(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    mode: Literal["eager", "cudagraph", "piecewise"]
    prefill: bool
    cells: list[CellState]


class _PlaceState(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    prefill: bool
    graph_size: int = Field(ge=1)
    bucket: int = Field(ge=1)
    order: list[Literal["eager", "cudagraph", "piecewise"]]
    seen: int = Field(ge=0)

    @field_validator("order")
    @classmethod
    def _each_mode_once(cls, order: list[str]) -> list[str]:
        if sorted(order) != sorted(mode.value for mode in DispatchMode if mode is not DispatchMode.HYBRID):
            raise ValueError("expected each of eager, cudagraph and piecewise once")
        return order


class PolicyState(BaseModel):
    """The whole learnt state, as it is saved."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    version: Literal[1]
    history_size: int
    sizes: list[int] | None
    limits: list[int] = Field(min_length=2, max_length=2)
    exploration: float
    window: int
    records: int = Field(ge=0)
    spent_ms: float = Field(ge=0)
    explored_ms: float = Field(ge=0)
    capture_ms: float | None = Field(ge=0)
    curves: list[_CurveState]
    places: list[_PlaceState]

    @field_validator("curves")
    @classmethod
    def _of_the_past(cls, curves: list[_CurveState], info: ValidationInfo) -> list[_CurveState]:
        last = max((cell[-1] for curve in curves for cell in curve.cells), default=0)
        if last > info.data.get("records", inf):
            raise ValueError(f"expected cells from at most as many records as there were, got one from record {last}")
        return curves


def parse_state(text: str | bytes) -> PolicyState:
    """The state in JSON ``text``. Raises ``ConfigError`` that names the first value at fault."""
    return parse_document(text, PolicyState, "the saved policy", "delete it to start afresh")
