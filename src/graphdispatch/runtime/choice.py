"""What becomes of a call that is no hit: the choice, made of what is there. It changes nothing and runs nothing."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..modes import EntryState
from ..reasons import Reason
from .decide import Decision
from .entry import CUDAGraphEntry
from .graph_set import GraphSet
from .group import GraphGroup
from .parts import Parts, find_parts


class Choice(NamedTuple):
    """What to do with a call: by its decision's reason, capture it, compare or replay ``entry``, or run eagerly."""

    decision: Decision
    group: GraphGroup | None = None
    leaves: Sequence[Any] = ()
    size: int = 0
    """The size whose graph would serve the call; 0 if none can."""
    entry: CUDAGraphEntry | None = None
    matched: int = 0
    """What the signature counts, by which hits are found: the rows, or the plain number of the lengths. The decision's
    ``rows`` has an ``Extents`` in place of that, and the size of the graph where the call has no rows."""
    parts: Parts | None = None
    """The parts in which it is served; None where it is not."""

    @property
    def trains(self) -> bool:
        """Whether a graph would serve the call, and what it reads may have to be differentiated."""
        entries = [part.entry for part in self.parts.parts] if self.parts is not None else [self.entry]
        return any(entry is not None and entry.trains for entry in entries)

    def not_served(self, reason: Reason, detail: str = "") -> "Choice":
        """The choice that no graph serves the call: by the reason it is captured, compared, or runs eagerly."""
        return self._replace(decision=Decision.eager(reason, self.decision.rows, detail))


def choose(graphs: GraphSet, group: GraphGroup, leaves: Sequence[Any], matched: int) -> Choice:
    """What to do with a call of a group.

    Args:
        graphs: Those of the callable.
        group: The group whose signature the call fits.
        leaves: The flat values of the call. The licence may compare them with a batch that it keeps.
        matched: The number of rows as the signature has it.
    """
    decision = group.decide(matched)
    if decision.is_eager:
        choice = Choice(decision, group, leaves, matched=matched)
        return _in_parts(group, choice) if decision.reason is Reason.ABOVE_LARGEST_SIZE else choice
    entry = group.current(decision.size)
    choice = Choice(decision, group, leaves, decision.size, entry, matched)
    if entry is None:
        return choice.not_served(*_without_graph(graphs, group, decision.size))
    reason, detail = _against_replay(graphs, group, leaves, decision.rows, entry)
    if reason is None:
        return choice._replace(decision=decision._replace(mode=entry.mode))
    return choice.not_served(reason, detail)


def _in_parts(group: GraphGroup, choice: Choice) -> Choice:
    """The choice to serve a batch that no graph can serve alone in parts; else as it was, with the reason."""
    decision, parts = choice.decision, find_parts(group, choice.decision.rows)
    if isinstance(parts, Parts):
        if parts.may_serve(choice.leaves) and parts.entry.fits_modes():
            return choice._replace(decision=parts.decision, entry=parts.entry, parts=parts)
        parts = "the call is unlike those that were compared, or a mode is active"
    detail = f"{decision.detail}; not in parts: {parts}" if parts else decision.detail
    return choice._replace(decision=decision._replace(detail=detail))


def _without_graph(graphs: GraphSet, group: GraphGroup, size: int) -> tuple[Reason, str]:
    """What becomes of a call without a graph, in a word and in detail."""
    reason, detail = admit(graphs, group, size)
    if reason is Reason.CAPTURED_NOW:
        reason, detail = _reason_to_wait(graphs, group, None, size) or (reason, detail)
    if reason is Reason.FIRST_SIGHTING and (failure := group.failures.get(size)) is not None:  # of a prewarm
        return failure.reason, failure.detail
    if reason is Reason.FIRST_SIGHTING and group.is_of_constant and not group.has_only_other_states(size):
        return (Reason.CONSTANT_CHANGES if len(graphs.owned) > graphs.max_groups else reason), group.unlike
    if reason in (Reason.FIRST_SIGHTING, Reason.CAPTURE_WAITS) and (about := _about_others(graphs, group, size)):
        by = "this one is captured when it comes again, or by prewarm()"
        detail = f"{detail}; {about}" if reason is Reason.CAPTURE_WAITS else f"{about}; {by}"
    return reason, detail


def _about_others(graphs: GraphSet, group: GraphGroup, size: int) -> str:
    """Which graphs there are or were that do not fit a call without a graph; empty if there are none."""
    if group.has_only_other_states(size):
        return f"its graphs are of another state of the callable ({graphs.latest_change})"
    if group.entries:
        return ""
    had_graphs = any(one.is_prewarmed or one.past_replays for one in group.route.groups)
    if had_graphs and graphs.latest_change and not graphs.entries():
        return f"its graphs are gone, since the callable changed ({graphs.latest_change})"
    return group.unlike


def admit(graphs: GraphSet, group: GraphGroup, size: int) -> tuple[Reason, str]:
    """Whether a call whose size has no graph may be captured: ``CAPTURED_NOW``, or why it runs eagerly."""
    if not group.route.captures or group.route.entry is not None:
        return Reason.NOT_CAPTURED, ""
    failure = group.blocked(size)
    if failure is not None:
        return failure.reason, failure.detail
    if not group.looked_at and len(graphs.owned) > graphs.max_groups:
        return Reason.FIRST_SIGHTING, ""
    if graphs.cache.is_frozen:
        return Reason.FROZEN, ""
    return graphs.cache.admit((group.key, size)), ""


def _reason_to_wait(
    graphs: GraphSet, group: GraphGroup, entry: CUDAGraphEntry | None, size: int
) -> tuple[Reason, str] | None:
    """Why there is no time to capture ``size`` now, or to compare ``entry``; None if there is. With ``capture_after=1``
    captures are wanted at once.

    Where captures of such calls have only failed, that is the reason.
    """
    if graphs.cache.admission.capture_after == 1:
        return None
    if graphs.calls_until_time(group, entry, size) <= 0:
        return None
    if entry is None and (failure := group.latest_failure) is not None:
        return failure.reason, failure.detail
    waits = Reason.CAPTURE_WAITS
    remedy = "raise capture_share" if group.is_prewarmed and entry is not None else waits.remedy
    sentence = waits.sentence if entry is None else "there is no time to compare the graph for such a batch yet"
    return waits, f"{sentence}; {remedy}"


def _against_replay(
    graphs: GraphSet, group: GraphGroup, leaves: Sequence[Any], rows: int, entry: CUDAGraphEntry
) -> tuple[Reason | None, str]:
    """Why a call does not replay the graph of its size, if there is a reason; None and nothing if it does."""
    if group.route.entry is not None and not entry.is_current():
        return Reason.ADDRESS_CHANGED, ""
    if (clash := entry.plan(rows).clash(leaves)) is not None:
        return Reason.ALIASED_ARGUMENTS, clash
    gain = group.gain if group.gain is not None and rows not in group.gain.in_doubt else None
    if gain is not None and (loss := gain.loss(entry, rows)):
        return Reason.NO_GAIN, loss
    try:
        verdict = entry.licence.verdict(entry, leaves, rows)
    except RuntimeError as error:  # it may look at batches on the device
        entry.backend.raise_if_lost(error)
        raise
    if verdict[0] is Reason.VERIFIED_NOW:
        if graphs.cache.is_frozen:
            return Reason.FROZEN, ""
        is_wanted = entry.is_due_again or entry.state is EntryState.FAILED  # now, whatever it takes
        return verdict if is_wanted else _reason_to_wait(graphs, group, entry, entry.size) or verdict
    return verdict if verdict[0] is not None or entry.fits_modes() else (Reason.MODE_ACTIVE, "")
