"""The plain licence: a graph serves every batch of its size, since somebody vouches for it."""

from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from ..modes import EntryState
from ..reasons import Reason
from .protocols import Licence, PerCall

if TYPE_CHECKING:
    from .entry import CUDAGraphEntry

MOST_ALIKE = 8
"""Calls with the first batch that a graph serves before it is compared on one made of it."""


class Trusted(Licence):
    """Serves every batch, padded or not. After a replay that failed, and where ``verify_every`` wants it, the next call
    is for the capturer to look at, unless somebody else captured the graph. It has no state: one serves all graphs."""

    def verdict(self, entry: "CUDAGraphEntry", values: Sequence[Any], rows: int) -> tuple[Reason | None, str]:
        """As ``Licence.verdict``. Nobody can compare a graph of somebody else."""
        is_due = entry.state is EntryState.FAILED or entry.is_due_again
        return (Reason.VERIFIED_NOW if is_due and entry.call is not None else None), ""

    def may_hit(self, entry: "CUDAGraphEntry", rows: int) -> bool:
        """Always, unless a replay failed."""
        return entry.state is EntryState.VERIFIED

    def per_call(self, entry: "CUDAGraphEntry", rows: int) -> PerCall | None:
        """Nothing."""
        return None

    def against_padding(self, rows: int) -> tuple[Reason, str] | None:
        """Nothing."""
        return None

    def wants_look(self, rows: int) -> bool:
        """Never."""
        return False

    def differs(self, values: Sequence[Any]) -> bool:
        """Never, since no batch is compared."""
        return False

    def misfit(self, values: Sequence[Any]) -> str:
        """Nothing."""
        return ""

    def against_parts(self, entry: "CUDAGraphEntry", rows: int, part: int) -> str:
        """That a graph serves padded batches does not say that it serves parts of one."""
        return "nobody has shown that its rows are independent"

    @property
    def in_parts(self) -> MutableMapping[int, tuple[Reason, str]]:
        """None were compared."""
        return {}
