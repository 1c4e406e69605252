"""What to do with a batch, and why: the decision, and the table of capture sizes that makes it."""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from ..descriptors import BatchDescriptor
from ..errors import ConfigError, shown
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..showing import rows_text
from ..sizes import ROWS, Axis, Extents, cells_of, lengths_of, pack

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Decision(NamedTuple):
    """What to do with one batch, and why. Immutable.

    Attributes:
        mode: The runtime mode; ``NONE`` is eager.
        descriptor: What the graph serves; None in an eager step.
        size: The padded number of rows; in an eager step, the rows themselves.
        reason: Why.
        rows: The number of real rows; 0 if unknown.
        detail: The reason in words of this case; empty if ``reason.text`` says it all.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor | None
    size: int
    reason: Reason
    rows: int = 0
    detail: str = ""

    @classmethod
    def eager(cls, reason: Reason, rows: int = 0, detail: str = "") -> "Decision":
        """The decision to run eagerly.

        Args:
            reason: Why.
            rows: The number of rows; 0 if unknown.
            detail: The reason in words of this case.

        Returns:
            A decision of mode ``NONE`` without a descriptor.
        """
        return cls(CUDAGraphMode.NONE, None, rows, reason, rows, detail)

    @property
    def is_eager(self) -> bool:
        """Whether no graph serves the batch."""
        return self.mode is CUDAGraphMode.NONE

    def explain(self) -> str:
        """One line for a person."""
        counted = rows_text(self.rows)
        if self.is_eager:
            count = f", {counted}" if self.rows else ""
            return f"eager{count}: {self.detail or self.reason.text}"
        rows, size = cells_of(self.rows), cells_of(self.size)
        padding = 100 * (1 - rows / size) if size else 0.0
        change = f"{self.rows} -> {self.size} rows, {padding:.1f} % padding" if padding else counted
        note = self.detail or ("" if self.reason.is_graph else self.reason.text)
        return f"{self.mode.name} graph, {change}{note and f' ({note})'}"


class Memo(dict[K, V], Generic[K, V]):
    """``memo[question]`` is ``answer(question)``, computed once. When ``most`` answers are kept, all are dropped.

    A kept answer costs one lookup. Thread-safe: two threads that look up the same at once may both compute the
    answer, and get the same one. What ``answer`` raises passes through, and nothing is kept.
    """

    __slots__ = ("_answer", "_most")

    def __init__(self, answer: Callable[[K], V], most: int = 65536) -> None:
        super().__init__()
        self._answer = answer
        self._most = most

    def __missing__(self, question: K) -> V:
        answer = self._answer(question)
        if len(self) >= self._most:
            self.clear()
        return self.setdefault(question, answer)


class SizeTable:
    """Decisions for every batch, each made once, at its first lookup. Immutable and thread-safe.

    A batch is served by the smallest size that has room for it along each axis: of all the one with the smallest
    product. With one dynamic dimension a size is its rows; with several, ``axes`` has them, and ``sizes`` combinations
    of lengths, one for each axis, which need not be all combinations. A table then has their numbers: see ``Extents``.

    With ``pad_batches=False`` only exact sizes are served.
    """

    def __init__(
        self,
        sizes: Iterable[Any],
        mode: CUDAGraphMode,
        *,
        axes: Sequence[Axis] = (ROWS,),
        pad_batches: bool = True,
    ) -> None:
        self.axes = tuple(axes)
        self._has_axes = self.axes != (ROWS,)
        numbers = [pack(self.axes, size) for size in sizes] if self._has_axes else list(sizes)
        self.sizes = tuple(sorted(numbers))
        """The numbers of the capture sizes, increasing."""
        self._by_cells = sorted(self.sizes, key=cells_of) if self._has_axes else self.sizes
        self.extents = [sorted({axis.of(size) for size in self.sizes}) for axis in self.axes]
        """The extents of the sizes along each axis, increasing."""
        self.largest = pack(self.axes, [along[-1] for along in self.extents]) if self.sizes else 0
        """The largest size of each axis; 0 without sizes."""
        self.mode = mode
        self.fixed = Decision(mode, BatchDescriptor(1), 1, Reason.EXACT, 1)
        """The decision for calls without a batch dimension."""
        self.pads = pad_batches
        """Whether a batch is served by a larger size."""
        self._decisions = Memo(self._decide)

    @classmethod
    def of_one(
        cls, size: int, mode: CUDAGraphMode, descriptor: BatchDescriptor | None = None, *, pads: bool = False
    ) -> "SizeTable":
        """The table of a single graph of ``size`` rows; if it ``pads``, it serves every batch of at most as many."""
        table = cls((size,), mode, pad_batches=pads)
        table.fixed = Decision(mode, descriptor or BatchDescriptor(size), size, Reason.EXACT, size)
        return table

    def decide(self, rows: int) -> Decision:
        """The decision for a batch: for ``rows`` rows, or for the number of its lengths."""
        return self._decisions[rows]

    @property
    def points(self) -> tuple[Any, ...]:
        """The sizes as the user gave them: rows, or combinations of lengths; increasing."""
        return tuple(sorted(map(self._lengths, self.sizes))) if self._has_axes else self.sizes

    def number_of(self, size: Any) -> int:
        """The number of a size that the user named. Raises ``ConfigError`` for one that is not captured here."""
        given = getattr(size, "lengths", size)
        if isinstance(given, (bool, float)) or getattr(given, "ndim", False) or given not in self.points:
            raise ConfigError(f"a size must be among the capture sizes {self.points}, got {shown(size)}")
        return self.sizes[self.points.index(given)]

    def checked(self, sizes: Sequence[Any] | None) -> tuple[int, ...]:
        """The numbers of ``sizes``, or of all. Raises ``ConfigError`` for one that is not captured here."""
        if sizes is None:
            return self.sizes
        if isinstance(sizes, (str, bytes, Mapping)) or not isinstance(sizes, Iterable):
            example = "" if self._has_axes else ", as [8, 16]"
            raise ConfigError(f"sizes must be several of the capture sizes {self.points}{example}, got {shown(sizes)}")
        return tuple(map(self.number_of, sizes))

    def _about_larger(self, batch: int) -> str:
        """Along which dimension a batch is larger than every size, with the remedy."""
        reason, pairs = Reason.ABOVE_LARGEST_SIZE, zip(self.axes, self._lengths(self.largest), strict=True)
        over = [f"{axis.name!r} ({axis.of(batch)} of {most})" for axis, most in pairs if axis.of(batch) > most]
        if not self._has_axes or not over:
            return f"{reason.text} (largest: {self.largest!s})"
        return f"{reason.sentence} along {over[0]}: give that dimension a larger size (largest: {self.largest!s})"

    def min_batch_of(self, size: int) -> int:
        """The smallest batch that a graph of ``size`` serves.

        With several axes, a batch that needs it along each of them, by a little.
        """
        own = zip(self._lengths(size), self.extents, strict=True)
        return pack(self.axes, [1 + [0, *along][bisect_left(along, extent)] for extent, along in own])

    def _lengths(self, number: int) -> tuple[int, ...]:
        return lengths_of(self.axes, number)

    def _covers(self, size: int, batch: int) -> bool:
        return all(axis.of(batch) <= axis.of(size) for axis in self.axes)

    def _size_for(self, batch: int) -> int | None:
        """The smallest size that has room for a batch; None if there is none."""
        own = zip(self._lengths(batch), self.extents, strict=True)
        nearest = [[*along, 0][bisect_left(along, extent)] for extent, along in own]
        if not all(nearest):
            return None
        size = pack(self.axes, nearest)  # where there is one for each combination of extents, it is among them
        return size if size in self.sizes else next((one for one in self._by_cells if self._covers(one, batch)), None)

    def _decide(self, rows: int) -> Decision:
        batch = pack(self.axes, self._lengths(rows))
        if not self.sizes:
            return Decision.eager(Reason.DISABLED, batch)
        if not all(self._lengths(batch)):
            return Decision.eager(Reason.NO_ROWS)
        size = self._size_for(batch) if batch > 0 else None
        if size is None:
            return Decision.eager(Reason.ABOVE_LARGEST_SIZE, batch, self._about_larger(batch))
        if batch != size and not self.pads:
            return Decision.eager(Reason.NOT_CAPTURED, batch)
        reason = Reason.EXACT if batch == size else Reason.PADDED
        return Decision(self.mode, descriptor_of(size), size, reason, batch)


def descriptor_of(size: int) -> BatchDescriptor:
    """What a graph of a size serves: as many tokens as its cells, in as many requests as its first extent; uniform
    decode where each has one."""
    if not isinstance(size, Extents):
        return BatchDescriptor(size)
    first = size.lengths[0]
    return BatchDescriptor(size.cells, first, size.cells == first)
