"""The models of docs/audit.md: a callable, the arguments of one call, and options for ``graphed``."""

from typing import Any

import torch
from torch import nn

Target = tuple[Any, dict[str, Any], dict[str, Any]]


def bert() -> Target:
    """A small BERT of Hugging Face with random weights; each row is a sentence, the mask hides its padding."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=100, **sizes)).eval()
    ids = torch.randint(0, 100, (8, 16))
    mask = (torch.arange(16) < torch.arange(9, 17)[:, None]).long()
    return model, {"input_ids": ids, "attention_mask": mask}, {"pad": {"attention_mask": 1}}


def bert_full_mask() -> Target:
    """The same model, given the mask in the form in which attention takes it."""
    model, example, _ = bert()
    mask = example["attention_mask"].bool()[:, None, None, :].expand(8, 1, 16, 16).contiguous()
    return model, example | {"attention_mask": mask}, {"pad": {"attention_mask": True}}


class Experts(nn.Module):
    """Each row goes to the expert that scores highest; an expert takes the rows that score best, up to its capacity."""

    def __init__(self, width: int = 16, experts: int = 4, capacity: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.weights = nn.Parameter(torch.randn(experts, width, width) / width**0.5)
        self.capacity = capacity

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A row for which its expert has no room stays as it is."""
        score, expert = self.router(x).softmax(-1).max(-1)
        ahead = (expert[:, None] == expert) & (score[:, None] < score)
        has_room = ahead.sum(-1, keepdim=True) < self.capacity
        out = torch.einsum("ni,nij->nj", x, self.weights[expert])
        return torch.where(has_room, x + score[:, None] * out, x)


def experts() -> Target:
    """A mixture of experts with a capacity: whether a row has room depends on the other rows of the batch."""
    torch.manual_seed(0)
    return Experts().eval(), {"x": torch.randn(8, 16)}, {}


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


def failing() -> Target:
    """A model that cannot even be called."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("bad weights")

    return fn, {"x": torch.randn(4, 8)}, {}
