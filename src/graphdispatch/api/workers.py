"""Workers: a server with the graphs registered there, and the stream, if any, on which their steps run.

Note [a step on a worker's stream]
    Everything that touches a worker's pool runs on the worker's queue: loading, replay, handing out, and captures and
    comparisons too. A thread that held the pool's lock while it waited for the queue would wait for work that needs
    that lock. The worker first waits for what the caller's stream was given before the call, and the caller's stream
    waits for the worker before it sees the outputs. Failures stay in the step's ``StreamResult``: a worker never fails.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..backends import Backend, Pool
from ..backends.base import Event, Stream
from ..call.rules import ArgumentRules
from ..call.signature import Refusal
from ..config import CUDAGraphOptions
from ..decide.decision import Decision, SizeTable
from ..decide.policies import DispatchPolicy
from ..descriptors import BatchDescriptor, DispatchKey
from ..errors import CaptureError, ConfigError
from ..memory.cache import GraphCache
from ..memory.entry import CUDAGraphEntry
from ..memory.foreign import Replayable, entry_around
from ..modes import CUDAGraphMode, DispatchMode
from ..reasons import Reason
from ..serve.group import Route
from ..serve.server import Server
from ..stats import EvictionReason
from .registered import GRAPH_MODES, Registered, RegisteredGraphs, Slot

__all__ = ["StreamResult", "StreamWorker", "Worker", "first_registered"]


class Worker:
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
        self.cache = GraphCache(max_cached_graphs, eviction="lru")
        self.server = Server(eager_runner, options or CUDAGraphOptions(), self.cache, backend=backend, pool=pool)
        self._graphs = RegisteredGraphs({}, frozenset(DispatchMode))
        self._lock = threading.RLock()

    @property
    def graphs(self) -> Mapping[Slot, Registered]:
        """All graphs, by key and mode."""
        return self._graphs.graphs

    @property
    def modes(self) -> frozenset[DispatchMode]:
        """The modes that are allowed now."""
        return self._graphs.modes

    @modes.setter
    def modes(self, modes: frozenset[DispatchMode]) -> None:
        with self._lock:
            self._graphs = RegisteredGraphs(self.graphs, modes)

    def register(
        self,
        key: DispatchKey,
        graph: Replayable | CUDAGraphEntry,
        input_ptrs: Sequence[int] | None,
        outputs: Any,
        mode: DispatchMode,
        idempotent: bool,
    ) -> None:
        """See ``CudagraphDispatcher.register_graph``."""
        if not isinstance(key, DispatchKey) or key.num_tokens < 1:
            raise ConfigError(f"key must be a DispatchKey with num_tokens >= 1, got {key!r}")
        if mode not in GRAPH_MODES:
            raise ConfigError(f"mode must be CUDAGRAPH or PIECEWISE for a graph, got {mode!r}")
        if isinstance(graph, CUDAGraphEntry):
            entry = graph
            mode = DispatchMode.PIECEWISE if entry.mode is CUDAGraphMode.PIECEWISE else mode
        elif isinstance(graph, Replayable):
            outputs = outputs if outputs is not None else getattr(graph, "outputs", None)
            addresses = None if input_ptrs is None else _checked_addresses(input_ptrs)
            piecewise = mode is DispatchMode.PIECEWISE
            entry = entry_around(graph, key, outputs, piecewise=piecewise, idempotent=idempotent, addresses=addresses)
        else:
            raise ConfigError(f"graph must have a replay() method, got {graph!r}")
        pads = any(spec.dim is not None for spec in entry.inputs.specs)
        table = SizeTable.of_one(entry.size, entry.mode, entry.descriptor, pads=pads)
        self._put(Registered(key, mode, graph, entry, Route((key, mode), table, entry=entry)))

    def capture(self, key: DispatchKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Registered:
        """Capture the runner on these example arguments; ``keep`` publishes the graph, ``drop`` releases it."""
        descriptor = BatchDescriptor(key.num_tokens, key.num_reqs)
        route = Route(
            (key, DispatchMode.CUDAGRAPH),
            SizeTable.of_one(1, CUDAGraphMode.FULL, descriptor),
            ArgumentRules({}, {}, frozenset()),
            descriptor=descriptor,
            captures=False,
            is_single=True,
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

    def keep(self, found: Registered) -> None:
        """Serve a key by a graph that ``capture`` made."""
        with self._lock:
            graphs = dict(self.graphs)
            self._forget(graphs.pop((found.key, found.mode), None))
            graphs[found.key, found.mode] = found
            self._graphs = RegisteredGraphs(graphs, self.modes)
            self.tidy()

    def _put(self, found: Registered) -> None:
        slot = (found.key, found.mode)
        with self._lock:
            graphs = dict(self.graphs)
            self._forget(graphs.pop(slot, None))
            victims = self.cache.add(slot, found.entry, owns=False)
            graphs[slot] = found
            self._graphs = RegisteredGraphs(graphs, self.modes)
            self.server.graphs.release(victims)
            self.tidy()

    def choose(self, key: DispatchKey, policy: DispatchPolicy) -> tuple[Registered | None, Decision]:
        """The graph that shall serve a key and its decision, or None and why eager does. Takes no lock."""
        graphs = self._graphs
        choice = graphs.choices[key]
        if not choice.graphs:
            return None, choice.eager
        if not policy.should_use_graph(key, True):
            return None, Decision.eager(Reason.POLICY, key.num_tokens)
        mode = policy.select_mode(key, choice.modes) if DispatchMode.HYBRID in graphs.modes else choice.modes[0]
        return choice.graphs.get(mode) or (None, Decision.eager(Reason.POLICY, key.num_tokens))

    def drop(self, found: Registered) -> None:
        """Forget a graph, unless another has taken its place; one that was captured here is released."""
        with self._lock:
            graphs = dict(self.graphs)
            if graphs.get((found.key, found.mode)) is found:
                del graphs[found.key, found.mode]
                self._graphs = RegisteredGraphs(graphs, self.modes)
            self._forget(found)

    def discard(self, entry: CUDAGraphEntry) -> None:
        """Forget an entry, whatever its key."""
        for found in list(self.graphs.values()):
            if found.entry is entry:
                self.drop(found)

    def tidy(self) -> None:
        """Forget the graphs that were released, or that had to go for others."""
        with self._lock:
            kept = set(self.cache)
            for found in list(self.graphs.values()):
                if found.is_gone or found.entry not in kept:
                    self.drop(found)

    def clear(self) -> None:
        """Forget all graphs."""
        for found in list(self.graphs.values()):
            self.drop(found)

    def _forget(self, found: Registered | None) -> None:
        if found is None:
            return
        with self.server.lock:
            self.server.drop(found.route)
            if found.route.entry is not None:
                self.cache.remove((found.key, found.mode))
            else:
                self.server.graphs.release(self.cache.retire(found.entry, EvictionReason.DROPPED))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self.graphs)} graphs>"


def first_registered(
    workers: Sequence[Worker], key: DispatchKey, modes: Sequence[DispatchMode] = tuple(GRAPH_MODES)
) -> Registered | None:
    """The graph of a key on the first worker that has it in one of these modes, or None."""
    found = (worker.graphs.get((key, mode)) for worker in workers for mode in modes)
    return next((one for one in found if one is not None), None)


class StreamResult:
    """What a submitted call gives back; ``worker`` is the index of the worker that runs it, None for an eager call."""

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

    def result(self) -> Any:
        """The outputs, which are the caller's; raises what the step raised.

        Orders the calling thread's current stream after the worker. Blocks only where the stream has no queue.
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
        """``done`` stands behind the step in the worker's order."""
        self._done = done

    def fill(self, step: Callable[[], Any]) -> None:
        """Run ``step`` and keep what it returns or raises. Called once, by whoever runs the step."""
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
        self._counts = threading.Lock()
        self._marks: deque[Event] = deque()
        self._claims = 0

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
        """Finish all steps, and release the graphs captured here, the pool and the stream."""
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
        raise ConfigError(f"input_ptrs must be addresses (tensor.data_ptr()) or None, got {input_ptrs!r}")
    return tuple(input_ptrs)


def _hold(tree: Any, stream: Stream) -> None:
    """Keep the memory of the tensors in ``tree`` from being used again before ``stream`` is done with it.

    A caching allocator knows only the stream that a tensor was made on.
    """
    native = getattr(stream, "native", None)
    if native is not None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                leaf.record_stream(native)
