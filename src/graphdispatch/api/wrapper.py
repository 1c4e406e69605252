"""``CUDAGraphWrapper``: one callable, captured once for each batch descriptor that the caller names.

The front door for engines, which decide the descriptor themselves. The wrapper trusts it to choose the graph and
checks that the arguments are what that graph was captured with.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

from ..backends import Backend, Pool
from ..call.context import current_context
from ..call.rules import ArgumentRules
from ..call.signature import Refusal
from ..call.spec import CallSpec
from ..config import CUDAGraphOptions, parse_mode
from ..descriptors import BatchDescriptor
from ..errors import ConfigError, ReplayError
from ..memory.budget import MemoryBudget
from ..memory.cache import GraphCache
from ..memory.entry import CUDAGraphEntry
from ..memory.eviction import EvictionPolicy
from ..modes import CUDAGraphMode, EntryState
from ..reasons import Reason
from ..serve.graphset import GraphSet
from ..serve.group import Form, GraphGroup
from ..stats import CUDAGraphStats, EvictionReason

__all__ = ["CUDAGraphWrapper"]


class CUDAGraphWrapper:
    """Captures ``runnable`` the first time that a descriptor comes in ``runtime_mode``, and replays it from then on.

    Called with ``batch_descriptor=`` and ``cudagraph_runtime_mode=``, or inside a ``cudagraph_context``. In any other
    mode, and without a descriptor, the runnable is called as it is; so a FULL wrapper around PIECEWISE ones leaves a
    PIECEWISE step to them, and while an outer one captures, the inner ones are part of its graph.

    All arguments keep their shapes for one descriptor: padding is the caller's. By default tensors are copied into
    buffers of the wrapper on each call and outputs are copies; ``CUDAGraphOptions(inputs="static", outputs="static")``
    takes the caller's tensors as the buffers and hands out the graph's own, as engines do. A call whose arguments do
    not fit runs eagerly, with a reason in ``get_stats()``.

    ``eviction`` says which graph goes when ``max_cached_graphs`` or ``memory_budget_bytes`` is reached; ``budget`` is
    one that several wrappers share. ``out``, a tensor or a nest of them, is where all outputs go; the next call
    overwrites them. ``backend`` and ``pool`` share memory between wrappers that never run at the same time. Other
    attributes are those of the runnable. Thread-safe.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        runtime_mode: CUDAGraphMode = CUDAGraphMode.FULL,
        options: CUDAGraphOptions | None = None,
        max_cached_graphs: int = 100,
        *,
        memory_budget_bytes: int | None = None,
        eviction: str | EvictionPolicy = "frecency",
        budget: MemoryBudget | None = None,
        out: Any = None,
        backend: Backend | None = None,
        pool: Pool | None = None,
    ) -> None:
        mode = parse_mode(runtime_mode)
        if mode not in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            raise ConfigError(f"runtime_mode must be PIECEWISE or FULL, got {mode.name}")
        if not callable(runnable):
            raise ConfigError(f"runnable must be callable, got {runnable!r}")
        if (backend is None) is not (pool is None):
            raise ConfigError("backend and pool must be given together, since a pool belongs to a backend")
        self.runnable = runnable
        self.runtime_mode = mode
        self.options = CUDAGraphOptions.or_default(options, "options")
        stats = CUDAGraphStats(knows_rows=False)
        cache = GraphCache(max_cached_graphs, memory_budget_bytes, eviction=eviction, budget=budget, stats=stats)
        self._graphs = GraphSet(runnable, self.options, cache, backend=backend, pool=pool, out=out)
        self._forms: dict[BatchDescriptor, Form] = {}
        self._local = threading.local()

    def __call__(
        self,
        *args: Any,
        batch_descriptor: BatchDescriptor | None = None,
        cudagraph_runtime_mode: CUDAGraphMode | None = None,
        **kwargs: Any,
    ) -> Any:
        """Serve one call. Raises what the runnable raises."""
        if cudagraph_runtime_mode is None or batch_descriptor is None:
            mode, descriptor = current_context() or (None, None)
            cudagraph_runtime_mode = cudagraph_runtime_mode if cudagraph_runtime_mode is not None else mode
            batch_descriptor = batch_descriptor if batch_descriptor is not None else descriptor
        if cudagraph_runtime_mode is not self.runtime_mode or batch_descriptor is None:
            if cudagraph_runtime_mode is not None and not isinstance(cudagraph_runtime_mode, CUDAGraphMode):
                raise ConfigError(f"cudagraph_runtime_mode must be a CUDAGraphMode, got {cudagraph_runtime_mode!r}")
            return self.runnable(*args, **kwargs)
        if torch.is_grad_enabled():
            return self._call_with_gradients_on(args, kwargs, batch_descriptor)
        form = self._forms.get(batch_descriptor)
        if form is not None and len(args) == form.form.positional and tuple(kwargs) == form.form.keywords:
            group, is_flat = form.latest
            leaves = [*args, *kwargs.values()] if is_flat else group.caller.flatten(form.form.values(args, kwargs))
            hit = group.served.get(group.signature.match(leaves)) if leaves is not None else None
            graphs = self._graphs
            if hit is not None and leaves is not None and graphs.may_serve(hit[0], leaves):
                try:
                    return hit[0].serve(leaves, 1, graphs.stats)
                except ReplayError as error:
                    if error.had_effects:
                        raise
                    return self._call_slowly(args, kwargs, batch_descriptor)
        return self._call_slowly(args, kwargs, batch_descriptor)

    def unwrap(self) -> Any:
        """The runnable, however many wrappers are around it."""
        inner = self.runnable
        return inner.unwrap() if isinstance(inner, CUDAGraphWrapper) else inner

    def get_cached_descriptors(self) -> list[BatchDescriptor]:
        """The descriptors that have a graph now."""
        return [entry.descriptor for entry in self._graphs.cache]

    def get_entry(self, descriptor: BatchDescriptor) -> CUDAGraphEntry | None:
        """The entry of a descriptor, or None."""
        return self._graphs.cache.get((descriptor, 1))

    def get_stats(self) -> CUDAGraphStats:
        """What happened so far; calls in other modes are not counted."""
        return self._graphs.stats

    def clear_cache(self) -> None:
        """Release all graphs; descriptors are captured anew when they come again."""
        with self._graphs.lock:
            self._forms.clear()
            self._graphs.clear()

    def invalidate(self, tag: str = "") -> None:
        """Release all graphs, since what they captured changed in a way that no guard sees; ``tag`` says what, for
        ``get_stats().last_evictions``."""
        with self._graphs.lock:
            self._graphs.rearm(EvictionReason.INVALIDATED, tag)

    def sleep(self, tag: str = "") -> None:
        """Release graphs and buffers, and run calls eagerly until ``wake()``: while weights are unloaded or replaced.
        The memory of a ``pool`` that was given is its owner's."""
        with self._graphs.lock:
            self._graphs.sleep(tag)

    def wake(self) -> None:
        """End ``sleep()``: graphs are captured again as their descriptors come."""
        with self._graphs.lock:
            self._graphs.wake()

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the cache's accounting is off."""
        self._graphs.check_integrity()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "runnable":
            raise AttributeError(name)
        return getattr(self.runnable, name)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.runtime_mode.name} {type(self.runnable).__name__}: "
            f"{len(self._graphs.cache)} graphs, {self._graphs.stats.hits} hits, {self._graphs.stats.misses} misses>"
        )

    def _call_with_gradients_on(self, args: Any, kwargs: Any, descriptor: BatchDescriptor) -> Any:
        if self._graphs.needs_gradients(args, kwargs):
            self._graphs.stats.record_miss(Reason.NEEDS_GRADIENTS)
            return self._hand_out(self.runnable(*args, **kwargs))
        with torch.no_grad():
            return self(*args, batch_descriptor=descriptor, cudagraph_runtime_mode=self.runtime_mode, **kwargs)

    def _call_slowly(self, args: tuple[Any, ...], kwargs: dict[str, Any], descriptor: BatchDescriptor) -> Any:
        graphs = self._graphs
        if (closed := graphs.closed()) is not None:
            if closed is not Reason.INSIDE_CAPTURE:  # there the call is part of the graph, and no step of its own
                graphs.stats.record_miss(closed)
            return self._hand_out(self.runnable(*args, **kwargs))
        with graphs.lock:
            graphs.refresh()
            found = self._find(args, kwargs, descriptor)
            if isinstance(found, Refusal):
                reason = found.reason
            else:
                group, leaves = found
                done, result = self._advance(group, leaves, descriptor)
                if done is None:
                    return result
                reason = done
        graphs.stats.record_miss(reason)
        return self._hand_out(self.runnable(*args, **kwargs))

    def _find(self, args: Any, kwargs: Any, descriptor: BatchDescriptor) -> tuple[GraphGroup, list[Any]] | Refusal:
        form = self._forms.get(descriptor)
        if form is None:
            if not isinstance(descriptor, BatchDescriptor) or descriptor.num_tokens < 1:
                raise ConfigError(f"batch_descriptor must be a BatchDescriptor, num_tokens >= 1, got {descriptor!r}")
            call_form = CallSpec(self.runnable, len(args), tuple(kwargs))
            values = call_form.values(args, kwargs)
            made = self._graphs.make_group(descriptor, call_form, values, self._rules(call_form), 1)
            if not isinstance(made, Refusal):
                self._forms[descriptor] = Form(call_form, made[0])
            return made
        group, _ = form.latest
        leaves = group.caller.flatten(form.form.values(args, kwargs)) if form.form.fits(args, kwargs) else None
        if leaves is None or group.signature.match(leaves) < 0:
            return Refusal(Reason.ARGUMENTS_CHANGED, f"the arguments are not those of the graph for {descriptor}")
        return group, leaves

    def _rules(self, form: CallSpec) -> ArgumentRules:
        static = frozenset(form.names) if self.options.inputs == "static" else frozenset()
        return ArgumentRules({}, {}, static, self.options.validate_addresses)

    def _advance(self, group: GraphGroup, leaves: list[Any], descriptor: BatchDescriptor) -> tuple[Reason | None, Any]:
        """Capture, verify or serve; the reason to run eagerly instead, or None and the answer."""
        graphs = self._graphs
        group.sightings[1] += 1
        entry = graphs.current(group, 1)
        if entry is None:
            failure = group.blocked(1)
            reason = failure.reason if failure is not None else self._admit((group.index, 1))
            if reason is not Reason.CAPTURED_NOW:
                graphs.cache.admission.sight((group.index, 1))
                return reason, None
            outcome = graphs.capture(group, leaves, 1, 1, descriptor=descriptor, mode=self.runtime_mode)
            graphs.stats.record_miss(outcome.reason)
            self._publish(group, outcome.entry)
            return None, self._hand_out(outcome.take_answer())
        if entry.clash(leaves) is not None:
            return Reason.ALIASED_ARGUMENTS, None
        if group.needs_check(entry, leaves, 1):
            outcome = graphs.verify(group, leaves, 1, entry)
            graphs.stats.record_miss(outcome.reason)
            self._publish(group, outcome.entry)
            return None, self._hand_out(outcome.take_answer())
        try:
            return None, entry.serve(leaves, 1, graphs.stats)
        except ReplayError as error:
            if error.had_effects:
                raise
            return Reason.REPLAY_FAILED, None

    def _admit(self, key: tuple[Any, int]) -> Reason:
        """``CAPTURED_NOW`` for a descriptor that is to be captured now, or the reason why not."""
        return self._graphs.admit(key)

    def _publish(self, group: GraphGroup, entry: CUDAGraphEntry | None) -> None:
        if entry is not None and entry.state is EntryState.VERIFIED:
            group.served = {1: (entry,)}

    def _hand_out(self, result: Any) -> Any:
        return self._graphs.hand_out(result)
