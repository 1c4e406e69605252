"""The graphs of one callable: their pool, cache, guard and statistics, and the slow work that makes and ends them.

Every front door (``graphed``, ``CUDAGraphWrapper``, the registry) owns one and adds only how a call finds its family.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from sys import maxsize
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from ..backends import Backend, Pool, available_backends, get_backend
from ..capture.autobreak import AutoBreaks
from ..capture.buffers import CallerBuffers, OutputBuffers, OutputRing, copy_into
from ..capture.calls import Caller, CallForm
from ..capture.capturer import capture_entry, verify_entry, warm_up
from ..capture.entry import CUDAGraphEntry, next_use
from ..capture.family import Family
from ..capture.guards import StateGuard, wants_gradient
from ..capture.inputs import StaticInputs
from ..capture.job import CaptureJob, Outcome
from ..capture.outputs import OutputView
from ..capture.rules import ArgumentRules
from ..capture.signature import Refusal, Signature, no_tensors, refusal
from ..config import CUDAGraphOptions
from ..descriptors import BatchDescriptor
from ..errors import BackendError, ConfigError, GraphDispatchError
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..stats import EvictionReason
from .accounting import MemoryReport, bytes_of, memory_report
from .budget import Victim
from .store import GraphCache

__all__ = ["GraphSet"]


class GraphSet:
    """Captures, verifies and releases the graphs of ``fn``. Its methods are called with ``lock`` held, unless they
    say otherwise; ``cache`` and ``pool`` may be shared with other sets."""

    def __init__(
        self,
        fn: Callable[..., Any],
        options: CUDAGraphOptions,
        cache: GraphCache,
        *,
        backend: Backend | None = None,
        pool: Pool | None = None,
        out: Any = None,
    ) -> None:
        if out is not None and options.outputs != "clone":
            raise ConfigError(f"out must come with outputs='clone', got outputs={options.outputs!r}")
        self.out = CallerBuffers(out, 0).given if out is not None else None
        """The caller's tensors into which all outputs are copied, if any; checked."""
        self.fn = fn
        self.options = options
        self.cache = cache
        self.backend = backend
        self._owns_pool = pool is None
        self.pool = pool if pool is not None or backend is None else backend.make_pool()
        self.stats = cache.stats
        self.guard = StateGuard(fn)
        self._guards_weights = options.guard_weights
        self.auto_breaks = AutoBreaks(fn, options.max_breaks) if options.breaks == "auto" else None
        """The modules that cost this callable its full graph, if breaks are automatic."""
        self.families: dict[Any, Family] = {}
        self.is_asleep = False
        self.lock = threading.RLock()

    def guard_holds(self) -> bool:
        """Whether weights, modules and captured variables are as they were. Needs no lock."""
        return not self.options.guard_weights or self.guard.holds()

    def needs_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with gradients on may have to be differentiated. Needs no lock."""
        return any(map(wants_gradient, tree_leaves((args, kwargs)))) or self.guard.trainable

    def closed(self) -> Reason | None:
        """Why no graph may replay on the calling thread now: it is in a capture, or in a break of a replay in this
        pool, or in forward-mode differentiation, or the graphs are asleep. Needs no lock, and must be asked before one
        is taken: a break runs with its pool's lock held."""
        if self.backend is not None and self.backend.is_watched():
            return Reason.INSIDE_CAPTURE
        if self.pool is not None and self.pool.is_inside_replay():
            return Reason.INSIDE_REPLAY
        if forward_ad._current_level >= 0:  # tangents come with plain tensors, whatever the grad mode
            return Reason.NEEDS_GRADIENTS
        return Reason.ASLEEP if self.is_asleep else None

    def may_serve(self, entry: CUDAGraphEntry, values: Sequence[Any]) -> bool:
        """Whether a verified entry may serve a call whose arguments fit. Part of every hit; needs no lock."""
        backend = entry.backend
        return (
            not (backend.watch.depth or backend.is_capturing())
            and forward_ad._current_level < 0
            and entry.replay_count < entry.verify_at
            and (entry.workspaces is None or entry.workspaces.holds())
            and (not self._guards_weights or self.guard.holds())
            and (not entry.writes_outside or entry.clash(values) is None)
        )

    def make_family(
        self, index: Any, form: CallForm, values: Sequence[Any], rules: ArgumentRules, capacity: int
    ) -> tuple[Family, list[Any]] | Refusal:
        """A new family for calls like this one, and the call's leaves; or why no graph can serve them.

        Raises ``ConfigError`` for rules that do not fit the call.
        """
        caller = Caller(self.fn, form, values)
        leaves = caller.flatten(values)
        assert leaves is not None
        tensor = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
        if tensor is None:
            return no_tensors(caller.leaves, leaves)
        if self.backend is None:
            if tensor.device.type not in available_backends():
                return Refusal(Reason.DEVICE_UNSUPPORTED, f"no backend serves {tensor.device}")
            self.backend = get_backend("auto", tensor.device)
            self.pool = self.backend.make_pool()
        rules.check_names(self.fn, caller)
        why_not = refusal(caller.leaves, leaves, rules, self.backend.device)
        if why_not is not None:
            return why_not
        signature = Signature(caller.leaves, leaves, rules, self.backend.device)
        inputs = self._shared_inputs(signature, capacity if signature.has_rows else 1)
        return self._add_family(index, caller, signature, inputs), leaves

    def trial(self, family: Family) -> tuple["GraphSet", Family]:
        """An empty set of the same callable and options, with a pool, a cache and statistics of its own, and
        ``family`` without its graphs in it: for captures that are thrown away."""
        trial = GraphSet(self.fn, self.options, GraphCache(maxsize), backend=self.backend, out=self.out)
        inputs = StaticInputs(family.signature.inputs, family.inputs.capacity)
        return trial, trial._add_family(family.index, family.caller, family.signature, inputs)

    def _add_family(self, index: Any, caller: Caller, signature: Signature, inputs: StaticInputs) -> Family:
        self.families[index] = Family(index, caller, signature, inputs, buffers=self._make_buffers(inputs.capacity))
        return self.families[index]

    def _make_buffers(self, capacity: int) -> OutputBuffers | None:
        if self.out is not None:
            return CallerBuffers(self.out, capacity)
        return OutputRing(self.options.ring_length, capacity) if self.options.ring_length else None

    def _shared_inputs(self, signature: Signature, capacity: int) -> StaticInputs:
        """The buffers of another family that takes the same tensors, or new ones: one pool, one user at a time."""
        for family in self.families.values():
            if family.inputs.specs == tuple(signature.inputs) and family.inputs.capacity == capacity:
                return family.inputs
        return StaticInputs(signature.inputs, capacity)

    def warm_up(self, family: Family, values: Sequence[Any], size: int) -> None:
        """Run one size without capturing, and put everything back."""
        warm_up(self._job(family, values, size, size, BatchDescriptor(size), CUDAGraphMode.FULL))

    def current(self, family: Family, size: int) -> CUDAGraphEntry | None:
        """The entry of ``size``, if there is one; one whose workspace has grown or moved is released."""
        entry = family.current(size)
        if entry is not None and entry.workspaces is not None and not entry.workspaces.holds():
            self.release(self.cache.retire(entry, EvictionReason.STALE))
            return None
        return entry

    def admit(self, key: Hashable) -> Reason:
        """What becomes of a call whose key has no graph: ``CAPTURED_NOW``, or why it runs eagerly. Counts nothing."""
        return Reason.ASLEEP if self.is_asleep else self.cache.admission.decide(key, self.cache)

    def capture(
        self,
        family: Family,
        values: Sequence[Any],
        rows: int,
        size: int,
        *,
        descriptor: BatchDescriptor | None = None,
        mode: CUDAGraphMode = CUDAGraphMode.FULL,
        keep_effects: bool = True,
    ) -> Outcome:
        """Run the call eagerly and capture it; room is made before, and a failure is quarantined.

        Without ``keep_effects`` the call leaves none, as if it had not been made.
        """
        if not self.guard.holds():  # a callable that rebinds its own state, or whose weights nobody guards
            self.release(self._retire_all(EvictionReason.STALE) if self._guards_weights else [])
            self.guard = StateGuard(self.fn)
        if self.current(family, size) is None:  # else it takes the place of the one that it replaces
            self.release(self.cache.make_room(self.cache.admission.since((family.index, size))))
        job = self._job(family, values, rows, size, descriptor or BatchDescriptor(size), mode)
        job.keep_effects = keep_effects
        with self._counting(job):
            outcome = capture_entry(job)
        if outcome.reason is Reason.OUT_OF_MEMORY:
            outcome = self._capture_with_less(job, outcome)
        entry = outcome.entry
        if entry is None:
            self.stats.record_capture_failure()
            family.quarantine(size, outcome.reason, outcome.detail, self.options.max_failures)
            return outcome
        self.stats.record_capture(entry.capture_time_ms)
        self.cache.admission.forget(entry.key)
        self._schedule_check(entry)
        held, limit = bytes_of([entry]), self.cache.max_bytes
        victims = self.cache.add(entry.key, entry)
        if victims and victims[0].entry is entry:
            self.release(victims)
            is_final = limit is not None and held > limit and len(victims) == 1  # else the pool may have grown for all
            detail = f"its graph holds {held} bytes, for which there is no room in memory_budget_bytes={limit}"
            family.quarantine(size, Reason.CACHE_FULL, detail, 1 if is_final else self.options.max_failures)
            return replace(outcome, entry=None, reason=Reason.CACHE_FULL, detail=detail)
        family.rule = entry.outputs.rule
        family.entries[size] = entry
        family.failures.pop(size, None)
        self.release(victims)
        return outcome

    def verify(
        self,
        family: Family,
        values: Sequence[Any],
        rows: int,
        entry: CUDAGraphEntry,
        *,
        keep_effects: bool = True,
    ) -> Outcome:
        """Run the call eagerly and compare the entry with it; an entry that differs is released and quarantined."""
        job = self._job(family, values, rows, entry.size, entry.descriptor, entry.mode)
        job.keep_effects = keep_effects
        with self._counting(job):
            outcome = verify_entry(job, entry)
        entry.last_used = next_use()
        entry.warm_batch = ()
        self._schedule_check(entry)
        if outcome.entry is None:
            if entry.replay_count and outcome.reason is Reason.VERIFICATION_FAILED:
                family.warn_of(entry, rows, outcome.detail)
            self.stats.record_capture_failure()
            self.cache.remove(entry.key)
            family.drop(entry.size)
            family.quarantine(entry.size, outcome.reason, outcome.detail, self.options.max_failures)
            entry.release()
        return outcome

    def release(self, victims: Sequence[Victim]) -> None:
        """Let go of entries that left the cache, or another one of the same budget; waits for calls that use them.

        Entries of another set are found to be evicted when they are wanted again (``Family.current``).
        """
        with self.lock:
            for victim in victims:
                for family in self.families.values():
                    if family.entries.get(victim.entry.size) is victim.entry:
                        family.drop(victim.entry.size)
                victim.release()
            if victims:
                read = {entry.inputs for family in self.families.values() for entry in family.entries.values()}
                for unread in {family.inputs for family in self.families.values()} - read:
                    unread.free()
                for family in self.families.values():
                    if not family.entries:
                        family.buffers = self._make_buffers(family.inputs.capacity)

    def refresh(self) -> None:
        """Release what is stale, before a graph is looked up. What rebinds its own state is never as it was; while all
        captures fail for that, the failures stand, so that none is made in vain at each call."""
        if not self.guard_holds():
            families = self.families.values()
            reasons = {failure.reason for family in families for failure in family.failures.values()}
            if reasons != {Reason.STATE_REBOUND} or any(family.entries for family in families):
                self.rearm()

    def rearm(self, reason: EvictionReason = EvictionReason.STALE, tag: str = "") -> None:
        """Every graph is stale (weights moved, a module changed its mode, or the user says so): release them all, with
        the buffers that they shared, and capture anew when asked again."""
        for family in self.families.values():
            family.failures.clear()
        self.release(self._retire_all(reason, tag))
        # Last: hits ask the guard without a lock, and a new one holds for stale graphs as well.
        self.guard = StateGuard(self.fn)

    def _retire_all(self, reason: EvictionReason, tag: str = "") -> list[Victim]:
        victims: list[Victim] = []
        for family in self.families.values():
            for entry in list(family.entries.values()):
                victims += self.cache.retire(entry, reason, tag)
                family.drop(entry.size)
        return victims

    def sleep(self, tag: str = "") -> None:
        """Release all graphs, their buffers, and the pool if it is the set's own; no graph is made until ``wake``."""
        self.is_asleep = True
        if self.backend is not None:
            self.backend.synchronize()
        self.rearm(EvictionReason.ASLEEP, tag)
        self._renew_pool()

    def wake(self) -> None:
        """Let graphs be captured again when they are wanted; weights may be elsewhere now."""
        self.guard = StateGuard(self.fn)
        self.is_asleep = False

    def clear(self) -> None:
        """Release everything and forget all signatures and sightings; a pool of its own is closed, and another made."""
        victims = [e for f in self.families.values() for e in f.entries.values() if self.cache.remove(e.key)]
        self.cache.admission.clear()
        self.families.clear()
        for entry in victims:
            entry.release()
        self._renew_pool()

    def _renew_pool(self) -> None:
        if self._owns_pool and self.pool is not None and self.backend is not None:
            self.pool.close()
            self.pool = self.backend.make_pool()

    def hand_out(self, result: Any) -> Any:
        """What an eager step returned, as the options and ``out`` want it. Needs no lock."""
        if self.out is not None:
            return copy_into(self.out, result)
        return OutputView(result, None) if self.options.returns_handles else result

    def memory_report(self) -> MemoryReport:
        """The bytes held: the pool, static inputs, output rings, and what graphs hold for themselves. Needs no lock."""
        families = list(self.families.values())
        entries = [entry for family in families for entry in list(family.entries.values())]
        pools = [self.pool] if self.pool is not None else []
        return memory_report(entries, pools, [family.inputs for family in families])

    @property
    def memory_bytes(self) -> int:
        """The total of ``memory_report``: what a memory budget must bound. Needs no lock."""
        return self.memory_report().total

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the cache's accounting is off."""
        self.cache.check_integrity()

    @contextmanager
    def _counting(self, job: CaptureJob) -> Iterator[None]:
        """Within the block the call runs; one that raises is counted as well."""
        try:
            yield
        except BaseException:
            if job.keep_effects:
                self.stats.record_miss(Reason.CALL_RAISED, job.rows)
            raise

    def _schedule_check(self, entry: CUDAGraphEntry) -> None:
        if self.options.verify_every is not None:
            entry.verify_at = entry.replay_count + self.options.verify_every

    def _capture_with_less(self, job: CaptureJob, failed: Outcome) -> Outcome:
        """Release the least recently used graph and try once more, without effects: the caller has eager's answer."""
        idle = min(self.cache, key=lambda entry: entry.last_used, default=None)
        victims = self.cache.retire(idle, EvictionReason.OUT_OF_MEMORY) if idle is not None else []
        if not victims:
            return failed
        self.release(victims)
        job.keep_effects = False
        try:
            return replace(capture_entry(job), result=failed.result)
        except GraphDispatchError:
            raise
        except Exception:  # of the callable, which this caller must not get: its own call went well
            return failed

    def _job(
        self,
        family: Family,
        values: Sequence[Any],
        rows: int,
        size: int,
        descriptor: BatchDescriptor,
        mode: CUDAGraphMode,
    ) -> CaptureJob:
        if self.backend is None or self.pool is None:
            raise BackendError("no backend was chosen yet")
        self.pool.refuse_inside_replay()
        return CaptureJob(
            call=family.caller,
            values=values,
            rows=rows,
            size=size,
            descriptor=descriptor,
            mode=mode,
            key=(family.index, size),
            inputs=family.inputs,
            pool=self.pool,
            backend=self.backend,
            options=self.options,
            guard=self.guard,
            rule=family.rule,
            buffers=family.buffers,
            auto_breaks=self.auto_breaks,
        )
