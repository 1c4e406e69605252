"""The graphs behind a registry or a manager: those of several callables, by batch size and sequence length."""

from collections.abc import Callable, Hashable, Mapping
from itertools import chain, count
from typing import Any, NamedTuple

from ..axes import ROWS
from ..backends import get_backend
from ..call.rules import ArgumentRules
from ..config import CUDAGraphConfig
from ..decide.size_table import SizeTable
from ..descriptors import BatchDescriptor
from ..forking import make_lock
from ..memory.accounting import MemoryReport, memory_report
from ..memory.cache import make_cache
from ..memory.entry import CUDAGraphEntry
from ..modes import CUDAGraphMode
from ..serve.group import GraphGroup, Route, Routes
from ..serve.server import Server
from ..state.objects import same_callable
from ..stats import CUDAGraphStats

__all__ = ["HeldGraph", "KeyedCallable", "KeyedGraphs", "KeyedRoute"]

_MOST_WAITING = 8  # callables that have no graph


class KeyedRoute(Route):
    """The route of batches of one sequence length."""

    def __init__(self, key: Hashable, table: SizeTable, rules: ArgumentRules, seq_len: int) -> None:
        super().__init__(key, table, rules)
        self.seq_len = seq_len

    def descriptor_of(self, size: int) -> BatchDescriptor:
        """``size`` requests of ``seq_len`` tokens each."""
        return BatchDescriptor(size * max(self.seq_len, 1), size, self.seq_len == 1)

    def name_of(self, size: int) -> tuple[int, int]:
        """Batch size and sequence length."""
        return size, self.seq_len


class KeyedCallable(NamedTuple):
    """One callable with its server, and its routes by sequence length, mode and batch dimensions."""

    server: Server
    routes: Routes[KeyedRoute]

    def groups_of(self, size: int, seq_len: int) -> list[GraphGroup]:
        """The groups whose calls of this sequence length the graph of ``size`` would serve."""
        routes = [route for route in list(self.routes.values()) if route.seq_len == seq_len]
        return [group for route in routes for group in route.groups if size in route.table.sizes]


class HeldGraph(NamedTuple):
    """An entry with its group and server."""

    server: Server
    group: GraphGroup
    entry: CUDAGraphEntry


class KeyedGraphs:
    """Graphs of several callables, which share one pool, one cache and one set of statistics. Thread-safe.

    Of the callables without a graph, the ``_MOST_WAITING`` that were used last are remembered.
    """

    def __init__(self, config: CUDAGraphConfig) -> None:
        self._config = config
        self._backend = get_backend(config.backend)
        self.device = self._backend.device
        self._pool = self._backend.make_pool()
        self.stats = CUDAGraphStats()
        self.cache = make_cache(config.options, config.max_cached_graphs, stats=self.stats)
        self.callables: list[KeyedCallable] = []
        """Those that are remembered; the one that was used last comes last."""
        self._numbers = count(1)
        self._keeps_examples = False
        self.is_asleep = False
        self.is_frozen = False
        """Whether nothing is captured or compared now."""
        self._lock = make_lock()
        resolved = config.replace(mode=CUDAGraphMode.FULL).resolve()
        self.tables = {mode: SizeTable.of(resolved, mode) for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)}
        """The sizes of the configuration by runtime mode."""

    def find(self, fn: Callable[..., Any]) -> KeyedCallable:
        """The server and routes of a callable, made if it is new."""
        latest = self.latest
        if latest is not None and latest.server.fn is fn:
            return latest
        with self._lock:
            same = (one for one in self.callables if one.server.fn is fn)
            alike = (one for one in self.callables if same_callable(one.server.fn, fn))
            known = next(chain(same, alike), None) or self._make(fn)
            self.callables = [*(one for one in self.callables if one is not known), known]
            return known

    def _make(self, fn: Callable[..., Any]) -> KeyedCallable:
        """A server for a callable that is new; room is made by forgetting one that has no graph."""
        waiting = [one for one in self.callables if not one.server.graphs.has_graphs]
        gone = waiting[: len(waiting) - _MOST_WAITING + 1] if len(waiting) >= _MOST_WAITING else []
        self.callables = [one for one in self.callables if one not in gone]
        server = Server(
            fn,
            self._config.options,
            self.cache,
            backend=self._backend,
            pool=self._pool,
            strict=self._config.strict,
            times_replays=True,
        )
        server.graphs.is_frozen, server.keeps_examples = self.is_frozen, self._keeps_examples
        number = next(self._numbers)
        return KeyedCallable(server, Routes(lambda key: self._make_route(number, *key)))

    @property
    def latest(self) -> KeyedCallable | None:
        """The callable that was used last, or None."""
        callables = self.callables
        return callables[-1] if callables else None

    def route(
        self, one: KeyedCallable, size: int, seq_len: int, mode: CUDAGraphMode, dynamic: Mapping[str, int]
    ) -> KeyedRoute:
        """The route of batches that graphs of one size serve; sizes of the configuration share one."""
        own = 0 if size in self.tables[mode].sizes else size
        return one.routes[seq_len, mode, own, tuple(dynamic.items())]

    def _make_route(
        self, number: int, seq_len: int, mode: CUDAGraphMode, own: int, dims: tuple[tuple[str, int], ...]
    ) -> KeyedRoute:
        table = SizeTable.of_one(own, mode, pads=True) if own else self.tables[mode]
        return KeyedRoute(
            (number, seq_len, mode, own),
            table,
            ArgumentRules({name: {dim: ROWS} for name, dim in dims}, {}, frozenset()),
            seq_len,
        )

    def holder(self, size: int, seq_len: int) -> HeldGraph | None:
        """The entry of a key; if several callables have one, the one that was used last."""
        found = [
            HeldGraph(one.server, group, entry)
            for one in self.callables
            for group in one.groups_of(size, seq_len)
            if (entry := one.server.graphs.current(group, size)) is not None
        ]
        return max(found, key=lambda held: held.entry.last_used, default=None)

    def drop(self, size: int, seq_len: int, *, but: KeyedCallable | None = None) -> bool:
        """Release the graphs of a key, and forget failures there; whether there was a graph."""
        groups = [group for one in self.callables if one is not but for group in one.groups_of(size, seq_len)]
        found = [(group, entry) for group in groups for entry in group.of_size(size)]
        for group, entry in found:
            self.cache.remove(entry.place)
            group.drop(entry)
            entry.release()
        return bool(found)

    def invalidate(self, tag: str) -> None:
        """Release all graphs, since the user says that they are wrong."""
        for one in self.callables:
            one.server.graphs.invalidate(tag)

    def sleep(self, tag: str) -> None:
        """Release all graphs, their buffers and the pool; no graph is made until ``wake``."""
        self.is_asleep = True
        self._forget_callables(tag)

    def wake(self) -> None:
        """End ``sleep()``. Harmless when awake."""
        self.is_asleep = False

    def freeze(self, is_frozen: bool) -> None:
        """Allow no capture and no comparison from now on; or allow them again."""
        self.is_frozen = is_frozen
        for one in self.callables:
            one.server.graphs.freeze(is_frozen)

    def keep_examples(self) -> None:
        """Keep two rows of one call of each signature from now on."""
        self._keeps_examples = True
        for one in self.callables:
            with one.server.lock:
                one.server.keep_examples()

    def clear(self) -> None:
        """Release all graphs. The statistics stay."""
        for entry in self.cache.clear():
            entry.release()
        self._forget_callables()
        self.cache.admission.clear()

    def memory_report(self) -> MemoryReport:
        """The bytes held by the pool, the graphs, and their static inputs and output buffers."""
        return memory_report(self.cache, [self._pool])

    def by_sizes(self) -> list[tuple[Server, list[KeyedRoute]]]:
        """Each callable's server, with those of its routes that have the sizes of the configuration."""
        tables = self.tables.values()
        return [(one.server, [r for r in list(one.routes.values()) if r.table in tables]) for one in self.callables]

    def _forget_callables(self, tag: str = "") -> None:
        """Forget all callables, and renew the pool; a call that still has one of their servers runs eagerly."""
        with self._lock:
            known, self.callables = self.callables, []
        for one in known:
            one.server.graphs.sleep(tag)
        self._pool.close()
        self._pool = self._backend.make_pool()
