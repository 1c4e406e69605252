"""``StreamDispatcher``: a dispatcher over several streams, whose graphs run at the same time.

Note [a step on a worker's stream]
    Everything that touches a worker's pool is given to the worker's stream: loading, replay, handing out, and captures
    and comparisons too. The stream first waits for what the caller's stream was given before the call, and the caller's
    stream waits for the worker's before it sees the outputs. A call that no graph serves runs on the caller's stream: a
    runner may write memory of its own, and would do so on two streams at once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch.utils._pytree import tree_leaves

from ..backends import Backend, get_backend
from ..backends.base import Event, Pool, Stream
from ..backends.tracing import untraced
from ..config import CUDAGraphOptions
from ..copying import NotCopied
from ..descriptors import DispatchKey
from ..errors import ConfigError, check_count
from ..runtime.entry import CUDAGraphEntry
from ..runtime.flatten import is_tensor
from ..runtime.outputs import OutputView
from ..runtime.server import Server
from .dispatcher import Chosen, CudagraphDispatcher
from .policies import DispatchPolicy
from .registered_graphs import Registered, Worker

_NOT_HONOURED = (
    *("capture_after", "capture_share", "max_signatures"),
    *("max_cached_graphs", "memory_budget_bytes"),
)


class StreamResult(NotCopied):
    """The handle on a submitted call.

    Attributes:
        worker: The index of the worker whose graph was to serve it; None for a call without a graph.
    """

    def __init__(self, step: Callable[[], Any], backend: Backend, worker: int | None = None) -> None:
        self.worker = worker
        self._backend = backend
        self._done: Event = backend.make_event()
        self._value: Any = None
        self._error: BaseException | None = None
        try:
            self._value = step()
        except BaseException as error:  # whatever it is, it belongs to whoever takes the result
            self._error = error
        self._done.record(backend.current_stream())

    @property
    def is_done(self) -> bool:
        """Whether the device has finished the step. Never blocks."""
        return bool(self._done.query())

    @untraced
    def result(self) -> Any:
        """The outputs, which are the caller's; raises what the step raised.

        Orders the calling thread's current stream after the step, and does not block the host.
        """
        self._done.wait(self._backend.current_stream())
        _hold(self._value, self._backend.current_stream())
        if self._error is not None:
            raise self._error
        return self._value


class _StreamServer(Server):
    """Runs on the caller's stream what its graphs do not serve: see Note [a step on a worker's stream]."""

    def run_eagerly(self, *call: Any, **more: Any) -> Any:
        """The same, on the stream of the caller, for which the worker's then waits."""
        backend, caller = cast(Backend, self.graphs.cache.backend), cast(Stream, self.local.caller)
        ran = backend.make_event()
        try:
            with backend.use_stream(caller):
                return super().run_eagerly(*call, **more)
        finally:
            ran.record(caller)
            ran.wait(backend.current_stream())


class StreamWorker(Worker):
    """A worker with a stream and a pool of its own; made by ``StreamDispatcher``. Thread-safe.

    What is captured in its ``pool``, for example by ``CUDAGraphWrapper(fn, backend=dispatcher.backend,
    pool=worker.pool)``, is registered with it.
    """

    serves_by = _StreamServer

    def __init__(self, index: int, dispatcher: "StreamDispatcher") -> None:
        self.index = index
        self.backend = backend = dispatcher.backend
        self.stream = backend.make_stream()
        super().__init__(dispatcher.eager_runner, dispatcher.max_cached_graphs, dispatcher.options, backend=backend)
        self.pool = cast(Pool, self.cache.pool)

    def capture(self, key: DispatchKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Registered:
        """The same, on the worker's stream."""
        return cast(Registered, self.launch(partial(super().capture, key, args, kwargs), (args, kwargs)).result())

    def launch(self, step: Callable[[], Any], arguments: Any) -> StreamResult:
        """Give a step to the worker's stream: see Note [a step on a worker's stream]."""
        arrived, self.server.local.caller = self.backend.make_event(), self.backend.current_stream()
        arrived.record(self.server.local.caller)
        _hold(arguments, self.stream)
        with self.backend.use_stream(self.stream):
            arrived.wait(self.stream)
            return StreamResult(step, self.backend, self.index)


class StreamDispatcher(CudagraphDispatcher):
    """A ``CudagraphDispatcher`` over several workers, each with a stream of its own, whose graphs run at the same time.

    Workers take turns among those that have a graph for the key. A graph of somebody else is registered with one
    worker: that of its pool, else one without a graph for the key. ``submit`` starts a call and returns at once;
    ``dispatch`` lets the caller's stream wait for its outputs. Calls overlap if they come from several streams or
    threads, or were all submitted before the first ``result``. On the CPU, whose streams have no queues, only those of
    several threads do. Graphs of two workers must not share memory that one of them writes; it is refused
    as far as it can be seen (entries of this library). Thread-safe.

    Args:
        eager_runner: Called as ``eager_runner(*args, **kwargs)`` wherever no graph serves; its answer is the reference.
        num_streams: The number of workers.
        policy: Decides whether and how to use graphs. None: ``DefaultDispatchPolicy()``.
        max_cached_graphs: The most graphs kept for each worker; of all graphs the least recently used goes.
        backend: Where graphs run. None: as ``get_backend("auto")``.
        options: How graphs are captured, checked and replayed.

    Raises:
        ConfigError: An argument is wrong, or an option cannot be honoured here.
    """

    workers: Sequence[StreamWorker]

    def __init__(
        self,
        eager_runner: Callable[..., Any],
        num_streams: int = 2,
        *,
        policy: DispatchPolicy | None = None,
        max_cached_graphs: int = 64,
        backend: Backend | None = None,
        options: CUDAGraphOptions | None = None,
    ) -> None:
        check_count("num_streams", num_streams)
        self.backend = backend or get_backend("auto")
        self.options = CUDAGraphOptions.or_default(options, "options")
        self.options.refuse(_NOT_HONOURED, "StreamDispatcher", "it keeps max_cached_graphs= graphs for each worker")
        super().__init__(eager_runner, policy, max_cached_graphs)
        self._timed_on = self.backend
        self.workers = tuple(StreamWorker(index, self) for index in range(num_streams))

    @untraced
    def submit(self, key: DispatchKey, *args: Any, **kwargs: Any) -> StreamResult:
        """Start one call on a worker, or on the caller's stream where no graph serves it. Raises nothing of the call.

        Args:
            key: What the batch is.
            *args: The positional arguments.
            **kwargs: The keyword arguments.

        Returns:
            A handle, whose ``result()`` gives the outputs or raises what the call raised.
        """
        return self._start(key, self.choose(key), args, kwargs)

    def run_chosen(self, key: DispatchKey, chosen: Chosen, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call as chosen, and make the caller's stream wait for its outputs.

        Args:
            key: What the batch is.
            chosen: What shall serve it.
            args: The positional arguments.
            kwargs: The keyword arguments.

        Returns:
            The outputs.
        """
        return self._start(key, chosen, args, kwargs).result()

    def _start(self, key: DispatchKey, chosen: Chosen, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StreamResult:
        step = partial(super().run_chosen, key, chosen, args, kwargs)
        if chosen.found is None:
            return StreamResult(step, self.backend)
        return cast(StreamWorker, chosen.found.worker).launch(step, (args, kwargs))

    def close(self) -> None:
        """Finish all steps, and release the graphs and the memory of the workers; later calls run eagerly.
        Idempotent."""
        self.clear_cache()
        for worker in self.workers:
            worker.stream.synchronize()
            worker.pool.trim()

    def _check_shared_writes(self, new: Sequence[Registered]) -> None:
        for one, other in product(new, (*new, *self._registered.graphs)):
            if one.worker is not other.worker and _do_share_writes(one.entry, other.entry):
                workers = sorted(cast(StreamWorker, found.worker).index for found in (one, other))
                raise ConfigError(
                    f"graphs for workers {workers[0]} and {workers[1]} share memory that one of them writes, and would "
                    "run at the same time; use num_streams=1, or a CudagraphDispatcher"
                )


def _do_share_writes(*entries: CUDAGraphEntry) -> bool:
    """Whether one of two graphs writes memory that the other one reads or writes."""
    return any(
        one.written is not None and any(one.written.overlaps(tensor) for tensor in other.held)
        for one, other in (entries, entries[::-1])
    )


def _hold(tree: Any, stream: Stream) -> None:
    """Keep the memory of the tensors in ``tree`` from being used again before ``stream`` is done with it.

    A caching allocator knows only the stream that a tensor was made on.
    """
    if isinstance(stream, torch.Stream):
        for leaf in tree_leaves(tree._value if isinstance(tree, OutputView) else tree):
            if is_tensor(leaf) and leaf.device.type != "cpu":
                leaf.record_stream(stream)
