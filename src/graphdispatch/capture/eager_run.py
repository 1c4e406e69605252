"""The watched eager run that every capture and verification begins with; it also shows what no graph can hold.

``warm_up`` runs a call before its capture, for what the first run alone does.

Note [autocast inside a capture]
    Autocast keeps cast copies of weights until the outermost region ends, in one cache for all threads. A graph that
    reads such a copy would go on reading it after the weights were written in place, and after the copy was freed. A
    copy that a capture makes lies in the graph's memory, and eager code of the same region would read it. So the cache
    is off while a call is warmed up and recorded: the graph casts the weights itself in each replay.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from ..backends.insight import reveal_operators
from ..backends.modes import profiler_range
from ..backends.operators import is_strided, tensors_in
from ..call.rules import graph_name
from ..call.signature import PLAIN_TENSORS
from ..call.spec import VALUES, FlatCall, Leaves, is_tensor
from ..errors import CaptureError
from ..memory.argument_metadata import ArgumentMetadata
from ..memory.object_outputs import Opener
from ..memory.program import Labels
from ..memory.windows import WINDOWS
from ..reasons import Reason
from ..state.guards import StateGuard
from ..state.objects import attribute_table
from ..state.reads import metadata_names
from ..state.trace import CodeTrace
from ..state.walk import StateWalk
from .effects import EffectRecorder, retry_once, undo
from .request import CaptureRequest, CaptureResult, failed_result

_log = logging.getLogger("graphdispatch")

_ASKS = torch.cuda.graphs.is_current_stream_capturing.__code__
"""Code that calls it may do something else while somebody captures."""


@dataclass
class EagerRun:
    """One watched run on the real rows: its answer, what it wrote, and the random generator before and after."""

    answer: Any
    arguments: list[torch.Tensor]
    """The tensors that it was given, in the order of the request's input specs: the caller's, or the static inputs."""
    opened: Any
    """The answer as ``open_outputs`` gives it."""
    open_outputs: Callable[[Any], Any]
    """Opens the objects among the outputs of a run that this run did not meet: see ``memory/object_outputs.py``."""
    effects: EffectRecorder
    outputs: list[torch.Tensor]
    """Copies of the output tensors, in order."""
    written_inputs: dict[int, torch.Tensor]
    """Copies of the arguments that the run wrote to, by index in the request's input specs."""
    rng_before: Any
    rng_after: Any
    draws: bool
    """Whether it drew from the device's default generator, or may have; else nobody touches that generator."""
    trace: CodeTrace
    """The code that the run executed, and the Python state as it was before."""
    changed: str | None
    """What Python state the run changed, in words, or None."""
    unseen: str | None
    """What state it advanced that cannot be put back, in words, or None."""
    warms_up: bool = False
    """Whether it ran on the static inputs, as the recording will."""

    def check_state(self) -> None:
        """Raise ``CaptureError`` if a run since then changed Python state, or drew where no graph draws."""
        _check_python_state(self.trace.walk.change(self.trace.touched))
        check_draws(self.trace.walk.drew())

    def find_metadata(
        self, values: Sequence[Any], guard: StateGuard, known: ArgumentMetadata | None = None
    ) -> ArgumentMetadata | None:
        """What its code tells of the arguments besides their values; ``known`` if that is the same, None if nothing."""
        names = metadata_names(self.trace.codes)
        if not names or (known is not None and known.names == names):
            return known
        return ArgumentMetadata(names, values, guard.tensors)


def run_eagerly(request: CaptureRequest, *, on_static_inputs: bool = False) -> EagerRun | CaptureResult:
    """Run the call on the real rows, and watch what it writes.

    With ``on_static_inputs`` it runs on these, which hold a full batch; so it is a warm-up, too.
    An error of the callable passes through. If the request does not want the effects, they are undone on every way out
    by an error. A ``CaptureResult`` says why there can be no graph: what the run overwrites could not be saved, or what
    it did could not be noted (no memory left).
    """
    before = request.backend.rng_state()
    walk = StateWalk(*request.roots)
    trace = CodeTrace(
        walk,
        skips_breaks=request.is_piecewise,
        within=FlatCall.__call__.__code__,
        spares=not request.keep_effects,
    )
    refusal = trace.refusal()
    if refusal is not None:
        return failed_result(request, None, refusal, "")
    reveal_operators()
    # Context variables that a run made only for the graph sets are set in a copy, since nobody could unset them.
    within: Callable[..., Any] = _call if request.keep_effects else copy_context().run
    values, arguments, labels = request.values, request.arguments(), None
    if on_static_inputs:
        values, arguments = request.static_values(), list(request.inputs.views(request.size))
        labels = Labels.of_arguments(arguments)
    effects = EffectRecorder(request.options.state_limit_bytes, strict=not request.keep_effects, labels=labels)
    answer, has_run = None, False
    open_outputs = opener(walk)
    try:
        with uncached_casts() if on_static_inputs else nullcontext(), trace, effects.guarding():
            answer = within(request.call, values)
        has_run = True
        after = request.backend.rng_state()
        changed, drew = within(walk.change, trace.touched), walk.drew()
        for region in effects.regions:
            region.after = region.read().clone()
        opened = open_outputs(answer)
        outputs = [tensor.detach().clone() for tensor in tensors_in(opened)]
        written = {i: t.detach().clone() for i, t in enumerate(arguments) if effects.writes_to(t)}
    except BaseException as error:
        if not request.keep_effects:
            undo_run(request, effects, before, walk)
        if isinstance(error, CaptureError) and trace.refusal() is not None:
            return failed_result(request, None, error, "")
        if isinstance(error, Exception) and has_run:
            return failed_result(request, answer, error, "noting what the eager run did")
        if isinstance(error, Exception) and not request.keep_effects and effects.unsaved is not None:
            return failed_result(request, None, error, "saving what it overwrites")
        raise
    pads_by_code = request.is_padded and any(pad.runs_code for spec in request.inputs.specs for pad in spec.pads)
    may_draw = effects.runs_custom or trace.sets_generator
    draws = effects.uses_rng or pads_by_code or (may_draw and not torch.equal(before, after))
    if not request.keep_effects and (changed or drew):
        walk.restore(generators=True)
    trace.spares = True
    return EagerRun(
        *(answer, arguments, opened, open_outputs, effects, outputs, written),
        *(before, after, draws, trace, changed, drew, on_static_inputs and _ASKS not in trace.codes),
    )


def load_static_inputs(request: CaptureRequest) -> CaptureResult | None:
    """Copy the batch into the static inputs. Returns a result if that fails: there may be no memory for them."""
    try:
        request.inputs.load(request.values, request.rows, request.size)
    except Exception as error:
        return failed_result(request, None, error, "copying the batch into the static inputs")
    return None


@contextmanager
def uncached_casts() -> Iterator[None]:
    """Within the block the calling thread casts weights anew each time. The cache is cleared before and after."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


def _call(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


def opener(walk: StateWalk) -> Callable[[Any], Any]:
    """What opens the outputs of one call's runs; ``walk`` has met what was there before them."""
    made: list[Any] = []

    def open_outputs(output: Any) -> Any:
        leaves = tree_leaves(output, is_leaf=lambda node: type(node) is torch.Size)
        if all(is_tensor(leaf) or (type(leaf) in VALUES and type(leaf) is not torch.Size) for leaf in leaves):
            return output
        if not made:
            made.append(Opener(walk.knows))
        return made[0].open(output)

    return open_outputs


def undo_run(request: CaptureRequest, effects: EffectRecorder, rng_before: Any, walk: StateWalk | None = None) -> None:
    """Put back what a run wrote and rebound, and the random generator if it drew. Raises ``DeviceLostError``."""

    def put_back() -> None:
        if walk is not None:
            walk.restore(generators=True)
        undo(effects.regions)
        if effects.uses_rng or effects.runs_custom:
            request.backend.set_rng_state(rng_before)

    retry_once(put_back, request.backend)


def check_may_capture(request: CaptureRequest, eager: EagerRun) -> None:
    """Raise ``CaptureError`` if the eager run shows that no graph can hold the call.

    Call it before anything is run again: a run that cannot be undone must not be repeated.
    """
    unsaved = eager.effects.unsaved
    if isinstance(unsaved, CaptureError):
        raise unsaved
    if unsaved is not None:
        raise CaptureError(
            f"saving what the call overwrites failed: {unsaved}", request.backend.classify_error(unsaved)
        )
    _check_python_state(eager.changed)
    check_draws(eager.unseen)
    if eager.trace.walk.overflow is not None:
        raise CaptureError(
            f"the call reaches too many Python objects to watch them all, at {eager.trace.walk.overflow}; keep large "
            "tables out of the callable's reach, or in a tensor",
            Reason.STATE_UNSEEN,
        )
    if getattr(parametrize, "_cache_enabled", 0):
        raise CaptureError(
            "parametrizations are cached (torch.nn.utils.parametrize.cached()), and a graph would go on reading the "
            "cached values; capture outside that block, for example with prewarm()",
            Reason.CAPTURE_UNSAFE,
        )
    if isinstance(request.values, Leaves) and not request.values.still_fit():
        raise CaptureError(
            "the call changes a dict or list that it was given (d[...] = ..., list.append), which a replay would leave "
            "as it is; return the new values instead",
            Reason.STATE_REBOUND,
        )
    _check_reads(request, eager)
    for output in tensors_in(eager.opened):
        if output.requires_grad:
            raise CaptureError("an output requires a gradient; call under torch.no_grad()", Reason.NEEDS_GRADIENTS)
        if type(output) not in PLAIN_TENSORS or not is_strided(output):
            raise CaptureError(
                f"an output is a {'nested ' * output.is_nested}{type(output).__name__} with layout {output.layout}",
                Reason.OUTPUT_UNSUPPORTED,
            )
        given = [name for name in attribute_table(output) or () if not f"{name}".startswith("_dynamo_")]
        if given and not eager.trace.walk.knows(output):
            raise CaptureError(
                f"an output carries the attributes {given}, which no replay would set; return them beside it",
                Reason.OUTPUT_UNSUPPORTED,
            )


def check_draws(drew: str | None) -> None:
    """Raise ``CaptureError`` if a run drew from a generator that no graph draws from; ``drew`` says which."""
    if drew is not None:
        raise CaptureError(
            f"the call draws from {drew}, and a graph would keep the numbers of its capture; draw with torch",
            Reason.STATE_UNSEEN,
        )


def _check_reads(request: CaptureRequest, eager: EagerRun) -> None:
    """Raise ``CaptureError`` if the run used what a replay neither sees nor repeats."""
    if eager.trace.seeds is not None:
        raise CaptureError(
            f"the call sets a random generator ({eager.trace.seeds}), which no replay does; seed it before the call",
            Reason.STATE_REBOUND,
        )
    if not request.backend.holds_any_kernel and _package_code() in eager.trace.codes:
        raise CaptureError(
            "the call runs a package of AOTInductor, whose kernels no graph of this backend holds; serve the model "
            "that it was made of",
            Reason.CAPTURE_UNSAFE,
        )
    unseen = eager.trace.unseen(request.roots)
    if unseen is not None:
        raise CaptureError(
            f"the call uses what nobody can compare or put back: {unseen}; use it outside of the callable, and pass "
            "what it gives",
            Reason.STATE_UNSEEN,
        )
    names = eager.trace.names | eager.trace.of_breaks.names
    for spec in request.inputs.specs:
        attributes = (attribute_table(request.values[spec.position]) or {}).keys() & names
        if attributes:
            raise CaptureError(
                f"argument {spec.name!r} carries the attributes {sorted(attributes)}, which a graph would not see "
                "change; pass them as arguments",
                Reason.STATE_UNSEEN,
            )


def _package_code() -> CodeType | None:
    """The code that runs a package of AOTInductor; None if nobody has loaded one."""
    packages = sys.modules.get("torch.export.pt2_archive._package")
    kind = getattr(packages, "AOTICompiledModel", object)
    return getattr(vars(kind).get("__call__"), "__code__", None)


def _check_python_state(changed: str | None) -> None:
    """Raise ``CaptureError`` if a run changed Python state; ``changed`` says what, in words."""
    if changed is not None:
        raise CaptureError(
            f"the call changes Python state: {changed}; keep it in a tensor and write that in place "
            "(self.x.copy_(...)), or a graph would go on using the old value",
            Reason.STATE_REBOUND,
        )


def warm_up(request: CaptureRequest) -> None:
    """Run the call on the static inputs and put everything back; for warming all sizes before capturing any.

    Python state that the first run alone changes (a table that the callable makes when it is first called) stays. State
    that every run changes is put back. An error of the callable is only logged here: ``capture_entry`` reports it.
    """
    window = WINDOWS.capturing(request.reach, request.pool)
    with window as is_alone, request.pool.lock, request.backend.watched():
        if not is_alone:
            return
        request.pool.order_after_last_use()
        with profiler_range("warm-up", graph_name(request.call.fn, request.key)):
            copy_context().run(_run_twice, request)  # nobody could unset a context variable


def _run_twice(request: CaptureRequest) -> None:
    """Run the call on the static inputs, and once more if that changes Python state; put that back unless the second
    run shows that only a first one changes it."""
    first = _run_once(request)
    if first is None or (first.drew() is None and first.change() is None):
        return
    if first.drew() is None:
        if first.unrestorable is not None:
            return
        second = _run_once(request)
        if second is not None and second.change() is None:
            return
    first.restore(generators=True)


def _run_once(request: CaptureRequest) -> StateWalk | None:
    """Run the call once on the static inputs, if that can be undone, and put back what it writes; the Python state as
    it was before. None if it fails, after which all is as before."""
    rng_before = request.backend.rng_state()
    walk = StateWalk(*request.roots)
    trace = CodeTrace(walk, within=FlatCall.__call__.__code__, spares=True)
    if trace.refusal() is not None:
        return None
    reveal_operators()
    effects = EffectRecorder(request.options.state_limit_bytes, strict=True)
    try:
        # Other views each time: state that keeps one of them is not the same after a second run.
        values = request.values_with(view.detach() for view in request.inputs.views(request.size))
        request.inputs.load(request.values, request.rows, request.size)
        with request.backend.rehearsing(), trace, effects.guarding():
            request.call(values)
    except Exception as error:
        request.backend.raise_if_lost(error)
        _log.debug("warming up %s failed: %s", request.key, error)
        walk.restore(generators=True)
        return None
    finally:
        undo_run(request, effects, rng_before)
    return walk
