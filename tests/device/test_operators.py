"""The operators of the device are the CPU's, later."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from queued_device import DEVICE

CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "elementwise": lambda x: (x * 2 + 1).relu() / 3,
    "numbers promote": lambda x: (x.long() * 2, x.long() * 2.5, x.half() * 2.5),
    "matmul": lambda x: x @ x.T,
    "reductions": lambda x: (x.sum(0), x.max(1), x.argmax(), x.std()),
    "views": lambda x: (x.T.reshape(-1)[1:].view(-1, 1), x.unfold(1, 2, 1), x[None, ::2]),
    "views of another type": lambda x: (torch.view_as_complex(x[:, :2].contiguous()), x.view(torch.int32)),
    "in place": lambda x: x.clone().add_(1).masked_fill_(x > 0, 7),
    "written parts": lambda x: x.clone().index_copy_(0, torch.tensor([1], device=x.device), x[:1]),
    "lists": lambda x: (torch.cat([x, x]), torch.stack([x, x]), x.split(2)),
    "shapes by values": lambda x: (x.nonzero(), x[x > 0], (x > 0).any().item()),
    "out": lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)),
    "new tensors": lambda x: (torch.arange(5, device=x.device), torch.eye(3, device=x.device), torch.full_like(x, 3)),
    "empty": lambda x: (x[:0] + 1, x[:0].sum()),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "convolution": lambda x: torch.nn.functional.conv1d(x[None], x[:2, :, None], x[0, :2], padding=1),
    "sorted": lambda x: x.sort(0),
    "on the host": lambda x: x.cpu().mul(2).to(x.device),
}


def on_host(value: Any) -> Any:
    """The same nest on the CPU."""
    return torch.utils._pytree.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, value)


@pytest.mark.parametrize("fn", CASES.values(), ids=CASES.keys())
def test_an_operator_is_the_cpus(fn: Callable[[torch.Tensor], Any]) -> None:
    """Values, shapes and types."""
    x = torch.randn(4, 4)
    torch.testing.assert_close(on_host(fn(x.to(DEVICE))), fn(x))


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x: x @ x[:2], "shapes|size"),
        (lambda x: x.expand(2, 4, 4).add_(1), "more than one element"),
        (lambda x: x + x.cpu(), "two devices"),
        (lambda x: torch.nn.functional.linear(x, x.cpu(), x.cpu()[0]), "two devices"),
        (lambda x: x.view(5), "invalid"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(fn: Callable[[torch.Tensor], Any], words: str) -> None:
    """And the device goes on."""
    x = torch.ones(4, 4, device=DEVICE)
    with pytest.raises(RuntimeError, match=words):
        fn(x)
    assert x.sum().item() == 16
