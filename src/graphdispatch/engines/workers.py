"""Workers: a server with the graphs registered there, and the stream, if any, on which their steps run.

Note [a step on a worker's stream]
    Everything that touches a worker's pool runs on the worker's queue: loading, replay, handing out, and captures and
    comparisons too. A thread that held the pool's lock while it waited for the queue would wait for work that needs
    that lock. The worker first waits for what the caller's stream was given before the call, and the caller's stream
    waits for the worker before it sees the outputs. Failures stay in the step's ``StreamResult``: a worker never fails.

Note [locks of a worker]
    A comparison runs the eager runner with the server's lock and the pool's lock held, and the runner may register
    graphs. So nobody takes one of these two while holding the lock of a worker's graphs, or of a dispatcher: a graph is
    published under those locks, and what it displaces is released after.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ..backends import Backend, Pool
from ..backends.base import Event, Stream
from ..backends.tracing import untraced
from ..call.rules import ArgumentRules
from ..call.signature import Refusal
from ..call.spec import is_tensor
from ..config import CUDAGraphOptions
from ..copying import NotCopied
from ..decide.decision import Decision, SizeTable
from ..descriptors import BatchDescriptor, DispatchKey
from ..errors import CaptureError, ConfigError, check_type, shown
from ..forking import make_lock, renew_in_child
from ..memory.cache import GraphCache, Victim
from ..memory.entry import CUDAGraphEntry
from ..modes import CUDAGraphMode, DispatchMode, EntryState
from ..reasons import Reason
from ..serve.group import Route
from ..serve.server import Server
from ..stats import EvictionReason
from .external_graphs import Replayable, entry_around
from .policies import DispatchPolicy
from .registered import GRAPH_MODES, Registered, RegisteredGraphs, Slot, check_key

__all__ = ["Leaving", "StreamResult", "StreamWorker", "Worker", "first_registered"]


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
        input_ptrs: Sequence[int] | None,
        outputs: Any,
        mode: DispatchMode,
        idempotent: bool,
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
        server = self.server
        with torch.no_grad(), server.lock:
            server.graphs.refresh()
            found = server.find(route, args, kwargs)
            if isinstance(found, Refusal):
                raise CaptureError(f"no graph for {key}: {found.detail}", found.reason)
            group, leaves, _ = found
            server.graphs.warm_up(group, leaves, 1)
            result = server.graphs.capture(group, leaves, 1, 1, keep_effects=False)
            if result.entry is None:
                server.drop(route)
                raise CaptureError(f"no graph for {key}: {result.detail}", result.reason) from result.error
            return Registered(key, DispatchMode.CUDAGRAPH, result.entry, result.entry, route)

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


def first_registered(
    workers: Sequence[Worker], key: DispatchKey, modes: Sequence[DispatchMode] = tuple(GRAPH_MODES)
) -> Registered | None:
    """The graph of a key on the first worker that has it in one of these modes, or None."""
    check_key(key)
    for mode in modes:
        check_type("mode", mode, DispatchMode, "a DispatchMode")
    found = (worker.graphs.get((key, mode)) for worker in workers for mode in modes)
    return next((one for one in found if one is not None), None)


class StreamResult(NotCopied):
    """The handle on a submitted call.

    Attributes:
        worker: The index of the worker that runs it; None for a call that ran at once.
    """

    def __init__(self, backend: Backend, worker: int | None = None) -> None:
        self.worker = worker
        self._backend = backend
        self._done: Event | None = None
        self._is_filled = False
        self._value: Any = None
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether the device has finished the step. Never blocks."""
        return self._is_filled and (self._done is None or self._done.query())

    @untraced
    def result(self) -> Any:
        """The outputs, which are the caller's; raises what the step raised.

        Orders the calling thread's current stream after the worker. Blocks the host only where the stream has no queue.
        """
        if self._done is not None:
            self._done.wait()
            if not self._is_filled:
                self._done.synchronize()
            _hold(self._value, self._backend.current_stream())
        if self._error is not None:
            raise self._error
        return self._value

    def mark(self, done: Event) -> None:
        """Mark the end of the step in the worker's order.

        Args:
            done: The event that follows the step.
        """
        self._done = done

    def fill(self, step: Callable[[], Any]) -> None:
        """Run the step and keep what it returns or raises. Called once, by whoever runs the step.

        Args:
            step: The step.
        """
        try:
            self._value = step()
        except BaseException as error:  # whatever it is, it belongs to whoever asks for the result
            self._error = error
        self._is_filled = True

    def __repr__(self) -> str:
        where = "eager" if self.worker is None else f"worker {self.worker}"
        return f"<StreamResult {where}, {'done' if self.is_done else 'under way'}>"


class StreamWorker(Worker):
    """A worker with a stream and a pool of its own; made by ``StreamDispatcher``. Thread-safe.

    ``pool`` is for captures that are registered on this worker alone, for example
    ``CUDAGraphWrapper(fn, backend=dispatcher.backend, pool=worker.pool)``.
    """

    def __init__(
        self,
        index: int,
        backend: Backend,
        eager_runner: Callable[..., Any],
        max_cached_graphs: int,
        options: CUDAGraphOptions,
    ) -> None:
        self.index = index
        self.backend = backend
        self.stream = backend.make_stream()
        self.pool = backend.make_pool()
        super().__init__(eager_runner, max_cached_graphs, options, backend=backend, pool=self.pool)
        self.steps = 0
        """Steps that were given to this worker."""
        self.is_closed = False
        """Whether it takes no more steps."""
        self._counts = make_lock()
        self._marks: deque[Event] = deque()
        self._claims = 0
        renew_in_child(self)

    def after_fork(self) -> None:
        """Take no more steps, so that they run eagerly: see Note [after a fork] in ``forking.py``."""
        self.is_closed = True
        self._claims = 0
        self._marks.clear()

    @property
    def busy(self) -> int:
        """Steps that are not finished."""
        with self._counts:
            while self._marks and self._marks[0].query():
                self._marks.popleft()
            return len(self._marks) + self._claims

    def launch(self, step: Callable[[], Any], arguments: Any) -> StreamResult:
        """Put a step on the worker's queue: see Note [a step on a worker's stream]. Raises ``BackendError`` after
        ``close``."""
        outcome = StreamResult(self.backend, self.index)
        arrived = self.backend.make_event()
        arrived.record()
        _hold(arguments, self.stream)

        def after_caller() -> Any:
            # Inside the step, so that a failure of the caller's stream is this step's and not the worker's.
            arrived.wait()
            return step()

        with self._counts:
            self._claims += 1
        done = self.backend.make_event()
        try:
            self.stream.submit(lambda: outcome.fill(after_caller))
            done.record(self.stream)
            outcome.mark(done)
        finally:
            with self._counts:
                self._claims -= 1
                self._marks.append(done)
                self.steps += 1
        return outcome

    def close(self) -> None:
        """Finish all steps, and release the graphs captured here, the pool and the stream. Idempotent."""
        self.is_closed = True
        self.stream.synchronize()
        self.clear()
        self.stream.close()
        self.pool.close()

    def __repr__(self) -> str:
        return (
            f"<StreamWorker {self.index}: {len(self.graphs)} graphs, {self.busy} steps under way, {self.steps} in all>"
        )


def _checked_addresses(input_ptrs: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(input_ptrs, Sequence) or not all(isinstance(pointer, int) for pointer in input_ptrs):
        raise ConfigError(f"input_ptrs must be addresses (tensor.data_ptr()) or None, got {shown(input_ptrs)}")
    return tuple(input_ptrs)


def _hold(tree: Any, stream: Stream) -> None:
    """Keep the memory of the tensors in ``tree`` from being used again before ``stream`` is done with it.

    A caching allocator knows only the stream that a tensor was made on.
    """
    native = getattr(stream, "native", None)
    if native is not None:
        for leaf in tree_leaves(tree):
            if is_tensor(leaf) and leaf.is_cuda:
                leaf.record_stream(native)
