"""Compares the operators of two runs: labels stand for the memory that each run used, in the order of its use."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch._ops import OpOverload

from ..backends.operators import is_strided, per_operator, storage_key
from ..call.spec import is_tensor


class Named(NamedTuple):
    """An argument that was given by its name."""

    name: str
    value: Any


Operator = tuple[OpOverload, tuple[Any, ...]]
"""An operator with its arguments, in which the label of its memory stands for each tensor."""


@dataclass
class Dispatched:
    """What a run showed of its program; a run without labels shows no operators and no outputs."""

    operators: list[Operator] = field(default_factory=list)
    outputs: tuple[Any, ...] = ()
    """The labels of the tensors that it gave back."""
    results: list[tuple[OpOverload, tuple[tuple[int, ...], ...]]] = field(default_factory=list)
    """The operators again, with the shapes of what they gave."""
    has_regions: bool = False
    """Whether it called compiled code, or launched kernels that no operator stands for."""
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
        *("N", "HxW"),  # of group norms: the first size and the product of the last ones
    )
)
"""Names of the arguments, of any operator, that may be longer for a longer batch."""
_CONSTANTS = frozenset({int, float, bool, type(None), torch.dtype})


class Labels(dict[int, str]):
    """Names the memory of tensors, by the keys of their storages: by the order in which a run meets it or makes it. So
    equal operators on other tensors are another program.
    """

    _count = 0

    @classmethod
    def of_arguments(cls, tensors: Iterable[torch.Tensor], specs: Iterable[Any]) -> Self:
        """Labels in which the arguments of a call have names already."""
        names = (f"argument {index}" for index, _ in enumerate(specs))
        return cls(zip(map(storage_key, tensors), names, strict=True))

    def operator(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        keys: Mapping[int, int],
    ) -> Operator:
        """An operator that is about to run. ``keys`` has those of its tensors' storages, by the tensors' ``id``."""
        values = [value if type(value) in _CONSTANTS else self._of(value, keys) for value in args]
        if func is _LIFT:
            values.append(_numbers(args[0]))
        values += [Named(name, self._of(value, keys)) for name, value in kwargs.items()]
        return func, tuple(values)

    def outputs(self, tensors: Iterable[torch.Tensor]) -> tuple[Any, ...]:
        """What a run gave back."""
        return tuple(self.get(storage_key(one)) if is_strided(one) else object() for one in tensors)

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

    def _next(self) -> str:
        self._count += 1
        return f"#{self._count}"


_OF_PROCESSES = "__torch__.torch.classes.c10d."
_FIXED = "fixed "
"""Begins the labels of memory that the run did not make."""
_LIFT = torch.ops.aten.lift_fresh.default
_MOST_NUMBERS = 64
_OF_A_NUMBER = 2  # what ``_numbers`` tells of a tensor without dimensions


def _numbers(made: torch.Tensor) -> object:
    """The numbers of Python that were made into a tensor; if there are many, what equals nothing."""
    if made.numel() > _MOST_NUMBERS:
        return object()
    return (made.dtype, *made.shape, *map(repr, made.flatten().tolist()))


@per_operator
def _defaults(func: OpOverload) -> tuple[tuple[Any, Any], ...]:
    """The arguments of an operator by name, with what stands for those that are left out."""
    return tuple((argument.name, argument.default_value) for argument in func._schema.arguments)


@cache
def _computed_with(func: OpOverload) -> tuple[tuple[str, ...], frozenset[str]]:
    """The names of an operator's arguments, and of those that take numbers to compute with: no lengths, no places."""
    arguments = func._schema.arguments
    numbers = (one.name for one in arguments if "int" not in str(one.type).lower() and one.name not in _LENGTHS)
    return tuple(argument.name for argument in arguments), frozenset(numbers)


def numbers_of(operator: Operator) -> list[str]:
    """The numbers that an operator computes with, or makes a tensor of; each as it is spelled."""
    func, values = operator
    names, taken = _computed_with(func)
    pairs = [value if isinstance(value, Named) else (name, value) for value, name in zip(values, names, strict=False)]
    lifted = [one for one in values[-1:] if func is _LIFT and isinstance(one, tuple) and len(one) == _OF_A_NUMBER]
    return [*(repr(one) for name, one in pairs if name in taken and type(one) in (int, float)), *map(repr, lifted)]


def arguments_of(operator: Operator, *, of_made: bool = True) -> tuple[Any, ...]:
    """The arguments of an operator, but for lengths that may follow the batch. Without ``of_made`` results of other
    operators are all the same."""
    func, values = operator
    given = dict(_defaults(func))
    names = list(given)
    for place, value in enumerate(values):
        name, value = value if isinstance(value, Named) else (names[place] if place < len(names) else place, value)
        given[name] = value
    kept = tuple(value for name, value in given.items() if name not in _LENGTHS)
    return kept if of_made else _without_made(kept)


def _without_made(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_without_made, value))
    return "#" if isinstance(value, str) and value.startswith("#") else value


def is_same(a: Any, b: Any) -> bool:
    """Whether two constants are the same."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(is_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.ScriptObject):  # it may raise when compared; c10d wraps the same group anew in each call
        return bool(a._type() == b._type()) and str(a._type()).startswith(_OF_PROCESSES)
    return repr(a) == repr(b) if type(a) is float else bool(a == b)  # -0.0 is another number
