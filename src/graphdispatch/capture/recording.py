"""Records a call on its static inputs: one graph, or in PIECEWISE mode graphs between breaks.

Note [autocast inside a capture]
    Autocast keeps cast copies of weights until the outermost region ends, in one cache for all threads. A graph that
    reads such a copy would go on reading it after the weights were written in place, and after the copy was freed. A
    copy that a capture makes lies in the graph's memory, and eager code of the same region would read it. So the cache
    is off while a call is warmed up and recorded: the graph casts the weights itself in each replay.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..backends.base import Capture, Graph
from ..backends.operators import is_expanded, is_strided, storage_key, tensors_in, user_line
from ..call.breaks import ACTIVE
from ..call.spec import is_tensor
from ..errors import CaptureError
from ..modes import CUDAGraphMode
from ..reasons import Reason
from .eager_run import EagerRun
from .request import CaptureRequest
from .watch import CaptureWatch

if TYPE_CHECKING:
    from .piecewise import EagerPart

__all__ = ["Recording", "record", "uncached_casts"]


class Recording(NamedTuple):
    """A captured graph, the outputs in its memory, and the mode that it was captured in."""

    graph: Graph
    outputs: Any
    is_own: list[bool]
    """For each output tensor, whether it lies in the graph's memory or in a static input."""
    mode: CUDAGraphMode


def record(
    request: CaptureRequest, eager: EagerRun, existing: set[int], start_over: Callable[[str], None]
) -> Recording:
    """Record the call. If that fails inside a module and breaks are automatic, break at the module and record again.

    ``existing`` are the keys of the storages that the graph may read besides its inputs. ``start_over`` is called
    before each try with what is being done, and puts everything back to where the eager run began.
    The trace of the ``eager`` run notes the code that the call runs. Raises ``CaptureError`` with the operator that
    ran last.
    """
    breaks = request.auto_breaks
    while True:
        mode = CUDAGraphMode.PIECEWISE if breaks else request.mode
        try:
            with uncached_casts(), breaks.marked() if breaks is not None else nullcontext():
                return _record_once(request, mode, eager, existing, start_over)
        except CaptureError as error:
            if breaks is None or not breaks.add(error):
                raise


def _record_once(
    request: CaptureRequest,
    mode: CUDAGraphMode,
    eager: EagerRun,
    existing: set[int],
    start_over: Callable[[str], None],
) -> Recording:
    start_over(f"capturing {request.size} rows")
    values, buffers = request.static_values(), request.buffer_storages()
    watch = CaptureWatch(existing | {storage_key(value) for value in values if is_tensor(value)})
    parts: list[Graph | EagerPart] = []
    is_piecewise = mode is CUDAGraphMode.PIECEWISE
    try:
        with (
            request.backend.begin_capture(request.pool) as capture,
            _Breaks(request, capture, watch, parts) if is_piecewise else nullcontext(),
            watch.within(capture),
        ):
            with eager.trace:  # here, since the end of a capture runs much Python that reads nothing
                output = request.call(values)
            output = eager.open_outputs(output)
            is_own = [watch.made(tensor) or storage_key(tensor) in buffers for tensor in tensors_in(output)]
            capture.set_outputs(output, shared=request.options.shares_outputs)
            del output  # so that only the capture holds the outputs
        parts.append(capture.graph)
        graph = capture.graph
        if is_piecewise:
            from .piecewise import PiecewiseGraph  # here, since most callables are captured as one graph

            graph = PiecewiseGraph(parts, watch.crossing, request.pool, request.clock)
        return Recording(graph, capture.outputs, is_own, mode)
    except BaseException as error:
        for part in parts:
            if isinstance(part, Graph):
                part.reset()
        if isinstance(error, CaptureError) or not isinstance(error, Exception):
            raise
        raise CaptureError(
            f"{type(error).__name__} after {watch.latest}: {error}", request.backend.classify_error(error)
        ) from error


@dataclass(eq=False)
class _Breaks:
    """Within its block, each break ends a graph of the capture, runs eagerly and begins the next graph.

    Enter it within ``capture``, and ``watch`` within it. ``parts`` get the graphs and breaks, but for the last graph.
    """

    request: CaptureRequest
    capture: Capture
    watch: CaptureWatch
    parts: "list[Graph | EagerPart]"
    _failed: str | None = None
    """The break that raised, if one did; nothing has been recorded since."""

    def __enter__(self) -> None:
        self.watch.on_break = self.run_break
        self._token = ACTIVE.set(self.run_break)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        ACTIVE.reset(self._token)
        if kind is None and self._failed is not None:
            raise CaptureError(
                f"break {self._failed!r} raised and the callable went on; no graph can hold that",
                Reason.CAPTURE_UNSAFE,
            )

    def run_break(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End the current graph, run ``fn`` eagerly, begin the next graph. An inner break runs inside the outer one."""
        from .piecewise import EagerPart

        if self.watch.is_paused or self._failed is not None:
            return fn(*args, **kwargs)
        self.watch.check_returned(args, kwargs)
        graph = self.capture.pause()
        self.parts.append(graph)
        if not self.request.backend.capture_executes:
            graph.replay()  # so that the break sees values, rather than memory that nothing has written yet
        before = self.watch.storages()
        self.watch.next_part()
        self.watch.is_paused = True
        try:
            leaves, spec = tree_flatten(fn(*args, **kwargs))
            leaves, made = self._checked_results(name, leaves, before)
        except BaseException:
            self._failed = name
            raise
        finally:
            self.watch.is_paused = False
        self.watch.next_part(leaves)
        self.parts.append(EagerPart(name, user_line(), fn, args, kwargs, leaves, spec, made, self.request.clock))
        self.capture.resume()
        return tree_unflatten(leaves, spec)

    def _checked_results(self, name: str, leaves: list[Any], before: set[int]) -> tuple[list[Any], list[bool]]:
        """The results of a break, and for each whether the break made it; ``before`` are the storages seen before it.

        Replays write to what the break made. So a copy replaces a tensor that no operator made (numpy, compiled code)
        and an expanded one, whose elements share memory. Raises ``CaptureError`` for tensors that are not dense.
        """
        results, made = [], []
        for leaf in leaves:
            is_made = False
            if is_tensor(leaf):
                if type(leaf) is not torch.Tensor or not is_strided(leaf):
                    what = f"{type(leaf).__name__} with layout {leaf.layout}"
                    raise CaptureError(f"break {name!r} returned a {what}; return dense tensors", Reason.CAPTURE_UNSAFE)
                is_made = storage_key(leaf) not in before
                if is_made and (is_expanded(leaf) or not self.watch.has_seen(leaf)):
                    leaf = leaf.clone(memory_format=torch.contiguous_format)
            results.append(leaf)
            made.append(is_made)
        returned = {storage_key(tensor) for tensor in tensors_in(results)}
        self.watch.unreturned |= dict.fromkeys(self.watch.storages() - before - returned, name)
        return results, made


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
