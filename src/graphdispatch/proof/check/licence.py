"""What is shown of a graph and of its rows, and which batches it may serve by that.

RowProof           what runs that speak for all batches have shown of rows; the graphs of a signature share it
ArgumentMetadata   what its code reads of arguments besides their values
Verification       all of it for one graph, and the one policy: what it may serve, and what is compared before
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from ...backends.operators import bits_equal
from ...modes import EntryState
from ...reasons import Reason
from ...runtime.entry import CUDAGraphEntry
from ...runtime.flatten import is_tensor
from ...runtime.outputs import OutputRule
from ...runtime.protocols import MOST_ALIKE, Licence, PerCall
from ...sizes import Axis, lengths_of
from ..state.guards import StateGuard
from ..state.objects import is_compiler_note
from ..state.reads import ARGUMENT_READERS, IDENTITY
from ..watch.operator_trace import OperatorTrace

if TYPE_CHECKING:
    from .row_proof import FollowedRun


@dataclass(eq=False, kw_only=True)
class RowProof:
    """What is shown of the rows of a signature, in one state of the callable. Its graphs share it, as far as they
    dispatch the operators of its runs. Changed only with the pool's lock held.

    Rows are the first axis. Elements along a further axis may mix, as in attention: whether padding along it is
    harmless, under a mask, show replays (``proof/check/lengths.py``).
    """

    axes: Sequence[Axis]
    runs: list["FollowedRun"] = field(default_factory=list)
    """The runs that dispatched the graphs' operators: they speak for the batches that may be served."""
    against_rows: tuple[Reason, str] | None = None
    """Why no rows may be padded, in a word and in detail; None where rows are independent, by their structure or by the
    user's word."""
    refused: tuple[Reason, str] | None = None
    """What a padded batch has shown that speaks against padding along any axis: it wrote where it must not, or was
    wrong."""
    mixed: frozenset[Axis] = frozenset()
    """The further axes along which elements mix."""
    along: dict[Axis, tuple[Reason, str]] = field(default_factory=dict)
    """Of the further axes, why padding along one is not harmless."""
    shown_along: dict[Axis, set[int]] = field(default_factory=dict)
    """Of the axes along which elements mix, in graphs of which sizes replays have shown what padding does: in a longer
    one, along any axis, elements may meet padding at places that no shorter one has."""
    is_word: bool = False
    """Whether rows are independent by the user's word, so that batches at both ends of a size are compared."""
    unlike: dict[int, str] = field(default_factory=dict)
    """Batches for which Python takes another path than for the graph's size, and why that is so."""
    is_compared: bool = False
    """Whether a padded batch has agreed with eager: an alarm for a rule that is wrong."""
    output_rule: OutputRule | None = None
    """Which dimensions of the outputs follow the batch, once a graph has shown it."""
    by_place: str = ""
    """Where rows get something by their place in the batch, if they do; then they are not served in parts."""
    is_doubted: bool = False
    """Whether a run that was not watched did something else than the runs before it: then all are watched."""
    _ends: dict[int, set[int]] = field(default_factory=dict)
    """By size, the padded batches that were compared."""

    def objection(self, rows: int, size: int) -> tuple[Reason, str] | None:
        """Why a batch may not be padded to ``size``, as far as is known; None if nothing speaks against it."""
        padded = [axis for axis in self.axes if axis.of(rows) != axis.of(size)]
        if not padded:
            return None
        if self.refused is not None or (self.axes[0] in padded and self.against_rows is not None):
            return self.refused or self.against_rows
        along = next(filter(None, map(self.along.get, padded)), None)
        if along is not None:
            return along
        return (Reason.PATH_CHANGES, self.unlike[rows]) if rows in self.unlike else None

    def is_new_padding(self, rows: int, size: int) -> bool:
        """Whether a batch is padded as none was that was compared with eager."""
        is_new = any(a.of(rows) != a.of(size) and self.is_open(a, size) for a in self.axes)
        return rows != size and (is_new or not self.is_compared)

    def is_open(self, axis: Axis, size: int) -> bool:
        """Whether replays have yet to show what padding to this size does along an axis."""
        if axis not in self.mixed or axis in self.along:
            return False
        shown = self.shown_along.get(axis, ())
        return not any(all(a.of(one) >= a.of(size) for a in self.axes[1:]) for one in shown)

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
        """Why real rows may depend on padding rows, as a sentence; empty where they do not."""
        found = self.refused or self.against_rows
        return found[1] if found else ""


_MOST_COMPARED_CALLS = 8


class ArgumentMetadata:
    """What the code of a graph reads of its arguments' metadata, in the calls that were compared with eager.

    A graph reads its own buffers, so a call that differs here may take another branch. Calls are noted under the lock
    of whoever compares; any thread may read. ``state`` are the tensors that an argument may be; it holds them.
    """

    def __init__(self, names: Sequence[str], values: Sequence[Any], state: Sequence[torch.Tensor]) -> None:
        self.names = names
        self._readers = [ARGUMENT_READERS[name] for name in names if name != IDENTITY]
        self._positions = [place for place, value in enumerate(values) if is_tensor(value)]
        self._state = {id(tensor): (tensor, -1 - place) for place, tensor in enumerate(state)}
        self._captured = self._read(values)
        self._compared: list[list[Any]] = []
        self._unlike: list[list[Any]] = []
        """Calls for which the code does something else than in the graph."""

    def refuses(self, values: Sequence[Any]) -> bool:
        """Whether a call that is like none that was compared runs eagerly: the code is shown to do something else, or
        there were many different calls."""
        is_full = len(self._compared) + len(self._unlike) >= _MOST_COMPARED_CALLS
        return is_full or self._is_among(values, self._unlike)

    def note_unlike(self, values: Sequence[Any]) -> None:
        """Note a call for which the code does something else than in the graph."""
        self._unlike.append(self._key(values))

    @property
    def text(self) -> str:
        """Why a call that differs runs eagerly."""
        names = ", ".join(name if name == IDENTITY else f".{name}" for name in self.names)
        return f"the code may read {names} of an argument, and the call differs there; pass that as an argument"

    def note(self, values: Sequence[Any]) -> None:
        """Note a call that was compared with eager."""
        if not self.has_compared(values):
            self._compared.append(self._key(values))

    def has_compared(self, values: Sequence[Any]) -> bool:
        """Whether a call is like one that was compared."""
        return self._is_among(values, self._compared)

    def _is_among(self, values: Sequence[Any], calls: Sequence[list[Any]]) -> bool:
        now = self._key(values) if calls else []
        return any(all(map(_same, now, one)) for one in calls)

    def _key(self, values: Sequence[Any]) -> list[Any]:
        """What is read of a call's arguments; with their shapes, if it differs from that of the capture."""
        read = self._read(values)
        is_captures = all(map(_same, read, self._captured))
        return [*read, () if is_captures else tuple(values[place].shape for place in self._positions)]

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
    return a is b or (type(a) is type(b) and type(a) in (int, tuple) and bool(a == b))


_UNPROVEN = Reason.PADDING_UNPROVEN, ""
_SMALL_BYTES = 1 << 20
_BARE = "the code may read attributes that an argument carries; pass them as arguments"


@dataclass(eq=False, slots=True, kw_only=True)
class Verification(Licence):
    """What is shown of a graph of ``size`` rows, and so which batches it may serve.

    Compared are the batch of the capture; of the first graph of a signature a second, different batch; the first padded
    one; one after a replay that failed; and one in every ``verify_every``.

    A policy of your own is a subclass with a ``name``, by which ``CUDAGraphOptions(verify="...")`` chooses it. There is
    one object for each graph. ``explain`` looks at a ``verdict`` and at what ``per_call`` gives, too, so that these
    count nothing: ``compare_after`` says how many replays lie between two comparisons.
    """

    policies: ClassVar[dict[bool | str, type["Verification"]]] = {}
    """The policies that have a name."""

    size: int
    operators: OperatorTrace = field(default_factory=OperatorTrace)
    """The operators of the graph."""
    proof: RowProof | None = None
    """What is shown of its rows; None where nobody pads a batch to it."""
    traced: set[int] = field(default_factory=set)
    """The batches whose code was traced for the graph's guard."""
    metadata: ArgumentMetadata | None = None
    """What the code reads of its arguments besides their values, in the calls that were compared; None: nothing."""
    may_leave_effects: bool = True
    """Whether a run of its code may leave more than its answer; else one that is like it need not be watched."""
    bare: tuple[int, ...] = ()
    """The places, among a call's values, of copied tensors that must carry no attributes of Python: the code looks up
    some that they may have."""
    batches: list[tuple[Any, ...]] = field(default_factory=list)
    """The batches that it agreed on so far, that of the capture first, as ``kept`` gives them; none once there were
    enough."""
    wanted: ClassVar[int] = 2
    """So many different batches must agree, that of the capture among them: a value that the capture froze agrees the
    first time only."""

    def __init_subclass__(cls, name: str = "") -> None:
        super(Verification, cls).__init_subclass__()
        if name:
            Verification.policies[name] = cls

    def verdict(self, entry: CUDAGraphEntry, values: Sequence[Any], rows: int) -> tuple[Reason | None, str]:
        """As ``Licence.verdict``."""
        if self._carries(values):
            return Reason.STATE_UNSEEN, _BARE
        if (padding := self.against_padding(rows)) is not None:
            return padding
        is_new = self.metadata is not None and not self.metadata.has_compared(values)
        if is_new and self.metadata is not None and self.metadata.refuses(values):
            return Reason.STATE_UNSEEN, self.metadata.text
        is_due = is_new or entry.is_due_again or self.wants_look(rows) or entry.state is EntryState.FAILED
        if is_due or (entry.state is EntryState.CAPTURED and self.differs(values)):
            return Reason.VERIFIED_NOW, ""
        return None, ""

    def may_hit(self, entry: CUDAGraphEntry, rows: int) -> bool:
        """Whether it was compared on two batches, or all its calls were alike: so many that one was to be made of them.
        Where none can be made, it serves calls of that batch alone."""
        if self.against_padding(rows) is not None or self.wants_look(rows):
            return False
        is_of_one_batch = entry.state is EntryState.CAPTURED and entry.replay_count >= MOST_ALIKE
        return entry.state is EntryState.VERIFIED or (is_of_one_batch and rows == self.size)

    def per_call(self, entry: CUDAGraphEntry, rows: int) -> PerCall | None:
        """What the code reads of arguments besides their values, and whether all calls are still alike."""
        is_of_one_batch = entry.state is EntryState.CAPTURED
        if not (self.bare or self.metadata is not None or is_of_one_batch):
            return None

        def may_serve(values: Sequence[Any]) -> bool:
            for place in self.bare:  # most tensors carry nothing
                if values[place].__dict__ and self._carries(values):
                    return False
            if self.metadata is not None and not self.metadata.has_compared(values):
                return False
            return not (is_of_one_batch and self.differs(values))

        return may_serve

    def misfit(self, values: Sequence[Any]) -> str:
        """As ``Licence.misfit``."""
        if self._carries(values):
            return _BARE
        if self.metadata is not None and not self.metadata.has_compared(values):
            return self.metadata.text
        return ""

    def _carries(self, values: Sequence[Any]) -> bool:
        """Whether a tensor carries an attribute that the code may read; notes of torch's compiler are none."""
        return any(not is_compiler_note(name) for place in self.bare for name in values[place].__dict__)

    def agreed(self, entry: CUDAGraphEntry, values: Sequence[Any] | None = None) -> None:
        """As ``Licence.agreed``."""
        if values is not None and entry.state is EntryState.CAPTURED and len(self.batches) + 1 < self.wanted:
            self.batches.append(kept(values))
        else:
            self.batches.clear()
            entry.passed()

    def differs(self, values: Sequence[Any]) -> bool:
        """Whether a batch is another one than those that it agreed on (yes, if these were not kept)."""
        return not any(map(partial(_is_same_batch, values), self.batches))

    def wants_look(self, rows: int) -> bool:
        """Whether a batch must be run eagerly, traced and compared before the graph serves it: none was padded so, or
        Python may take a path for it on which no code was traced."""
        proof = self.proof
        if proof is None or proof.objection(rows, self.size) is not None:
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
        """As ``Licence.against_padding``."""
        if self.proof is None:
            return None if rows == self.size else _UNPROVEN
        return self.proof.objection(rows, self.size)

    def against_parts(self, entry: CUDAGraphEntry, rows: int, part: int) -> str:
        """As ``Licence.against_parts``: a run must speak for the whole batch and for the graph's. Nobody runs a part by
        itself, so that none need speak for that."""
        proof = self.proof
        if proof is None or not proof.runs or not proof.independent or proof.is_word:
            return "its rows are not proven to be independent" + (
                f": {proof.text}" if proof and not proof.independent else ""
            )
        if proof.by_place:
            return f"rows get something by their place in the batch, in {proof.by_place}"
        if not proof.has_path(rows, self.traced):
            return "no run speaks for so many rows"
        may_pad = proof.objection(part, self.size) is None and not proof.is_new_padding(part, self.size)
        if entry.state is not EntryState.VERIFIED or not may_pad:
            return f"its graph of {self.size} was not compared for {part} rows yet"
        return ""


class LikeGraph(NamedTuple):
    """A graph whose code a run executes, too, so that it need not be traced."""

    shown: Verification
    guard: StateGuard


def shown_of(entry: CUDAGraphEntry) -> Verification | None:
    """What is shown of a graph; None where nothing is, since it is trusted."""
    return entry.licence if isinstance(entry.licence, Verification) else None


def kept(values: Sequence[Any]) -> tuple[Any, ...]:
    """Copies of the small tensors of a call's values, with None in the place of all else."""
    return tuple(v.detach().clone() if is_tensor(v) and v.nbytes <= _SMALL_BYTES else None for v in values)


def _is_same_batch(values: Sequence[Any], other: Sequence[Any]) -> bool:
    pairs = [pair for pair in zip(values, other, strict=False) if is_tensor(pair[1])]
    return bool(pairs) and all(starmap(bits_equal, pairs))


def float_types_of(entry: CUDAGraphEntry) -> Collection[torch.dtype]:
    """The floating types that a graph computes in, as far as that is noted."""
    shown = shown_of(entry)
    return shown.operators.float_types if shown is not None else frozenset()
