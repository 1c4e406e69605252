"""Compares the operators of two runs: labels stand for the memory that each run used, in the order of its use."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import torch
from torch._ops import OpOverload

from ..backends.operators import is_strided, storage_key
from ..call.spec import is_tensor

Operator = tuple[OpOverload, tuple[Any, ...], tuple[Any, ...]]
"""An operator with its arguments, in which the label of its memory stands for each tensor; and how each of its tensors
lies there."""


@dataclass
class Dispatched:
    """What a run told of its program; a run without labels tells no operators and no outputs."""

    operators: list[Operator] = field(default_factory=list)
    outputs: tuple[Any, ...] = ()
    """The tensors that it gave back: their labels, and how they lie in their memory."""
    limits_values: bool = False
    """Whether it may fail for numbers unlike those of the batch: it checks data, or made integers or probabilities of
    floating-point numbers. On a GPU such a failure ends the process's use of the device."""
    groups_rows: bool = False
    """Whether it multiplied groups of rows whose sizes are data, so that the bits of a row follow its group."""
    float_types: set[torch.dtype] = field(default_factory=set)
    """The floating-point types in which it added terms up: no later result is more exact than the coarsest."""


_LENGTHS = frozenset(
    (
        *("size", "start", "end", "length", "split_size", "split_sizes", "repeats", "output_size"),
        *("stride", "storage_offset"),
    )
)
"""Names of the arguments, of any operator, that may be longer for a longer batch."""
_CONSTANTS = frozenset({int, float, bool, type(None), torch.dtype})


class Labels(dict[int, str]):
    """Names the memory of tensors, by the keys of their storages: by the order in which a run meets it or makes it. So
    equal operators on other tensors are another program.

    Memory that the run did not make, and whose length does not follow the batch, is used at the same places by the same
    program: ``table[n : 2 * n]`` holds other numbers for another n.
    """

    _count = 0

    @classmethod
    def of_arguments(cls, tensors: Iterable[torch.Tensor], specs: Iterable[Any]) -> Self:
        """Labels in which the arguments of a call have names already. ``specs`` say which of them follow the batch."""
        names = (f"{'' if spec.spans else _FIXED}argument {index}" for index, spec in enumerate(specs))
        return cls(zip(map(storage_key, tensors), names, strict=True))

    def operator(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        keys: Mapping[int, int],
        tensors: Iterable[torch.Tensor],
    ) -> Operator:
        """An operator that is about to run. ``keys`` has those of its tensors' storages, by the tensors' ``id``, in the
        order of the tensors."""
        values = [value if type(value) in _CONSTANTS else self._of(value, keys) for value in args]
        if func is _LIFT:
            values.append(_numbers(args[0]))
        values += [(name, self._of(value, keys)) for name, value in kwargs.items()]
        return func, tuple(values), tuple([self._layout(one, keys.get(id(one))) for one in tensors])

    def outputs(self, tensors: Iterable[torch.Tensor]) -> tuple[Any, ...]:
        """What a run gave back."""
        keys = ((one, storage_key(one) if is_strided(one) else None) for one in tensors)
        return tuple((object(),) if key is None else (self.get(key), self._layout(one, key)) for one, key in keys)

    def note_made(self, results: Iterable[int]) -> None:
        """Name what it made and did not use, by the keys: that may lie where other memory was before."""
        for key in dict.fromkeys(results):
            self[key] = self._next()

    def _of(self, value: Any, keys: Mapping[int, int]) -> Any:
        key, kind = keys.get(id(value)), type(value)
        if key is None:
            if kind is list or kind is tuple or kind is torch.Size:
                return tuple([part if type(part) in _CONSTANTS else self._of(part, keys) for part in value])
            return None if is_tensor(value) else value
        if (label := self.get(key)) is None:
            label = self[key] = _FIXED + self._next()
        return label

    def _layout(self, tensor: torch.Tensor, key: int | None) -> tuple[Any, ...]:
        """How a tensor lies in the memory of this ``key``; None where nobody can tell."""
        if key is None:
            return ()
        offset = tensor.storage_offset()
        is_fixed = self.get(key, "").startswith(_FIXED)
        return is_fixed and str(offset), offset, tensor.size(), tensor.stride(), tensor.dtype  # text follows no batch

    def _next(self) -> str:
        self._count += 1
        return f"#{self._count}"


_FIXED = "fixed "
"""Begins the labels of memory that the run did not make and whose length does not follow the batch."""
_LIFT = torch.ops.aten.lift_fresh.default
_MOST_NUMBERS = 64
_OF_A_NUMBER = 2  # what ``_numbers`` tells of a tensor without dimensions


def _numbers(made: torch.Tensor) -> object:
    """The numbers of Python that were made into a tensor; if there are many, what equals nothing."""
    if made.numel() > _MOST_NUMBERS:
        return object()
    return (made.dtype, *made.shape, *map(repr, made.flatten().tolist()))


@cache
def follows_batch(func: OpOverload) -> tuple[bool, ...]:
    """For each argument in its place whether it may follow the batch."""
    return tuple(argument.name in _LENGTHS for argument in func._schema.arguments)


@cache
def _computed_with(func: OpOverload) -> tuple[tuple[str, ...], frozenset[str]]:
    """The names of an operator's arguments, and of those that take numbers to compute with: no lengths, no places."""
    arguments = func._schema.arguments
    numbers = (one.name for one in arguments if "int" not in str(one.type).lower() and one.name not in _LENGTHS)
    return tuple(argument.name for argument in arguments), frozenset(numbers)


def numbers_of(operator: Operator) -> list[str]:
    """The numbers that an operator computes with, or makes a tensor of; each as it is spelled."""
    func, values, _ = operator
    names, taken = _computed_with(func)
    pairs = [
        value if type(value) is tuple and value and value[0] in names else (name, value)  # given by its name
        for value, name in zip(values, names, strict=False)
    ]
    lifted = [one for one in values[-1:] if func is _LIFT and isinstance(one, tuple) and len(one) == _OF_A_NUMBER]
    return [*(repr(one) for name, one in pairs if name in taken and type(one) in (int, float)), *map(repr, lifted)]


def is_alike(
    mine: Sequence[Any], theirs: Sequence[Any], follows: Sequence[bool], ratios: Sequence[tuple[int, int]]
) -> bool:
    """Whether two operators have the same arguments, of which those that ``follows`` marks may follow the batch."""
    return len(mine) == len(theirs) and all(
        is_same(a, b, ratios if place < len(follows) and follows[place] else ())
        for place, (a, b) in enumerate(zip(mine, theirs, strict=True))
    )


def is_same(a: Any, b: Any, ratios: Sequence[tuple[int, int]]) -> bool:
    """Whether two constants are the same, or each is as many times the length of its batch."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is int:
        return a == b or any(a % m == 0 and b == a // m * n for m, n in ratios)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(is_same(x, y, ratios) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.ScriptObject):  # one of compiled code may raise when compared
        return False
    return repr(a) == repr(b) if type(a) is float else bool(a == b)  # -0.0 is another number
