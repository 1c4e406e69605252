"""Records a call on its static inputs: one graph, or in PIECEWISE mode graphs between breaks.

Note [autocast inside a capture]
    Autocast keeps cast copies of weights until the outermost region ends, in one cache for all threads. A graph that
    reads such a copy would go on reading it after the weights were written in place, and after the copy was freed. A
    copy that a capture makes lies in the graph's memory, and eager code of the same region would read it. So the cache
    is off while a call is warmed up and recorded: the graph casts the weights itself in each replay.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from ..backends.base import Capture, Graph
from ..backends.operators import storage_key, tensors_in
from ..errors import CaptureError
from ..modes import CUDAGraphMode
from .piecewise_capture import PiecewiseCapture
from .request import CaptureRequest
from .watch import CaptureWatch

__all__ = ["Recording", "record", "uncached_casts"]


class Recording(NamedTuple):
    """A captured graph, the outputs in its memory, and the mode that it was captured in."""

    graph: Graph
    outputs: Any
    is_own: list[bool]
    """For each output tensor, whether it lies in the graph's memory or in a static input."""
    mode: CUDAGraphMode


def record(request: CaptureRequest, existing: set[int], start_over: Callable[[str], None]) -> Recording:
    """Record the call. If that fails inside a module and breaks are automatic, break at the module and record again.

    ``existing`` are the keys of the storages that the graph may read besides its inputs. ``start_over`` is called
    before each try with what is being done, and puts everything back to where the eager run began. Raises
    ``CaptureError`` with the operator that ran last.
    """
    breaks = request.auto_breaks
    while True:
        mode = CUDAGraphMode.PIECEWISE if breaks else request.mode
        try:
            with uncached_casts(), breaks.marked() if breaks is not None else nullcontext():
                return _record_once(request, mode, existing, start_over)
        except CaptureError as error:
            if breaks is None or not breaks.add(error):
                raise


def _record_once(
    request: CaptureRequest, mode: CUDAGraphMode, existing: set[int], start_over: Callable[[str], None]
) -> Recording:
    start_over(f"capturing {request.size} rows")
    values, buffers = request.static_values(), request.buffer_storages()
    watch = CaptureWatch(existing | {storage_key(value) for value in values if isinstance(value, torch.Tensor)})
    try:
        capture: Capture | PiecewiseCapture
        if mode is CUDAGraphMode.PIECEWISE:
            capture = PiecewiseCapture(request.backend, request.pool, watch, request.clock)
        else:
            capture = request.backend.begin_capture(request.pool)
        with capture, watch:
            output = request.call(values)
            is_own = [watch.made(tensor) or storage_key(tensor) in buffers for tensor in tensors_in(output)]
            capture.set_outputs(output, shared=request.options.shares_outputs)
            del output  # so that only the capture holds the outputs
        return Recording(capture.graph, capture.outputs, is_own, mode)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{type(error).__name__} after {watch.latest}: {error}", request.backend.classify_error(error)
        ) from error


@contextmanager
def uncached_casts() -> Iterator[None]:
    """Within the block the calling thread casts weights anew each time. The cache is cleared before and after."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()
