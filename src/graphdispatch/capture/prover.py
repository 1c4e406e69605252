"""Proves that the real rows of a graph do not depend on its padding rows.

A replay runs the same kernels on the same shapes. So if rows are independent, the real rows have the same bits whatever
the padding rows hold. The proof replays a graph on the same real rows with other padding, and compares bits.

Note [what keeps its padding]
    Along a further dimension an argument may say which elements are padding: a mask of zeros and ones. Other values in
    its padding would make real elements of it. So where the proof fails, it is tried again with the padding of such
    arguments left as their rule says, which is what every replay has there. The other arguments must not matter then.
    A row that its mask hides altogether may still attend to padding, as to all else, or count it. Where masks that
    hide all show this, each call is looked at, and runs eagerly if it has such a row: unless the user gave the mask a
    pad rule.

Note [rows that hide less]
    The real rows may hide what padding does. So all of them become one row of the batch, before padding of zeros, of
    the row itself, which is neutral for a maximum and for all else that counts a row once, and of another row. Of
    flags, zeros and ones, only what lies beside them differs. So padding of zeros and of the other row, in turns, is
    compared with padding of the row itself: it differs from both together if it differs from either. What counts rows
    up to some number may take two kinds of padding for one. Integers that are no flags, and numbers that may become
    indices, are compared one by one.

Note [rows that a rule hides]
    Some padding always keeps to its rule: that of the user, a scratch row of zeros, a mask whose padding hides what it
    pads. Whether such padding is neutral depends on the real rows: a maximum of at least zero hides zeros. So eager
    runs real rows of other kinds, without padding, and a replay must give the same.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from ..backends.operators import bits_equal, storage_key
from ..call.signature import InputSpec
from ..errors import CaptureError, VerificationError
from ..memory.entry import CUDAGraphEntry
from ..memory.labels import Labels
from ..memory.outputs import first_rows
from ..memory.proof import Program, RowProof
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..sizes import Axis, lengths_of, pack
from . import probes
from .attempt import CaptureAttempt, ends_capture
from .compare import check_replay, difference, find_padding_writes, tolerance_for
from .eager_run import EagerRun
from .effects import EffectRecorder, Region
from .make_entry import runs_program
from .probes import BY_RULE, Kind, Padding, Rows
from .state_probes import StateProber

_FEW = 2
_OTHER_ROWS = "other real rows"
_Rows = TypeVar("_Rows", torch.Tensor, torch.Tensor | None)


class _Value(NamedTuple):
    """What a replay left that must not depend on padding."""

    name: str
    tensor: torch.Tensor
    is_state: bool = False


class _Probe(NamedTuple):
    """Replays of real rows of one kind before several kinds of padding."""

    name: str
    """What padding and the real rows hold, in words."""
    real: Rows
    """The arguments of which the real rows are taken; None for those of the batch."""
    paddings: Sequence[Rows]
    """What padding holds in turn: each is compared with the first, and where that is all, with eager without it."""


class _DependentRowsError(Exception):
    """Padding changed a real row, or could not be replayed."""

    def __init__(self, proof: RowProof) -> None:
        super().__init__()
        self.proof = proof


class RowProver:
    """Replays a graph, just compared with eager, with other padding: along all dimensions at once. If that changes real
    elements, once more with the padding of masks left alone, and along each dimension by itself.

    A dimension that the batch fills is cut in half. The ``attempt`` puts everything back to where the eager run began,
    loads the first so many rows and a padding, and replays.
    """

    def __init__(self, attempt: CaptureAttempt, entry: CUDAGraphEntry) -> None:
        request = attempt.request
        self._axes, self._specs, self._arguments = request.inputs.axes, request.inputs.specs, request.arguments()
        lengths = zip(lengths_of(self._axes, request.rows), lengths_of(self._axes, request.size), strict=True)
        self.rows = pack(self._axes, [own if own != full else (full + 1) // 2 for own, full in lengths])
        self._request = request
        self._eager = attempt.eager
        self._entry = entry
        self._attempt = attempt
        self._along: Sequence[Axis] = ()
        """The axes along which padding is replaced; empty: all."""
        self._kept: tuple[int, ...] = ()
        """The arguments (by index) whose padding is left as their rule says: see Note [what keeps its padding]."""
        self._is_deterministic: bool | None = False if entry.program.groups_rows else None
        self._is_limited = entry.program.limits_values
        self._needs_more_rows = False
        self._earlier = entry.proof if entry.proof is not None and entry.proof.is_whole else None
        """What earlier batches have shown; then only what takes its numbers from the batch is tried once more."""
        written = list(self._written_state())
        # Nothing tells which state the first half of a full batch writes. If padding must write none, it is all of it.
        may_write = self.rows != request.rows and request.options.padding_writes == "allow"
        self._state, self._unseen = ([], written) if may_write else (written, [])
        # The second half of a full batch is padding like any other, unless a pad rule says what padding is.
        by_rule = request.is_padded or entry.written is not None or any(spec.is_pad_given for spec in self._specs)
        self._base = BY_RULE if by_rule else Padding(_OTHER_ROWS, self._arguments)
        self._is_replayed = self.rows == request.rows or not by_rule
        """Whether the latest replay was of the base."""

    @property
    def is_wanted(self) -> bool:
        """Whether there can be padding, and earlier batches have not shown all that batches can."""
        proof, request = self._entry.proof, self._request
        has_padding = self.rows != request.size and request.inputs.has_rows
        return has_padding and (proof is None or (request.is_padded and not proof.is_complete))

    @property
    def is_ample(self) -> bool:
        """Whether there are two real rows and two of padding at least, along each dimension: enough for other sizes."""
        pairs = zip(lengths_of(self._axes, self.rows), lengths_of(self._axes, self._request.size), strict=True)
        return all(_FEW <= real <= full - _FEW for real, full in pairs)

    def further_padding(self) -> Padding:
        """What padding holds when a further number of rows is compared: large numbers, since rows may mix for some
        numbers alone; that of the rules, if the call writes what they might change, or limits what it takes."""
        entry, proof = self._entry, self._entry.proof
        only_computes = entry.mode is CUDAGraphMode.FULL and not (entry.writes_outside or self._eager.effects.regions)
        if proof is None or not (only_computes and self._request.is_padded and proof.is_whole) or proof.limited:
            return BY_RULE
        self._kept = proof.kept
        return Padding("large numbers", self._made(probes.checkered, self._takes_any))

    def prove(self, alike: Mapping[int, torch.Tensor]) -> RowProof:
        """The proof. Call it right after the replay of the request's batch.

        ``alike`` are the arguments whose rows were all alike in that replay, padding rows among them.
        """
        whole = self._prove_along((), alike)
        if whole.independent or len(self._axes) == 1:
            return whole
        cut = [axis for axis in self._axes if axis.of(self.rows) != axis.of(self._request.rows)]
        if beyond := probes.points_beyond(self._specs, cut):  # a batch that does not fill these axes can tell
            return RowProof(True, untested=beyond)
        alone = {axis: self._prove_along((axis,), alike) for axis in self._axes}
        bound = tuple(axis for axis, proof in alone.items() if not proof.independent)
        found = next((proof for proof in alone.values() if not proof.independent), whole)
        names = " and ".join(repr(axis.name) for axis in bound or self._axes)
        along = found.perturbation and f"{found.perturbation} along {names}"
        return replace(found, bound=bound or self._axes, perturbation=along)

    def _prove_along(self, axes: Sequence[Axis], alike: Mapping[int, torch.Tensor]) -> RowProof:
        """The proof of padding along these axes, with as few masks left alone as it takes."""
        proofs = list[RowProof]()
        for kept in self._choices() if self._earlier is None else [self._earlier.kept]:
            if proofs or axes:  # the graph's own replay is no base then
                self._base, self._is_replayed = BY_RULE, False
            self._along, self._kept, self._is_limited = axes, kept, self._entry.program.limits_values
            proof = self._prove(alike)
            if proof.independent:
                self._prove_hidden(kept)
                return replace(proof, kept=tuple(kept))
            proofs.append(proof)
        return proofs[0]

    def _choices(self) -> Iterator[tuple[int, ...]]:
        """Which arguments keep their padding: none, then each mask, then all of them. A mask is an argument along a
        further dimension that holds nothing but zeros and ones."""
        yield ()
        pairs = list(zip(self._specs, self._arguments, strict=True))
        along = [i for i, (spec, _) in enumerate(pairs) if any(axis is not self._axes[0] for _, axis in spec.spans)]
        masks = [i for i in along if not pairs[i][0].is_pad_given and probes.holds_flags(pairs[i][1])]
        for kept in [(mask,) for mask in masks] + ([tuple(masks)] if len(masks) > 1 else []):
            others = {axis for i, (spec, _) in enumerate(pairs) if i not in kept for _, axis in spec.spans}
            if others >= {axis for i in kept for _, axis in pairs[i][0].spans}:
                yield kept

    def _prove_hidden(self, kept: Collection[int]) -> None:
        """Once more with masks that hide all that is real. If padding matters then, have each call looked at."""
        if not kept or self._earlier is not None:
            return
        hidden = [torch.zeros_like(v) if i in kept else v for i, v in enumerate(self._arguments)]
        self._base = Padding("", [], hidden, self._along)
        try:
            is_told = self._takes(self._base) and self._hidden_matters()
        except _DependentRowsError:  # such rows write where those of the batch do not
            is_told = True
        if is_told:
            masks = [self._specs[i] for i in kept]
            self._request.signature.watch([(mask.position, self._last_further(mask)) for mask in masks])

    def _hidden_matters(self) -> bool:
        """Whether real elements of the base are unlike eager's, or change with padding."""
        if not self._is_as_eager("hidden rows"):
            return True
        base = self._read()
        return any(
            not self._takes(self._base._replace(rows=rows)) or bool(_differing(base, self._read()))
            for rows in (self._elements(), *self._large())
        )

    def _is_as_eager(self, name: str) -> bool:
        """Compare a replay of the base with an eager run without the padding that is asked about, and what that writes.
        False if one of them fails. Raises ``_DependentRowsError`` if they differ; ``name`` says what real rows hold."""
        request, entry, attempt = self._request, self._entry, self._attempt
        attempt.start_over("asking what eager gives for other rows")
        try:
            attempt.load(self.rows, self._base)
        except Exception as error:  # of a pad function
            if ends_capture(request.backend, error):
                raise
            return False
        parts = zip(self._specs, request.inputs.views(request.size), self._base.real, strict=True)
        alone = [spec.cut(view, self.rows, self._along).clone() if spec.spans else one for spec, view, one in parts]
        values, labels = request.values_with(alone), Labels.of_arguments(alone, self._specs)
        effects = EffectRecorder(request.options.state_limit_bytes, strict=True, labels=labels)

        def read(output: object) -> EagerRun:
            run = self._eager.of_other_rows(output, alone, effects)
            pairs = zip(run.outputs, entry.outputs.rule.follows, strict=True)
            run.outputs = [first_rows(one, dims, self.rows) for one, dims in pairs]
            run.written_inputs = {i: self._specs[i].cut(one, self.rows) for i, one in run.written_inputs.items()}
            return run

        eager = attempt.try_apart(effects, values, read)
        if eager is None:
            return False
        is_asked = request.options.padding_writes == "refuse" and not self._along
        writes = is_asked and StateProber(attempt, entry).writes_more_of_others(values, self.rows)
        try:
            self._replay(self._base)
        except _DependentRowsError:
            return False
        if writes or find_padding_writes(request, effects.regions, attempt.warm_run.regions) is not None:
            # It may write there what is there already, as now and then a flag.
            what = f"and {name} in the real ones, padding writes where the real rows leave memory alone"
            raise _DependentRowsError(RowProof(False, True, BY_RULE.name, what, Reason.PADDING_WRITES_STATE))
        asked = replace(request, rows=self.rows)
        try:
            check_replay(asked, eager, entry, lambda: runs_program(entry, effects, alone, self.rows))
        except VerificationError as error:
            what = f"and {name} in the real ones, {error}"
            raise _DependentRowsError(RowProof(False, True, BY_RULE.name, what)) from error
        return True

    def _last_further(self, spec: InputSpec) -> int:
        """The last dimension of a mask along which it says what is padding: one that is not the batch."""
        return next(dim for dim, axis in reversed(spec.spans) if axis is not self._axes[0])

    def _prove(self, alike: Mapping[int, torch.Tensor]) -> RowProof:
        with torch.no_grad():
            try:
                if not self._is_replayed:
                    self._replay(self._base)
                if self._earlier is None:
                    self._prove_for_other_padding()
                else:
                    self._is_limited = self._earlier.limited
                made = self._prove_for_other_rows()
                if self._earlier is None:
                    self._prove_for_other_batches()
                    self._prove_for_other_numbers()
            except _DependentRowsError as found:
                return found.proof
        untested, assumed = self._untested(alike)
        repeats, limited = self._is_deterministic is not False, self._is_limited
        parts = enumerate(zip(self._specs, self._arguments, strict=True))
        discrete = (i for i, (spec, value) in parts if spec.spans and (limited or probes.is_discrete(spec, value)))
        taken = [self._may_replace(i) for i in discrete]
        # Made batches count where no padding is made of the batch's numbers.
        batches = (1 if any(taken) else 1 + made) if taken else 0
        single = self._request.inputs.cells(self.rows) == 1 and bool(self._follow_rules())
        return RowProof(
            True, repeats, untested=untested, assumed=assumed, limited=limited, batches=batches, single=single
        )

    def _prove_for_other_padding(self) -> None:
        """Replay the real rows with other rows of the batch, and with numbers that no batch held, in the padding, until
        the callable fails for some."""
        base, others = self._read(), Padding(_OTHER_ROWS, self._elements(), axes=self._along)
        if self._is_other(others):
            self._replay(others)
            self._compare(others.name, base, self._read())
        for padding in filter(self._is_other, () if self._is_limited else self._wild()):
            self._is_limited = not self._takes(padding)
            if self._is_limited:
                return
            self._compare(padding.name, base, self._read())

    def _wild(self) -> Iterator[Padding]:
        """Padding of numbers that no batch held."""
        yield from (Padding("large numbers", rows, axes=self._along) for rows in self._large())
        any_rows = self._elements(torch.Generator().manual_seed(0))
        rows = _overlaid(any_rows, self._made(probes.wide, self._takes_any))
        yield Padding("random numbers of all magnitudes", rows, axes=self._along)

    def _far_apart(self) -> Iterator[Padding]:
        """The padding of the rules, and such as few means or extremes take for the same."""
        yield BY_RULE
        others = self._elements()
        for rows in [others] if self._is_limited else self._large():
            yield Padding("large numbers", _overlaid(others, rows), axes=self._along)

    def _large(self) -> Iterator[Rows]:
        """Large numbers of both signs in turns along the last dynamic dimension; where there is only one place of
        padding, or another dimension along which they do not change, first of one sign, then of the other."""
        pairs = zip(lengths_of(self._axes, self.rows), lengths_of(self._axes, self._request.size), strict=True)
        is_one_sign = any(full - real == 1 for real, full in pairs)
        is_one_sign |= any(len(spec.spans) > 1 for spec in self._specs)
        for first in (1, -1) if is_one_sign else (1,):
            yield self._made(partial(probes.signed, first), self._takes_any)

    def _elements(self, generator: torch.Generator | None = None) -> Rows:
        """Each argument with elements of the batch in its padding: from the last one backwards, or any. All arguments
        take the same ones, since they may belong together."""
        index: dict[Axis, torch.Tensor] = {}
        for axis in self._axes:
            own, real, full = (axis.of(number) for number in (self._request.rows, self.rows, self._request.size))
            chosen = (own - 1 - torch.arange(full - real, device="cpu")) % own
            if generator is not None:
                chosen = torch.randint(own, (full - real,), generator=generator, device="cpu")
            index[axis] = torch.cat([torch.arange(real, device="cpu"), chosen])

        def chosen_rows(spec: InputSpec, value: torch.Tensor, _: int) -> torch.Tensor:
            for dim, axis in spec.spans:
                value = value.detach().index_select(dim, index[axis].to(value.device))
            return value

        return self._made(chosen_rows, self._free)

    def _is_other(self, padding: Padding) -> bool:
        return padding.name != self._base.name and any(rows is not None for rows in (*self._base.rows, *padding.rows))

    def _takes(self, padding: Padding) -> bool:
        """Replay with such numbers; whether the callable takes them."""
        try:
            self._replay(padding)
        except _DependentRowsError as found:
            if found.proof.reason is Reason.PADDING_WRITES_STATE:
                raise
            return False
        return True

    def _replay(self, padding: Padding) -> None:
        try:
            self._attempt.replay_with(self._entry, self.rows, padding)
        except Exception as error:
            if ends_capture(self._request.backend, error):
                raise
            writes = isinstance(error, CaptureError) and error.reason is Reason.PADDING_WRITES_STATE
            reason = Reason.PADDING_WRITES_STATE if writes else Reason.VERIFICATION_FAILED
            what = str(error) if writes else f"the call raises {type(error).__name__}: {error}"
            raise _DependentRowsError(RowProof(False, perturbation=padding.name, what=what, reason=reason)) from error

    def _prove_for_other_rows(self) -> int:
        """Once more with real rows that hide less. Gives how many were compared with eager. Kinds that the callable
        does not take are left out."""
        batch_base, compared = self._base, 0
        for name, real, (first, *others) in self._probes():
            self._base = Padding("", first, _overlaid(self._arguments, real), self._along)
            if not others:
                compared += self._is_as_eager(name)
                continue
            try:
                self._replay(self._base)
            except _DependentRowsError:
                continue
            base = self._read()
            for rows in others:
                self._replay(self._base._replace(rows=rows))
                self._compare(name, base, self._read())
        self._base = batch_base
        return compared

    def _probes(self) -> Iterator[_Probe]:
        """Real rows that hide less: see Note [rows that hide less], and Note [what padding rows may hold]."""
        rule, limited, flags = BY_RULE.rows, self._is_limited, self._flags
        discrete = [i for i in self._free if not self._specs[i].dtype.is_complex and self._is_discrete(i)]
        places = probes.telling_places(self._specs, self._arguments, self.rows, discrete)
        every = [self._made(partial(probes.uniform, place), self._spanned) for place in places]
        has_state = bool(self._state or self._unseen)  # what another row writes is other state
        in_turns = flags == discrete and not limited and self._holds_two_kinds
        for rows, other in zip(every, [*every[1:], *every[:1]], strict=True):
            if other is rows or has_state:
                tried = [rule, self._as_padding(rows)]
            elif in_turns:
                tried = [self._as_padding(one) for one in (self._beside_zeros(other), rows)]
            else:
                tried = [rule, self._as_padding(rows), self._as_padding(other)]
            yield _Probe("one row of the batch (in place of the real rows, too)", rows, tried)
        whole = [i for i in discrete if i not in flags]
        if whole and not limited:
            is_safe = self._entry.program.takes_any or all(one.is_cpu for one in self._arguments)
            most = self._made(probes.largest if is_safe else partial(probes.edge, 1), whole)
            yield _Probe("the largest numbers of the batch (in the real rows, too)", most, [rule, most])
        takes = self._takes_any if self._earlier is None or limited else []
        # A mask that hides the padding would hide these numbers, too.
        shown = self._made(partial(probes.uniform, {}), [] if limited else flags)
        near, far = self._made(probes.small, takes), probes.edge if limited else probes.far
        if takes and not limited:
            yield _Probe("large numbers (and small ones in the real rows)", near, [rule, *self._large()])
        high, low = (_overlaid(shown, self._made(partial(far, sign), takes)) for sign in (1, -1))
        name = "the largest or smallest numbers of the batch" if limited else "large numbers of one sign"
        # Padding that a rule leaves as it is may hold anything, and nobody knows what it holds now.
        further = [near] if any(pad.is_left for spec in self._specs for pad in spec.pads) else []
        for one_sign, other_sign in ((high, low), (low, high)) if takes else ():
            tried = [one_sign, *([other_sign] if limited else further)]
            yield _Probe(f"{name} (in the real rows, too)", one_sign, [rule, *tried])
        yield from self._probes_of_rules()

    @property
    def _holds_two_kinds(self) -> bool:
        """Whether rows of two kinds, in turns, are all among the padding along each dimension."""
        rows = self._axes[0]
        real, padding = rows.of(self.rows), rows.of(self._request.size) - rows.of(self.rows)
        have_rows = all(any(axis is rows for _, axis in spec.spans) for spec in self._specs if spec.spans)
        return have_rows and padding != 1 and (real >= _FEW or len(self._axes) == 1)

    def _beside_zeros(self, rows: Rows) -> Rows:
        """Rows of zeros and these, in turns."""
        made = list[torch.Tensor | None]()
        for spec, one in zip(self._specs, rows, strict=True):
            turns = one
            if one is not None:
                turns = torch.zeros(one.shape, dtype=one.dtype, device=one.device)
                for dim in (dim for dim, axis in spec.spans if axis is self._axes[0]):
                    turns.movedim(dim, 0)[1::2].copy_(one.movedim(dim, 0)[1::2])
            made.append(turns)
        return made

    def _probes_of_rules(self) -> Iterator[_Probe]:
        """Arguments whose padding keeps to a rule get numbers of other kinds, or the edges of the batch if the callable
        limits what it takes; integers and masks one row. See Note [rows that a rule hides]."""
        rule, ruled = [BY_RULE.rows], self._follow_rules()
        real = [i for i in ruled if self._specs[i].dtype.is_floating_point and i not in self._kept]
        if real and not self._is_limited:
            yield _Probe("small numbers", self._made(probes.small, real), rule)
        far = probes.edge if self._is_limited else probes.far
        for sign in (1, -1) if real else ():
            yield _Probe("numbers of one sign", self._made(partial(far, sign), real), rule)
        whole = [i for i in ruled if i in self._kept or self._is_discrete(i)]
        # A rule may name what one row holds: then the largest or the smallest number is another one.
        for place in probes.telling_places(self._specs, self._arguments, self.rows, whole, takes_smallest=True):
            if not probes.holds_padding(self._specs, self._arguments, self._axes[0], place):
                yield _Probe("one row of the batch", self._made(partial(probes.uniform, place), self._spanned), rule)
        beside = [i for i in self._takes_any if self._specs[i].dtype.is_floating_point]
        for sign in (1, -1) if self._kept else ():  # a mask may make zeros of what it hides
            yield _Probe("numbers of one sign", self._made(partial(probes.of_sign, sign), beside), rule)

    def _prove_for_other_batches(self) -> None:
        """Once more with other values of tensors of zeros, and with fewer rows; see ``capture/state_probes.py``."""
        known, prober = self._entry.proof, StateProber(self._attempt, self._entry)
        if known is None:
            what = prober.difference(self._state, self.rows, self._far_apart(), self._along)
            if what is not None:
                raise _DependentRowsError(RowProof(False, True, "large numbers", what))
        if known is None or "state" in known.untested:
            self._needs_more_rows, what = prober.writes_more_with_fewer_rows(self.rows)
            if what is not None:
                raise _DependentRowsError(RowProof(False, True, BY_RULE.name, what, Reason.PADDING_WRITES_STATE))

    def _prove_for_other_numbers(self) -> None:
        """Run the real rows alone: numbers of how many there are may matter for other batches, as a capacity does."""
        is_first = not self._along and self._entry.proof is None
        if not is_first or self._entry.mode is not CUDAGraphMode.FULL:  # breaks may take any number from their data
            return
        request, attempt = self._request, self._attempt
        attempt.start_over("asking whether the call computes with the number of rows")
        alone = [spec.cut(one, self.rows).clone() for spec, one in zip(self._specs, self._arguments, strict=True)]
        labels = Labels.of_arguments(alone, self._specs)
        effects = EffectRecorder(request.options.state_limit_bytes, strict=True, labels=labels)
        attempt.try_apart(effects, request.values_with(alone), effects.note_outputs)
        if self._entry.program.counts_rows(Program(effects.dispatched, self.rows, self._axes)):
            raise _DependentRowsError(RowProof(False, what="the call computes with a number that is made of that"))

    @property
    def _spanned(self) -> list[int]:
        """The arguments (by index) that have rows."""
        return [i for i, spec in enumerate(self._specs) if spec.spans]

    @property
    def _free(self) -> list[int]:
        """The arguments whose padding may hold something else than what its rule says."""
        return [i for i in self._spanned if self._may_replace(i)]

    @property
    def _takes_any(self) -> list[int]:
        """The arguments whose padding may hold numbers that occur nowhere in the batch."""
        return [i for i in self._free if probes.takes_any_value(self._specs[i])]

    @property
    def _flags(self) -> list[int]:
        """The arguments that hold nothing but zeros and ones, and whose padding may hold something else."""
        return [i for i in self._free if probes.holds_flags(self._arguments[i])]

    def _follow_rules(self) -> list[int]:
        """The arguments whose padding always keeps to its rule."""
        return [i for i in self._spanned if not self._may_replace(i)]

    def _is_discrete(self, index: int) -> bool:
        return probes.is_discrete(self._specs[index], self._arguments[index])

    def _may_replace(self, index: int) -> bool:
        """Whether padding of this argument may hold something else than what its rule says."""
        padding_writes = self._request.options.padding_writes
        return index not in self._kept and probes.may_replace(self._specs, index, padding_writes)

    def _made(self, kind: Kind, indices: Collection[int]) -> Rows:
        """These arguments of a kind, as long as the graph's; None for the others."""
        parts = enumerate(zip(self._specs, self._arguments, strict=True))
        return [kind(spec, value, self._request.size) if i in indices else None for i, (spec, value) in parts]

    def _as_padding(self, rows: Rows) -> Rows:
        """The same of the arguments whose padding may be replaced."""
        free = self._free
        return [one if i in free else None for i, one in enumerate(rows)]

    def _compare(self, name: str, base: Sequence[_Value], got: Sequence[_Value]) -> None:
        for a, b in _differing(base, got):
            if self._is_deterministic is None:
                self._is_deterministic = self._repeats(base)
            gap = difference(a.tensor, b.tensor, tolerance_for(a.tensor.dtype, exact=self._is_deterministic))
            if gap is not None:
                writes = a.is_state and self._request.options.padding_writes == "refuse"
                reason = Reason.PADDING_WRITES_STATE if writes else Reason.VERIFICATION_FAILED
                what = f"{a.name} changes: {gap}"
                raise _DependentRowsError(RowProof(False, self._is_deterministic, name, what, reason))

    def _repeats(self, base: Sequence[_Value]) -> bool:
        """Whether equal replays give equal bits."""
        for _ in range(2):
            self._replay(self._base)
            if _differing(base, self._read()):
                return False
        return True

    def _written_state(self) -> Iterator[Region]:
        """The state that the eager run wrote."""
        arguments = set(map(storage_key, self._eager.arguments))
        for region in self._eager.effects.regions:
            if not region.is_generator and storage_key(region.target) not in arguments:
                yield region

    def _read(self) -> list[_Value]:
        """Copies of the real rows of what the latest replay gave, and of the state that padding must leave alone."""
        request, entry, rows = self._request, self._entry, self.rows
        values = []
        for index, (output, dims) in enumerate(zip(entry.outputs.peek(rows), entry.outputs.rule.follows, strict=True)):
            unwritten = self._eager.effects.unwritten(first_rows(self._eager.outputs[index], dims, rows))
            values.append(_Value(f"output {index}", _without(output, unwritten)))
        for index in entry.mutated:
            name = f"argument {request.inputs.specs[index].name!r}, which the call writes,"
            values.append(_Value(name, request.inputs.real(index, rows, request.size).clone()))
        for region in self._state:
            unwritten = None if region.after is None else self._eager.effects.unwritten(region.after)
            left = _without(region.read(), unwritten)
            values.append(_Value(f"state of shape {tuple(region.target.shape)}", left, is_state=True))
        return values

    def _untested(
        self, alike: Mapping[int, torch.Tensor]
    ) -> tuple[tuple[str, ...], tuple[tuple[int, torch.Tensor], ...]]:
        """Of which arguments this batch could not tell; and of these, the ones that were the same for long, with their
        row."""
        request, specs = self._request, self._specs
        fixed = set(self._spanned) - set(self._takes_any)
        fixed = {i for i in fixed if i in alike or (specs[i].is_pad_given and not request.is_padded)}
        lasting = request.inputs.constants({i: alike[i] for i in fixed if i in alike})
        names = (specs[i].name for i in sorted(fixed - lasting))
        assumed = tuple((specs[i].position, alike[i]) for i in sorted(lasting & fixed))
        return (*names, *(["state"] if self._unseen or self._needs_more_rows else [])), assumed


def _overlaid(below: Sequence[_Rows], above: Rows) -> list[_Rows]:
    """What is ``above``, and what is ``below`` where there is nothing above."""
    return [low if high is None else high for low, high in zip(below, above, strict=True)]


def _without(value: torch.Tensor, unwritten: torch.Tensor | None) -> torch.Tensor:
    """A copy, in which zeros stand for what nothing wrote."""
    return value.clone() if unwritten is None else value.masked_fill(unwritten, 0)


def _differing(base: Sequence[_Value], got: Sequence[_Value]) -> list[tuple[_Value, _Value]]:
    """What has other bits."""
    return [(a, b) for a, b in zip(base, got, strict=True) if not bits_equal(a.tensor, b.tensor)]
