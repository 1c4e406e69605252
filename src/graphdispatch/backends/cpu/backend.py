"""The CPU backend: it captures by recording, and its memory is the host's.

Work runs at once on the calling thread, so no stream has a queue.

Note [one replay, two loops]
    The tape and Python's loop call the same operators on the same tensors below autograd, so they give the same bits,
    draw the same random numbers and raise the same errors. The tape releases the GIL. It leaves to Python what cannot
    be prepared: compiled code, collectives, and arguments that it does not know. Where a mode or a transform of torch
    watches the calling thread, the whole replay is Python's.
"""

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from ...copying import NotCopied
from ...errors import BackendError, CaptureError, ReplayError
from ...native import done_by_core
from ...native.tape import TAPE
from ...reasons import Reason
from ..base import CAPTURE_LOCK, Backend, Capture, Event, Graph, Pool, Stream, restore_modes
from ..host_reads import SaysCapturing
from ..operator_mode import OperatorMode, reveal_operators
from .program import Binding, Step, tell
from .recorder import Recorder, Recording

# The recorder saw the operators below autograd. Replaying them there saves the way through autograd.
_below_autograd = torch._C._AutoDispatchBelowAutograd


class InlineStream(NotCopied):
    """A stream whose work runs at once, on the thread that gives it."""

    def wait_stream(self, other: Stream) -> None:
        """Do nothing: what was given to ``other`` is done."""

    def synchronize(self) -> None:
        """Do nothing: what was given to this stream is done."""


class _CPUEvent(NotCopied):
    """A point in time. Work that was given before it is done, so nobody ever waits for it."""

    time = 0.0

    def record(self, stream: Stream) -> None:
        self.time = CPUBackend.clock()

    def wait(self, stream: Stream) -> None:
        """Do nothing: the work before the mark is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing: the work before the mark is done."""

    def elapsed_time(self, end: "_CPUEvent") -> float:
        return (end.time - self.time) * 1e3


class _Here(threading.local):
    """What is current on the calling thread; each thread begins on the default stream."""

    def __init__(self, default: Stream) -> None:
        self.stream = default


class CPUBackend(Backend):
    """Graphs on host memory that behave like CUDA graphs.

    Addresses are fixed, Python is frozen, scalars are constants, and the next replay overwrites the outputs. Recording
    runs the operators.
    """

    clock = staticmethod(time.thread_time)
    """What other processes take of a core tells nothing of the work."""
    name: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = "cpu"
    capture_executes: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.default = InlineStream()
        self.here = _Here(self.default)

    @classmethod
    def is_available(cls) -> bool:
        """True: every torch has a CPU."""
        return True

    def make_pool(self) -> Pool:
        """A new, empty pool of arenas."""
        return CPUPool()

    def begin_capture(self, pool: Pool) -> Capture:
        """Start to record the calling thread's operators. Raises ``CaptureError`` inside a capture."""
        if not isinstance(pool, CPUPool):
            raise BackendError(f"pool must come from the CPU backend, got {pool!r}; make one with its make_pool()")
        if self.is_capturing():
            raise CaptureError("a capture is already under way on this thread; end it first", Reason.INSIDE_CAPTURE)
        TAPE.start()  # not where the callable runs, whose threads are watched
        return _CPUCapture(pool, self)

    @done_by_core
    def is_capturing(self) -> bool:
        """Whether the calling thread is being recorded by this backend."""
        return self.watch.is_capturing

    def current_stream(self) -> Stream:
        """The calling thread's current stream."""
        return self.here.stream

    @contextmanager
    def use_stream(self, stream: Stream) -> Iterator[Stream]:
        """Make ``stream`` the calling thread's current stream within a ``with`` block. Blocks may nest."""
        before = self.here.stream
        self.here.stream = stream
        try:
            yield stream
        finally:
            self.here.stream = before

    def make_stream(self) -> Stream:
        """A new stream."""
        return InlineStream()

    def make_event(self, *, timing: bool = False) -> Event:
        """A new event."""
        return _CPUEvent()

    @property
    def is_settled(self) -> bool:
        """Whether the loop that replays graphs is compiled, or will not be."""
        return TAPE.is_settled

    def synchronize(self) -> None:
        """Block until the calling thread's current stream is done."""
        self.current_stream().synchronize()

    def rng_state(self) -> torch.Tensor:
        """The state of torch's default CPU generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Put the state of the default CPU generator back."""
        torch.set_rng_state(state)


class CPUPool(Pool):
    """Arenas of host memory.

    A graph uses the smallest arena that holds its intermediates and shared outputs. Sizes that are captured largest
    first therefore need only one arena. An arena is freed with its last graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self._arenas: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas. Memory that belongs to one graph is in ``CPUGraph.nbytes``."""
        arenas = (held() for held in self._arenas.valuerefs())  # a list, which no other thread changes
        return sum(arena.nbytes for arena in arenas if arena is not None)

    def nbytes_of(self, graphs: Sequence[Graph]) -> int:
        """Bytes of the arenas that these graphs keep alive."""
        parts = [part for graph in graphs for part in graph.graphs]
        arenas = {id(p.arena): p.arena for p in parts if isinstance(p, CPUGraph) and p.arena is not None}
        return sum(arena.nbytes for arena in arenas.values())

    def take_arena(self, nbytes: int) -> torch.Tensor:
        """An arena of at least ``nbytes`` bytes. The caller holds it as long as it uses it."""
        fitting = [arena for arena in self._arenas.values() if arena.nbytes >= nbytes]
        if fitting:
            return min(fitting, key=lambda arena: arena.nbytes)
        arena = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._arenas[id(arena)] = arena
        return arena

    @done_by_core
    def order_after_last_use(self) -> None:
        """Do nothing: replays run at once, on the thread that holds the pool's lock."""


class CPUGraph(Graph):
    """Steps that are bound to memory. A replay runs them on the calling thread, which holds the pool's lock.

    Args:
        pool: Where its memory is.
        steps: What a replay runs.
        outputs: The shared outputs. They lie in the arena and hold the pool's latest replay.
        arena: The memory of the pool that it uses, if it uses some.
        memory: What it has of its own: constants, and results that somebody holds.
    """

    __slots__ = ("_pool", "steps", "tape")

    def __init__(
        self,
        pool: CPUPool,
        steps: Sequence[Step],
        outputs: Any = None,
        arena: torch.Tensor | None = None,
        memory: Sequence[torch.UntypedStorage] = (),
    ) -> None:
        self._pool = pool
        self.steps: Sequence[Step] | None = steps
        """What a replay runs, or None after ``reset``."""
        self.outputs, self.arena, self._memory = outputs, arena, memory
        self.tape: Any = None
        """What runs the steps with ``replay()``, or None until there is such a thing."""
        if TAPE.module is not None:
            self._make_tape(TAPE.module, steps)

    def _make_tape(self, extension: Any, steps: Sequence[Step]) -> None:
        tape = extension.Tape(partial(loop, steps), partial(tell, steps))
        for run, func, operands, outs in steps:
            if operands is None:
                tape.add_call(run)
            else:
                tape.add(run, func._schema.name, func._schema.overload_name, *operands, outs)
        self.tape = tape

    @done_by_core
    def replay(self) -> None:
        """Run the steps. An error of an operator passes through, with a note that names the operator.

        Raises ``ReplayError`` if the results of a copied operator have other shapes than the graph has places for.
        """
        steps = self.steps
        if steps is None:
            raise ReplayError("this graph was released; capture it again")
        self._pool.generation += 1
        if self.tape is None and TAPE.module is not None:
            self._make_tape(TAPE.module, steps)
        if self.tape is not None:
            self.tape.replay()
        else:
            loop(steps)

    def describe(self) -> str:
        """That Python replays it, while the loop that will do so is being compiled; else nothing."""
        is_early = self.steps is not None and self.tape is None and TAPE.is_compiling
        return "Python replays it, more slowly, until the compiled loop is ready" if is_early else ""

    def reset(self) -> None:
        """Release the steps and their memory."""
        self.steps = self.tape = self.arena = self.outputs = None
        self._memory = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its own: constants, and results that somebody holds. The arena belongs to the pool."""
        return sum(storage.nbytes() for storage in self._memory)


def loop(steps: Sequence[Step]) -> None:
    """Python's way through the steps: see Note [one replay, two loops]. An error passes through, with a note that names
    the operator."""
    try:
        with _below_autograd():
            for step in steps:
                step.run()
    except BaseException as error:
        tell((step,), 0, error)
        raise


class _CPUCapture(Capture):
    def __init__(self, pool: CPUPool, backend: CPUBackend) -> None:
        self._pool = pool
        self._backend = backend
        self._recorder = Recorder()
        self._modes = ExitStack()
        self._stack = _get_current_dispatch_mode_stack()
        reveal_operators(backend.device)
        backend.watch.capture = self
        CAPTURE_LOCK.acquire()
        try:
            self._modes.enter_context(SaysCapturing(backend.is_capturing))
            self._modes.enter_context(self._recorder.host_reads())
            self._modes.enter_context(self._recorder)
            self._backend.watch.is_capturing = self.is_open = True
        except BaseException:
            self._close()
            raise

    def pause(self) -> Graph:
        """Bind what was recorded so far. The recorder stays on torch's stack of modes and records nothing."""
        program = self._recorder.pause()
        self._backend.watch.is_capturing = False
        try:
            with _disable_current_modes():  # the modes that watch the callable must not see the binding
                return self._bind(program)
        except BaseException:
            self.abort()
            raise

    def resume(self) -> None:
        self._backend.watch.is_capturing = True
        self._recorder.resume()

    @contextmanager
    def watching(self, mode: OperatorMode) -> Iterator[None]:
        """The mode takes the recorder's place on torch's stack: to come by two costs each operator twice as much."""
        recorder = _pop_mode()
        try:
            with mode:
                yield
        finally:
            if self.is_open:
                _push_mode(recorder)

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        return self._recorder.run(func, args, kwargs, tensors)

    def look_inside(
        self, mode: OperatorMode, func: OpOverload, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self._recorder.look_inside(func, key, args, kwargs, mode)

    def set_outputs(self, outputs: Any, *, shared: bool) -> None:
        """Keep the outputs. Shared ones are only described, so that their memory can be reused."""
        if shared:
            self._recorder.share(outputs)
        else:
            self.outputs = outputs

    def end(self) -> Graph:
        if not self.is_open:
            raise CaptureError("the capture has ended already; begin another with begin_capture()")
        recorder, program = self._recorder, self._recorder.pause()
        self._close()
        recorder.check_refused()
        self.graph = graph = self._bind(program)
        if graph.outputs is not None:
            self.outputs = graph.outputs
        return graph

    def _bind(self, program: Recording) -> CPUGraph:
        try:
            bound = Binding(program, self._pool.take_arena)
            return CPUGraph(self._pool, bound.steps, bound.outputs, bound.arena, bound.memory)
        except Exception as error:
            reason = self._backend.classify_error(error)
            raise CaptureError(
                f"the recording could not be bound to memory: {type(error).__name__}: {error}", reason
            ) from error

    def abort(self) -> None:
        if self.is_open:
            self._close()

    def _close(self) -> None:
        self._backend.watch.is_capturing = self.is_open = False
        restore_modes([*self._stack, self._recorder])  # which a watching mode may have replaced
        try:
            self._modes.close()
        finally:
            restore_modes(self._stack)
            del self._recorder
            CAPTURE_LOCK.release()
