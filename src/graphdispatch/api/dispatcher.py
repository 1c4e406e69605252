"""``CudagraphDispatcher``: runs each key by a registered graph or by the eager runner, and counts why."""

import threading
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any

from ..decide.decision import Decision
from ..decide.latency import LatencyMeter
from ..decide.policies import DefaultDispatchPolicy, DispatchPolicy
from ..descriptors import DispatchKey
from ..errors import ConfigError, GuardError, ReplayError
from ..memory.entry import CUDAGraphEntry
from ..memory.foreign import Replayable, entry_around
from ..modes import CUDAGraphMode, DispatchMode
from ..reasons import Reason
from ..sizes import check_count
from ..stats import DispatchStats
from .registered import GRAPH_MODES, Registered, RegisteredGraphs, Slot

__all__ = ["CudagraphDispatcher"]


class CudagraphDispatcher:
    """Runs a key by a registered graph where the policy and the enabled modes allow it, and eagerly elsewhere.

    ``eager_runner(*args, **kwargs)`` is always right. A graph serves its own key, and, where it is an entry that fills
    up smaller batches itself, the smaller batches of its kind that have no graph of their own (``RegisteredGraphs``
    says which; the tables are those of ``CudagraphKeyDispatcher``). At most ``max_cached_graphs`` graphs are kept; the
    least recently used goes. A policy that learns is told the device time of each step. Thread-safe: graphs, modes and
    decisions are one immutable thing, swapped whole, so that a dispatch takes no lock to decide.
    """

    def __init__(
        self,
        eager_runner: Callable[..., Any],
        policy: DispatchPolicy | None = None,
        max_cached_graphs: int = 64,
    ) -> None:
        if not callable(eager_runner):
            raise ConfigError(f"eager_runner must be callable, got {eager_runner!r}")
        if policy is not None and not isinstance(policy, DispatchPolicy):
            raise ConfigError(f"policy must be a DispatchPolicy or None, got {policy!r}")
        check_count("max_cached_graphs", max_cached_graphs)
        self.eager_runner = eager_runner
        self.policy = policy or DefaultDispatchPolicy()
        self.max_cached_graphs = max_cached_graphs
        self.stats = DispatchStats()
        """Calls by mode, and the reason for every eager one."""
        self._meter = LatencyMeter(self.policy) if self.policy.learns else None
        self._graphs = RegisteredGraphs({}, frozenset(DispatchMode))
        self._lock = threading.Lock()

    def register_graph(
        self,
        key: DispatchKey,
        graph: Replayable | CUDAGraphEntry,
        input_ptrs: Sequence[int] | None = None,
        *,
        outputs: Any = None,
        mode: DispatchMode = DispatchMode.CUDAGRAPH,
        idempotent: bool = False,
    ) -> None:
        """Serve ``key`` by ``graph`` from now on, replacing an older one of the same mode.

        A ``CUDAGraphEntry`` brings its inputs and outputs. Of any other graph, ``input_ptrs`` are the addresses of the
        tensors that it reads, in the order of a call's arguments: a call with others runs eagerly. Without them the
        caller answers for what the graph reads. ``outputs`` is what a replay gives back (default: ``graph.outputs``).
        What such a graph wrote before it fails cannot be known, so that ``dispatch`` raises ``ReplayError``, unless
        ``idempotent`` says that the step may be run again, eagerly.
        """
        if not isinstance(key, DispatchKey) or key.num_tokens < 1:
            raise ConfigError(f"key must be a DispatchKey with num_tokens >= 1, got {key!r}")
        if mode not in GRAPH_MODES:
            raise ConfigError(f"mode must be CUDAGRAPH or PIECEWISE for a graph, got {mode!r}")
        if isinstance(graph, CUDAGraphEntry):
            entry = graph
            if entry.mode is CUDAGraphMode.PIECEWISE:
                mode = DispatchMode.PIECEWISE
        elif isinstance(graph, Replayable):
            outputs = outputs if outputs is not None else getattr(graph, "outputs", None)
            entry = entry_around(graph, key, outputs, piecewise=mode is DispatchMode.PIECEWISE, idempotent=idempotent)
        else:
            raise ConfigError(f"graph must have a replay() method, got {graph!r}")
        addresses = None if input_ptrs is None else _checked_addresses(input_ptrs)
        with self._lock:
            graphs = dict(self._graphs.graphs)
            graphs.pop((key, mode), None)
            while len(graphs) >= self.max_cached_graphs:
                del graphs[min(graphs, key=lambda slot: graphs[slot].entry.last_used)]
            graphs[key, mode] = Registered(key, mode, graph, entry, addresses)
            self._swap(graphs)

    def has_graph(self, key: DispatchKey) -> bool:
        """Whether a graph of any mode is registered for ``key`` now."""
        return self.get_graph(key) is not None

    def get_graph(self, key: DispatchKey) -> Replayable | CUDAGraphEntry | None:
        """The graph registered for ``key`` (a full one before a piecewise one), as it was given, or None."""
        graphs = self._graphs.graphs
        found = graphs.get((key, DispatchMode.CUDAGRAPH)) or graphs.get((key, DispatchMode.PIECEWISE))
        return found.graph if found is not None else None

    def get_entry(self, key: DispatchKey, mode: DispatchMode = DispatchMode.CUDAGRAPH) -> CUDAGraphEntry | None:
        """The entry of a registered graph: its replay count, last use and outputs."""
        found = self._graphs.graphs.get((key, mode))
        return found.entry if found is not None else None

    def dispatch(self, key: DispatchKey, *args: Any, **kwargs: Any) -> Any:
        """Run one call: a graph's outputs, or ``eager_runner(*args, **kwargs)``.

        A graph that cannot be replayed is dropped, and the call runs eagerly, unless the replay stopped half-way and
        has changed memory outside of the graph: then ``ReplayError``. Raises what the runner raises.
        """
        start = perf_counter_ns()
        found, decision = self.choose(key, args, kwargs)
        spent = perf_counter_ns() - start
        timer = self._meter.start() if self._meter is not None else None
        mode, reason = DispatchMode.EAGER, decision.reason
        if found is not None:
            try:
                result = found.entry.serve(*found.arguments(args, kwargs))
                mode = found.mode
            except GuardError:
                reason = Reason.ARGUMENTS_CHANGED
            except ReplayError as error:
                reason = Reason.REPLAY_FAILED
                self.drop(found)
                if error.had_effects:
                    raise
        self.stats.record(mode, reason, spent)
        if mode is DispatchMode.EAGER:
            result = self.eager_runner(*args, **kwargs)
        if self._meter is not None:
            self._meter.stop(timer, key, mode)
        return result

    def enable_mode(self, mode: DispatchMode) -> None:
        """Allow a mode again. ``HYBRID`` lets the policy choose; without it a full graph goes first, then piecewise."""
        _check_mode(mode)
        with self._lock:
            self._swap(self._graphs.graphs, self._graphs.modes | {mode})

    def disable_mode(self, mode: DispatchMode) -> None:
        """Forbid a mode; graphs stay registered. Raises ``ConfigError`` for ``EAGER``, the way that is always right."""
        _check_mode(mode)
        if mode is DispatchMode.EAGER:
            raise ConfigError("EAGER cannot be disabled: it serves whatever no graph can")
        with self._lock:
            self._swap(self._graphs.graphs, self._graphs.modes - {mode})

    @property
    def enabled_modes(self) -> frozenset[DispatchMode]:
        """The modes that are allowed now."""
        return self._graphs.modes

    @property
    def num_graphs(self) -> int:
        """How many graphs are registered."""
        return len(self._graphs.graphs)

    def clear_cache(self) -> None:
        """Forget all graphs; they belong to whoever registered them. The statistics stay."""
        with self._lock:
            self._swap({})

    def __repr__(self) -> str:
        return f"<CudagraphDispatcher {self.num_graphs} of {self.max_cached_graphs} graphs, {self.stats!r}>"

    def explain(self, key: DispatchKey, *args: Any, **kwargs: Any) -> str:
        """How ``dispatch`` would run this call, and why, as one line. Nothing is run or counted."""
        found, decision = self.choose(key, args, kwargs)
        if found is not None:
            try:
                found.arguments(args, kwargs)
            except GuardError as error:
                decision = Decision.eager(Reason.ARGUMENTS_CHANGED, key.num_tokens, str(error))
        return decision.explain()

    def choose(
        self, key: DispatchKey, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Registered | None, Decision]:
        """The graph that shall serve a call and its decision, or None and why eager does. Nothing is run or counted."""
        graphs = self._graphs
        choice = graphs.choices[key]
        if not choice.graphs:
            return None, choice.eager
        best = choice.graphs.get(
            self._mode(key, choice.modes) if DispatchMode.HYBRID in graphs.modes else choice.modes[0]
        )
        if best is None:
            return None, Decision.eager(Reason.POLICY, key.num_tokens)
        found, decision = best
        refusal = found.refusal(decision, args, kwargs)
        if refusal is not None:
            return None, Decision.eager(refusal, key.num_tokens)
        return found, decision

    def _mode(self, key: DispatchKey, available: tuple[DispatchMode, ...]) -> DispatchMode:
        policy = self.policy
        if not policy.learns and not policy.should_use_graph(key, True):
            return DispatchMode.EAGER
        return policy.select_mode(key, available)

    def registered(self) -> list[Registered]:
        """All graphs."""
        return list(self._graphs.graphs.values())

    def drop(self, found: Registered) -> None:
        """Forget a graph, unless another has taken its place."""
        with self._lock:
            graphs = dict(self._graphs.graphs)
            if graphs.get((found.key, found.mode)) is found:
                del graphs[found.key, found.mode]
                self._swap(graphs)

    def _swap(self, graphs: Mapping[Slot, Registered], modes: frozenset[DispatchMode] | None = None) -> None:
        self._graphs = RegisteredGraphs(graphs, self._graphs.modes if modes is None else modes)


def _check_mode(mode: DispatchMode) -> None:
    if not isinstance(mode, DispatchMode):
        raise ConfigError(f"mode must be a DispatchMode, got {mode!r}; write for example DispatchMode.PIECEWISE")


def _checked_addresses(input_ptrs: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(input_ptrs, Sequence) or not all(isinstance(pointer, int) for pointer in input_ptrs):
        raise ConfigError(f"input_ptrs must be addresses (tensor.data_ptr()) or None, got {input_ptrs!r}")
    return tuple(input_ptrs)
