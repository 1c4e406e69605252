"""What is known of a tensor during the run: its shape as products of atoms, and where rows mixed first.

The label of a tensor promises: an element whose place has the row ``i`` depends on row ``i`` of the arguments alone,
and on what no row changes; a tensor without rows depends on no row. Along a length the same holds, unless the run
notes that the length is mixed. A label follows from shapes and arguments of operators, never from data.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from ...backends.operators import short_user_line
from .batches import Array, BatchSpace, Num, SizeNumber, entry_at, is_equal

ROWS_AXIS = 0


class Atom(NamedTuple):
    """A factor of a size that follows the batch."""

    key: int
    """The axis, or a number of its own for a size that is made of the axes, or for an arrangement of rows."""
    own: int
    """Its value in the run."""
    axes: tuple[int, ...]
    """The axes that it follows."""
    is_arranged: bool = False
    """Whether its elements are rows in another order than that of the batch."""


Dim = tuple[Atom | int, ...]
"""The factors of one dimension, the outermost first; ``()`` is a dimension of one element.

With n rows, ``x.repeat_interleave(2, 0)`` and ``x.view(n * 2, 3)`` of an ``x`` of shape (n, 6) have ``(n, 2)``: element
k belongs to row k // 2. ``torch.cat([x, x])`` has ``(2, n)``: element k belongs to row k % n.
"""


class Fault(NamedTuple):
    """Why rows may depend on each other."""

    is_mix: bool
    """Whether rows mix for sure; else no rule says what happens."""
    text: str


class MixError(Exception):
    """Rows mix here."""


class UnknownError(Exception):
    """No rule says how rows go through this."""


class Tag(NamedTuple):
    """What the elements of a tensor of integers say of rows."""

    kind: str
    """``"numbers"``: each is a place along the dimension ``of`` that belongs to the element's own row, perhaps several
    times; ``"starts"``: the first place of each row's part of ``of``; ``"chosen"``: an operator's choice; ``"counts"``
    of choices, and their ``"bounds"``."""
    of: Any
    """The dimension whose places they are, or which choice it was and below which number it lies."""
    fault: Fault | None = None
    """What is at fault with whoever takes the elements for more than places."""
    is_each_once: bool = False
    """Of numbers, whether each place is there once: all of ``arange``, or where a sort or its inverse puts elements."""


class Label(NamedTuple):
    """What is known of one tensor."""

    dims: tuple[Dim, ...]
    fault: Fault | None = None
    is_lost: bool = False
    """Whether its shape is not known for other batches."""
    tag: Tag | None = None
    is_alike: bool = False
    """Whether rows lie along it that are all alike, since they were made of what no row changes."""


def own_size(dim: Dim) -> int:
    """The size of a dimension in the run."""
    own = 1
    for atom in dim:
        own *= atom if type(atom) is int else atom.own  # type: ignore[union-attr]
    return own


def axes_of(dim: Dim) -> set[int]:
    """The axes that a dimension follows."""
    return {axis for atom in dim if type(atom) is Atom for axis in atom.axes}


def has_rows(dim: Dim) -> bool:
    """Whether rows lie along a dimension."""
    return Atom in map(type, dim) and ROWS_AXIS in axes_of(dim)


def is_dynamic(dim: Dim) -> bool:
    """Whether a dimension follows the batch."""
    return Atom in map(type, dim)


def plain_dim(size: int) -> Dim:
    """A dimension of the same size for all batches."""
    return () if size == 1 else (size,)


def plain_dims(shape: Iterable[int]) -> tuple[Dim, ...]:
    """A shape that is the same for all batches."""
    return tuple([() if size == 1 else (size,) for size in shape])


def merged(atoms: Iterable[Atom | int]) -> Dim:
    """One dimension of several factors; neighbouring plain numbers are multiplied."""
    made: list[Atom | int] = []
    for atom in atoms:
        if type(atom) is int and made and type(made[-1]) is int:
            made[-1] *= atom
        elif atom != 1:
            made.append(atom)
    return tuple(made)


def flat(dims: Iterable[Dim]) -> Dim:
    """All dimensions as one."""
    return merged(atom for dim in dims for atom in dim)


def numbers_places(label: Label) -> bool:
    """Whether the elements are places of rows in the batch: whatever has them as data follows where a row lies."""
    return label.tag is not None and label.tag.kind == "numbers"


def row_place(dims: tuple[Dim, ...]) -> int | None:
    """The first dimension along which rows lie."""
    return next((place for place, dim in enumerate(dims) if has_rows(dim)), None)


def lies_along_rows(label: Label) -> bool:
    """Whether rows lie along some dimension of a tensor."""
    return any(map(has_rows, label.dims))


def holds_rows(label: Label) -> bool:
    """Whether rows lie along a tensor that need not be alike."""
    return not label.is_alike and lies_along_rows(label)


class Sizes:
    """The sizes of dimensions for all batches, and the dimensions of sizes that Python computed."""

    def __init__(self, space: BatchSpace) -> None:
        self.space = space
        self.axes = tuple(Atom(axis, own, (axis,)) for axis, own in enumerate(space.own))
        self._by_key: dict[int, Array] = {axis: number.values for axis, number in enumerate(space.numbers)}
        self._values: dict[Dim, Array] = {}
        self._numbers: dict[Dim, Num] = {(atom,): n for atom, n in zip(self.axes, space.numbers, strict=True)}
        self._atoms: dict[tuple[Any, ...], Atom] = {}
        self.sorted_by: dict[Dim, Any] = {}
        """The choice that rows are sorted by, by their arrangement."""
        self.fixed: set[int] = set()
        """The axes along which labels hold for the extents of the run alone."""
        self._one = np.ones([1] * len(space.own), dtype=np.int64)

    def values(self, dim: Dim) -> Array:
        """The size for each batch."""
        value = self._values.get(dim)
        if value is None:
            value = self._one
            for atom in dim:
                value = value * (self._by_key[atom.key] if isinstance(atom, Atom) else atom)
            self._values[dim] = value
        return value

    def number(self, dim: Dim) -> Any:
        """The size as Python gets it."""
        if not is_dynamic(dim):
            return own_size(dim)
        number = self._numbers.get(dim)
        if number is None:
            values = self.values(dim)
            number = self._numbers[dim] = Num(self.space, values, own_size(dim), "*".join(map(self._name, dim)))
        return number

    def _name(self, atom: Atom | int) -> str:
        if not isinstance(atom, Atom):
            return str(atom)
        return self.space.numbers[atom.key].text if atom.key < len(self.axes) else "size"

    def numel(self, dims: Iterable[Dim]) -> Any:
        """The number of elements as Python gets it."""
        return self.number(flat(dims))

    def dim_of(self, number: Any) -> Dim:
        """The dimension of a size that Python or a rule computed."""
        if not isinstance(number, SizeNumber):
            return plain_dim(int(number))
        for dim, named in self._numbers.items():
            if named is number and not any(isinstance(a, Atom) and a.is_arranged for a in dim):
                return dim
        return self.dim_of_values(number.values)

    def dim_of_values(self, values: Array) -> Dim:
        """The dimension of a size with these values for all batches."""
        own = int(self.space.of_run(values))
        follows = self._followed(values)
        if not follows:
            return plain_dim(own)
        base = tuple(self.axes[axis] for axis in follows)
        factor, rest = divmod(own, own_size(base))
        if factor and not rest and (ROWS_AXIS in follows or is_equal(values, self.values(base) * factor)):
            self.space.restrict(values == self.values(base) * factor, "a size that does not grow with the rows")
            return merged((*base, factor))
        if ROWS_AXIS in follows or own < 2:  # rows lie there in a way that no label tells
            self.space.restrict_to_own(follows, "a size that does not grow with the rows")
            return plain_dim(own)
        self.space.restrict(np.minimum(values, 2), "a size of one or less")
        key = values.shape, values.tobytes()
        if key not in self._atoms:
            self._atoms[key] = self._new_atom(values, own, follows)
        return (self._atoms[key],)

    def _new_atom(self, values: Array, own: int, axes: tuple[int, ...], is_arranged: bool = False) -> Atom:
        atom = Atom(len(self._by_key), own, axes, is_arranged)
        self._by_key[atom.key] = values
        return atom

    def arranged(self, dim: Dim) -> Dim:
        """The elements of a dimension in another order, which is like no other."""
        return (self._new_atom(self.values(dim), own_size(dim), tuple(sorted(axes_of(dim))), is_arranged=True),)

    def _followed(self, values: Array) -> tuple[int, ...]:
        return tuple(
            axis for axis, k in enumerate(values.shape) if k > 1 and bool((np.diff(values, axis=axis) != 0).any())
        )

    def joined(self, one: Dim, other: Dim) -> Dim:
        """The dimension of two that broadcast: equal for all batches the run speaks for, or one has one element."""
        if one == other or other == ():
            return one
        if one == ():
            return other
        if has_rows(one) and has_rows(other):
            raise MixError("rows beside rows in another order")
        if has_rows(one) != has_rows(other) and is_dynamic(one) and is_dynamic(other):
            raise MixError("rows beside a length")
        if is_dynamic(one) and is_dynamic(other):
            self.fix(sorted(axes_of(one) | axes_of(other)), "lengths in another order, beside each other")
        self.space.restrict(
            self.values(one) == self.values(other), f"a size of {own_size(one)} beside {own_size(other)}"
        )
        return one if is_dynamic(one) else other

    def in_order(self, dim: Dim) -> Dim:
        """A dimension whose elements get something by their place: that follows the extents within it."""
        self.fix(sorted(axes_of(dim[1:])), "numbers of places follow a length")
        return dim

    def fix(self, axes: Iterable[int], what: str) -> None:
        """Speak for the own extents alone along these axes, and for graphs of these extents alone."""
        self.fixed.update(axes)
        self.space.restrict_to_own(axes, what)

    def lose(self, label: Label, what: str) -> None:
        """Speak for the own extents alone along all axes that a label follows."""
        axes = range(len(self.axes)) if label.is_lost else sorted(axes_of(flat(label.dims)))
        self.space.restrict_to_own(axes, what)

    def at(self, dim: Dim, where: tuple[int, ...]) -> int:
        """The size in the batch that lies there."""
        return int(entry_at(self.values(dim), where))


def shape_of(label: Label, sizes: Sizes) -> torch.Size:
    """The shape as Python gets it."""
    return torch.Size(map(sizes.number, label.dims))


def fault_here(is_mix: bool, operator: str, why: str = "", *, is_unruled: bool = False) -> Fault:
    """A fault of an operator at the running line of the user's; ``is_unruled``: a rule would mend it."""
    if is_mix:
        return Fault(True, f"rows mix in {operator}{why and f' ({why})'}, {short_user_line()}")
    remedy = f"; give row_rule({operator!r}, ...), or rows='independent' in the options" if is_unruled else ""
    what = f"the rule of {operator} cannot tell" if why and not is_unruled else f"no rule for {operator}"
    return Fault(False, f"{what}{why and f' ({why})'}, called at {short_user_line()}{remedy}")


def first_fault(labels: Mapping[int, Label]) -> Fault | None:
    """The first fault among labels, one that mixes before one that is unknown."""
    faults = [label.fault for label in labels.values() if label.fault is not None]
    return next((fault for fault in faults if fault.is_mix), faults[0] if faults else None)
