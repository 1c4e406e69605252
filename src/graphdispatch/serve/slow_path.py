"""The slow path of ``graphed``: everything that is not a hit. Finds or makes a call's group, captures, compares with
eager, publishes to the fast path, and runs eagerly what no graph serves; each decision with its reason.
"""

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..backends import get_backend
from ..call.rules import ArgumentRules
from ..call.signature import Refusal
from ..call.spec import CallSpec
from ..capture.request import CaptureResult
from ..config import CUDAGraphConfig
from ..decide.decision import Decision
from ..errors import ConfigError, FallbackError, ReplayError
from ..memory.budget import MemoryBudget
from ..memory.cache import make_cache
from ..memory.entry import CUDAGraphEntry
from ..memory.outputs import OutputRule
from ..modes import CUDAGraphMode, EntryState
from ..reasons import Reason
from ..stats import EvictionReason
from .graphset import GraphSet
from .group import Form, GraphGroup
from .routine import Found, Plan, Routine

__all__ = ["SlowPath"]


class SlowPath:
    """One callable with its graphs and its routines: ``decode`` and ``mixed``, which are one unless the mode tells
    uniform decode batches from others. The fast path reads ``forms`` and ``served``, and calls ``step`` for the rest.

    Thread-safe: ``step`` takes the lock; the other methods are called with it held. ``decision`` is per thread.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        config: CUDAGraphConfig,
        rules: ArgumentRules,
        *,
        uniform_decode: Callable[..., bool] | None,
        budget: MemoryBudget | None,
        out: Any = None,
    ) -> None:
        if config.mode.separate_routine() and uniform_decode is None:
            raise ConfigError(
                f"uniform_decode must be a function in mode {config.mode.name}, got None; "
                "it is given a call's arguments and tells uniform decode batches from others"
            )
        if uniform_decode is not None and not callable(uniform_decode):
            raise ConfigError(f"uniform_decode must be a function of a call's arguments, got {uniform_decode!r}")
        if budget is not None and not isinstance(budget, MemoryBudget):
            raise ConfigError(
                f"budget must be a MemoryBudget or None, got {budget!r}; memory_budget_bytes= takes a number of bytes, "
                "and a MemoryBudget bounds several callables together"
            )
        self.fn = fn
        self.config = config
        self.decode = self.mixed = Routine(config.mode.decode_mode(), config.resolve())
        self.uniform_decode = None
        if config.mode.separate_routine():
            self.mixed = Routine(config.mode.mixed_mode(), config.resolve(mixed=True))
            self.uniform_decode = uniform_decode
        self.graphs = GraphSet(
            fn,
            config.options,
            make_cache(config, budget),
            backend=get_backend(config.backend) if config.backend != "auto" else None,
            out=out,
        )
        self.local = threading.local()
        self.keeps_examples = False
        """Whether an example of each signature is kept, by which further sizes can be captured when none is served."""
        self._rules = rules
        self._indices = itertools.count()
        self._random = random.Random(0)
        self._has_fitted = False
        """Whether the rules have fitted a call; from then on, one that they do not fit is an odd call."""

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call that is no hit (yet). Raises what the callable raises, and ``FallbackError`` with ``strict``."""
        if (closed := self.graphs.closed()) is not None:
            return self.run_eagerly(Decision.eager(closed), args, kwargs)
        with self.graphs.lock:
            self.graphs.refresh()
            routine = self.routine(args, kwargs)
            found = self.find(routine, args, kwargs)
            group, decision = found.group, found.decision
            if group is not None and self.graphs.out is not None and found.rows > routine.table.largest:
                _check_room(self.graphs.out, group.rule, found.rows, routine.table.largest)
            if group is not None and decision.mode is not CUDAGraphMode.NONE:
                group.sightings[decision.size] += 1
                if self.keeps_examples:
                    group.keep_example(found.leaves)
                entry, decision = self.plan(group, found)
                if decision.reason is Reason.CAPTURED_NOW:
                    return self._capture(routine, group, found, decision)
                if entry is None:
                    self.graphs.cache.admission.sight((group.index, found.decision.size))
                if entry is not None and decision.reason is Reason.VERIFIED_NOW:
                    self.local.decision = Decision.eager(Reason.CALL_RAISED, found.rows)  # if it does
                    outcome = self.graphs.verify(group, found.leaves, found.rows, entry)
                    self.publish(routine, group, outcome.entry)
                    return self._after_eager(Decision.eager(outcome.reason, found.rows, outcome.detail), outcome)
                if entry is not None:
                    try:
                        return self._serve(routine, group, found, entry)
                    except ReplayError as error:
                        if error.had_effects:
                            raise
                        decision = Decision.eager(Reason.REPLAY_FAILED, found.rows, str(error))
        return self.run_eagerly(decision, args, kwargs)

    def routine(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Routine:
        """The routine that serves such a call. Needs no lock."""
        if self.uniform_decode is None or self.uniform_decode(*args, **kwargs):
            return self.decode
        return self.mixed

    def _serve(self, routine: Routine, group: GraphGroup, found: Found, entry: CUDAGraphEntry) -> Any:
        self.publish(routine, group, entry)
        result = entry.serve(found.leaves, found.rows, self.graphs.stats)
        self.local.decision = found.decision.as_mode(entry.mode)
        return result

    def plan(self, group: GraphGroup, found: Found) -> Plan:
        """What to do with a call that a graph of ``found.decision.size`` could serve; changes nothing."""
        decision, size = found.decision, found.decision.size
        entry = self.graphs.current(group, size)
        if entry is None:
            failure = group.blocked(size)
            if failure is not None:
                return Plan(None, Decision.eager(failure.reason, found.rows, failure.detail))
            reason = self.graphs.admit(key := (group.index, size))
            return Plan(None, Decision.eager(reason, found.rows, self.graphs.cache.admission.detail(reason, key)))
        clash = entry.clash(found.leaves)
        if clash is not None:
            return Plan(None, Decision.eager(Reason.ALIASED_ARGUMENTS, found.rows, clash))
        if group.needs_check(entry, found.leaves, found.rows):
            return Plan(entry, Decision.eager(Reason.VERIFIED_NOW, found.rows))
        return Plan(entry, decision.as_mode(entry.mode))

    def find(self, routine: Routine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
        """The group and the table's decision for a call; makes the group if it can have one."""
        table = routine.table
        if not table.sizes:
            reason = Reason.MODE_MISMATCH if self.config.mode.has_graphs() else Reason.DISABLED
            return Found(None, [], 0, Decision.eager(reason))
        key = (len(args), *kwargs)
        form = routine.forms.get(key)
        call_form = form.form if form is not None else CallSpec(self.fn, len(args), tuple(kwargs))
        values = call_form.values(args, kwargs)
        known = form.find(values) if form is not None else None
        if known is None:
            made = self._make_group(call_form, values, table.largest)
            if isinstance(made, Refusal):
                return Found(None, [], 0, Decision.eager(made.reason, detail=made.detail))
            form = routine.forms.get(key)  # which may have gone with its last group
            group, leaves = made
            known = group, leaves, group.signature.rows
            if form is None:
                form = routine.forms[key] = Form(call_form, group)
            else:
                form.groups.append(group)
        assert form is not None
        group, leaves, rows = known
        form.use(group)
        if not group.signature.has_rows:
            return Found(group, leaves, 1, routine.fixed)
        return Found(group, leaves, rows, table.decide(rows))

    def _make_group(
        self, form: CallSpec, values: Sequence[Any], capacity: int
    ) -> tuple[GraphGroup, list[Any]] | Refusal:
        """A group for a call that fits none; at the limit, one without a graph gives way to it.

        Which one is left to chance: by age, a cycle over more kinds of calls than the limit would drop each of them
        just before it comes again. One whose capture failed stays, or it would be captured in vain without end.
        """
        groups, leaving = self.graphs.groups, None
        if len(groups) >= self.config.max_signatures:
            idle = [group for group in groups.values() if not (_has_graphs(group) or group.failures)]
            if not idle:
                return Refusal(
                    Reason.TOO_MANY_SIGNATURES,
                    f"{len(groups)} other kinds of argument lists have graphs, or captures that failed; raise "
                    "max_signatures, or clear() them",
                )
            leaving = self._random.choice(idle)
        try:
            made = self.graphs.make_group(next(self._indices), form, values, self._rules, capacity)
        except ConfigError as error:
            if not self._has_fitted:
                raise
            return Refusal(Reason.ARGUMENTS_CHANGED, str(error))
        if not isinstance(made, Refusal):
            self._has_fitted = True
            if leaving is not None:
                self._forget(leaving)
        return made

    def _forget(self, group: GraphGroup) -> None:
        """Let go of a group without graphs, with its static inputs, and of its spelling if it was the only one."""
        del self.graphs.groups[group.index]
        for routine in (self.decode, self.mixed):
            for key, form in list(routine.forms.items()):
                if group in form.groups:
                    form.groups.remove(group)
                    if not form.groups:
                        del routine.forms[key]
                    elif form.latest[0] is group:  # a hit that still reads it there finds that it serves nothing
                        form.use(form.groups[-1])

    def _capture(self, routine: Routine, group: GraphGroup, found: Found, decision: Decision) -> Any:
        size = found.decision.size
        self.local.decision = Decision.eager(Reason.CALL_RAISED, found.rows)  # if it does
        outcome = self.graphs.capture(group, found.leaves, found.rows, size, mode=routine.table.mode)
        self.publish(routine, group, outcome.entry)
        if outcome.entry is None:
            decision = Decision.eager(outcome.reason, found.rows, outcome.detail)
        return self._after_eager(decision, outcome)

    def publish(self, routine: Routine, group: GraphGroup, entry: CUDAGraphEntry | None) -> None:
        """Let the fast path see an entry that is verified, for every number of rows of which comparisons with
        eager say that it may serve them (``CUDAGraphEntry.may_pad``)."""
        if entry is None or entry.state is not EntryState.VERIFIED:
            return
        decisions = routine.decisions_of(entry.size) if group.signature.has_rows else (routine.fixed,)
        checked = [d for d in decisions if d.mode.has_graphs() and entry.may_pad(d.rows)]
        group.served = group.served | {d.rows: (entry, d.as_mode(entry.mode)) for d in checked}

    @property
    def routines(self) -> list[Routine]:
        """The routines that have sizes: one, or two where the mode tells uniform decode from other batches."""
        return [r for r in dict.fromkeys((self.decode, self.mixed)) if r.table.sizes]

    def use_sizes(self, config: CUDAGraphConfig) -> None:
        """Decide by the sizes of ``config`` from now on. Graphs of sizes that stay, stay; the others are released, and
        all of them if the largest size grows, since they share buffers that are as large as it."""
        before = [routine.table.largest for routine in self.routines]
        self.config = config
        for routine in self.routines:
            routine.resize(config.resolve(mixed=routine is not self.decode))
        if any(routine.table.largest > largest for routine, largest in zip(self.routines, before, strict=True)):
            self.clear()
            return
        for routine in self.routines:
            for group in (group for form in routine.forms.values() for group in form.groups):
                entries = dict(group.entries) if group.signature.has_rows else {}
                gone = [entry for size, entry in entries.items() if size not in routine.table.sizes]
                for entry in gone:
                    self.graphs.release(self.graphs.cache.retire(entry, EvictionReason.DROPPED))
                group.served = {} if group.signature.has_rows else group.served
                for entry in group.entries.values():
                    self.publish(routine, group, entry)

    def clear(self) -> None:
        """Release all graphs, and forget all spellings and signatures."""
        self.decode.forms.clear()
        self.mixed.forms.clear()
        self.graphs.clear()

    def _after_eager(self, decision: Decision, outcome: CaptureResult) -> Any:
        self.local.decision = decision
        self.graphs.stats.record_miss(decision.reason, decision.rows)
        if self.config.strict and not decision.reason.leads_to_graph:
            raise FallbackError(decision.explain(), decision.reason) from outcome.error
        return self.graphs.hand_out(outcome.take_answer())

    def run_eagerly(self, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the callable, and count why. Raises ``FallbackError`` with ``strict``. Needs no lock."""
        self.local.decision = decision
        self.graphs.stats.record_miss(decision.reason, decision.rows)
        if self.config.strict and not decision.reason.leads_to_graph:
            raise FallbackError(decision.explain(), decision.reason)
        try:
            return self.graphs.hand_out(self.fn(*args, **kwargs))
        finally:
            self.local.decision = decision  # the callable may have called this object, too


def _has_graphs(group: GraphGroup) -> bool:
    return any(entry.state is not EntryState.EVICTED for entry in group.entries.values())


def _check_room(out: Any, rule: OutputRule | None, rows: int, largest: int) -> None:
    """Raise ``ConfigError`` if the caller's tensors have no room for a batch above the largest size, before it runs.

    Before a capture has shown which dimensions follow the batch, it is the first one of each tensor that has room for
    the largest size there.
    """
    tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    guessed = [((0, 1),) if tensor.dim() and tensor.shape[0] >= largest else () for tensor in tensors]
    for tensor, dims in zip(tensors, rule.follows if rule is not None else guessed, strict=True):
        if any(tensor.shape[dim] < rows * factor for dim, factor in dims):
            raise ConfigError(
                f"out has no room for {rows} rows in a tensor of shape {tuple(tensor.shape)}; give a larger one, or "
                "smaller batches"
            )
