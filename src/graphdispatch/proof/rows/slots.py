"""State that rows write at places which they name, as the slots of a cache.

Note [slots]
    Real rows write the same places in a graph as in eager. Padding rows write places that no real row may have named,
    unless they repeat a real row, and leave what that wrote. So padding waits for the user's word for such writes
    (``padding_writes="allow"``), which is given for places that no real row names. Whoever reads anything but places
    that its rows name might read what padding wrote, in this call or in one before: that mixes.

    Which places rows name goes by memory, so that it holds for each view of it. A write names places along some
    dimensions. A read names them, too, if its rows choose among all that the outermost of these dimensions spans: a
    page of a cache holds slots, but a column of it holds parts of all.
"""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from ...backends.operators import is_strided, short_user_line, storage_key
from .labels import MixError

ALL_PLACES = "all places that rows wrote"


class _Span(NamedTuple):
    """The memory among whose parts an index chooses, in elements: all of a dimension."""

    stride: int
    length: int

    def covers(self, other: "_Span") -> bool:
        """Whether an index along this dimension chooses among all that the other spans."""
        return self.stride < other.length <= self.length


def _span(tensor: Tensor, dim: int) -> _Span:
    return _Span(tensor.stride(dim), tensor.stride(dim) * tensor.shape[dim])


class Slots:
    """State that rows have written at places which they named, in one run so far; see Note [slots]."""

    def __init__(self) -> None:
        self.axes: set[int] = set()
        """The axes along which elements name places to write."""
        self.where = ""
        """Where the first of these writes happens."""
        self.adds = False
        """Whether one of them leaves something else if a row comes twice."""
        self._written: dict[int, set[_Span]] = {}
        self._read: dict[int, dict[tuple[_Span, ...], str]] = {}

    def __bool__(self) -> bool:
        return bool(self._written)

    def __contains__(self, tensor: Tensor) -> bool:
        return is_strided(tensor) and storage_key(tensor) in self._written

    def note_write(
        self, operator: str, tensor: Tensor, dims: Iterable[int], axes: Iterable[int], *, adds: bool
    ) -> None:
        """Note that elements along these axes name places of state to write.

        Args:
            operator: The operator that writes.
            tensor: The state.
            dims: The dimensions of the state along which rows name places.
            axes: The axes of the indices.
            adds: Whether the operator adds to what lies there.

        Raises:
            MixError: Something has read more of it than the places that its rows name.
        """
        key, spans = storage_key(tensor), [_span(tensor, dim) for dim in dims]
        if spans:
            outermost = max(spans, key=lambda span: span.length)
            if reader := self._reader_of_others(key, outermost):
                raise MixError(f"places that {reader} has read")
            self._written.setdefault(key, set()).add(outermost)
        self.axes.update(axes)
        self.adds |= adds
        self.where = self.where or f"{operator}, {short_user_line()}"

    def note_read(self, operator: str, tensor: Tensor, dims: Iterable[int] = ()) -> None:
        """Note that an operator reads state, at places that rows name along some of its dimensions.

        Raises:
            MixError: It reads more than rows may of state that they have written.
        """
        key, spans = storage_key(tensor), tuple(_span(tensor, dim) for dim in dims)
        if any(not any(span.covers(one) for span in spans) for one in self._written.get(key, ())):
            raise MixError(ALL_PLACES)
        self._read.setdefault(key, {}).setdefault(spans, operator)

    def _reader_of_others(self, key: int, span: _Span) -> str:
        """Which operator has read more of some memory than rows may that write there; empty if none has."""
        reads = self._read.get(key, {}).items()
        return next((reader for spans, reader in reads if not any(one.covers(span) for one in spans)), "")
