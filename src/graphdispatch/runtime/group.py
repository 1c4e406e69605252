"""Graph groups: all graphs of one signature, the static inputs that they share, and the calls that lead to them."""

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from ..backends.base import Backend
from ..descriptors import BatchDescriptor
from ..reasons import Reason
from ..sizes import Extents
from .admission import Failure, Quarantine, Work
from .decide import Decision, SizeTable, descriptor_of
from .entry import CUDAGraphEntry
from .flatten import FlatCall
from .gain import GainJudge
from .parts import Parts, find_parts
from .protocols import Guard, PerCall
from .replay import ReplayPlan
from .rules import ArgumentRules
from .signature import Signature
from .static_inputs import StaticInputs

_log = logging.getLogger("graphdispatch")
MOST_ROUTES = 16384
"""A front end keeps so many routes by its own keys; when there are more, all are made anew."""
_MOST_HITS = 8192
_MOST_STATES = 8
_ALL_LOOKED_AT, ALL_UNMATCHED = 8, 40
"""So many calls in a row are looked at though each ran eagerly; and of those that fit no group."""
_AGAINST_CONSTANTS = (
    "needs a graph for each value: pass it as a tensor, or raise max_signatures if the values come again"
)
MOST_IN_A_ROW = 1024
"""So many calls run eagerly without a look, at most."""


@dataclass(eq=False, slots=True)
class Route:
    """Calls of a front end that share a table of sizes: which sizes serve them, and how their arguments are read.

    A front end makes a route once and gives it to the server with each call. Changed only with the server's lock held.
    """

    key: Hashable
    """The front end's name for it, unique there."""
    table: SizeTable
    """The decisions for each number of rows."""
    rules: ArgumentRules | None = None
    """The user's rules for the arguments; None: every argument is static (``inputs="static"``)."""
    _: KW_ONLY
    descriptor: BatchDescriptor | None = None
    """What its graphs serve, where the front end names them; None: by their sizes."""
    seq_len: int | None = None
    """The tokens of each request, where the front end names graphs by batch size and sequence length."""
    entry: CUDAGraphEntry | None = None
    """The only graph of the route, where somebody else captured it; None where the server captures."""
    is_single: bool = False
    """Whether only the calls like the first one are served; others are odd."""
    captures: bool = True
    """Whether the server captures what comes often, unless there is ``entry``; else only the front end does."""
    forms: "dict[tuple[Any, ...], tuple[GraphGroup, ...]]" = field(init=False, default_factory=dict)
    """The groups of the calls that came, by the number of positional arguments and the keywords: the latest found
    first. Hits read it without a lock."""
    unmatched: "dict[tuple[Any, ...], StayEager]" = field(init=False, default_factory=dict)
    """The same for calls that fit no group again and again, or that need gradients."""

    def unlike_others(self, group: "GraphGroup", leaves: Sequence[Any]) -> str:
        """In what a new call differs from those for which there are graphs, in words; empty if there are none."""
        form = group.call.spec.key
        others = sorted((one for one in self.groups if one.entries), key=lambda one: one.call.spec.key != form)
        if not others:
            return ""
        names, known = ([leaf.path for leaf in one.call.leaves] for one in (group, others[0]))
        if added := [name for name in names if name not in known]:
            what = f"argument {added[0]!r} must be left out"
        elif lacking := [name for name in known if name not in names]:
            what = f"argument {lacking[0]!r} must be given"
        elif others[0].call.spec.key != form:
            what = f"the arguments given by name must be: {', '.join(others[0].call.spec.keywords) or 'none'}"
        else:
            what = others[0].signature.difference(leaves)
        return f"there are graphs for other calls ({what})"

    def descriptor_of(self, size: int) -> BatchDescriptor:
        """What the graph of ``size`` serves."""
        if self.seq_len is not None:
            return BatchDescriptor(size * max(self.seq_len, 1), size, self.seq_len == 1)
        return self.descriptor or descriptor_of(size)

    def name_of(self, size: int) -> Hashable:
        """The front end's name for the graph of ``size``, the ``key`` of its entry: a descriptor, rows, or lengths."""
        if self.seq_len is not None:
            return size, self.seq_len
        return self.descriptor or (size.lengths if isinstance(size, Extents) else size)

    @property
    def serves_parts(self) -> bool:
        """Whether batches may be served in parts: not where the front end names what a graph serves, or has no sizes to
        pad to."""
        return self.entry is None and self.descriptor is None and self.seq_len is None and self.table.pads

    @property
    def groups(self) -> list["GraphGroup"]:
        """The groups of all forms of calls."""
        return [group for groups in list(self.forms.values()) for group in groups]

    def group_of(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> "tuple[GraphGroup, Sequence[Any], int] | None":
        """The group that fits a call, with the call's leaves and rows; it is tried first from now on."""
        groups = self.forms.get((len(args), *kwargs), ())
        values = groups[0].call.spec.values(args, kwargs) if groups else ()
        for group in groups:
            leaves, signature = group.call.flatten(values), group.signature
            if leaves is not None and (rows := (signature.native or signature).match(leaves)) >= 0:
                self.put_first(group)
                return group, leaves, rows
        return None

    def put_first(self, group: "GraphGroup") -> None:
        """Try a group first for calls of its form; a new one, too."""
        key = group.call.spec.key
        if (groups := self.forms.get(key, ()))[:1] != (group,):
            self.forms[key] = (group, *(other for other in groups if other is not group))

    def remove(self, group: "GraphGroup") -> None:
        """Forget a group. A hit that still reads it finds that it serves nothing."""
        key = group.call.spec.key
        others = tuple(other for other in self.forms.get(key, ()) if other is not group)
        if others:
            self.forms[key] = others
        else:
            self.forms.pop(key, None)


class Hit(NamedTuple):
    """What a hit needs, made once for a number of rows."""

    entry: CUDAGraphEntry
    plan: ReplayPlan | Parts
    """What it executes: by this graph, or in parts of which it serves the first."""
    decision: Decision
    guard: Guard | None
    """What must be as it was at the capture; None if nobody guards it."""
    per_call: PerCall | None
    """What must be looked at in each call besides; None for nearly all."""


@dataclass(eq=False, slots=True)
class Countdown:
    """Calls that ran eagerly again and again for one reason: so many more of them do so without another look.

    Each time that one is looked at and nothing has changed, twice as many follow that are not.
    """

    decision: Decision
    """The latest."""
    all_looked_at: int
    """The first ones in a row are all looked at."""
    left: int = 0
    """How many more are not looked at. Changed without a lock."""
    times: int = 0
    """How often in a row some were looked at."""

    def again(self, decision: Decision, most: float = math.inf) -> None:
        """Note that a call was looked at, and runs eagerly.

        Args:
            decision: What was decided.
            most: So many calls may follow that are not looked at; if that is finite, they do at once.
        """
        self.times = self.times + 1 if decision.reason is self.decision.reason else 1
        self.decision = decision
        doublings = min(self.times - self.all_looked_at, 16)
        wanted = most if most < math.inf else 1 << doublings if doublings > 0 else 0
        self.left = int(min(wanted, MOST_IN_A_ROW))


@dataclass(frozen=True, eq=False, slots=True)
class StayEager:
    """What calls find in the place of a hit that run eagerly without another look, until the countdown has ended."""

    decision: Decision
    countdown: Countdown
    group: Any = None
    """The ``GraphGroup`` of the calls; None where they fit none."""
    matched: int = 0
    """Their number of rows, as the signature has it."""
    size: int = 0
    """Whose graph would serve them; 0 if none can."""
    timed_in: "GraphGroup | None" = None
    """The group, if a graph may serve them once it is known to be faster."""


class Hits(dict[int, Hit | StayEager | None]):
    """The hits of a group by number of rows; ``hits[rows]`` is None where a call of so many must be looked at.

    A hit is made at its first lookup, by any thread, without a lock.
    """

    __slots__ = ("_group",)

    def __init__(self, group: "GraphGroup") -> None:
        super().__init__()
        self._group = weakref.ref(group)  # so that a group that was dropped ends at once, with what it holds

    def __missing__(self, rows: int) -> Hit | StayEager | None:
        group = self._group()
        hit = (group.make_hit(rows) or group.wait_like_others(rows)) if group is not None else None
        if hit is not None:
            self.keep(rows, hit)
            if isinstance(hit, Hit) and (hit.guard is not hit.entry.guard or hit.entry.is_released):
                # Another thread has given the entry a guard of more, or released it, and cleared these.
                self.pop(rows, None)
                return None
        return hit

    def keep(self, rows: int, hit: Hit | StayEager) -> None:
        """What calls of so many rows find from now on."""
        if len(self) >= _MOST_HITS:
            self.clear()
        self[rows] = hit


@dataclass(eq=False, slots=True, weakref_slot=True)
class GraphGroup:
    """The graphs of one signature, by size. Changed only with the server's lock held; ``hits`` is read without it."""

    key: Hashable
    route: Route
    call: FlatCall
    signature: Signature
    inputs: StaticInputs
    failures: Quarantine
    entries: dict[int, tuple[CUDAGraphEntry, ...]] = field(default_factory=dict)
    """By size, the entries of all states of the callable: first the one that served last, or was captured last."""
    misses: Counter[int] = field(default_factory=Counter)
    """By size, the calls that no graph served; they are the clock of ``failures``. Counted without the lock, too."""
    past_replays: int = 0
    """The replays of entries that are gone."""
    looked_at: int = 0
    """When the latest call was looked at, in uses (``next_use``); 0 before the first."""
    is_of_constant: bool = False
    """Whether its first call differed from the one before it in constants alone."""
    unlike: str = ""
    """In what its first call differed from those for which there were graphs, or in which constant, in words."""
    _: KW_ONLY
    backend: Backend
    is_prewarmed: bool = False
    gain: GainJudge | None
    """Which batches its graphs serve faster than eager; None where they serve all."""
    looks: dict[tuple[Reason, int], Countdown] = field(default_factory=dict)
    """By reason, and by size where its capture failed, the calls of all numbers of rows that ran eagerly since the
    latest graph was made."""
    hits: Hits = field(init=False)

    def __post_init__(self) -> None:
        self.hits = Hits(self)

    @property
    def is_idle(self) -> bool:
        """Whether there is neither a graph that was not evicted nor a failure to remember."""
        return not len(self.failures) and all(entry.is_released for entry in self.all_entries)

    @property
    def last_used(self) -> int:
        """When the latest call came, with or without a graph, in uses."""
        return max((self.looked_at, *(entry.last_used for entry in self.all_entries)))

    @property
    def all_entries(self) -> list[CUDAGraphEntry]:
        """The entries of all sizes and states."""
        return [entry for entries in list(self.entries.values()) for entry in entries]

    @property
    def num_replays(self) -> int:
        """Calls of all sizes that a graph served."""
        return self.past_replays + sum(entry.replay_count for entry in self.all_entries)

    def changed_constant(self, values: Sequence[Any]) -> str:
        """In which constant a call of its form differs from its own calls, in words; empty if it differs in more."""
        leaves = self.call.flatten(values)
        found = self.signature.changed_constant(leaves) if leaves is not None else ""
        return f"{found}, which {_AGAINST_CONSTANTS}" if found else ""

    def decide(self, rows: int) -> Decision:
        """The decision for a call of ``rows`` rows that fits the signature."""
        return self.route.table.decide(rows) if self.signature.has_rows else self.route.table.fixed

    def has_several_batches(self, size: int) -> bool:
        """Whether batches are padded to ``size``, or there are graphs of other sizes."""
        table = self.route.table
        pads = table.pads and table.min_batch_of(size) != size
        return self.signature.has_rows and (pads or len(table.sizes) > 1)

    def make_hit(self, rows: int) -> Hit | StayEager | None:
        """The hit of calls of ``rows`` rows, if a graph may serve them by hits, or that they run eagerly, if the graph
        is slower; needs no lock. None is made where a capture would take what that does for operators of its own."""
        if rows < 0 or self.backend.is_watched():
            return None
        decision = self.decide(rows)
        if decision.reason is Reason.ABOVE_LARGEST_SIZE:
            parts = find_parts(self, decision.rows)
            if isinstance(parts, str):
                return None
            return Hit(parts.entry, parts, parts.decision, parts.entry.guard, parts.may_hit)
        entries = () if decision.is_eager else self.entries.get(decision.size, ())
        if not entries or not entries[0].licence.may_hit(entries[0], decision.rows):
            return None
        entry = entries[0]
        if self.gain is not None and not self.gain.may_hit(entry, decision.rows):
            loss = self.gain.sure_loss(entry, decision.rows)
            eager = Decision.eager(Reason.NO_GAIN, decision.rows, loss)
            return self._stays(eager, rows, decision.size, _ALL_LOOKED_AT) if loss else None
        per_call = entry.per_call(decision.rows)
        return Hit(entry, entry.plan(decision.rows), decision._replace(mode=entry.mode), entry.guard, per_call)

    def work_for(self, entry: CUDAGraphEntry | None, size: int) -> Work:
        """What a call would pay for that compares this entry, or captures one of ``size`` where there is none."""
        if entry is not None:
            return Work.COMPARISON
        is_single = 1 in (size.lengths if isinstance(size, Extents) else (size,))
        return Work.FURTHER if self.entries and not is_single else Work.FIRST

    def wait_like_others(self, rows: int) -> StayEager | None:
        """What a call of ``rows`` rows finds where the first capture of all waits for time, so that no other batch need
        be looked at either; needs no lock."""
        others = self.looks.get((Reason.CAPTURE_WAITS, 0))
        if others is None or others.left <= 0 or self.entries or rows < 0:
            return None
        decision, detail = self.decide(rows), others.decision.detail
        if decision.is_eager:
            return None
        return self._stays(Decision.eager(Reason.CAPTURE_WAITS, decision.rows, detail), rows, decision.size)

    def _stays(self, decision: Decision, rows: int, size: int, left: int = 0) -> StayEager:
        """What calls of a batch find; ``left`` of these are not looked at, if it is the first for its reason."""
        kind = decision.reason, size if size in self.failures else 0
        countdown = self.looks.setdefault(kind, Countdown(decision, _ALL_LOOKED_AT, left))
        may_serve = decision.reason in (Reason.NO_GAIN, Reason.CAPTURE_WAITS)
        return StayEager(decision, countdown, self, rows, size, self if may_serve else None)

    def keep_eager(self, rows: int, size: int, decision: Decision, most: float) -> None:
        """Note that a call was looked at and runs eagerly: the next ones may do so without a look.

        Args:
            rows: Its number of rows, as the signature has it.
            size: Whose graph would serve it; 0 if none can.
            decision: What was decided.
            most: So many calls may follow that are not looked at.
        """
        stays = self._stays(decision, rows, size)
        stays.countdown.again(decision, most)
        self.hits.keep(rows, stays)

    def look_again(self, stays: StayEager) -> None:
        """Have the next call of these looked at. A graph that was slower is then timed once more."""
        self.hits.pop(stays.matched, None)
        is_slower = stays.decision.reason is Reason.NO_GAIN
        if self.gain is not None and is_slower and stays.countdown.times > _ALL_LOOKED_AT:
            self.gain.in_doubt.add(stays.decision.rows)
            stays.countdown.again(stays.decision)

    def timed(self, fn: Callable[..., Any], rows: int) -> Callable[..., Any]:
        """The callable, such that what it takes for a batch is noted, if that is of interest. Needs no lock."""
        gain = self.gain
        return gain.timed(fn, rows) if gain is not None and gain.wants(rows) and self.latest_failure is None else fn

    @property
    def latest_failure(self) -> Failure | None:
        """Why captures of such calls failed, if all did so far."""
        return None if self.entries or not self.failures else next(reversed(self.failures.values()))

    def current(self, size: int) -> CUDAGraphEntry | None:
        """The entry of ``size`` whose state is the present one, if there is one. Changes nothing."""
        is_foreign = self.route.entry is not None  # whose state ``choose`` compares
        for entry in self.entries.get(size, ()):
            if not entry.is_released and (is_foreign or entry.is_current()):
                return entry
        return None

    def has_only_other_states(self, size: int) -> bool:
        """Whether there are graphs of ``size``, and all of them are of another state of the callable."""
        return bool(self.entries.get(size, ())) and self.current(size) is None

    def use(self, entry: CUDAGraphEntry, matched: int) -> None:
        """Serve by ``entry`` first from now on, since the present state is that of its capture.

        Args:
            entry: An entry of the group.
            matched: The rows of the call that it fits, as the signature has them. If a thread has meanwhile kept a hit
                for these of another state, or with a former guard, that goes.
        """
        self._put_first(entry)
        hit = self.hits.get(matched)
        if isinstance(hit, Hit) and (hit.entry is not entry or hit.guard is not entry.guard):
            self.hits.pop(matched, None)
        if entry.guard is not None:
            entry.guard.is_broken = False

    def keep(self, entry: CUDAGraphEntry) -> tuple[CUDAGraphEntry, ...]:
        """Serve by ``entry`` from now on, as soon as it is verified. Returns what is one too many of its size."""
        self._put_first(entry)
        self.failures.pop(entry.size, None)
        self.hits.clear()
        self.looks.clear()
        return self.entries.get(entry.size, ())[_MOST_STATES:]

    def _put_first(self, entry: CUDAGraphEntry) -> None:
        kept = self.entries.get(entry.size, ())
        if kept[:1] != (entry,):
            self.entries[entry.size] = (entry, *(other for other in kept if other is not entry))
            self.hits.clear()

    def drop(self, entry: CUDAGraphEntry) -> None:
        """Forget an entry, if it is one of the group's."""
        size = entry.size
        if entry in self.entries.get(size, ()):
            self.past_replays += entry.replay_count
            kept = tuple(other for other in self.entries.pop(size) if other is not entry)
            if kept:
                self.entries[size] = kept
            self.hits.clear()

    def quarantine(self, size: int, reason: Reason, detail: str, *, is_final: bool = False) -> None:
        """Note a failed capture: the size stays eager for a while, or for good."""
        self.failures.fail(size, self.misses[size], reason, detail, is_final=is_final)

    def blocked(self, size: int) -> Failure | None:
        """The failure that keeps ``size`` from being captured at the next call, if any."""
        return self.failures.blocked(size, self.misses[size] + 1)

    def against_padding(self, entries: Iterable[CUDAGraphEntry] | None = None) -> list[tuple[Reason, str]]:
        """Why batches are not padded to sizes that have graphs (None: all graphs), as far as that is shown. Needs no
        lock."""
        table, entries = self.route.table, self.all_entries if entries is None else entries
        if not (self.signature.has_rows and table.pads and self.route.entry is None):
            return []
        found = (entry.licence.against_padding(table.min_batch_of(entry.size)) for entry in entries)
        return [why for why in found if why is not None]

    def warn_of(self, entry: CUDAGraphEntry, rows: int, detail: str) -> None:
        """Say aloud that a graph which has served calls is wrong: their answers may have been wrong too."""
        shapes = ", ".join(f"{spec.name} {spec.sized(rows)} {spec.dtype}" for spec in self.inputs.specs)
        _log.warning("%r served calls and no longer agrees with eager: %s; inputs: %s", entry, detail, shapes)
