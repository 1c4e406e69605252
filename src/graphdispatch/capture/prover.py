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

Note [two kinds in turns]
    Of flags, zeros and ones, all places give one row, and only what lies beside them differs. So padding of zeros and
    of another place's row, in turns, is compared with padding of the row itself, which is neutral for a maximum and
    for all else that counts a row once: it differs from both together if it differs from either. What counts rows up
    to some number may take two kinds of padding for one. Integers that are no flags, and numbers that may become
    indices, are compared one by one.

Note [rows that a rule hides]
    Some padding always keeps to its rule: that of the user, a scratch row of zeros, a mask whose padding hides what it
    pads. Whether such padding is neutral depends on the real rows: a maximum of at least zero hides zeros. So eager
    runs real rows of other kinds, without padding, and a replay must give the same.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, dropwhile, islice
from typing import NamedTuple, TypeVar

import torch

from ..backends.operators import bits_equal, storage_key
from ..call.signature import InputSpec
from ..errors import CaptureError
from ..memory.entry import CUDAGraphEntry
from ..memory.labels import Labels
from ..memory.outputs import first_rows
from ..memory.proof import RowProof
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..sizes import Axis, lengths_of, pack
from . import probes
from .attempt import CaptureAttempt
from .compare import coarsest, difference, find_padding_writes, tolerance_for
from .effects import EffectRecorder, Region
from .make_entry import runs_program
from .probes import BY_RULE, Make, Padding
from .state_probes import (
    difference_apart,
    ends_capture,
    may_hide,
    run_apart,
    writes_more_of_others,
    writes_more_with_fewer_rows,
)

_FEW = 2
_OTHER_ROWS = "other real rows"
_Rows = TypeVar("_Rows", torch.Tensor, torch.Tensor | None)


class _Value(NamedTuple):
    """What a replay left that must not depend on padding."""

    name: str
    tensor: torch.Tensor
    is_state: bool = False


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
        self._axes = request.inputs.axes
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
        is_told = entry.written is not None or any(spec.is_pad_given for spec in request.inputs.specs)
        self._is_cut = self.rows != request.rows and (is_told or request.is_padded)
        self._base = BY_RULE if request.is_padded or is_told else Padding(_OTHER_ROWS, request.arguments())

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
        return Padding("large numbers", self._padding_made(partial(probes.of_kind, self._takes_any, probes.checkered)))

    def prove(self, alike: Mapping[int, torch.Tensor]) -> RowProof:
        """The proof. Call it right after the replay of the request's batch.

        ``alike`` are the arguments whose rows were all alike in that replay, padding rows among them.
        """
        whole = self._prove_along((), alike)
        if whole.independent or len(self._axes) == 1:
            return whole
        alone = {axis: self._prove_along((axis,), alike) for axis in self._axes}
        bound = tuple(axis for axis, proof in alone.items() if not proof.independent)
        found = next((proof for proof in alone.values() if not proof.independent), whole)
        names = " and ".join(repr(axis.name) for axis in bound or self._axes)
        return replace(found, bound=bound or self._axes, perturbation=f"{found.perturbation} along {names}")

    def _prove_along(self, axes: Sequence[Axis], alike: Mapping[int, torch.Tensor]) -> RowProof:
        """The proof of padding along these axes, with as few masks left alone as it takes."""
        first = None
        choices = self._choices()
        if self._earlier is not None:
            # First what the earlier proof kept, though it may hold other numbers than zeros and ones by now.
            known = self._earlier.kept
            choices = chain([known], islice(dropwhile(known.__ne__, choices), 1, None))
        for kept in choices:
            if first is not None or axes:  # the graph's own replay is no base then
                self._base, self._is_cut = BY_RULE, True
            self._along, self._kept, self._is_limited = axes, kept, self._entry.program.limits_values
            proof = self._prove(alike)
            if proof.independent:
                self._prove_hidden(kept)
                return replace(proof, kept=tuple(kept))
            first = first or proof
        assert first is not None
        return first

    def _choices(self) -> Iterator[tuple[int, ...]]:
        """Which arguments keep their padding: none, then each mask, then all of them. A mask is an argument along a
        further dimension that holds nothing but zeros and ones."""
        yield ()
        pairs = list(zip(self._request.inputs.specs, self._request.arguments(), strict=True))
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
        request, specs = self._request, self._request.inputs.specs
        arguments = enumerate(request.arguments())
        self._base = Padding("", [], [torch.zeros_like(v) if i in kept else v for i, v in arguments], self._along)
        try:
            is_told = self._takes(self._base) and self._hidden_matters()
        except _DependentRowsError:  # such rows write where those of the batch do not
            is_told = True
        if is_told:
            request.signature.watch([(specs[i].position, self._last_further(specs[i])) for i in kept])

    def _hidden_matters(self) -> bool:
        """Whether real elements of the base are unlike eager's, or change with padding."""
        if self._gap_to_eager() is not None:
            return True
        base = self._read()
        return any(
            not self._takes(self._base._replace(rows=rows)) or bool(_differing(base, self._read()))
            for rows in (self._elements(backwards=True), *self._large())
        )

    def _gap_to_eager(self) -> tuple[Reason, str] | None:
        """How a replay of the base differs from an eager run without the padding that is asked about, and what that
        writes: None if it does not, and no words if one of them fails."""
        request, entry, options, specs = self._request, self._entry, self._request.options, self._request.inputs.specs
        self._attempt.start_over("asking what eager gives for other rows")
        try:
            self._attempt.load(self.rows, self._base)
        except Exception as error:  # of a pad function
            if ends_capture(request.backend, error):
                raise
            return Reason.VERIFICATION_FAILED, ""
        parts = zip(specs, request.inputs.views(request.size), self._base.real, strict=True)
        alone = [spec.cut(view, self.rows, self._along).clone() if spec.spans else one for spec, view, one in parts]
        given, written = set(map(storage_key, alone)), list[Region]()
        labels = Labels.of_arguments(alone, specs)
        effects = EffectRecorder(options.state_limit_bytes, strict=True, labels=labels)

        def read(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
            effects.note_outputs(outputs)
            regions = (one for one in effects.regions if not one.is_generator)
            written.extend(one for one in regions if storage_key(one.target) not in given)
            pairs = zip(outputs, entry.outputs.rule.follows, strict=True)
            left = [first_rows(one, dims, self.rows) for one, dims in pairs]
            left += [specs[i].cut(alone[i], self.rows) for i in entry.mutated]
            return [one.detach().clone() for one in (*left, *(one.read() for one in written))]

        eager = run_apart(self._attempt, effects, request.values_with(alone), read)
        if eager is None:
            return Reason.VERIFICATION_FAILED, ""
        is_asked = options.padding_writes == "refuse" and not self._along
        writes = is_asked and writes_more_of_others(self._attempt, request.values_with(alone), self.rows)
        try:
            self._replay(self._base)
        except _DependentRowsError:
            return Reason.VERIFICATION_FAILED, ""
        if writes or find_padding_writes(request, effects.regions, self._attempt.warm_run.regions) is not None:
            # It may write there what is there already, as now and then a flag.
            return Reason.PADDING_WRITES_STATE, "padding writes where the real rows leave memory alone"
        for want, (name, got, _) in zip(eager, self._read(written), strict=False):
            ignored = effects.unwritten(want)
            if ignored is not None and want.shape == got.shape:
                got = got.where(~ignored, want)
            dtype = coarsest(want.dtype, entry.program.float_types)
            tolerance = partial(tolerance_for, dtype, exact=False, rtol=options.rtol, atol=options.atol)
            gap = difference(want, got, tolerance())
            if gap is not None and runs_program(entry, effects, alone, self.rows):
                gap = difference(want, got, tolerance(is_far=True))
            if gap is not None:
                return Reason.VERIFICATION_FAILED, f"{name} is not what eager gives: {gap}"
        return None

    def _last_further(self, spec: InputSpec) -> int:
        """The last dimension of a mask along which it says what is padding: one that is not the batch."""
        return next(dim for dim, axis in reversed(spec.spans) if axis is not self._axes[0])

    def _prove(self, alike: Mapping[int, torch.Tensor]) -> RowProof:
        with torch.no_grad():
            try:
                if self._is_cut:
                    self._replay(BY_RULE)
                if self._earlier is None:
                    self._prove_for_other_padding()
                else:
                    self._is_limited = self._earlier.limited
                self._prove_for_other_rows()
                made = self._prove_for_rules()
                if self._earlier is None:
                    self._prove_for_other_batches()
            except _DependentRowsError as found:
                return found.proof
        untested, assumed = self._untested(alike)
        repeats, limited = self._is_deterministic is not False, self._is_limited
        parts = zip(self._request.inputs.specs, self._request.arguments(), strict=True)
        discrete = (
            i for i, (spec, value) in enumerate(parts) if spec.spans and (limited or probes.is_discrete(spec, value))
        )
        taken = [self._may_replace(i) for i in discrete]
        # Made batches count where no padding is made of the batch's numbers.
        batches = (1 if any(taken) else 1 + made) if taken else 0
        single = self._request.inputs.cells(self.rows) == 1 and bool(self._follow_rules())
        return RowProof(
            True, repeats, untested=untested, assumed=assumed, limited=limited, batches=batches, single=single
        )

    def _prove_for_other_padding(self) -> None:
        """Replay the real rows with other rows of the batch, and with numbers that no batch held, in the padding."""
        base, others = self._read(), Padding(_OTHER_ROWS, self._elements(backwards=True), axes=self._along)
        if self._is_other(others):
            self._replay(others)
            self._compare(others.name, base, self._read())
        self._is_limited = self._is_limited or not self._takes_all(base)

    def _wild(self) -> Iterator[Padding]:
        """Padding of numbers that no batch held."""
        yield from (Padding("large numbers", rows, axes=self._along) for rows in self._large())
        any_rows = self._elements(torch.Generator().manual_seed(0))
        rows = _overlaid(any_rows, self._padding_made(partial(probes.of_kind, self._takes_any, probes.wide)))
        yield Padding("random numbers of all magnitudes", rows, axes=self._along)

    def _far_apart(self) -> list[Padding]:
        """The padding of the rules, and such as few means or extremes take for the same."""
        others = self._elements(backwards=True)
        made = [others] if self._is_limited else self._large()
        return [BY_RULE, *(Padding("large numbers", _overlaid(others, rows), axes=self._along) for rows in made)]

    def _large(self) -> Iterator[list[torch.Tensor | None]]:
        """Large numbers of both signs in turns along the last dynamic dimension; where there is only one place of
        padding, or another dimension along which they do not change, first of one sign, then of the other."""
        pairs = zip(lengths_of(self._axes, self.rows), lengths_of(self._axes, self._request.size), strict=True)
        is_one_sign = any(full - real == 1 for real, full in pairs)
        is_one_sign |= any(len(spec.spans) > 1 for spec in self._request.inputs.specs)
        for first in (1, -1) if is_one_sign else (1,):
            yield self._padding_made(partial(probes.of_kind, self._takes_any, partial(probes.signed, first)))

    def _elements(
        self, generator: torch.Generator | None = None, *, backwards: bool = False
    ) -> list[torch.Tensor | None]:
        """Each argument with elements of the batch in its padding: from the last one backwards, or any. All arguments
        take the same ones, since they may belong together."""
        request = self._request
        index: dict[Axis, torch.Tensor] = {}
        for axis in self._axes:
            own, real, full = axis.of(request.rows), axis.of(self.rows), axis.of(request.size)
            rest = (own - 1 - torch.arange(full - real, device="cpu")) % own
            chosen = rest if backwards else torch.randint(own, (full - real,), generator=generator, device="cpu")
            index[axis] = torch.cat([torch.arange(real, device="cpu"), chosen])
        rows: list[torch.Tensor | None] = []
        for place, (spec, value) in enumerate(zip(request.inputs.specs, request.arguments(), strict=True)):
            whole = value.detach()
            for dim, axis in spec.spans:
                whole = whole.index_select(dim, index[axis].to(value.device))
            rows.append(whole if self._may_replace(place) else None)
        return rows

    def _takes_all(self, base: Sequence[_Value]) -> bool:
        """Compare with numbers that no batch held; false as soon as the callable fails for some."""
        for padding in filter(self._is_other, self._wild()):
            if not self._takes(padding):
                return False
            self._compare(padding.name, base, self._read())
        return True

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

    def _prove_for_other_rows(self) -> None:
        """Once more with other real rows, which hide less: those of each kind before the padding of the rules, and
        before their own kind. Kinds that the callable does not take are left out. See Note [two kinds in turns]."""
        batch_base = self._base
        for name, make, tried in self._kinds_of_rows():
            paddings = iter(tried)
            real = _overlaid(self._request.arguments(), self._made(make, self.rows))
            self._base = Padding("", next(paddings), real, self._along)
            try:
                self._replay(self._base)
            except _DependentRowsError:
                continue
            base = self._read()
            for rows in paddings:
                self._replay(self._base._replace(rows=rows))
                self._compare(name, base, self._read())
        self._base = batch_base

    def _prove_for_rules(self) -> int:
        """Compare with eager for real rows of other kinds; see Note [rows that a rule hides]. Gives how many there
        were."""
        batch_base = self._base
        compared = sum([self._is_as_eager(name, make) for name, make in self._kinds_for_rules()])
        if self._kept:  # a mask may make zeros of what it hides
            beside = [i for i in self._takes_any if self._request.inputs.specs[i].dtype.is_floating_point]
            for sign in (1, -1):
                self._is_as_eager("numbers of one sign", partial(probes.of_kind, beside, partial(probes.of_sign, sign)))
        self._base = batch_base
        return compared

    def _is_as_eager(self, name: str, make: Make) -> bool:
        """Whether both take such real rows. Raises ``_DependentRowsError`` if a replay gives something else."""
        real = _overlaid(self._request.arguments(), self._made(make, self.rows))
        self._base = Padding("", [], real, self._along)
        found = self._gap_to_eager()
        if found is not None and found[1]:
            what = f"and {name} in the real ones, {found[1]}"
            raise _DependentRowsError(RowProof(False, True, BY_RULE.name, what, found[0]))
        return found is None

    def _kinds_for_rules(self) -> Iterator[tuple[str, Make]]:
        """What real rows hold, in words, and how they are made so: arguments whose padding keeps to a rule get numbers
        of other kinds, or the edges of the batch if the callable limits what it takes; integers and masks one row."""
        specs, arguments = self._request.inputs.specs, self._request.arguments()
        kept = self._follow_rules()
        real = [i for i in kept if specs[i].dtype.is_floating_point and i not in self._kept]
        if real and not self._is_limited:
            yield "small numbers", partial(probes.of_kind, real, probes.small)
        far = probes.edge if self._is_limited else probes.far
        for sign in (1, -1) if real else ():
            yield "numbers of one sign", partial(probes.of_kind, real, partial(far, sign))
        whole = [i for i in kept if i in self._kept or probes.is_discrete(specs[i], arguments[i])]
        # A rule may name what one row holds: then the largest or the smallest number is another one.
        for place in probes.telling_places(specs, arguments, self.rows, whole, takes_smallest=True):
            yield "one row of the batch", partial(probes.uniform, place)

    def _follow_rules(self) -> list[int]:
        """The arguments whose padding always keeps to its rule."""
        return [i for i, spec in enumerate(self._request.inputs.specs) if spec.spans and not self._may_replace(i)]

    def _prove_for_other_batches(self) -> None:
        """Once more with other values of tensors of zeros, and with fewer rows; see ``capture/state_probes.py``."""
        run, earlier, reason = self._attempt.warm_run, self._entry.proof, Reason.VERIFICATION_FAILED
        views, specs = self._request.inputs.views(self._request.size), self._request.inputs.specs
        rows = {storage_key(view) for spec, view in zip(specs, views, strict=True) if spec.spans}
        whole = [view for spec, view in zip(specs, views, strict=True) if not spec.spans]
        written = {storage_key(region.target) for region in run.regions if not region.is_generator}
        held = [] if earlier else [*self._entry.held, *whole]
        hiding = [one for one in held if may_hide(one, is_written=storage_key(one) in written)]
        name, what = BY_RULE.name, None
        indexed = {storage_key(region.target) for region in run.regions if region.indices}
        is_indexed = any(key not in rows for key in (*indexed, *map(storage_key, run.opaque.values())))
        if hiding:
            name, paddings = "large numbers", self._far_apart()
            what = difference_apart(self._attempt, self._entry, hiding, self._state, self.rows, paddings, self._along)
        if what is None and is_indexed and (earlier is None or "state" in earlier.untested):
            name, reason = BY_RULE.name, Reason.PADDING_WRITES_STATE
            self._needs_more_rows, what = writes_more_with_fewer_rows(self._attempt, self.rows)
        if what is not None:
            raise _DependentRowsError(RowProof(False, True, name, what, reason))

    def _kinds_of_rows(self) -> Iterator[tuple[str, Make, Iterable[Sequence[torch.Tensor | None]]]]:
        """What padding and real rows hold, in words; how real rows are made so; and the padding that is tried, each
        compared with the first."""
        specs, arguments = self._request.inputs.specs, self._request.arguments()
        for make, tried in self._uniform_rows():
            yield "one row of the batch (in place of the real rows, too)", make, tried
        takes = self._takes_any if self._earlier is None or self._is_limited else []
        near: Make = partial(probes.of_kind, takes, probes.small)
        if takes and not self._is_limited:
            yield "large numbers (and small ones in the real rows)", near, chain([BY_RULE.rows], self._large())
        far = probes.edge if self._is_limited else probes.far
        # A mask of integers that hides the padding would hide these numbers, too.
        flags = [i for i in self._discrete() if i not in takes and probes.holds_flags(arguments[i])] if takes else []
        flags = [] if self._is_limited else flags
        kinds_of = (partial(probes.of_kind, takes, partial(far, sign)) for sign in (1, -1))
        high, low = (partial(probes.beside_flags, flags, kind) for kind in kinds_of)
        numbers = "the largest or smallest numbers of the batch" if self._is_limited else "large numbers of one sign"
        for one_sign, other_sign in ((high, low), (low, high)) if takes else ():
            # Padding that a rule leaves as it is may hold anything, and nobody knows what it holds now.
            further = [near] if any(pad.is_left for spec in specs for pad in spec.pads) else []
            kinds = [one_sign, *([other_sign] if self._is_limited else further)]
            tried = map(self._padding_made, kinds)
            yield f"{numbers} (in the real rows, too)", one_sign, chain([BY_RULE.rows], tried)

    def _uniform_rows(self) -> Iterator[tuple[Make, Iterable[Sequence[torch.Tensor | None]]]]:
        """How real rows are made that are all one row of the batch, and the padding that is tried."""
        specs, arguments, discrete = self._request.inputs.specs, self._request.arguments(), self._discrete()
        places = probes.telling_places(specs, arguments, self.rows, discrete)
        rows: list[Make] = [partial(probes.uniform, place) for place in places]
        is_in_turns = not self._is_limited and all(probes.holds_flags(arguments[i]) for i in discrete)
        is_in_turns = is_in_turns and self._holds_two_kinds
        for make, other in zip(rows, [*rows[1:], *rows[:1]], strict=True):
            if other is make or self._state or self._unseen:  # what another row writes is other state
                yield make, [BY_RULE.rows, self._padding_made(make)]
            elif is_in_turns:
                turns: Make = partial(probes.in_turns, self._axes[0], probes.zeros, other)
                yield make, map(self._padding_made, (turns, make))
            else:
                yield make, chain([BY_RULE.rows], map(self._padding_made, (make, other)))

    def _discrete(self) -> list[int]:
        """The arguments that hold integers, or zeros and ones, and whose padding may hold those of the batch."""
        parts = enumerate(zip(self._request.inputs.specs, self._request.arguments(), strict=True))
        free = ((i, part) for i, part in parts if self._may_replace(i) and not part[0].dtype.is_complex)
        return [i for i, (spec, value) in free if probes.is_discrete(spec, value)]

    @property
    def _holds_two_kinds(self) -> bool:
        """Whether rows of two kinds, in turns, are all among the padding along each dimension."""
        specs, rows = self._request.inputs.specs, self._axes[0]
        real, padding = rows.of(self.rows), rows.of(self._request.size) - rows.of(self.rows)
        have_rows = all(any(axis is rows for _, axis in spec.spans) for spec in specs if spec.spans)
        return have_rows and padding != 1 and (real >= _FEW or len(self._axes) == 1)

    @property
    def _takes_any(self) -> list[int]:
        specs = enumerate(self._request.inputs.specs)
        return [i for i, spec in specs if spec.spans and self._takes_any_value(i)]

    def _made(self, make: Make, rows: int) -> list[torch.Tensor | None]:
        parts = zip(self._request.inputs.specs, self._request.arguments(), strict=True)
        return [make(i, spec, value, rows) for i, (spec, value) in enumerate(parts)]

    def _padding_made(self, make: Make) -> list[torch.Tensor | None]:
        made = enumerate(self._made(make, self._request.size))
        return [rows if self._may_replace(index) else None for index, rows in made]

    def _may_replace(self, index: int) -> bool:
        """Whether padding of this argument may hold something else than what its rule says."""
        specs, padding_writes = self._request.inputs.specs, self._request.options.padding_writes
        return index not in self._kept and probes.may_replace(specs, index, padding_writes)

    def _takes_any_value(self, index: int) -> bool:
        return index not in self._kept and probes.takes_any_value(self._request.inputs.specs[index])

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

    def _read(self, state: Sequence[Region] | None = None) -> list[_Value]:
        """Copies of the real rows of what the latest replay gave, and of ``state``: by default that which padding must
        leave alone."""
        request, entry, rows = self._request, self._entry, self.rows
        values = []
        for index, (output, dims) in enumerate(zip(entry.outputs.peek(rows), entry.outputs.rule.follows, strict=True)):
            unwritten = self._eager.effects.unwritten(first_rows(self._eager.outputs[index], dims, rows))
            values.append(_Value(f"output {index}", _without(output, unwritten)))
        for index in entry.mutated:
            name = f"argument {request.inputs.specs[index].name!r}, which the call writes,"
            values.append(_Value(name, request.inputs.real(index, rows, request.size).clone()))
        for region in self._state if state is None else state:
            unwritten = None if region.after is None else self._eager.effects.unwritten(region.after)
            left = _without(region.read(), unwritten)
            values.append(_Value(f"state of shape {tuple(region.target.shape)}", left, is_state=True))
        return values

    def _untested(
        self, alike: Mapping[int, torch.Tensor]
    ) -> tuple[tuple[str, ...], tuple[tuple[int, torch.Tensor], ...]]:
        """Of which arguments this batch could not tell; and of these, the ones that were the same for long, with their
        row."""
        request, specs = self._request, self._request.inputs.specs
        fixed = {i for i, spec in enumerate(specs) if spec.spans and not self._takes_any_value(i)}
        fixed = {i for i in fixed if i in alike or (specs[i].is_pad_given and not request.is_padded)}
        lasting = request.inputs.constants({i: alike[i] for i in fixed if i in alike})
        names = (specs[i].name for i in sorted(fixed - lasting))
        assumed = tuple((specs[i].position, alike[i]) for i in sorted(lasting & fixed))
        return (*names, *(["state"] if self._unseen or self._needs_more_rows else [])), assumed


def _overlaid(below: Sequence[_Rows], above: Sequence[torch.Tensor | None]) -> list[_Rows]:
    """What is ``above``, and what is ``below`` where there is nothing above."""
    return [low if high is None else high for low, high in zip(below, above, strict=True)]


def _without(value: torch.Tensor, unwritten: torch.Tensor | None) -> torch.Tensor:
    """A copy, in which zeros stand for what nothing wrote."""
    return value.clone() if unwritten is None else value.masked_fill(unwritten, 0)


def _differing(base: Sequence[_Value], got: Sequence[_Value]) -> list[tuple[_Value, _Value]]:
    """What has other bits."""
    return [(a, b) for a, b in zip(base, got, strict=True) if not bits_equal(a.tensor, b.tensor)]
