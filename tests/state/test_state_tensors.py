"""What a tensor of the callable's state can become besides another one: each call afterwards answers as eager does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphdispatch import graphed


class PackedParameter(nn.Parameter):
    """A parameter of a class of its own, as engines have them."""


class WatchedParameter(nn.Parameter):
    """One that sees each function of torch that it is given to."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As for every tensor."""
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[misc]


class OwnTensor(Tensor):
    """A tensor of a class of its own."""


def _own(data: Tensor) -> Any:
    return data.as_subclass(OwnTensor)


def _assign(tensor: Tensor, data: Tensor) -> None:
    tensor.data = data


Reads, Change = Callable[[Any, Tensor], Tensor], Callable[[Any], Any]
CASES: dict[str, tuple[Callable[[], Any], Reads, Change]] = {
    "type": (
        lambda: torch.rand(4),
        lambda w, x: x * w.to(torch.float32),
        lambda w: _assign(w, w.data.view(torch.int32)),
    ),
    "conjugate": (
        lambda: torch.randn(4, dtype=torch.complex64),
        lambda w, x: x * torch.view_as_real(w.resolve_conj())[:, 1],
        lambda w: _assign(w, w.data.conj()),
    ),
    "memory of a parameter of its own class": (
        lambda: PackedParameter(torch.rand(4), requires_grad=False),
        lambda w, x: x * w,
        lambda w: _assign(w, w.data * 2),
    ),
    "memory of one with __torch_function__": (
        lambda: WatchedParameter(torch.rand(4), requires_grad=False),
        lambda w, x: (x * w).as_subclass(Tensor),
        lambda w: _assign(w, w.detach().as_subclass(Tensor) * 2),
    ),
    "memory of a tensor of its own class": (
        lambda: _own(torch.rand(4)),
        lambda w, x: (x * w).as_subclass(Tensor),
        lambda w: _assign(w, w.data * 2),
    ),
    "form of a parameter of its own class": (
        lambda: PackedParameter(torch.rand(4), requires_grad=False),
        lambda w, x: x * w.shape[0],
        lambda w: _assign(w, w.data[:2]),
    ),
    "form in five dimensions": (
        lambda: torch.rand(1, 1, 1, 2, 4),
        lambda w, x: x * w.shape[3],
        lambda w: w.transpose_(3, 4),
    ),
    "form in seven dimensions": (
        lambda: torch.rand(1, 1, 1, 1, 1, 2, 4),
        lambda w, x: x * w.shape[5],
        lambda w: w.transpose_(5, 6),
    ),
    "_version": (lambda: torch.ones(4), lambda w, x: x * 2 if w._version else x, lambda w: w.mul_(1)),
    "grad": (
        lambda: nn.Parameter(torch.ones(4)),
        lambda w, x: x * 2 if w.grad is None else x,
        lambda w: setattr(w, "grad", torch.ones(4)),
    ),
    "_backward_hooks": (
        lambda: nn.Parameter(torch.ones(4)),
        lambda w, x: x * 2 if w._backward_hooks else x,
        lambda w: w.register_hook(lambda grad: grad),
    ),
    "is_shared": (
        lambda: torch.ones(4),
        lambda w, x: x * 2 if w.is_shared() else x,
        lambda w: w.share_memory_(),
    ),
    "storage": (
        lambda: torch.ones(8)[:4],
        lambda w, x: x * w.untyped_storage().nbytes(),
        lambda w: w.untyped_storage().resize_(16),
    ),
    "requires_grad": (
        lambda: torch.ones(4),
        lambda w, x: x * 2 if w.requires_grad else x,
        lambda w: w.requires_grad_(True),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_module", [False, True], ids=["captured", "of a module"])
def test_a_tensor_that_becomes_another(name: str, is_module: bool) -> None:
    """Held by a closure, or by a module."""
    make, reads, change = CASES[name]
    held = make()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = held

        def forward(self, x: Tensor) -> Tensor:
            return reads(self.held, x)

    def fn(x: Tensor) -> Tensor:
        return reads(held, x)

    served = graphed(Net().eval() if is_module else fn, dynamic={"x": 0}, sizes=(4,))
    with torch.no_grad():
        for turn in range(2):
            for rows in (3, 4, 3, 3, 2):
                x = torch.rand(rows, 4)
                assert torch.equal(served(x), fn(x)), (turn, rows)
            if not turn:
                assert served.stats.hits, served.explain(x)
                change(held)
