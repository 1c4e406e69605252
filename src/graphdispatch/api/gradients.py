"""What a callable that differentiates inside, a whole training step, needs around it.

Note [gradients of a step]
    A step rebinds ``.grad`` of its parameters: ``zero_grad()`` sets it to None, and ``backward()`` makes a new tensor.
    A replay rebinds nothing. So each parameter has one tensor for its gradient, in which every run leaves it, and a run
    ends with each ``.grad`` bound as it began. Which of them the step leaves at None is a part of its answer, so that
    eager runs and replays both return it; ``.grad`` is then bound by that. For a guard and for the undo of a run,
    gradients are tensors that the step writes in place. Which of them were None at its begin, the guard compares.

    A tensor that somebody else binds between two steps lends its numbers to the leaf's own for one step. A step that
    adds to it gives them back, and one that sets ``.grad`` to None first leaves it as it is.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import update_wrapper
from inspect import signature
from operator import is_
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..errors import ConfigError

_ADDED = 2
"""Stands for a gradient that a step added to the one that was there before."""


class Gradients:
    """The tensors in which a step leaves the gradients of what it trains."""

    def __init__(self) -> None:
        self.leaves: list[torch.Tensor] = []
        self._homes: list[torch.Tensor | None] = []
        """For each leaf the tensor of its gradient; None before it had one."""
        self._places: list[int] = []
        self._bound: list[torch.Tensor | None] = []
        """What ``.grad`` of each leaf is when a run begins."""
        self._given = b""
        """For each leaf 1 if that is a tensor, else 0."""
        self._lent: list[tuple[int, torch.Tensor]] = []
        """By the place of the leaf, tensors of others that were ``.grad`` when the step began."""

    def take(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Look after the gradients of these tensors. Returns whether others were looked after before."""
        leaves = [one for one in tensors if one.is_leaf and (one.requires_grad or isinstance(one, nn.Parameter))]
        if len(leaves) == len(self.leaves) and all(map(is_, leaves, self.leaves)):
            return False
        homes = {id(leaf): home for leaf, home in zip(self.leaves, self._homes, strict=True)}
        self.leaves, self._homes = leaves, [homes.get(id(leaf)) for leaf in leaves]
        self._bound, self._given, self._places = [], b"", self._where()
        return True

    def begin(self) -> bool:
        """Have ``.grad`` of each leaf be its own tensor, or None. Returns whether a tensor is another than before, so
        that no graph may go on writing to that. Raises ``ConfigError`` where two leaves share one."""
        found = list(map(_grad, self.leaves))
        if len(found) == len(self._bound) and all(map(is_, found, self._bound)) and self._places == self._where():
            return False
        starts = [grad.data_ptr() for grad in found if grad is not None and _is_plain(grad) and grad.numel()]
        if len(set(starts)) < len(starts):
            raise ConfigError(
                "each parameter must have a gradient of its own, got one tensor as .grad of two; bind a clone() "
                "to each, or call the step without graphs, by unwrap()"
            )
        is_new, places = False, dict(zip(map(id, self._homes), self._places, strict=False))
        for index, (leaf, grad) in enumerate(zip(self.leaves, found, strict=True)):
            home = self._homes[index]
            if grad is None or not _is_plain(grad) or (grad is home and places.get(id(home)) == grad.data_ptr()):
                continue
            if home is not None and grad is not home and _fits(grad, home):
                home.copy_(grad)
                self._lent.append((index, grad))
            else:
                is_used = any(grad is other for other in self._homes)
                home, is_new = (grad.clone() if is_used else grad), True
                self._homes[index] = home
            leaf.grad = home
        self._note()
        return is_new

    def end(self) -> bytes:
        """Leave the gradients of a run in their tensors, and ``.grad`` as it was when the run began. Returns 0 for each
        leaf without a gradient then, and ``_ADDED`` where it is in the tensor that was there before. One that cannot be
        kept so stays where it is."""
        found = list(map(_grad, self.leaves))
        kept = {_memory_of(home) for home in self._homes if home is not None}
        homes: list[torch.Tensor] = []
        made: list[torch.Tensor] = []
        for leaf, grad, home, before in zip(self.leaves, found, self._homes, self._bound, strict=True):
            if grad is not None and grad is not home:
                if home is None or not _fits(grad, home):
                    continue
                homes.append(home)
                made.append(grad.clone() if _memory_of(grad) in kept else grad)  # another leaf's, which is written too
            if grad is not before:
                leaf.grad = before
        if made:
            with torch.no_grad():
                torch._foreach_copy_(homes, made)
        pairs = zip(found, self._bound, strict=True)
        return bytes(0 if grad is None else _ADDED if grad is before else 1 for grad, before in pairs)

    def bind(self, given: bytes) -> None:
        """Bind ``.grad`` of each leaf to what ``end`` said of a run or of the run that a graph repeats."""
        self._lent = [(index, tensor) for index, tensor in self._lent if given[index] == _ADDED]
        has_gradient = bytes(map(bool, given))
        if has_gradient == self._given:
            return
        for leaf, home, has in zip(self.leaves, self._homes, has_gradient, strict=True):
            grad = leaf.grad
            if (grad is None and has) or (grad is home and not has):
                leaf.grad = home if has else None
        self._note()

    def give_back(self) -> None:
        """Bind what was lent again, with the numbers that are in the leaf's own tensor."""
        for index, tensor in self._lent:
            leaf, home = self.leaves[index], self._homes[index]
            if home is not None and leaf.grad is home:
                leaf.grad = tensor.copy_(home)
        self._lent = []

    def _note(self) -> None:
        found = map(_grad, self.leaves)
        self._bound = [grad if grad is home else None for grad, home in zip(found, self._homes, strict=True)]
        self._given = bytes(one is not None for one in self._bound)
        self._places = self._where()

    def _where(self) -> list[int]:
        return [0 if home is None else home.data_ptr() for home in self._homes]


def _grad(leaf: torch.Tensor) -> torch.Tensor | None:
    return leaf.grad


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_plain(grad: torch.Tensor) -> bool:
    """Whether a gradient is dense and has no graph of its own: others stay as they are, and no graph serves them."""
    return type(grad) is torch.Tensor and grad.layout is torch.strided and not grad.requires_grad


def _fits(grad: torch.Tensor, home: torch.Tensor) -> bool:
    """Whether a gradient may be copied into the tensor of a leaf."""
    return _is_plain(grad) and (grad.shape, grad.stride(), grad.dtype, grad.device) == (
        home.shape,
        home.stride(),
        home.dtype,
        home.device,
    )


def differentiating(fn: Callable[..., Any], gradients: Gradients) -> Callable[..., Any]:
    """``fn`` with gradients on: gives its answer, detached, and which leaves have a gradient then."""
    kinds = (FunctionType, MethodType, nn.Module)
    call = fn if isinstance(fn, kinds) else fn.__call__  # type: ignore[operator]  # what a walk finds in a closure

    def step(*args: Any, **kwargs: Any) -> tuple[Any, bytes]:
        with torch.enable_grad():
            answer = call(*args, **kwargs)
        return tree_map(_detached, answer), gradients.end()

    update_wrapper(step, fn, updated=())
    del step.__wrapped__  # type: ignore[attr-defined]  # else what the callable reaches is named after that
    with suppress(TypeError, ValueError):  # a builtin without one
        step.__signature__ = signature(fn)  # type: ignore[attr-defined]
    return step


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value
