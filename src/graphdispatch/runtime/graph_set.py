"""The graphs of one callable: their pool, cache, guard and statistics, and the slow work that makes and ends them."""

import itertools
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..backends import get_backend
from ..config import CUDAGraphOptions
from ..copying import make_lock
from ..descriptors import size_text
from ..errors import BackendError, ConfigError, GraphDispatchError, error_of_signal
from ..modes import CUDAGraphMode, EntryState
from ..reasons import Reason
from ..stats import EvictionReason
from .admission import CaptureBudget, Quarantine
from .cache import GraphCache, Victim
from .entry import CUDAGraphEntry
from .flatten import CallSpec, FlatCall
from .gain import GainJudge
from .group import GraphGroup, Route
from .health import FIRST_CAPTURES, Health
from .memory import MemoryReport, bytes_of, memory_report
from .outputs import OutputView
from .protocols import Capturer, CaptureRequest, CaptureResult, Guard
from .ranks import Ranks
from .rules import ArgumentRules, callable_name
from .signature import ForeignSignature, Refusal, Signature, device_of, no_tensors, refusal
from .static_inputs import StaticInputs, varied

_log = logging.getLogger("graphdispatch")

_MOST_MADE = 8
"""So many batches are made of one at most."""


class GraphSet:
    """Finds the group of a call, and captures, verifies and releases the graphs of ``fn``.

    At most ``max_groups`` signatures are kept, unless the options have another number; the least recently used one
    gives way to a new one. Methods are called with ``lock`` held, unless they say otherwise. Other sets may share
    ``cache``, with its pool.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        options: CUDAGraphOptions,
        cache: GraphCache,
        capturer: Capturer,
        max_groups: int = 1024,
    ) -> None:
        self.fn = fn
        self.capturer = capturer
        self.options = options
        self.max_groups = options.max_signatures or max_groups
        self.returns_handles = options.outputs == "view"
        """Whether a call returns an ``OutputView``."""
        self.cache = cache
        self.stats = cache.stats
        self.groups: dict[Hashable, GraphGroup] = {}
        """Read as a list: a finalizer or the handler of a signal may call this set within a loop."""
        self.judges_gain = False
        """Whether batches that eager runs faster than their graph run eagerly; else nothing is timed for that."""
        self.ranks: Ranks | None = None
        """Those that share the callable's collectives; None if there are none."""
        self.clock: Callable[[], float] | None = None
        """Of captures and gains, in seconds; None: the backend's."""
        self.budget = CaptureBudget(options.capture_share, self._num_replays, self._saved_s)
        self.lock = make_lock()
        self._guards: dict[bool, Guard] = {}
        """What the callable reaches, without and with what its names lead to."""
        self.latest_change = ""
        """What has changed of the callable's state when its graphs last stopped fitting, in words."""
        self._numbers = itertools.count()
        self._has_fitted = False
        """Whether the rules have fitted a call."""

    def _num_replays(self) -> int:
        return sum(group.num_replays for group in list(self.groups.values()))

    def _saved_s(self) -> float:
        """The seconds that the present graphs have saved so far, if all batches are filled alike."""
        fill = 1.0 - self.stats.padding_ratio
        judged = ((group.gain, group.all_entries) for group in list(self.groups.values()) if group.gain is not None)
        return sum(gain.saved_s(entries, fill) for gain, entries in judged)

    def present_guard(self, *, by_names: bool = False) -> Guard:
        """Which modules and tensors the callable reaches now, whatever it reads of them. Needs no lock.

        Args:
            by_names: Also what the names in its code lead to through modules and classes. That takes longer to find,
                and counts where something may train.
        """
        guard = self._guards.get(by_names)  # which another thread's sleep() may forget meanwhile
        if guard is None or not guard.holds():
            guard = self._guards[by_names] = self.capturer.reach(self.fn, by_names=by_names)
        return guard

    def find(
        self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[GraphGroup, Sequence[Any], int] | Refusal:
        """The group, leaves and rows of a call; makes the group if the call can have one.

        No group with graphs gives way to it yet: one does when it is captured. Raises ``ConfigError`` for rules that
        fit no call yet; later such a call is an odd one.
        """
        if not route.table.sizes:
            # In a mode with graphs it was dropped.
            return Refusal(Reason.NOT_CAPTURED if route.table.mode.has_graphs() else Reason.DISABLED, "")
        if (found := route.group_of(args, kwargs)) is not None:
            return found
        alike = route.forms.get((len(args), *kwargs), ())
        captured = route.entry.call if route.entry is not None else None
        if alike:
            spec = alike[0].call.spec
        else:
            spec = CallSpec(self.fn if captured is None else captured.fn, len(args), tuple(kwargs))
        if (captured is not None and spec.names != captured.spec.names) or (route.is_single and route.forms):
            return Refusal(Reason.ARGUMENTS_CHANGED, f"the arguments are not those of the graph for {route.key}")
        place = route.key if route.is_single else (route.key, next(self._numbers))
        values = spec.values(args, kwargs)
        try:
            made = self.make_group(place, route, spec, values)
        except ConfigError as error:
            if not self._has_fitted:
                raise
            return Refusal(Reason.ARGUMENTS_CHANGED, str(error))
        if isinstance(made, Refusal):
            return made
        self._has_fitted = True
        group, leaves = made
        group.unlike = alike[0].changed_constant(values) if alike else ""
        group.is_of_constant = bool(group.unlike)
        if not (group.is_of_constant or route.is_single):
            group.unlike = route.unlike_others(group, leaves)
        self.give_way(group, spare=1)
        route.put_first(group)
        return group, leaves, group.signature.match(leaves)

    def give_way(self, newcomer: GraphGroup, *, spare: int = 0) -> None:
        """Forget groups beyond the limit: the one that was made last if it waits, else the least recently used, an idle
        one if any.

        One group more than the limit may wait for its second call, which captures; it is the first to go. So in a cycle
        over more signatures than the limit, those beyond it make each other give way before they come again: they run
        eagerly, and are not captured. A group whose captures failed is not idle, so such a cycle does not try them
        again and again either. If each signature comes a few times and then no more, graphs are captured for all of
        them. Groups around graphs of others (``Route.entry``) stay.
        """
        if newcomer.route.entry is not None:
            return
        while len(owned := self.owned) > self.max_groups + spare:
            others = [group for group in owned if group is not newcomer]
            latest = others[-1]
            self.forget(latest if latest.is_idle else min(others, key=lambda one: (not one.is_idle, one.last_used)))

    @property
    def owned(self) -> list[GraphGroup]:
        """The groups that are not around a graph of somebody else. They count for ``max_groups``; one more while a new
        one waits for its second call."""
        return [group for group in list(self.groups.values()) if group.route.entry is None]

    def forget(self, group: GraphGroup) -> None:
        """Let go of a group, with its graphs and static inputs."""
        self.release(self.cache.retire(group.all_entries, EvictionReason.DROPPED))
        self.groups.pop(group.key, None)
        group.route.remove(group)

    def make_group(
        self, key: Hashable, route: Route, spec: CallSpec, values: Sequence[Any]
    ) -> tuple[GraphGroup, list[Any]] | Refusal:
        """A new group for calls like this one, and the call's leaves; or why no graph can serve them.

        Raises ``ConfigError`` for rules that do not fit the call.
        """
        call, entry = FlatCall(self.fn, spec, values), route.entry
        leaves = call.flatten(values)
        assert leaves is not None
        if entry is None:
            signature = self._learn_signature(route, call, leaves)
            if isinstance(signature, Refusal):
                return signature
            inputs = self._shared_inputs(signature, route.table.largest if signature.has_rows else 1)
        elif entry.signature.match(leaves) >= 0:
            signature, inputs = entry.signature, entry.inputs
        elif isinstance(entry.signature, ForeignSignature):
            return Refusal(Reason.ADDRESS_CHANGED, "")
        else:
            return Refusal(Reason.ARGUMENTS_CHANGED, entry.signature.misfit(leaves))
        if (former := self.groups.get(key)) is not None:  # of a forgotten route, which another thread's call still had
            self.forget(former)
        backend = self.cache.backend if entry is None else entry.backend
        assert backend is not None
        failures = Quarantine(self.options.max_failures)
        gain = GainJudge(backend, call) if self.judges_gain else None
        group = GraphGroup(key, route, call, signature, inputs, failures, backend=backend, gain=gain)
        self.groups[key] = group
        if entry is not None:
            group.keep(entry)
        return group, leaves

    def _learn_signature(self, route: Route, call: FlatCall, leaves: list[Any]) -> Signature | Refusal:
        """The signature of a call, by the rules of its route; chooses the backend if there is none yet."""
        rules = route.rules or ArgumentRules({}, {}, frozenset(call.spec.names), self.options.validate_addresses)
        device = device_of(call.leaves, leaves, rules, lambda: self.present_guard().placed)
        if device is None:
            return no_tensors(call.leaves, leaves)
        cache = self.cache
        if cache.backend is None:
            try:
                backend = get_backend("auto", device)
            except BackendError as error:
                return Refusal(Reason.DEVICE_UNSUPPORTED, str(error))
            cache.pool = backend.make_pool()
            cache.backend = backend  # last, since whoever sees it takes the pool for chosen, too
        rules.check_names(self.fn, call)
        why_not = refusal(call.leaves, leaves, rules, cache.backend.device)
        return why_not if why_not is not None else Signature(call.leaves, leaves, rules, cache.backend.device)

    def give(self, answer: Any) -> Any:
        """What an eager step returned, as a hit would return it: a handle on it is stale after a replay, since it may
        be an argument that lies in a graph's memory. Needs no lock."""
        return OutputView(answer, self.cache.pool) if self.returns_handles else answer

    def calls_until_time(self, group: GraphGroup, entry: CUDAGraphEntry | None, size: int) -> float:
        """After about how many more calls of ``size`` there is time to compare its ``entry``, or to capture one where
        there is none; see ``CaptureBudget``."""
        is_doubtful = entry is None and group.latest_failure is not None
        return self.budget.calls_until_time(group.work_for(entry, size), group.misses[size], is_doubtful=is_doubtful)

    def _shared_inputs(self, signature: Signature, capacity: int) -> StaticInputs:
        """The buffers of another group that takes the same tensors, or new ones: one pool, one user at a time. Those of
        a graph that somebody else captured stay out: another pool's lock guards them, and their owner frees them."""
        every = (group.inputs for group in self.owned)
        fitting = (one for one in every if one.specs == tuple(signature.inputs) and one.capacity == capacity)
        inputs = next(fitting, None) or StaticInputs(signature.inputs, capacity, signature.axes)
        if self.cache.pool is not None:
            self.cache.pool.inputs[id(inputs)] = inputs
        return inputs

    def capture(
        self, group: GraphGroup, values: Sequence[Any], rows: int, size: int, *, keep_effects: bool = True
    ) -> CaptureResult:
        """Run the call eagerly and capture it; room is made before, and a failure is quarantined.

        Without ``keep_effects`` the call leaves none, as if it had not been made.
        """
        self.give_way(group)
        if group.current(size) is None:  # else it takes the place of the one that it replaces
            self.release(self.cache.make_room(self.cache.admission.since((group.key, size))))
        request = self._request(group, values, rows, size, group.route.table.mode, keep_effects)
        with request.pool.lock:  # with which other threads release the last graph that reads them
            request.inputs.readers.add(group)
        try:
            result = self._of_all_ranks(self.capturer.capture(request))
        finally:
            request.inputs.leave(group)
        if result.entry is not None and self.groups.get(group.key) is not group:
            result.entry.release()
            result = replace(result, entry=None, reason=Reason.CAPTURE_FAILED, detail="the call clears its own graphs")
        if result.reason is Reason.CAPTURE_WAITS:  # for a call whose code is traced
            return result
        if result.entry is None:
            self.stats.record_capture_failure()
            group.quarantine(size, result.reason, result.detail)
            return self._with_other_padding(group, result, rows, size)
        return self._keep(group, result, result.entry)

    def _of_all_ranks(self, result: CaptureResult) -> CaptureResult:
        """The result of a capture or comparison; without its graph, if another rank refuses it."""
        entry = result.entry
        refusal = None if self.ranks is None else self.ranks.end(result.reason, is_good=entry is not None)
        if entry is None or refusal is None:
            return result
        entry.release()
        return replace(result, entry=None, reason=refusal[0], detail=refusal[1])

    def _keep(self, group: GraphGroup, result: CaptureResult, entry: CUDAGraphEntry) -> CaptureResult:
        """Put a new entry into the cache, if there is room for it."""
        self.stats.record_capture(entry.capture_time_ms, f"{entry.mode.name} {size_text(entry.key)}", entry.gain)
        if self.stats.captures == FIRST_CAPTURES and 2 * self.stats.evictions >= FIRST_CAPTURES:
            _log.warning("%s: %s", callable_name(self.fn), Health.of(self.stats, list(self.groups.values())))
        shown = callable_name(self.fn), entry.mode.name, entry.size, entry.capture_time_ms
        _log.info("captured callable=%s mode=%s rows=%s ms=%.1f", *shown)
        self.cache.admission.forget((group.key, entry.size))
        replaced = group.current(entry.size)  # of the same state
        entry.publish(self.stats, self.options.verify_every)
        limit = self.cache.max_bytes
        held = bytes_of([entry]) if limit is not None else 0
        victims = self.cache.add(entry, replaced)
        if victims and victims[0].entry is entry:
            self.release(victims)
            is_final = limit is not None and held > limit and len(victims) == 1  # else the pool may have grown for all
            detail = f"its graph holds {held} bytes, for which there is no room in memory_budget_bytes={limit}"
            group.quarantine(entry.size, Reason.CACHE_FULL, detail, is_final=is_final)
            return replace(result, entry=None, reason=Reason.CACHE_FULL, detail=detail)
        if entry.gain is not None and group.gain is not None:
            group.gain.times.note(entry.size, entry.gain.eager_ms / 1e3)
        displaced = group.keep(entry)
        self.release([*victims, *self.cache.retire(displaced, EvictionReason.STALE)])
        return result

    def verify(
        self,
        group: GraphGroup,
        values: Sequence[Any],
        rows: int,
        entry: CUDAGraphEntry,
        *,
        keep_effects: bool = True,
        counts_as_second: bool = True,
    ) -> CaptureResult:
        """Run the call eagerly and compare the entry with it; an entry that differs is released and quarantined."""
        request = self._request(group, values, rows, entry.size, entry.mode, keep_effects)
        request.counts_as_second = counts_as_second
        result = self._of_all_ranks(self.capturer.check(request, entry))
        entry.use()
        entry.schedule_check()
        group.hits.clear()
        if result.entry is None:
            if entry.replay_count and result.reason is Reason.VERIFICATION_FAILED:
                group.warn_of(entry, rows, result.detail)
            self.stats.record_capture_failure()
            group.drop(entry)
            group.quarantine(entry.size, result.reason, result.detail)
            if group.route.entry is None:
                self.cache.discard(entry)
                entry.release()
            return self._with_other_padding(group, result, rows, entry.size)
        return result

    def _with_other_padding(self, group: GraphGroup, result: CaptureResult, rows: int, size: int) -> CaptureResult:
        """The result of a failed capture or comparison. Where padding may be at fault, what comes next is made with
        rows that are copies of the last real one: a length of zero, less one, is no index."""
        is_raised = result.reason in (Reason.CAPTURE_FAILED, Reason.REPLAY_FAILED)
        may_change = self.capturer.may_pad_otherwise and group.route.entry is None
        if rows == size or not (is_raised and may_change) or not group.signature.pad_with_copies():
            return result
        self.release(self.cache.retire(group.all_entries, EvictionReason.STALE))
        group.failures.clear()
        group.inputs = self._shared_inputs(group.signature, group.inputs.capacity)
        return replace(result, detail=f"{result.detail}; from now on padding rows are copies of the last row")

    def compare_on_made(
        self, group: GraphGroup, batch: Sequence[Any], rows: int, entry: CUDAGraphEntry
    ) -> CaptureResult | None:
        """Compare a graph on as many batches made of one as its licence wants; on none where ranks would have to agree.
        What found a difference, or None."""
        for number in range(0 if self.cache.is_frozen or self.ranks is not None else _MOST_MADE):
            other = varied(group.inputs, batch, rows, number)
            if entry.state is not EntryState.CAPTURED or not entry.licence.differs(other):
                break
            if (found := self.difference_on(group, other, rows, entry)) is not None:
                return found
        return None

    def difference_on(
        self,
        group: GraphGroup,
        batch: Sequence[Any],
        rows: int,
        entry: CUDAGraphEntry,
        *,
        counts_as_second: bool = True,
    ) -> CaptureResult | None:
        """Compare a graph with eager on a batch that no call brought: what found a difference, or None. Leaves no
        effects. Nothing is compared where the callable raises for it."""
        try:
            result = self.verify(group, batch, rows, entry, keep_effects=False, counts_as_second=counts_as_second)
        except GraphDispatchError:
            raise
        except Exception as error:
            if error_of_signal(error) is not None:
                raise
            entry.backend.raise_if_lost(error)
            _log.debug("%r was not compared on another batch: %s", entry, error)
            return None
        return result if result.entry is None else None

    def release(self, victims: Sequence[Victim]) -> None:
        """Let go of entries that left the cache, and forget all that were released, by whichever owner of it; waits for
        calls that use them."""
        with self.lock:
            for victim in victims:
                victim.release()
            for group in list(self.groups.values()):
                for entry in group.all_entries:
                    if entry.is_released:
                        group.drop(entry)

    def remove(self, group: GraphGroup, size: int) -> bool:
        """Release the graphs of one size of a group, which is no eviction; whether there were some. Takes the lock."""
        self.cache.refuse_changes()
        with self.lock:
            found = group.entries.get(size, ())
            for entry in found:
                self.cache.discard(entry)
                group.drop(entry)
                entry.release()
            return bool(found)

    def refresh(self) -> None:
        """Release the graphs whose weights have moved, or that the callable no longer reaches: they cannot serve again.

        Other graphs that do not fit the present state stay for when it comes back; until it changes, they cost nothing.
        """
        moved = [one for one in self.entries() if one.workspaces is not None and not one.workspaces.holds()]
        self.release(self.cache.retire(moved, EvictionReason.STALE) if moved else [])
        guards = {entry.guard for entry in self.entries() if entry.guard is not None}
        present = {guard: guard.holds() for guard in guards if not guard.is_broken}
        reached = self._guards.get(False)
        if present and all(present.values()) and (reached is None or reached.holds()):
            return
        for guard in list(guards):
            guard.is_broken = not (present[guard] if guard in present else guard.holds())
            if guard.is_broken and (renewed := guard.renewed()) is not None:
                guards.remove(guard)
                guards.add(renewed)
                self._replace(guard, renewed)
            elif guard.is_broken and guard in present:
                self.latest_change = guard.change()
                self.stats.record_state_change(self.latest_change)
        gone = {
            guard
            for guard in guards
            if guard.is_broken and (guard.has_moved() or not guard.within(self.present_guard()))
        }
        if gone:
            unfit = [entry for entry in self.entries() if entry.guard in gone]
            self.release(self.cache.retire(unfit, EvictionReason.STALE))

    def _replace(self, guard: Guard, renewed: Guard) -> None:
        """Have graphs guarded by another guard of the same state."""
        for entry in self.entries():
            if entry.guard is guard:
                entry.guard_by(renewed)
        for group in list(self.groups.values()):
            group.hits.clear()

    def entries(self) -> list[CUDAGraphEntry]:
        """The entries that the set has captured, of all states."""
        return [entry for group in self.owned for entry in group.all_entries]

    def rearm(self, reason: EvictionReason) -> None:
        """Release all graphs, with the buffers that they shared; sizes are captured anew when they come again. Takes
        the lock, as do the two that follow."""
        self.cache.refuse_changes()
        with self.lock:
            if self.cache.is_asleep and self.cache.backend is not None:
                self.cache.backend.synchronize()
            for group in list(self.groups.values()):
                group.failures.clear()
                group.hits.clear()
            self.release(self.cache.retire(self.entries(), reason))
            self._guards.clear()
            self._trim()

    def schedule_checks(self) -> None:
        """Say when each graph is compared again: not while the cache is frozen."""
        with self.lock:
            for entry in self.entries():
                entry.schedule_check(rests=self.cache.is_frozen)

    def clear(self) -> None:
        """Release everything, and forget all signatures and misses."""
        self.cache.refuse_changes()
        with self.lock:
            for group in list(self.groups.values()):
                self.forget(group)
                group.route.unmatched.clear()
            self.cache.admission.clear()
            self.budget.clear()
            self._trim()

    def _trim(self) -> None:
        if self.cache.pool is not None:
            self.cache.pool.trim()

    def _request(
        self, group: GraphGroup, values: Sequence[Any], rows: int, size: int, mode: CUDAGraphMode, keep_effects: bool
    ) -> CaptureRequest:
        entry = group.route.entry
        home = self.cache if entry is None else entry
        backend, pool = home.backend, home.pool
        assert backend is not None  # each is chosen before the first group is made
        assert pool is not None
        pool.refuse_inside_replay()
        peers = [one for one in group.all_entries if not one.is_released and (one.guard is None or one.guard.holds())]
        return CaptureRequest(
            call=group.call,
            values=values,
            rows=rows,
            size=size,
            descriptor=group.route.descriptor_of(size),
            mode=mode,
            key=group.route.name_of(size),
            inputs=group.inputs,
            signature=group.signature,
            pool=pool,
            backend=backend,
            options=self.options,
            peers=peers,
            tensors=self.present_guard().placed,
            follows_rows=group.has_several_batches(size),
            clock=self.clock or backend.clock,
            ranks=self.ranks,
            is_timed=self.judges_gain,
            keep_effects=keep_effects,
        )


def memory_of(cache: GraphCache, sets: Iterable[GraphSet]) -> MemoryReport:
    """The bytes that a cache and its sets hold: the pool, static inputs, and what graphs hold for themselves. Needs no
    lock."""
    inputs = [group.inputs for one in sets for group in list(one.groups.values())]
    return memory_report(cache, [cache.pool] if cache.pool is not None else [], inputs)
