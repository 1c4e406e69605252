"""Which batches a graph may serve, and which are compared with eager before: the one policy of verification."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

from ..backends.operators import bits_equal
from ..call.spec import is_tensor
from ..modes import EntryState
from ..reasons import Reason
from .argument_metadata import ArgumentMetadata
from .program import Program
from .proof import Compared, RowProof

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
        self.program.is_stretched = True
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
