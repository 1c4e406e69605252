"""One run of the call: whatever a capture or a comparison runs of the user's code for its answer is a ``CallRun``.

A run says on which values the call runs, what watches its memory, whether its code is traced, and who runs its
operators: torch alone, a capture that records them, or what follows rows. What its maker wants is read while the
outputs are at hand: behind a capture they lie in the memory of a graph.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from operator import call
from typing import Any, Generic, NamedTuple, TypeVar

from ...backends.base import Capture, Graph
from ...backends.host_reads import SaysCapturing
from ...backends.operators import storage_key, tensors_in
from ...backends.tracing import uncached_casts
from ...errors import CaptureError
from ...runtime.outputs import copied_from
from ...runtime.protocols import CaptureRequest
from ..watch.memory import MemoryWatch, Runner

T = TypeVar("T")


class Recording(NamedTuple):
    """A captured graph, and the outputs in its memory."""

    graph: Graph
    outputs: Any
    is_own: list[bool]
    """For each output tensor, whether it lies in the graph's memory or in a static input."""
    firsts: list[int]
    """For each output tensor, the place of the first one that is the same object."""
    given: list[int | None]
    """For each output tensor, the position of the argument that it is."""


@dataclass
class CallRun(Generic[T]):
    """One run of the request's call on these values; ``make`` or ``record`` makes it, once.

    The context variables that the run sets are set in a copy, since nobody could unset them; the caller's own run alone
    sets the caller's.
    """

    request: CaptureRequest
    values: Sequence[Any]
    watch: MemoryWatch | None
    """What watches its memory, unless that was watched in a run alike."""
    open_outputs: Callable[[Any], Any] | None
    """See Note [objects among outputs] in ``outputs.py``."""
    read: Callable[[Any], T]
    """Gets the opened output while that is at hand."""
    trace: AbstractContextManager[Any] | None = None
    """What traces its code, unless that is known."""
    runner: Runner | None = None
    """What runs its operators, unless torch alone does or they are recorded."""
    check: Callable[[], None] | None = None
    """Raises ``CaptureError`` if the run has left Python's state otherwise than the eager run did."""
    is_eager: bool = False
    """Whether it is the eager run: it sees what eager sees, and not that somebody captures."""
    within: Callable[..., Any] = field(init=False)
    """Calls a function with the context variables as the run has left them."""

    def make(self) -> T:
        """Run the call, and give what ``read`` gives. Raises what the call raises, and ``CaptureError`` for what runs
        for the graph's sake must not do."""
        is_callers = self.is_eager and self.request.keep_effects
        with nullcontext() if is_callers else uncached_casts():
            # Code that queries whether anyone captures takes the path that is recorded, where a capture executes. A
            # device's code may prepare captures in runs that are none; what it then records is traced and compared.
            rehearses = self.request.backend.capture_executes and not self.is_eager
            with SaysCapturing() if rehearses else nullcontext():
                output = self._call(self.runner, is_callers=is_callers)
            if self.check is not None:
                self.within(self.check)
            return self.read(output)

    def record(self, alike: tuple[MemoryWatch, Any] | None = None) -> Recording:
        """Run the call and record it. If nothing watches it, ``alike`` is what watched a run alike, and its outputs.
        Raises ``CaptureError``, with the operator that ran last."""
        watch, recording = self.watch, None
        try:
            with uncached_casts(), self.request.backend.begin_capture(self.request.pool) as capture:
                output = self._call(capture)
                self.read(output)
                described = self._give_outputs(capture, output, alike)
                del output  # so that only the capture holds the outputs
            graph = capture.graph if watch is None else watch.finished(capture.graph)
            recording = Recording(graph, capture.outputs, *described)
            if self.check is not None:
                self.check()  # the variables of the run are other ones: breaks are set there
            return recording
        except BaseException as error:
            if recording is not None:
                recording.graph.reset()
            elif watch is not None:
                watch.discard()
            if isinstance(error, CaptureError) or not isinstance(error, Exception):
                raise
            refused = watch.refused if watch is not None else None
            if refused is not None:  # the callable caught it, and raised something else
                raise refused from error
            what = f" after {watch.latest}" if watch is not None and watch.latest is not None else ""
            text = f"{type(error).__name__}{what}: {error}"
            raise CaptureError(text, self.request.backend.classify_error(error)) from error

    def _call(self, runner: Runner | None, *, is_callers: bool = False) -> Any:
        watching = self.watch.watching(runner) if self.watch is not None else nullcontext()
        # The trace is here, since the end of a capture runs much Python that reads nothing.
        with watching, self.trace or nullcontext():
            self.within = call if is_callers else copy_context().run
            output = self.within(self.request.call, self.values)
        return output if self.open_outputs is None else self.open_outputs(output)

    def _give_outputs(
        self, capture: Capture, output: Any, alike: tuple[MemoryWatch, Any] | None
    ) -> tuple[list[bool], list[int], list[int | None]]:
        """Give the capture what the call returned. For each output tensor: what ``Recording`` says of it."""
        buffers, options = self.request.buffer_storages(), self.request.options
        watch, outputs = alike or (self.watch, output)
        assert watch is not None
        is_own = [watch.made(tensor) or storage_key(tensor) in buffers for tensor in tensors_in(outputs)]
        places = list(map(id, tensors_in(output)))
        firsts = list(map(places.index, places))
        positions = {id(value): position for position, value in enumerate(self.values)}
        given = list(map(positions.get, places))
        if options.outputs != "clone":
            output = copied_from(buffers, output)
        capture.set_outputs(output, shared=options.shares_outputs)
        return is_own, firsts, given
