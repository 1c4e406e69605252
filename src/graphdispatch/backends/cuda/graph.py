"""Captures and the graphs that come out of them.

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
"""

import contextlib

import torch

from ...errors import CaptureError
from ...reasons import Reason
from ..accelerator.graph import RecordedGraph, raise_classified
from ..base import CAPTURE_LOCK, Capture, Graph
from .pool import CUDAPool, begin_recording, may_be_empty

__all__ = ["CUDACapture", "RecordedCUDAGraph"]


class RecordedCUDAGraph(RecordedGraph):
    """A captured CUDA graph."""

    def replay_again(self, graph: torch.cuda.CUDAGraph, error: RuntimeError) -> None:
        """Replay again if only a capture prevented the replay: see Note [random numbers during a capture]."""
        if "outside graph capture" in str(error):
            try:
                with CAPTURE_LOCK:
                    graph.replay()
                return
            except RuntimeError as second:
                error = second
        super().replay_again(graph, error)


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
