"""``CudagraphDispatcher``: runs each key by a registered graph or by the eager runner, and counts why.

Graphs are registered with a worker, which has a server for them. What they decide for every key is one immutable thing,
swapped whole, so that a dispatch takes no lock to choose.

Note [locks of a worker]
    A comparison runs the eager runner with the server's lock and the pool's lock held, and the runner may register
    graphs. So nobody takes one of these two while holding the lock of a worker's graphs, or of a dispatcher: a graph is
    published under those locks, and what it displaces is released after.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from time import perf_counter_ns
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..backends import Backend, Pool
from ..backends.tracing import untraced
from ..call.rules import ArgumentRules
from ..config import CUDAGraphOptions
from ..copying import MadeAnew, NotCopied
from ..decide.decision import Decision
from ..decide.memo import Memo
from ..decide.size_table import SizeTable
from ..descriptors import BatchDescriptor, DispatchKey, create_dispatch_key
from ..errors import CaptureError, ConfigError, ReplayError, check_callable, check_count, check_type, shown
from ..forking import make_lock
from ..memory.cache import GraphCache, Victim
from ..memory.entry import CUDAGraphEntry
from ..modes import CUDAGraphMode, DispatchMode, EntryState
from ..reasons import Reason
from ..serve.group import Route
from ..serve.prewarm import arguments_of, capture_example
from ..serve.server import Server
from ..stats import EvictionReason
from .external_graphs import Replayable, entry_around
from .key_table import KeyTable
from .latency import LatencyMeter
from .policies import DefaultDispatchPolicy, DispatchPolicy
from .stats import DispatchStats

__all__ = ["Chosen", "CudagraphDispatcher", "Registered", "Worker", "checked_example"]

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

    def allow(self, mode: DispatchMode, *, is_allowed: bool) -> None:
        """Allow a mode from now on, or forbid it; the graphs stay."""
        with self._lock:
            modes = self.modes | {mode} if is_allowed else self.modes - {mode}
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
        except CaptureError:
            with self.server.lock:
                self.server.drop(route)
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
        """Forget graphs, not others that have taken their places; release those that were captured here."""
        if not dropped:
            return
        with self._lock:
            kept = {slot: one for slot, one in self.graphs.items() if one not in dropped}
            self._graphs = RegisteredGraphs(kept, self.modes)
        self.let_go(Leaving([], list(dropped)))

    def tidy(self) -> None:
        """Forget the graphs that were released, or that had to go for others."""
        self.drop(*(found for found in self.graphs.values() if not self._is_kept(found)))

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


class Chosen(NamedTuple):
    """What shall serve a call: the worker, its graph (None: the eager runner), and the decision."""

    worker: Worker
    found: Registered | None
    decision: Decision


class CudagraphDispatcher(MadeAnew):
    """Runs a key by a registered graph where the policy and the enabled modes allow it, and eagerly elsewhere.

    A graph that cannot be replayed is dropped, and the call runs eagerly. ``EAGER`` cannot be disabled: it serves
    whatever no graph can.

    A graph serves its own key. If it is an entry that pads smaller batches itself, it also serves the smaller batches
    of its kind that have no graph of their own. Registered entries are compared with the eager runner as ``graphed``
    compares its graphs. Graphs are registered, or captured of the runner itself by ``capture``, ``prewarm``, or a
    ``Prewarmer`` that forecasts keys. Thread-safe: a dispatch takes no lock to decide.

    Args:
        eager_runner: Called as ``eager_runner(*args, **kwargs)`` wherever no graph serves; its answer is the reference.
        policy: Decides whether and how to use graphs. None: ``DefaultDispatchPolicy()``. One that learns gets the
            device time of each step.
        max_cached_graphs: The most graphs kept at once; the least recently used goes.

    Raises:
        ConfigError: An argument is wrong.
    """

    def __init__(
        self,
        eager_runner: Callable[..., Any],
        policy: DispatchPolicy | None = None,
        max_cached_graphs: int = 64,
    ) -> None:
        check_callable("eager_runner", eager_runner)
        check_count("max_cached_graphs", max_cached_graphs)
        self.eager_runner = eager_runner
        self.policy = policy
        self.max_cached_graphs = max_cached_graphs
        self._dummy_fn: Callable[[DispatchKey], Any] | None = None
        self.stats = DispatchStats()
        """Calls by mode, and the reason for every eager one."""
        self.workers: Sequence[Worker] = self._make_workers()
        """Where the graphs are registered and served."""

    def _make_workers(self) -> Sequence[Worker]:
        return (Worker(self.eager_runner, self.max_cached_graphs),)

    @property
    def policy(self) -> DispatchPolicy:
        """What decides, among the graphs of a key, whether and how to use them; may be replaced at any time."""
        return self._policy

    @policy.setter
    def policy(self, policy: DispatchPolicy | None) -> None:
        if policy is not None and not isinstance(policy, DispatchPolicy):
            raise ConfigError(f"policy must be a DispatchPolicy or None, got {shown(policy)}")
        self._policy = policy or DefaultDispatchPolicy()
        self._meter = LatencyMeter(self._policy) if self._policy.learns else None

    def _recipe(self) -> Any:
        make, args, kwargs, _ = super()._recipe()
        return make, args, kwargs, {"policy": self.policy, "_forbidden": frozenset(DispatchMode) - self.enabled_modes}

    @property
    def _forbidden(self) -> frozenset[DispatchMode]:
        return frozenset(DispatchMode) - self.enabled_modes

    @_forbidden.setter
    def _forbidden(self, modes: frozenset[DispatchMode]) -> None:
        for mode in modes:
            self.disable_mode(mode)

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

        Args:
            key: The key.
            graph: A ``CUDAGraphEntry``, which brings its inputs and outputs, or any object with ``replay()``. It stays
                its owner's, who releases it.
            input_ptrs: The addresses of the tensors that a graph other than an entry reads, in the order of a call's
                arguments: a call with others runs eagerly. None: the caller answers for what the graph reads.
            outputs: What a replay returns. None: ``graph.outputs``.
            mode: ``CUDAGRAPH`` or ``PIECEWISE``. A ``PIECEWISE`` entry is always the latter.
            idempotent: Whether a step may be run again, eagerly, after a graph other than an entry failed. What such a
                graph wrote before cannot be known, so that ``dispatch`` raises ``ReplayError`` otherwise.

        Raises:
            ConfigError: An argument is wrong, or the graph was released.
        """
        worker = self.workers[0]
        found = worker.wrap(key, graph, input_ptrs, outputs=outputs, mode=mode, idempotent=idempotent)
        worker.let_go(worker.publish(found))

    def has_graph(self, key: DispatchKey) -> bool:
        """Whether a graph of any mode is registered for a key now.

        Args:
            key: The key; a graph that would serve it padded does not count.
        """
        return self.get_graph(key) is not None

    def get_graph(self, key: DispatchKey) -> Replayable | CUDAGraphEntry | None:
        """The graph registered for a key, as it was given; a full one before a piecewise one.

        Args:
            key: The key.

        Returns:
            The graph, or None.
        """
        found = _first_registered(self.workers, key)
        return found.graph if found is not None else None

    def get_entry(self, key: DispatchKey, mode: DispatchMode = DispatchMode.CUDAGRAPH) -> CUDAGraphEntry | None:
        """The entry of a registered graph: its replay count, last use and outputs.

        Args:
            key: The key.
            mode: The mode that it was registered in.

        Returns:
            The entry, or None.
        """
        found = _first_registered(self.workers, key, (mode,))
        return found.entry if found is not None else None

    @untraced
    def capture(self, key: DispatchKey, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        """Capture ``eager_runner(*args, **kwargs)``, and serve ``key`` by it from now on.

        The runs leave no effects. The graph serves calls that pass their arguments as the example does, with the same
        shapes, dtypes and constants, while the runner's weights stay as they are now.

        Args:
            key: The key.
            args: The positional arguments of the example.
            kwargs: The keyword arguments of the example.

        Raises:
            ConfigError: The key or the example is wrong.
            CaptureError: There can be no graph.
        """
        call, worker = checked_example(key, args, kwargs), self.workers[0]
        try:
            leaving = worker.publish(worker.capture(key, *call))
        except BaseException:
            worker.tidy()  # a capture makes room before it can fail
            raise
        worker.let_go(leaving)

    @untraced
    def prewarm(self, keys: Iterable[DispatchKey], dummy_fn: Callable[[DispatchKey], Any]) -> list[DispatchKey]:
        """Capture the runner for those of ``keys`` that have no graph, largest first.

        A key that cannot be captured is left out. What ``dummy_fn`` and the runner raise passes through.

        Args:
            keys: The keys, or one.
            dummy_fn: ``dummy_fn(key)`` gives the arguments of a call: a tensor, a tuple of positional arguments, a
                mapping of keyword arguments, or a pair of the latter two. It is kept for ``capture_size``.

        Returns:
            Those of ``keys`` that have a graph then, largest first.

        Raises:
            ConfigError: One of ``keys`` is no key; raised before anything is captured.
        """
        check_callable("dummy_fn", dummy_fn, "a function from a key to arguments")
        wanted = [keys] if isinstance(keys, DispatchKey) else list(keys)
        for key in wanted:
            check_key(key)
        self._dummy_fn = dummy_fn
        wanted = sorted(dict.fromkeys(wanted), key=lambda key: -key.num_tokens)
        for key in wanted:
            if not self.has_graph(key):
                with suppress(CaptureError):
                    self.capture(key, *arguments_of(dummy_fn(key)))
        return [key for key in wanted if self.has_graph(key)]

    @property
    def captured_sizes(self) -> list[int]:
        """The numbers of tokens whose decode key, of one token for each request, has a graph; increasing."""
        return sorted({key.num_tokens for key, _ in self.entries if key == DispatchKey(key.num_tokens, key.num_tokens)})

    def capture_size(self, size: int) -> bool:
        """Capture the decode key of ``size`` tokens now, as ``prewarm`` does.

        With it ``Prewarmer.capture_one`` drives the dispatcher. The arguments come from the ``dummy_fn`` of the latest
        ``prewarm``, which may have named no keys.

        Args:
            size: The number of tokens.

        Returns:
            Whether it has a graph then.

        Raises:
            ConfigError: There was no ``prewarm`` yet, or the size is wrong.
        """
        if self._dummy_fn is None:
            raise ConfigError("capture_size needs a dummy_fn for its arguments; call prewarm([], dummy_fn) first")
        return bool(self.prewarm([create_dispatch_key(size, size)], self._dummy_fn))

    @untraced
    def dispatch(self, key: DispatchKey, *args: Any, **kwargs: Any) -> Any:
        """Run one call by a graph or by ``eager_runner(*args, **kwargs)``.

        A graph that cannot be replayed is dropped, and the call runs eagerly. What the runner raises passes through.

        Args:
            key: What the batch is.
            *args: The positional arguments.
            **kwargs: The keyword arguments.

        Returns:
            The outputs. They are owned as the entry's options say; those of other graphs are the graph's.

        Raises:
            ReplayError: The replay stopped half-way and has changed memory outside of the graph.
        """
        start = perf_counter_ns()
        chosen = self._choose(key, args, kwargs)
        return self._run(key, chosen, perf_counter_ns() - start, args, kwargs)

    @untraced
    def run_eagerly(
        self, key: DispatchKey, reason: Reason, args: tuple[Any, ...], kwargs: dict[str, Any], spent: int = 0
    ) -> Any:
        """Run a call that no graph shall serve and count it; a policy that learns gets its time.

        What the runner raises passes through.

        Args:
            key: What the batch is.
            reason: Why it runs eagerly.
            args: The positional arguments.
            kwargs: The keyword arguments.
            spent: The time that this decision took, in nanoseconds.

        Returns:
            The runner's outputs.
        """
        check_key(key)
        return self._run(
            key, Chosen(self.workers[0], None, Decision.eager(reason, key.num_tokens)), spent, args, kwargs
        )

    @untraced
    def attempt(self, key: DispatchKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any, Reason]:
        """Serve a call by a graph and count it, if one can. Never runs the runner.

        Args:
            key: What the batch is.
            args: The positional arguments.
            kwargs: The keyword arguments.

        Returns:
            Whether a graph served it, the outputs, and the reason. After ``VERIFIED_NOW`` call ``dispatch``, which
                compares the graph with eager.

        Raises:
            ReplayError: The graph cannot be replayed; one that its owner released is only forgotten.
        """
        return self._attempt(key, self._choose(key, args, kwargs), args, kwargs)

    def _choose(self, key: DispatchKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Chosen:
        worker = self.workers[0]
        return Chosen(worker, *worker.choose(key, self._policy))

    def _run(self, key: DispatchKey, chosen: Chosen, spent: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call as chosen, count it, and tell the policy how long it took."""
        (worker, found, decision), meter = chosen, self._meter
        server = worker.server
        timer = meter.start() if meter is not None else None
        server.local.decision = None
        try:
            if found is None:
                result = server.run_eagerly(decision, args, kwargs)
            else:
                result = server.serve(found.route, args, kwargs)
        except BaseException as error:
            self._count(chosen, server.decision or _raised_in_graph(error, key), spent)
            raise
        decision = server.local.decision
        mode = self._count(chosen, decision, spent)
        # A comparison, or a replay that failed first, takes longer than either way of running the step.
        if meter is not None and decision.reason is not Reason.VERIFIED_NOW and (found is None or not found.is_gone):
            meter.stop(timer, key, mode)
        return result

    def _attempt(
        self, key: DispatchKey, chosen: Chosen, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, Any, Reason]:
        """Serve a call by the chosen graph, if that is possible, and count it."""
        (worker, found, decision), meter = chosen, self._meter
        if found is None or decision.reason is Reason.VERIFIED_NOW:
            return False, None, decision.reason
        start = perf_counter_ns()
        timer = meter.start() if meter is not None else None
        try:
            served, result, decision = _attempt_graph(worker.server, found.route, args, kwargs)
        except BaseException as error:
            if isinstance(error, ReplayError) and not error.had_effects:
                is_released = found.entry.state is EntryState.EVICTED
                worker.drop(found)
                if is_released:
                    return False, None, Reason.NOT_CAPTURED
            else:
                self._count(chosen, _raised_in_graph(error, key), perf_counter_ns() - start)
            raise
        if served:
            mode = self._count(chosen, decision, perf_counter_ns() - start)
            if meter is not None:
                meter.stop(timer, key, mode)
        elif found.entry.state is EntryState.EVICTED:
            worker.drop(found)
        return served, result, decision.reason

    def _count(self, chosen: Chosen, decision: Decision, spent: int) -> DispatchMode:
        """Count a call that ran as ``decision`` says, and forget its graph if that is gone; the mode that it ran in."""
        worker, found, _ = chosen
        mode = DispatchMode.EAGER
        if found is not None and decision.mode is not CUDAGraphMode.NONE:
            mode = found.mode
        elif found is not None and found.is_gone:
            worker.drop(found)
        self.stats.record(mode, decision.reason, spent)
        return mode

    def enable_mode(self, mode: DispatchMode) -> None:
        """Allow a mode again.

        Args:
            mode: The mode. ``HYBRID`` lets the policy choose; without it a full graph goes first, then piecewise.

        Raises:
            ConfigError: It is no mode.
        """
        check_type("mode", mode, DispatchMode, "a DispatchMode, as DispatchMode.PIECEWISE")
        for worker in self.workers:
            worker.allow(mode, is_allowed=True)

    def disable_mode(self, mode: DispatchMode) -> None:
        """Forbid a mode; graphs stay registered.

        Args:
            mode: The mode.

        Raises:
            ConfigError: It is ``EAGER``, which serves whatever no graph can, or no mode.
        """
        check_type("mode", mode, DispatchMode, "a DispatchMode, as DispatchMode.PIECEWISE")
        if mode is DispatchMode.EAGER:
            raise ConfigError("EAGER cannot be disabled: it serves whatever no graph can")
        for worker in self.workers:
            worker.allow(mode, is_allowed=False)

    @property
    def enabled_modes(self) -> frozenset[DispatchMode]:
        """The modes that are allowed now."""
        return self.workers[0].modes

    @property
    def num_graphs(self) -> int:
        """How many graphs are registered."""
        return sum(len(worker.graphs) for worker in self.workers)

    @property
    def entries(self) -> list[tuple[DispatchKey, CUDAGraphEntry]]:
        """All registered graphs with their keys."""
        return [(found.key, found.entry) for worker in self.workers for found in worker.graphs.values()]

    def clear_cache(self) -> None:
        """Forget all graphs; registered ones stay their owners'. The statistics stay."""
        for worker in self.workers:
            worker.clear()

    @untraced
    def explain(self, key: DispatchKey, *args: Any, **kwargs: Any) -> str:
        """How ``dispatch`` would run this call, and why. Nothing is run or counted.

        Args:
            key: What the batch is.
            *args: The positional arguments.
            **kwargs: The keyword arguments.

        Returns:
            One line for people.
        """
        worker, found, decision = self._choose(key, args, kwargs)
        return decision.explain() if found is None else worker.server.explain(found.route, args, kwargs, key.num_tokens)

    def __repr__(self) -> str:
        return f"<CudagraphDispatcher {self.num_graphs} of {self.max_cached_graphs} graphs, {self.stats!r}>"


def _raised_in_graph(error: BaseException, key: DispatchKey) -> Decision:
    """How a call counts whose replay raised: a graph that failed, or an error of the model's own in it."""
    reason = Reason.REPLAY_FAILED if isinstance(error, ReplayError) else Reason.CALL_RAISED
    return Decision.eager(reason, key.num_tokens)


def _attempt_graph(
    server: Server, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, Any, Decision]:
    """Serve a call by a verified graph: whether one did, its answer, and the decision. Never runs the callable.

    Raises ``ReplayError`` if the graph cannot be replayed.
    """
    choice = server.preview(route, args, kwargs)
    if choice.entry is None or not choice.decision.reason.is_graph:
        return False, None, choice.decision
    with torch.no_grad():
        answer = server.observed(choice.entry, choice.rows, choice.leaves)
    server.local.decision = choice.decision
    return True, answer, choice.decision


def _first_registered(
    workers: Sequence[Worker], key: DispatchKey, modes: Sequence[DispatchMode] = tuple(GRAPH_MODES)
) -> Registered | None:
    """The graph of a key on the first worker that has it in one of these modes, or None."""
    check_key(key)
    for mode in modes:
        check_type("mode", mode, DispatchMode, "a DispatchMode")
    found = (worker.graphs.get((key, mode)) for worker in workers for mode in modes)
    return next((one for one in found if one is not None), None)


def check_key(key: Any) -> None:
    """Raise ``ConfigError`` unless ``key`` is the key of a batch."""
    if not isinstance(key, DispatchKey) or type(key.num_tokens) is not int or key.num_tokens < 1:
        raise ConfigError(
            f"key must be a DispatchKey with num_tokens >= 1, got {shown(key)}; create_dispatch_key() makes one"
        )


def checked_example(
    key: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an example call. Raises ``ConfigError`` for what is no key, and for what are no arguments."""
    check_key(key)
    check_type("args", args, (tuple, list), "a tuple of positional arguments, as (x,)")
    check_type("kwargs", {} if kwargs is None else kwargs, Mapping, "a mapping from names to arguments, or None")
    return tuple(args), dict(kwargs or {})


def _checked_addresses(input_ptrs: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(input_ptrs, Sequence) or not all(isinstance(pointer, int) for pointer in input_ptrs):
        raise ConfigError(f"input_ptrs must be addresses (tensor.data_ptr()) or None, got {shown(input_ptrs)}")
    return tuple(input_ptrs)
