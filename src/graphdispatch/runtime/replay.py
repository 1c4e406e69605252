"""The replay of one graph for one number of rows, prepared: what a hit executes.

Where the rows are copied to, what is padded and how the outputs are cut is found out once, when the plan is made. Where
there is a native core, ``run`` is that of ``native/core/plan.cpp``; the one here stays the reference.
"""

from collections.abc import Sequence
from functools import partial
from itertools import count
from operator import call, itemgetter
from threading import get_ident
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

import torch

from ..backends.tracing import in_range, is_profiled
from ..errors import ReplayError
from ..modes import EntryState
from ..native import is_done_by_core
from ..native.bound import CORE, in_core
from ..stats import COUNTED_BY_HITS, MOST_ROWS, CUDAGraphStats, HitCounts
from .overlap import Spans, may_overlap_itself, share_memory
from .windows import WINDOWS, storages_of

if TYPE_CHECKING:
    from .entry import CUDAGraphEntry

ReplayStage: TypeAlias = Literal["load", "run", "take"]
"""What a replay is doing: copying rows in, running the graph, or handing the outputs out."""

next_use = count(1).__next__
"""A tick of the clock of uses: later than every use so far, of any graph. Cheaper than time, and strictly increasing
across threads."""


class ReplayPlan:
    """Copy in, replay, copy out: one graph for batches of ``rows`` rows. ``run`` is thread-safe."""

    __slots__ = ("__dict__", "native", "rows")

    def __init__(self, entry: "CUDAGraphEntry", rows: int) -> None:
        self.rows = rows
        self._entry = entry
        self._graph: Any = entry.graph
        self._pool = entry.pool
        self._size = entry.size
        real, computed = entry.inputs.cells(rows), entry.inputs.cells(entry.size)
        self.counts = HitCounts(hits=1, real_rows=real, padding_rows=computed - real)
        """What a hit adds to the counters."""
        self._load = entry.inputs.load if entry.inputs.specs else None
        is_inline = is_done_by_core(entry.pool.order_after_last_use)
        self._order = None if is_inline else entry.pool.order_after_last_use
        """What orders a replay after the pool's last use; None where each has ended when it returns."""
        self._watched = entry.inputs.positions if entry.writes_outside else ()
        self._held = Spans(entry.held) if entry.mutated else None
        self._lent = storages_of(entry.outputs.lent(entry.size)) if entry.mutated else set()
        inputs = entry.inputs if entry.inputs.specs else None
        self.native: Any = None
        """The same replay in the core, which calls Python for every unusual case; None where there is no core."""
        if CORE is not None:
            reads_watch = is_done_by_core(entry.backend.is_capturing)
            facts = entry.uses_rng, bool(entry.mutated), entry.written is not None, entry.default_device is not None
            about = self._size, self.counts, inputs, self._watched, is_inline, reads_watch, *facts
            returned = entry.outputs.for_core(rows)
            self.native = CORE.Plan(self, entry, rows, *about, *returned)
        self._ways_out = None if self.native is not None and returned else entry.outputs.ways_out(rows)
        """How Python returns the outputs; None where the core did so far."""

    def clash(self, values: Sequence[Any]) -> str | None:
        """How the arguments of a call share memory that the graph writes, so that copies would not do; or None."""
        if not self._watched:
            return None
        entry, specs = self._entry, self._entry.inputs.specs
        if entry.mutated:
            given = [values[position] for position in self._watched]
            if share_memory(given):
                return f"arguments {[spec.name for spec in specs]} share memory, and the call writes to one of them"
            is_lent = not self._lent.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in given)
            for spec, tensor in ((specs[index], given[index]) for index in entry.mutated):
                if is_lent and entry.outputs.covers(tensor, spec.position, self._size):
                    return f"the call writes to argument {spec.name!r}, which is an output of the graph itself"
                if self._held is not None and self._held.overlaps(tensor):
                    return f"the call writes to argument {spec.name!r}, and reads it as state, too"
                if may_overlap_itself(tensor):
                    return f"the call writes to argument {spec.name!r}, whose elements share memory"
        if entry.written is not None:
            for spec in specs:
                if entry.written.overlaps(values[spec.position]):
                    return f"argument {spec.name!r} is a view of memory that the call writes"
        return None

    def run_in_python(self, values: Sequence[Any] | None, stats: CUDAGraphStats | None = None) -> Any:
        """The outputs for a call whose arguments were compared; None replays on what the static inputs hold now.

        Counts the hit in ``stats``. Its parts are ranges of torch's profiler while one is on: ``copy-in``, ``replay``
        and ``copy-out``.

        Raises ``ReplayError`` if the entry was evicted meanwhile, where nothing was copied, or if the replay stopped
        half-way. After the latter the entry is ``FAILED`` until it is verified again, and ``had_effects`` tells whether
        the caller can see anything of the replay. A break's own exception passes through; so does that of an operator
        that eager would have raised at the same place, after the same writes, those to arguments among them. Raises
        ``DeviceLostError``.
        """
        entry, pool = self._entry, self._pool
        load, replay, take = self._load, self._draw if entry.uses_rng else self._graph.replay, self.take
        if is_profiled():
            load = in_range("copy-in", entry.label, load) if load is not None else None
            replay, take = in_range("replay", entry.label, replay), in_range("copy-out", entry.label, take)
        with pool.lock:
            if entry.state in (EntryState.EVICTED, EntryState.FAILED):
                raise ReplayError(f"the graph for {entry.key} was evicted, or its last replay failed; capture it again")
            if pool.replaying_on is not None:
                pool.refuse_inside_replay()
            if WINDOWS.open and entry.written is not None:
                WINDOWS.refuse(entry)
            if self._order is not None:
                self._order()
            before = entry.backend.rng_state() if entry.uses_rng else None
            stage: ReplayStage = "load"
            try:
                pool.replaying_on = get_ident()
                if values is None:
                    entry.inputs.mark_dirty()
                elif load is not None:
                    load(values, self.rows, self._size)
                stage = "run"
                replay()
                stage = "take"
                result = take(values)
            except BaseException as error:
                self.failed(error, values, stage, before)
            else:
                entry.replay_count += 1
                entry.last_used = next_use()
                if values is not None and entry.mutated:
                    entry.copy_back(values, self.rows)
            finally:
                pool.replaying_on = None
            if stats is not None:
                count_hit(stats, self.counts)
            return result

    run = in_core(
        "run_method",
        {
            "evicted": EntryState.EVICTED,
            "failed_state": EntryState.FAILED,
            "windows": WINDOWS,
            "uses": next_use.__self__,  # type: ignore[attr-defined]
            "foreach_copy": torch._foreach_copy_,
            "counted_by_hits": COUNTED_BY_HITS,
        },
    )(run_in_python)

    def take(self, values: Sequence[Any] | None) -> Any:
        """The outputs of the latest replay, given the values of the call or None. Call it with the pool's lock held."""
        if self._ways_out is None:
            self._ways_out = self._entry.outputs.ways_out(self.rows)
        makers, build, returned = self._ways_out
        if returned and values is not None:
            makers = [*makers]
            for place, position, shape in returned:
                if values[position].shape == shape:
                    makers[place] = partial(itemgetter(position), values)
        return build(list(map(call, makers)))

    def _draw(self) -> None:
        with self._entry.backend.drawing():
            self._graph.replay()

    def failed(
        self, error: BaseException, values: Sequence[Any] | None, stage: ReplayStage, before: Any = None
    ) -> NoReturn:
        """Raise what a replay raises that stopped with ``error`` in ``stage``, where the random generator was
        ``before``. Call it with the pool's lock held."""
        self._entry.fail(error, before, stage)
        if stage == "run" and values is not None and self._entry.mutated:
            self._entry.copy_back(values, self.rows)
        raise error


def count_hit(stats: CUDAGraphStats, counts: HitCounts) -> None:
    """Count a call that a graph served. It takes no lock: the caller holds the lock of the graph's pool."""
    for name in COUNTED_BY_HITS:
        setattr(stats, name, getattr(stats, name) + getattr(counts, name))
    rows, by_rows = counts.real_rows, stats._rows_of_hits
    if rows in by_rows or len(by_rows) < MOST_ROWS:
        by_rows[rows] = by_rows.get(rows, 0) + 1
