"""What is shown of a graph and of its rows, and which batches it may serve by that.

RowProof           what runs that speak for all batches have shown of rows; the graphs of a signature share it
ArgumentMetadata   what its code reads of arguments besides their values
Program            its operators and their results
Verification       all of it for one graph, and the one policy: what it may serve, and what is compared before
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any, Protocol

import torch

from ...backends.operators import bits_equal
from ...modes import EntryState
from ...reasons import Reason
from ...runtime.flatten import is_tensor
from ...sizes import Axis, lengths_of
from ..state.reads import IDENTITY, TENSOR_READERS
from ..watch.program import Dispatched, arguments_of, is_same, numbers_of


class Speaker(Protocol):
    """A run that speaks for batches besides its own; ``proof/rows/verdict.py`` has its verdict."""

    def speaks_for(self, extents: Sequence[int]) -> bool:
        """Whether Python takes the path of the run for a batch of these extents."""


@dataclass(eq=False, kw_only=True)
class RowProof:
    """What is shown of the rows of a signature, in one state of the callable. Its graphs share it, as far as they
    dispatch the operators of its runs. Changed only with the pool's lock held.

    Rows are the first axis. Elements along a further axis may mix, as in attention: whether padding along it is
    harmless, under a mask, show replays (``proof/check/lengths.py``).
    """

    axes: Sequence[Axis]
    runs: list[Speaker] = field(default_factory=list)
    """The runs that dispatched the graphs' operators: they speak for the batches that may be served."""
    against_rows: tuple[Reason, str] | None = None
    """Why no rows may be padded, in a word and in detail; None where rows are independent, by their structure or by the
    user's word."""
    refused: tuple[Reason, str] | None = None
    """What a padded batch has shown that speaks against padding along any axis: it wrote where it must not, or was
    wrong."""
    mixed: frozenset[Axis] = frozenset()
    """The further axes along which elements mix."""
    along: dict[Axis, str] = field(default_factory=dict)
    """Of these, what replays have shown: why padding along the axis is not harmless; empty where it is."""
    is_word: bool = False
    """Whether rows are independent by the user's word, so that batches at both ends of a size are compared."""
    unlike: dict[int, str] = field(default_factory=dict)
    """Batches for which Python takes another path than for the graph's size, and why that is so."""
    is_compared: bool = False
    """Whether a padded batch has agreed with eager: an alarm for a rule that is wrong."""
    by_place: str = ""
    """Where rows get something by their place in the batch, if they do; then they are not served in parts."""
    in_parts: dict[int, tuple[Reason, str]] = field(default_factory=dict)
    """By the number of parts, how batches above the largest size are served that were compared so with eager:
    ``IN_PARTS``, or why not."""
    is_doubted: bool = False
    """Whether a run that was not watched did something else than the runs before it: then all are watched."""
    is_trusted: bool = False
    """Whether all batches are served without any comparison."""
    _ends: dict[int, set[int]] = field(default_factory=dict)
    """By size, the padded batches that were compared."""

    def objection(self, rows: int, size: int) -> tuple[Reason, str] | None:
        """Why a batch may not be padded to ``size``, as far as is known; None if nothing speaks against it."""
        padded = [axis for axis in self.axes if axis.of(rows) != axis.of(size)]
        if self.is_trusted or not padded:
            return None
        if self.refused is not None or (self.axes[0] in padded and self.against_rows is not None):
            return self.refused or self.against_rows
        along = next((self.along[axis] for axis in padded if self.along.get(axis)), "")
        if along:
            return Reason.ROWS_MIX, along
        return (Reason.PATH_CHANGES, self.unlike[rows]) if rows in self.unlike else None

    def is_new_padding(self, rows: int, size: int) -> bool:
        """Whether a batch is padded as none was that was compared with eager."""
        is_new = any(a in self.mixed and a not in self.along and a.of(rows) != a.of(size) for a in self.axes)
        return rows != size and (is_new or not self.is_compared)

    def has_path(self, rows: int, traced: Iterable[int]) -> bool:
        """Whether Python takes the path, for a batch, that it took for one of those whose code was traced."""
        lengths = [lengths_of(self.axes, one) for one in (rows, *traced)]
        return any(run.speaks_for(lengths[0]) and any(map(run.speaks_for, lengths[1:])) for run in self.runs)

    def speaks_for(self, rows: int, size: int) -> bool:
        """Whether a batch is shown to dispatch the operators of the graph of ``size``: a run speaks for it, or, by the
        user's word, it is like others since it lies between such as were compared."""
        lengths = lengths_of(self.axes, rows)
        if any(run.speaks_for(lengths) for run in self.runs):
            return True
        ends = [lengths_of(self.axes, one) for one in self._ends.get(size, ())] if self.is_word else []
        return any(all(low <= own for low, own in zip(end, lengths, strict=True)) for end in ends)

    def note_compared(self, rows: int, size: int) -> None:
        """Note that a batch agreed with eager in the graph of ``size``."""
        if rows != size:
            self.is_compared = True
            self._ends.setdefault(size, set()).add(rows)

    @property
    def independent(self) -> bool:
        """Whether real rows are the same whatever padding rows hold."""
        return self.refused is None and self.against_rows is None

    @property
    def text(self) -> str:
        """What is known, as a sentence."""
        if found := self.refused or self.against_rows:
            return found[1]
        return "rows are independent, by the user's word" if self.is_word else "rows are independent"


_MOST_KNOWN = 8


class ArgumentMetadata:
    """What the code of a graph reads of its arguments' metadata, in the calls that were compared with eager.

    A graph reads its own buffers, so a call that differs here may take another branch. Calls are noted under the lock
    of whoever compares; any thread may ask. ``state`` are the tensors that an argument may be; it holds them.
    """

    def __init__(self, names: Sequence[str], values: Sequence[Any], state: Sequence[torch.Tensor]) -> None:
        self.names = names
        self._readers = [TENSOR_READERS[name] for name in names if name != IDENTITY]
        self._positions = [place for place, value in enumerate(values) if is_tensor(value)]
        self._state = {id(tensor): (tensor, -1 - place) for place, tensor in enumerate(state)}
        self._known: list[list[Any]] = []

    @property
    def is_full(self) -> bool:
        """Whether so many different calls were compared that others run eagerly."""
        return len(self._known) >= _MOST_KNOWN

    @property
    def text(self) -> str:
        """Why a call that differs runs eagerly."""
        spelled = ", ".join(name if name == IDENTITY else f".{name}" for name in self.names)
        return f"the code may read {spelled} of an argument, and each call differs there; pass that as an argument"

    def note(self, values: Sequence[Any]) -> None:
        """Note a call that was compared with eager."""
        if not self.knows(values):
            self._known.append(self._read(values))

    def knows(self, values: Sequence[Any]) -> bool:
        """Whether a call is like one that was compared."""
        now = self._read(values)
        return any(all(map(_same, now, known)) for known in self._known)

    def _read(self, values: Sequence[Any]) -> list[Any]:
        read = [reader(values[place]) for place in self._positions for reader in self._readers]
        return read + self._identities(values) if IDENTITY in self.names else read

    def _identities(self, values: Sequence[Any]) -> list[int]:
        """For each tensor the place of the first that is the same, or a number of its own for one of the state."""
        firsts: dict[int, int] = {}
        for place in self._positions:
            key = id(values[place])
            firsts.setdefault(key, self._state[key][1] if key in self._state else place)
        return [firsts[id(values[place])] for place in self._positions]


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is int and type(b) is int and a == b)


class Program:
    """The operators that a run of one size dispatched, in order, with the shapes of what they took and gave.

    Args:
        run: What the run noted of it.
    """

    def __init__(self, run: Dispatched | None = None) -> None:
        run = run or Dispatched()
        self._operators, self._outputs = run.operators, run.outputs
        self.shapes = run.shapes
        self.limits_values = run.limits_values
        self.groups_rows = run.groups_rows
        self.has_regions = run.has_regions
        self.float_types = run.float_types

    def has_numbers_of(self, other: "Program") -> bool:
        """Whether the other program has the same operators, which compute with the same numbers."""
        pairs = zip(self._operators, other._operators, strict=False)
        return len(self._operators) == len(other._operators) and all(
            a[0] is b[0] and numbers_of(a) == numbers_of(b) for a, b in pairs
        )

    def is_like(self, other: "Program") -> bool:
        """Whether the other program is this one for another batch: the same operators on the same tensors, with the
        same arguments but for lengths that may follow the batch, which shapes tell."""
        if len(self._operators) != len(other._operators):
            return False
        return self._outputs == other._outputs and all(
            a[0] == b[0] and is_same(arguments_of(a), arguments_of(b))
            for a, b in zip(self._operators, other._operators, strict=True)
        )


_UNPROVEN = Reason.PADDING_UNPROVEN, ""
MOST_ALIKE = 8
"""Calls with the first batch that a graph serves before it is compared on one made of it."""


@dataclass(eq=False, slots=True, kw_only=True)
class Verification:
    """What is shown of a graph of ``size`` rows, and when the next comparison with eager is due.

    Compared are the batch of the capture; of the first graph of a signature a second, different batch; the first padded
    one; one after a replay that failed; and one in every ``verify_every``. What a graph of somebody else does to memory
    is not known, so it is not compared.
    """

    size: int
    state: EntryState = EntryState.CAPTURED
    replay_count: int = 0
    warm_batch: tuple[Any, ...] = ()
    """The first batch, until a different one has been verified."""
    program: Program = field(default_factory=Program)
    """The operators of the graph."""
    proof: RowProof | None = None
    """What is shown of its rows; None where nobody pads a batch to it, or where that is not known."""
    traced: set[int] = field(default_factory=set)
    """The batches whose code was traced for the graph's guard."""
    metadata: ArgumentMetadata | None = None
    """What the code reads of its arguments besides their values, in the calls that were compared; None: nothing."""
    knows_effects: bool = True
    """Whether the graph's effects are known, so that it can be compared; not so if somebody else captured it."""
    verify_at: float = math.inf
    """The number of replays from which on the next batch is compared with eager."""
    verify_every: int | None = None
    """After how many replays a comparison is due again; None: never."""

    def due(self, values: Sequence[Any], rows: int) -> bool:
        """Whether this batch must be compared with eager before the graph serves it.

        Args:
            values: The flat values of the call.
            rows: The number of real rows.
        """
        if not self.knows_effects:
            return False
        if self.metadata is not None and not self.metadata.knows(values):
            return True
        if self.needs_look(rows) or self.is_due_again:
            return True
        return self.state is EntryState.FAILED or (self.state is EntryState.CAPTURED and self.differs(values))

    def objection(self, values: Sequence[Any], rows: int, *, is_frozen: bool) -> tuple[Reason | None, str]:
        """Why the graph may not serve this batch now, in a word and in detail; None and nothing if it may.

        Args:
            values: The flat values of the call.
            rows: The number of real rows.
            is_frozen: Whether no comparison is allowed now.
        """
        if (padding := self.against_padding(rows)) is not None:
            return padding
        if self.metadata is not None and self.metadata.is_full and not self.metadata.knows(values):
            return Reason.STATE_UNSEEN, self.metadata.text
        if not self.due(values, rows):
            return None, ""
        return (Reason.FROZEN if is_frozen else Reason.VERIFIED_NOW), ""

    def may_hit(self, rows: int) -> bool:
        """Whether hits may serve batches of so many rows: if it was compared on two batches, or if all its calls were
        alike.

        Args:
            rows: The number of real rows.
        """
        if not self.may_pad(rows):
            return False
        return self.state is EntryState.VERIFIED or (self.serves_one_batch and rows == self.size)

    def passed(self) -> None:
        """Note that the graph agreed with eager on another batch than that of its capture."""
        self.state, self.warm_batch = EntryState.VERIFIED, ()

    def failed(self) -> None:
        """Note that it did not agree with eager, or that a replay failed: it serves nothing until it is compared."""
        self.state = EntryState.FAILED

    def trust(self) -> None:
        """Serve all batches without any comparison."""
        self.state = EntryState.VERIFIED
        self.proof = RowProof(axes=(), is_trusted=True)
        self.metadata = None

    def schedule_check(self, *, rests: bool = False) -> None:
        """Have a batch compared with eager after ``verify_every`` further replays, or none while it ``rests``.

        Args:
            rests: Whether no comparison is allowed now.
        """
        is_wanted = self.verify_every is not None and not rests
        self.verify_at = self.replay_count + (self.verify_every or 0) if is_wanted else math.inf

    @property
    def is_due_again(self) -> bool:
        """Whether ``verify_every`` wants the next batch compared."""
        return self.replay_count >= self.verify_at

    @property
    def serves_one_batch(self) -> bool:
        """Whether all its calls were alike, and so many that it was to be compared on a batch made of theirs. Where
        none can be made, it serves calls of that batch alone."""
        return self.state is EntryState.CAPTURED and self.replay_count >= MOST_ALIKE

    def differs(self, values: Sequence[Any]) -> bool:
        """Whether a batch is another one than that with which it was captured (yes, if that was not kept).

        Args:
            values: The flat values of the call.
        """
        pairs = [pair for pair in zip(values, self.warm_batch, strict=False) if is_tensor(pair[1])]
        return not pairs or not all(starmap(bits_equal, pairs))

    def may_pad(self, rows: int) -> bool:
        """Whether the graph may serve a batch without a comparison: a full one, or a padded one if that is proven.

        Args:
            rows: The number of real rows.
        """
        if self.proof is None:
            return rows == self.size
        return self.proof.objection(rows, self.size) is None and not self.needs_look(rows)

    def needs_look(self, rows: int) -> bool:
        """Whether a batch must be run eagerly, traced and compared before the graph serves it: none was padded so, or
        Python may take a path for it on which no code was traced.

        Args:
            rows: The number of real rows.
        """
        proof = self.proof
        if proof is None or proof.is_trusted or proof.objection(rows, self.size) is not None:
            return False
        is_shown = rows == self.size or proof.speaks_for(rows, self.size)
        return proof.is_new_padding(rows, self.size) or not is_shown or not self.has_path(rows)

    def has_path(self, rows: int) -> bool:
        """Whether Python takes a path for a batch on which its code was traced, so that the graph's guard holds what it
        reads, and it leaves no effect that a replay would lose.

        Args:
            rows: The number of real rows.
        """
        if self.proof is None or rows in self.traced or self.proof.has_path(rows, self.traced):
            return True
        return self.proof.is_word and self.proof.speaks_for(rows, self.size)

    def against_padding(self, rows: int) -> tuple[Reason, str] | None:
        """Why a batch may not be padded to the graph's size, in a word and in detail; None if it may, as far as is
        known.

        Args:
            rows: The number of real rows.
        """
        if self.proof is None:
            return None if rows == self.size or not self.knows_effects else _UNPROVEN
        return self.proof.objection(rows, self.size)
