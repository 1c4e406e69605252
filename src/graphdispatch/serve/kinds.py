"""Call signatures: which one gives way to a new one, and whether they change too much to be worth graphs."""

import random
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ..call.signature import Refusal, Signature
from ..decide.decision import Decision
from ..memory.backoff import Backoff
from ..memory.replay import next_use
from ..reasons import Reason
from .hits import Standing

if TYPE_CHECKING:
    from .group import GraphGroup, Spelling
    from .ledger import Ledger
    from .server import Server

__all__ = ["Changes", "Kinds"]

_PATIENCE = Backoff(first=16, factor=2, most=4096)  # refused calls until an unused kind gives way
_SAMPLE = 64  # new kinds, after which those that are kept are looked at
_FEWEST = 4
_REST = 1024  # calls of new kinds that then run eagerly
_REMEDIES = {
    "constant": "had other values; pass it as a tensor",
    "object": "was another object; pass the same one, or tensors and constants",
    "shape": "had other shapes; name the dimension in dynamic=, or pad it to few lengths",
    "address": "was another tensor; copy into the same one, or do not name it in static=",
}


class Kinds:
    """Chooses which group gives way to a new one at the limit. Called with the server's lock held."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._calls: dict[GraphGroup, int] = {}
        self._gone = 0  # groups that gave way before they had a graph
        self._refused = 0
        self._replaced = 0

    def leaving(self, groups: Collection["GraphGroup"]) -> "GraphGroup | None":
        """The group that gives way, or None if none does now.

        One without graphs goes first. Which one is left to chance: by age, a cycle over more signatures than the limit
        would drop each of them just before it comes again. One whose capture failed stays, or it would be captured in
        vain without end. If there is none, a group goes that had no call while 16 calls were refused (32, 64, ... after
        each that went so), the least recently used of them.
        """
        idle = [group for group in groups if not (group.has_graphs or len(group.failures))]
        if idle:
            self._gone += 1
            return self._random.choice(idle)
        if not self._refused:
            self._calls = {group: group.num_calls for group in groups}
        self._refused += 1
        if self._refused <= _PATIENCE.wait(self._replaced + 1):
            return None
        unused = [group for group in groups if self._calls.get(group) == group.num_calls]
        self._refused, self._calls = 0, {}
        if not unused:
            return None
        self._replaced += 1
        return min(unused, key=lambda group: max((entry.last_used for entry in group.all_entries), default=0))

    def refusal(self, spelling: "Spelling", server: "Server") -> Refusal | None:
        """Why a call of this form with a new signature gets no group since such calls always change; or None.

        Where graphs do not pay, it is enough that signatures make others give way before they have a graph. As soon as
        that is found, the groups that serve nothing are forgotten, but for the latest. After 1,024 such calls the next
        64 are examined.
        """
        resting = spelling.resting
        if resting is not None and resting.misses[0] < resting.until:
            resting.misses[0] += 1
            next_use()
            return Refusal(resting.decision.reason, resting.decision.detail)
        if spelling.changes is None:
            spelling.changes = Changes()
        spelling.resting, refusal = None, spelling.changes.refusal(spelling.groups, self._gone, server.graphs.ledger)
        if refusal is not None:
            route, decision = spelling.groups[-1].route, Decision.eager(refusal.reason, detail=refusal.detail)
            spelling.resting = Standing(route, Counter({0: 1}), 0, decision, 0, _REST, server.core_of(route))
            for group in [one for one in spelling.groups[:-1] if not (one.has_graphs or len(one.failures))]:
                server.forget(group)
        return refusal


class Changes:
    """Counts the new signatures among the calls of one form. Called with the server's lock held."""

    def __init__(self) -> None:
        self._new = 0
        self._gone = 0

    def refusal(self, groups: Sequence["GraphGroup"], gone: int, ledger: "Ledger") -> Refusal | None:
        """Why a call of a new signature gets no group, or None.

        Of the ``groups`` that 64 new signatures left, at least 4 and three in four were called once; or graphs do not
        pay, and as many of the 64 made a group give way (``gone`` in all).
        """
        self._new = (self._new + 1) % _SAMPLE
        if self._new:
            return None
        gone, self._gone = gone - self._gone, gone
        are_in_vain = gone >= 0.75 * _SAMPLE and ledger.misses_that_pay() > 0
        if not are_in_vain and sum(group.num_calls < 2 for group in groups) < max(0.75 * len(groups), _FEWEST):
            return None
        return Refusal(Reason.SIGNATURE_CHANGES, f"{Reason.SIGNATURE_CHANGES.text}{_what_changes(groups)}")


def _what_changes(groups: Sequence["GraphGroup"]) -> str:
    """The arguments that were another each time, as far as that is clear, and what to do about each."""
    latest = groups[-1]
    alike = [group for group in groups if group.call.leaves == latest.call.leaves]
    parts = [_parts_of(group.signature) for group in alike]
    text = ""
    for place, leaf in enumerate(latest.call.leaves):
        found = {one[place] for one in parts if place in one}
        if 2 * len(found) > len(alike) > 1:
            text += f"; argument {leaf.path!r} {_REMEDIES[parts[-1][place][0]]}"
    return text


def _parts_of(signature: Signature) -> dict[int, tuple[str, Any]]:
    """By place, what a value must be, in the words of ``_REMEDIES``, and which."""
    parts: dict[int, tuple[str, Any]] = {}
    for place, kind, _, exact in signature._constants:
        parts[place] = "constant", (kind, exact)
    parts |= {place: ("object", id(held)) for place, held in signature._objects}
    parts |= {place: ("shape", (form.shape, form.order, form.dtype)) for place, form in signature._forms.items()}
    return parts | {place: ("address", address) for place, address in signature._addresses}
