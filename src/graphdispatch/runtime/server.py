"""The one server behind every front end: what happens to a call.

A front end translates its caller's terms into a ``Route`` and passes the call on; it guarantees nothing of its own.

A hit, which a graph serves and that needs nothing else, matches the call, checks the guards, and executes a plan that
was made before. Where there is a native core, ``serve`` is in it (``native/core/hit.cpp``), and
``serve_in_python`` is the reference; where arguments are nested, it leaves to ``step`` what another group than the
latest one serves. While a profiler of torch is on in the thread, the core leaves the call to ``serve_in_range``.
Everything else is for ``step``.
"""

import logging
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from traceback import clear_frames
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from ..backends import load_default, watching_backend
from ..backends.code_events import pause, resume
from ..backends.tracing import (
    dispatch_modes,
    function_modes,
    is_observed,
    is_profiled,
    is_transformed,
    profiler_range,
    trace,
    transform,
)
from ..config import CUDAGraphOptions
from ..errors import FallbackError, ReplayError
from ..modes import EntryState
from ..native.bound import in_core
from ..reasons import Reason
from ..showing import count
from .admission import Work
from .attributes import holds_more, wants_gradient
from .cache import GraphCache
from .choice import Choice, choose
from .decide import Decision, SizeTable
from .entry import CUDAGraphEntry
from .flatten import CallSpec, leaves_of
from .graph_set import GraphSet
from .group import ALL_UNMATCHED, MOST_IN_A_ROW, Countdown, GraphGroup, Route, StayEager
from .health import FIRST_CALLS, Health
from .parts import Parts
from .protocols import MOST_ALIKE, Capturer, CaptureResult, Guard
from .rules import callable_name
from .signature import NO_MATCH, Refusal
from .windows import WINDOWS, storages_of

_log = logging.getLogger("graphdispatch")


_NEW = (Reason.FIRST_SIGHTING, Reason.CONSTANT_CHANGES)
_MADE = (Reason.CAPTURED_NOW, Reason.VERIFIED_NOW)
"""Reasons of calls that made or compared a graph."""
_OF_ONE_CALL = (
    *(*_MADE, Reason.FIRST_SIGHTING, Reason.FROZEN, Reason.MODE_ACTIVE),
    *(Reason.CALL_RAISED, Reason.ALIASED_ARGUMENTS, Reason.REPLAY_FAILED, Reason.STATE_SHARED),
    *(Reason.DISABLED, Reason.NOT_CAPTURED),
)
"""Reasons that say nothing of the next call of so many rows."""
_MOST_FORMS = 4096
"""Of so many forms of calls that fit no group it is kept that they ran eagerly."""
_IN_CALLERS_MODE = (Reason.NEEDS_GRADIENTS, Reason.UNGUARDED_ARGUMENT, Reason.STATE_UNSEEN)
"""Reasons of calls that are differentiated if gradients are on: what nobody sees into, an argument or what the call
finds, may hold something that trains."""


class Server:
    """Serves the calls of ``fn`` by its graphs, and eagerly what no graph can serve; each call with a reason.

    ``strict`` raises ``FallbackError`` instead of an eager step. Thread-safe: a hit takes no lock but its pool's;
    ``look_at``, ``perform`` and what they call are called with ``lock`` held.
    """

    __slots__ = ("__dict__", "__weakref__", "graphs", "local", "observes", "stats")

    def __init__(
        self,
        fn: Callable[..., Any],
        options: CUDAGraphOptions,
        cache: GraphCache,
        capturer: Capturer,
        *,
        strict: bool = False,
        max_groups: int = 1024,
        times_replays: bool = False,
    ) -> None:
        load_default()
        self.fn = fn
        self.graphs = GraphSet(fn, options, cache, capturer, max_groups)
        self.stats = self.graphs.stats
        self.lock = self.graphs.lock
        self.local = threading.local()
        self.strict = strict
        self._times_replays = times_replays
        """Whether entries collect the device time of their replays (``avg_replay_time_ms``)."""
        self._logs_replays = options.debug_log_enable
        self.observes = times_replays or options.debug_log_enable
        """Whether a replay is timed or logged."""
        self._eager_calls = 0

    def serve_in_python(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve one call, by a graph where one fits and eagerly elsewhere. Raises what the callable raises."""
        gradients = torch.is_grad_enabled()
        groups = route.forms.get((len(args), *kwargs)) if trace() is None and transform() is None else None
        if groups is None:
            return self.serve_unmatched(route, args, kwargs)
        group = groups[0]
        call, values = group.call, [*args, *kwargs.values()]
        if call.order is not None:
            values = [values[place] for place in call.order]
        leaves = values if call.is_flat else call.flatten(values)
        rows = group.signature.match(leaves) if leaves is not None else NO_MATCH
        if rows == NO_MATCH and call.is_flat:
            group, rows = _other_match(groups, values)
        if leaves is None or rows == NO_MATCH:
            return self.serve_unmatched(route, args, kwargs)
        hit = group.hits[rows]
        if isinstance(hit, StayEager):
            return self.stay_eager(hit, route, args, kwargs)
        if hit is None:
            return self.step(route, args, kwargs)
        entry, plan, decision, guard, per_call = hit
        if (
            entry.replay_count >= entry.verify_at
            or forward_ad._current_level >= 0
            or entry.backend.watch.depth
            or entry.backend.is_capturing()
            or ((entry.default_device or function_modes() or dispatch_modes()) and not entry.fits_modes())
            or (per_call is not None and not per_call(leaves))
            or (entry.writes_outside and plan.clash(leaves) is not None)
            or (guard is not None and not guard.holds())
        ):
            return self.step(route, args, kwargs)
        if gradients and self.may_need_gradients(leaves, guard):
            return self.serve_unmatched(route, args, kwargs)
        try:
            torch._C._set_grad_enabled(False)
            if self.observes and not isinstance(plan, Parts):
                result = self.observed(entry, plan.rows, leaves)
            else:
                result = plan.run(leaves, self.stats)
        except ReplayError as error:
            self.replay_failed(group, error)
        else:
            self.local.decision = decision
            return result
        finally:
            torch._C._set_grad_enabled(gradients)
        return self.step(route, args, kwargs)

    def replay_failed(self, group: GraphGroup, error: ReplayError) -> None:
        """Forget the hits where a replay failed. Raises ``error`` if it had effects; else the call runs eagerly."""
        group.hits.clear()
        if error.had_effects:
            raise error

    def serve_in_range(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same while torch's profiler is on: the call is a range of it, with its parts within."""
        with profiler_range("serve", callable_name(self.fn)):
            return self.serve_in_python(route, args, kwargs)

    @in_core("serve_method", {"forward_ad": forward_ad, "replay_error": ReplayError})
    def serve(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve one call. Without the core that is this method."""
        return (self.serve_in_range if is_profiled() else self.serve_in_python)(route, args, kwargs)

    def observed(self, entry: CUDAGraphEntry, rows: int, leaves: Sequence[Any]) -> Any:
        """A replay that may be timed or logged."""
        if self._logs_replays:
            _log.debug("replaying %r for %d rows", entry, rows)
        return entry.replay_call(leaves, rows, self.stats, is_timed=self._times_replays or self.graphs.judges_gain)

    def step(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call that is no hit (yet). Raises what the callable raises, and ``FallbackError`` with ``strict``."""
        closed = self.closed(route)  # first, since it raises where another thread's capture would record this call
        if closed is Reason.INSIDE_CAPTURE:
            return self._run_within(Decision.eager(closed), args, kwargs)
        if closed is not None:
            return self._run_as_graphs(Decision.eager(closed), args, kwargs)
        if torch.is_grad_enabled() and self.needs_gradients(args, kwargs):
            decision = Decision.eager(Reason.NEEDS_GRADIENTS, detail=self.about_gradients(args, kwargs))
            self.note_outcome(route, args, kwargs, Choice(decision))
            return self.run_eagerly(decision, args, kwargs)
        gradients = torch.is_grad_enabled()
        with _WithoutGradients():
            with WINDOWS.taking(self.lock) as is_taken:
                if is_taken:
                    self.graphs.cache.admission.look()
                    choice = self._as_all_ranks(self.look_at(route, args, kwargs, gradients=gradients))
                    self.note_look(choice)
                    is_done, answer = self.perform(choice)
                    self.note_outcome(route, args, kwargs, choice if is_done else answer)
            if not is_taken:
                return self.run_eagerly(Decision.eager(Reason.STATE_SHARED), args, kwargs)
            if is_done:
                return answer
            torch._C._set_grad_enabled(gradients and answer.decision.reason in _IN_CALLERS_MODE)
            return self.run_eagerly(answer.decision, args, kwargs, answer.group)

    def serve_in_step(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call of one of several ranks: until captures are frozen they agree on each, so that none is a hit."""
        return (self.serve if self.graphs.cache.is_frozen else self.step)(route, args, kwargs)

    def _as_all_ranks(self, choice: Choice) -> Choice:
        """What all ranks do with a call, by what this one would do: see Note [ranks in step] in ``ranks.py``."""
        ranks, own = self.graphs.ranks, choice.decision.reason
        if ranks is None or self.graphs.cache.is_frozen or (agreed := ranks.choose(own)) is own:
            return choice
        if agreed is Reason.CAPTURED_NOW:  # where this rank has a graph, it captures that once more
            return choice.not_served(agreed)._replace(entry=None)
        return choice.not_served(agreed, "" if agreed is Reason.VERIFIED_NOW else f"another rank: {agreed.text}")

    def note_outcome(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any], choice: Choice) -> None:
        """Have the next calls like one that ran eagerly do so without a look; or forget that they did, if a graph was
        made, compared or served. With ``strict`` each call is looked at, since it raises."""
        group, decision = choice.group, choice.decision
        is_eager = decision.is_eager and not self.strict
        if group is None and decision.reason in _OF_ONE_CALL:
            return
        if is_eager and (
            group is None or (decision.reason in _NEW and not group.entries and group.misses.total() == 1)
        ):
            if len(route.unmatched) >= _MOST_FORMS:
                route.unmatched.clear()
            before = route.unmatched.get((len(args), *kwargs))
            countdown = before.countdown if before is not None else Countdown(decision, ALL_UNMATCHED)
            countdown.again(decision)
            route.unmatched[(len(args), *kwargs)] = StayEager(decision, countdown)
        elif group is not None:
            if not is_eager or decision.reason in _MADE:
                route.unmatched.pop((len(args), *kwargs), None)
            if is_eager and decision.reason not in _OF_ONE_CALL:
                group.keep_eager(choice.matched, choice.size, decision, self._most_unseen(group, choice))
            elif group.gain is not None:
                group.gain.in_doubt.discard(decision.rows)

    def _most_unseen(self, group: GraphGroup, choice: Choice) -> float:
        """So many calls like one that ran eagerly may do so without a look, at most: as long as there is no time for
        the capture that it waits for, and until a failed one is tried again."""
        failure, size = group.failures.get(choice.size), choice.size
        if failure is not None and group.blocked(size) is not None:
            return min(failure.retry_at - group.misses[size] - 1, MOST_IN_A_ROW)
        if failure is None and choice.decision.reason is not Reason.CAPTURE_WAITS:
            return math.inf
        if not self.graphs.budget.is_informed:
            return 0
        calls = self.graphs.calls_until_time(group, choice.entry, size)
        return min(calls / 4, MOST_IN_A_ROW)  # graphs save time meanwhile, and calls may become longer

    def serve_unmatched(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call that fits none of the groups that were looked at, or that needs gradients."""
        stays = route.unmatched.get((len(args), *kwargs)) if route.unmatched else None
        if stays is None or (stays.decision.reason is Reason.NEEDS_GRADIENTS and not torch.is_grad_enabled()):
            return self.step(route, args, kwargs)
        return self.stay_eager(stays, route, args, kwargs)

    def stay_eager(self, stays: StayEager, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call like others that ran eagerly again and again. Needs no lock."""
        backend, group = (self.graphs.cache if route.entry is None else route.entry).backend, stays.group
        countdown = stays.countdown
        if countdown.left <= 0 or (backend is not None and (backend.watch.depth or backend.is_capturing())):
            if countdown.left <= 0 and group is not None:
                group.look_again(stays)
            return self.step(route, args, kwargs)
        countdown.left -= 1
        if stays.size:
            group.misses[stays.size] += 1
        if torch.is_grad_enabled():
            return self._run_as_graphs(stays.decision, args, kwargs, stays.timed_in)
        return self.run_eagerly(stays.decision, args, kwargs, stays.timed_in)

    def _run_as_graphs(
        self, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any], group: GraphGroup | None = None
    ) -> Any:
        """Run a call eagerly that was not looked at: without gradients, as graphs run, unless it needs them."""
        is_transformed = transform() is not None  # which may differentiate by what it has put into the callable
        if is_transformed or not torch.is_grad_enabled() or decision.reason in _IN_CALLERS_MODE:
            return self.run_eagerly(decision, args, kwargs, group)
        if self.needs_gradients(args, kwargs):
            return self.run_eagerly(Decision.eager(Reason.NEEDS_GRADIENTS), args, kwargs)
        with _WithoutGradients():
            return self.run_eagerly(decision, args, kwargs, group)

    def look_at(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any], *, gradients: bool) -> Choice:
        """What to do with a call, by what is there now. Before, the graphs are released whose weights have moved, and
        the call's group is made if it can have one. ``gradients``: whether they are on for the call."""
        if self.graphs.cache.is_asleep:  # since ``closed`` looked, perhaps
            return Choice(Decision.eager(Reason.ASLEEP))
        self.graphs.refresh()
        has_backend = self.graphs.cache.backend is not None
        found = self.graphs.find(route, args, kwargs)
        if isinstance(found, Refusal):
            return Choice(Decision.eager(found.reason, detail=found.detail))
        if not has_backend and (closed := self.closed(route)) is not None:  # by the backend that this call has chosen
            group, leaves, rows = found
            return Choice(Decision.eager(closed, rows), group, leaves, matched=rows)
        choice = choose(self.graphs, *found)
        if gradients and choice.trains:  # by what its code was seen to read
            return Choice(Decision.eager(Reason.NEEDS_GRADIENTS))
        return choice

    def note_look(self, choice: Choice) -> None:
        """Note a call that was looked at, for admission, and which graph is of the present state."""
        group, size = choice.group, choice.size
        if group is None:
            return
        group.looked_at = self.graphs.cache.admission.now
        if choice.entry is not None:
            group.use(choice.entry, choice.matched)
        if not size or choice.decision.reason.is_graph:
            return
        group.misses[size] += 1
        if choice.entry is None and choice.decision.reason is not Reason.CAPTURED_NOW:
            self.graphs.cache.admission.count_miss((group.key, size))

    def perform(self, choice: Choice) -> tuple[bool, Any]:
        """Capture, compare or replay as chosen: True and the answer, or False and the choice to run eagerly instead.

        Called with the lock held.
        """
        group, entry, reason = choice.group, choice.entry, choice.decision.reason
        if group is not None and reason is Reason.CAPTURED_NOW:
            capture = partial(self.graphs.capture, group, choice.leaves, choice.decision.rows, choice.size)
            return True, self.after_eager(choice, capture)
        if group is None or entry is None or not (reason.is_graph or reason is Reason.VERIFIED_NOW):
            return False, choice
        batch = group, choice.leaves, choice.decision.rows, entry
        if reason is Reason.VERIFIED_NOW:
            return True, self.after_eager(choice, partial(self.graphs.verify, *batch))
        if entry.state is EntryState.CAPTURED and entry.replay_count == MOST_ALIKE - 1:
            # Before the replay, since the caller may get the graph's own memory as the answer.
            found = self.graphs.budget.pay(partial(self.graphs.compare_on_made, *batch), Work.COMPARISON)
            if found is not None:
                return False, choice.not_served(found.reason, found.detail)
        for part, values in choice.parts.due(choice.leaves) if choice.parts is not None else ():
            compare = partial(self.graphs.difference_on, group, values, part.rows, part.entry)
            if (found := self.graphs.budget.pay(compare, Work.COMPARISON)) is not None:
                return False, choice.not_served(found.reason, found.detail)
        try:
            if choice.parts is not None:
                answer = choice.parts.run(choice.leaves, self.stats)
            else:
                answer = self.observed(entry, choice.decision.rows, choice.leaves)
        except ReplayError as error:
            if error.had_effects:
                raise
            return False, choice.not_served(Reason.REPLAY_FAILED, str(error))
        self.local.decision = choice.decision
        return True, answer

    def drop(self, route: Route) -> None:
        """Forget a route with its groups, and serve no call by it any more; called with the lock held. Graphs that were
        captured here are released; that of somebody else stays."""
        for group in route.groups:
            self.graphs.forget(group)
        route.table = SizeTable((), route.table.mode)

    def explain(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int = 0) -> str:
        """How such a call, of ``rows`` rows unless its arguments tell, would be served now: in one line the decision,
        what the graph gains, and what it consists of where that is more than one launch."""
        choice = self.preview(route, args, kwargs)
        entry, decision = choice.entry, choice.decision
        if rows and not (decision.rows and choice.group is not None and choice.group.signature.has_rows):
            decision = decision._replace(rows=rows, size=rows)
        parts = [decision.explain()]
        if choice.group is not None and decision.reason is Reason.CAPTURE_WAITS:
            calls = self.graphs.calls_until_time(choice.group, entry, choice.size)
            text = f"there will be time after some {count(math.ceil(calls))} more calls of this size"
            parts.append(text if calls < math.inf else "")
        if entry is not None and not decision.is_eager:
            assert choice.group is not None
            gain = choice.group.gain if choice.parts is None else None
            parts += [gain.text(entry, choice.decision.rows) if gain is not None else "", entry.graph.describe()]
        return "; ".join(filter(None, parts))

    def preview(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        """What would be done with such a call now. Nothing is run or counted, but graphs whose weights
        have moved are released."""
        closed = self.closed(route)
        if closed is not None:
            return Choice(Decision.eager(closed))
        if torch.is_grad_enabled() and self.needs_gradients(args, kwargs):
            return Choice(Decision.eager(Reason.NEEDS_GRADIENTS, detail=self.about_gradients(args, kwargs)))
        gradients = torch.is_grad_enabled()
        with torch.no_grad(), self.lock:
            return self.look_at(route, args, kwargs, gradients=gradients)

    def after_eager(self, choice: Choice, work: Callable[[], CaptureResult]) -> Any:
        """Capture or compare a graph by ``work()``, then count and return the call's eager answer."""
        decision = choice.decision
        self.local.decision = Decision.eager(Reason.CALL_RAISED, choice.decision.rows)  # if it does
        try:
            assert choice.group is not None
            result = self.graphs.budget.pay(work, choice.group.work_for(choice.entry, choice.size))
        except BaseException:
            self.stats.record_eager(Reason.CALL_RAISED, choice.decision.rows)
            raise
        if result.reason is not decision.reason:
            decision = Decision.eager(result.reason, choice.decision.rows, result.detail)
        self.count_eager(decision, result.error)
        self.local.decision = decision
        answer, error, result.error = result.answer, result.error, None
        while error is not None:  # its frames would keep the batch, and what autograd has noted on the capture's stream
            clear_frames(error.__traceback__)
            error = error.__cause__
        if result.entry is not None:
            answer = result.entry.outputs.with_values(answer, choice.decision.rows)
        return self.graphs.give(answer)

    @property
    def decision(self) -> Decision | None:
        """The decision of the calling thread's latest call, or None before the first."""
        return getattr(self.local, "decision", None)

    def needs_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with gradients on may have to be differentiated. Needs no lock."""
        leaves = leaves_of([*args, *kwargs.values()])
        reach = self.graphs.capturer.reach
        return self.may_need_gradients(leaves, None) or any(
            reach(leaf, by_names=True).trainable for leaf in leaves if holds_more(leaf)
        )

    def about_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What may have to be differentiated in such a call, as a sentence with a remedy. Needs no lock."""
        spec = CallSpec(self.fn, len(args), tuple(kwargs))
        named = zip(spec.names, spec.values(args, kwargs), strict=True)
        if wanting := [name for name, value in named if any(map(wants_gradient, leaves_of([value])))]:
            what, remedy = f"argument {wanting[0]!r} requires one", "detach() it, or use torch.no_grad()"
        elif module := next(filter(_trains, self.graphs.present_guard(by_names=True).modules), None):
            what, remedy = f"{_name_within(self.fn, module)} is in training mode", "call eval(), or use torch.no_grad()"
        else:
            what, remedy = "a tensor that it reads beside its modules requires one", "use torch.no_grad()"
        return f"{Reason.NEEDS_GRADIENTS.sentence}: {what}; {remedy}"

    def may_need_gradients(self, leaves: Sequence[Any], guard: Guard | None) -> bool:
        """Whether a call with these values may have to be differentiated, by a guard that holds (None: a new one)."""
        return any(map(wants_gradient, leaves)) or (guard or self.graphs.present_guard(by_names=True)).trainable

    def closed(self, route: Route) -> Reason | None:
        """Why no graph may replay on the calling thread now, whatever the call; or None.

        The thread is in a capture, in a break of a replay in this pool, in somebody's mode, or in forward-mode
        differentiation, or the graphs are asleep. Needs no lock, and must be called before one is taken: a
        break runs with its pool's lock held. Raises ``BackendError`` if another thread's capture records what this one
        submits.
        """
        cache = self.graphs.cache
        home = cache if route.entry is None else route.entry
        backend, pool = home.backend or watching_backend(), home.pool  # a first call may be made in a capture
        if backend is not None and (backend.watch.depth or backend.is_capturing()):
            backend.refuse_foreign_work()
            return Reason.INSIDE_CAPTURE
        if pool is not None and pool.replaying_on is not None and pool.is_inside_replay():
            return Reason.INSIDE_REPLAY
        if is_transformed() or is_observed():
            return Reason.MODE_ACTIVE
        if forward_ad._current_level >= 0:  # tangents come with plain tensors, whatever the grad mode
            return Reason.NEEDS_GRADIENTS
        return Reason.ASLEEP if cache.is_asleep else None

    def run_eagerly(
        self, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any], group: GraphGroup | None = None
    ) -> Any:
        """Call the callable, and count why. Raises ``FallbackError`` with ``strict``. Needs no lock."""
        self.count_eager(decision)
        graphs = self.graphs
        fn, budget = self.fn if group is None else group.timed(self.fn, decision.rows), graphs.budget
        run, started = object(), None
        try:
            WINDOWS.begin(run, self._reach)
            started = budget.begin_eager()
            answer = fn(*args, **kwargs)
            return graphs.give(answer) if graphs.returns_handles else answer
        except Exception as error:
            if decision.reason in (Reason.NO_TENSORS, Reason.UNGUARDED_ARGUMENT):
                error.add_note(f"graphdispatch: {decision.detail}")  # such as an array where the model takes a tensor
            raise
        finally:
            WINDOWS.end(run)
            budget.note_eager(started)
            self.local.decision = decision  # the callable may have called this object, too

    def _run_within(self, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the callable as a part of the run that is captured: in that run's mode and window. Who listens to that
        run's code hears of the callable alone, as if it were called directly."""
        paused = pause()
        try:
            self.count_eager(decision)
        finally:
            resume(paused)
        try:
            return self.graphs.give(self.fn(*args, **kwargs))
        finally:
            self.local.decision = decision

    def count_eager(self, decision: Decision, cause: BaseException | None = None) -> None:
        """Count a call whose answer is eager's. The first one for each reason is a line of the log.

        Raises ``FallbackError`` from ``cause`` with ``strict``, unless the call leads to a graph.
        """
        reason = decision.reason
        if self.stats.record_eager(reason, decision.rows) and not reason.leads_to_graph:
            why = decision.detail or reason.text
            _log.info("eager callable=%s reason=%s rows=%s: %s", callable_name(self.fn), reason, decision.rows, why)
        self._eager_calls += 1  # which may lose one of another thread
        if self._eager_calls == FIRST_CALLS // 2 + 1 and self.stats.calls <= FIRST_CALLS:
            _log.warning("%s: %s", callable_name(self.fn), Health.of(self.stats, list(self.graphs.groups.values())))
        if self.strict and not reason.leads_to_graph:
            self.local.decision = decision
            raise FallbackError(decision.explain(), reason) from cause

    def _reach(self) -> set[int]:
        return storages_of(self.graphs.present_guard().placed)


class _WithoutGradients(torch.no_grad):
    """A block without gradients, as graphs run. An error that comes of that alone says what to do."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if self.prev and isinstance(error, RuntimeError) and "does not require grad" in str(error):
            error.add_note(
                "graphdispatch: this call runs without gradients, since none of its arguments requires one and no "
                "module trains; differentiate within torch.enable_grad() inside of the callable"
            )


def _other_match(groups: Sequence[GraphGroup], values: Sequence[Any]) -> tuple[GraphGroup, int]:
    """The first of the groups behind the first that such a call fits, and its rows there. All its values are leaves."""
    flat = ((group, group.signature.match(values)) for group in groups[1:] if group.call.is_flat)
    return next(((group, rows) for group, rows in flat if rows >= 0), (groups[0], NO_MATCH))


def _trains(module: nn.Module) -> bool:
    """Whether a module is in training mode, and has parameters of its own that train."""
    return module.training and any(one is not None and one.requires_grad for one in module._parameters.values())


def _name_within(fn: Callable[..., Any], module: nn.Module) -> str:
    """What to call a module: by its class, and by its name in the module that is served."""
    root = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    names = root.named_modules() if isinstance(root, nn.Module) else ()
    name = next((name for name, one in names if one is module), "")
    return f"{type(module).__name__}{name and f' {name!r}'}"
