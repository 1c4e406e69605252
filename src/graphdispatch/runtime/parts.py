"""A batch above the largest size, served in parts: a replay for each, whose outputs are put together.

That is safe where rows are proven to be independent, of each other and of their places in the batch, where a run
speaks for the whole batch, too, and where the graphs write nothing: then each row is what eager gives for it. Outputs
without rows depend on none, and are the same in all parts. The first batch of so many parts is compared with eager, as
an alarm for a rule that is wrong, and timed beside it: parts that are not faster are not used.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..backends.operators import tensors_in
from ..errors import ReplayError
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..sizes import lengths_of, pack
from ..stats import COUNTED_BY_HITS, CUDAGraphStats, Gain, HitCounts
from .decide import Decision
from .entry import CUDAGraphEntry
from .group import GraphGroup
from .protocols import CaptureResult
from .replay import count_hit

MOST_PARTS = 8
"""A batch above the largest size is served in so many parts at most."""
_TIMED = 3
"""So many batches are timed in parts and eagerly, in turns."""


class Part(NamedTuple):
    """Some rows of a batch, and the graph that serves them."""

    entry: CUDAGraphEntry
    first: int
    rows: int
    """The number of their batch, with its lengths."""


class Parts:
    """The parts of a batch of a group, in order.

    Args:
        group: The group of the call.
        rows: The number of the batch.
        parts: All parts; the graphs share one proof.
    """

    def __init__(self, group: GraphGroup, rows: int, parts: Sequence[Part]) -> None:
        self._group, self._rows, self.parts = group, rows, tuple(parts)
        self._axis = group.inputs.axes[0]
        self.entry = parts[0].entry
        """The graph of the first part."""
        self.size = pack(
            group.inputs.axes,
            (sum(self._axis.of(part.entry.size) for part in parts), *lengths_of(group.inputs.axes, parts[0].rows)[1:]),
        )
        """The number of all rows that the graphs compute."""

    @property
    def text(self) -> str:
        """The parts in words."""
        return f"in {len(self.parts)} parts of {self._axis.of(self.parts[0].rows)}"

    @property
    def decision(self) -> Decision:
        """The decision to serve the batch so, as far as it was compared; else why it is not served so, or not yet."""
        reason, text = self.entry.licence.in_parts.get(len(self.parts), (Reason.VERIFIED_NOW, ""))
        if not reason.is_graph:
            return Decision.eager(reason, self._rows, text)
        return Decision(self.entry.mode, self.entry.descriptor, self.size, reason, self._rows, self.text)

    def run(self, values: Sequence[Any]) -> Any:
        """The outputs of the batch. Call it with the pool's lock held. Raises ``ReplayError``, without effects."""
        answers = [
            part.entry.plan(part.rows).run(self._cut(values, part), None)  # the call is counted once
            for part in self.parts
        ]
        return self.entry.outputs.joined(answers, self._axis)

    def count(self, stats: CUDAGraphStats) -> None:
        """Count the call, as one. Call it with the pool's lock held."""
        every = [part.entry.plan(part.rows).counts for part in self.parts]
        sums = {name: sum(getattr(counts, name) for counts in every) for name in COUNTED_BY_HITS}
        count_hit(stats, HitCounts(**sums | {"hits": 1}))

    def _cut(self, values: Sequence[Any], part: Part) -> list[Any]:
        cut = list(values)
        for spec in self._group.inputs.specs:
            for dim, _ in (span for span in spec.spans if span[1] is self._axis):
                cut[spec.position] = cut[spec.position].narrow(dim, part.first, self._axis.of(part.rows))
        return cut

    def compare(
        self,
        values: Sequence[Any],
        eager: Callable[[], Any],
        gap_of: Callable[[Iterable[Any], Iterable[Any], CUDAGraphEntry], str],
        clock: Callable[[], float] | None,
    ) -> CaptureResult:
        """Run the batch eagerly, which answers the call, and compare it with the parts; note in the proof what that
        shows. With a ``clock`` both are timed: parts that are slower than eager are not used."""
        answer = eager()
        with self.entry.pool.lock:
            try:
                gap = gap_of(tensors_in(answer), tensors_in(self.run(values)), self.entry)
                found = (Reason.VERIFICATION_FAILED, f"{self.text} it differs from eager: {gap}") if gap else None
                found = found or (self._loss(values, eager, clock) if clock is not None else None)
            except ReplayError as error:
                return CaptureResult(answer, None, Reason.REPLAY_FAILED, str(error))
        self.entry.licence.in_parts[len(self.parts)] = found or (Reason.IN_PARTS, "")
        return CaptureResult(answer, None if found else self.entry, *(found or (Reason.VERIFIED_NOW, "")))

    def _loss(
        self, values: Sequence[Any], eager: Callable[[], Any], clock: Callable[[], float]
    ) -> tuple[Reason, str] | None:
        """Why the parts are slower, if they are."""
        stream, times = self.entry.backend.current_stream(), list[list[float]]()
        for run in (eager, lambda: self.run(values)) * _TIMED:
            stream.synchronize()
            started = clock()
            run()
            stream.synchronize()
            times.append([clock() - started])
        eager_s, parts_s = min(times[::2])[0], min(times[1::2])[0]
        if not Gain(1e3 * eager_s, 1e3 * parts_s).is_loss:
            return None
        return Reason.NO_GAIN, f"{self.text} it takes {parts_s * 1e6:.0f} us, and an eager run {eager_s * 1e6:.0f} us"


def find_parts(group: GraphGroup, values: Sequence[Any], rows: int) -> Parts | str:
    """The parts in which graphs may serve a batch above the largest size, or why they may not.

    Args:
        group: The group of the call.
        values: The leaves of the call.
        rows: The number of the batch.
    """
    axes, table = group.inputs.axes, group.route.table
    own, largest = lengths_of(axes, rows), lengths_of(axes, table.largest)
    most = largest[0]
    if not group.signature.has_rows or own[0] > MOST_PARTS * most or own[1:] > largest[1:]:
        return f"more than {MOST_PARTS} of them, or longer than the longest" if most else "no graph has rows"
    parts: list[Part] = []
    for first in range(0, own[0], most):
        part = pack(axes, (min(most, own[0] - first), *own[1:]))
        decision = group.decide(part)
        entry = group.current(decision.size) if decision.mode.has_graphs() else None
        if entry is None:
            return f"no graph is there for {part} rows"
        if against := _objection(entry, values, rows, part):
            return against
        if parts and entry.licence.in_parts is not parts[0].entry.licence.in_parts:
            return "its graphs were not proven by one run"
        parts.append(Part(entry, first, part))
    return Parts(group, rows, parts)


def _objection(entry: CUDAGraphEntry, values: Sequence[Any], rows: int, part: int) -> str:
    """Why a graph may not serve a part of a batch; empty if it may."""
    if entry.mode is not CUDAGraphMode.FULL or entry.writes_outside or entry.mutated or entry.uses_rng:
        return "its graph writes state or arguments, draws random numbers, or has breaks"
    if against := entry.licence.against_parts(entry, rows, part) or entry.licence.misfit(values):
        return against
    if not entry.fits_modes():
        return Reason.MODE_ACTIVE.text
    return entry.outputs.against_joining(entry.inputs.axes[0])
