"""``graphed()``: any callable with a changing batch size, served by captured graphs, right every time.

The front door for everyone. A call on the fast path does five things: find the spelling, compare the arguments with
the signature, compare the weights with the fingerprint, look the number of rows up, serve. Anything else takes the
slow path, under a lock, where captures and checks happen.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar, cast

import torch

from ..call.rules import callable_name, make_rules
from ..capture.piecewise import BreakFigures, break_figures
from ..config import CUDAGraphOptions, parse_mode, resized, roomy_config
from ..decide.decision import Decision
from ..errors import ConfigError, ReplayError
from ..memory.accounting import MemoryReport
from ..memory.budget import MemoryBudget
from ..memory.entry import CUDAGraphEntry
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..serve.estimate import MemoryEstimate
from ..serve.prewarm import Limits, PrewarmReport, capture_size, captured_sizes, estimate, prewarm
from ..serve.slow_path import SlowPath
from ..stats import EvictionReason

if TYPE_CHECKING:
    from ..report import Report

__all__ = ["Graphed", "graphed"]

P = ParamSpec("P")
R = TypeVar("R")


class SizePlan(Protocol):
    """What has chosen sizes, such as a ``Plan``; one that has ``min_batches_of`` as well says what runs eagerly."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all modes, increasing."""

    def sizes_of(self, mode: CUDAGraphMode) -> tuple[int, ...]:
        """The sizes of the graphs of a runtime mode, increasing; none if it was not planned for."""


def graphed(
    fn: Callable[P, R],
    *,
    dynamic: Mapping[str, int],
    pad: Mapping[str, Any] | None = None,
    static: Iterable[str] = (),
    max_size: int | None = None,
    sizes: str | Sequence[int] | SizePlan | PathLike[str] = "auto",
    mode: str | CUDAGraphMode = "FULL",
    outputs: str | None = None,
    out: Any = None,
    strict: bool = False,
    backend: str = "auto",
    max_cached_graphs: int | None = None,
    memory_budget_bytes: int | None = None,
    eviction: str = "frecency",
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

    ``sizes`` are the sizes to capture, a name (``vllm``), a plan, or the path of a saved plan or profile; it is at most
    ``max_size`` (default 256). A size is captured when seen for the ``capture_after``-th time within ``capture_window``
    uses, or by ``prewarm``. When ``max_cached_graphs`` or ``memory_budget_bytes`` is reached, the policy
    ``eviction`` (as in ``CUDAGraphConfig``) says which graph goes; callables may share ``budget``.
    ``outputs`` (default: as in ``options``): ``"clone"`` gives the caller copies, ``"view"`` a handle (``.get()``) that
    raises ``StaleOutputError`` after the next replay, ``"ring:3"`` such a handle on the next of three preallocated
    copies, which raises after three further calls, ``"static"`` the graph's own tensors. ``out``, a tensor or a nest of
    them with at least ``max_size`` rows, is where all outputs go: a call returns views of its first rows, the next call
    overwrites them, a batch that needs more is an error. ``strict`` raises ``FallbackError`` instead of an eager step.

    ``mode`` is ``"FULL"`` (one graph for the call), ``"PIECEWISE"`` (graphs between the parts that ``eager_break``
    marks), ``"NONE"``, or one that tells uniform decode batches, served by ``FULL`` graphs, from others:
    ``"FULL_AND_PIECEWISE"``, ``"FULL_DECODE_ONLY"``. For these two ``uniform_decode`` is called with each call's
    arguments and says which it is.

    Graphs are for inference. A call that needs gradients (gradients are on, and an input or a captured tensor requires
    one, or a module that does is in training mode) runs eagerly; every other call runs under ``torch.no_grad()``.
    Raises ``ConfigError`` for a bad option, here where it can be told and else at the first call. Thread-safe.
    """
    settings: dict[str, Any] = {"mode": parse_mode(mode), "backend": backend, "strict": strict}
    settings |= {"memory_budget_bytes": memory_budget_bytes, "eviction": eviction, "max_signatures": max_signatures}
    settings |= {"capture_after": capture_after, "capture_window": capture_window}
    settings["options"] = _options(options, outputs)
    if isinstance(sizes, str | PathLike):
        from ..plan.saved import read_sizes  # here, since serving must not load planning

        sizes = cast(SizePlan, read_sizes(sizes))
    config = roomy_config(sizes, max_size, max_cached_graphs, settings)
    rules = make_rules(fn, dynamic, {} if pad is None else pad, static)
    return Graphed(SlowPath(fn, config, rules, uniform_decode=uniform_decode, budget=budget, out=out))


def _options(options: CUDAGraphOptions | None, outputs: str | None) -> CUDAGraphOptions:
    """The options with ``outputs``. Raises ``ConfigError`` where the two contradict each other."""
    chosen = CUDAGraphOptions.or_default(options, "options")
    if chosen.inputs != "copy":
        raise ConfigError(
            f"options.inputs must be 'copy' for graphed, got {chosen.inputs!r}; name the tensors whose address never "
            "changes in static=, or use CUDAGraphWrapper"
        )
    if outputs is None or outputs == chosen.outputs:
        return chosen
    if chosen.outputs != CUDAGraphOptions().outputs:
        raise ConfigError(f"outputs={outputs!r} contradicts options.outputs={chosen.outputs!r}; give one of them")
    return chosen.replace(outputs=outputs)


class Graphed(Generic[P, R]):
    """A callable served by graphs; made by ``graphed()``. Attributes of the wrapped callable are reachable on it, but
    are set on the callable itself."""

    __slots__ = ("__weakref__", "_decode", "_graphs", "_is_split", "_local", "_slow", "stats")

    def __init__(self, slow_path: SlowPath) -> None:
        self._slow = slow_path
        self._graphs = slow_path.graphs
        self._local = slow_path.local
        self._decode = slow_path.decode
        self._is_split = slow_path.uniform_decode is not None
        self.stats = self._graphs.stats
        """What happened so far: hits, captures, padding, and the reason for every eager step."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Serve one call, by a graph where one fits and eagerly elsewhere. Raises what the callable raises."""
        if torch.is_grad_enabled():
            return cast(R, self._call_with_gradients_on(args, kwargs))
        routine = self._slow.routine(args, kwargs) if self._is_split else self._decode
        form = routine.forms.get((len(args), *kwargs))
        if form is not None:
            group, is_flat = form.latest
            leaves = [*args, *kwargs.values()] if is_flat else group.caller.flatten(form.form.values(args, kwargs))
            if leaves is not None:
                rows = group.signature.match(leaves)
                hit = group.served.get(rows)
                if hit is not None and self._graphs.may_serve(hit[0], leaves):
                    entry, decision = hit
                    try:
                        result: R = entry.serve(leaves, rows, self.stats)
                    except ReplayError as error:
                        if error.had_effects:
                            raise
                        return cast(R, self._slow.step(args, kwargs))
                    self._local.decision = decision
                    return result
        return cast(R, self._slow.step(args, kwargs))

    @property
    def last_decision(self) -> Decision | None:
        """The decision of the calling thread's latest call, or None before the first."""
        return getattr(self._local, "decision", None)

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """How such a call would be served now, in one line; nothing is run or counted."""
        if torch.is_grad_enabled() and self._graphs.needs_gradients(args, kwargs):
            return Decision.eager(Reason.NEEDS_GRADIENTS).explain()
        with torch.no_grad(), self._graphs.lock:
            found = self._slow.find(self._slow.routine(args, kwargs), args, kwargs)
            if found.group is None or found.decision.mode is CUDAGraphMode.NONE:
                return found.decision.explain()
            return self._slow.plan(found.group, found).explain()

    def prewarm(
        self,
        *args: Any,
        sizes: Sequence[int] | None = None,
        progress: bool = False,
        max_seconds: float | None = None,
        max_bytes: int | None = None,
        **kwargs: Any,
    ) -> PrewarmReport:
        """Capture ``sizes`` (default: all) now, largest first, from an example call of any number of rows.

        The example's rows are repeated to fill each size; whatever the runs write is put back, so that the call leaves
        no effect. Each graph is checked with padding on one batch and without on another; where the example's rows are
        all alike that proves nothing of padding, and serving compares the first padded batches. A size that cannot be
        captured stays eager, with its reason in ``explain``; with ``strict`` it raises ``FallbackError``.

        All sizes are run once before any is captured. ``max_seconds`` and ``max_bytes`` (default:
        ``memory_budget_bytes``) are budgets of time and of memory held: capturing stops before it passes one, and the
        report says which sizes were left out. They are captured later, as they come.
        """
        with torch.no_grad(), self._graphs.lock:
            limits = Limits(max_seconds, max_bytes)
            return prewarm(self._slow, args, kwargs, sizes=sizes, limits=limits, progress=progress)

    def estimate_memory(self, *args: Any, sizes: Sequence[int] | None = None, **kwargs: Any) -> MemoryEstimate:
        """What graphs of ``sizes`` (default: all) will hold, from an example call, before they are captured.

        The two largest are captured on trial and thrown away; the call leaves no effect. Raises ``ConfigError`` for an
        example or a size that cannot be, and ``CaptureError`` if there can be no graph.
        """
        with torch.no_grad(), self._graphs.lock:
            return estimate(self._slow, args, kwargs, sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The capture sizes that calls are padded to now."""
        return self._decode.table.sizes or self._slow.mixed.table.sizes

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """Those of calls that are not uniform decode, in a mode that tells them apart; else the same."""
        return self._slow.mixed.table.sizes

    def use_sizes(self, sizes: str | Sequence[int] | SizePlan) -> None:
        """Pad calls to these capture sizes from now on: as for ``graphed``, a plan, a name, or sizes.

        Graphs of sizes that stay go on serving; the others are released, and all of them if the largest size grows.
        Raises ``ConfigError`` for sizes that cannot be; nothing has changed then.
        """
        with self._graphs.lock:
            self._slow.use_sizes(resized(self._slow.config, sizes))

    def keep_examples(self) -> None:
        """Keep two rows of one call of each signature from now on, so that ``capture_size`` has something to capture
        with; tensors without a batch dimension are kept as they are."""
        with self._graphs.lock:
            self._slow.keeps_examples = True
            for group in self._graphs.groups.values():
                group.served = {}  # the next call takes the slow path, which keeps the example

    def capture_size(self, size: int) -> bool:
        """Capture one size now, while nothing is to be served, for every signature of which an example is kept.

        It may be one that ``use_sizes`` brings in later, up to the largest size now. Returns whether there is a graph
        of it then; it leaves no effect, and an example that the callable refuses is left out. Raises ``ConfigError``
        for a size that is too large, ``FallbackError`` with ``strict``.
        """
        with torch.no_grad(), self._graphs.lock:
            return capture_size(self._slow, size)

    def invalidate(self, tag: str = "") -> None:
        """Release all graphs, since what they captured changed in a way that no guard sees; calls capture anew.

        ``tag`` says what changed, and is kept with ``stats.last_evictions``.
        """
        with self._graphs.lock:
            self._graphs.rearm(EvictionReason.INVALIDATED, tag)

    def sleep(self, tag: str = "") -> None:
        """Release graphs, pool and buffers, and run calls eagerly until ``wake()``: while weights are unloaded or
        replaced. Waits for calls that a graph serves now."""
        with self._graphs.lock:
            self._graphs.sleep(tag)

    def wake(self) -> None:
        """End ``sleep()``: sizes are captured again as they come. Harmless when awake."""
        with self._graphs.lock:
            self._graphs.wake()

    def clear(self) -> None:
        """Release all graphs and their memory; calls capture anew. The statistics stay."""
        with self._graphs.lock:
            self._slow.clear()

    @property
    def entries(self) -> list[CUDAGraphEntry]:
        """The captured graphs, by size."""
        return sorted(self._graphs.cache, key=lambda entry: entry.size)

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """The sizes that have a graph for every signature seen so far, increasing."""
        with self._graphs.lock:
            return captured_sizes(self._slow)

    @property
    def breaks(self) -> list[BreakFigures]:
        """Where PIECEWISE graphs break, how often, and which share of their time that takes; the longest first."""
        return break_figures(self.entries)

    @property
    def automatic_breaks(self) -> dict[torch.nn.Module, str]:
        """With ``breaks="auto"``: the modules that run eagerly since they cost the full graph, and what each did."""
        return dict(self._graphs.auto_breaks.reasons) if self._graphs.auto_breaks is not None else {}

    @property
    def memory_bytes(self) -> int:
        """Bytes held: the pool, what graphs hold for themselves, and the static inputs."""
        return self._graphs.memory_bytes

    def memory_report(self) -> MemoryReport:
        """The bytes held, part by part and graph by graph."""
        return self._graphs.memory_report()

    def report(self) -> "Report":
        """What happened so far, as a page to look at: ``report().save("report.html")``. Needs the extra ``report``."""
        from ..report import callable_report

        return callable_report(self)

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the cache's accounting is off; cheap enough to run when idle."""
        with self._graphs.lock:
            self._graphs.check_integrity()

    def unwrap(self) -> Callable[P, R]:
        """The wrapped callable."""
        return self._slow.fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._slow.fn, name)

    def __repr__(self) -> str:
        return (
            f"<Graphed {callable_name(self._slow.fn)}: {len(self._graphs.cache)} graphs of at most "
            f"{self._decode.table.largest} rows, "
            f"{100 * self.stats.hit_rate():.1f} % of {self.stats.calls} calls served>"
        )

    def _call_with_gradients_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._graphs.needs_gradients(args, kwargs):
            return self._slow.run_eagerly(Decision.eager(Reason.NEEDS_GRADIENTS), args, kwargs)
        with torch.no_grad():
            return self(*args, **kwargs)
