"""What graphs of some sizes will cost in memory, before they are captured.

The two largest sizes are captured in a pool of their own, measured, and thrown away. The largest gives the pool and
the static inputs, which the others share; the second gives what one more size adds to them. From both follows what
each of the rest adds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from sys import maxsize
from typing import Any

from ..errors import CaptureError, ConfigError
from ..memory.cache import EntryMemory, GraphCache, MemoryReport
from ..memory.inputs import StaticInputs
from .graphs import GraphSet
from .group import GraphGroup


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that graphs of ``per_size``, captured largest first, will hold; ``total`` is comparable with
    ``MemoryReport.total``. The two largest sizes are measured, the others follow from them."""

    fixed_bytes: int
    """Static inputs, which are made for the largest number of rows whichever sizes are captured."""
    pool_bytes: int
    """The pool with the largest size alone in it."""
    per_size: Mapping[int, int]
    """What each size is expected to add to that, from the largest to the smallest."""
    low: int
    """The least for all sizes that is consistent with what was measured."""
    high: int
    """The most for all sizes that is consistent with it."""

    @property
    def total(self) -> int:
        """What is expected for all sizes."""
        return self.fixed_bytes + self.pool_bytes + sum(self.per_size.values())

    def alone(self, size: int) -> int:
        """Bytes held if ``size`` is the largest that is captured and no other is yet."""
        return self.fixed_bytes + self.pool_bytes * size // max(self.per_size) + self.per_size[size]

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return {"total": self.total, **asdict(self)}


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
    trial, twin = _trial(graphs, group)
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


def _trial(graphs: GraphSet, group: GraphGroup) -> tuple[GraphSet, GraphGroup]:
    """An empty set of the same callable and options, with a pool, a cache and statistics of its own, and ``group``
    without its graphs in it."""
    trial = GraphSet(graphs.fn, graphs.options, GraphCache(maxsize), backend=graphs.backend)
    inputs = StaticInputs(group.signature.inputs, group.inputs.capacity, group.inputs.axes)
    return trial, trial.add_group(group.key, group.route, group.call, group.signature, inputs)


def _extrapolate(sizes: list[int], reports: list[MemoryReport]) -> MemoryEstimate:
    first, last = reports[0], reports[-1]
    largest, second, growth = last.entries[-1], last.entries[0], last.pool_bytes - first.pool_bytes
    added = {sizes[0]: [largest.own + largest.driver] * 3}
    if len(sizes) > 1:
        added[sizes[1]] = [second.own + second.driver + growth] * 3
        added |= {size: _further(size, largest, second, max(growth, 0)) for size in sizes[2:]}
    fixed = first.input_bytes
    _, low, high = (fixed + first.pool_bytes + sum(column) for column in zip(*added.values(), strict=True))
    return MemoryEstimate(fixed, first.pool_bytes, {size: one[0] for size, one in added.items()}, low, high)


def _further(size: int, largest: EntryMemory, second: EntryMemory, growth: int) -> list[int]:
    """What a size below the two that were measured adds: expected, at least, at most.

    Its own memory lies on the line through both; the true curve lies between one that grows with the rows and one
    that is constant. The driver takes as much for it as for the second: the first of all pays for what the driver does
    once. What the pool grows by is expected to follow the rows; nothing or as much as for the second is possible.
    """
    share = size / second.size
    slope = (largest.own - second.own) / (largest.size - second.size)
    line = max(second.own + slope * (size - second.size), 0)
    curves = (line, second.own * share, second.own)
    drivers = (largest.driver, second.driver)
    expected = line + growth * share + second.driver
    return [round(expected), round(min(curves) + min(drivers)), round(max(curves) + growth + max(drivers))]
