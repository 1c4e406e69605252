"""The eager run that every capture and verification begins with; it also shows what no graph can hold.

Note [a run that is not traced]
    To trace the code of a run and to walk over Python state takes longer than the run. Where it is proven that Python
    takes the path of a graph that was captured before, it reads and changes what it did then, and the guard of that
    graph holds. So only the operators are watched: what they write is undone or done again as ever.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ...backends.host_reads import CAPTURE_QUERIES
from ...backends.operator_mode import reveal_operators
from ...backends.operators import is_strided, storage_key, tensors_in
from ...errors import CaptureError, error_of_signal
from ...reasons import Reason
from ...runtime.attributes import attribute_table
from ...runtime.flatten import FlatCall, Leaves
from ...runtime.protocols import CaptureRequest, CaptureResult
from ...runtime.signature import PLAIN_TENSORS
from ..breaks import breaks_at
from ..check.licence import ArgumentMetadata
from ..state.guards import StateGuard
from ..state.objects import CONSTANTS, own_attributes
from ..state.reads import CodeNotes, metadata_names
from ..state.walk import StateWalk
from ..watch.bytecode import original_of
from ..watch.effects import EffectRecorder, Ending, retry_once, undo
from ..watch.operator_trace import TensorNames
from ..watch.trace import CodeTrace
from .failures import failed_result, running_frames
from .licence import LikeGraph
from .outputs import Opener, objects_in
from .run import CallRun, Recording

_log = logging.getLogger("graphdispatch")


class WatchedTooLittleError(CaptureError):
    """A run was watched too little for a graph; one that is watched closely will show whether there is one."""

    def __init__(self, what: str) -> None:
        super().__init__(what, Reason.CAPTURE_WAITS)


class EagerRun:
    """One watched run on the real rows: its answer, what it wrote, and the random generator before and after."""

    def __init__(
        self,
        request: CaptureRequest,
        like: LikeGraph | None,
        *,
        on_static_inputs: bool = False,
        records: bool = False,
        may_refuse: bool = False,
    ) -> None:
        self._request, self._records = request, records
        self.like = like
        """The graph whose code it runs, so that it is not traced."""
        self.started = request.clock() if records else 0.0
        """When it began, if it is recorded; by the request's clock."""
        self.rng_before: Any = request.backend.rng_state()
        self.rng_after: Any = None
        walk = StateWalk(*(roots_of(request) if like is None else ()))
        self.trace = CodeTrace(
            walk,
            skips_breaks=request.is_piecewise,
            within=FlatCall.__call__.__code__,
            spares=not request.keep_effects,
        )
        """The code that the run executes, and the Python state as it was before."""
        self.refusal = refusal = _Refusal(request, self.trace)
        self.open_outputs = Opener(walk.has_met).open
        """Opens the objects among the outputs of a run: see Note [objects among outputs]."""
        self.answer: Any = None
        self.has_answered = False
        self.changed: str | None = None
        """What Python state the run changed, in words, or None."""
        self.unseen: str | None = None
        """What state it advanced that cannot be put back, in words, or None."""
        self.draws = False
        """Whether it drew from the device's default generator, or may have; else nobody touches that generator."""
        self.recording: Recording | None = None
        """What was recorded of it, if it was recorded."""
        self.values, self.arguments = _values_of_run(request, on_static_inputs=on_static_inputs)
        """The leaves of the call (``Leaves`` where it had dicts or lists, which it may have changed); and the tensors
        that it was given, in the order of the request's input specs: the caller's, or the static inputs."""
        self.warms_up = on_static_inputs
        """Whether it ran on the static inputs, as the recording will."""
        known = map(storage_key, filter(is_strided, (*self.arguments, *request.tensors)))
        existed = existing_storages(walk, known) if records and like is None else None
        # An operator may be part of a break; but no rank may wait for one whose next run ends halfway.
        looks = may_refuse and (not request.is_piecewise or request.ranks is not None)
        ending = Ending(refusal.note, refusal.is_due if looks else None) if request.keep_effects else None
        self.effects = recorder_of(request, self.arguments if on_static_inputs else None, existed, ending)
        self._is_watched = on_static_inputs or like is None or like.shown.may_leave_effects
        if may_refuse:
            self.trace.on_unseen = lambda what: self.effects.end_watch(_of_unseen(what))

    def make(self) -> None:
        """Run the call, and note what that did. Raises what the call raises, and what keeps it from being noted."""
        walk = self.trace.walk
        seen = [*self.arguments, *walk.tensors]
        forms, open_outputs = _forms_of(seen), self.open_outputs if self._records else None
        trace = self.trace if self.like is None else None
        watch = self.effects if self._is_watched else None
        if watch is not None and self.like is None:  # else its operators are those of the graph
            reveal_operators(self._request.backend.device)
        call = CallRun(self._request, self.values, watch, open_outputs, self._answer, trace, is_eager=True)
        try:
            self.recording = call.record() if self._records else call.make()
        finally:
            self.trace.on_unseen = None
        if self.refusal.result is not None:
            return
        self.rng_after = self._request.backend.rng_state()
        self.changed, self.unseen = call.within(walk.change), walk.drew()
        if self.changed is None and _forms_of(seen) != forms:
            self.changed = "the class of a tensor, whether it requires a gradient, or which tensor it is (swap_tensors)"
        for region in self.effects.regions:
            region.after = region.read().clone()
        self.draws = self.effects.uses_rng or pads_by_code(self._request)
        may_draw = self.effects.runs_custom or self.trace.ran_torch_random
        self.draws |= may_draw and not torch.equal(self.rng_before, self.rng_after)
        self.warms_up &= not queries_capture(self.trace if self.like is None else self.like.guard.notes)
        self.opened = self.open_outputs(self.answer)
        """The answer as ``open_outputs`` gives it."""
        self.outputs = [tensor.detach().clone() for tensor in tensors_in(self.opened)]
        """Copies of the output tensors, in order."""
        written = ((i, value) for i, value in enumerate(self.arguments) if self.effects.writes_to(value))
        self.written_inputs = {i: value.detach().clone() for i, value in written}
        """Copies of the arguments that the run wrote to, by index in the request's input specs."""
        if not self._records:
            self.effects.note_outputs(self.opened)

    def _answer(self, output: Any) -> None:
        """Take the answer; of a recorded run with copies of what will lie in the graph's memory.

        Raises what keeps a graph from giving the outputs of a recorded run. Two runs are needed where the code keeps
        something out of sight (a cache), and where it returns objects: these may be new in the first run alone.
        """
        self.has_answered, self.answer = True, output
        if not self._records:
            return
        effects = self.effects
        check_outputs(output, effects, self.trace.walk if self.like is None else None, self.arguments)
        kept = effects.made_storages().difference(map(storage_key, tensors_in(output)))
        if self.like is None and (kept or objects_in(output) is not None):
            raise WatchedTooLittleError("a second run shows what the call makes each time")
        effects.note_outputs(output)
        with _disable_current_modes():
            self.answer = tree_map_only(torch.Tensor, lambda one: _copied(one) if effects.made(one) else one, output)

    def why_not(self, error: BaseException) -> CaptureResult | None:
        """Why a run that failed gives no graph; None for an error that passes through."""
        request = self._request
        if not isinstance(error, Exception) or error_of_signal(error) is not None:
            return None
        if isinstance(error, CaptureError) and self.trace.refusal() is not None:
            return failed_result(request, None, error, "")
        if self.has_answered:
            return failed_result(request, None, error, "noting what the eager run did")
        if self._records:  # what is not recorded may do more, or say what the callable raises
            return failed_result(request, None, WatchedTooLittleError(f"a recorded run failed: {error}"), "")
        if self.effects.given_up is not None and not request.keep_effects:
            return failed_result(request, None, error, "saving what it overwrites")
        return None

    @property
    def may_do_otherwise(self) -> bool:
        """Whether its code may do something else in a run that is not recorded, or that is given other tensors than
        the static inputs; not so where it was not traced."""
        if self.like is not None:
            return False
        reads_more = self.metadata_read(compares=bool(self.effects.equated))
        return bool(reads_more) or runs_compiled(self.trace) or queries_capture(self.trace)

    def check_state(self) -> None:
        """Raise ``CaptureError`` if a run since then changed Python state, or drew where no graph draws."""
        _check_state(self.trace.walk.change(), self.trace.walk.drew())

    def metadata_read(self, *, compares: bool) -> list[str]:
        """The names of what its code reads of arguments besides values; ``compares``: whether Python compared such
        tensors."""
        return metadata_names(self.trace.codes.values(), compares=compares, has_gaps=self._request.has_gaps)

    def find_metadata(
        self, values: Sequence[Any], guard: StateGuard, former: ArgumentMetadata | None = None
    ) -> ArgumentMetadata | None:
        """What its code reads of the arguments besides values; ``former`` if that is the same, None if nothing."""
        tensors = set(map(id, (*self.arguments, *guard.tensors)))
        names = self.metadata_read(compares=any(map(tensors.issuperset, self.effects.equated)))
        if not names or (former is not None and former.names == names):
            return former
        return ArgumentMetadata(names, values, guard.tensors)


class _Refusal:
    """What the caller's own run shows against a graph of it, while it goes on undisturbed."""

    def __init__(self, request: CaptureRequest, trace: CodeTrace) -> None:
        self._request, self._trace = request, trace
        self.result: CaptureResult | None = None
        """Why there can be no graph, once the run has shown it."""

    def is_due(self, func: OpOverload | None, is_inside: bool) -> bool:
        """Whether a graph would hold the code that runs now: no break, nor what runs beside the call; nor code that may
        do otherwise where somebody captures, or once it is compiled. What the host reads past the dispatcher a graph of
        a device may leave alone."""
        trace, is_seen = self._trace, self._request.backend.capture_executes or func is not None
        if self._request.is_piecewise and (is_inside or (func is not None and breaks_at(func))):
            return False  # the operator around it may be a break, too
        return is_seen and not (trace.is_in_break() or queries_capture(trace) or runs_compiled(trace))

    def note(self, error: Exception) -> None:
        """No graph can be made of the run: nothing more of it is traced."""
        stage = "" if isinstance(error, CaptureError) else "saving what it overwrites"
        self.result = failed_result(self._request, None, error.with_traceback(running_frames()), stage)
        error.with_traceback(None)
        self._trace.end()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def roots_of(request: CaptureRequest) -> list[Any]:
    """Where the Python state of the call begins: the callable, and the arguments that are not copied."""
    copied = set(request.inputs.positions)
    kept = (value for place, value in enumerate(request.values) if place not in copied)
    return [request.call.fn, *(value for value in kept if not issubclass(type(value), CONSTANTS))]


def run_eagerly(request: CaptureRequest, like: LikeGraph | None, **how: bool) -> EagerRun | CaptureResult:
    """Run the call on the real rows, and watch what it writes; its code, too, unless that is ``like`` a graph's.

    ``how``: with ``on_static_inputs`` it runs on these, after loading a full batch; so it is a warm-up, and may be
    recorded if it ``records``. If it ``may_refuse``, nothing more is watched of the caller's own run once that did what
    no graph can hold.
    An error of the callable passes through. If the request does not want the effects, they are undone on every way out
    by an error. A ``CaptureResult`` says why there can be no graph: the batch could not be loaded, the run did what no
    graph can hold, or what it did could not be saved or noted (no memory left). ``CAPTURE_WAITS``: a run that is not
    recorded may show more.
    """
    try:
        run = EagerRun(request, like, **how)
    except Exception as error:
        if not request.keep_effects and error_of_signal(error) is None:
            return failed_result(request, None, error, "copying the batch into the static inputs")
        raise
    try:
        run.make()
        result = run.refusal.result
    except BaseException as error:
        if not request.keep_effects:
            undo_run(request, run.effects, run.rng_before, run.trace)
        if run.recording is not None:
            run.recording.graph.reset()
        result = run.why_not(error)
        if result is None:
            raise
    if result is not None:
        result.answer = run.answer
        return result
    run.trace.spares = True
    return run


def recorder_of(
    request: CaptureRequest,
    arguments: Sequence[torch.Tensor] | None = None,
    existed: Callable[[int], bool] | None = None,
    ending: Ending | None = None,
) -> EffectRecorder:
    """What watches one run; given the ``arguments``, it keeps the operators. The run must be undone, unless the watch
    has an ``ending``."""
    names = None if arguments is None else TensorNames.of_arguments(arguments, request.inputs.specs)
    return EffectRecorder(
        request.options.state_limit_bytes, strict=ending is None, tensor_names=names, existed=existed, ending=ending
    )


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


def queries_capture(notes: CodeNotes) -> bool:
    """Whether the code queries torch whether anyone captures, and so may do something else meanwhile."""
    return any(id(code) in notes.codes for code in CAPTURE_QUERIES)


def runs_compiled(notes: CodeNotes) -> bool:
    """Whether the code is of torch's compiler."""
    return any(original_of(code) is not None for code in notes.codes.values())


def pads_by_code(request: CaptureRequest) -> bool:
    """Whether code of the user pads the batch."""
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


def undo_run(request: CaptureRequest, effects: EffectRecorder, rng_before: Any, trace: CodeTrace | None = None) -> None:
    """Put back what a run wrote and rebound, and the random generator if it drew. Raises ``DeviceLostError``."""

    def put_back() -> None:
        if trace is not None:
            trace.walk.restore(generators=True, changes=trace.changes)
        undo(effects.regions)
        if effects.uses_rng or effects.runs_custom:
            request.backend.set_rng_state(rng_before)

    retry_once(put_back, request.backend)


def check_may_capture(request: CaptureRequest, eager: EagerRun) -> None:
    """Raise ``CaptureError`` if the eager run shows that no graph can hold the call.

    Call it before anything is run again: a run that cannot be undone must not be repeated.
    """
    if not torch.is_inference_mode_enabled() and any(one.target.is_inference() for one in eager.effects.regions):
        raise CaptureError(
            "the call writes to a tensor that was made in inference mode, and is made outside of it; call it within "
            "torch.inference_mode()",
            Reason.CAPTURE_UNSAFE,
        )
    _check_state(eager.changed, eager.unseen)
    if eager.trace.walk.overflow is not None:
        raise CaptureError(
            f"the call reaches too many Python objects to watch them all, at {eager.trace.walk.overflow}; keep large "
            "tables out of the callable's reach, or in a tensor",
            Reason.STATE_UNSEEN,
        )
    if getattr(parametrize, "_cache_enabled", None):
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
    if eager.recording is None:
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
        if type(output) not in PLAIN_TENSORS[: 1 if effects.made(output) else None] or not is_strided(output):
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
    unseen = eager.trace.unseen()
    if unseen is not None:
        raise _of_unseen(unseen)
    names = eager.trace.names | eager.trace.of_breaks.names
    for spec in request.inputs.specs:
        attributes = (attribute_table(request.values[spec.position]) or {}).keys() & names
        if attributes:
            raise CaptureError(
                f"argument {spec.name!r} carries the attributes {sorted(attributes)}, which a graph would not see "
                "change; pass them as arguments",
                Reason.STATE_UNSEEN,
            )


def _of_unseen(what: str) -> CaptureError:
    """The error of a call that uses what nobody can compare or put back."""
    return CaptureError(
        f"the call uses what nobody can compare or put back: {what}; use it outside of the callable, and pass what it "
        "gives",
        Reason.STATE_UNSEEN,
    )


def _package_code() -> CodeType | None:
    """The code that runs a package of AOTInductor; None if nobody has loaded one."""
    packages = sys.modules.get("torch.export.pt2_archive._package")
    kind = getattr(packages, "AOTICompiledModel", object)
    return getattr(vars(kind).get("__call__"), "__code__", None)


def _check_state(changed: str | None, drew: str | None) -> None:
    """Raise ``CaptureError`` if a run changed Python state, or drew from a generator that no graph draws from; the two
    say what, and from which."""
    if changed is not None:
        raise CaptureError(
            f"the call changes Python state: {changed}; keep it in a tensor and write that in place "
            "(self.x.copy_(...)), or a graph would go on using the old value; if its first run alone does that, call "
            "it once before a prewarm",
            Reason.STATE_REBOUND,
        )
    if drew is not None:
        raise CaptureError(
            f"the call draws from {drew}, and a graph would keep the numbers of its capture; draw with torch",
            Reason.STATE_UNSEEN,
        )
