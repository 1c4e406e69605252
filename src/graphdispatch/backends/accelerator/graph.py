"""Captures and the graphs that come out of them.

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
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from ...errors import CaptureError, GraphDispatchError, ReplayError
from ...reasons import Reason
from ..base import CAPTURE_LOCK, Capture, Graph
from ..diagnosis import diagnose
from ..operators import tensors_in
from .outlet import Outlet
from .pool import AcceleratorPool, end_recording, stop_recording

if TYPE_CHECKING:
    from .backend import AcceleratorBackend


class RecordedGraph(Graph):
    """A captured graph. Any thread that holds its pool's lock may replay it."""

    def __init__(self, graph: Any, pool: AcceleratorPool, nbytes: int) -> None:
        self._graph: Any = graph
        self._pool = pool
        self._nbytes = nbytes

    def replay(self) -> None:
        """Launch the graph on the current stream of its device.

        Raises ``ReplayError`` after ``reset``, and if the device refuses the launch; its error is then the cause.
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

    def _replay_again(self, graph: Any, error: RuntimeError) -> None:
        """Replay again if only a capture prevented it: see Note [random numbers during a capture]. Else raise."""
        if "outside graph capture" in str(error):
            try:
                with CAPTURE_LOCK:
                    graph.replay()
                return
            except RuntimeError as second:
                error = second
        raise ReplayError(f"{self._pool.device} refused to replay the graph: {first_line(error)}") from error

    def reset(self) -> None:
        """Wait for replays in flight and release the graph; idempotent.

        Blocks while another thread captures. Never call it inside a capture of the same thread: it would make that
        capture invalid.
        """
        with CAPTURE_LOCK:
            graph, self._graph = self._graph, None
            if graph is not None:
                try:
                    self._pool.wait_until_idle()
                finally:
                    graph.reset()
                    del graph  # only now does torch free what it keeps outside of the pool
                    self._pool.release_graph(self)

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


class AcceleratorCapture(Capture):
    """A capture on the device's capture stream, which is current, with ``CAPTURE_LOCK`` held, while it records.

    One thread makes all calls.
    """

    def __init__(self, pool: AcceleratorPool) -> None:
        self._pool, pool.backend.watch.capture = pool, self
        kernel = pool.backend.copy_kernel
        self._outlet = None if kernel is None else Outlet(kernel, pool.device)
        self.resume()

    def set_outputs(self, outputs: Any, *, shared: bool) -> None:
        """As ``Capture.set_outputs``; the graph ends with the backend's kernel for outputs, if there is one."""
        super().set_outputs(outputs, shared=shared)
        if self._outlet is not None:
            self._pool.backend.api.set_stream(self._stream)  # the user's code may have left another stream current
            self._outlet.record(tensors_in(outputs))

    def resume(self) -> None:
        """Begin a recording. On failure, restore everything and raise ``CaptureError``, caused by its error."""
        backend, device = self._pool.backend, self._pool.device
        try:
            self._stream = backend.capture_stream
            self._caller_device, self._caller_stream = backend.default_index(), backend.api.current_stream(device)
        except RuntimeError as error:
            raise_classified(error, backend)
        CAPTURE_LOCK.acquire()
        try:
            if backend.is_capturing():
                raise CaptureError("a capture is already under way on this thread; end it first", Reason.INSIDE_CAPTURE)
        except BaseException:
            CAPTURE_LOCK.release()
            raise
        backend.capturer, self.is_open, recording = threading.get_ident(), True, False
        try:
            handle = self._pool.handle()
            self._native = backend.make_graph(handle)
            # The warm-up's work on side streams may still use blocks that the capture would get.
            backend.api.synchronize(device)
            backend.prepare_capture()
            self._before = self._unaccounted_bytes()
            self._stream.wait_stream(self._caller_stream)
            backend.api.set_stream(self._stream)
            recording = True
            self._pool.begin_recording(self._native, handle)
        except BaseException as error:
            if recording:  # the allocator may have begun although the stream did not
                self._throw_away()
            self._leave()
            raise_classified(error, backend)

    def pause(self) -> Graph:
        """Finish this recording. The lock is free until ``resume``."""
        return self.end()

    def end(self) -> Graph:
        """Finish the recording. On failure, restore everything and raise ``CaptureError``, caused by its error."""
        if not self.is_open:
            raise CaptureError("the capture has ended already; begin another with begin_capture()")
        try:
            self._end_on_own_stream()  # work on a wrong stream is found by the comparison
            nbytes = max(0, self._unaccounted_bytes() - self._before)  # before another thread captures
            self.graph = RecordedGraph(self._native, self._pool, nbytes)
            if self._outlet is not None and self._outlet.addresses:
                self._outlet.open()
                self._pool.inputs[id(self._outlet)] = self.graph.outlet = self._outlet
            self._pool.hold_graph(self.graph)
        except BaseException as error:
            self._throw_away()
            raise_classified(error, self._pool.backend)
        finally:
            self._leave()
        del self._native  # torch keeps some bytes for this object as long as anybody holds it
        return self.graph

    def abort(self) -> None:
        """Discard the recording and restore everything. Idempotent; never raises."""
        if not self.is_open:
            return
        try:
            self._end_on_own_stream()
            self._native.reset()
        except RuntimeError:  # an invalid capture is being aborted; its own error is already being raised
            self._throw_away()
        finally:
            self._leave()

    def _end_on_own_stream(self) -> None:
        self._pool.backend.api.set_stream(self._stream)  # the user's code may have left another stream current
        end_recording(self._native)

    def _throw_away(self) -> None:
        """Discard a recording that the device did not end properly, or that an interrupt came upon."""
        with contextlib.suppress(RuntimeError):
            self._pool.backend.api.set_stream(self._stream)
        stop_recording(self._native, self._pool.backend)
        with contextlib.suppress(RuntimeError):
            self._native.reset()
        self._pool.give_up_handle()

    def _leave(self) -> None:
        """Restore the caller's device and stream, and release the lock. Never raises."""
        self.is_open = False
        self._pool.backend.capturer = None
        try:
            with contextlib.suppress(RuntimeError):
                self._pool.backend.api.set_stream(self._caller_stream)
            with contextlib.suppress(RuntimeError):
                self._pool.backend.set_index(self._caller_device)
            with contextlib.suppress(RuntimeError):
                self._pool.backend.clean_up_capture()
                self._caller_stream.wait_stream(self._stream)
                self._pool.used_on(self._caller_stream)
        finally:
            CAPTURE_LOCK.release()

    def _unaccounted_bytes(self) -> int:
        """Bytes that are in use on the device but not held by the caching allocator; 0 if the device cannot tell."""
        backend = self._pool.backend
        try:
            free, total = backend.memory_info()
        except RuntimeError:
            return 0
        return int(total - free - backend.api.memory_reserved(backend.device))


def raise_classified(error: BaseException, backend: "AcceleratorBackend") -> NoReturn:
    """Raise a ``CaptureError`` with its reason if the error is the device's, else the error itself."""
    if not isinstance(error, RuntimeError) or isinstance(error, GraphDispatchError):
        raise error
    reason, remedy = diagnose(error, backend.errors)
    raise CaptureError(f"the capture on {backend.device} failed: {first_line(error)}; {remedy}", reason) from error


def first_line(error: BaseException) -> str:
    """What an error says first, without its full stop."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
