"""The one server behind every front end: everything that happens to a call that is no hit.

A front end translates its caller's terms into a ``Route`` and passes the call on; it guarantees nothing of its own.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ..backends import Backend, Pool
from ..backends.modes import function_modes, is_transformed, trace, transform
from ..call.rules import callable_name
from ..call.signature import PLAIN_TENSORS, Refusal
from ..call.spec import VALUES, CallSpec, leaves_of
from ..capture.request import CaptureResult
from ..config import CUDAGraphOptions
from ..decide.decision import Decision
from ..decide.size_table import SizeTable
from ..errors import ConfigError, FallbackError, ReplayError
from ..memory.cache import GraphCache
from ..memory.entry import CUDAGraphEntry
from ..memory.replay import next_use
from ..memory.verification import MOST_ALIKE
from ..memory.windows import WINDOWS, storages_of
from ..reasons import Reason
from ..state.guards import StateGuard, wants_gradient
from ..stats import EvictionReason
from .graphs import FIRST_CALLS, GraphSet, Health
from .group import GraphGroup, Route, Spelling
from .hit import HitPath
from .other_batches import compare, settle

_log = logging.getLogger("graphdispatch")


class Choice(NamedTuple):
    """What to do with a call: by its decision's reason, capture it, compare or replay ``entry``, or run eagerly."""

    decision: Decision
    group: GraphGroup | None = None
    leaves: Sequence[Any] = ()
    rows: int = 0
    size: int = 0
    """The size whose graph would serve the call; 0 if none can."""
    entry: CUDAGraphEntry | None = None

    @property
    def kind(self) -> Hashable:
        """What kind of work a capture or comparison is: those that prove something take longer than others."""
        entry = self.entry
        if entry is None:
            return self.decision.reason
        return self.decision.reason, entry.state, entry.proof is None and self.decision.rows != entry.size

    def explain(self) -> str:
        """One line for a person: the decision, what the graph gains, and what it consists of where that is more than
        one launch."""
        parts = [self.decision.explain()]
        if self.entry is not None and self.decision.mode.has_graphs():
            parts += [f"{self.entry.gain}" if self.entry.gain is not None else "", self.entry.graph.describe()]
        return "; ".join(filter(None, parts))


class Server(HitPath):
    """Serves the calls of ``fn`` by its graphs, and eagerly what no graph can serve; each call with a reason.

    At most ``max_groups`` signatures are kept, unless the options have another number; the least recently used one
    gives way to a new one. With ``eager_captures`` a key is captured at its first miss while the cache has room.
    ``strict`` raises ``FallbackError`` instead of an eager step. Thread-safe: a hit takes no lock but its pool's;
    ``choose`` and what it calls are called with ``lock`` held.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        options: CUDAGraphOptions,
        cache: GraphCache,
        *,
        backend: Backend | None = None,
        pool: Pool | None = None,
        strict: bool = False,
        max_groups: int = 1024,
        eager_captures: bool = False,
        times_replays: bool = False,
        judges_gain: bool = False,
    ) -> None:
        self.fn = fn
        self.graphs = GraphSet(fn, options, cache, backend=backend, pool=pool)
        self.graphs.judges_gain = judges_gain
        self.stats = self.graphs.stats
        self.lock = self.graphs.lock
        self.local = threading.local()
        self.strict = strict
        self.max_groups = options.max_signatures or max_groups
        self.keeps_examples = False
        """Whether an example of each signature is kept, by which further sizes can be captured when none is served."""
        self.times_replays = times_replays
        self.logs_replays = options.debug_log_enable
        self.observes = times_replays or options.debug_log_enable
        self._eager_captures = eager_captures
        self._numbers = itertools.count()
        self._eager_calls = 0
        self._waiting: Hashable = None
        """The key of the group beyond the limit that waits for its second call."""
        self._has_fitted = False
        """Whether the rules have fitted a call; from then on, one that they do not fit is an odd call."""

    def step(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call that is no hit (yet). Raises what the callable raises, and ``FallbackError`` with ``strict``."""
        if not torch.is_grad_enabled():
            return self._step(route, args, kwargs)
        if self.needs_gradients(args, kwargs):
            return self.run_eagerly(Decision.eager(Reason.NEEDS_GRADIENTS), args, kwargs)
        with torch.no_grad():
            return self._step(route, args, kwargs)

    def _step(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closed = self.closed(route)
        if closed is not None:
            return self.run_eagerly(Decision.eager(closed), args, kwargs)
        with self.lock:
            self.graphs.refresh()
            choice = self.choose(route, args, kwargs)
            self.count(choice)
            if choice.group is not None:
                done, answer = self.perform(choice)
                if done:
                    return answer
                choice = answer
        return self.run_eagerly(choice.decision, args, kwargs)

    def choose(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        """What to do with a call. It makes the call's group if it can have one, and changes nothing else."""
        has_backend = self.graphs.backend is not None
        found = self.find(route, args, kwargs, is_call=True)
        if isinstance(found, Refusal):
            return Choice(Decision.eager(found.reason, detail=found.detail))
        group, leaves, rows = found
        decision = group.decide(rows)
        if not decision.mode.has_graphs():
            return Choice(decision, group, leaves, rows)
        rows, size = decision.rows, decision.size
        entry = self.graphs.current(group, size)
        reason, detail = None if has_backend else self.closed(route), ""
        if reason is None:
            reason, detail = self._eager_reason(group, leaves, rows, size, entry)
        if reason is None:
            assert entry is not None
            return Choice(decision.as_mode(entry.mode), group, leaves, rows, size, entry)
        choice = Choice(Decision.eager(reason, rows, detail), group, leaves, rows, size, entry)
        if reason in (Reason.CAPTURED_NOW, Reason.VERIFIED_NOW) and self._has_to_wait(choice):
            return choice._replace(decision=Decision.eager(Reason.CAPTURE_WAITS, rows))
        return choice

    def _has_to_wait(self, choice: Choice) -> bool:
        """Whether there is no time to capture or compare now.

        A graph that was not compared on a second batch waits, too, and serves nothing meanwhile. With
        ``capture_after=1`` captures are wanted at once, and ``verify_every`` wants its comparisons.
        """
        if self.graphs.cache.admission.capture_after == 1 or self.graphs.share.allows(choice.kind):
            return False
        return choice.entry is None or not choice.entry.is_due_again

    def _eager_reason(
        self, group: GraphGroup, leaves: Sequence[Any], rows: int, size: int, entry: CUDAGraphEntry | None
    ) -> tuple[Reason | None, str]:
        """Why a call does not replay the graph of its size, if there is one; None and nothing if it does."""
        if entry is None:
            reason, detail = self.admit(group, size)
            if reason is Reason.FIRST_SIGHTING and group.of_size(size):
                detail = f"{reason.text}; its graphs are of another state of the callable ({self.graphs.latest_change})"
            return reason, detail
        if group.route.entry is not None and not entry.is_current():
            return Reason.ADDRESS_CHANGED, ""
        if entry.carries(leaves):
            return Reason.STATE_UNSEEN, "an argument carries attributes that the code may read; pass them as arguments"
        if (clash := entry.plan(rows).clash(leaves)) is not None:
            return Reason.ALIASED_ARGUMENTS, clash
        try:
            objection = entry.objection(leaves, rows, is_frozen=self.graphs.is_frozen)
        except RuntimeError as error:  # it may look at batches on the device
            entry.backend.raise_if_lost(error)
            raise
        return objection if objection[0] is not None or entry.fits_modes() else (Reason.MODE_ACTIVE, "")

    def admit(self, group: GraphGroup, size: int) -> tuple[Reason, str]:
        """What becomes of a call whose size has no graph: ``CAPTURED_NOW``, or why it runs eagerly. Counts nothing."""
        if not group.route.captures:
            return Reason.NOT_CAPTURED, ""
        failure = group.blocked(size)
        if failure is not None:
            return failure.reason, failure.detail
        if not group.missed_at and self._num_groups > self.max_groups:
            return Reason.FIRST_SIGHTING, ""
        if self.graphs.is_asleep or self.graphs.is_frozen:
            return (Reason.ASLEEP if self.graphs.is_asleep else Reason.FROZEN), ""
        key, cache = (group.key, size), self.graphs.cache
        reason = cache.admit(key)
        if reason is Reason.FIRST_SIGHTING and self._eager_captures and not cache.is_full:
            return Reason.CAPTURED_NOW, ""
        return reason, ""

    def count(self, choice: Choice) -> None:
        """Note a call that took the slow path, for admission."""
        group, size = choice.group, choice.size
        if group is None:
            return
        group.missed_at = next_use()
        if not size:
            return
        group.misses[size] += 1
        if self.keeps_examples:
            group.keep_example(choice.leaves)
        if choice.entry is None and choice.decision.reason is not Reason.CAPTURED_NOW:
            self.graphs.cache.admission.count_miss((group.key, size))

    def perform(self, choice: Choice) -> tuple[bool, Any]:
        """Capture, compare or replay as chosen: True and the answer, or False and the choice to run eagerly instead.

        Called with the lock held.
        """
        group, entry, reason = choice.group, choice.entry, choice.decision.reason
        assert group is not None
        if reason is Reason.CAPTURED_NOW:
            self._give_way(group)
            capture = partial(self.graphs.capture, group, choice.leaves, choice.rows, choice.size)
            return True, self.after_eager(choice, capture)
        if entry is not None and reason is Reason.VERIFIED_NOW:
            return True, self.after_eager(
                choice, partial(compare, self.graphs, group, choice.leaves, choice.rows, entry)
            )
        if entry is None or not reason.is_graph:
            return False, choice
        try:
            answer = self.observed(entry, choice.rows, choice.leaves)
        except ReplayError as error:
            if error.had_effects:
                raise
            return False, choice._replace(decision=Decision.eager(Reason.REPLAY_FAILED, choice.rows, str(error)))
        if entry.serves_one_batch and entry.replay_count == MOST_ALIKE:
            kind = (Reason.VERIFIED_NOW, entry.state)
            self.graphs.share.pay(kind, partial(settle, self.graphs, group, choice.leaves, choice.rows, entry))
        self.local.decision = choice.decision
        return True, answer

    def find(
        self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_call: bool = False
    ) -> tuple[GraphGroup, Sequence[Any], int] | Refusal:
        """The group, leaves and rows of a call; makes the group if the call can have one.

        With ``is_call`` no group with graphs gives way to it yet: one does when it is captured.
        """
        if not route.table.sizes:
            return Refusal(route.without_sizes, "")
        key = (len(args), *kwargs)
        spelling = route.spellings.get(key)
        found = spelling.find(args, kwargs) if spelling is not None else None
        if spelling is not None and found is not None:
            if not is_call:
                self._give_way(found[0])
            spelling.use(found[0])
            return found
        spec = spelling.spec if spelling is not None else self._spec(route, args, kwargs)
        if spec is None or (route.is_single and route.spellings):
            return Refusal(Reason.ARGUMENTS_CHANGED, f"the arguments are not those of the graph for {route.key}")
        made = self._make_group(route, spec, args, kwargs)
        if isinstance(made, Refusal):
            return made
        group, leaves = made
        self._give_way(group, only_idle=is_call)
        spelling = route.spellings.get(key)  # which may have gone with its last group
        if spelling is None:
            route.spellings[key] = Spelling(spec, group)
        else:
            spelling.groups.append(group)
            spelling.use(group)
        return group, leaves, group.signature.match(leaves)

    def _give_way(self, newcomer: GraphGroup, *, only_idle: bool = False) -> None:
        """Forget groups beyond the limit: first the one that waits, then the least recently used, an idle one if any.

        One group more than the limit may wait for its second call, which captures; it is the first to go. So in a cycle
        over more signatures than the limit, those beyond it make each other give way before they come again: they run
        eagerly, and are not captured. A group whose captures failed is not idle, so such a cycle does not try them
        again and again either. If each signature comes a few times and then no more, graphs are captured for all of
        them. Groups around graphs of others (``Route.entry``) stay.
        """
        if newcomer.route.entry is not None:
            return
        while self._num_groups > self.max_groups + only_idle:
            owned = (group for group in self.graphs.groups.values() if group.route.entry is None)
            others = [group for group in owned if group is not newcomer]
            waiting = next((group for group in others if group.key == self._waiting and group.is_idle), None)
            self.forget(waiting or min(others, key=lambda group: (not group.is_idle, group.last_used)))
        self._waiting = newcomer.key if self._num_groups > self.max_groups else None

    @property
    def _num_groups(self) -> int:
        """The groups that count for ``max_groups``; one more while a new one waits for its second call."""
        return sum(group.route.entry is None for group in self.graphs.groups.values())

    def _spec(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallSpec | None:
        """The form of a call; None if the only graph of the route is of a call with other arguments."""
        captured = route.entry.call if route.entry is not None else None
        spec = CallSpec(self.fn if captured is None else captured.fn, len(args), tuple(kwargs))
        return spec if captured is None or spec.names == captured.names else None

    def _make_group(
        self, route: Route, spec: CallSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[GraphGroup, list[Any]] | Refusal:
        """A group for a call that fits none."""
        key = route.key if route.is_single else (route.key, next(self._numbers))
        try:
            made = self.graphs.make_group(key, route, spec, spec.values(args, kwargs))
        except ConfigError as error:
            if not self._has_fitted:
                raise
            return Refusal(Reason.ARGUMENTS_CHANGED, str(error))
        self._has_fitted |= not isinstance(made, Refusal)
        return made

    def forget(self, group: GraphGroup) -> None:
        """Let go of a group, with its graphs and static inputs, and of its form of call if it was the only one."""
        for entry in group.all_entries:
            self.graphs.release(self.graphs.cache.retire(entry, EvictionReason.DROPPED))
        self.graphs.groups.pop(group.key, None)
        for key, spelling in list(group.route.spellings.items()):
            if group in spelling.groups:
                spelling.groups.remove(group)
                if not spelling.groups:
                    del group.route.spellings[key]
                elif spelling.latest[0] is group:  # a hit that still reads it there finds that it serves nothing
                    spelling.use(spelling.groups[-1])

    def use_tables(self, tables: Mapping[Route, SizeTable]) -> None:
        """Decide by other sizes from now on; called with the lock held. Graphs of sizes that stay, stay.

        The others are released, and all of them if a largest size grows, since they share buffers of that size.
        """
        grows = any(table.exceeds(route.table) for route, table in tables.items())
        for route, table in tables.items():
            route.table = table
        if grows:
            self.clear(*tables)
            return
        for route in tables:
            for group in (group for group in route.groups if group.signature.has_rows):
                gone = [entry for entry in group.all_entries if entry.size not in route.table.sizes]
                for entry in gone:
                    self.graphs.release(self.graphs.cache.retire(entry, EvictionReason.DROPPED))
                group.hits.clear()

    def keep_examples(self) -> None:
        """Keep an example of each signature from now on; called with the lock held."""
        self.keeps_examples = True
        for group in self.graphs.groups.values():
            group.wants_example = not group.example
            group.hits.clear()

    def clear(self, *routes: Route) -> None:
        """Release all graphs, and forget the forms and signatures of calls of ``routes``; called with the lock held."""
        for route in routes:
            route.spellings.clear()
        self.graphs.clear()

    def drop(self, route: Route) -> None:
        """Forget a route with its groups, and serve no call by it any more; called with the lock held. The graph of a
        route that was given one stays."""
        for group in route.groups:
            self.graphs.groups.pop(group.key, None)
        route.table = SizeTable((), route.table.mode)
        route.spellings.clear()

    def explain(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int = 0) -> str:
        """How such a call, of ``rows`` rows if nothing else tells, would be served now, in one line."""
        choice = self.preview(route, args, kwargs)
        decision = choice.decision
        return choice._replace(decision=decision._replace(rows=decision.rows or rows)).explain()

    def preview(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        """What would be done with such a call now. Nothing is run or counted, but what is stale is released."""
        if torch.is_grad_enabled() and self.needs_gradients(args, kwargs):
            return Choice(Decision.eager(Reason.NEEDS_GRADIENTS))
        closed = self.closed(route)
        if closed is not None:
            return Choice(Decision.eager(closed))
        with torch.no_grad(), self.lock:
            self.graphs.refresh()
            return self.choose(route, args, kwargs)

    def after_eager(self, choice: Choice, work: Callable[[], CaptureResult]) -> Any:
        """Capture or compare a graph by ``work()``, then count and return the call's eager answer."""
        decision = choice.decision
        self.local.decision = Decision.eager(Reason.CALL_RAISED, choice.rows)  # if it does
        try:
            result = self.graphs.share.pay(choice.kind, work)
        except BaseException:
            self.stats.record_eager(Reason.CALL_RAISED, choice.rows)
            raise
        if result.reason is not decision.reason:
            decision = Decision.eager(result.reason, choice.rows, result.detail)
        self.count_eager(decision, result.error)
        answer = result.take_answer()
        if result.entry is not None:
            answer = result.entry.with_values(answer, choice.rows)
        return self.graphs.give(answer)

    @property
    def decision(self) -> Decision | None:
        """The decision of the calling thread's latest call, or None before the first."""
        return getattr(self.local, "decision", None)

    def needs_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with gradients on may have to be differentiated. Needs no lock."""
        values = [*args, *kwargs.values()]
        for value in values:
            kind = type(value)
            if kind in PLAIN_TENSORS:
                if value.requires_grad:
                    return True
            elif kind not in VALUES:
                return self.may_need_gradients(leaves_of(values), None)
        return self.graphs.guard.trainable

    def may_need_gradients(self, leaves: Sequence[Any], guard: StateGuard | None) -> bool:
        """Whether a call with these values may have to be differentiated, by a guard that holds (None: a new one)."""
        return any(map(wants_gradient, leaves)) or (guard or self.graphs.guard).trainable

    def closed(self, route: Route) -> Reason | None:
        """Why no graph may replay on the calling thread now, whatever the call; or None.

        The thread is in a capture, in a break of a replay in this pool, in somebody's mode, or in forward-mode
        differentiation, or the graphs are asleep. Needs no lock, and must be asked before one is taken: a break runs
        with its pool's lock held.
        """
        graphs, entry = self.graphs, route.entry
        backend, pool = (graphs.backend, graphs.pool) if entry is None else (entry.backend, entry.pool)
        if backend is not None and (backend.watch.depth or backend.is_capturing()):
            return Reason.INSIDE_CAPTURE
        if pool is not None and pool.replaying_on is not None and pool.is_inside_replay():
            return Reason.INSIDE_REPLAY
        if (function_modes() or trace() is not None or transform() is not None) and is_transformed():
            return Reason.MODE_ACTIVE
        if forward_ad._current_level >= 0:  # tangents come with plain tensors, whatever the grad mode
            return Reason.NEEDS_GRADIENTS
        return Reason.ASLEEP if graphs.is_asleep else None

    def run_eagerly(self, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the callable, and count why. Raises ``FallbackError`` with ``strict``. Needs no lock."""
        self.count_eager(decision)
        run, share = WINDOWS.begin(self._reach), self.graphs.share
        started = share.clock()
        try:
            return self.graphs.give(self.fn(*args, **kwargs))
        finally:
            share.note_eager(share.clock() - started)
            WINDOWS.end(run)
            self.local.decision = decision  # the callable may have called this object, too

    def count_eager(self, decision: Decision, cause: BaseException | None = None) -> None:
        """Count a call whose answer is eager's. The first one for each reason is a line of the log.

        Raises ``FallbackError`` from ``cause`` with ``strict``, unless the call leads to a graph.
        """
        self.local.decision, reason = decision, decision.reason
        if self.stats.record_eager(reason, decision.rows) and not reason.leads_to_graph:
            told = decision.detail or reason.text
            _log.info("eager callable=%s reason=%s rows=%s: %s", callable_name(self.fn), reason, decision.rows, told)
        self._eager_calls += 1  # which may lose one of another thread
        if self._eager_calls == FIRST_CALLS // 2 + 1 and self.stats.calls <= FIRST_CALLS:
            _log.warning("%s: %s", callable_name(self.fn), Health.of(self.stats))
        if self.strict and not reason.leads_to_graph:
            raise FallbackError(decision.explain(), reason) from cause

    def _reach(self) -> set[int]:
        return storages_of(self.graphs.guard._tensors)
