"""A group: all graphs of one signature, the static inputs that they share, and how often each size was seen."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..backends.operators import bits_equal
from ..call.signature import Signature
from ..call.spec import FlatCall, CallSpec
from ..memory.buffers import OutputBuffers
from ..memory.entry import CUDAGraphEntry
from ..memory.inputs import StaticInputs
from ..memory.outputs import OutputRule
from ..modes import EntryState
from ..reasons import Reason

__all__ = ["Failure", "Form", "GraphGroup"]

_log = logging.getLogger("graphdispatch")
_FIRST_RETRY = 16  # sightings of a size after a failed capture before the next try; each failure takes 4 times as many


class Failure(NamedTuple):
    """A key that is quarantined: how often it failed, when it may be tried again (in sightings), and why it failed."""

    times: int
    retry_at: int | None
    reason: Reason
    detail: str


@dataclass(eq=False)
class GraphGroup:
    """The graphs of one signature. Changed only with the owner's lock held; ``served`` is read without it."""

    index: Any
    caller: FlatCall
    signature: Signature
    inputs: StaticInputs
    entries: dict[int, CUDAGraphEntry] = field(default_factory=dict)
    served: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    """By number of rows: the verified entry that serves it, with whatever the owner wants beside it."""
    sightings: Counter[int] = field(default_factory=Counter)
    past_replays: Counter[int] = field(default_factory=Counter)
    """By size, the replays of entries that are gone."""
    failures: dict[int, Failure] = field(default_factory=dict)
    rule: OutputRule | None = None
    example: list[Any] = field(default_factory=list)
    """The values of a call of two rows; empty if none is kept."""
    buffers: OutputBuffers | None = None
    """Where copies of outputs go, if they go to preallocated memory."""

    def current(self, size: int) -> CUDAGraphEntry | None:
        """The entry of ``size``, if there is one; forgets it if it was evicted, which another group's owner may do."""
        entry = self.entries.get(size)
        if entry is not None and entry.state is EntryState.EVICTED:
            self.drop(size)
            return None
        return entry

    def drop(self, size: int) -> None:
        """Forget the entry of ``size``."""
        gone = self.entries.pop(size, None)
        self.past_replays[size] += gone.replay_count if gone is not None else 0
        self.served = {rows: what for rows, what in self.served.items() if what[0].size != size}

    def quarantine(self, size: int, reason: Reason, detail: str, max_failures: int) -> None:
        """Note a failed capture: the size stays eager for a while, and for good after ``max_failures``.

        What rebinds its own state is tried again at once, since it may do so in its first call alone, and then ever
        more rarely, since no guard tells when it no longer does.
        """
        before = self.failures.get(size)
        count = before.times + 1 if before else 1
        rebinds = reason is Reason.STATE_REBOUND
        tries = count - rebinds
        wait = _FIRST_RETRY * 4 ** (tries - 1) if tries else 1
        is_final = count >= max_failures and not rebinds
        retry_at = None if is_final else self.sightings[size] + wait
        self.failures[size] = Failure(count, retry_at, reason, detail)

    def blocked(self, size: int) -> Failure | None:
        """The failure that keeps ``size`` from being captured now, if any."""
        failure = self.failures.get(size)
        if failure is None or (failure.retry_at is not None and self.sightings[size] >= failure.retry_at):
            return None
        return failure

    def warn_of(self, entry: CUDAGraphEntry, rows: int, detail: str) -> None:
        """Say aloud that a graph which has served calls is wrong: their answers may have been wrong too."""
        shapes = ", ".join(f"{spec.name} {spec.sized(rows)} {spec.dtype}" for spec in self.inputs.specs)
        _log.warning("%r served calls and no longer agrees with eager: %s; inputs: %s", entry, detail, shapes)

    def needs_check(self, entry: CUDAGraphEntry, values: Sequence[Any], rows: int) -> bool:
        """Whether this batch must be compared with eager before the entry serves it: the second one, the first that is
        padded, one smaller than all before, one after a replay that failed, and one in every ``verify_every``."""
        if not entry.may_pad(rows) or entry.replay_count >= entry.verify_at:
            return True
        return entry.state is EntryState.FAILED or (entry.state is EntryState.CAPTURED and self.differs(entry, values))

    def keep_example(self, values: Sequence[Any]) -> None:
        """Keep two rows of a call, so that further sizes can be captured when none is under way."""
        if not self.example:
            self.example = self.resized(values, 2)

    def differs(self, entry: CUDAGraphEntry, values: Sequence[Any]) -> bool:
        """Whether a batch is another one than that with which the entry was captured (yes, if that was not kept)."""
        comparable = False
        for now, then in zip(values, entry.warm_batch, strict=False):
            if isinstance(then, torch.Tensor):
                comparable = True
                if not bits_equal(now, then):
                    return True
        return not comparable

    def resized(self, values: Sequence[Any], rows: int, *, shift: int = 0) -> list[Any]:
        """The example's rows repeated, from row ``shift`` on, until there are ``rows`` of them."""
        sized = list(values)
        for spec in self.inputs.specs:
            if spec.dim is not None:
                tensor = values[spec.position]
                count = tensor.shape[spec.dim]
                index = (torch.arange(rows, device=tensor.device) + shift) % count
                taken = tensor.index_select(spec.dim, index)
                sized[spec.position] = _with_order(taken, spec.order)
        return sized


def _with_order(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The same values, with dimensions lying in memory from slowest to fastest as ``order`` says."""
    back = sorted(range(len(order)), key=lambda d: order[d])
    return tensor.permute(order).contiguous().permute(back)


class Form:
    """One spelling of calls, with the groups that such calls have made; the latest used is tried first."""

    def __init__(self, form: CallSpec, first: GraphGroup) -> None:
        self.form = form
        self.groups = [first]
        self.use(first)

    def use(self, group: GraphGroup) -> None:
        """Try ``group`` first from now on."""
        # One assignment, since hits read it without a lock. The second value tells whether a call's values are its
        # leaves just as it spells them, so that a hit need not sort or flatten.
        self.latest = (group, self.form.order is None and group.caller.is_flat)

    def find(self, values: Sequence[Any]) -> tuple[GraphGroup, list[Any], int] | None:
        """The group that fits a call, with the call's leaves and rows."""
        for group in self.groups:
            leaves = group.caller.flatten(values)
            if leaves is not None and (rows := group.signature.match(leaves)) >= 0:
                return group, leaves, rows
        return None
