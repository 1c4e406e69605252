"""The breaks of a PIECEWISE capture: what ends a graph, runs a part eagerly, and begins the next graph."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..backends.base import Capture, Graph
from ..backends.operators import is_expanded, is_strided, storage_key, tensors_in, user_line
from ..call.marks import ACTIVE
from ..call.spec import is_tensor
from ..errors import CaptureError
from ..reasons import Reason
from .piecewise import EagerPart
from .request import CaptureRequest
from .watch import CaptureWatch

__all__ = ["Breaking"]


@dataclass(eq=False)
class Breaking:
    """Within its block, each break ends a graph of the capture, runs eagerly and begins the next graph.

    Enter it within ``capture``, and ``watch`` within it. ``parts`` get the graphs and breaks, but for the last graph.
    """

    request: CaptureRequest
    capture: Capture
    watch: CaptureWatch
    parts: list[Graph | EagerPart]
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
        if self.watch.is_paused or self._failed is not None:
            return fn(*args, **kwargs)
        self.watch.check_returned(args, kwargs)
        graph = self.capture.pause()
        self.parts.append(graph)
        if not self.request.backend.capture_executes:
            graph.replay()  # so that the break sees values, rather than memory that nothing has written yet
        before, operators = self.watch.storages(), self.watch.operators
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
        operators = self.watch.operators - operators
        self.watch.next_part(leaves)
        part = EagerPart(name, user_line(), fn, args, kwargs, leaves, spec, made, self.request.clock, operators)
        self.parts.append(part)
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
