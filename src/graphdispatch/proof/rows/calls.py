"""One call of an operator, as a rule reads it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...backends.operators import storage_key
from .labels import (
    ROWS_AXIS,
    Dim,
    Fault,
    Label,
    MixError,
    UnknownError,
    axes_of,
    flat,
    has_rows,
    is_dynamic,
    numbers_places,
    own_size,
    plain_dim,
    plain_dims,
)

if TYPE_CHECKING:
    from .functions import Caller
    from .run import RowRun

NO_ROWS = "rows where its rule has none"
View = tuple[tuple[int, ...], tuple[int, ...], int]
Rule = Callable[["Call"], list[Label]]


class Operator(NamedTuple):
    """What the run has to know of an operator."""

    name: str
    """With its namespace."""
    plain_name: str
    defaults: dict[str, Any]
    """The arguments in order, and what stands for those that are left out."""
    tensors: tuple[str, ...]
    """The arguments that may hold tensors."""
    rule: Rule | None
    """The rule of torch's operator; None: there is none."""
    names_places: bool
    """Whether rows may say at which places of state it reads or writes: see Note [slots] in ``slots.py``."""
    keeps_places: bool
    """Whether each element of a result is made of those at its own place."""
    takes_sizes: bool
    """Whether sizes are among the arguments, so that a result may follow the batch where no argument does."""
    makes_alike: bool
    """Whether, where it makes rows of a tensor without rows, all of them are alike."""
    fills: bool
    """Whether all elements of a result are alike, whatever it takes."""
    is_view: bool
    changes_view: bool
    keeps_elements: bool
    is_seeded: bool
    writes: bool


class Call:
    """One call of an operator: its arguments by name, its results, and the labels of its tensors."""

    def __init__(
        self,
        run: "RowRun",
        operator: Operator,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: list[Tensor],
        labels: Mapping[int, Label],
        outs: Sequence[Tensor],
    ) -> None:
        self.run, self.operator, self.labels, self.sizes, self.space = run, operator, labels, run.sizes, run.space
        self.tensors, self.outs = tensors, outs
        """All tensors among the arguments; the results, or what it writes if it returns nothing."""
        self.name = operator.plain_name
        self.caller: Caller
        self.writes = False
        self.is_by_place = False
        """Whether rows get something by their place in the batch."""
        self.before: View | None = None
        """How the first tensor lay in memory, if the operator has changed that."""
        self.rearranges = False
        """Whether it writes rows in another order over all of a memory that it was given."""
        self._read: dict[int, bool] = {}
        """The tensors (by ``id``) at whose label the rule has looked, and whether it takes their elements as data."""
        self.a: dict[str, Any] = operator.defaults | dict(zip(operator.defaults, args, strict=False))
        self.a.update(kwargs)

    def label(self, tensor: Tensor | str, *, is_data: bool = True) -> Label:
        """The label of a tensor, or of the argument of this name.

        Args:
            tensor: The tensor, or the name.
            is_data: Whether elements are used as data; else as places alone, or they stay as they are.
        """
        found = self.a[tensor] if isinstance(tensor, str) else tensor
        self._read[id(found)] = is_data or self._read.get(id(found), False)
        label = self.labels.get(id(found))
        return label if label is not None else Label(plain_dims(found.shape))

    def certain_label(self, tensor: Tensor | str, *, is_data: bool = True) -> Label:
        """The label, if it tells the shape for all batches."""
        label = self.label(tensor, is_data=is_data)
        if label.is_lost:
            raise UnknownError("a shape that is not known for other batches")
        return label

    @property
    def first(self) -> Tensor:
        """The first tensor among the arguments."""
        return self.tensors[0]

    @property
    def moved(self) -> Label:
        """The label of the first tensor, whose elements stay as they are."""
        return self.certain_label(self.first, is_data=False)

    def has(self, name: str) -> bool:
        """Whether there is a tensor for the argument of this name."""
        return isinstance(self.a.get(name), Tensor)

    def place(self, name: str, count: int, default: int = 0) -> int:
        """An argument that names one of ``count`` dimensions."""
        value = self.a.get(name)
        return (default if value is None else int(value)) % max(count, 1)

    def places(self, value: Any, count: int) -> list[int]:
        """The dimensions that an argument names: one, several, or all."""
        if value is None or value == []:
            return list(range(count))
        return [int(one) % max(count, 1) for one in ([value] if isinstance(value, int) else value)]

    def blend(self, dims: Iterable[Dim], what: str) -> None:
        """Elements along these dimensions go into each other."""
        for dim in dims:
            axes = axes_of(dim)
            if ROWS_AXIS in axes:
                raise MixError(what)
            self.run.mixed |= axes

    def blend_unread(self) -> None:
        """Tensors at which the rule has not looked may have no rows: nobody knows which element meets which."""
        for key in self.labels.keys() - self._read.keys():
            self.blend(self.labels[key].dims, NO_ROWS)

    def broadcast(self, shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
        """The shape of operands of these shapes."""
        count = max(map(len, shapes), default=0)
        dims: list[Dim] = [()] * count
        for shape in shapes:
            for place, dim in enumerate(shape, count - len(shape)):
                dims[place] = self.sizes.joined(dims[place], dim)
        return tuple(dims)

    def fit(self, dims: Sequence[Dim], tensor: Tensor) -> None:
        """A tensor must broadcast to these dimensions, and lie along their rows."""
        label = self.certain_label(tensor)
        for dim, own in zip(reversed(dims), reversed(label.dims), strict=False):
            if has_rows(own) and not has_rows(dim):
                raise MixError("rows where none lie")
            self.sizes.joined(dim, own)

    def given(self, size: int) -> Dim:
        """The dimension of a size that torch computed within the function around, by the tensors of that function."""
        if size == 1 or self.caller.sizes is not None:
            return plain_dim(size)
        return self.caller.around().get(size, plain_dim(size))

    def given_at(self, place: int, count: int, size: int) -> Dim:
        """The dimension of the size at a place among ``count``, as Python gave it, or as torch computed it."""
        sizes = self.caller.sizes
        if sizes is None or len(sizes) != count:
            return self.given(size)
        self.caller.size(size)
        return self.sizes.dim_of(sizes[place])

    def resized(self, old: Dim, size: int) -> Dim:
        """A dimension that an operator gave another size, in a way that no rule tells for other batches."""
        if size == own_size(old) or not is_dynamic(old):
            return old if size == own_size(old) else plain_dim(size)
        self.space.restrict_to_own(sorted(axes_of(old)), "a size that no rule tells for other batches")
        return plain_dim(size)

    def require_places(self, dim: Dim, least: int, most: int) -> None:
        """Code names places of a dimension by numbers, from ``least`` (below zero: from the end) to ``most``. The run
        speaks for sizes that have these places: for others the operator raises."""
        sizes = self.sizes.values(dim)
        self.space.restrict((sizes > most) & (sizes >= -least), f"places {least} to {most} of a size")

    def require_index(self, dim: Dim, index: Tensor) -> None:
        """As ``require_places``, for those that a tensor names whose elements follow no batch."""
        label = self.label(index, is_data=False)
        is_same = not any(map(is_dynamic, label.dims)) or (label.is_alike and axes_of(flat(label.dims)) == {ROWS_AXIS})
        is_same = is_same and not (label.fault or label.tag or label.is_lost)
        if is_dynamic(dim) and is_same and index.numel() and not is_flags(index):
            self.require_places(dim, *map(int, index.aminmax()))

    def is_outside(self, tensor: Tensor) -> bool:
        """Whether the operator writes to this tensor, and the run did not make its memory."""
        return self.writes and storage_key(tensor) not in self.run.made

    def fault_of_data(self, *, is_all: bool = False) -> Fault | None:
        """What is at fault with tensors whose elements are used as data, or with all; or None. Places among all rows
        are no data, and those of rows are what no other batch has."""
        if self.operator.fills:
            return None
        labels = [label for key, label in self.labels.items() if label.tag and (is_all or self._read.get(key, True))]
        self.is_by_place = self.is_by_place or any(map(numbers_places, labels))
        return next((label.tag.fault for label in labels if label.tag and label.tag.fault), None)

    def read_places(self, tensor: Tensor, dims: Iterable[int] = ()) -> None:
        """It reads the places of a tensor that rows name along these dimensions; see Note [slots] in ``slots.py``."""
        if tensor in self.run.slots or storage_key(tensor) not in self.run.made:
            self.run.slots.note_read(self.operator.name, tensor, dims)

    def each(self, label: Label) -> list[Label]:
        """The same label for each result."""
        return [label] * len(self.outs)


def view_of(tensor: Tensor) -> View:
    """The shape, the strides of dimensions with several elements, and the first place of a strided tensor."""
    shape = tuple(tensor.shape)
    strides = tuple(stride for extent, stride in zip(shape, tensor.stride(), strict=True) if extent > 1)
    return shape, strides, int(tensor.storage_offset())


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its memory, in order."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def is_flags(tensor: Tensor) -> bool:
    """Whether a tensor used as an index chooses by flags."""
    return tensor.dtype in (torch.bool, torch.uint8)
