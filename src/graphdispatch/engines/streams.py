"""``StreamDispatcher``: a dispatcher over several streams, whose graphs run at the same time.

Note [a step on a worker's stream]
    Everything that touches a worker's pool runs on the worker's queue: loading, replay, handing out, and captures and
    comparisons too. A thread that held the pool's lock while it waited for the queue would wait for work that needs
    that lock. The worker first waits for what the caller's stream was given before the call, and the caller's stream
    waits for the worker before it sees the outputs. Failures stay in the step's ``StreamResult``: a worker never fails.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from time import perf_counter_ns
from typing import Any, Literal, cast

from torch.utils._pytree import tree_leaves

from ..backends import Backend, get_backend
from ..backends.base import Event, Stream
from ..backends.tracing import untraced
from ..call.spec import is_tensor
from ..config import CUDAGraphOptions
from ..copying import NotCopied
from ..decide.decision import Decision
from ..descriptors import DispatchKey
from ..errors import BackendError, ConfigError, check_count, check_type, shown
from ..forking import make_lock, renew_in_child
from ..memory.entry import CUDAGraphEntry
from ..reasons import Reason
from .dispatcher import Chosen, CudagraphDispatcher, checked_example
from .external_graphs import Replayable
from .policies import DispatchPolicy
from .registered_graphs import Registered, Worker

__all__ = ["StreamDispatcher", "StreamResult", "StreamWorker"]

_NOT_HONOURED = (
    *("capture_after", "capture_window", "capture_share", "max_signatures"),
    *("max_cached_graphs", "memory_budget_bytes", "budget"),
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
            self._done.wait()
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
        self.is_closed = False
        """Whether it takes no more steps."""
        self.last_turn = 0
        """The number of its latest step among those of all workers."""
        self._counts = make_lock()
        self._marks: deque[Event] = deque()
        self._under_way = 0
        renew_in_child(self)

    def after_fork(self) -> None:
        """Take no more steps, so that they run eagerly: see Note [after a fork] in ``forking.py``."""
        self.is_closed = True
        self._marks.clear()
        self._under_way = 0

    @property
    def busy(self) -> int:
        """Steps that are not finished."""
        with self._counts:
            while self._marks and self._marks[0].query():
                self._marks.popleft()
            return len(self._marks) + self._under_way

    def launch(self, step: Callable[[], Any], arguments: Any) -> StreamResult:
        """Put a step on the worker's queue: see Note [a step on a worker's stream]. Raises ``BackendError`` after
        ``close``."""
        if self.is_closed:
            raise BackendError("this worker takes no more steps: its dispatcher was closed, or the process forked")
        arrived, done = self.backend.make_event(), self.backend.make_event()
        outcome = StreamResult(self.backend, self.index, done)
        arrived.record()
        _hold(arguments, self.stream)

        def after_caller() -> Any:
            # Inside the step, so that a failure of the caller's stream is this step's and not the worker's.
            arrived.wait()
            return step()

        with self._counts:
            self._under_way += 1
        try:
            self.stream.submit(lambda: outcome.fill(after_caller))
            done.record(self.stream)
        finally:
            with self._counts:
                self._under_way -= 1
                self._marks.append(done)
        return outcome

    def close(self) -> None:
        """Finish all steps, and release the graphs captured here, the pool and the stream. Idempotent."""
        self.is_closed = True
        self.stream.synchronize()
        self.clear()
        self.stream.close()
        self.pool.close()

    def __repr__(self) -> str:
        return f"<StreamWorker {self.index}: {len(self.graphs)} graphs, {self.busy} steps under way>"


class StreamDispatcher(CudagraphDispatcher):
    """A ``CudagraphDispatcher`` over several workers, each with a stream of its own, whose graphs run at the same time.

    A call goes to the worker with the fewest unfinished steps among those that have a graph for its key. ``submit``
    starts a call and returns at once; ``dispatch`` waits (on CUDA: lets the caller's stream wait) for its outputs.
    Calls overlap if they come from several streams or threads, or were all submitted before the first ``result``. On
    the CPU, whose streams have no queues, only those of several threads do.
    Graphs of two workers must not share memory that one of them writes. Thread-safe.

    Args:
        eager_runner: Called as ``eager_runner(*args, **kwargs)`` wherever no graph serves; its answer is the reference.
        num_streams: The number of workers.
        policy: Decides whether and how to use graphs. None: ``DefaultDispatchPolicy()``.
        max_cached_graphs: The most graphs that each worker keeps; the least recently used goes.
        shared_writes: ``"refuse"`` raises ``ConfigError`` for memory that two workers would write, as far as it can be
            seen (entries of this library); ``"allow"`` declares that steps under way at once write different rows of
            it.
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
        shared_writes: Literal["refuse", "allow"] = "refuse",
        backend: Backend | None = None,
        options: CUDAGraphOptions | None = None,
    ) -> None:
        check_count("num_streams", num_streams)
        if shared_writes not in ("refuse", "allow"):
            raise ConfigError(f"shared_writes must be 'refuse' or 'allow', got {shown(shared_writes)}")
        self.backend = backend or get_backend("auto")
        self.options = CUDAGraphOptions.or_default(options, "options")
        self.options.refuse(_NOT_HONOURED, "StreamDispatcher", "it keeps max_cached_graphs= graphs for each worker")
        self._num_streams = num_streams
        super().__init__(eager_runner, policy, max_cached_graphs)
        self._allows_shared_writes = shared_writes == "allow"
        self._turns = count(1)

    def _make_workers(self) -> Sequence[StreamWorker]:
        return tuple(
            StreamWorker(index, self.backend, self.eager_runner, self.max_cached_graphs, self.options)
            for index in range(self._num_streams)
        )

    def register_graph(
        self,
        key: DispatchKey,
        graph: Replayable | CUDAGraphEntry,
        input_ptrs: Sequence[int] | None = None,
        *,
        worker: int | None = None,
        **options: Any,
    ) -> None:
        """Serve ``key`` on one worker by ``graph``.

        Args:
            key: The key.
            graph: A ``CUDAGraphEntry``, or any object with ``replay()``; it stays its owner's.
            input_ptrs: The addresses of the tensors that a graph other than an entry reads.
            worker: The index of the worker. None: one that has no graph for the key, with the fewest graphs.
            **options: ``outputs``, ``mode`` and ``idempotent``, as ``CudagraphDispatcher.register_graph`` takes them.

        Raises:
            ConfigError: An argument is wrong, or an entry shares a pool, or memory that is written, with a graph of
                another worker.
        """
        with self._lock:
            chosen = self._worker(worker) if worker is not None else self._emptiest(key)
            if isinstance(graph, CUDAGraphEntry):
                self._check_apart(graph, chosen)
            leaving = chosen.publish(chosen.wrap(key, graph, input_ptrs, **options))
        chosen.let_go(leaving)

    @untraced
    def capture(
        self,
        key: DispatchKey,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        workers: Sequence[int] | None = None,
    ) -> None:
        """Capture ``eager_runner(*args, **kwargs)`` once on each worker, and serve ``key`` by it from now on.

        The runs leave no effects. The graphs serve calls that pass their arguments as the example does, with the same
        shapes, dtypes and constants, while the runner's weights stay as they are now. After an error no worker has the
        graph.

        Args:
            key: The key.
            args: The positional arguments of the example.
            kwargs: The keyword arguments of the example.
            workers: The indices of the workers. None: all.

        Raises:
            ConfigError: An argument is wrong, or workers would write the same memory.
            CaptureError: There can be no graph.
        """
        call = checked_example(key, args, kwargs)
        check_type("workers", () if workers is None else workers, Sequence, "several numbers of workers, or None")
        chosen = [self._worker(index) for index in workers] if workers is not None else list(self.workers)
        made: list[tuple[StreamWorker, Registered]] = []
        try:
            for worker in chosen:
                step = worker.launch(lambda worker=worker: worker.capture(key, *call), call)  # type: ignore[misc]
                made.append((worker, step.result()))
            with self._lock:
                for worker, found in made:
                    self._check_apart(found.entry, worker, made)
                leaving = [worker.publish(found) for worker, found in made]
        except BaseException:
            for worker, found in made:
                worker.drop(found)
            raise
        for (worker, _), gone in zip(made, leaving, strict=True):
            worker.let_go(gone)

    @untraced
    def submit(self, key: DispatchKey, *args: Any, **kwargs: Any) -> StreamResult:
        """Start one call on a worker. Never raises what the call raises.

        A call without a graph runs here and now, on the caller's stream: a runner may write state of its own, and would
        do so on two streams at once. The method may wait while a worker that has a graph for the key captures or
        compares another one.

        Args:
            key: What the batch is.
            *args: The positional arguments.
            **kwargs: The keyword arguments.

        Returns:
            A handle, whose ``result()`` gives the outputs or raises what the call raised.
        """
        start = perf_counter_ns()
        chosen = self.choose(key, args, kwargs)
        return self._start(key, chosen, perf_counter_ns() - start, args, kwargs)

    def serve(self, key: DispatchKey, chosen: Chosen, spent: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call as chosen, and make the caller's stream wait for its outputs.

        Args:
            key: What the batch is.
            chosen: What shall serve it.
            spent: The time that this decision took, in nanoseconds.
            args: The positional arguments.
            kwargs: The keyword arguments.

        Returns:
            The outputs.
        """
        return self._start(key, chosen, spent, args, kwargs).result()

    def _start(
        self, key: DispatchKey, chosen: Chosen, spent: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StreamResult:
        """Give a step to its worker; or run it here and now, without a graph or if the worker was closed meanwhile."""
        serve = super().serve
        if chosen.found is not None:
            worker = cast(StreamWorker, chosen.worker)
            worker.last_turn = next(self._turns)
            try:
                return worker.launch(partial(serve, key, chosen, spent, args, kwargs), (args, kwargs))
            except BackendError:
                if not worker.is_closed:
                    raise
            chosen = chosen._replace(found=None, decision=Decision.eager(Reason.NOT_CAPTURED, key.num_tokens))
        done = StreamResult(self.backend)
        done.fill(partial(serve, key, chosen, spent, args, kwargs))
        return done

    def synchronize(self) -> None:
        """Block until all workers have finished their steps."""
        for worker in self.workers:
            worker.stream.synchronize()

    def close(self) -> None:
        """Finish all steps, release the workers' graphs and streams; later calls run eagerly. Idempotent."""
        for worker in self.workers:  # without a lock: a step that is under way may register a graph
            worker.close()

    def __repr__(self) -> str:
        return f"<StreamDispatcher {len(self.workers)} workers, {self.num_graphs} graphs, {self.stats!r}>"

    def _worker(self, index: int) -> StreamWorker:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self.workers):
            raise ConfigError(f"worker must be an integer from 0 to {len(self.workers) - 1}, got {shown(index)}")
        return self.workers[index]

    def _emptiest(self, key: DispatchKey) -> StreamWorker:
        def order(worker: StreamWorker) -> tuple[bool, int, int]:
            return any(known == key for known, _ in worker.graphs), len(worker.graphs), worker.index

        return min(self.workers, key=order)

    def _check_apart(
        self, entry: CUDAGraphEntry, worker: StreamWorker, more: Sequence[tuple[StreamWorker, Registered]] = ()
    ) -> None:
        """Raise ``ConfigError`` if ``entry`` must not run at the same time as a graph of another worker, registered or
        among ``more``."""
        registered = [(other, found) for other in self.workers for found in other.graphs.values()]
        for other, found in (*registered, *more):
            theirs = found.entry
            if other is worker:
                continue
            if entry.pool is theirs.pool or entry.pool is other.pool:
                raise ConfigError(
                    f"graph for worker {worker.index} is in the same pool as one of worker {other.index}, so that they "
                    f"could never overlap; capture it with pool=dispatcher.workers[{worker.index}].pool"
                )
            if not self._allows_shared_writes and (_writes_to(entry, theirs) or _writes_to(theirs, entry)):
                raise ConfigError(
                    f"graphs for workers {worker.index} and {other.index} share memory that one of them writes, and "
                    "would run at the same time; give each worker its own state, or shared_writes='allow' if steps "
                    "under way at once write to different rows"
                )

    _first_choice = CudagraphDispatcher.choose

    def _in_order(self) -> list[StreamWorker]:
        return sorted(self.workers, key=lambda worker: (worker.busy, worker.last_turn))


def _writes_to(one: CUDAGraphEntry, other: CUDAGraphEntry) -> bool:
    return one.written is not None and any(one.written.overlaps(tensor) for tensor in other.held)


def _hold(tree: Any, stream: Stream) -> None:
    """Keep the memory of the tensors in ``tree`` from being used again before ``stream`` is done with it.

    A caching allocator knows only the stream that a tensor was made on.
    """
    native = getattr(stream, "native", None)
    if native is not None:
        for leaf in tree_leaves(tree):
            if is_tensor(leaf) and leaf.device.type != "cpu":
                leaf.record_stream(native)
