"""``graphed()``: any callable with a changing batch size, served by captured graphs, right every time.

The front door for everyone. A call on the fast path does five things: find the spelling, compare the arguments with
the signature, compare the weights with the fingerprint, look the number of rows up, serve. Anything else takes the
slow path, under a lock, where captures and checks happen.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch

from .backends import get_backend
from .cache import Admission, GraphSet, MemoryBudget, make_cache
from .capture.calls import CallForm
from .capture.collector import frozen_collector
from .capture.entry import CUDAGraphEntry
from .capture.family import Family, Form
from .capture.job import Outcome
from .capture.rules import ArgumentRules, callable_name, make_rules
from .capture.signature import Refusal
from .config import CUDAGraphConfig, CUDAGraphOptions, parse_mode, roomy_config
from .dispatch.decision import Decision
from .dispatch.routine import Found, Plan, Routine
from .errors import ConfigError, FallbackError, ReplayError
from .modes import CUDAGraphMode, EntryState
from .progress import progress_bar
from .reasons import Reason

__all__ = ["Graphed", "graphed"]

P = ParamSpec("P")
R = TypeVar("R")


def graphed(
    fn: Callable[P, R],
    *,
    dynamic: Mapping[str, int],
    pad: Mapping[str, Any] | None = None,
    static: Iterable[str] = (),
    max_size: int | None = None,
    sizes: str | Sequence[int] = "auto",
    mode: str | CUDAGraphMode = "FULL",
    outputs: str = "clone",
    strict: bool = False,
    backend: str = "auto",
    max_cached_graphs: int | None = None,
    memory_budget_bytes: int | None = None,
    eviction: str = "gdsf",
    budget: MemoryBudget | None = None,
    capture_after: int = 2,
    capture_window: int = 4096,
    max_signatures: int = 32,
    uniform_decode: Callable[..., bool] | None = None,
    options: CUDAGraphOptions | None = None,
) -> "Graphed[P, R]":
    """Serve ``fn`` by graphs of a few sizes, padding each batch to the next; what cannot be served runs eagerly.

    ``dynamic`` names the batch dimension of each argument that has one, ``{"input_ids": 0}``; an argument in a nest is
    named by its path, ``"batch['ids']"``. All of them have the same number of rows in a call. Other tensors are copied
    whole on each call; constants (numbers, strings, None, enums) select the graph; ``static`` names tensors whose
    address never changes and objects that are the same each time.

    ``pad`` gives the rule for padding rows of an argument: a ``Pad``, a number, ``"zero"`` (default),
    ``"repeat_last"``, ``"leave"``, or a function ``(padding, real)``. Rows of the model must be independent of each
    other; whether they are is checked when a graph is captured, and a model that mixes rows stays eager.

    ``sizes`` are the sizes to capture, or a ladder by name; the largest is ``max_size`` (default 256). A size is
    captured when it is seen for the ``capture_after``-th time within ``capture_window`` uses, or by ``prewarm``. When
    ``max_cached_graphs`` or ``memory_budget_bytes`` is reached, ``eviction`` (``"gdsf"``, ``"lfu"``, ``"lru"``, or an
    installed policy) says which graph goes; ``budget`` is one that several callables share. ``outputs``: ``"clone"``
    gives the caller copies, ``"view"`` a handle (``.get()``) that raises ``StaleOutputError`` after the next replay,
    ``"ring:3"`` such a handle on the next of three preallocated copies, which raises after three further calls,
    ``"static"`` the graph's own tensors. ``strict`` raises ``FallbackError`` instead of running a step eagerly.

    ``mode`` is ``"FULL"`` (one graph for the call), ``"PIECEWISE"`` (graphs between the parts that ``eager_break``
    marks), ``"NONE"``, or one that tells uniform decode batches, served by ``FULL`` graphs, from others:
    ``"FULL_AND_PIECEWISE"``, ``"FULL_DECODE_ONLY"``. For these two ``uniform_decode`` is called with each call's
    arguments and says which it is.

    Graphs are for inference. A call that needs gradients (gradients are on, and an input or a captured tensor requires
    one, or a module that does is in training mode) runs eagerly; every other call runs under ``torch.no_grad()``.

    Raises ``ConfigError`` for a bad option, here where it can be told and else at the first call. Thread-safe.
    """
    settings = {
        "mode": parse_mode(mode),
        "backend": backend,
        "memory_budget_bytes": memory_budget_bytes,
        "eviction": eviction,
        "capture_after": capture_after,
        "capture_window": capture_window,
        "max_signatures": max_signatures,
        "strict": strict,
        "options": (options or CUDAGraphOptions()).replace(outputs=outputs),
    }
    config = roomy_config(sizes, max_size, max_cached_graphs, settings)
    return Graphed(fn, config, make_rules(fn, dynamic, pad or {}, static), uniform_decode, budget)


class Graphed(Generic[P, R]):
    """A callable served by graphs; made by ``graphed()``. Attributes of the wrapped callable are reachable on it."""

    def __init__(
        self,
        fn: Callable[P, R],
        config: CUDAGraphConfig,
        rules: ArgumentRules,
        uniform_decode: Callable[..., bool] | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        if config.mode.separate_routine() and uniform_decode is None:
            raise ConfigError(
                f"uniform_decode must be a function in mode {config.mode.name}, got None; "
                "it is given a call's arguments and tells uniform decode batches from others"
            )
        self._fn = fn
        self._config = config
        self._rules = rules
        self._decode = self._mixed = Routine(config.mode.decode_mode(), config.resolve())
        self._uniform_decode = None
        if config.mode.separate_routine():
            self._mixed = Routine(config.mode.mixed_mode(), config.resolve())
            self._uniform_decode = uniform_decode
        self._graphs = GraphSet(
            fn,
            config.options,
            make_cache(config, budget),
            backend=get_backend(config.backend) if config.backend != "auto" else None,
            admission=Admission(config.capture_after, config.capture_window),
        )
        self._indices = itertools.count()
        self._local = threading.local()
        self.stats = self._graphs.stats
        """What happened so far: hits, captures, padding, and the reason for every eager step."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Serve one call, by a graph where one fits and eagerly elsewhere. Raises what the callable raises."""
        if torch.is_grad_enabled():
            return cast(R, self._call_with_gradients_on(args, kwargs))
        routine = self._decode if self._uniform_decode is None else self._routine(args, kwargs)
        form = routine.forms.get((len(args), *kwargs))
        if form is not None:
            family, is_flat = form.latest
            leaves = [*args, *kwargs.values()] if is_flat else family.caller.flatten(form.form.values(args, kwargs))
            if leaves is not None:
                rows = family.signature.match(leaves)
                hit = family.served.get(rows)
                if hit is not None and self._graphs.may_serve(hit[0], leaves):
                    entry, decision = hit
                    try:
                        result: R = entry.serve(leaves, rows, self.stats)
                    except ReplayError as error:
                        if error.had_effects:
                            raise
                        return cast(R, self._call_slowly(args, kwargs))
                    self._local.decision = decision
                    return result
        return cast(R, self._call_slowly(args, kwargs))

    @property
    def last_decision(self) -> Decision | None:
        """The decision of the calling thread's latest call, or None before the first."""
        return getattr(self._local, "decision", None)

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """How such a call would be served now, in one line; nothing is run or counted."""
        if torch.is_grad_enabled() and self._graphs.needs_gradients(args, kwargs):
            return Decision.eager(Reason.NEEDS_GRADIENTS).explain()
        with torch.no_grad(), self._graphs.lock:
            found = self._find(self._routine(args, kwargs), args, kwargs)
            if found.family is None or found.decision.mode is CUDAGraphMode.NONE:
                return found.decision.explain()
            return self._plan(found.family, found).explain()

    def prewarm(self, *args: Any, sizes: Sequence[int] | None = None, progress: bool = False, **kwargs: Any) -> None:
        """Capture ``sizes`` (default: all) now, largest first, from an example call of any number of rows.

        The example's rows are repeated to fill each size; whatever the runs write is put back, so that the call leaves
        no effect. Each graph is checked with padding on one batch and without on another; where the example's rows are
        all alike that proves nothing of padding, and serving compares the first padded batches. A size that cannot be
        captured stays eager, with its reason in ``explain``; with ``strict`` it raises ``FallbackError``.
        """
        with torch.no_grad(), self._graphs.lock:
            if not self._graphs.guard_holds():
                self._graphs.rearm()
            routines = {id(r): r for r in (self._decode, self._mixed) if r.table.sizes} or {0: self._decode}
            with frozen_collector(self._config.options.gc_disable):
                for routine in routines.values():
                    self._prewarm(routine, args, kwargs, sizes, progress)

    def clear(self) -> None:
        """Release all graphs and their memory; calls capture anew. The statistics stay."""
        with self._graphs.lock:
            self._decode.forms.clear()
            self._mixed.forms.clear()
            self._graphs.clear()

    @property
    def entries(self) -> list[CUDAGraphEntry]:
        """The captured graphs, by size."""
        return sorted(self._graphs.cache, key=lambda entry: entry.size)

    @property
    def automatic_breaks(self) -> dict[torch.nn.Module, str]:
        """With ``breaks="auto"``: the modules that run eagerly since they cost the full graph, and what each did."""
        return dict(self._graphs.auto_breaks.reasons) if self._graphs.auto_breaks is not None else {}

    @property
    def memory_bytes(self) -> int:
        """Bytes held: the pool, what graphs hold for themselves, and the static inputs."""
        return self._graphs.memory_bytes

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the cache's accounting is off; cheap enough to run when idle."""
        with self._graphs.lock:
            self._graphs.check_integrity()

    def unwrap(self) -> Callable[P, R]:
        """The wrapped callable."""
        return self._fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._fn, name)

    def __repr__(self) -> str:
        return (
            f"<Graphed {callable_name(self._fn)}: {len(self._graphs.cache)} graphs of at most "
            f"{self._decode.table.largest} rows, "
            f"{100 * self.stats.hit_rate():.1f} % of {self.stats.calls} calls served>"
        )

    def _call_with_gradients_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._graphs.needs_gradients(args, kwargs):
            return self._run_eagerly(Decision.eager(Reason.NEEDS_GRADIENTS), args, kwargs)
        with torch.no_grad():
            return self(*args, **kwargs)

    def _call_slowly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (nested := self._graphs.nested()) is not None:
            return self._run_eagerly(Decision.eager(nested), args, kwargs)
        with self._graphs.lock:
            if not self._graphs.guard_holds():
                self._graphs.rearm()
            routine = self._routine(args, kwargs)
            found = self._find(routine, args, kwargs)
            family, decision = found.family, found.decision
            if family is not None and decision.mode is not CUDAGraphMode.NONE:
                family.sightings[decision.size] += 1
                entry, decision = self._plan(family, found)
                if decision.reason is Reason.CAPTURED_NOW:
                    return self._capture(routine, family, found, decision)
                if entry is None:
                    self._graphs.admission.sight((family.index, found.decision.size))
                if entry is not None and decision.reason is Reason.VERIFIED_NOW:
                    self._local.decision = Decision.eager(Reason.CALL_RAISED, found.rows)  # if it does
                    outcome = self._graphs.verify(family, found.leaves, found.rows, entry)
                    self._publish(routine, family, outcome.entry)
                    return self._after_eager(Decision.eager(outcome.reason, found.rows, outcome.detail), outcome)
                if entry is not None:
                    try:
                        return self._serve(routine, family, found, entry)
                    except ReplayError as error:
                        if error.had_effects:
                            raise
                        decision = Decision.eager(Reason.REPLAY_FAILED, found.rows, str(error))
        return self._run_eagerly(decision, args, kwargs)

    def _routine(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Routine:
        if self._uniform_decode is None or self._uniform_decode(*args, **kwargs):
            return self._decode
        return self._mixed

    def _serve(self, routine: Routine, family: Family, found: Found, entry: CUDAGraphEntry) -> Any:
        self._publish(routine, family, entry)
        result = entry.serve(found.leaves, found.rows, self.stats)
        self._local.decision = found.decision.as_mode(entry.mode)
        return result

    def _plan(self, family: Family, found: Found) -> Plan:
        """What to do with a call that a graph of ``found.decision.size`` could serve; changes nothing."""
        decision, size = found.decision, found.decision.size
        entry = family.current(size)
        if entry is None:
            failure = family.blocked(size)
            if failure is not None:
                return Plan(None, Decision.eager(failure.reason, found.rows, failure.detail))
            return Plan(None, Decision.eager(self._graphs.admit((family.index, size)), found.rows))
        clash = entry.clash(found.leaves)
        if clash is not None:
            return Plan(None, Decision.eager(Reason.ALIASED_ARGUMENTS, found.rows, clash))
        if family.needs_check(entry, found.leaves, found.rows):
            return Plan(entry, Decision.eager(Reason.VERIFIED_NOW, found.rows))
        return Plan(entry, decision.as_mode(entry.mode))

    def _find(self, routine: Routine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
        """The family and the table's decision for a call; makes the family if it can have one."""
        table = routine.table
        if not table.sizes:
            reason = Reason.MODE_MISMATCH if self._config.mode.has_graphs() else Reason.DISABLED
            return Found(None, [], 0, Decision.eager(reason))
        key = (len(args), *kwargs)
        form = routine.forms.get(key)
        call_form = form.form if form is not None else CallForm(self._fn, len(args), tuple(kwargs))
        values = call_form.values(args, kwargs)
        known = form.find(values) if form is not None else None
        if known is None:
            if len(self._graphs.families) >= self._config.max_signatures:
                return Found(None, [], 0, Decision.eager(Reason.TOO_MANY_SIGNATURES))
            made = self._graphs.make_family(next(self._indices), call_form, values, self._rules, table.largest)
            if isinstance(made, Refusal):
                return Found(None, [], 0, Decision.eager(made.reason, detail=made.detail))
            family, leaves = made
            known = family, leaves, family.signature.rows
            if form is None:
                form = routine.forms[key] = Form(call_form, family)
            else:
                form.families.append(family)
        assert form is not None
        family, leaves, rows = known
        form.use(family)
        if not family.signature.has_rows:
            return Found(family, leaves, 1, routine.fixed)
        return Found(family, leaves, rows, table.decide(rows))

    def _capture(self, routine: Routine, family: Family, found: Found, decision: Decision) -> Any:
        size = found.decision.size
        self._local.decision = Decision.eager(Reason.CALL_RAISED, found.rows)  # if it does
        outcome = self._graphs.capture(family, found.leaves, found.rows, size, mode=routine.table.mode)
        self._publish(routine, family, outcome.entry)
        if outcome.entry is None:
            decision = Decision.eager(outcome.reason, found.rows, outcome.detail)
        return self._after_eager(decision, outcome)

    def _prewarm(
        self, routine: Routine, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Any, progress: bool
    ) -> None:
        table = routine.table
        found = self._find(routine, args, kwargs)
        family = found.family
        if family is None or found.decision.reason is Reason.NO_ROWS:
            raise ConfigError(f"prewarm cannot capture from this example: {found.decision.explain()}")
        wanted = routine.checked_sizes(sizes) if family.signature.has_rows else (1,)
        todo = [size for size in sorted(wanted, reverse=True) if size not in family.entries]
        if len(todo) > self._config.max_cached_graphs:
            raise ConfigError(
                f"prewarm of {len(todo)} sizes needs max_cached_graphs >= {len(todo)}, "
                f"got {self._config.max_cached_graphs}; raise it, or name fewer in sizes="
            )
        for size in todo:
            self._graphs.warm_up(family, family.resized(found.leaves, size), size)
        for size in progress_bar(todo, f"capturing {table.mode.name}", enabled=progress):
            rows = table.served_by(size)[0] if family.signature.has_rows else 1
            self._prewarm_size(routine, family, found.leaves, rows, size)

    def _prewarm_size(self, routine: Routine, family: Family, leaves: list[Any], rows: int, size: int) -> None:
        """Capture one size from its smallest batch, then check it with its largest."""
        few = family.resized(leaves, rows)
        outcome = self._graphs.capture(family, few, rows, size, mode=routine.table.mode, keep_effects=False)
        if outcome.entry is not None and outcome.entry.state is EntryState.CAPTURED:
            other = family.resized(leaves, size, shift=1)
            if family.differs(outcome.entry, other):
                outcome = self._graphs.verify(family, other, size, outcome.entry, keep_effects=False)
        self._publish(routine, family, outcome.entry)
        if outcome.entry is None and self._config.strict:
            raise FallbackError(f"prewarm could not capture {size} rows: {outcome.detail}", outcome.reason)

    def _publish(self, routine: Routine, family: Family, entry: CUDAGraphEntry | None) -> None:
        """Let the fast path see an entry that is verified, for every number of rows that it serves; until padding
        is proven by comparison with eager, for a full batch alone."""
        if entry is None or entry.state is not EntryState.VERIFIED:
            return
        decisions = routine.decisions_of(entry.size) if family.signature.has_rows else [routine.fixed]
        checked = [d for d in decisions if d.mode.has_graphs() and (not entry.unproven or d.rows == d.size)]
        family.served = family.served | {d.rows: (entry, d.as_mode(entry.mode)) for d in checked}

    def _after_eager(self, decision: Decision, outcome: Outcome) -> Any:
        self._local.decision = decision
        self.stats.record_miss(decision.reason, decision.rows)
        if self._config.strict and not decision.reason.leads_to_graph:
            raise FallbackError(decision.explain(), decision.reason) from outcome.error
        return self._hand_out(outcome.answer())

    def _run_eagerly(self, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._local.decision = decision
        self.stats.record_miss(decision.reason, decision.rows)
        if self._config.strict and not decision.reason.leads_to_graph:
            raise FallbackError(decision.explain(), decision.reason)
        return self._hand_out(self._fn(*args, **kwargs))

    def _hand_out(self, result: Any) -> Any:
        return self._graphs.hand_out(result)
