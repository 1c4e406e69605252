"""Records a call on its static inputs: one graph, or in PIECEWISE mode graphs between breaks."""

from contextlib import nullcontext
from contextvars import copy_context
from typing import Any, NamedTuple

from ..backends.base import Graph
from ..backends.operators import storage_key, tensors_in
from ..call.spec import is_tensor
from ..errors import CaptureError
from ..modes import CUDAGraphMode
from .attempt import CaptureAttempt
from .eager_run import uncached_casts
from .piecewise import Breaking, EagerPart, PiecewiseGraph
from .watch import CaptureWatch


class Recording(NamedTuple):
    """A captured graph, the outputs in its memory, and the mode that it was captured in."""

    graph: Graph
    outputs: Any
    is_own: list[bool]
    """For each output tensor, whether it lies in the graph's memory or in a static input."""
    firsts: list[int]
    """For each output tensor, the place of the first one that is the same object."""
    given: list[int | None]
    """For each output tensor, the position of the argument that it is."""
    mode: CUDAGraphMode


def record(attempt: CaptureAttempt) -> Recording:
    """Record the call. If that fails inside a module and breaks are automatic, break at the module and record again.

    Each try begins where the eager run began, whose trace notes the code that the call runs. Raises ``CaptureError``
    with the operator that ran last.
    """
    request, breaks = attempt.request, attempt.request.auto_breaks
    while True:
        mode = CUDAGraphMode.PIECEWISE if breaks else request.mode
        try:
            with uncached_casts(), breaks.marked() if breaks is not None else nullcontext():
                return _record_once(attempt, mode)
        except CaptureError as error:
            if breaks is None or not breaks.add(error):
                raise


def _record_once(attempt: CaptureAttempt, mode: CUDAGraphMode) -> Recording:
    request, eager = attempt.request, attempt.eager
    attempt.start_over(f"capturing {request.size} rows")
    values, buffers = request.static_values(), request.buffer_storages()
    watch = CaptureWatch(attempt.existing | {storage_key(value) for value in values if is_tensor(value)})
    parts: list[Graph | EagerPart] = []
    is_piecewise = mode is CUDAGraphMode.PIECEWISE
    try:
        with (
            request.backend.begin_capture(request.pool) as capture,
            Breaking(request, capture, watch, parts) if is_piecewise else nullcontext(),
            watch.within(capture),
        ):
            with eager.trace:  # here, since the end of a capture runs much Python that reads nothing
                output = copy_context().run(request.call, values)  # nobody could unset a context variable
            output = eager.open_outputs(output)
            is_own = [watch.made(tensor) or storage_key(tensor) in buffers for tensor in tensors_in(output)]
            places = list(map(id, tensors_in(output)))
            firsts = list(map(places.index, places))
            positions = {id(value): position for position, value in enumerate(values)}
            given = list(map(positions.get, places))
            capture.set_outputs(output, shared=request.options.shares_outputs)
            del output  # so that only the capture holds the outputs
        parts.append(capture.graph)
        graph = capture.graph
        if is_piecewise:
            graph = PiecewiseGraph(parts, watch.crossing, request.pool, request.clock, watch.operators)
            if request.auto_breaks:
                request.auto_breaks.check_share(graph.eager_share)
        return Recording(graph, capture.outputs, is_own, firsts, given, mode)
    except BaseException as error:
        for part in parts:
            if isinstance(part, Graph):
                part.reset()
        if isinstance(error, CaptureError) or not isinstance(error, Exception):
            raise
        raise CaptureError(
            f"{type(error).__name__} after {watch.latest}: {error}", request.backend.classify_error(error)
        ) from error
