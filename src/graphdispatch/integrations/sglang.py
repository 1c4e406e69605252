"""SGLang's seam for graphs: a backend for its runners whose graphs are this library's.

Written and tested against the sources of SGLang 0.5.23, with a runner that stands for its own. It was not run in a
running SGLang. An out-of-tree platform names the class::

    class MyPlatform(SRTPlatform):
        def get_full_graph_backend_cls(self):
            return GraphBackend
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from sglang.srt.model_executor import forward_context
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend
from sglang.srt.runtime_context import get_parallel

from ..backends import get_backend
from ..config import CUDAGraphOptions
from ..decide.decision import Decision
from ..descriptors import BatchDescriptor
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..stats import CUDAGraphStats
from .engine import EagerSteps, EngineGraphs, on_all_ranks

__all__ = ["GraphBackend"]

_FULL = CUDAGraphMode.FULL
_ROUNDS = 3
"""Steps of a capture: the capture, the comparison of another batch, and a replay."""
_VARIED = ("input_ids", "positions")
"""The runner's buffers whose values differ from step to step of a capture, so that a value that it froze shows."""
_CHANGES = Decision.eager(
    Reason.STATE_UNSEEN,
    detail="each forward of the warm-up needed a new capture, since Python values that it reads changed",
)


class _Captured(NamedTuple):
    """The graph of one shape, with what its forward reads besides the runner's buffers."""

    graphs: EngineGraphs
    key: BatchDescriptor
    context: Any
    inputs: Any


class GraphBackend(BaseCudaGraphBackend):
    """Captures a forward of SGLang for each shape, compares it with eager, and replays it.

    Made with SGLang's arguments, as its own ``FullCudaGraphBackend``. The runner's buffers are the inputs, and outputs
    are the graph's own memory, which its next replay overwrites. All graphs share one pool.

    A shape whose graph fails or differs from eager on some rank of SGLang's ``tp_group`` has no graph on any:
    ``can_run`` says no, and SGLang runs it eagerly. A replay whose guards do not hold runs the captured forward
    eagerly, on the same padded buffers. The first of each reason is a line of the log. Not thread-safe, as SGLang's own
    is not.

    A capture saves what it writes, and puts it back: of an indexed write the rows, and of a kernel's argument all of
    it. A cache of keys and values that a kernel writes to is therefore copied, or above ``state_limit_bytes`` refused;
    a subclass with other ``options`` raises that limit. ``enable_memory_saver`` changes nothing: the memory of these
    graphs stays while SGLang's is paused.
    """

    options: ClassVar[CUDAGraphOptions] = CUDAGraphOptions(inputs="static", outputs="static")
    """How graphs are captured and compared."""

    def __init__(self, cuda_graph_runner: Any, *, enable_memory_saver: bool = False) -> None:
        self._runner = cuda_graph_runner
        self._backend = get_backend("auto", torch.device(cuda_graph_runner.model_runner.device))
        self._pool = self._backend.make_pool()
        self._captured: dict[Any, _Captured] = {}
        self.eager = EagerSteps("forward", logging.getLogger(__name__))
        """The forwards that ran eagerly in the place of a graph, by reason."""

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        """A block around the runner's captures. Graphs are captured on a stream of their own, not on ``stream``."""
        yield

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        """Capture ``forward_fn``, which reads the runner's buffers, and compare it with eager on two batches.

        ``capture_inputs`` are kept with the graph. ``post_warmup_hook`` runs after a first, eager forward. Raises what
        ``forward_fn`` raises.
        """
        with torch.no_grad():
            forward_fn()
        if post_warmup_hook is not None:
            post_warmup_hook()
        made, why = self._make(shape_key, forward_fn, capture_inputs)
        if on_all_ranks(why is None, get_parallel().tp_group.cpu_group):
            self._captured[shape_key] = made
        elif why is not None:
            self.eager.note(why)

    def _make(self, shape_key: Any, forward_fn: Callable[[], Any], inputs: Any) -> tuple[_Captured, Decision | None]:
        """A captured forward, and why no graph serves it if none does."""
        graphs = EngineGraphs(forward_fn, _FULL, self.options, backend=self._backend, pool=self._pool)
        context = forward_context.get_forward_context() if forward_context.has_forward_context() else None
        made = _Captured(graphs, BatchDescriptor(shape_key.size), context, inputs)
        why = _CHANGES
        with self._varied() as vary, torch.no_grad():
            for round_ in range(_ROUNDS):
                vary(round_)
                graphs(batch_descriptor=made.key, cudagraph_runtime_mode=_FULL)
                if graphs.why_eager is not None and not graphs.why_eager.reason.leads_to_graph:
                    why = graphs.why_eager
        graphs.freeze()
        return made, why if graphs.why_eager is not None else None

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        """Whether there is a graph for this shape."""
        return shape_key in self._captured

    def replay_session(self) -> AbstractContextManager[None]:
        """A block around a step; nothing is needed."""
        return nullcontext()

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        """The output of the forward of this shape on what the runner's buffers hold now: of the class and with the
        attributes of the capture's, its tensors in memory of the graph. Raises what the forward raises."""
        made = self._captured[shape_key]
        before = forward_context.set_forward_context(made.context)  # guards compare it, and the forward puts it back
        try:
            with torch.no_grad():
                output = made.graphs(batch_descriptor=made.key, cudagraph_runtime_mode=_FULL)
        finally:
            forward_context.set_forward_context(before)
        if (why := made.graphs.why_eager) is not None:
            self.eager.note(why)
        return output

    def cleanup(self) -> None:
        """Release all graphs."""
        for made in self._captured.values():
            made.graphs.clear_cache()
        self._captured.clear()

    def get_stats(self) -> dict[Any, CUDAGraphStats]:
        """What the graph of each shape did."""
        return {shape: made.graphs.get_stats() for shape, made in self._captured.items()}

    @contextmanager
    def _varied(self) -> Iterator[Callable[[int], None]]:
        """A block with a function that gives buffers another value; what they held before comes back."""
        buffers = getattr(self._runner, "buffers", None)
        held = [each for name in _VARIED if isinstance(each := getattr(buffers, name, None), torch.Tensor)]
        before = [each.clone() for each in held]

        def vary(round_: int) -> None:
            for each in held:
                each.fill_(round_)

        try:
            yield vary
        finally:
            for each, old in zip(held, before, strict=True):
                each.copy_(old)
