"""A front end for random programs: their rows are lengths, beside a batch of which they know nothing."""

from collections.abc import Callable
from typing import Any

import torch

import graphdispatch as gd

from ..behaviour.front_ends import GraphedFrontEnd
from ..helpers import with_options

__all__ = ["LengthsFrontEnd"]


class _Front:
    """``graphed``, called like the callable itself: each call has another batch beside it."""

    def __init__(self, graphed: Any) -> None:
        self._graphed, self._calls = graphed, 0

    def __call__(self, *args: Any) -> Any:
        self._calls += 1
        return self._graphed(torch.ones(self._calls % 3 + 1), *args)[0]

    def prewarm(self, *args: Any) -> Any:
        return self._graphed.prewarm(torch.ones(3), *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graphed, name)


class LengthsFrontEnd(GraphedFrontEnd):
    """``graphed`` with two dynamic dimensions; the sizes are lengths."""

    name = "lengths"

    def _open(self, pad: dict[str, Any] | None = None, **more: Any) -> None:
        fn: Callable[..., Any] = self.fn

        def both(batch: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor) -> Any:
            return fn(x, ids, slots), batch * 2

        lengths = gd.Dim("length", sizes=list(self.sizes), pad=pad or {})
        dynamic: dict[str, Any] = {
            "batch": {0: "batch"},
            "x": {0: lengths},
            "ids": {0: "length"},
            "slots": {0: "length"},
        }
        how: dict[str, Any] = {"sizes": [3], "mode": self.mode, "options": self.options}
        self.front = self.step = _Front(gd.graphed(both, dynamic=dynamic, **with_options(how | more, capture_after=1)))  # type: ignore[assignment]
