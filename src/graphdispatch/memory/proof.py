"""What comparisons with eager have shown of a graph, and which batches it may serve by that.

RowProof           what replays with other padding have shown of its rows
Compared           which numbers of rows, and lengths, were compared
ArgumentMetadata   what its code reads of arguments besides their values
Program            its operators, by which graphs of several sizes share what was proven of one of them (``labels.py``)
Verification       all of it for one graph, and the one policy: what it may serve, and what is compared before
"""

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import combinations, product, starmap
from math import gcd, prod
from typing import Any

import torch

from ..backends.operators import OperatorKind, bits_equal, is_total, kind_of
from ..call.spec import is_tensor
from ..modes import EntryState
from ..reasons import Reason
from ..sizes import ROWS, Axis, lengths_of, pack
from ..state.reads import IDENTITY, TENSOR_READERS
from .labels import Dispatched, follows_batch, is_alike, is_same, numbers_of

MOST_COMPARED = 64
"""The largest size of which each number of rows, or each length, is compared with eager by itself."""

_BATCHES, _BATCHES_IF_LIMITED = 2, 3
"""How many batches a proof is made with, where it takes numbers from them, and where it may try no others."""


@dataclass(frozen=True)
class RowProof:
    """Whether a graph's real rows are the same whatever its padding rows hold; ``capture/prover.py`` finds out."""

    independent: bool
    deterministic: bool = True
    """Whether equal replays give equal bits, and no kernel multiplies groups of rows whose sizes are data. If not, rows
    were compared within the tolerance."""
    perturbation: str = ""
    """What the padding rows held when a real row changed; empty if none did, or if their number alone matters."""
    what: str = ""
    """What changed, and by how much."""
    reason: Reason = Reason.VERIFICATION_FAILED
    """Why padded batches run eagerly, if a real row changed."""
    untested: tuple[str, ...] = ()
    """The arguments (and ``"state"``) of which the batch could not tell; padded batches are compared until one can."""

    limited: bool = False
    """Whether the callable checks its data, or makes indices of it, so that no numbers of another kind may be tried."""

    kept: tuple[int, ...] = ()
    """The arguments (by index) whose padding was left as their rule says, as masks of zeros and ones."""

    batches: int = 0
    """How many batches it was made with, if it takes numbers from them, as of integers: what one of them hides, another
    may show. Else 0."""

    single: bool = False
    """Whether it was made with one real row where padding keeps to a rule: more rows may show more."""

    bound: tuple[Axis, ...] = ()
    """Where there are several dynamic dimensions, those along which real ones changed."""

    assumed: tuple[tuple[int, torch.Tensor], ...] = ()
    """Values of a call, by place, with the row that all of theirs were in many batches. No padding could test them, so
    that padded batches are served while they stay so, and compared as soon as they do not."""

    def holds_for(self, values: Sequence[Any]) -> bool:
        """Whether the rows of a call are as the proof assumes. Reads values back to the host, if it assumes any."""
        return all(torch.equal(values[place], row.expand_as(values[place])) for place, row in self.assumed)

    def allows(self, rows: int, size: int) -> bool:
        """Whether a batch of ``rows`` rows has padding in a graph of ``size`` only where that changes no real row."""
        if self.independent or rows == size:
            return True
        return bool(self.bound) and all(axis.of(rows) == axis.of(size) for axis in self.bound)

    @property
    def needs_batches(self) -> bool:
        """Whether it takes numbers from batches, and from too few of them yet."""
        return 0 < self.batches < (_BATCHES_IF_LIMITED if self.limited else _BATCHES)

    @property
    def is_whole(self) -> bool:
        """Whether rows are independent whatever an argument holds, as far as the batches could show."""
        return self.independent and not (self.untested or self.assumed)

    @property
    def is_complete(self) -> bool:
        """Whether no further batch needs to be tested."""
        return not self.independent or (self.is_whole and not (self.needs_batches or self.single))

    def after(self, earlier: "RowProof | None") -> "RowProof":
        """This proof as one of a further batch: what an earlier one has shown stays known."""
        if earlier is None or not self.independent:
            return self
        batches = max(earlier.batches, self.batches) + 1 if earlier.batches or self.batches else 0
        if earlier.is_whole:
            return replace(self, untested=(), assumed=(), batches=batches, single=self.single and earlier.single)
        # Two batches that each leave something untested show nothing together: the one that leaves less counts.
        return replace(earlier if {*earlier.untested} < {*self.untested} else self, batches=batches)

    @property
    def text(self) -> str:
        """What was found, as a sentence."""
        if not (self.independent or self.perturbation):
            return f"real rows depend on how many there are: {self.what}"
        if not self.independent:
            return f"real rows depend on padding: with {self.perturbation} in the padding rows, {self.what}"
        if not self.deterministic:
            return "bits are not the same in all replays, so that rows were compared within the tolerance"
        if self.untested:
            return f"padding was not tested for {', '.join(self.untested)}"
        return "rows are independent" if self.is_complete else "padding was tested with too few batches"


class Compared:
    """Which batches were compared with eager: another one may take another branch of the Python code.

    Kept are their extents along each axis. They count for all graphs as long along the axis, as long as the same
    code runs for each. Where there are several axes, a batch is covered if each of its extents was
    compared, and if it lies between two batches of as many rows that were compared: none of its other extents is
    shorter than in the one, or longer than in the other. So code is found that branches on several extents at once, by
    their product or by which of them is larger.

    Above ``MOST_COMPARED`` along an axis it is enough that a shorter extent was compared, and that what divides all of
    those divides this one: code that takes another branch below some number is found so, and code that cuts the batch
    into blocks.
    """

    def __init__(self, axes: Sequence[Axis] = (ROWS,), others: Sequence["Compared"] = ()) -> None:
        """``others`` are those of graphs of other sizes, in the same state of the callable."""
        self.axes = tuple(axes)
        self._extents: dict[tuple[Axis, int], set[int]] = others[0]._extents if others else {}
        """By axis and the graph's extent along it, the extents that were compared."""
        self._others: dict[int, list[tuple[int, ...]]] = {}
        """By number of rows, the other extents of the batches that were compared with this graph."""
        self._is_trusted = False

    def part(self) -> None:
        """Share what is noted from here on with no other graph, since other code ran."""
        self._extents = {key: set(known) for key, known in self._extents.items()}

    def trust(self) -> None:
        """Take all batches for compared."""
        self._is_trusted = True

    def note(self, rows: int, size: int) -> None:
        """Note that a batch was compared with the graph of ``size``."""
        for axis in self.axes:
            self._known(axis, size).add(axis.of(rows))
        first, *others = lengths_of(self.axes, rows)
        same = self._others.setdefault(first, [])
        if tuple(others) not in same:
            same.append(tuple(others))

    def covers(self, rows: int, size: int) -> bool:
        """Whether a batch may be padded to ``size``, as far as comparisons go."""
        return self._is_trusted or (
            all(self._has(axis, axis.of(rows), size) for axis in self.axes) and self._is_between(rows, size)
        )

    def missing(self, rows: int, size: int) -> Iterable[int]:
        """What may have to be compared: for each number of rows from that of ``rows`` on the shortest and the longest
        batches; then a full one with each other extent in turn."""
        least, full = lengths_of(self.axes, rows), lengths_of(self.axes, size)
        ends = ((low, high) for low, high in zip(least[1:], full[1:], strict=True))
        for lengths in product(range(least[0], full[0] + 1), *ends):
            yield pack(self.axes, lengths)
        for place in range(1, len(full)):
            for extent in range(least[place], full[place]):
                yield pack(self.axes, [*full[:place], extent, *full[place + 1 :]])

    def _known(self, axis: Axis, size: int) -> set[int]:
        """The extents along an axis that were compared with graphs as long as this one."""
        return self._extents.setdefault((axis, axis.of(size)), set())

    def _has(self, axis: Axis, extent: int, size: int) -> bool:
        known, full = self._known(axis, size), axis.of(size)
        if extent == full or extent in known:
            return True
        # Blocks of rows may all be full in what was compared.
        is_like = full > MOST_COMPARED and extent > min(known, default=extent)
        return is_like and extent % gcd(full, *known) == 0

    def _is_between(self, rows: int, size: int) -> bool:
        """Whether a batch lies between two that were compared. The graph's own extents need no comparison."""
        (first, *now), (most, *full) = lengths_of(self.axes, rows), lengths_of(self.axes, size)
        if most > MOST_COMPARED and first not in self._others and first > min(self._others, default=first):
            first = min(self._others)
        same = [*self._others.get(first, ()), *([tuple(full)] if first == most else [])]
        has_less = any(all(a <= b for a, b in zip(other, now, strict=True)) for other in same)
        return has_less and any(all(a >= b for a, b in zip(other, now, strict=True)) for other in same)


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


_LEAST = 4


class Program:
    """The operators that a run of one size dispatched, in order, and what is proven of the rows of all such runs.

    Whether padding can change a real row depends on the operators, not on how many rows they run on. So a graph whose
    operators and constants are those of a proven one, but for the lengths that follow the batch, needs no proof of its
    own. Fewer than two real rows and two of padding prove too little for others.

    Args:
        run: What a run on the static inputs told of it.
        size: The rows of the run, padding included.
        axes: The dynamic dimensions of the batch.
    """

    def __init__(self, run: Dispatched | None = None, size: int = 0, axes: Sequence[Axis] = (ROWS,)) -> None:
        run = run or Dispatched()
        self._operators, self._outputs = run.operators, run.outputs
        self._is_apart = False
        self.limits_values = run.limits_values
        self.groups_rows = run.groups_rows
        self.float_types = run.float_types
        self._lengths = [axis.of(size) for axis in axes]
        distinct = {func for func, *_ in run.operators}
        kinds = {kind_of(func) for func in distinct}
        self.computes = bool(run.operators) and kinds <= {OperatorKind.PURE, OperatorKind.VIEW, OperatorKind.RANDOM}
        """Whether all that it does is to make tensors of others and views of them, and perhaps to draw numbers."""
        self.takes_any = all(kind_of(func) is OperatorKind.VIEW or is_total(func) for func in distinct)
        """Whether no number in a tensor can make it fail, such as an index out of range."""
        self.proof: RowProof | None = None
        """Whether real rows are independent of padding; None until a comparison has tested that."""

    def apart(self) -> "Program":
        """The same program for one graph, of which a proof by few rows holds for no graph of another size."""
        other = copy(self)
        other._is_apart = True
        return other

    def is_like(self, other: "Program") -> bool:
        """Whether the other program is this one for another size, and what is proven of this one holds for it."""
        return not self._is_apart and self._has_operators_of(other)

    def computes_as(self, other: "Program") -> bool:
        """Whether the other program is this one for other rows, and makes no number of how many these are."""
        return self._has_operators_of(other) and all(
            (mine[2] and mine[0]._schema.name not in _FILLING)
            or kind_of(mine[0]) is OperatorKind.EMPTY
            or is_same(mine[1:], theirs[1:], ())
            for mine, theirs in zip(self._operators, other._operators, strict=True)
        )

    def counts_rows(self, other: "Program") -> bool:
        """Whether the other program, a run of other rows, is this one but for numbers that it computes with: these are
        made of how many rows there are."""
        pairs = list(zip(self._operators, other._operators, strict=False))
        is_same_code = len(self._operators) == len(other._operators) and all(a[0] is b[0] for a, b in pairs)
        return is_same_code and any(numbers_of(a) != numbers_of(b) for a, b in pairs)

    def _has_operators_of(self, other: "Program") -> bool:
        if len(self._operators) != len(other._operators) or min(self._lengths) < _LEAST:
            return False
        places = range(len(self._lengths))
        chosen = [some for count in range(1, len(places) + 1) for some in combinations(places, count)]
        ratios = [(prod(self._lengths[i] for i in some), prod(other._lengths[i] for i in some)) for some in chosen]
        return is_same(self._outputs, other._outputs, ratios) and all(
            mine[0] is theirs[0]
            and is_alike(mine[1], theirs[1], follows_batch(mine[0]), ratios)
            and is_same(mine[2], theirs[2], ratios)
            for mine, theirs in zip(self._operators, other._operators, strict=True)
        )


_FILLING = frozenset(f"aten::{name}" for name in ("ones_like", "full_like", "new_ones", "new_full", "fill", "fill_"))
"""Operators that make equal numbers, as many as a tensor has."""
MOST_ALIKE = 8
"""Calls with the first batch that a graph serves before it is compared on one made of it."""


@dataclass(eq=False, slots=True, kw_only=True)
class Verification:
    """What comparisons with eager have shown of a graph of ``size`` rows, and when the next one is due.

    Compared are the batch of the capture; the second, different batch; a padded one of each number of rows (above
    ``MOST_COMPARED`` rows: of one smaller than all before); one after a replay that failed; and one in every
    ``verify_every``. What a graph of somebody else does to memory is not known, so it is not compared.
    """

    size: int
    state: EntryState = EntryState.CAPTURED
    replay_count: int = 0
    warm_batch: tuple[Any, ...] = ()
    """The first batch, until a different one has been verified."""
    program: Program = field(default_factory=Program)
    """The operators of the graph, which it may share with graphs of other sizes, and what is proven of their rows."""
    compared: Compared = field(default_factory=Compared)
    metadata: ArgumentMetadata | None = None
    """What the code reads of its arguments besides their values, in the calls that were compared; None: nothing."""
    is_known: bool = True
    """Whether a further eager run need not be watched if the captured one only computed; not after one that did
    something else."""
    knows_effects: bool = True
    """Whether the graph's effects are known, so that it can be compared; not so if somebody else captured it."""
    verify_at: float = math.inf
    """The number of replays from which on the next batch is compared with eager."""
    verify_every: int | None = None
    """After how many replays a comparison is due again; None: never."""

    @property
    def proof(self) -> RowProof | None:
        """Whether its real rows are independent of padding; None until a comparison has tested that."""
        return self.program.proof

    def due(self, values: Sequence[Any], rows: int) -> bool:
        """Whether this batch must be compared with eager before the graph serves it.

        Args:
            values: The flat values of the call.
            rows: The number of real rows.
        """
        if not self.knows_effects:
            return False
        if rows != self.size and self.proof is not None and not self.proof.holds_for(values):
            return True
        if self.metadata is not None and not self.metadata.knows(values):
            return True
        if self.compares(rows) or self.is_due_again:
            return True
        return self.state is EntryState.FAILED or (self.state is EntryState.CAPTURED and self.differs(values))

    def objection(self, values: Sequence[Any], rows: int, *, is_frozen: bool) -> tuple[Reason | None, str]:
        """Why the graph may not serve this batch now, in a word and in detail; None and nothing if it may.

        Args:
            values: The flat values of the call.
            rows: The number of real rows.
            is_frozen: Whether no comparison is allowed now.
        """
        if self.proof is not None and self.depends_on_padding(rows):
            return self.proof.reason, self.proof.text
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
        if rows != self.size and self.proof is not None and self.proof.assumed:
            return False  # the slow path looks at the values
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
        self.program.proof = RowProof(True)
        self.metadata = None
        self.compared.trust()

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
        """Whether comparisons with eager allow a batch: a full one, or a padded one if rows are proven independent.

        Args:
            rows: The number of real rows; so many must have been compared.
        """
        if rows == self.size:
            return True
        proof = self.proof
        if proof is None or proof.untested or proof.needs_batches or not proof.allows(rows, self.size):
            return False
        return self.compared.covers(rows, self.size)

    def compares(self, rows: int) -> bool:
        """Whether a batch would be padded, and has to be compared with eager before.

        Args:
            rows: The number of real rows.
        """
        return rows != self.size and not self.may_pad(rows) and not self.depends_on_padding(rows)

    def depends_on_padding(self, rows: int) -> bool:
        """Whether a batch would be padded although rows are known to depend on padding.

        Args:
            rows: The number of real rows.
        """
        return self.proof is not None and not self.proof.allows(rows, self.size)
