"""Captures, the graphs that come out of them, and the memory that the graphs of one pool share.

Note [cuBLAS workspaces]
    cuBLAS calls use a scratch buffer that torch keeps for each handle and stream. A graph holds its raw address.
    Without care, the first capture allocates that buffer in *its* pool, and all later captures on the stream use the
    same buffer. When any graph of that stream is released, torch drops the buffer (pytorch#193402), and the other
    graphs write to memory that may be gone or belong to someone else. We therefore clear the buffers twice. We clear
    them before each capture, so that the capture allocates its own buffer inside its pool. We clear them after it, so
    that the buffer is free in the pool, like any intermediate, and nobody else can take it. From then on torch has no
    buffer of the capture stream to drop, so releasing a graph harms no other graph. Graphs of one pool may share those
    bytes, for the same reason as intermediates: only one of them runs at a time. The price is one buffer in each pool.
    One case remains: torch can only clear the buffers of *all* streams. If somebody else captured a graph after
    warming up on the same stream, its buffer lies outside its pool, and that graph may lose it. The same happens when
    ``torch.compile`` records graphs.

Note [random numbers during a capture]
    Older versions of torch keep one state of the default generator for all threads, and a capture puts it into another
    mode. During that time, torch refuses a replay on another thread if its graph uses random numbers. It refuses
    before anything is launched, so we replay again after the capture has ended. Eager code on other threads that uses
    the device's random numbers during a capture gets torch's error. We cannot prevent that: capture before threads
    serve.

Note [why not torch.cuda.graph]
    Its ``__exit__`` first ends the capture and then leaves the stream context. When ``capture_end`` raises, the thread
    stays on the capture stream, and the user's own exception survives only as the context of the other one.

Note [a pool lives by its placeholder]
    The allocator counts the graphs of a pool handle and takes the memory back when the last one is gone. A handle whose
    count fell to zero must not be used again. We therefore capture an empty graph, the placeholder, into each handle.
    It keeps the count above zero between captures. When the last of the pool's own graphs is released, we release the
    placeholder and the memory too, and the next capture gets a new handle. The reason: torch gives the memory of a
    pool to nobody else. Keeping it for a capture that may never come would break the promise of a memory budget.

Note [torch's own operators at the beginning]
    ``capture_begin`` writes the generator's seed and offset to the device with ordinary operators. After a break, a
    recording begins while the capturer is watching operators, and it would take these for the callable's. They are
    hidden from it.

Note [a graph that could not begin is never destroyed]
    ``capture_begin`` first registers the graph with the random generator. This can fail if there is no memory left or
    the device is lost. The destructor of the graph then finds that it is not registered, throws, and ends the process.
    We cannot see how far ``capture_begin`` came, so we keep every graph that could not begin: some hundred bytes each.

Note [after a failed capture]
    ``capture_end`` throws before it tells the allocators that the recording is over. The device allocator would then
    refuse the handle forever ("already recording to mempool_id"), delay the release of blocks that other streams used,
    and never free the pool. We end that recording ourselves and give back the count that the capture took. The
    allocator of pinned host memory keeps its own list, which Python cannot reach, so we give up the handle itself.
    Graphs captured before keep it, and its memory, until they are released; later graphs get a new handle. We record
    the placeholder of the new handle at once, because a regular capture also repairs the random generator: torch
    versions with one generator state for all captures leave it in capture mode.

Note [all segments are asked for]
    ``memory_snapshot(mempool_id=...)`` of torch drops references to the handle's numbers that it never took
    (https://github.com/pytorch/pytorch/pull/196366). A number above 256 is then freed while it is in use, and the
    process crashes at some later allocation. We ask for the segments of all pools and choose ours.
"""

import contextlib
import ctypes
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, cast

import torch

from ...errors import BackendError, CaptureError, GraphDispatchError, ReplayError
from ...reasons import Reason
from ..base import CAPTURE_LOCK, Capture, Graph, Pool
from .errors import diagnose

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_Handle: TypeAlias = "_POOL_HANDLE"  # a pair of integers


class _Hold(NamedTuple):
    """A pool handle and the empty graph that keeps it: see Note [a pool lives by its placeholder]."""

    handle: _Handle
    placeholder: torch.cuda.CUDAGraph


class CUDAPool(Pool):
    """A private pool of the caching allocator. All its captures run on ``capture_stream``.

    The allocator reuses a block only on the stream that the block was allocated for. Graphs therefore share memory
    only if they were captured on the same stream. All methods are called with ``lock`` held.
    """

    def __init__(self, device: torch.device, capture_stream: Callable[[], torch.cuda.Stream]) -> None:
        super().__init__()
        self.device = device
        self.capture_stream = capture_stream
        self._hold: _Hold | None = None
        self._abandoned: list[_Handle] = []
        self._graphs = 0
        self._closed = False
        self._index = int(device.index)
        self._raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # only with CUDA
        self._last_raw: int | None = None
        self._last: torch.cuda.Stream | None = None

    def after_fork(self) -> None:
        """CUDA cannot be used in a forked child, and every use of the pool says so."""
        super().after_fork()
        self._raw_stream = _refuse_forked

    def handle(self) -> _Handle:
        """The handle to capture into, made on first use.

        Call it with ``CAPTURE_LOCK`` held and no capture in progress. Raises ``BackendError`` after ``close``.
        """
        if self._closed:
            raise BackendError("the pool is closed; make another with make_pool()")
        if self._hold is None:
            self._hold = _new_hold(self.device, self.capture_stream())
        return self._hold.handle

    def give_up_handle(self) -> None:
        """Leave the current handle to its graphs: see Note [after a failed capture]. Never raises.

        Call it with ``CAPTURE_LOCK`` held, after the capture has ended with an error.
        """
        hold, self._hold = self._hold, None
        if hold is not None:
            self._forget_empty()
            self._abandoned.append(hold.handle)
            _end_recording(self._index, hold.handle)
            with contextlib.suppress(RuntimeError):
                hold.placeholder.reset()
        with contextlib.suppress(RuntimeError, BackendError):  # the next capture tries again, and reports
            self.handle()

    def hold_graph(self) -> None:
        """Note that a graph was captured into the pool. Call it with ``CAPTURE_LOCK`` held."""
        self._graphs += 1

    def release_graph(self) -> None:
        """Note that a graph was released; free the memory with the last one. Call it with ``CAPTURE_LOCK`` held."""
        self._graphs -= 1
        if not self._graphs:
            self._let_go()

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Note that work on the pool's memory ends on ``stream``."""
        self._last, self._last_raw = stream, int(stream.cuda_stream)

    def order_after_last_use(self) -> None:
        """Make the current stream wait for the stream that last used the pool; if they are one, only compare them."""
        if self._raw_stream(self._index) == self._last_raw:
            return
        current = torch.cuda.current_stream(self.device)
        if self._last is not None:
            current.wait_stream(self._last)
        self.used_on(current)

    def wait_until_idle(self) -> None:
        """Block until everything that used the pool's memory is done."""
        if self._last is not None:
            self._last.record_event().synchronize()

    @property
    def nbytes(self) -> int:
        """Bytes of the allocator's segments that belong to the pool; 0 if the allocator cannot tell."""
        handles = [*self._abandoned, *([] if self._hold is None else [self._hold.handle])]
        known = _bytes_by_handle(self._index)
        return sum(known[handle] for handle in handles)

    def close(self) -> None:
        """Release the memory; idempotent. Never call it inside a capture of the same thread.

        Memory that no graph and no tensor uses goes back to the driver now, together with the rest of the allocator's
        cache, because torch gives the memory of a finished pool to nobody else. Memory that is still in use goes back
        when the allocator next empties its cache.
        """
        with CAPTURE_LOCK:
            self._closed = True
            self._let_go()

    def _let_go(self) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            self._abandoned.append(hold.handle)
            hold.placeholder.reset()
        del hold  # only now does torch free what it keeps for a graph outside of the pool
        if self._abandoned:
            torch.cuda.empty_cache()
            self._forget_empty()

    def _forget_empty(self) -> None:
        """Drop the handles whose memory is gone: they never get memory again."""
        known = _bytes_by_handle(self._index)
        self._abandoned = [handle for handle in self._abandoned if known[handle]]

    def __repr__(self) -> str:
        condition = "closed" if self._closed else "open" if self._hold is not None else "empty"
        return f"<CUDAPool {self.device} {condition} generation={self.generation}>"


def _refuse_forked(index: int) -> int:
    raise BackendError(
        f"cuda:{index} cannot be used in a process that was forked after CUDA was; start it with the method 'spawn' "
        "(multiprocessing.set_start_method), and make its graphs there"
    )


def begin_recording(graph: torch.cuda.CUDAGraph, handle: _Handle) -> None:
    """Begin to record the current stream's work into ``graph``, with memory of ``handle``.

    Raises what torch raises. See Notes [torch's own operators at the beginning] and
    [a graph that could not begin is never destroyed].
    """
    try:
        with torch._C._DisableTorchDispatch():
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")
    except BaseException:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
        raise


@contextlib.contextmanager
def may_be_empty() -> Iterator[None]:
    """Suppress the warning about an empty graph within a ``with`` block, where a graph may be empty."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*The CUDA Graph is empty")
        yield


def _new_hold(device: torch.device, stream: torch.cuda.Stream) -> _Hold:
    """A fresh handle with an empty graph in it."""
    graph = torch.cuda.CUDAGraph()
    handle = torch.cuda.graph_pool_handle()
    with torch.cuda.device(device), torch.cuda.stream(stream), may_be_empty():
        try:
            begin_recording(graph, handle)
            graph.capture_end()
        except RuntimeError:
            _end_recording(int(device.index), handle)
            raise
    return _Hold(handle, graph)


def _end_recording(index: int, handle: _Handle) -> None:
    """If a failed capture left a recording open in the allocator, end it and give back its count."""
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(index, handle)
        # Reached only if the recording was open. Otherwise the graph gives back its count itself.
        torch._C._cuda_releasePool(index, handle)


def _bytes_by_handle(index: int) -> Counter[_Handle]:
    """Bytes of the segments of each handle on one device; see Note [all segments are asked for]."""
    known: Counter[_Handle] = Counter()
    with contextlib.suppress(RuntimeError):  # cudaMallocAsync has no snapshot
        for segment in torch.cuda.memory_snapshot(include_traces=False):
            if segment["device"] == index:
                known[cast("_Handle", tuple(segment["segment_pool_id"]))] += int(segment["total_size"])
    return known


class RecordedCUDAGraph(Graph):
    """A captured CUDA graph. Any thread that holds its pool's lock may replay it."""

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: CUDAPool, nbytes: int) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._pool = pool
        self._nbytes = nbytes

    def replay(self) -> None:
        """Launch the graph on the current stream of its device.

        Raises ``ReplayError`` after ``reset``, and if CUDA refuses the launch; CUDA's error is then its cause.
        """
        graph = self._graph
        if graph is None:
            raise ReplayError("the graph was released and cannot be replayed; capture it again")
        # Counted before the launch, because even a failed launch may have written to the outputs.
        self._pool.generation += 1
        try:
            graph.replay()
        except RuntimeError as error:
            self._replay_again(graph, error)

    def _replay_again(self, graph: torch.cuda.CUDAGraph, error: RuntimeError) -> None:
        """Replay again if only a capture prevented the replay: see Note [random numbers during a capture]."""
        if "outside graph capture" in str(error):
            try:
                with CAPTURE_LOCK:
                    graph.replay()
                return
            except RuntimeError as second:
                error = second
        raise ReplayError(f"CUDA refused to replay the graph: {_first_line(error)}") from error

    def reset(self) -> None:
        """Wait for replays in flight and release the graph; idempotent.

        Blocks while another thread captures. Never call it inside a capture of the same thread: it would make that
        capture invalid.
        """
        with CAPTURE_LOCK:
            graph, self._graph = self._graph, None
            if graph is not None:
                self._pool.wait_until_idle()
                graph.reset()
                del graph  # only now does torch free what it keeps outside of the pool
                self._pool.release_graph()

    @property
    def nbytes(self) -> int:
        """Bytes that the driver took for the graph itself; memory of the pool is not counted.

        It is the part of the fall in free memory during the capture that the allocator does not explain. If another
        process allocates at the same moment, the figure is wrong by that amount.
        """
        return 0 if self._graph is None else self._nbytes

    @property
    def driver_nbytes(self) -> int:
        """Equal to ``nbytes``: everything that the allocator counts is in the pool."""
        return self.nbytes

    def __repr__(self) -> str:
        return f"<RecordedCUDAGraph {self._pool.device} {'released' if self._graph is None else 'ready'}>"


class CUDACapture(Capture):
    """A capture on the device's capture stream, which is current, with ``CAPTURE_LOCK`` held, while it records.

    One thread makes all calls.
    """

    def __init__(self, pool: CUDAPool) -> None:
        self._pool = pool
        self.resume()

    def resume(self) -> None:
        """Begin a recording. On failure, restore everything and raise ``CaptureError``, caused by CUDA's error."""
        device = self._pool.device
        CAPTURE_LOCK.acquire()
        try:
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError("a capture is already under way on this thread; end it first", Reason.INSIDE_CAPTURE)
            self._stream = self._pool.capture_stream()
            self._handle = self._pool.handle()
            self._native = torch.cuda.CUDAGraph()
            self._caller_device = torch.cuda.current_device()
            self._caller_stream = torch.cuda.current_stream(device)
        except BaseException as error:
            CAPTURE_LOCK.release()
            raise_classified(error, device)
        self.is_open = True
        recording = False
        try:
            # The warm-up's work on side streams may still use blocks that the capture would get.
            torch.cuda.synchronize(device)
            torch._C._cuda_clearCublasWorkspaces()  # Note [cuBLAS workspaces]
            _make_room(device)
            self._before = _unaccounted_bytes(device)
            self._stream.wait_stream(self._caller_stream)
            torch.cuda.set_stream(self._stream)
            recording = True
            begin_recording(self._native, self._handle)
        except BaseException as error:
            if recording:  # the allocator may have begun although the stream did not
                self._throw_away()
            self._leave()
            raise_classified(error, device)

    def pause(self) -> Graph:
        """Finish this recording. The lock is free until ``resume``."""
        return self.end()

    def end(self) -> Graph:
        """Finish the recording. On failure, restore everything and raise ``CaptureError``, caused by CUDA's error."""
        if not self.is_open:
            raise CaptureError("the capture has ended already; begin another with begin_capture()")
        try:
            torch.cuda.set_stream(self._stream)  # the user's code may have left another stream current
            # A callable may do nothing before its first break. Work on a wrong stream is found by the comparison.
            with may_be_empty():
                self._native.capture_end()
            self._pool.hold_graph()
        except BaseException as error:
            self._throw_away()
            raise_classified(error, self._pool.device)
        finally:
            self._leave()
        nbytes = max(0, _unaccounted_bytes(self._pool.device) - self._before)
        self.graph = RecordedCUDAGraph(self._native, self._pool, nbytes)
        del self._native  # torch keeps some bytes for this object as long as anybody holds it
        return self.graph

    def abort(self) -> None:
        """Discard the recording and restore everything. Idempotent; never raises."""
        if not self.is_open:
            return
        try:
            torch.cuda.set_stream(self._stream)
            with may_be_empty():
                self._native.capture_end()
            self._native.reset()
        except RuntimeError:  # an invalid capture is being aborted; its own error is already being raised
            self._throw_away()
        finally:
            self._leave()

    def _throw_away(self) -> None:
        """Discard a recording that CUDA did not end properly."""
        with contextlib.suppress(RuntimeError):
            self._native.reset()
        self._pool.give_up_handle()

    def _leave(self) -> None:
        """Restore the caller's device and stream, and release the lock. Never raises."""
        self.is_open = False
        try:
            with contextlib.suppress(RuntimeError):
                torch.cuda.set_stream(self._caller_stream)
            with contextlib.suppress(RuntimeError):
                torch.cuda.set_device(self._caller_device)
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_clearCublasWorkspaces()  # Note [cuBLAS workspaces]
                self._caller_stream.wait_stream(self._stream)
                self._pool.used_on(self._caller_stream)
        finally:
            CAPTURE_LOCK.release()


def raise_classified(error: BaseException, device: torch.device) -> NoReturn:
    """Raise a ``CaptureError`` with its reason if the error is CUDA's, else the error itself."""
    if not isinstance(error, RuntimeError) or isinstance(error, GraphDispatchError):
        raise error
    reason, remedy = diagnose(error)
    raise CaptureError(f"the capture on {device} failed: {_first_line(error)}; {remedy}", reason) from error


def _make_room(device: torch.device) -> None:
    """Return cached memory to the driver if most of the memory that this process may still use is cached.

    The allocator cannot do that by itself during a capture; it would report that no memory is left.
    """
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total
    if reserved - torch.cuda.memory_allocated(device) > min(free, allowed - reserved):
        torch.cuda.empty_cache()


def _unaccounted_bytes(device: torch.device) -> int:
    """Bytes that are in use on the device but not held by the caching allocator."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
