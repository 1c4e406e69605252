"""What the tests of ``graphed()`` calls share: a model that doubles, small sizes, and the reason of a call."""

from collections.abc import Callable
from typing import Any

import torch

from graphdispatch import Graphed, Reason, graphed


def double(x: torch.Tensor) -> torch.Tensor:
    """The model of most tests."""
    return x * 2


def make(fn: Callable[..., Any] = double, **options: Any) -> Graphed[..., Any]:
    """Sizes two and four, captured at the first sighting, unless ``options`` say otherwise."""
    return graphed(fn, **({"dynamic": {"x": 0}, "sizes": (2, 4), "capture_after": 1} | options))


def reason(step: Graphed[..., Any], *args: Any, **kwargs: Any) -> Reason:
    """The reason of one call."""
    step(*args, **kwargs)
    assert step.last_decision is not None
    return step.last_decision.reason


def batch(rows: int) -> torch.Tensor:
    """A new batch."""
    return torch.randn(rows, 3)
