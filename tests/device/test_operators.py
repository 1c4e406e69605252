"""The operators of the device are the CPU's, later."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from queued_device import DEVICE

from ..property.test_programs import COLUMNS, PURE, ROWS, VIEWS, WRITES

CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "numbers promote": lambda x: (x.long() * 2, x.long() * 2.5, x.half() * 2.5),
    "reductions": lambda x: (x.sum(0), x.max(1), x.argmax(), x.std()),
    "views of another type": lambda x: (torch.view_as_complex(x[:, :2].contiguous()), x.view(torch.int32)),
    "shapes by values": lambda x: (x.nonzero(), x[x > 0], (x > 0).any().item()),
    "out": lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)),
    "new tensors": lambda x: (torch.arange(5, device=x.device), torch.eye(3, device=x.device), torch.full_like(x, 3)),
    "empty": lambda x: (x[:0] + 1, x[:0].sum()),
    "convolution": lambda x: torch.nn.functional.conv1d(x[None], x[:2, :ROWS, None], x[0, :2], padding=1),
    "on the host": lambda x: x.cpu().mul(2).to(x.device),
}
OF_TWO = PURE | VIEWS | WRITES
LEFT_OUT = ("literal", "written_literal", "index_written", "complex", "negative")
"""What makes tensors on the host, and lazy conjugates, which the device does not have."""


def on_host(value: Any) -> Any:
    """The same nest on the CPU."""
    return torch.utils._pytree.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, value)


@pytest.mark.parametrize("name", [*CASES, *(name for name in OF_TWO if name not in LEFT_OUT)])
def test_an_operator_is_the_cpus(name: str) -> None:
    """Values, shapes and types, and what is written."""
    here = [torch.randn(ROWS, COLUMNS) for _ in range(1 if name in CASES else 2)]
    there = [x.to(DEVICE) for x in here]
    torch.testing.assert_close(on_host((OF_TWO | CASES)[name](*there)), (OF_TWO | CASES)[name](*here))
    torch.testing.assert_close(on_host(there), here)
