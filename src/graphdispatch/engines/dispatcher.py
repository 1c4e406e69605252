"""``CudagraphDispatcher``: runs each key by a registered graph or by the eager runner, and counts why.

``CompositeDispatcher`` is one front for several of them, such as an encoder's, a draft model's and a decoder's.

Note [locks of a dispatcher]
    A comparison runs the eager runner with the server's lock and the pool's lock held, and the runner may register
    graphs. So nobody takes one of these two while holding the dispatcher's: a graph is published under that lock, and
    what it displaces is released after.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from time import perf_counter_ns
from typing import Any, NamedTuple

from ..backends import Backend, get_backend
from ..backends.base import Stopwatch
from ..backends.tracing import untraced
from ..copying import MadeAnew, make_lock
from ..descriptors import DispatchKey
from ..errors import CaptureError, ConfigError, ReplayError, check_callable, check_count, check_type, shown
from ..modes import CUDAGraphMode, DispatchMode
from ..reasons import Reason
from ..runtime.decide import Decision
from ..runtime.entry import CUDAGraphEntry
from ..runtime.prewarm import arguments_of
from ..runtime.server import Server
from ..stats import DispatchStats
from .policies import DefaultDispatchPolicy, DispatchPolicy
from .registered_graphs import GRAPH_MODES, Registered, RegisteredGraphs, Replayable, Worker, check_key, entry_around


class Chosen(NamedTuple):
    """What shall serve a call: a dispatcher's graph (None: its eager runner), the decision, and the nanoseconds that it
    took."""

    dispatcher: "CudagraphDispatcher"
    found: Registered | None
    decision: Decision
    spent: int


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
        check_type("policy", policy, (DispatchPolicy, type(None)), "a DispatchPolicy or None")
        self.eager_runner = eager_runner
        self.policy = policy or DefaultDispatchPolicy()
        """What decides, among the graphs of a key, whether and how to use them. Another may take its place at any
        time."""
        self.max_cached_graphs = max_cached_graphs
        self.enabled_modes = frozenset(DispatchMode)
        """The modes that are allowed now: see ``enable_mode`` and ``disable_mode``."""
        self._lock = make_lock()
        self._stopwatch = Stopwatch()
        self._timed_on: Backend | None = None
        """Where steps are timed, for a policy that learns."""
        self.stats = DispatchStats()
        """Calls by mode, and the reason for every eager one."""
        self.workers: Sequence[Worker] = (Worker(eager_runner, max_cached_graphs),)
        """Where the graphs are served."""
        self._registered = RegisteredGraphs()
        self._turns = count()

    def _recipe(self) -> Any:
        make, args, kwargs, _ = super()._recipe()
        return make, args, kwargs, {"policy": self.policy, "enabled_modes": self.enabled_modes}

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

        Args:
            key: The key.
            graph: A ``CUDAGraphEntry``, which brings its inputs and outputs, or any object with ``replay()``. It stays
                its owner's, who releases it. What another graph than an entry wrote before it failed cannot be known:
                ``dispatch`` raises ``ReplayError`` then, unless the graph raises one that says that it had no effects.
            input_ptrs: The addresses of the tensors that a graph other than an entry reads, in the order of a call's
                arguments: a call with others runs eagerly. None: the caller answers for what the graph reads.
            outputs: What a replay returns. None: ``graph.outputs``.
            mode: ``CUDAGRAPH`` or ``PIECEWISE``. A ``PIECEWISE`` entry is always the latter.

        Raises:
            ConfigError: An argument is wrong, or the graph was released.
        """
        check_key(key)
        if mode not in tuple(GRAPH_MODES):
            raise ConfigError(f"mode must be CUDAGRAPH or PIECEWISE for a graph, got {shown(mode)}")
        entry = graph
        if not isinstance(entry, CUDAGraphEntry):
            entry = entry_around(entry, key, outputs, mode=GRAPH_MODES[mode], addresses=input_ptrs)
        if entry.is_released:
            raise ConfigError(f"graph must not be released, got {graph!r}; capture it again")
        if entry.mode is CUDAGraphMode.PIECEWISE:
            mode = DispatchMode.PIECEWISE
        self._change([self._home(key, entry).wrap(key, mode, graph, entry)])

    def _home(self, key: DispatchKey, entry: CUDAGraphEntry) -> Worker:
        """Where a graph is registered: with the others of its pool, since these never run at the same time, or else
        where the key has no graph, and where the fewest are."""

        def order(worker: Worker) -> tuple[bool, bool, int]:
            own = [found for found in self._registered.graphs if found.worker is worker]
            pools = {worker.cache.pool, *(found.entry.pool for found in own)}
            return entry.pool not in pools, any(found.key == key for found in own), len(own)

        return min(self.workers, key=order)

    def _change(self, new: Sequence[Registered] = (), without: Collection[Registered] = ()) -> None:
        """Serve by ``new`` graphs from now on, in the place of older ones, and no longer by those of ``without``; by
        none of the new ones if one must not run beside another worker's. See Note [locks of a dispatcher]."""
        with self._lock:
            self._check_shared_writes(new)
            former = self._registered.graphs
            kept = {one.place: one for one in former if one not in without and not one.entry.is_released}
            kept |= {found.place: found for found in new}
            oldest = sorted(set(kept.values()).difference(new), key=lambda found: found.entry.last_used)
            for found in oldest[: max(len(kept) - self.max_cached_graphs * len(self.workers), 0)]:
                del kept[found.place]
            self._registered = RegisteredGraphs(kept.values())
        for found in {*former, *new, *without}.difference(kept.values()):
            found.worker.drop(found.route)

    def _check_shared_writes(self, new: Sequence[Registered]) -> None:
        """Raise ``ConfigError`` if new graphs must not run at the same time as those of other workers."""

    def has_graph(self, key: DispatchKey) -> bool:
        """Whether a graph of any mode is registered for a key now.

        Args:
            key: The key; a graph that would serve it padded does not count.
        """
        return self._registered.of(key) is not None

    def get_graph(self, key: DispatchKey) -> Replayable | CUDAGraphEntry | None:
        """The graph registered for a key, as it was given; a full one before a piecewise one.

        Args:
            key: The key.

        Returns:
            The graph, or None.
        """
        found = self._registered.of(key)
        return found.graph if found is not None else None

    def get_entry(self, key: DispatchKey) -> CUDAGraphEntry | None:
        """The entry of that graph: its replay count, last use and outputs.

        Args:
            key: The key.

        Returns:
            The entry, or None.
        """
        found = self._registered.of(key)
        return found.entry if found is not None else None

    @untraced
    def capture(self, key: DispatchKey, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        """Capture ``eager_runner(*args, **kwargs)``, once on each stream, and serve ``key`` by it from now on.

        The runs leave no effects. The graph serves calls that pass their arguments as the example does, with the same
        shapes, dtypes and constants, while the runner's weights stay as they are now.

        Args:
            key: The key.
            args: The positional arguments of the example.
            kwargs: The keyword arguments of the example.

        Raises:
            ConfigError: The key or the example is wrong, or streams would write the same memory.
            CaptureError: There can be no graph.
        """
        check_key(key)
        check_type("args", args, (tuple, list), "a tuple of positional arguments, as (x,)")
        check_type("kwargs", {} if kwargs is None else kwargs, Mapping, "a mapping from names to arguments, or None")
        made: list[Registered] = []
        try:
            for worker in self.workers:
                made.append(worker.capture(key, tuple(args), dict(kwargs or {})))
            self._change(made)
        except BaseException:
            self._change(without=made)
            raise

    @untraced
    def prewarm(self, keys: Iterable[DispatchKey], dummy_fn: Callable[[DispatchKey], Any]) -> list[DispatchKey]:
        """Capture the runner for those of ``keys`` that have no graph, largest first.

        A key that cannot be captured is left out. What ``dummy_fn`` and the runner raise passes through.

        Args:
            keys: The keys.
            dummy_fn: ``dummy_fn(key)`` gives the arguments of a call: a tensor, a tuple of positional arguments, a
                mapping of keyword arguments, or a pair of the latter two.

        Returns:
            Those of ``keys`` that have a graph then, largest first.

        Raises:
            ConfigError: One of ``keys`` is no key; raised before anything is captured.
        """
        check_callable("dummy_fn", dummy_fn, "a function from a key to arguments")
        wanted = list(dict.fromkeys(keys))
        for key in wanted:
            check_key(key)
        wanted.sort(key=lambda key: -key.num_tokens)
        for key in wanted:
            if not self.has_graph(key):
                with suppress(CaptureError):
                    self.capture(key, *arguments_of(dummy_fn(key)))
        return [key for key in wanted if self.has_graph(key)]

    @property
    def captured_sizes(self) -> list[int]:
        """The numbers of tokens whose decode key, of one token for each request, has a graph; increasing."""
        return sorted({key.num_tokens for key, _ in self.entries if key == DispatchKey(key.num_tokens, key.num_tokens)})

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
        return self.run_chosen(key, self.choose(key), args, kwargs)

    def choose(self, key: DispatchKey) -> Chosen:
        """What shall serve a call: a graph for its key, or the runner. Nothing is run.

        Whether the arguments fit the graph shows when it is served; if they do not, the runner serves the call.

        Args:
            key: What the batch is.

        Returns:
            The choice, for ``run_chosen``.
        """
        start = perf_counter_ns()
        found, decision = self._choose(key)
        return Chosen(self, found, decision, perf_counter_ns() - start)

    def _choose(self, key: DispatchKey) -> tuple[Registered | None, Decision]:
        """Takes no lock, unless a graph's owner has released it."""
        modes, policy = self.enabled_modes, self.policy
        try:
            graphs, offered, eager = self._registered.candidates[key, modes]
        except TypeError:
            check_key(key)
            raise
        if not graphs:
            return None, eager
        mode = DispatchMode.EAGER
        if policy.should_use_graph(key, True):
            mode = policy.select_mode(key, offered)
        if mode not in graphs:
            return None, Decision.eager(Reason.POLICY, key.num_tokens)
        found, decision = graphs[mode]
        one = found[next(self._turns) % len(found)]
        if one.entry.is_released:  # by its owner
            self._change(without=[one])
            return self._choose(key)
        return one, decision

    def run_chosen(self, key: DispatchKey, chosen: Chosen, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call as chosen, count it, and tell the policy how long it took.

        Args:
            key: What the batch is.
            chosen: What shall serve it.
            args: The positional arguments.
            kwargs: The keyword arguments.

        Returns:
            The outputs.
        """
        found, policy = chosen.found, self.policy
        server = (found.worker if found is not None else self.workers[0]).server
        self._timed_on = backend = self._timed_on or get_backend("auto")
        marks = self._stopwatch.start(backend) if policy.learns and not backend.is_watched() else None
        server.local.decision = None
        try:
            if found is None:
                result = Server.run_eagerly(server, chosen.decision, args, kwargs)  # here, whatever the worker's stream
            else:
                result = server.serve(found.route, args, kwargs)
        except BaseException as error:
            reason = Reason.REPLAY_FAILED if isinstance(error, ReplayError) else Reason.CALL_RAISED
            self._count(chosen, server.decision or Decision.eager(reason, key.num_tokens))
            raise
        decision = server.local.decision
        mode = self._count(chosen, decision)
        # A call that its graph did not serve says nothing of either way to run the step: it was looked at, compared, or
        # replayed in vain, and may have run on another stream.
        if marks is not None and (found is None or mode is not DispatchMode.EAGER):
            self._stopwatch.stop(marks, partial(policy.record, key, mode))
        return result

    def _count(self, chosen: Chosen, decision: Decision) -> DispatchMode:
        """Count a call that ran as ``decision`` says, and forget its graph if that is gone; the mode that it ran in."""
        found, mode = chosen.found, DispatchMode.EAGER
        if found is not None and not decision.is_eager:
            mode = found.mode
        elif found is not None and found.is_gone:
            self._change(without=[found])
        self.stats.record(mode, decision.reason, chosen.spent)
        return mode

    def enable_mode(self, mode: DispatchMode) -> None:
        """Allow a mode again.

        Args:
            mode: The mode. Without ``HYBRID`` the policy is offered a full graph or eager, and a piecewise graph where
                there is no full one.

        Raises:
            ConfigError: It is no mode.
        """
        check_type("mode", mode, DispatchMode, "a DispatchMode, as DispatchMode.PIECEWISE")
        with self._lock:
            self.enabled_modes |= {mode}

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
        with self._lock:
            self.enabled_modes -= {mode}

    @property
    def num_graphs(self) -> int:
        """How many graphs are registered."""
        return len(self._registered.graphs)

    @property
    def entries(self) -> list[tuple[DispatchKey, CUDAGraphEntry]]:
        """All registered graphs with their keys."""
        return [(found.key, found.entry) for found in self._registered.graphs]

    def clear_cache(self) -> None:
        """Forget all graphs; registered ones stay their owners'. The statistics stay."""
        self._change(without=self._registered.graphs)

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
        _, found, decision, _ = self.choose(key)
        if found is None:
            return decision.explain()
        return found.worker.server.explain(found.route, args, kwargs, key.num_tokens)

    def __repr__(self) -> str:
        most = self.max_cached_graphs * len(self.workers)
        return f"<{type(self).__name__} {self.num_graphs} of {most} graphs, {self.stats!r}>"


_Member = tuple[int, Any, Callable[[DispatchKey], bool] | None]
"""A member's priority, the dispatcher, and whether a key is its own; None: every key is."""


class CompositeDispatcher(MadeAnew):
    """Dispatches over members by priority: the first graph for a key serves, else the first member's runner.

    The member that was chosen runs the call: if the arguments do not fit its graph, or that fails before it has changed
    anything, its own runner does. An error that the runner raises passes through, and nothing runs twice. ``stats``
    sums up all members. Thread-safe.
    """

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        """By name, in the order in which they are tried; replaced whole."""
        self._lock = make_lock()

    def _recipe(self) -> Any:
        make, args, kwargs, _ = super()._recipe()
        return make, args, kwargs, {"_members": self._members}

    def add_dispatcher(
        self,
        name: str,
        dispatcher: "CudagraphDispatcher | CompositeDispatcher",
        priority: int = 0,
        *,
        accepts: Callable[[DispatchKey], bool] | None = None,
    ) -> None:
        """Add a member.

        Args:
            name: Its name, which no other member has.
            dispatcher: The dispatcher; another composite will do.
            priority: Higher priorities come first, and among equal ones those added first.
            accepts: Whether a key is the member's at all, for members that do different work. None: every key is.

        Raises:
            ConfigError: The name is taken, or an argument is wrong.
        """
        if accepts is not None:
            check_callable("accepts", accepts, "a function of a key, or None")
        if not isinstance(dispatcher, (CudagraphDispatcher, CompositeDispatcher)) or dispatcher is self:
            raise ConfigError(f"dispatcher must be another dispatcher, got {shown(dispatcher)}")
        with self._lock:
            if name in self._members:
                raise ConfigError(f"name {name!r} is taken; names are {list(self.members)}")
            members = {**self._members, name: (priority, dispatcher, accepts)}
            self._members = dict(sorted(members.items(), key=lambda item: -item[1][0]))

    @untraced
    def dispatch(self, key: DispatchKey, *args: Any, **kwargs: Any) -> Any:
        """Run one call. What the graph or the runner raises passes through.

        Args:
            key: What the batch is.
            *args: The positional arguments.
            **kwargs: The keyword arguments.

        Returns:
            The outputs.

        Raises:
            ConfigError: No member accepts the key.
        """
        chosen = self.choose(key)
        if chosen is None:
            raise ConfigError(f"no member accepts {key}; members are {list(self.members)}")
        return chosen.dispatcher.run_chosen(key, chosen, args, kwargs)

    def choose(self, key: DispatchKey) -> Chosen | None:
        """What shall serve a call: the first member's graph for its key, or the runner of the first. Runs nothing.

        Args:
            key: What the batch is.

        Returns:
            The choice of one of the members; None if none accepts the key.
        """
        first: Chosen | None = None
        for _, dispatcher, accepts in self._members.values():
            chosen: Chosen | None = dispatcher.choose(key) if accepts is None or accepts(key) else None
            if chosen is not None and chosen.found is not None:
                return chosen
            first = first or chosen
        return first

    @property
    def stats(self) -> DispatchStats:
        """The counters of all members together, as they are now; calls made to a member directly count too."""
        return DispatchStats([dispatcher.stats for _, dispatcher, _ in self._members.values()])

    @property
    def members(self) -> tuple[str, ...]:
        """The names of the members, in the order in which they are tried."""
        return tuple(self._members)

    def __repr__(self) -> str:
        return f"<CompositeDispatcher {', '.join(self.members) or 'empty'}: {self.stats!r}>"
