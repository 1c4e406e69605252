"""A PIECEWISE capture under way: ends a graph at each break, runs the break eagerly, begins the next graph."""

from collections.abc import Callable
from contextvars import Token
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..backends.base import Backend, Capture, Graph, Pool
from ..backends.operators import is_expanded, storage_key, tensors_in, user_line
from ..call.breaks import ACTIVE, BreakRunner
from ..errors import CaptureError
from ..reasons import Reason
from .piecewise import EagerPart, PiecewiseGraph
from .watch import CaptureWatch

__all__ = ["PiecewiseCapture"]


@dataclass(eq=False)
class PiecewiseCapture:
    """Enter it, then ``watch``, around the callable; then read ``graph`` and ``outputs``. Hold the pool's lock."""

    backend: Backend
    pool: Pool
    watch: CaptureWatch
    clock: Callable[[], float]
    """The clock by which replays time their breaks, in seconds."""
    parts: list[Graph | EagerPart] = field(default_factory=list)
    _capture: Capture = field(init=False)
    _token: Token[BreakRunner | None] = field(init=False)
    _failed: str | None = None
    """The break that raised, if one did; nothing has been recorded since."""

    def __enter__(self) -> "PiecewiseCapture":
        self._capture = self.backend.begin_capture(self.pool)
        self.watch.on_break = self.run_break
        self._token = ACTIVE.set(self.run_break)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        ACTIVE.reset(self._token)
        is_complete = False
        try:
            if kind is None and self._failed is not None:
                raise CaptureError(
                    f"break {self._failed!r} raised and the callable went on; no graph can hold that",
                    Reason.CAPTURE_UNSAFE,
                )
            if kind is None:
                self.parts.append(self._capture.end())
                is_complete = True
        finally:
            if not is_complete:
                self._capture.abort()
                self.graph.reset()

    def set_outputs(self, outputs: Any, *, shared: bool) -> None:
        """As ``Capture.set_outputs``: hands over what the callable returned."""
        self._capture.set_outputs(outputs, shared=shared)

    @property
    def outputs(self) -> Any:
        """What the callable returned."""
        return self._capture.outputs

    @property
    def graph(self) -> PiecewiseGraph:
        """What was captured."""
        return PiecewiseGraph(self.parts, self.watch.crossing, self.pool, self.clock)

    def run_break(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End the current graph, run ``fn`` eagerly, begin the next graph. An inner break runs inside the outer one."""
        if self.watch.is_paused or self._failed is not None:
            return fn(*args, **kwargs)
        self.watch.check_returned(args, kwargs)
        graph = self._capture.pause()
        self.parts.append(graph)
        if not self.backend.capture_executes:
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
        self.parts.append(EagerPart(name, user_line(), fn, args, kwargs, leaves, spec, made, self.clock))
        self._capture.resume()
        return tree_unflatten(leaves, spec)

    def _checked_results(self, name: str, leaves: list[Any], before: set[int]) -> tuple[list[Any], list[bool]]:
        """The results of a break, and for each whether the break made it; ``before`` are the storages seen before it.

        Replays write to what the break made. So a copy replaces a tensor that no operator made (numpy, compiled code)
        and an expanded one, whose elements share memory. Raises ``CaptureError`` for tensors that are not dense.
        """
        results, made = [], []
        for leaf in leaves:
            is_made = False
            if isinstance(leaf, torch.Tensor):
                if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided:
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
