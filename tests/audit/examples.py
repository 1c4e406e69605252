"""Models to audit: a callable, the arguments of one call, and options for ``graphed``."""

from typing import Any

import torch
from torch import nn

Target = tuple[Any, dict[str, Any], dict[str, Any]]


class Checked(nn.Module):
    """Keeps scores within bounds."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        """Reads the largest score back to the host, and selects by a mask."""
        largest = scores.abs().max().item()
        negative = scores[scores < 0]
        bound = 1e4 if largest > 1e4 and len(negative) else largest
        return scores.clamp(-bound, bound)


class Ranker(nn.Module):
    """Scores, checks, and scores again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.check, self.last = nn.Linear(8, 8), Checked(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One score for each row."""
        out: torch.Tensor = self.last(self.check(self.first(x).relu()))
        return out


def ranker() -> Target:
    """A model that reads values back to the host in one of its modules."""
    torch.manual_seed(0)
    return Ranker().eval(), {"x": torch.randn(4, 8)}, {}
