"""The graphs that are registered with a dispatcher, and the worker that runs them on its server.

What they decide for every key is one immutable thing, swapped whole, so that a dispatch takes no lock to choose.

Note [locks of a worker]
    A comparison runs the eager runner with the server's lock and the pool's lock held, and the runner may register
    graphs. So nobody takes one of these two while holding the lock of a worker's graphs, or of a dispatcher: a graph is
    published under those locks, and what it displaces is released after.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple

from ..backends import Backend, Pool
from ..call.rules import ArgumentRules
from ..config import CUDAGraphOptions
from ..copying import NotCopied
from ..decide.decision import Decision, Memo, SizeTable
from ..descriptors import BatchDescriptor, DispatchKey
from ..errors import ConfigError, shown
from ..forking import make_lock
from ..memory.cache import GraphCache, Victim
from ..memory.entry import CUDAGraphEntry
from ..modes import CUDAGraphMode, DispatchMode, EntryState
from ..reasons import Reason
from ..serve.group import Route
from ..serve.prewarm import capture_example
from ..serve.server import Server
from ..stats import EvictionReason
from .external_graphs import Replayable, entry_around
from .key_table import KeyTable
from .policies import DispatchPolicy

__all__ = ["GRAPH_MODES", "Registered", "Slot", "Worker", "check_key"]

GRAPH_MODES = {DispatchMode.CUDAGRAPH: CUDAGraphMode.FULL, DispatchMode.PIECEWISE: CUDAGraphMode.PIECEWISE}
"""The modes that a graph can be registered in, the better first, and the runtime mode of each."""

Slot = tuple[DispatchKey, DispatchMode]
_MOST_KEPT = 16384  # keys


@dataclass(frozen=True, eq=False)
class Registered:
    """A graph as it was registered, its entry, and the route by which the server serves it.

    Registering a graph again makes another one, with a route of its own: what is done to the older one, by a call that
    chose it before, does not touch the newer one.
    """

    key: DispatchKey
    mode: DispatchMode
    graph: Replayable | CUDAGraphEntry
    entry: CUDAGraphEntry
    route: Route

    @property
    def slot(self) -> Slot:
        """What it is registered for."""
        return self.key, self.mode

    @property
    def is_captured(self) -> bool:
        """Whether the worker captured it; else somebody else did, and only they release it."""
        return self.route.entry is None

    @property
    def place(self) -> Hashable:
        """Its key in the worker's cache."""
        return self.entry.place if self.is_captured else self.route.key

    @property
    def is_gone(self) -> bool:
        """Whether the graph was released, or failed when it was last replayed or compared."""
        return self.entry.state in (EntryState.EVICTED, EntryState.FAILED)


class Candidates(NamedTuple):
    """What may serve a key: by mode, the better first, the graph and its decision; and why eager does, without one."""

    graphs: Mapping[DispatchMode, tuple[Registered, Decision]]
    modes: tuple[DispatchMode, ...]
    eager: Decision


class RegisteredGraphs:
    """Registered graphs and the enabled modes; ``candidates[key]`` is what they decide for a key. Immutable.

    The keys of graphs are those of two ``KeyTable``, for decode and for prefill, which never serve each other. A decode
    key whose tokens are a multiple of its requests is uniform decode. A graph that pads serves smaller batches with
    sequences of at most the same length (those of unknown length, if its own is); any other graph is a variant of its
    own, which only its key selects.
    """

    def __init__(self, graphs: Mapping[Slot, Registered], modes: frozenset[DispatchMode]) -> None:
        self.graphs = MappingProxyType(dict(graphs))
        self.modes = modes
        self.candidates = Memo[DispatchKey, Candidates](self._find, _MOST_KEPT)
        """For each key what may serve it; the first lookup of a key goes to the tables, later ones to a dictionary."""
        self._by_descriptor = {_place(found): found for found in self.graphs.values()}
        self._tables = {is_prefill: self._table(is_prefill) for is_prefill in (False, True)}

    def _table(self, is_prefill: bool) -> KeyTable:
        keys: dict[CUDAGraphMode, list[BatchDescriptor]] = {mode: [] for mode in GRAPH_MODES.values()}
        for kind, mode, descriptor in self._by_descriptor:
            if kind is is_prefill:
                keys[mode].append(descriptor)
        return KeyTable(keys, mode=CUDAGraphMode.FULL_AND_PIECEWISE)

    def _find(self, key: DispatchKey) -> Candidates:
        if not isinstance(key, DispatchKey):
            raise ConfigError(f"key must be a DispatchKey, got {shown(key)}; create_dispatch_key() makes one")
        found = {mode: best for mode in GRAPH_MODES if (best := self._best(key, mode)) is not None}
        enabled = {mode: best for mode, best in found.items() if mode in self.modes}
        eager = Decision.eager(Reason.DISABLED, key.num_tokens) if found else self._why_none(key)
        return Candidates(enabled, (*enabled, DispatchMode.EAGER), eager)

    def _best(self, key: DispatchKey, mode: DispatchMode) -> tuple[Registered, Decision] | None:
        for variant in (key, key.max_seq_len or None):
            decision = self._decide(key, variant, frozenset((CUDAGraphMode.NONE, GRAPH_MODES[mode])))
            if decision.descriptor is not None:
                return self._by_descriptor[key.is_prefill, decision.mode, decision.descriptor], decision
        return None

    def _why_none(self, key: DispatchKey) -> Decision:
        decision = self._decide(key, key.max_seq_len or None, None)
        if decision.reason is Reason.VARIANT_NOT_CAPTURED:
            return Decision.eager(Reason.NOT_CAPTURED, key.num_tokens)
        return decision

    def _decide(self, key: DispatchKey, variant: Any, allowed: frozenset[CUDAGraphMode] | None) -> Decision:
        return self._tables[key.is_prefill].decide(key.num_tokens, key.num_reqs, _query_len(key), variant, allowed)


def _query_len(key: DispatchKey) -> int | None:
    """The tokens of each request of uniform decode; None for a batch that is not, or not for certain."""
    if key.is_prefill or key.num_reqs < 1 or key.num_tokens % key.num_reqs:
        return None
    return key.num_tokens // key.num_reqs


def _place(found: Registered) -> tuple[bool, CUDAGraphMode, BatchDescriptor]:
    """The table, mode and descriptor of a registered graph; each has its own."""
    key, mode = found.key, GRAPH_MODES[found.mode]
    is_uniform = mode is CUDAGraphMode.FULL and _query_len(key) is not None
    variant = (key.max_seq_len or None) if found.entry.inputs.has_rows else key
    return key.is_prefill, mode, BatchDescriptor(key.num_tokens, key.num_reqs, is_uniform, variant)


class Leaving(NamedTuple):
    """Graphs that serve no key any more: those that left the cache and are to be released, and all to be forgotten."""

    victims: list[Victim]
    graphs: list[Registered]


class Worker(NotCopied):
    """The graphs that are registered in one place, and the server that serves them. Thread-safe.

    At most ``max_cached_graphs`` are kept; the least recently used goes. Graphs, modes and decisions are one immutable
    thing, swapped whole, so that choosing takes no lock.
    """

    def __init__(
        self,
        eager_runner: Callable[..., Any],
        max_cached_graphs: int,
        options: CUDAGraphOptions | None = None,
        *,
        backend: Backend | None = None,
        pool: Pool | None = None,
    ) -> None:
        self.cache = GraphCache(max_cached_graphs)
        self.server = Server(eager_runner, options or CUDAGraphOptions(), self.cache, backend=backend, pool=pool)
        self._graphs = RegisteredGraphs({}, frozenset(DispatchMode))
        self._numbers = count()
        self._lock = make_lock()

    @property
    def graphs(self) -> Mapping[Slot, Registered]:
        """All graphs, by key and mode."""
        return self._graphs.graphs

    @property
    def modes(self) -> frozenset[DispatchMode]:
        """The modes that are allowed now."""
        return self._graphs.modes

    def allow(self, modes: frozenset[DispatchMode]) -> None:
        """Allow these modes alone from now on; the graphs stay."""
        with self._lock:
            self._graphs = RegisteredGraphs(self.graphs, modes)

    def wrap(
        self,
        key: DispatchKey,
        graph: Replayable | CUDAGraphEntry,
        input_ptrs: Sequence[int] | None = None,
        *,
        outputs: Any = None,
        mode: DispatchMode = DispatchMode.CUDAGRAPH,
        idempotent: bool = False,
    ) -> Registered:
        """What ``CudagraphDispatcher.register_graph`` was given, checked and ready for ``publish``."""
        check_key(key)
        if not isinstance(mode, DispatchMode) or mode not in GRAPH_MODES:
            raise ConfigError(f"mode must be CUDAGRAPH or PIECEWISE for a graph, got {shown(mode)}")
        if isinstance(graph, CUDAGraphEntry):
            entry = graph
            mode = DispatchMode.PIECEWISE if entry.mode is CUDAGraphMode.PIECEWISE else mode
            if entry.state is EntryState.EVICTED:
                raise ConfigError(f"graph must not be released, got {entry!r}; capture it again")
        elif isinstance(graph, Replayable):
            outputs = outputs if outputs is not None else getattr(graph, "outputs", None)
            addresses = None if input_ptrs is None else _checked_addresses(input_ptrs)
            piecewise = mode is DispatchMode.PIECEWISE
            entry = entry_around(graph, key, outputs, piecewise=piecewise, idempotent=idempotent, addresses=addresses)
        else:
            raise ConfigError(f"graph must have a replay() method, got {shown(graph)}")
        route = Route(
            (key, mode, next(self._numbers)),
            SizeTable.of_one(entry.size, entry.mode, entry.descriptor, pads=entry.inputs.has_rows),
            entry=entry,
            without_sizes=Reason.NOT_CAPTURED,
        )
        return Registered(key, mode, graph, entry, route)

    def capture(self, key: DispatchKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Registered:
        """Capture the runner on these example arguments; ``publish`` serves the graph, ``drop`` releases it."""
        descriptor = BatchDescriptor(key.num_tokens, key.num_reqs)
        route = Route(
            (key, DispatchMode.CUDAGRAPH, next(self._numbers)),
            SizeTable.of_one(1, CUDAGraphMode.FULL, descriptor),
            ArgumentRules({}, {}, frozenset()),
            descriptor=descriptor,
            captures=False,
            is_single=True,
            without_sizes=Reason.NOT_CAPTURED,
        )
        try:
            entry = capture_example(self.server, route, (args, kwargs), 1, 1, f"{key}").entry
        except BaseException:
            with self.server.lock:
                self.server.drop(route)
            self.drop()  # a capture makes room before it can fail
            raise
        assert entry is not None
        return Registered(key, DispatchMode.CUDAGRAPH, entry, entry, route)

    def publish(self, found: Registered) -> Leaving:
        """Serve a key by ``found`` from now on, in the place of an older graph.

        The caller gives what has to go to ``let_go``, with no lock held that a runner could want: see Note [locks of a
        worker].
        """
        with self._lock:
            graphs = dict(self.graphs)
            older = graphs.get(found.slot)
            victims = self._leave_cache(older) if older is not None else []
            if not found.is_captured:
                victims += self.cache.add(found.place, found.entry, owns=False)
            graphs[found.slot] = found
            kept = {slot: one for slot, one in graphs.items() if self._is_kept(one)}
            self._graphs = RegisteredGraphs(kept, self.modes)
            known = {*graphs.values(), *([older] if older is not None else [])}
            return Leaving(victims, [one for one in known if kept.get(one.slot) is not one])

    def let_go(self, leaving: Leaving) -> None:
        """Release what was captured here and has left, and serve no call by any of it; waits for calls in flight."""
        with self.server.lock:
            victims = list(leaving.victims)
            for found in leaving.graphs:
                self.server.drop(found.route)
                victims += self._leave_cache(found)
            self.server.graphs.release(victims)

    def choose(self, key: DispatchKey, policy: DispatchPolicy) -> tuple[Registered | None, Decision]:
        """The graph that shall serve a key and its decision, or None and why eager does. Takes no lock."""
        graphs = self._graphs
        try:
            candidates = graphs.candidates[key]
        except TypeError:
            check_key(key)
            raise
        if not candidates.graphs:
            return None, candidates.eager
        if not policy.should_use_graph(key, True):
            return None, Decision.eager(Reason.POLICY, key.num_tokens)
        mode = policy.select_mode(key, candidates.modes) if DispatchMode.HYBRID in graphs.modes else candidates.modes[0]
        return candidates.graphs.get(mode) or (None, Decision.eager(Reason.POLICY, key.num_tokens))

    def drop(self, *dropped: Registered) -> None:
        """Forget these graphs, not others that have taken their places, and what was released or had to go for others;
        release those that were captured here."""
        with self._lock:
            known = set(self.graphs.values())
            kept = {slot: one for slot, one in self.graphs.items() if one not in dropped and self._is_kept(one)}
            self._graphs = RegisteredGraphs(kept, self.modes)
        self.let_go(Leaving([], [*known.union(dropped).difference(kept.values())]))

    def clear(self) -> None:
        """Forget all graphs."""
        self.drop(*self.graphs.values())

    def _is_kept(self, found: Registered) -> bool:
        return found.entry.state is not EntryState.EVICTED and self.cache.get(found.place) is found.entry

    def _leave_cache(self, found: Registered) -> list[Victim]:
        """Take a graph out of the cache; what is to be released then."""
        if found.is_captured:
            return self.cache.retire(found.entry, EvictionReason.DROPPED)
        self.cache.remove(found.place)
        return []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self.graphs)} graphs>"


def check_key(key: Any) -> None:
    """Raise ``ConfigError`` unless ``key`` is the key of a batch."""
    if not isinstance(key, DispatchKey) or type(key.num_tokens) is not int or key.num_tokens < 1:
        raise ConfigError(
            f"key must be a DispatchKey with num_tokens >= 1, got {shown(key)}; create_dispatch_key() makes one"
        )


def _checked_addresses(input_ptrs: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(input_ptrs, Sequence) or not all(isinstance(pointer, int) for pointer in input_ptrs):
        raise ConfigError(f"input_ptrs must be addresses (tensor.data_ptr()) or None, got {shown(input_ptrs)}")
    return tuple(input_ptrs)
