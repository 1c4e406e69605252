"""What graphs of some sizes will cost in memory, before they are captured, and capturing within a budget.

The two largest sizes are captured in a pool of their own, measured, and thrown away. The largest gives the pool and
the static inputs, which the others share; the second gives what one more size adds to them. From both follows what
each of the rest adds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import CaptureError, ConfigError
from ..memory.accounting import EntryMemory, MemoryReport
from .graphs import GraphSet
from .group import GraphGroup

__all__ = ["BudgetedCapture", "MemoryEstimate", "SizeEstimate", "estimate_memory"]


class SizeEstimate(NamedTuple):
    """Bytes that one size adds, and the least and most that are consistent with what was measured."""

    expected: int
    low: int
    high: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that graphs of ``per_size``, captured largest first, will hold; ``total`` is comparable with
    ``MemoryReport.total``. The two largest sizes are measured, the others follow from them."""

    fixed_bytes: int
    """Static inputs and output rings, which are made for the largest number of rows whichever sizes are captured."""
    pool_bytes: int
    """The pool with the largest size alone in it."""
    per_size: Mapping[int, SizeEstimate]
    """What each size adds to that, from the largest to the smallest."""

    @property
    def total(self) -> int:
        """What is expected for all sizes."""
        return self.fixed_bytes + self.pool_bytes + sum(one.expected for one in self.per_size.values())

    @property
    def low(self) -> int:
        """The least for all sizes."""
        return self.fixed_bytes + self.pool_bytes + sum(one.low for one in self.per_size.values())

    @property
    def high(self) -> int:
        """The most for all sizes."""
        return self.fixed_bytes + self.pool_bytes + sum(one.high for one in self.per_size.values())

    def alone(self, size: int) -> int:
        """Bytes held if ``size`` is the largest that is captured and no other is yet."""
        return self.fixed_bytes + self.pool_bytes * size // max(self.per_size) + self.per_size[size].expected

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return {
            "total": self.total,
            "low": self.low,
            "high": self.high,
            "fixed_bytes": self.fixed_bytes,
            "pool_bytes": self.pool_bytes,
            "per_size": {size: one._asdict() for size, one in self.per_size.items()},
        }


def estimate_memory(
    graphs: GraphSet,
    group: GraphGroup,
    values: Sequence[Any],
    sizes: Sequence[int],
) -> MemoryEstimate:
    """Capture the two largest of ``sizes`` on trial, from an example call's values, and throw them away.

    What the runs write is put back, the pool is released, and nothing is counted or cached: all that stays is what
    the callable's first run leaves in any case (lazy initialisation). Call it with ``graphs.lock`` held.

    Raises ``ConfigError`` without sizes, and ``CaptureError`` with its reason for a size that cannot be captured.
    """
    ordered = sorted(set(sizes), reverse=True)
    if not ordered or ordered[-1] < 1:
        raise ConfigError(f"sizes must be one or more sizes of at least 1 row, got {list(sizes)}")
    trial, twin = graphs.trial(group)
    reports: list[MemoryReport] = []
    try:
        for size in ordered[:2]:
            example = group.resized(values, size)
            outcome = trial.capture(twin, example, size, size, keep_effects=False)
            if outcome.entry is None:
                raise CaptureError(f"no graph of {size} rows, so no estimate: {outcome.detail}", outcome.reason)
            reports.append(trial.memory_report())
    finally:
        trial.clear()
    return _extrapolate(ordered, reports)


def _extrapolate(sizes: list[int], reports: list[MemoryReport]) -> MemoryEstimate:
    first, last = reports[0], reports[-1]
    largest = last.entries[-1]
    per_size = {sizes[0]: _measured(largest.own + largest.driver)}
    if len(sizes) > 1:
        second, growth = last.entries[0], last.pool_bytes - first.pool_bytes
        per_size[sizes[1]] = _measured(second.own + second.driver + growth)
        per_size |= {size: _further(size, largest, second, max(growth, 0)) for size in sizes[2:]}
    return MemoryEstimate(first.input_bytes + first.ring_bytes, first.pool_bytes, per_size)


def _measured(count: int) -> SizeEstimate:
    return SizeEstimate(count, count, count)


def _further(size: int, largest: EntryMemory, second: EntryMemory, growth: int) -> SizeEstimate:
    """What a size below the two that were measured adds.

    Its own memory lies on the line through both; the true curve lies between one that grows with the rows and one
    that is constant. The driver takes as much for it as for the second: the first of all pays for what the driver does
    once. What the pool grows by is expected to follow the rows; nothing or as much as for the second is possible.
    """
    share = size / second.size
    slope = (largest.own - second.own) / (largest.size - second.size)
    line = max(second.own + slope * (size - second.size), 0)
    curves = (line, second.own * share, second.own)
    drivers = (largest.driver, second.driver)
    return SizeEstimate(
        round(line + growth * share + second.driver),
        round(min(curves) + min(drivers)),
        round(max(curves) + growth + max(drivers)),
    )


class BudgetedCapture:
    """Decides size by size, largest first, whether one more is captured within ``budget`` bytes.

    ``current_bytes`` measures what is held now (``GraphSet.memory_bytes``); what the captures so far really took
    corrects what is expected of the others. Ask ``next(size)``, and capture if it says so, before asking again.
    """

    def __init__(
        self, current_bytes: Callable[[], int], budget: int | None, estimate: MemoryEstimate | None = None
    ) -> None:
        self._current_bytes = current_bytes
        self._budget = budget
        self._estimate = estimate
        self._latest: tuple[int, int] | None = None
        self._is_first = True
        self._errors: list[int] = []
        self.taken: dict[int, int] = {}
        """The bytes that each size captured so far has added, as measured."""
        self._left_out: list[int] = []

    def next(self, size: int) -> bool:
        """Whether to capture ``size`` now: what is held and what it is expected to add are within the budget."""
        now = self._measure()
        if self._budget is not None and now + self._expected(size, now) > self._budget:
            self._left_out.append(size)
            return False
        self._latest = (size, now)
        return True

    @property
    def left_out(self) -> tuple[int, ...]:
        """The sizes for which there was no room."""
        return tuple(self._left_out)

    @property
    def expected_bytes(self) -> int:
        """Bytes that will be held when all sizes of the estimate are captured that have not been asked for yet."""
        now = self._measure()
        known = self._estimate.per_size if self._estimate is not None else {}
        rest = [size for size in known if size not in self.taken and size not in self._left_out]
        if self._is_first and rest:
            now += self._expected(rest[0], now)
            rest = rest[1:]
        return now + sum(self._added(size) for size in rest)

    def _measure(self) -> int:
        """The bytes held now; books what the latest capture has added."""
        now = self._current_bytes()
        if self._latest is not None:
            (size, before), self._latest = self._latest, None
            self.taken[size] = now - before
            if not self._is_first:
                self._errors.append(now - before - self._guess(size))
            self._is_first = False
        return now

    def _expected(self, size: int, now: int) -> int:
        """What ``size`` adds; the first one brings the pool and the inputs, as far as they are not there already."""
        if self._is_first:
            return max(self._estimate.alone(size) - now, 0) if self._estimate is not None else 0
        return self._added(size)

    def _added(self, size: int) -> int:
        correction = sum(self._errors) // len(self._errors) if self._errors else 0
        return max(self._guess(size) + correction, 0)

    def _guess(self, size: int) -> int:
        return self._estimate.per_size[size].expected if self._estimate is not None else 0

    def __repr__(self) -> str:
        return f"<BudgetedCapture {len(self.taken)} sizes taken, {len(self._left_out)} left out, budget {self._budget}>"
