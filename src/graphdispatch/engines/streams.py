"""``StreamDispatcher``: a dispatcher over several streams, whose graphs run at the same time.

Note [a step on a worker's stream]
    Everything that touches a worker's pool runs on the worker's queue: loading, replay, handing out, and captures and
    comparisons too. A thread that held the pool's lock while it waited for the queue would wait for work that needs
    that lock. The worker first waits for what the caller's stream was given before the call, and the caller's stream
    waits for the worker before it sees the outputs. Failures stay in the step's ``StreamResult``: a worker never fails.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, product
from typing import Any, cast

import torch
from torch.utils._pytree import tree_leaves

from ..backends import Backend, get_backend
from ..backends.base import Event, Pool, Stream
from ..backends.tracing import untraced
from ..call.spec import is_tensor
from ..config import CUDAGraphOptions
from ..copying import NotCopied, renew_in_child
from ..decide import Decision
from ..descriptors import DispatchKey
from ..errors import BackendError, ConfigError, check_count
from ..memory.entry import CUDAGraphEntry
from ..reasons import Reason
from .dispatcher import Chosen, CudagraphDispatcher
from .policies import DispatchPolicy
from .registered_graphs import Registered, Worker

__all__ = ["StreamDispatcher", "StreamResult", "StreamWorker"]

_NOT_HONOURED = (
    *("capture_after", "capture_share", "max_signatures"),
    *("max_cached_graphs", "memory_budget_bytes"),
)


class StreamResult(NotCopied):
    """The handle on a submitted call.

    Attributes:
        worker: The index of the worker that runs it; None for a call that ran at once.
    """

    def __init__(self, backend: Backend, worker: int | None = None, done: Event | None = None) -> None:
        self.worker = worker
        self._backend = backend
        self._done = done
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
            self._done.wait(self._backend.current_stream())
            if not self._is_filled:
                self._done.synchronize()
            _hold(self._value, self._backend.current_stream())
        if self._error is not None:
            raise self._error
        return self._value

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

    What is captured in its ``pool``, for example by ``CUDAGraphWrapper(fn, backend=dispatcher.backend,
    pool=worker.pool)``, is registered with it.
    """

    def __init__(self, index: int, dispatcher: "StreamDispatcher") -> None:
        self.index = index
        self.backend = backend = dispatcher.backend
        self.stream = backend.make_stream()
        runner, most = dispatcher.eager_runner, dispatcher.max_cached_graphs
        super().__init__(runner, most, dispatcher.options, backend=backend)
        self.pool = cast(Pool, self.cache.pool)
        self.is_closed = False
        """Whether it takes no more steps."""
        renew_in_child(self)

    def after_fork(self) -> None:
        """Take no more steps, so that they run eagerly: see Note [after a fork] in ``copying.py``."""
        self.is_closed = True

    def capture(self, key: DispatchKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Registered:
        """The same, on the worker's stream."""
        step = self.launch(partial(super().capture, key, args, kwargs), (args, kwargs))
        return cast(Registered, step.result())

    def launch(self, step: Callable[[], Any], arguments: Any) -> StreamResult:
        """Put a step on the worker's queue: see Note [a step on a worker's stream]. Raises ``BackendError`` after
        ``close``."""
        self._check_open()
        arrived, done = self.backend.make_event(), self.backend.make_event()
        outcome = StreamResult(self.backend, self.index, done)
        arrived.record(self.backend.current_stream())
        _hold(arguments, self.stream)

        def after_caller() -> Any:
            # Inside the step, so that a failure of the caller's stream is this step's and not the worker's.
            arrived.wait(self.stream)
            return step()

        self.backend.submit(self.stream, lambda: outcome.fill(after_caller))
        done.record(self.stream)
        return outcome

    def _check_open(self) -> None:
        if self.is_closed:
            raise BackendError("this worker takes no more steps: its dispatcher was closed, or the process forked")

    def close(self) -> None:
        """Finish all steps, and release the graphs captured here. Idempotent."""
        self.is_closed = True
        self.stream.synchronize()
        self.clear()
        self.pool.trim()


class StreamDispatcher(CudagraphDispatcher):
    """A ``CudagraphDispatcher`` over several workers, each with a stream of its own, whose graphs run at the same time.

    Workers take turns among those that have a graph for the key. A graph of somebody else is registered with one
    worker: that of its pool, else one without a graph for the key. ``submit`` starts a call and returns at once;
    ``dispatch`` waits (on CUDA: lets the caller's stream wait) for its outputs. Calls overlap if they come from several
    streams or threads, or were all submitted before the first ``result``. On the CPU, whose streams have no queues,
    only those of several threads do. Graphs of two workers must not share memory that one of them writes; it is refused
    as far as it can be seen (entries of this library). Thread-safe.

    Args:
        eager_runner: Called as ``eager_runner(*args, **kwargs)`` wherever no graph serves; its answer is the reference.
        num_streams: The number of workers.
        policy: Decides whether and how to use graphs. None: ``DefaultDispatchPolicy()``.
        max_cached_graphs: The most graphs that each worker keeps; the least recently used goes.
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
        self.workers = tuple(StreamWorker(index, self) for index in range(num_streams))
        self._turns = count()

    @untraced
    def submit(self, key: DispatchKey, *args: Any, **kwargs: Any) -> StreamResult:
        """Start one call on a worker. Never raises what the call raises.

        A call without a graph runs here and now, on the caller's stream: a runner may write state of its own, and would
        do so on two streams at once.

        Args:
            key: What the batch is.
            *args: The positional arguments.
            **kwargs: The keyword arguments.

        Returns:
            A handle, whose ``result()`` gives the outputs or raises what the call raised.
        """
        return self._start(key, self.choose(key), args, kwargs)

    def serve(self, key: DispatchKey, chosen: Chosen, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        """Give a step to its worker; or run it here and now, without a graph or if the worker was closed meanwhile."""
        serve = super().serve
        if chosen.found is not None:
            worker = cast(StreamWorker, chosen.found.worker)
            try:
                return worker.launch(partial(serve, key, chosen, args, kwargs), (args, kwargs))
            except BackendError:
                if not worker.is_closed:
                    raise
            chosen = chosen._replace(found=None, decision=Decision.eager(Reason.NOT_CAPTURED, key.num_tokens))
        done = StreamResult(self.backend)
        done.fill(partial(serve, key, chosen, args, kwargs))
        return done

    def close(self) -> None:
        """Finish all steps, release the workers' graphs; later calls run eagerly. Idempotent."""
        for worker in self.workers:  # without a lock: a step that is under way may register a graph
            worker.close()

    def __repr__(self) -> str:
        return f"<StreamDispatcher {len(self.workers)} workers, {self.num_graphs} graphs, {self.stats!r}>"

    def _check_apart(self, made: Sequence[Registered]) -> None:
        every = {*made, *(found for worker in self.workers for found in worker.graphs.values())}
        for one, other in product(made, every):
            if one.worker is not other.worker and _do_share_writes(one.entry, other.entry):
                workers = sorted(cast(StreamWorker, found.worker).index for found in (one, other))
                raise ConfigError(
                    f"graphs for workers {workers[0]} and {workers[1]} share memory that one of them writes, and would "
                    "run at the same time; use num_streams=1, or a CudagraphDispatcher"
                )

    def _in_order(self) -> Sequence[StreamWorker]:
        turn = next(self._turns) % len(self.workers)
        return (*self.workers[turn:], *self.workers[:turn])


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
        for leaf in tree_leaves(tree):
            if is_tensor(leaf) and leaf.device.type != "cpu":
                leaf.record_stream(stream)
