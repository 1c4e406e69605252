"""What the tests of ``graphed()`` calls share: a model that doubles, small sizes, and the reason of a call."""

from collections.abc import Callable
from typing import Any

import torch

from graphdispatch import Graphed, Reason, graphed

from .helpers import with_options


def double(x: torch.Tensor) -> torch.Tensor:
    """The model of most tests."""
    return x * 2


def make(fn: Callable[..., Any] = double, **options: Any) -> Graphed[..., Any]:
    """Sizes two and four, captured at the first sighting, unless ``options`` say otherwise."""
    return graphed(fn, **with_options({"dynamic": {"x": 0}, "sizes": (2, 4)} | options, capture_after=1))


def reason(step: Graphed[..., Any], *args: Any, **kwargs: Any) -> Reason:
    """The reason of one call."""
    step(*args, **kwargs)
    assert step.last_decision is not None
    return step.last_decision.reason


def batch(rows: int) -> torch.Tensor:
    """A new batch."""
    return torch.randn(rows, 3)
