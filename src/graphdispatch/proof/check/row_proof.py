"""Proves by the structure of one run that rows are independent, and for which batches Python takes the run's path.

The callable runs once, on a batch of a few rows made of the call's, while ``proof/rows`` follows the rows through its
operators. A run proves a graph that dispatches the same operators, with results of the shapes that follow from the run.
So the graphs of all sizes share one run. A batch for which no run speaks (``if len(x) > 6``) gets a run of its own;
where that dispatches other operators than the graph, the batch stays eager.

Note [a batch that betrays no number]
    A size that equals the number of rows by chance might be taken for it. So the run has a number of rows, and lengths,
    that occur in no shape of an argument or of the callable's tensors, where there is such a number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ...backends.operators import is_strided, storage_key, tensors_in
from ...errors import CaptureError
from ...reasons import Reason
from ...runtime.parts import MOST_PARTS
from ...runtime.protocols import CaptureRequest
from ...runtime.static_inputs import largest_within
from ...sizes import extents_text, lengths_of, pack
from ..rows.batches import BatchSpace, LeftPathError
from ..rows.run import RowRun
from ..rows.verdict import Verdict
from ..state.objects import is_library_code
from ..state.reads import DIFFERENTIATES
from ..watch.bytecode import code_reads
from ..watch.effects import EffectRecorder
from ..watch.operator_trace import OperatorTrace
from .attempt import CaptureAttempt, ends_capture
from .licence import RowProof, shown_of

_NO_EXTENT = 2
"""What stands for the extent along an axis that a run does not follow, since its batch has one element there: sizes of
one are broadcast, so that it would tell nothing of others."""
_MOST_BATCHES = 1 << 14
"""But for no more batches than these, where there are not that many of the sizes themselves: it takes time for each."""
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31, 5, 3)


@dataclass(frozen=True)
class FollowedRun:
    """A run whose rows were followed: what it shows, and its operators."""

    rows: int
    """The number of its batch."""
    verdict: Verdict
    operators: OperatorTrace
    single: frozenset[int]
    """The axes (by place) along which the batch had one element: it speaks for no other extent there."""

    def speaks_for(self, extents: Sequence[int]) -> bool:
        """Whether Python takes the path of the run for a batch of these extents."""
        return self._follows(extents) and self._followed(extents) in self.verdict.space

    def why_not(self, extents: Sequence[int]) -> str:
        """What keeps the run from speaking for a batch, in words."""
        return self.verdict.space.why_not(self._followed(extents))

    def _follows(self, extents: Sequence[int]) -> bool:
        return all(extents[place] == 1 for place in self.single)

    def _followed(self, extents: Sequence[int]) -> list[int]:
        return [_NO_EXTENT if place in self.single else extent for place, extent in enumerate(extents)]

    def proves(self, request: CaptureRequest, operators: OperatorTrace) -> bool:
        """Whether the run proves the graph of the request's size, which runs these operators.

        Compiled code is no list of operators. It computes what the eager run of the same code does: of a run that
        speaks for the size.
        """
        extents = lengths_of(request.inputs.axes, request.size)
        return self.speaks_for(extents) if operators.has_regions else self._computes(operators, extents)

    def is_like(self, proof: RowProof, request: CaptureRequest, operators: OperatorTrace) -> bool:
        """Whether it did what the graph of the request's size does, which runs these operators and has this proof: for
        other extents, but with the same operators on the same tensors. A run that does not follow an axis has the
        shapes that another run of the proof tells, which does, as it tells those of the graph."""
        axes, batch = request.inputs.axes, request.size
        if operators.has_regions:  # compare with what the proof was made of
            first = next(iter(proof.runs), self)
            operators, batch = first.operators, first.rows
        extents, own = lengths_of(axes, batch), lengths_of(axes, self.rows)
        tell = proof.runs if self.single else [self]
        return any(one._computes(operators, extents) and one._computes(self.operators, own) for one in tell)

    def _computes(self, operators: OperatorTrace, extents: Sequence[int]) -> bool:
        """Whether these operators are those of the run, for a batch of these extents."""
        is_like = self._follows(extents) and self.operators.is_like(operators)
        return is_like and self.verdict.has_shapes(operators.shapes, self._followed(extents))

    def objection(self, *, is_word: bool) -> tuple[Reason, str] | None:
        """Why its rows may not be padded; ``is_word``: whether the user says that they are independent."""
        if self.verdict.mixes:
            remedy = "call eval(), or have" if "batch_norm" in self.verdict.mixes else "have"
            return Reason.ROWS_MIX, f"{self.verdict.mixes}; {remedy} a size for it (sizes=)"
        unknown = self.verdict.unknown or ("a kernel that no rule describes is launched" * self.operators.has_regions)
        remedy = "" if "; " in unknown else "; have a size for it (sizes=), or give rows='independent' in the options"
        return (Reason.PADDING_UNPROVEN, unknown + remedy) if unknown and not is_word else None

    @property
    def needs_word(self) -> bool:
        """Whether only the user can say that rows are independent."""
        return bool(self.verdict.unknown) or self.operators.has_regions


class RowsShown(NamedTuple):
    """The proof of a graph's rows, and what the runs gave that were made for it."""

    proof: RowProof | None
    answers: Sequence[tuple[int, Any]] = ()
    """The batch of each run, and its outputs; the last run is the one that proves the graph, if one does."""
    verdict: Verdict | None = None
    """What that one says, where it follows all axes."""


def proof_of(request: CaptureRequest, operators: OperatorTrace) -> RowProof | None:
    """The proof of another graph that holds for a graph of these operators, too; None if there is none."""
    shown = (shown_of(peer) for peer in request.peers if request.follows_rows)
    for proof in dict.fromkeys(one.proof for one in shown if one is not None and one.proof is not None):
        if any(run.proves(request, operators) for run in proof.runs):
            return proof
    return None


def prove_rows(attempt: CaptureAttempt, operators: OperatorTrace) -> RowsShown:
    """What is shown of the rows of the graph of these operators, by a run whose rows are followed. No proof if there
    are no other batches.

    Raises what ends a capture.
    """
    request = attempt.request
    if not request.follows_rows:
        return RowsShown(None)
    axes, is_word, failure = request.inputs.axes, request.options.rows == "independent", ""
    answers: list[tuple[int, Any]] = []
    for rows in dict.fromkeys(_batches(request)):
        found = _follow(attempt, rows)
        if isinstance(found, str):
            failure = failure or found
            continue
        run, outputs = found
        answers.append((rows, outputs))
        if not run.proves(request, operators):
            failure = failure or f"a run of {extents_text(axes, rows)} rows dispatches other operators than the graph"
            continue
        proof = _proof_of(request, run, is_word=is_word)
        return RowsShown(proof, answers, run.verdict if not run.single else None)
    proof = RowProof(axes=axes, is_word=is_word, mixed=frozenset(axes[1:]))
    if not is_word:
        remedy = _OF_TRAINING if id(DIFFERENTIATES) in attempt.eager.trace.codes else _REMEDY
        text = f"{failure}, so that nothing is shown of its rows; {remedy}"
        proof.against_rows = Reason.PADDING_UNPROVEN, text
    return RowsShown(proof, answers)


_REMEDY = "CUDAGraphOptions(rows='independent') says that rows are independent, or have a size for the batch (sizes=)"
_OF_TRAINING = (
    "a loss of several rows mixes them, so have a size for the batch (sizes=), or leave out a last one that is smaller "
    "(DataLoader(drop_last=True))"
)


def _proof_of(request: CaptureRequest, run: FollowedRun, *, is_word: bool) -> RowProof:
    axes, needs_word = request.inputs.axes, run.needs_word
    further = range(1, len(axes)) if needs_word else run.verdict.mixed_axes
    text = _against_writes(request, run.verdict)
    against = {axes[i]: (Reason.OUTPUT_ROWS_UNKNOWN, f"{why}; cut it outside") for i, why in run.verdict.uncut.items()}
    against |= {axes[i]: (Reason.PADDING_WRITES_STATE, text) for i in run.verdict.slots.axes if text}
    return RowProof(
        axes=axes,
        runs=[run],
        mixed=frozenset(axes[i] for i in further),
        is_word=is_word and needs_word,
        against_rows=run.objection(is_word=is_word) or against.pop(axes[0], None),
        along=dict(against),
        by_place=run.verdict.by_place,
    )


def _against_writes(request: CaptureRequest, verdict: Verdict) -> str:
    """Why padding may not name places of state to write, if elements of the batch do; else empty: see Note [slots] in
    ``proof/rows/slots.py``."""
    slots, pads = verdict.slots, [pad for spec in request.inputs.specs if spec.spans for pad in spec.pads]
    may_repeat = not (slots.adds or verdict.by_place)
    is_repeated = may_repeat and all(pad.repeats_rows for pad in pads)
    if not slots.where or is_repeated or request.options.padding_writes == "allow":
        return ""
    repeat = " pad all arguments by 'repeat_last', or" if may_repeat else ""
    return (
        f"padding rows would write to state at places that rows name, in {slots.where};{repeat} give a pad rule that "
        "points at scratch rows, and padding_writes='allow'"
    )


def speak_for_batch(attempt: CaptureAttempt, proof: RowProof, operators: OperatorTrace) -> None:
    """Follow the rows of a run of the request's own batch, for which no run of the proof speaks. It joins the proof; or
    the proof notes that Python takes another path for this batch."""
    request, axes = attempt.request, attempt.request.inputs.axes
    found = _follow(attempt, request.rows)
    text = found if isinstance(found, str) else ""
    if not isinstance(found, str):
        run, _ = found
        is_like = run.is_like(proof, request, operators)
        pads_rows = axes[0].of(request.rows) != axes[0].of(request.size)
        if is_like and not (pads_rows and run.objection(is_word=proof.is_word) is not None):
            proof.runs.append(run)
            proof.mixed |= {axes[i] for i in run.verdict.mixed_axes}
            proof.by_place = proof.by_place or run.verdict.by_place
            return
        why = (one.why_not(lengths_of(axes, request.rows)) for one in proof.runs)
        text = next(filter(None, why), "") or "the operators differ"
    size = extents_text(axes, request.size)
    proof.unlike[request.rows] = (
        f"the call does not do the same for {extents_text(axes, request.rows)} rows as in the graph of {size}: {text}; "
        "have a size for it (sizes=)"
    )


def _batches(request: CaptureRequest) -> Iterator[int]:
    """The batches to try: one that betrays no number, the call's own, and that of the graph."""
    axes, most = request.inputs.axes, request.inputs.capacity
    tensors = (one for one in (*request.arguments(), *request.tensors) if type(one) in _PLAIN)
    taken = {extent for tensor in tensors for extent in tensor.shape}
    chosen: list[int] = []
    for axis in axes:
        longest, own = axis.of(most), axis.of(request.size)
        free = [one for one in _PRIMES if one <= longest and one not in taken and one not in chosen]
        chosen.append(1 if own == 1 else next(iter(free), 0) or min(max(own - 1, 2), longest))
    yield pack(axes, chosen)
    yield request.rows
    yield request.size


def _follow(attempt: CaptureAttempt, rows: int) -> tuple[FollowedRun, Any] | str:
    """A run of so many rows, with its outputs; or why there is none. Raises what ends a capture.

    Its code is not traced while it takes the path of a batch whose code was traced. Where it leaves that, it ends
    before Python goes on, and another run is traced from the start.
    """
    users = (code for code in attempt.eager.trace.codes.values() if not is_library_code(code.co_filename))
    if what := next(filter(None, (code_reads(code).number_compared for code in users)), ""):
        return f"the code {what}"
    found = None if attempt.request.is_piecewise else _follow_path(attempt, rows, is_traced=False)  # breaks read data
    return found or _follow_path(attempt, rows, is_traced=True) or ""


def _follow_path(attempt: CaptureAttempt, rows: int, *, is_traced: bool) -> tuple[FollowedRun, Any] | str | None:
    """``_follow``, whose code is traced; or else on the path of a traced batch. None where it is not on that."""
    request = attempt.request
    axes, extents = request.inputs.axes, lengths_of(request.inputs.axes, rows)
    largest = lengths_of(axes, request.inputs.capacity)
    single = frozenset(place for place, own in enumerate(extents) if own == 1)
    lengths = [lengths_of(axes, one) for one in (rows, *attempt.traced)]
    own, *traced = (
        [_NO_EXTENT if place in single else extent for place, extent in enumerate(one)]
        for one in lengths
        if all(one[place] == 1 for place in single)
    )
    most_rows = largest[0] * min(MOST_PARTS, max(_MOST_BATCHES // prod(largest), 1))
    spaces = [range(1, max(most, _NO_EXTENT) + 1) for most in (most_rows, *largest[1:])]
    space = BatchSpace(spaces, own, None if is_traced else traced)
    if space.has_left_path:
        return None
    values = batch_of(request, rows)
    reached = [*request.tensors, *attempt.eager.trace.walk.tensors, *tensors_in(list(request.values)), *values]
    keys = {storage_key(one) for one in reached if type(one) in _PLAIN and is_strided(one) and not one.is_nested}
    run = RowRun(space, keys)
    for spec, value in zip(request.inputs.specs, values, strict=True):
        followed = {dim: axes.index(axis) for dim, axis in spec.spans if axes.index(axis) not in single}
        if followed:
            run.follow(value, followed)
    attempt.start_over(f"following {extents_text(axes, rows)} rows")

    def read(effects: EffectRecorder, output: Any) -> tuple[FollowedRun, Any]:
        effects.note_outputs([run.plain_output(leaf) for leaf in tree_leaves(output)])
        operators = effects.dispatched
        return FollowedRun(rows, run.verdict(tensors_in(output)), operators, single), output

    found: tuple[FollowedRun, Any] | str
    try:
        with attempt.eager.trace.of_another_batch():
            found = attempt.run_and_undo(request.values_with(values), read, values, runner=run, is_traced=is_traced)
    except (Exception, LeftPathError) as left:
        error = left.__context__ if isinstance(left, LeftPathError) else left  # what raises may be what leaves the path
        if isinstance(error, Exception) and ends_capture(request.backend, error):
            raise error from error.__cause__
        raised = str(error) if isinstance(error, CaptureError) else f"the call raises {type(error).__name__}: {error}"
        found = f"for {extents_text(axes, rows)} rows {raised}"
    return None if space.has_left_path else found  # the callable may have caught it


def batch_of(request: CaptureRequest, rows: int) -> list[torch.Tensor]:
    """The call's tensors with so many rows, theirs in turn. Integers that may name elements beyond it are cut."""
    arguments, specs, axes = request.arguments(), request.inputs.specs, request.inputs.axes
    shorter = [axis for axis in axes if axis.of(rows) < axis.of(request.rows)]
    most = largest_within(specs, rows, shorter)
    made = [spec.repeated(value, rows) for spec, value in zip(specs, arguments, strict=True)]
    return [
        value.clamp(max=most[spec.name]) if spec.name in most else value.clone() if value is argument else value
        for spec, value, argument in zip(specs, made, arguments, strict=True)
    ]
