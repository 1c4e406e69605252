"""The plain capturer: warm up, record, trust. For engines that vouch for what they capture.

    load the static inputs, padding included
    run the call once on them (or ``warmup_iterations`` times)    -> the caller's answer
    record the call                                              -> the graph

The backend of the CPU executes what it records, so there the recording itself is that run. Nothing is watched, undone,
proven or compared. So this is what the engine vouches for:

- Rows are independent, and padding rows write where nobody reads.
- The call does the same for every batch of a size. It reads no Python state that changes, and what Python does besides
  (on the host, in hooks) need not happen in a replay. A warm-up does what the recording does, too.
- Memory that it reads and that is no argument stays where it is: weights, caches, and tensors that come by another way
  than the arguments, such as metadata of attention. Who moves some clears the graphs: ``server.graphs.clear()``.
- The first dimension is the batch's in each output that has as many rows there as the graph. Others are returned whole.
  Numbers among the outputs, such as that of the rows, are those of the capture.
- It runs more than once where a capture is made: ``warmup_iterations`` times, for the recording, and once more eagerly
  where a run fails. What it writes besides its arguments is not put back, in a prewarm neither.
- Arguments that it writes share no memory with each other, at the capture. Later calls are compared.
- No argument is a view of state that the call writes.
- Each rank of a group makes the same captures, since each of them runs the call's collectives. Where ranks agree
  (``CUDAGraphWrapper(agree=...)``), a graph that one refuses behind its runs is refused by all; on the CPU, where a
  capture is a run, one that stops in it leaves the others there.
- Gradients are off where it is called. A plain function runs eagerly where they are on, since nobody sees whether it
  trains.

What the call writes to an argument goes back to the caller's tensor, if torch sees the write. Where a replay fails, its
call runs eagerly, whatever the replay had written before, and the graph serves no more: a later one takes its place.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from .backends.operators import storage_key, tensors_in
from .backends.tracing import profiler_range, uncached_casts
from .errors import CaptureError, ConfigError, error_of_signal
from .modes import EntryState
from .reasons import Reason
from .runtime.constants import VALUES
from .runtime.entry import CUDAGraphEntry
from .runtime.flatten import describe, is_tensor
from .runtime.outputs import OutputRule, Outputs, copied_from, first_rows
from .runtime.protocols import Capturer, CaptureRequest, CaptureResult, Guard
from .runtime.rules import graph_name
from .runtime.windows import paused_collector
from .sizes import Axis

_log = logging.getLogger("graphdispatch")


class Reached(Guard):
    """The modules that a callable is, or is a method of, with their tensors. It always holds.

    Args:
        fn: The callable.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        home = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
        self._home = home if isinstance(home, nn.Module) else None

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules."""
        return list(self._home.modules()) if self._home is not None else []

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Their parameters and buffers."""
        return [*self._home.parameters(), *self._home.buffers()] if self._home is not None else []

    placed = tensors

    @property
    def trainable(self) -> bool:
        """Whether a module trains; True where nobody sees which modules there are."""
        home = self._home
        return home is None or (
            any(one.training for one in self.modules) and any(t.requires_grad for t in self.tensors)
        )


class PlainCapturer(Capturer):
    """Captures by one run and one recording, and compares nothing; the module's text says what its user vouches for.

    It has no state. A capture that fails leaves no graph, and its call has the answer of the run that was made. A graph
    whose replay failed is released at the next call, and captured anew after some more.
    """

    may_pad_otherwise = False

    def reach(self, fn: Callable[..., Any], *, by_names: bool = False) -> Guard:
        """As ``Capturer.reach``."""
        return Reached(fn)

    def capture(self, request: CaptureRequest) -> CaptureResult:
        """As ``Capturer.capture``. Raises ``ConfigError`` for ``verify_every``."""
        if request.options.verify_every is not None:
            raise ConfigError("verify_every compares graphs with eager, and a plain capturer compares nothing")
        span = profiler_range("capture", graph_name(request.call.fn, request.key))
        pause = paused_collector(request.options.gc_disable)
        with pause, request.pool.lock, request.backend.watched(), span, uncached_casts():
            request.pool.order_after_last_use()
            return _Recording(request).result()

    def check(self, request: CaptureRequest, entry: CUDAGraphEntry) -> CaptureResult:
        """Run the call eagerly, and give up the graph, whose replay failed: nothing else is ever due."""
        return CaptureResult(request.call(request.values), None, Reason.REPLAY_FAILED, Reason.REPLAY_FAILED.text)


class _Recording:
    """One capture under way."""

    def __init__(self, request: CaptureRequest) -> None:
        self._request = request
        self._started = request.clock()
        self._kept = request.values_with([None] * len(request.inputs.specs))
        self._existing = set(map(storage_key, (*request.tensors, *filter(is_tensor, self._kept))))
        self._answer: Any = None
        self._mutated: tuple[int, ...] = ()
        self._versions: list[int] = []
        self._has_run = False

    def result(self) -> CaptureResult:
        """The graph, with the call's answer; or the reason why there is none."""
        request = self._request
        try:
            entry = self._capture()
            return CaptureResult(self._answer, entry, Reason.CAPTURED_NOW)
        except Exception as error:
            if (raised := error_of_signal(error)) is not None:
                raise raised from raised.__cause__
            request.backend.raise_if_lost(error)
            _log.debug("no graph for %s: %s", request.key, error)
            answer = self._answer if self._has_run else request.call(request.values)  # which raises what is its own
            detail = f"{type(error).__name__}: {error}"
            return CaptureResult(answer, None, request.backend.classify_error(error), detail, error)
        finally:
            request.inputs.mark_dirty()  # the call may have written to padding rows

    def _capture(self) -> CUDAGraphEntry:
        request, backend = self._request, self._request.backend
        if request.is_piecewise or len(request.inputs.axes) > 1:
            raise CaptureError("a plain capture holds no breaks and no lengths besides rows", Reason.CAPTURE_UNSAFE)
        values, rng = request.static_values(), backend.rng_state()
        for _ in range(0 if backend.capture_executes else request.options.warmup_iterations):
            self._load()
            self._take(request.call(values))
        if backend.capture_executes:
            self._load()
        with backend.begin_capture(request.pool) as capture:
            output = request.call(values)
            if backend.capture_executes:  # before the end, which may give this memory to others
                with _disable_current_modes():
                    self._take(output)
            if request.options.outputs != "clone" and request.inputs.specs:
                output = copied_from(request.buffer_storages(), output)
            is_own = [storage_key(tensor) not in self._existing for tensor in tensors_in(output)]
            capture.set_outputs(output, shared=request.options.shares_outputs)
            del output  # so that only the capture holds the outputs
        outputs = capture.outputs
        if request.options.shares_outputs:
            outputs = tree_map_only(torch.Tensor, self._weak, outputs)
        rule = OutputRule(tuple(map(self._dims_of, tensors_in(outputs))))
        return CUDAGraphEntry(
            descriptor=request.descriptor,
            mode=request.mode,
            key=request.key,
            size=request.size,
            graph=capture.graph,
            pool=request.pool,
            backend=backend,
            inputs=request.inputs,
            outputs=Outputs(outputs, rule, is_own, request.options.outputs, request.pool),
            mutated=self._mutated,
            uses_rng=not torch.equal(rng, backend.rng_state()),
            state=EntryState.VERIFIED,
            knows_effects=False,
            signature=request.signature,
            call=request.call,
            example=self._kept,
            capture_time_ms=(request.clock() - self._started) * 1e3,
        )

    def _load(self) -> None:
        """Load the batch, and note how often its buffers were written so far."""
        request = self._request
        request.inputs.load(request.values, request.rows, request.size)
        self._versions = [view._version for view in request.inputs.views(request.size)]

    def _take(self, output: Any) -> None:
        """Take the caller's answer from the first run, and give back what that wrote to arguments."""
        request = self._request
        if self._has_run:
            return
        odd = next((leaf for leaf in tree_leaves(output) if not is_tensor(leaf) and type(leaf) not in VALUES), None)
        if odd is not None:
            raise CaptureError(
                f"an output is {describe(odd)}, which a replay would give back as it is now; return tensors and "
                "constants, or register its class (torch.utils._pytree.register_pytree_node)",
                Reason.OUTPUT_UNSUPPORTED,
            )
        views = request.inputs.views(request.size)
        self._mutated = tuple(i for i, view in enumerate(views) if view._version != self._versions[i])
        self._answer, self._has_run = tree_map_only(torch.Tensor, self._real_rows, output), True
        for index in self._mutated if request.keep_effects else ():
            real = request.inputs.real(index, request.rows, request.size)
            request.values[request.inputs.specs[index].position].copy_(real)

    def _weak(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in the graph's memory that does not own it; one that lies elsewhere is held."""
        return tensor if storage_key(tensor) in self._existing else self._request.backend.weak_reference(tensor)

    def _dims_of(self, tensor: torch.Tensor) -> tuple[tuple[int, int, Axis], ...]:
        """Of an output with as many rows as the graph, the first dimension, which follows the batch."""
        axis, size = self._request.inputs.axes[0], self._request.size
        follows = self._request.inputs.has_rows and tensor.dim() and tensor.shape[0] == axis.of(size)
        return ((0, 1, axis),) if follows else ()

    def _real_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the caller gets of an output: a copy of its real rows, unless it was there before."""
        real = first_rows(tensor, self._dims_of(tensor), self._request.rows)
        return real if storage_key(tensor) in self._existing else real.clone()
