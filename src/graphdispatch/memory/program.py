"""``Program``: the operators of a graph, by which graphs of several sizes share what was proven of one of them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import cache
from itertools import combinations
from math import prod
from typing import Any, Self

import torch
from torch._ops import OpOverload

from ..backends.operators import OperatorKind, is_strided, kind_of, storage_key
from ..call.spec import is_tensor
from ..sizes import ROWS, Axis
from .proof import RowProof

Operator = tuple[OpOverload, tuple[Any, ...]]
"""An operator with its arguments; in place of each tensor stands the label of its memory."""

_LENGTHS = frozenset(
    (
        *("size", "start", "end", "length", "split_size", "split_sizes", "repeats", "output_size"),
        *("stride", "storage_offset"),
    )
)
"""Names of the arguments, of any operator, that may be longer for a longer batch."""
_LEAST = 4
_CONSTANTS = frozenset({int, float, bool, type(None), torch.dtype})


class Program:
    """The operators that a run of one size dispatched, in order, and what is proven of the rows of all such runs.

    Whether padding can change a real row depends on the operators, not on how many rows they run on. So a graph whose
    operators and constants are those of a proven one, but for the lengths that follow the batch, needs no proof of its
    own. Fewer than two real rows and two of padding prove too little for others.

    Args:
        operators: The operators of a run on the static inputs.
        size: The rows of the run, padding included.
        axes: The dynamic dimensions of the batch.
        limits_values: Whether they may fail for numbers unlike those of the batch.
        groups_rows: Whether they multiply groups of rows whose sizes are data.
    """

    def __init__(
        self,
        operators: Sequence[Operator] = (),
        size: int = 0,
        axes: Sequence[Axis] = (ROWS,),
        *,
        limits_values: bool = False,
        groups_rows: bool = False,
    ) -> None:
        self._operators = operators
        self._is_apart = False
        self.limits_values = limits_values
        self.groups_rows = groups_rows
        self._lengths = [axis.of(size) for axis in axes]
        kinds = {kind_of(func) for func in {func for func, _ in operators}}
        self.computes = bool(operators) and kinds <= {OperatorKind.PURE, OperatorKind.VIEW, OperatorKind.RANDOM}
        """Whether all that it does is to make tensors of others and views of them, and perhaps to draw numbers."""
        self.proof: RowProof | None = None
        """Whether real rows are independent of padding; None until a comparison has tested that."""
        self.is_stretched = False
        """Whether it was compared with eager on rows of other magnitudes, where a rule of the user pads them."""

    def apart(self) -> "Program":
        """The same program for one graph, of which a proof by few rows holds for no graph of another size."""
        other = copy(self)
        other._is_apart = True
        return other

    def is_like(self, other: "Program") -> bool:
        """Whether the other program is this one for another size, and what is proven of this one holds for it."""
        if self._is_apart or len(self._operators) != len(other._operators) or min(self._lengths) < _LEAST:
            return False
        places = range(len(self._lengths))
        chosen = [some for count in range(1, len(places) + 1) for some in combinations(places, count)]
        ratios = [(prod(self._lengths[i] for i in some), prod(other._lengths[i] for i in some)) for some in chosen]
        return all(
            mine[0] is theirs[0] and _alike(mine[1], theirs[1], _follows_batch(mine[0]), ratios)
            for mine, theirs in zip(self._operators, other._operators, strict=True)
        )


class Labels(dict[int, str]):
    """Names the memory of tensors, by the keys of their storages: by the order in which a run meets it or makes it. So
    equal operators on other tensors are another program."""

    _count = 0

    @classmethod
    def of_arguments(cls, tensors: Iterable[torch.Tensor]) -> Self:
        """Labels in which the arguments of a call have names already."""
        return cls({storage_key(tensor): f"argument {index}" for index, tensor in enumerate(tensors)})

    def operator(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Operator:
        """An operator that is about to run."""
        named = ((name, self._of(value)) for name, value in kwargs.items())
        return func, (*map(self._of, args), *named)

    def note_made(self, tensors: Iterable[torch.Tensor], used: Collection[int]) -> None:
        """Name what it made: memory that it did not use may lie where other memory was before."""
        for key in {storage_key(tensor): None for tensor in tensors if is_strided(tensor)}:
            if key not in used:
                self[key] = self._next()

    def _of(self, value: Any) -> Any:
        kind = type(value)
        if kind in _CONSTANTS:
            return value
        if kind in (list, tuple, torch.Size):
            return tuple([self._of(part) for part in value])
        if not is_tensor(value):
            return value
        if not is_strided(value):
            return None
        key = storage_key(value)
        if (label := self.get(key)) is None:
            label = self[key] = self._next()
        return label

    def _next(self) -> str:
        self._count += 1
        return f"#{self._count}"


@cache
def _follows_batch(func: OpOverload) -> tuple[bool, ...]:
    """For each argument in its place whether it may follow the batch."""
    return tuple(argument.name in _LENGTHS for argument in func._schema.arguments)


def _alike(
    mine: Sequence[Any], theirs: Sequence[Any], follows: Sequence[bool], ratios: Sequence[tuple[int, int]]
) -> bool:
    return len(mine) == len(theirs) and all(
        _is_same(a, b, ratios if place < len(follows) and follows[place] else ())
        for place, (a, b) in enumerate(zip(mine, theirs, strict=True))
    )


def _is_same(a: Any, b: Any, ratios: Sequence[tuple[int, int]]) -> bool:
    """Whether two constants are the same, or each is as many times the length of its batch."""
    if type(a) is not type(b):
        return False
    if type(a) is tuple:
        return len(a) == len(b) and all(_is_same(x, y, ratios) for x, y in zip(a, b, strict=True))
    if type(a) is int:
        return a == b or any(a * n == b * m for m, n in ratios)
    return bool(a == b) or (a != a and b != b)
