"""Captures and the graphs that come out of them.

Note [cuBLAS workspaces]
    cuBLAS calls use a scratch buffer that torch keeps for each handle and stream, and a graph holds its raw address.
    Left alone, the first capture allocates that buffer in *its* pool and all later captures on the stream take the
    same one; then releasing any graph of that stream makes torch drop the buffer (pytorch#193402), and the other
    graphs write to memory that may be gone, or be someone else's. We clear the buffers before each capture, so that
    it allocates its own inside its pool, and after it, so that the buffer is free there like any intermediate and
    no one else can take it. From then on torch has no buffer for the capture stream to drop: releasing a graph
    harms no other. Graphs of one pool may share those bytes, which is safe for the same reason as for intermediates:
    only one of them runs at a time. The price is one buffer in each pool. What we cannot help: torch can only clear
    the buffers of *all* streams, so a graph that somebody else captured after warming up on the same stream, and
    whose buffer therefore lies outside its pool, may lose it, as it does when ``torch.compile`` records graphs.

Note [random numbers during a capture]
    Up to some version torch keeps one state of its default generator for all threads, which a capture puts into another
    mode. Meanwhile a replay on another thread whose graph draws random numbers is refused before anything is
    launched; it is made again once the capture has ended. Eager code of other threads that draws random numbers on
    the device at that moment gets torch's error, which we cannot help: capture before threads serve.

Note [why not torch.cuda.graph]
    Its ``__exit__`` ends the capture first and leaves the stream context after; when ``capture_end`` raises, the
    thread stays on the capture stream, and the user's own exception survives only as the context of the other.
"""

import contextlib
from typing import NoReturn

import torch

from ...errors import CaptureError, GraphDispatchError, ReplayError
from ..base import CAPTURE_LOCK, Capture, Graph
from .errors import diagnose
from .pool import CUDAPool, begin_recording, may_be_empty

__all__ = ["CUDACapture", "RecordedCUDAGraph", "raise_classified"]


class RecordedCUDAGraph(Graph):
    """A captured CUDA graph; any thread may replay it, one at a time, with its pool's lock held."""

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: CUDAPool, nbytes: int) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._pool = pool
        self._nbytes = nbytes

    def replay(self) -> None:
        """Launch it on the current stream of its device.

        Raises ``ReplayError`` after ``reset``, or with CUDA's error as its cause.
        """
        graph = self._graph
        if graph is None:
            raise ReplayError("the graph was released and cannot be replayed; capture it again")
        # Before the launch: also a failed one may have written to the outputs.
        self._pool.generation += 1
        try:
            graph.replay()
        except RuntimeError as error:
            self._replay_again(graph, error)

    def _replay_again(self, graph: torch.cuda.CUDAGraph, error: RuntimeError) -> None:
        """The replay once more if all that hindered it was a capture: see Note [random numbers during a capture]."""
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

        Blocks while another thread captures. Not to be called inside a capture of the same thread, which it would
        make invalid.
        """
        with CAPTURE_LOCK:
            graph, self._graph = self._graph, None
            if graph is not None:
                self._pool.wait_until_idle()
                graph.reset()
                del graph  # torch frees what it keeps beside the pool only then
                self._pool.release_graph()

    @property
    def nbytes(self) -> int:
        """Bytes that the driver took for the graph itself, beyond its pool.

        Measured around the capture as the fall of the device's free memory that the allocator does not account for;
        another process that allocates at the same moment disturbs it.
        """
        return 0 if self._graph is None else self._nbytes

    @property
    def driver_nbytes(self) -> int:
        """All of ``nbytes``: what the allocator accounts for is in the pool."""
        return self.nbytes

    def __repr__(self) -> str:
        return f"<RecordedCUDAGraph {self._pool.device} {'released' if self._graph is None else 'ready'}>"


class CUDACapture(Capture):
    """A capture under way on the device's capture stream, which is current from ``begin`` to ``end`` or ``abort``.

    ``begin`` takes over ``CAPTURE_LOCK``, which its caller holds, and whichever way the capture ends gives it back.
    All of it belongs to one thread.
    """

    def __init__(self, pool: CUDAPool, stream: torch.cuda.Stream) -> None:
        self._pool = pool
        self._stream = stream
        self._handle = pool.handle()
        self._native = torch.cuda.CUDAGraph()
        self._caller_device = torch.cuda.current_device()
        self._caller_stream = torch.cuda.current_stream(pool.device)
        self._before = 0
        self._open = False

    @property
    def is_open(self) -> bool:
        """Whether it is under way."""
        return self._open

    def begin(self) -> None:
        """Start recording; raises ``CaptureError`` with CUDA's error as its cause, everything put back."""
        device = self._pool.device
        self._open = True
        recording = False
        try:
            # Work of the warm-up on side streams may still own blocks that the capture would be given.
            torch.cuda.synchronize(device)
            _forget_workspaces()
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
        """Finish this recording; the lock is free until ``resume``."""
        return self.end()

    def resume(self) -> None:
        """Begin another recording into the same pool."""
        CAPTURE_LOCK.acquire()
        try:
            self._handle = self._pool.handle()
            self._native = torch.cuda.CUDAGraph()
            self._caller_device = torch.cuda.current_device()
            self._caller_stream = torch.cuda.current_stream(self._pool.device)
        except BaseException as error:
            CAPTURE_LOCK.release()
            raise_classified(error, self._pool.device)
        self.begin()

    def end(self) -> Graph:
        """Finish the recording; raises ``CaptureError`` with CUDA's error as its cause, everything put back."""
        if not self._open:
            raise CaptureError("the capture has ended already; begin another with begin_capture()")
        try:
            torch.cuda.set_stream(self._stream)  # the user's code may have left another one current
            # A callable may do nothing before its first break; a wrong stream shows when replays are compared.
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
        del self._native  # torch keeps some bytes for each of these objects, until nobody holds it
        return self.graph

    def abort(self) -> None:
        """Throw the recording away and put everything back; idempotent, never raises."""
        if not self._open:
            return
        try:
            torch.cuda.set_stream(self._stream)
            with may_be_empty():
                self._native.capture_end()
            self._native.reset()
        except RuntimeError:  # that the capture is invalid is why it is aborted: that error is on its way
            self._throw_away()
        finally:
            self._leave()

    def _throw_away(self) -> None:
        """Drop a recording that CUDA did not end properly."""
        with contextlib.suppress(RuntimeError):
            self._native.reset()
        self._pool.give_up_handle()

    def _leave(self) -> None:
        """Put the caller's device and stream back, and let go of the lock. Never raises."""
        self._open = False
        try:
            with contextlib.suppress(RuntimeError):
                torch.cuda.set_stream(self._caller_stream)
            with contextlib.suppress(RuntimeError):
                torch.cuda.set_device(self._caller_device)
            with contextlib.suppress(RuntimeError):
                _forget_workspaces()
                self._caller_stream.wait_stream(self._stream)
                self._pool.used_on(self._caller_stream)
        finally:
            CAPTURE_LOCK.release()


def raise_classified(error: BaseException, device: torch.device) -> NoReturn:
    """Raise a ``CaptureError`` with its reason for an error of CUDA's, and any other error as it is."""
    if not isinstance(error, RuntimeError) or isinstance(error, GraphDispatchError):
        raise error
    reason, remedy = diagnose(error)
    raise CaptureError(f"the capture on {device} failed: {_first_line(error)}; {remedy}", reason) from error


def _forget_workspaces() -> None:
    """See Note [cuBLAS workspaces]."""
    if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        torch._C._cuda_clearCublasWorkspaces()


def _make_room(device: torch.device) -> None:
    """Give cached memory back to the driver if that is where most of what this process may still use is.

    While a capture runs, the allocator cannot do that by itself, and would report that there is no memory left.
    """
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total
    if reserved - torch.cuda.memory_allocated(device) > min(free, allowed - reserved):
        torch.cuda.empty_cache()


def _unaccounted_bytes(device: torch.device) -> int:
    """Bytes in use on the device that the caching allocator does not hold."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
