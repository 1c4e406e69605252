"""The graphs of one callable: their pool, cache, guard and statistics, and the slow work that makes and ends them.

Every front door (``graphed``, ``CUDAGraphWrapper``, the registry) owns one and adds only how a call finds its group.
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
from ..call.rules import ArgumentRules
from ..call.signature import Refusal, Signature, no_tensors, refusal
from ..call.spec import Caller, CallSpec
from ..capture.autobreak import AutoBreaks
from ..capture.capturer import capture_entry, verify_entry, warm_up
from ..capture.request import CaptureRequest, CaptureResult
from ..config import CUDAGraphOptions
from ..descriptors import BatchDescriptor
from ..errors import BackendError, ConfigError, GraphDispatchError
from ..memory.accounting import MemoryReport, bytes_of, memory_report
from ..memory.budget import Victim
from ..memory.buffers import CallerBuffers, OutputBuffers, OutputRing, copy_into
from ..memory.cache import GraphCache
from ..memory.entry import CUDAGraphEntry, next_use
from ..memory.inputs import StaticInputs
from ..memory.outputs import OutputView
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..state.guards import StateGuard, wants_gradient
from ..stats import EvictionReason
from .group import GraphGroup

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
        self.groups: dict[Any, GraphGroup] = {}
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

    def make_group(
        self, index: Any, form: CallSpec, values: Sequence[Any], rules: ArgumentRules, capacity: int
    ) -> tuple[GraphGroup, list[Any]] | Refusal:
        """A new group for calls like this one, and the call's leaves; or why no graph can serve them.

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
        return self._add_group(index, caller, signature, inputs), leaves

    def trial(self, group: GraphGroup) -> tuple["GraphSet", GraphGroup]:
        """An empty set of the same callable and options, with a pool, a cache and statistics of its own, and
        ``group`` without its graphs in it: for captures that are thrown away."""
        trial = GraphSet(self.fn, self.options, GraphCache(maxsize), backend=self.backend, out=self.out)
        inputs = StaticInputs(group.signature.inputs, group.inputs.capacity)
        return trial, trial._add_group(group.index, group.caller, group.signature, inputs)

    def _add_group(self, index: Any, caller: Caller, signature: Signature, inputs: StaticInputs) -> GraphGroup:
        self.groups[index] = GraphGroup(index, caller, signature, inputs, buffers=self._make_buffers(inputs.capacity))
        return self.groups[index]

    def _make_buffers(self, capacity: int) -> OutputBuffers | None:
        if self.out is not None:
            return CallerBuffers(self.out, capacity)
        return OutputRing(self.options.ring_length, capacity) if self.options.ring_length else None

    def _shared_inputs(self, signature: Signature, capacity: int) -> StaticInputs:
        """The buffers of another group that takes the same tensors, or new ones: one pool, one user at a time."""
        for group in self.groups.values():
            if group.inputs.specs == tuple(signature.inputs) and group.inputs.capacity == capacity:
                return group.inputs
        return StaticInputs(signature.inputs, capacity)

    def warm_up(self, group: GraphGroup, values: Sequence[Any], size: int) -> None:
        """Run one size without capturing, and put everything back."""
        warm_up(self._job(group, values, size, size, BatchDescriptor(size), CUDAGraphMode.FULL))

    def current(self, group: GraphGroup, size: int) -> CUDAGraphEntry | None:
        """The entry of ``size``, if there is one; one whose workspace has grown or moved is released."""
        entry = group.current(size)
        if entry is not None and entry.workspaces is not None and not entry.workspaces.holds():
            self.release(self.cache.retire(entry, EvictionReason.STALE))
            return None
        return entry

    def admit(self, key: Hashable) -> Reason:
        """What becomes of a call whose key has no graph: ``CAPTURED_NOW``, or why it runs eagerly. Counts nothing."""
        return Reason.ASLEEP if self.is_asleep else self.cache.admission.decide(key, self.cache)

    def capture(
        self,
        group: GraphGroup,
        values: Sequence[Any],
        rows: int,
        size: int,
        *,
        descriptor: BatchDescriptor | None = None,
        mode: CUDAGraphMode = CUDAGraphMode.FULL,
        keep_effects: bool = True,
    ) -> CaptureResult:
        """Run the call eagerly and capture it; room is made before, and a failure is quarantined.

        Without ``keep_effects`` the call leaves none, as if it had not been made.
        """
        if not self.guard.holds():  # a callable that rebinds its own state, or whose weights nobody guards
            self.release(self._retire_all(EvictionReason.STALE) if self._guards_weights else [])
            self.guard = StateGuard(self.fn)
        if self.current(group, size) is None:  # else it takes the place of the one that it replaces
            self.release(self.cache.make_room(self.cache.admission.since((group.index, size))))
        request = self._job(group, values, rows, size, descriptor or BatchDescriptor(size), mode)
        request.keep_effects = keep_effects
        with self._counting(request):
            outcome = capture_entry(request)
        if outcome.reason is Reason.OUT_OF_MEMORY:
            outcome = self._capture_with_less(request, outcome)
        entry = outcome.entry
        if entry is None:
            self.stats.record_capture_failure()
            group.quarantine(size, outcome.reason, outcome.detail, self.options.max_failures)
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
            group.quarantine(size, Reason.CACHE_FULL, detail, 1 if is_final else self.options.max_failures)
            return replace(outcome, entry=None, reason=Reason.CACHE_FULL, detail=detail)
        group.rule = entry.outputs.rule
        group.entries[size] = entry
        group.failures.pop(size, None)
        self.release(victims)
        return outcome

    def verify(
        self,
        group: GraphGroup,
        values: Sequence[Any],
        rows: int,
        entry: CUDAGraphEntry,
        *,
        keep_effects: bool = True,
    ) -> CaptureResult:
        """Run the call eagerly and compare the entry with it; an entry that differs is released and quarantined."""
        request = self._job(group, values, rows, entry.size, entry.descriptor, entry.mode)
        request.keep_effects = keep_effects
        with self._counting(request):
            outcome = verify_entry(request, entry)
        entry.last_used = next_use()
        entry.warm_batch = ()
        self._schedule_check(entry)
        if outcome.entry is None:
            if entry.replay_count and outcome.reason is Reason.VERIFICATION_FAILED:
                group.warn_of(entry, rows, outcome.detail)
            self.stats.record_capture_failure()
            self.cache.remove(entry.key)
            group.drop(entry.size)
            group.quarantine(entry.size, outcome.reason, outcome.detail, self.options.max_failures)
            entry.release()
        return outcome

    def release(self, victims: Sequence[Victim]) -> None:
        """Let go of entries that left the cache, or another one of the same budget; waits for calls that use them.

        Entries of another set are found to be evicted when they are wanted again (``GraphGroup.current``).
        """
        with self.lock:
            for victim in victims:
                for group in self.groups.values():
                    if group.entries.get(victim.entry.size) is victim.entry:
                        group.drop(victim.entry.size)
                victim.release()
            if victims:
                read = {entry.inputs for group in self.groups.values() for entry in group.entries.values()}
                for unread in {group.inputs for group in self.groups.values()} - read:
                    unread.free()
                for group in self.groups.values():
                    if not group.entries:
                        group.buffers = self._make_buffers(group.inputs.capacity)

    def refresh(self) -> None:
        """Release what is stale, before a graph is looked up. What rebinds its own state is never as it was; while all
        captures fail for that, the failures stand, so that none is made in vain at each call."""
        if not self.guard_holds():
            groups = self.groups.values()
            reasons = {failure.reason for group in groups for failure in group.failures.values()}
            if reasons != {Reason.STATE_REBOUND} or any(group.entries for group in groups):
                self.rearm()

    def rearm(self, reason: EvictionReason = EvictionReason.STALE, tag: str = "") -> None:
        """Every graph is stale (weights moved, a module changed its mode, or the user says so): release them all, with
        the buffers that they shared, and capture anew when asked again."""
        for group in self.groups.values():
            group.failures.clear()
        self.release(self._retire_all(reason, tag))
        # Last: hits ask the guard without a lock, and a new one holds for stale graphs as well.
        self.guard = StateGuard(self.fn)

    def _retire_all(self, reason: EvictionReason, tag: str = "") -> list[Victim]:
        victims: list[Victim] = []
        for group in self.groups.values():
            for entry in list(group.entries.values()):
                victims += self.cache.retire(entry, reason, tag)
                group.drop(entry.size)
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
        victims = [e for f in self.groups.values() for e in f.entries.values() if self.cache.remove(e.key)]
        self.cache.admission.clear()
        self.groups.clear()
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
        groups = list(self.groups.values())
        entries = [entry for group in groups for entry in list(group.entries.values())]
        pools = [self.pool] if self.pool is not None else []
        return memory_report(entries, pools, [group.inputs for group in groups])

    @property
    def memory_bytes(self) -> int:
        """The total of ``memory_report``: what a memory budget must bound. Needs no lock."""
        return self.memory_report().total

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the cache's accounting is off."""
        self.cache.check_integrity()

    @contextmanager
    def _counting(self, request: CaptureRequest) -> Iterator[None]:
        """Within the block the call runs; one that raises is counted as well."""
        try:
            yield
        except BaseException:
            if request.keep_effects:
                self.stats.record_miss(Reason.CALL_RAISED, request.rows)
            raise

    def _schedule_check(self, entry: CUDAGraphEntry) -> None:
        if self.options.verify_every is not None:
            entry.verify_at = entry.replay_count + self.options.verify_every

    def _capture_with_less(self, request: CaptureRequest, failed: CaptureResult) -> CaptureResult:
        """Release the least recently used graph and try once more, without effects: the caller has eager's answer."""
        idle = min(self.cache, key=lambda entry: entry.last_used, default=None)
        victims = self.cache.retire(idle, EvictionReason.OUT_OF_MEMORY) if idle is not None else []
        if not victims:
            return failed
        self.release(victims)
        request.keep_effects = False
        try:
            return replace(capture_entry(request), answer=failed.answer)
        except GraphDispatchError:
            raise
        except Exception:  # of the callable, which this caller must not get: its own call went well
            return failed

    def _job(
        self,
        group: GraphGroup,
        values: Sequence[Any],
        rows: int,
        size: int,
        descriptor: BatchDescriptor,
        mode: CUDAGraphMode,
    ) -> CaptureRequest:
        if self.backend is None or self.pool is None:
            raise BackendError("no backend was chosen yet")
        self.pool.refuse_inside_replay()
        return CaptureRequest(
            call=group.caller,
            values=values,
            rows=rows,
            size=size,
            descriptor=descriptor,
            mode=mode,
            key=(group.index, size),
            inputs=group.inputs,
            pool=self.pool,
            backend=self.backend,
            options=self.options,
            guard=self.guard,
            rule=group.rule,
            buffers=group.buffers,
            auto_breaks=self.auto_breaks,
        )
