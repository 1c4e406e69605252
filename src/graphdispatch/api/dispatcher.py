"""``CudagraphDispatcher``: runs each key by a registered graph or by the eager runner, and counts why."""

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

from ..decide.decision import Decision
from ..decide.latency import LatencyMeter
from ..decide.policies import DefaultDispatchPolicy, DispatchPolicy
from ..descriptors import DispatchKey
from ..errors import ConfigError, ReplayError, check_count
from ..memory.cache import GraphCache
from ..memory.entry import CUDAGraphEntry
from ..memory.foreign import Replayable
from ..modes import CUDAGraphMode, DispatchMode
from ..reasons import Reason
from ..stats import DispatchStats
from .registered import Registered
from .workers import Worker, first_registered

__all__ = ["CudagraphDispatcher"]

_DISPATCH_MODES = {
    CUDAGraphMode.NONE: DispatchMode.EAGER,
    CUDAGraphMode.FULL: DispatchMode.CUDAGRAPH,
    CUDAGraphMode.PIECEWISE: DispatchMode.PIECEWISE,
}


class CudagraphDispatcher:
    """Runs a key by a registered graph where the policy and the enabled modes allow it, and eagerly elsewhere.

    ``eager_runner(*args, **kwargs)`` is always right, and registered entries are compared with it as ``graphed``
    compares its own. A graph serves its own key, and, where it is an entry that fills up smaller batches itself, the
    smaller batches of its kind that have no graph of their own (``RegisteredGraphs`` says which; the tables are those
    of ``CudagraphKeyDispatcher``). At most ``max_cached_graphs`` graphs are kept; the least recently used goes. A
    policy that learns is told the device time of each step. Thread-safe: graphs, modes and decisions are one immutable
    thing, swapped whole, so that a dispatch takes no lock to decide.
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
        self._workers: tuple[Worker, ...] = self._make_workers()

    def _make_workers(self) -> tuple[Worker, ...]:
        return (Worker(self.eager_runner, self.max_cached_graphs),)

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
        self._workers[0].register(key, graph, input_ptrs, outputs, mode, idempotent)

    def has_graph(self, key: DispatchKey) -> bool:
        """Whether a graph of any mode is registered for ``key`` now."""
        return self.get_graph(key) is not None

    def get_graph(self, key: DispatchKey) -> Replayable | CUDAGraphEntry | None:
        """The graph registered for ``key`` (a full one before a piecewise one), as it was given, or None."""
        found = first_registered(self._workers, key)
        return found.graph if found is not None else None

    def get_entry(self, key: DispatchKey, mode: DispatchMode = DispatchMode.CUDAGRAPH) -> CUDAGraphEntry | None:
        """The entry of a registered graph: its replay count, last use and outputs."""
        found = first_registered(self._workers, key, (mode,))
        return found.entry if found is not None else None

    def dispatch(self, key: DispatchKey, *args: Any, **kwargs: Any) -> Any:
        """Run one call: a graph's outputs, or ``eager_runner(*args, **kwargs)``.

        A graph that cannot be replayed is dropped, and the call runs eagerly, unless the replay stopped half-way and
        has changed memory outside of the graph: then ``ReplayError``. Raises what the runner raises.
        """
        start = perf_counter_ns()
        worker = self._workers[0]
        found, decision = worker.choose(key, self.policy)
        return self._run(worker, key, found, decision, perf_counter_ns() - start, args, kwargs)

    def _run(
        self,
        worker: Worker,
        key: DispatchKey,
        found: Registered | None,
        decision: Decision,
        spent: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Serve a decided call, count it, and tell the policy how long it took."""
        server = worker.server
        timer = self._meter.start() if self._meter is not None else None
        server.local.decision = decision
        try:
            if found is None:
                result = server.run_eagerly(decision, args, kwargs)
            else:
                result = server.serve(found.route, args, kwargs)
            decision = server.local.decision
        except ReplayError:
            decision = Decision.eager(Reason.REPLAY_FAILED, key.num_tokens)
            raise
        except BaseException:
            decision = server.local.decision
            raise
        finally:
            mode = _DISPATCH_MODES[decision.mode]
            self.stats.record(mode, decision.reason, spent)
            if found is not None and found.is_gone:
                worker.drop(found)
        if self._meter is not None:
            self._meter.stop(timer, key, mode)
        return result

    def attempt(self, key: DispatchKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any, Reason]:
        """Serve a call by a graph and count it: whether one did, the outputs, and the reason. Never runs the runner.

        ``VERIFIED_NOW`` asks for ``dispatch``, which compares the graph with eager. Raises ``ReplayError`` if the graph
        cannot be replayed.
        """
        worker = self._workers[0]
        found, decision = worker.choose(key, self.policy)
        if found is None:
            return False, None, decision.reason
        return self._attempt(worker, key, found, args, kwargs)

    def _attempt(
        self, worker: Worker, key: DispatchKey, found: Registered, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, Any, Reason]:
        """Serve a decided call by its graph, if that is possible, and count it."""
        start = perf_counter_ns()
        timer = self._meter.start() if self._meter is not None else None
        try:
            served, result, decision = worker.server.attempt(found.route, args, kwargs)
        finally:
            if found.is_gone:
                worker.drop(found)
        if served:
            self.stats.record(found.mode, decision.reason, perf_counter_ns() - start)
            if self._meter is not None:
                self._meter.stop(timer, key, found.mode)
        return served, result, decision.reason

    def enable_mode(self, mode: DispatchMode) -> None:
        """Allow a mode again. ``HYBRID`` lets the policy choose; without it a full graph goes first, then piecewise."""
        _check_mode(mode)
        for worker in self._workers:
            worker.modes |= {mode}

    def disable_mode(self, mode: DispatchMode) -> None:
        """Forbid a mode; graphs stay registered. Raises ``ConfigError`` for ``EAGER``, the way that is always right."""
        _check_mode(mode)
        if mode is DispatchMode.EAGER:
            raise ConfigError("EAGER cannot be disabled: it serves whatever no graph can")
        for worker in self._workers:
            worker.modes -= {mode}

    @property
    def enabled_modes(self) -> frozenset[DispatchMode]:
        """The modes that are allowed now."""
        return self._workers[0].modes

    @property
    def num_graphs(self) -> int:
        """How many graphs are registered."""
        return sum(len(worker.graphs) for worker in self._workers)

    @property
    def entries(self) -> list[tuple[DispatchKey, CUDAGraphEntry]]:
        """All registered graphs with their keys."""
        return [(found.key, found.entry) for worker in self._workers for found in worker.graphs.values()]

    @property
    def caches(self) -> list[GraphCache]:
        """Where the graphs are kept, for a budget that several dispatchers share."""
        return [worker.cache for worker in self._workers]

    def discard(self, entry: CUDAGraphEntry) -> None:
        """Forget one graph, whatever its key; one that was captured here is released."""
        for worker in self._workers:
            worker.discard(entry)

    def clear_cache(self) -> None:
        """Forget all graphs; they belong to whoever registered them. The statistics stay."""
        for worker in self._workers:
            worker.clear()

    def explain(self, key: DispatchKey, *args: Any, **kwargs: Any) -> str:
        """How ``dispatch`` would run this call, and why, as one line. Nothing is run or counted."""
        worker = self._workers[0]
        found, decision = worker.choose(key, self.policy)
        return decision.explain() if found is None else worker.server.explain(found.route, args, kwargs)

    def __repr__(self) -> str:
        return f"<CudagraphDispatcher {self.num_graphs} of {self.max_cached_graphs} graphs, {self.stats!r}>"


def _check_mode(mode: DispatchMode) -> None:
    if not isinstance(mode, DispatchMode):
        raise ConfigError(f"mode must be a DispatchMode, got {mode!r}; write for example DispatchMode.PIECEWISE")
