"""``CudagraphDispatcher``: runs each key by a registered graph or by the eager runner, and counts why."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..capture.entry import CUDAGraphEntry
from ..capture.foreign import Replayable, entry_around
from ..descriptors import DispatchKey
from ..errors import ConfigError, GuardError, ReplayError
from ..modes import CUDAGraphMode, DispatchMode
from ..reasons import Reason
from ..stats import DispatchStats
from .latency import LatencyMeter
from .policies import DefaultDispatchPolicy, DispatchPolicy

__all__ = ["CudagraphDispatcher", "Registered"]

_GRAPHS = (DispatchMode.CUDAGRAPH, DispatchMode.PIECEWISE)


@dataclass(frozen=True)
class Registered:
    """A graph as it was registered, and its entry."""

    graph: Replayable | CUDAGraphEntry
    entry: CUDAGraphEntry
    addresses: tuple[int, ...] | None
    mode: DispatchMode


class CudagraphDispatcher:
    """Runs a key by its registered graph where the policy and the enabled modes allow it, and eagerly elsewhere.

    ``eager_runner(*args, **kwargs)`` is always right. At most ``max_cached_graphs`` graphs are kept; the least recently
    used goes. A policy that learns is told the device time of each step. Thread-safe: the table of graphs is immutable
    and swapped whole, so that a dispatch takes no lock to decide.
    """

    def __init__(
        self,
        eager_runner: Callable[..., Any],
        policy: DispatchPolicy | None = None,
        max_cached_graphs: int = 64,
    ) -> None:
        if not callable(eager_runner):
            raise ConfigError(f"eager_runner must be callable, got {eager_runner!r}")
        if max_cached_graphs < 1:
            raise ConfigError(f"max_cached_graphs must be at least 1, got {max_cached_graphs}")
        self.eager_runner = eager_runner
        self.policy = policy or DefaultDispatchPolicy()
        self.max_cached_graphs = max_cached_graphs
        self.stats = DispatchStats()
        """Calls by mode, and the reason for every eager one."""
        self._meter = LatencyMeter(self.policy) if self.policy.learns else None
        self._table: Mapping[tuple[DispatchKey, DispatchMode], Registered] = MappingProxyType({})
        self._modes = frozenset(DispatchMode)
        self._lock = threading.Lock()

    def register_graph(
        self,
        key: DispatchKey,
        graph: Replayable | CUDAGraphEntry,
        input_ptrs: Sequence[int] | None = None,
        *,
        outputs: Any = None,
        mode: DispatchMode = DispatchMode.CUDAGRAPH,
    ) -> None:
        """Serve ``key`` by ``graph`` from now on, replacing an older one of the same mode.

        A ``CUDAGraphEntry`` brings its inputs and outputs. Of any other graph, ``input_ptrs`` are the addresses of the
        tensors that it reads, in the order of a call's arguments: a call with others runs eagerly. Without them the
        caller answers for what the graph reads. ``outputs`` is what a replay gives back (default: ``graph.outputs``).
        """
        if mode not in _GRAPHS:
            raise ConfigError(f"mode must be CUDAGRAPH or PIECEWISE for a graph, got {mode!r}")
        if isinstance(graph, CUDAGraphEntry):
            entry = graph
            if entry.mode is CUDAGraphMode.PIECEWISE:
                mode = DispatchMode.PIECEWISE
        elif isinstance(graph, Replayable):
            outputs = outputs if outputs is not None else getattr(graph, "outputs", None)
            entry = entry_around(graph, key, outputs, piecewise=mode is DispatchMode.PIECEWISE)
        else:
            raise ConfigError(f"graph must have a replay() method, got {graph!r}")
        addresses = None if input_ptrs is None else tuple(input_ptrs)
        with self._lock:
            table = dict(self._table)
            table.pop((key, mode), None)
            while len(table) >= self.max_cached_graphs:
                del table[min(table, key=lambda k: table[k].entry.last_used)]
            table[key, mode] = Registered(graph, entry, addresses, mode)
            self._table = MappingProxyType(table)

    def has_graph(self, key: DispatchKey) -> bool:
        """Whether a graph of any mode is registered for ``key`` now."""
        return self.get_graph(key) is not None

    def get_graph(self, key: DispatchKey) -> Replayable | CUDAGraphEntry | None:
        """The graph registered for ``key`` (a full one before a piecewise one), as it was given, or None."""
        table = self._table
        found = table.get((key, DispatchMode.CUDAGRAPH)) or table.get((key, DispatchMode.PIECEWISE))
        return found.graph if found is not None else None

    def get_entry(self, key: DispatchKey, mode: DispatchMode = DispatchMode.CUDAGRAPH) -> CUDAGraphEntry | None:
        """The entry of a registered graph: its replay count, last use and outputs."""
        found = self._table.get((key, mode))
        return found.entry if found is not None else None

    def dispatch(self, key: DispatchKey, *args: Any, **kwargs: Any) -> Any:
        """Run one call: a graph's outputs, or ``eager_runner(*args, **kwargs)``.

        A graph that cannot be replayed is dropped, and the call runs eagerly, unless the replay stopped half-way and
        has changed memory outside of the graph: then ``ReplayError``. Raises what the runner raises.
        """
        start = perf_counter_ns()
        found, reason = self.choose(key, args, kwargs)
        spent = perf_counter_ns() - start
        timer = self._meter.start() if self._meter is not None else None
        mode = DispatchMode.EAGER
        if found is not None:
            try:
                result = self.run(found, args, kwargs)
                mode, reason = found.mode, Reason.EXACT
            except GuardError:
                reason = Reason.ARGUMENTS_CHANGED
            except ReplayError as error:
                reason = Reason.REPLAY_FAILED
                self.drop(key, found)
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
        self._modes |= {mode}

    def disable_mode(self, mode: DispatchMode) -> None:
        """Forbid a mode; graphs stay registered. Raises ``ConfigError`` for ``EAGER``, the way that is always right."""
        if mode is DispatchMode.EAGER:
            raise ConfigError("EAGER cannot be disabled: it serves whatever no graph can")
        self._modes -= {mode}

    @property
    def enabled_modes(self) -> frozenset[DispatchMode]:
        """The modes that are allowed now."""
        return self._modes

    @property
    def num_graphs(self) -> int:
        """How many graphs are registered."""
        return len(self._table)

    def clear_cache(self) -> None:
        """Forget all graphs; they belong to whoever registered them. The statistics stay."""
        with self._lock:
            self._table = MappingProxyType({})

    def __repr__(self) -> str:
        return f"<CudagraphDispatcher {self.num_graphs} of {self.max_cached_graphs} graphs, {self.stats!r}>"

    def choose(
        self, key: DispatchKey, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Registered | None, Reason]:
        """The graph that shall serve a call, or None and the reason. Nothing is run or counted."""
        table, modes = self._table, self._modes
        graphs = {mode: found for mode in _GRAPHS if mode in modes and (found := table.get((key, mode))) is not None}
        if not graphs:
            known = any((key, mode) in table for mode in _GRAPHS)
            return None, Reason.DISABLED if known else Reason.NOT_CAPTURED
        mode = next(iter(graphs))
        if DispatchMode.HYBRID in modes:
            mode = self.policy.select_mode(key, (*graphs, DispatchMode.EAGER))
        if mode not in graphs:
            return None, Reason.POLICY
        found = graphs[mode]
        if found.entry.backend.is_watched():
            return None, Reason.INSIDE_CAPTURE
        if found.entry.pool.is_inside_replay():
            return None, Reason.INSIDE_REPLAY
        if found.addresses is not None and _addresses(args, kwargs) != found.addresses:
            return None, Reason.ADDRESS_CHANGED
        return found, Reason.EXACT

    def run(self, found: Registered, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call by a graph that ``choose`` gave, uncounted; raises ``GuardError`` or ``ReplayError``."""
        specs = found.entry.inputs.specs
        if not specs:
            return found.entry.serve((), found.entry.size)
        if len(args) > len(specs):
            raise GuardError(f"the graph takes {len(specs)} tensors, got {len(args)} positional arguments")
        named = {spec.name: value for spec, value in zip(specs, args, strict=False)}
        values, rows = found.entry.check(named | kwargs)
        return found.entry.serve(values, rows)

    def registered(self) -> list[tuple[tuple[DispatchKey, DispatchMode], Registered]]:
        """All graphs, by key and mode."""
        return list(self._table.items())

    def drop(self, key: DispatchKey, found: Registered) -> None:
        """Forget a graph, unless another has taken its place."""
        with self._lock:
            if self._table.get((key, found.mode)) is found:
                self._table = MappingProxyType({k: v for k, v in self._table.items() if v is not found})


def _addresses(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    return tuple(leaf.data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
