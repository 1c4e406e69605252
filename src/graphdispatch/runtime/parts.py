"""A batch above the largest size: several graphs serve it, each some of its rows, and their outputs are put together.

The times of the graphs say what it takes in parts. Where eager is about as fast, it is not served so.

That is safe where rows are proven to be independent, of each other and of their places in the batch, where a run
speaks for the whole batch, too, and where the graphs write nothing: then each row is what eager gives for it. Outputs
without rows depend on none, and are the same in all parts.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..showing import milliseconds
from ..sizes import lengths_of, pack
from ..stats import COUNTED_BY_HITS, CUDAGraphStats, HitCounts
from .decide import Decision
from .entry import CUDAGraphEntry
from .replay import count_hit

if TYPE_CHECKING:
    from .group import GraphGroup

MOST_PARTS = 8
"""A batch is served in so many parts at most."""
_A_PART_MS = 0.02
"""What each part takes besides its replay, in milliseconds: arguments are cut, and outputs put together."""
_MOST_OF_EAGER, _LEAST_GAIN_MS = 0.9, 0.1
"""Parts must take so much less than eager. Few runs were timed, with warm caches; and a single short run may take as
much longer than another."""


class Part(NamedTuple):
    """Some rows of a batch, and the graph that serves them."""

    entry: CUDAGraphEntry
    first: int
    rows: int
    """The number of their batch, with its lengths."""


class Parts:
    """The parts of a batch of a group, in order: what a hit in parts executes, as a ``ReplayPlan`` is for one graph.

    Args:
        group: The group of the call.
        rows: The number of the batch.
        parts: All parts.
    """

    native = None
    """The core has no such replay; it leaves the call to ``serve_in_python``."""

    def __init__(self, group: "GraphGroup", rows: int, parts: Sequence[Part]) -> None:
        self.rows, self.parts, self._specs = rows, tuple(parts), group.inputs.specs
        self._axis, lengths = group.inputs.axes[0], lengths_of(group.inputs.axes, parts[0].rows)[1:]
        self.entry = parts[0].entry
        """The graph of the first part."""
        self._checks = [check for part in parts if (check := part.entry.per_call(part.rows)) is not None]
        guards = {part.entry.guard for part in parts} - {self.entry.guard}
        self._guards = [guard for guard in guards if guard is not None]
        computed = sum(self._axis.of(part.entry.size) for part in parts)
        self.decision = Decision(
            self.entry.mode,
            self.entry.descriptor,
            pack(group.inputs.axes, (computed, *lengths)),
            Reason.IN_PARTS,
            rows,
            self.text,
        )

    @property
    def text(self) -> str:
        """The parts in words."""
        return f"in parts of {', '.join(str(self._axis.of(part.rows)) for part in self.parts)}"

    def may_serve(self, values: Sequence[Any]) -> bool:
        """What is looked at in each call, besides the guard and the modes of its first graph."""
        for guard in self._guards:
            if not guard.holds() or (torch.is_grad_enabled() and guard.trainable):
                return False
        return all(check(values) for check in self._checks)

    def may_hit(self, values: Sequence[Any]) -> bool:
        """The same of a hit, before which nothing is compared."""
        return not any(part.entry.is_due_again for part in self.parts) and self.may_serve(values)

    def due(self, values: Sequence[Any]) -> Iterator[tuple[Part, Sequence[Any]]]:
        """The parts whose graphs are to be compared with eager again, with their values."""
        return ((part, self._cut(values, part)) for part in self.parts if part.entry.is_due_again)

    def clash(self, values: Sequence[Any]) -> None:
        """As of ``ReplayPlan``: nothing, since the graphs write nothing of others."""

    def run(self, values: Sequence[Any], stats: CUDAGraphStats) -> Any:
        """The outputs of the batch; counts it as one hit. Raises ``ReplayError``, without effects."""
        with self.entry.pool.lock:
            plans = [part.entry.plan(part.rows) for part in self.parts]
            answers = [plan.run(self._cut(values, part), None) for plan, part in zip(plans, self.parts, strict=True)]
            sums = {name: sum(getattr(plan.counts, name) for plan in plans) for name in COUNTED_BY_HITS}
            count_hit(stats, HitCounts(**sums | {"hits": 1}))
        return self.entry.outputs.joined(answers, self._axis)

    def _cut(self, values: Sequence[Any], part: Part) -> list[Any]:
        cut = list(values)
        for spec in self._specs:
            for dim, _ in (span for span in spec.spans if span[1] is self._axis):
                cut[spec.position] = cut[spec.position].narrow(dim, part.first, self._axis.of(part.rows))
        return cut


def find_parts(group: "GraphGroup", rows: int) -> Parts | str:
    """The parts in which a batch above the largest size is served: full ones, and the rest; or why it is not.

    Args:
        group: The group of the call.
        rows: The number of the batch.
    """
    table, gain, axes = group.route.table, group.gain, group.inputs.axes
    if not group.route.serves_parts:
        return ""
    own, largest = lengths_of(axes, rows), lengths_of(axes, table.largest)
    if own[0] > MOST_PARTS * largest[0] or own[1:] > largest[1:]:
        return f"more than {MOST_PARTS} of them, or longer than the longest"
    parts = _parts_of(group, own, largest[0])
    if isinstance(parts, str):
        return parts
    if why := next(filter(None, (_objection(part.entry, rows, part.rows) for part in parts)), ""):
        return why
    found = Parts(group, rows, parts)
    # A larger batch takes at least what the largest graph's takes, until three eager runs of it were timed.
    like = table.largest if gain is not None and not gain.times.is_sure(rows) else rows
    eager_s = gain.times.expected_s(like) if gain is not None else None
    ms = sum(part.entry.replay_ms + _A_PART_MS for part in parts)  # infinite if a replay of one was never timed
    if eager_s is None or ms == math.inf or ms <= min(_MOST_OF_EAGER * eager_s * 1e3, eager_s * 1e3 - _LEAST_GAIN_MS):
        return found
    return f"{found.text} it takes {milliseconds(ms)}, and an eager run {milliseconds(eager_s * 1e3)}"


def _parts_of(group: "GraphGroup", lengths: Sequence[int], most: int) -> list[Part] | str:
    """The parts of a batch, of ``most`` rows each but for the last one; or why there are none."""
    parts, axes = list[Part](), group.inputs.axes
    for first in range(0, lengths[0], most):
        count = min(most, lengths[0] - first)
        part = pack(axes, (count, *lengths[1:]))
        # The graph of a single row may be of a path of its own, on which nothing is shown of others.
        entry = group.current(group.decide(pack(axes, (max(count, 2), *lengths[1:]))).size)
        if entry is None:
            return f"no graph is there for {part} rows"
        if parts and entry.default_device != parts[0].entry.default_device:
            return "its graphs were captured under other default devices"
        parts.append(Part(entry, first, part))
    return parts


def _objection(entry: CUDAGraphEntry, rows: int, part: int) -> str:
    """Why a graph may not serve a part of a batch; empty if it may."""
    if entry.mode is not CUDAGraphMode.FULL or entry.writes_outside or entry.mutated or entry.uses_rng:
        return "its graph writes state or arguments, draws random numbers, or has breaks"
    return entry.licence.against_parts(entry, rows, part) or entry.outputs.against_joining(entry.inputs.axes[0])
