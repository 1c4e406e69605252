"""Compares the operators of two runs: names stand for the tensors that each run used.

Note [names of tensors]
    A tensor that the run did not make is named by its memory and by where it lies there: another weight is another one,
    even where both hold the same numbers. What an operator gives has the operator's number. So two runs with the same
    operators on the same names compute the same, whatever they read, and whatever anybody writes there later.

    Where torch makes a view for one batch and a copy for another, both hold the same elements in order: they have the
    name of what they are made of, and are no operators here. A write gives all that lies in the memory other
    names, but not to copies of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch._ops import OpOverload

from ...backends.operators import changes_view, is_strided, keeps_elements, per_operator, storage_key, view_key
from ...runtime.constants import VALUES
from ...runtime.flatten import is_tensor

Operator = tuple[OpOverload, tuple[Any, ...]]
"""An operator with all its arguments in order: names stand for tensors, and None for a length that may follow the
batch. Two are equal if they are the same but for such lengths."""
Shapes = tuple[OpOverload, tuple[tuple[int, ...], ...]]
"""An operator, with the shapes of the tensors that it took, then of those that it gave."""


@dataclass
class OperatorTrace:
    """What a run showed of its operators, in order; a run without names shows no operators and no outputs. What keeps
    elements as they are is no operator here: see Note [names of tensors]."""

    operators: list[Operator] = field(default_factory=list)
    outputs: tuple[Any, ...] = ()
    """The names of the tensors, and the constants, that it gave back."""
    shapes: list[Shapes] = field(default_factory=list)
    """The operators again, with the shapes of what they took and gave."""
    has_regions: bool = False
    """Whether it called compiled code, or launched kernels that no operator stands for."""
    limits_values: bool = False
    """Whether it may fail for numbers unlike those of the batch: it checks data, or made integers or probabilities of
    floating-point numbers. On a GPU such a failure ends the process's use of the device."""
    names_places: bool = False
    """Whether an operator that may take integers for places or for choices was given some, as an embedding is."""
    groups_rows: bool = False
    """Whether it multiplied groups of rows whose sizes are data, so that the bits of a row follow its group."""
    float_types: set[torch.dtype] = field(default_factory=set)
    """The floating-point types in which it added terms up: no later result is more exact than the coarsest."""

    def is_like(self, other: "OperatorTrace") -> bool:
        """Whether the other run is this one for another batch: the same operators on the same tensors, with the
        same arguments but for lengths that may follow the batch, which shapes tell. Then both have one list of them."""
        is_like = self.outputs == other.outputs and self.operators == other.operators
        if is_like:
            other.operators = self.operators
        return is_like


_LENGTHS = frozenset(
    (
        *("size", "split_size", "split_sizes", "repeats", "output_size"),
        *("N", "HxW"),  # of group norms: the first size and the product of the last ones
    )
)
"""Names of the arguments, of any operator, that may be longer for a longer batch; with ``_LENGTHS_OF`` of some. Shapes
tell them, so that they are not compared: numbers that say where elements lie are."""
_LENGTHS_OF = {
    "aten::slice": frozenset({"end"}),
    "aten::arange": frozenset({"end"}),
    "aten::as_strided": frozenset({"size"}),
    "aten::empty_strided": frozenset({"size", "stride"}),
    "aten::new_empty_strided": frozenset({"size", "stride"}),
    "aten::unfold": frozenset[str](),
}
_CONSTANTS = frozenset({int, type(None), torch.dtype})
"""The types of constants that stand for themselves."""


class TensorNames:
    """Names the tensors of one run: see Note [names of tensors]."""

    def __init__(self) -> None:
        self._names: dict[int, dict[tuple[Any, ...], Any]] = {}
        """By memory and place there. Memory of which nothing is here was not made by the run."""
        self._count = 0

    @classmethod
    def of_arguments(cls, tensors: Iterable[torch.Tensor], specs: Iterable[Any]) -> Self:
        """Names in which the arguments of a call have names already."""
        names = cls()
        for place, (tensor, _) in enumerate(zip(tensors, specs, strict=True)):
            names._names[storage_key(tensor)] = {view_key(tensor): f"argument {place}"}
        return names

    def operator(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        keys: Mapping[int, int],
    ) -> Operator:
        """An operator that is about to run. ``keys`` has those of its tensors' storages, by the tensors' ``id``."""
        values = [value if type(value) in _CONSTANTS else self._of(value, keys) for value in args]
        if type(func) is not OpOverload:  # a kernel that is launched, whose sizes are numbers among others
            return func, tuple(value for value in values if not _is_length(value))
        if func is _LIFT:
            values = [_numbers(args[0])]
        formals, lengths = _formals_of(func)
        for name, default in formals[len(values) :]:
            values.append(self._of(kwargs[name], keys) if name in kwargs else default)
        for place in lengths:
            values[place] = None if _is_length(values[place]) else values[place]
        return func, tuple(values)

    def outputs(self, leaves: Iterable[Any]) -> tuple[Any, ...]:
        """What a run gave back: the names of tensors, and constants. Other objects are left out."""
        return tuple(self._output(one) for one in leaves if is_tensor(one) or type(one) in VALUES)

    def _output(self, value: Any) -> Any:
        if not is_tensor(value):
            return _CONSTANT, type(value), repr(value)
        return self._name(value, storage_key(value)) if is_strided(value) else object()

    def note_run(
        self,
        func: OpOverload,
        given: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        keys: Mapping[int, int],
    ) -> None:
        """Name what an operator gave, and all in the memory that it has ``written``. Call it when it has run."""
        source: Any = None
        if not keeps_elements(func) or id(given[0]) not in keys:
            self._count += 1
        else:
            source = self._name(given[0], keys[id(given[0])])
        # What only looks at its memory in another way (``transpose_``) writes nothing, and has a name in its new place.
        writes = {keys[id(one)] for one in written if id(one) in keys and not changes_view(func)}
        for key in writes & self._names.keys() if writes else ():
            names = self._names[key]
            ranks = {name: rank for rank, name in enumerate(dict.fromkeys(names.values()))}
            self._names[key] = {place: (self._count, "written", ranks[name]) for place, name in names.items()}
        used = set(keys.values()) if func is not _LIFT else set[int]()
        for number, tensor in enumerate(results):
            if is_strided(tensor) and (key := storage_key(tensor)) not in writes:
                if key not in used:  # new memory may lie where other was before
                    self._names[key] = {}
                name = (_MADE, self._count, number) if source is None else source
                self._names.setdefault(key, {})[view_key(tensor)] = name

    def _of(self, value: Any, keys: Mapping[int, int]) -> Any:
        """The name of a tensor; for a constant, what equals that of another one if both are the same."""
        key, kind = keys.get(id(value)), type(value)
        if key is not None:
            return self._name(value, key)
        if kind is list or kind is tuple or kind is torch.Size:
            return tuple([part if type(part) in _CONSTANTS else self._of(part, keys) for part in value])
        if kind is float or kind is bool or kind is complex:  # True is no 1, and -0.0 no 0.0
            return kind, repr(value)
        if kind is torch.ScriptObject:  # torch wraps the same one anew in each call, and it raises when compared
            of_what = str(value._type())
            return of_what if of_what.startswith(_OF_PROCESSES) else object()
        return None if is_tensor(value) else value

    def _name(self, tensor: torch.Tensor, key: int) -> Any:
        names, place = self._names.get(key), view_key(tensor)
        found = None if names is None else names.get(place)
        return found if found is not None else (_FIXED, key, *place)


_OF_PROCESSES = "__torch__.torch.classes.c10d."
_FIXED, _MADE = "fixed", "made"
"""Begin the names of what the run did not make, and of what it made."""
_CONSTANT = "constant"
_LIFT = torch.ops.aten.lift_fresh.default
_MOST_NUMBERS = 64


def _numbers(made: torch.Tensor) -> object:
    """The numbers of Python that were made into a tensor; if there are many, what equals nothing."""
    if made.numel() > _MOST_NUMBERS:
        return object()
    return (made.dtype, *made.shape, *map(repr, made.flatten().tolist()))


@per_operator
def _formals_of(func: OpOverload) -> tuple[tuple[tuple[str, Any], ...], tuple[int, ...]]:
    """The arguments of an operator by name, with what stands for those that are left out; and the places of those that
    may be lengths."""
    arguments, lengths = func._schema.arguments, _LENGTHS_OF.get(func._schema.name, _LENGTHS)
    names = TensorNames()
    formals = tuple((one.name, names._of(one.default_value, {})) for one in arguments)
    return formals, tuple(place for place, one in enumerate(arguments) if one.name in lengths)


def _is_length(value: Any) -> bool:
    return value is None or type(value) is int or (type(value) is tuple and all(type(one) is int for one in value))
