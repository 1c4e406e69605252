"""Cost curves: what a step costs by size in one mode, how sure that is, and what it costs between measured sizes."""

from bisect import bisect_left
from collections.abc import Iterable
from math import exp, hypot, log, sqrt
from typing import Annotated, NamedTuple

from pydantic import Field

__all__ = ["CellState", "CostCurve", "Estimate", "bucket_of"]

# All spreads and errors are relative to the mean, since timing noise grows with what is timed.
_PRIOR_SPREAD = 0.2  # assumed of a mode before it has been measured a few times,
_PRIOR_WEIGHT = 3.0  # with the weight of this many records
_PRIOR2 = _PRIOR_WEIGHT * _PRIOR_SPREAD**2
_CLIP = 4.0  # a record counts for at most this many spreads from the mean: one stall must not turn a decision
_MIN_SPREAD = 0.01
# A drift is found by a two-sided cumulated sum of deviations; the mean then restarts from the latest records.
_DRIFT_SLACK = 1.0
_DRIFT_ALARM = 12.0
_DRIFT_FAST = 0.3
_DRIFT_WEIGHT = 3.0
# An estimate that nothing has confirmed for this many records of any kind is uncertain by _STALE_ERROR more.
_STALE_AGE = 1000.0
_STALE_ERROR = 0.15
_STALENESS2 = _STALE_ERROR**2 / _STALE_AGE  # what an estimate's squared error grows by with each record since
# Cost grows with size by a power between 0 (bound by launches) and 1 (bound by work): the guess is the middle.
_POWER = 0.5
_NEIGHBOUR_ERROR = 0.05
_POWER_ERROR = 0.3
_NEIGHBOURS = 2


class Estimate(NamedTuple):
    """A cost in milliseconds, and its standard error as a share of it; age and distance are in the error."""

    mean: float
    error: float

    def beats(self, other: "Estimate", confidence: float) -> bool:
        """Whether this cost is lower than ``other`` by more than ``confidence`` standard errors of their ratio."""
        return log(other.mean / self.mean) > confidence * hypot(self.error, other.error)

    @property
    def hopeful(self) -> float:
        """The lowest cost in milliseconds that two standard errors allow."""
        return self.mean * (1 - 2 * self.error)


CellState = tuple[
    Annotated[int, Field(ge=1)],
    Annotated[float, Field(gt=0, allow_inf_nan=False)],
    Annotated[float, Field(gt=0, allow_inf_nan=False)],
    Annotated[float, Field(ge=0, allow_inf_nan=False)],
    Annotated[float, Field(ge=0, allow_inf_nan=False)],
    Annotated[float, Field(ge=1, allow_inf_nan=False)],
    Annotated[int, Field(ge=0)],
]
"""A cell as plain data: bucket, mean size, mean cost (ms), squared relative spread and records behind it, weight of
the mean in records, time of the last record."""


def bucket_of(tokens: int) -> int:
    """The largest number of tokens that shares measurements with ``tokens``: eight buckets for each power of two.

    A bucket ends at a multiple of its width, as kernels' tiles do, so that 256 and 257 tokens never share one.
    """
    tokens = max(tokens, 1)
    shift = max(0, (tokens - 1).bit_length() - 4)
    return ((tokens - 1 >> shift) + 1) << shift


class _Cell:
    """The records of one bucket, summed up; ``published`` is replaced whole, for readers that hold no lock."""

    __slots__ = (
        "_above",
        "_below",
        "_fast",
        "_likely2",
        "mean",
        "published",
        "seen",
        "size",
        "spread2",
        "stamp",
        "weight",
    )

    def __init__(self, size: float, mean: float, spread2: float, seen: float, weight: float, stamp: int) -> None:
        self.size = size
        self.mean = mean
        self.spread2 = spread2
        self.seen = seen
        self.weight = weight
        self.stamp = stamp
        self._fast = mean
        self._above = self._below = 0.0
        self._publish()

    def add(self, size: int, latency: float, window: float, now: int) -> bool:
        """Take one record in; of a long history only about ``window`` records count, and of an old one fewer.

        True if the cost has drifted, so that the mean started again from the latest records. Called for every step:
        comparisons stand where ``min`` and ``max`` would cost a call each.
        """
        likely2, mean = self._likely2, self.mean
        drift2 = (now - self.stamp) * _STALENESS2
        total2 = likely2 + drift2
        weight = likely2 / (likely2 / self.weight + drift2) + 1
        self.weight = weight = weight if weight < window else window
        spread = sqrt(total2)
        spread = spread if spread > _MIN_SPREAD else _MIN_SPREAD
        deviation = (latency / mean - 1) / spread
        deviation = _CLIP if deviation > _CLIP else -_CLIP if deviation < -_CLIP else deviation
        change = deviation * spread
        # What a record says of the spread is its deviation less the part that drift may explain.
        self.seen = seen = self.seen + 1 if self.seen + 1 < window else window
        self.spread2 += (change * change * likely2 / total2 - self.spread2) / seen
        self.mean = mean + mean * change / weight
        self.size += (size - self.size) / weight
        self.stamp = now
        self._fast += _DRIFT_FAST * (latency - self._fast)
        above = self._above + deviation - _DRIFT_SLACK
        below = self._below - deviation - _DRIFT_SLACK
        self._above = above = above if above > 0.0 else 0.0
        self._below = below = below if below > 0.0 else 0.0
        drifted = above > _DRIFT_ALARM or below > _DRIFT_ALARM
        if drifted:
            self.mean = self._fast
            self.weight = min(weight, _DRIFT_WEIGHT)
            self._above = self._below = 0.0
        self._publish()
        return drifted

    def _publish(self) -> None:
        self._likely2 = (_PRIOR2 + self.seen * self.spread2) / (_PRIOR_WEIGHT + self.seen)
        self.published = (self.size, self.mean, self._likely2 / self.weight, self.stamp)


class CostCurve:
    """The cost of one mode over all sizes, learnt from records of some of them.

    ``at`` may be called by any thread at any time; the caller serialises ``add`` and ``forget``. Time is a count
    of records.
    """

    def __init__(self, window: float, cells: Iterable[CellState] = ()) -> None:
        self._window = window
        self._cells = {cell[0]: _Cell(*cell[1:]) for cell in cells}
        self._reindex()

    def __len__(self) -> int:
        return len(self._cells)

    @property
    def buckets(self) -> tuple[int, ...]:
        """The buckets with records, in increasing order."""
        return self._index[0]

    @property
    def stamps(self) -> list[int]:
        """When each cell had its last record, in no order."""
        return [cell.stamp for cell in self._cells.values()]

    def add(self, bucket: int, size: int, latency: float, now: int) -> bool:
        """Take in one record of ``latency`` milliseconds at ``size`` tokens, which belongs to ``bucket``.

        True if what was known of the bucket no longer holds: it is its first record, or its cost has drifted.
        """
        cell = self._cells.get(bucket)
        if cell is not None:
            return cell.add(size, latency, self._window, now)
        self._cells[bucket] = _Cell(size, latency, 0.0, 0.0, 1.0, now)
        self._reindex()
        return True

    def forget(self, stamp: int) -> None:
        """Drop the cells without a record since ``stamp``, counting that one out."""
        self._cells = {bucket: cell for bucket, cell in self._cells.items() if cell.stamp > stamp}
        self._reindex()

    def at(self, bucket: int, size: int, now: int) -> Estimate | None:
        """The cost at ``size`` tokens, from its own bucket and its neighbours; None before the first record."""
        buckets, cells = self._index
        if not buckets:
            return None
        middle = bisect_left(buckets, bucket)
        first, last = max(0, middle - _NEIGHBOURS), middle + _NEIGHBOURS + 1
        own_weight = own_log = around_weight = around_log = best = 0.0
        for near, cell in zip(buckets[first:last], cells[first:last], strict=True):
            at, mean, error2, stamp = cell.published
            if now > stamp:
                error2 += (now - stamp) * _STALENESS2
            if near == bucket:
                own_weight = 1 / error2
                own_log = own_weight * log(mean)
                continue
            apart = log(size / at)
            error = _NEIGHBOUR_ERROR + _POWER_ERROR * (apart if apart > 0 else -apart)
            weight = 1 / (error2 + error * error)
            around_weight += weight
            around_log += weight * (log(mean) + _POWER * apart)
            best = weight if weight > best else best
        if around_weight:
            # Neighbours err together, so that several are worth no more than the best of them.
            own_log += best * around_log / around_weight
            own_weight += best
        return Estimate(exp(own_log / own_weight), sqrt(1 / own_weight))

    def to_list(self) -> list[CellState]:
        """The cells as plain data, in order of size; the constructor takes them back."""
        return [
            (bucket, cell.size, cell.mean, cell.spread2, cell.seen, cell.weight, cell.stamp)
            for bucket, cell in sorted(self._cells.items())
        ]

    def _reindex(self) -> None:
        buckets = tuple(sorted(self._cells))
        self._index = (buckets, tuple(self._cells[bucket] for bucket in buckets))
