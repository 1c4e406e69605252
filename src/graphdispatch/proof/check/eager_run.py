"""The eager run that every capture and verification begins with; it also shows what no graph can hold.

Note [a run that is not traced]
    To trace the code of a run and to walk over Python state takes longer than the run. Where it is proven that Python
    takes the path of a graph that was captured before, it reads and changes what it did then, and the guard of that
    graph holds. So only the operators are watched: what they write is undone or done again as ever.
"""

import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from operator import call
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.nn.utils import parametrize

from ...backends.base import Graph
from ...backends.host_reads import CAPTURE_QUERIES
from ...backends.operator_mode import reveal_operators
from ...backends.operators import is_strided, storage_key, tensors_in
from ...backends.tracing import uncached_casts
from ...errors import CaptureError, error_of_signal
from ...reasons import Reason
from ...runtime.attributes import attribute_table
from ...runtime.flatten import FlatCall, Leaves
from ...runtime.request import CaptureRequest, CaptureResult
from ...runtime.signature import PLAIN_TENSORS
from ..check.licence import ArgumentMetadata
from ..state.guards import StateGuard
from ..state.objects import CONSTANTS, own_attributes
from ..state.reads import CodeNotes, metadata_names
from ..state.walk import StateWalk
from ..watch.bytecode import original_of
from ..watch.effects import EffectRecorder, retry_once, undo
from ..watch.operator_trace import TensorNames
from ..watch.trace import CodeTrace
from .failures import failed_result
from .licence import LikeGraph
from .output_objects import Opener, objects_in

_log = logging.getLogger("graphdispatch")


class Recording(NamedTuple):
    """A captured graph, and the outputs in its memory."""

    graph: Graph
    outputs: Any
    is_own: list[bool]
    """For each output tensor, whether it lies in the graph's memory or in a static input."""
    firsts: list[int]
    """For each output tensor, the place of the first one that is the same object."""
    given: list[int | None]
    """For each output tensor, the position of the argument that it is."""


@dataclass
class EagerRun:
    """One watched run on the real rows: its answer, what it wrote, and the random generator before and after."""

    answer: Any
    values: Sequence[Any]
    """The leaves of the call; ``Leaves`` where it had dicts or lists, which it may have changed."""
    arguments: list[torch.Tensor]
    """The tensors that it was given, in the order of the request's input specs: the caller's, or the static inputs."""
    effects: EffectRecorder
    rng_before: Any
    rng_after: Any
    draws: bool
    """Whether it drew from the device's default generator, or may have; else nobody touches that generator."""
    trace: CodeTrace
    """The code that the run executed, and the Python state as it was before."""
    changed: str | None = None
    """What Python state the run changed, in words, or None."""
    unseen: str | None = None
    """What state it advanced that cannot be put back, in words, or None."""
    warms_up: bool = False
    """Whether it ran on the static inputs, as the recording will."""
    like: LikeGraph | None = None
    """The graph whose code it ran, so that it was not traced."""
    recording: Recording | None = None
    """What was recorded of it, if it was recorded."""
    open_outputs: Callable[[Any], Any] = field(init=False)
    """Opens the objects among the outputs of a run that this run did not meet: see Note [objects among outputs]."""
    opened: Any = field(init=False)
    """The answer as ``open_outputs`` gives it."""
    outputs: list[torch.Tensor] = field(init=False)
    """Copies of the output tensors, in order."""
    written_inputs: dict[int, torch.Tensor] = field(init=False)
    """Copies of the arguments that the run wrote to, by index in the request's input specs."""

    def __post_init__(self) -> None:
        self.open_outputs = Opener(self.trace.walk.has_met).open
        self.opened = self.open_outputs(self.answer)
        self.outputs = [tensor.detach().clone() for tensor in tensors_in(self.opened)]
        written = ((i, value) for i, value in enumerate(self.arguments) if self.effects.writes_to(value))
        self.written_inputs = {i: value.detach().clone() for i, value in written}

    @property
    def runs_compiled(self) -> bool:
        """Whether it ran code of torch's compiler, which may compile again in a further run, and reads on the host."""
        return any(original_of(code) is not None for code in self.trace.codes.values())

    @property
    def may_do_otherwise(self) -> bool:
        """Whether its code may do something else in a run that is not recorded, or that is given other tensors than
        the static inputs; not so where it was not traced."""
        if self.like is not None:
            return False
        reads_more = self.metadata_read(compares=bool(self.effects.equated))
        return bool(reads_more) or self.runs_compiled or queries_capture(self.trace)

    def check_state(self) -> None:
        """Raise ``CaptureError`` if a run since then changed Python state, or drew where no graph draws."""
        _check_python_state(self.trace.walk.change())
        _check_draws(self.trace.walk.drew())

    def metadata_read(self, *, compares: bool) -> list[str]:
        """The names of what its code reads of arguments besides values; ``compares``: whether Python compared such
        tensors."""
        return metadata_names(self.trace.codes.values(), compares=self.trace.walk.has_identity or compares)

    def find_metadata(
        self, values: Sequence[Any], guard: StateGuard, former: ArgumentMetadata | None = None
    ) -> ArgumentMetadata | None:
        """What its code reads of the arguments besides values; ``former`` if that is the same, None if nothing."""
        tensors = set(map(id, (*self.arguments, *guard.tensors)))
        names = self.metadata_read(compares=any(map(tensors.issuperset, self.effects.equated)))
        if not names or (former is not None and former.names == names):
            return former
        return ArgumentMetadata(names, values, guard.tensors)


def roots_of(request: CaptureRequest) -> list[Any]:
    """Where the Python state of the call begins: the callable, and the arguments that are not copied."""
    copied = set(request.inputs.positions)
    kept = (value for place, value in enumerate(request.values) if place not in copied)
    return [request.call.fn, *(value for value in kept if not issubclass(type(value), CONSTANTS))]


def run_eagerly(
    request: CaptureRequest,
    *,
    on_static_inputs: bool = False,
    like: LikeGraph | None = None,
    record: Callable[..., tuple[Any, Recording]] | None = None,
) -> EagerRun | CaptureResult:
    """Run the call on the real rows, and watch what it writes; its code, too, unless that is ``like`` a graph's.

    With ``on_static_inputs`` it runs on these, after loading a full batch; so it is a warm-up, too. There ``record``
    may be what runs it, and records it.
    An error of the callable passes through. If the request does not want the effects, they are undone on every way out
    by an error. A ``CaptureResult`` says why there can be no graph: the batch could not be loaded, what the run
    overwrites could not be saved, or what it did could not be noted (no memory left). ``CAPTURE_WAITS``: a run that is
    not recorded may show more.
    """
    before = request.backend.rng_state()
    walk = StateWalk(*(roots_of(request) if like is None else ()))
    trace = CodeTrace(
        walk,
        skips_breaks=request.is_piecewise,
        within=FlatCall.__call__.__code__,
        spares=not request.keep_effects,
    )
    if (refusal := trace.refusal()) is not None:
        return failed_result(request, None, refusal, "")
    reveal_operators(request.backend.device)
    # Context variables that a run made only for the graph sets are set in a copy, since nobody could unset them.
    within: Callable[..., Any] = call if request.keep_effects else copy_context().run
    try:
        values, arguments = _values_of_run(request, on_static_inputs=on_static_inputs)
    except Exception as error:
        if not request.keep_effects and error_of_signal(error) is None:
            return failed_result(request, None, error, "copying the batch into the static inputs")
        raise
    effects = EffectRecorder(
        request.options.state_limit_bytes,
        strict=not request.keep_effects,
        tensor_names=TensorNames.of_arguments(arguments, request.inputs.specs) if on_static_inputs else None,
    )
    answer, recording, has_run, other_form = None, None, False, _changes_of_form([*arguments, *walk.tensors])
    try:
        with uncached_casts() if on_static_inputs else nullcontext():
            if record is not None:
                answer, recording = record(
                    request,
                    effects,
                    values,
                    Opener(walk.has_met).open,
                    **(_close_watch(request, effects, trace, arguments) if like is None else {}),
                )
            else:
                with trace if like is None else nullcontext(), effects.saving_host_access():
                    answer = within(request.call, values)
        has_run = True
        after, changed, drew = request.backend.rng_state(), within(walk.change) or other_form(), walk.drew()
        for region in effects.regions if effects.unsaved is None else ():  # else some memory may be gone
            region.after = region.read().clone()
        draws = effects.uses_rng or _pads_by_code(request)
        draws |= (effects.runs_custom or trace.ran_torch_random) and not torch.equal(before, after)
        warms_up = on_static_inputs and not queries_capture(like.guard.notes if like is not None else trace)
        run = EagerRun(
            answer, values, arguments, effects, before, after, draws, trace, changed, drew, warms_up, like, recording
        )
        if recording is None:
            effects.note_outputs(run.opened)
    except BaseException as error:
        if not request.keep_effects:
            undo_run(request, effects, before, walk)
        if recording is not None:
            recording.graph.reset()
        result = _without_graph(request, error, effects, trace, has_run=has_run, is_recorded=record is not None)
        if result is None:
            raise
        result.answer = answer
        return result
    trace.spares = True
    return run


class _WatchedTooLittleError(CaptureError):
    """One run does not show whether a graph can hold the call."""


def _wants_close_watch(error: Exception) -> bool:
    """Whether a run that was recorded failed in a way that another one, which is not, may explain: in the callable."""
    frames = traceback.walk_tb(error.__traceback__)
    is_of_call = any(frame.f_code is FlatCall.__call__.__code__ for frame, _ in frames)
    return is_of_call or isinstance(error, _WatchedTooLittleError)


def _close_watch(
    request: CaptureRequest, effects: EffectRecorder, trace: CodeTrace, arguments: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """How a run is recorded, if none was watched before. It raises where two runs are needed: what the code keeps out
    of sight (a cache), and objects that it returns, may be new in the first run alone."""

    def check(output: Any) -> None:
        check_outputs(output, effects, trace.walk, arguments)
        kept = effects.made_storages().difference(map(storage_key, tensors_in(output)))
        if kept or objects_in(output) is not None:
            raise _WatchedTooLittleError("a second run shows what the call makes each time", Reason.CAPTURE_UNSAFE)

    existed = existing_storages(trace.walk, map(storage_key, filter(is_strided, (*arguments, *request.tensors))))
    return {"existed": existed, "tracing": trace, "check": check}


def existing_storages(walk: StateWalk, *known: Iterable[int]) -> Callable[[int], bool]:
    """What says of a storage's key whether it was there before: it is among those that are ``known``, or within reach
    of the walk. Code may run into more of that meanwhile."""
    with torch._C.DisableTorchFunction():  # tensors of a model may refuse functions
        keys = set[int]().union(*known)

    def existed(key: int) -> bool:
        if key not in keys:
            with torch._C.DisableTorchFunction():
                keys.update(map(storage_key, filter(is_strided, walk.tensors)))
        return key in keys

    return existed


def _forms_of(tensors: Iterable[torch.Tensor]) -> list[tuple[type, bool, int]]:
    """What code may set of tensors without an operator: class, whether they require gradients, and what they are."""
    with torch._C.DisableTorchFunction():
        return [(type(one), one.requires_grad, one._cdata) for one in tensors]


def _changes_of_form(tensors: Sequence[torch.Tensor]) -> Callable[[], str | None]:
    """What tells later, in words, which of the things changed that code sets of tensors without an operator."""
    before = _forms_of(tensors)
    changed = "the class of a tensor, whether it requires a gradient, or which tensor it is (swap_tensors)"
    return lambda: changed if _forms_of(tensors) != before else None


def _without_graph(
    request: CaptureRequest,
    error: BaseException,
    effects: EffectRecorder,
    trace: CodeTrace,
    *,
    has_run: bool,
    is_recorded: bool,
) -> CaptureResult | None:
    """Why an eager run that failed gives no graph; None for an error that passes through."""
    if not isinstance(error, Exception) or error_of_signal(error) is not None:
        return None
    if isinstance(error, CaptureError) and trace.refusal() is not None:
        return failed_result(request, None, error, "")
    if has_run:
        return failed_result(request, None, error, "noting what the eager run did")
    if is_recorded:
        return (
            CaptureResult(None, None, Reason.CAPTURE_WAITS)
            if _wants_close_watch(error)
            else failed_result(request, None, error, "recording")
        )
    if not request.keep_effects and effects.unsaved is not None:
        return failed_result(request, None, error, "saving what it overwrites")
    return None


def queries_capture(notes: CodeNotes) -> bool:
    """Whether the code queries torch whether anyone captures, and so may do something else meanwhile."""
    return any(id(code) in notes.codes for code in CAPTURE_QUERIES)


def _pads_by_code(request: CaptureRequest) -> bool:
    return request.is_padded and any(pad.runs_code for spec in request.inputs.specs for pad in spec.pads)


def _values_of_run(request: CaptureRequest, *, on_static_inputs: bool) -> tuple[Sequence[Any], list[torch.Tensor]]:
    """The values that the callable gets, and its padded arguments among them."""
    if on_static_inputs:
        request.inputs.load(request.values, request.rows, request.size)
        arguments = [view.detach() for view in request.inputs.views(request.size)]
        return request.call.in_new_containers(request.values_with(arguments)), arguments
    # The dicts and lists of a run made only for the graph are its own: an example is left as it is.
    values = request.values if request.keep_effects else request.call.in_new_containers(request.values)
    return values, request.arguments()


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
    if not torch.is_inference_mode_enabled() and any(one.target.is_inference() for one in eager.effects.regions):
        raise CaptureError(
            "the call writes to a tensor that was made in inference mode, and is made outside of it; call it within "
            "torch.inference_mode()",
            Reason.CAPTURE_UNSAFE,
        )
    _check_python_state(eager.changed)
    _check_draws(eager.unseen)
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
    if isinstance(eager.values, Leaves) and not eager.values.still_fit():
        raise CaptureError(
            "the call changes a dict or list that it was given (d[...] = ..., list.append), which a replay would leave "
            "as it is; return the new values instead",
            Reason.STATE_REBOUND,
        )
    _check_reads(request, eager)
    if eager.recording is None or eager.like is not None:
        walk = eager.trace.walk if eager.like is None else None
        check_outputs(eager.opened, eager.effects, walk, eager.arguments)


def check_outputs(
    outputs: Any, effects: EffectRecorder, walk: StateWalk | None, arguments: Sequence[torch.Tensor]
) -> None:
    """Raise ``CaptureError`` if no graph can return what a run gave. ``walk`` has met what was there before it; without
    one it is not looked where tensors come from."""
    for output in tensors_in(outputs):
        if output.requires_grad:
            raise CaptureError(
                "an output requires a gradient, although gradients are off: it is a parameter or a view of one, or the "
                "call switches gradients on; return its detach()",
                Reason.NEEDS_GRADIENTS,
            )
        if type(output) not in PLAIN_TENSORS or not is_strided(output):
            raise CaptureError(
                f"an output is a {'nested ' * output.is_nested}{type(output).__name__} with layout {output.layout}",
                Reason.OUTPUT_UNSUPPORTED,
            )
        if walk is None:
            continue
        existed = existing_storages(walk, effects.outside, map(storage_key, arguments))
        if not effects.made(output) and not existed(storage_key(output)):
            raise CaptureError(
                f"an output of shape {tuple(output.shape)} comes from no operator, and did not exist before: work "
                "outside of torch's dispatcher made it (torch.frombuffer, torch.get_rng_state), and a graph would "
                "return it for ever; return its clone() from an eager_break in PIECEWISE mode, or make it outside",
                Reason.OUTPUT_UNSUPPORTED,
            )
        given = list(own_attributes(output))
        if given and not walk.has_met(output):
            raise CaptureError(
                f"an output carries the attributes {given}, which no replay would set; return them beside it",
                Reason.OUTPUT_UNSUPPORTED,
            )


def _check_draws(drew: str | None) -> None:
    """Raise ``CaptureError`` if a run drew from a generator that no graph draws from; ``drew`` says which."""
    if drew is not None:
        raise CaptureError(
            f"the call draws from {drew}, and a graph would keep the numbers of its capture; draw with torch",
            Reason.STATE_UNSEEN,
        )


def _check_reads(request: CaptureRequest, eager: EagerRun) -> None:
    """Raise ``CaptureError`` if the run used what a replay neither sees nor repeats."""
    if eager.trace.is_deaf:
        raise CaptureError(
            "Python does not tell which code runs inside of a trace or profile function, as at a debugger's prompt, or "
            "beside a profiler in compiled code; call it outside",
            Reason.STATE_UNSEEN,
        )
    if eager.trace.seeded_generator is not None:
        raise CaptureError(
            f"the call sets a random generator ({eager.trace.seeded_generator}), which no replay does; seed it before "
            "the call",
            Reason.STATE_REBOUND,
        )
    if request.backend.capture_executes and id(_package_code()) in eager.trace.codes:
        raise CaptureError(
            "the call runs a package of AOTInductor, whose kernels no graph of this backend holds; serve the model "
            "that it was made of",
            Reason.CAPTURE_UNSAFE,
        )
    unseen = eager.trace.unseen(roots_of(request))
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
            "(self.x.copy_(...)), or a graph would go on using the old value; if its first run alone does that, call "
            "it once before a prewarm",
            Reason.STATE_REBOUND,
        )
