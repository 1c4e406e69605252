"""The graphs of one callable: their pool, cache, guard and statistics, and the slow work that makes and ends them.

Every front door (``graphed``, ``CUDAGraphWrapper``, the registry) owns one and adds only how a call finds its family.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..backends import Backend, Pool, available_backends, get_backend
from ..capture.autobreak import AutoBreaks
from ..capture.calls import Caller, CallForm
from ..capture.capturer import capture_entry, verify_entry, warm_up
from ..capture.entry import CUDAGraphEntry
from ..capture.family import Family
from ..capture.guards import StateGuard
from ..capture.inputs import StaticInputs
from ..capture.job import CaptureJob, Outcome
from ..capture.rules import ArgumentRules
from ..capture.signature import Refusal, Signature, refusal
from ..config import CUDAGraphOptions
from ..descriptors import BatchDescriptor
from ..errors import BackendError
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..stats import CUDAGraphStats
from .store import GraphCache

__all__ = ["GraphSet"]


class GraphSet:
    """Captures, verifies and releases the graphs of ``fn``. Its methods are called with ``lock`` held, unless they
    say otherwise; ``cache``, ``pool`` and ``stats`` may be shared with other sets."""

    def __init__(
        self,
        fn: Callable[..., Any],
        options: CUDAGraphOptions,
        cache: GraphCache,
        *,
        backend: Backend | None = None,
        pool: Pool | None = None,
        stats: CUDAGraphStats | None = None,
    ) -> None:
        self.fn = fn
        self.options = options
        self.cache = cache
        self.backend = backend
        self._owns_pool = pool is None
        self.pool = pool if pool is not None or backend is None else backend.make_pool()
        self.stats = stats or CUDAGraphStats()
        self.guard = StateGuard(fn)
        self._guards_weights = options.guard_weights
        self.auto_breaks = AutoBreaks(fn, options.max_breaks) if options.breaks == "auto" else None
        """The modules that cost this callable its full graph, if breaks are automatic."""
        self.families: dict[Any, Family] = {}
        self.lock = threading.RLock()

    def guard_holds(self) -> bool:
        """Whether weights, modules and captured variables are as they were. Needs no lock."""
        return not self.options.guard_weights or self.guard.holds()

    def needs_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with gradients on may have to be differentiated. Needs no lock."""
        wants = any(isinstance(v, torch.Tensor) and v.requires_grad for v in tree_leaves((args, kwargs)))
        return wants or self.guard.trainable

    def nested(self) -> Reason | None:
        """Why no graph may replay on the calling thread now: it is in a capture, or in a break of a replay in this
        pool. Needs no lock, and must be asked before one is taken: a break runs with its pool's lock held."""
        if self.backend is not None and self.backend.is_watched():
            return Reason.INSIDE_CAPTURE
        return Reason.INSIDE_REPLAY if self.pool is not None and self.pool.is_inside_replay() else None

    def may_serve(self, entry: CUDAGraphEntry, values: Sequence[Any]) -> bool:
        """Whether a verified entry may serve a call whose arguments fit. Part of every hit; needs no lock."""
        backend = entry.backend
        return (
            not (backend.watch.depth or backend.is_capturing())
            and (not self._guards_weights or self.guard.holds())
            and (not entry.writes_outside or entry.clash(values) is None)
        )

    def make_family(
        self, index: Any, form: CallForm, values: Sequence[Any], rules: ArgumentRules, capacity: int
    ) -> tuple[Family, list[Any]] | Refusal:
        """A new family for calls like this one, and the call's leaves; or why no graph can serve them.

        Raises ``ConfigError`` for rules that do not fit the call.
        """
        tensor = next((leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)), None)
        if tensor is None:
            return Refusal(Reason.NO_TENSORS, Reason.NO_TENSORS.text)
        if self.backend is None:
            if tensor.device.type not in available_backends():
                return Refusal(Reason.DEVICE_UNSUPPORTED, f"no backend serves {tensor.device}")
            self.backend = get_backend("auto", tensor.device)
            self.pool = self.backend.make_pool()
        caller = Caller(self.fn, form, values)
        leaves = caller.flatten(values)
        assert leaves is not None
        rules.check_names(self.fn, caller)
        why_not = refusal(caller.leaves, leaves, rules, self.backend.device)
        if why_not is not None:
            return why_not
        signature = Signature(caller.leaves, leaves, rules, self.backend.device)
        inputs = self._shared_inputs(signature, capacity if signature.has_rows else 1)
        family = self.families[index] = Family(index, caller, signature, inputs)
        return family, leaves

    def _shared_inputs(self, signature: Signature, capacity: int) -> StaticInputs:
        """The buffers of another family that takes the same tensors, or new ones: one pool, one user at a time."""
        for family in self.families.values():
            if family.inputs.specs == tuple(signature.inputs) and family.inputs.capacity == capacity:
                return family.inputs
        return StaticInputs(signature.inputs, capacity)

    def warm_up(self, family: Family, values: Sequence[Any], size: int) -> None:
        """Run one size without capturing, and put everything back."""
        warm_up(self._job(family, values, size, size, BatchDescriptor(size), CUDAGraphMode.FULL))

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
        if family.entries.get(size) is None:  # else it takes the place of the one that it replaces
            self.release(self.cache.make_room())
        job = self._job(family, values, rows, size, descriptor or BatchDescriptor(size), mode)
        job.keep_effects = keep_effects
        outcome = capture_entry(job)
        entry = outcome.entry
        if entry is None:
            self.stats.record_capture_failure()
            family.quarantine(size, outcome.reason, outcome.detail, self.options.max_failures)
            return outcome
        self.stats.record_capture(entry.capture_time_ms)
        family.rule = entry.outputs.rule
        family.entries[size] = entry
        family.failures.pop(size, None)
        self.release(self.cache.add(entry.key, entry))
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
        outcome = verify_entry(job, entry)
        entry.warm_batch = ()
        if outcome.entry is None:
            self.stats.record_capture_failure()
            self.cache.remove(entry.key)
            family.drop(entry.size)
            family.quarantine(entry.size, outcome.reason, outcome.detail, self.options.max_failures)
            entry.release()
        return outcome

    def release(self, victims: Sequence[CUDAGraphEntry]) -> None:
        """Let go of entries that left the cache; waits for calls that use them."""
        for entry in victims:
            for family in self.families.values():
                if family.entries.get(entry.size) is entry:
                    family.drop(entry.size)
            entry.release()
        if victims:
            self.stats.record_evictions(len(victims))

    def rearm(self) -> None:
        """Weights moved, or a module changed its mode: every graph is stale. Capture anew when asked again."""
        self.guard = StateGuard(self.fn)
        victims = []
        for family in self.families.values():
            family.failures.clear()
            victims += [e for e in family.entries.values() if self.cache.remove(e.key) is not None]
        self.release(victims)

    def clear(self) -> None:
        """Release everything and forget all signatures; a pool of its own is closed, and another made."""
        victims = [e for f in self.families.values() for e in f.entries.values() if self.cache.remove(e.key)]
        self.families.clear()
        for entry in victims:
            entry.release()
        if self._owns_pool and self.pool is not None and self.backend is not None:
            self.pool.close()
            self.pool = self.backend.make_pool()

    @property
    def memory_bytes(self) -> int:
        """Bytes held: the pool, what graphs hold for themselves, and the static inputs. Needs no lock."""
        families = list(self.families.values())
        inputs = {id(f.inputs): f.inputs.nbytes for f in families}
        own = sum(e.nbytes for f in families for e in list(f.entries.values()))
        return own + sum(inputs.values()) + (self.pool.nbytes if self.pool is not None else 0)

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the cache's accounting is off."""
        self.cache.check_integrity()

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
            auto_breaks=self.auto_breaks,
        )
