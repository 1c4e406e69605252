"""Proves that the real rows of a graph do not depend on its padding rows.

A replay runs the same kernels on the same shapes. So if rows are independent, the real rows have the same bits whatever
the padding rows hold. The proof replays a graph on the same real rows with other padding, and compares bits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..axes import ROWS, Axis
from ..backends.operators import bits_equal, storage_key
from ..call.signature import PLAIN_TENSORS
from ..errors import CaptureError
from ..memory.entry import CUDAGraphEntry
from ..memory.outputs import first_rows
from ..memory.proof import RowProof
from ..reasons import Reason
from .eager_run import EagerRun
from .padding import (
    BY_RULE,
    Make,
    Padding,
    edge,
    far,
    is_discrete,
    large,
    may_replace,
    of_kind,
    other_rows,
    rows_for,
    signed_rows,
    small,
    takes_any_value,
    telling_places,
    uniform,
    wide,
)
from .request import CaptureRequest
from .verify import difference, tolerance_for

if TYPE_CHECKING:
    from .attempt import CaptureAttempt
    from .regions import Region

__all__ = ["RowProver", "differing"]


_FEW = 2


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
    """Replays a graph, just compared with eager, with other padding. A full batch is cut in half for it.

    The ``attempt`` puts everything back to where the eager run began, loads the first so many rows and a padding, and
    replays.
    """

    _along: Sequence[Axis] = ()

    def __init__(
        self,
        request: CaptureRequest,
        eager: EagerRun,
        entry: CUDAGraphEntry,
        attempt: "CaptureAttempt",
    ) -> None:
        self.rows = self._real_rows(request)
        self._request = request
        self._eager = eager
        self._entry = entry
        self._attempt = attempt
        self._is_deterministic: bool | None = False if entry.program.groups_rows else None
        self._is_limited = entry.program.limits_values
        self._needs_more_rows = False
        written = list(self._written_state())
        # Nothing tells which state the first half of a full batch writes. If padding must write none, it is all of it.
        may_write = self.rows != request.rows and request.options.padding_writes == "allow"
        self._state, self._unseen = ([], written) if may_write else (written, [])
        specs = request.inputs.specs
        # The second half of a full batch is padding like any other, unless a pad rule says what padding is.
        is_told = entry.written is not None or any(spec.is_pad_given for spec in specs)
        self._is_cut = self.rows != request.rows and is_told
        self._base = BY_RULE if request.is_padded or is_told else self._others(backwards=False)

    def _real_rows(self, request: CaptureRequest) -> int:
        return request.rows if request.is_padded else (request.size + 1) // 2

    def _takes_any_value(self, index: int) -> bool:
        return takes_any_value(self._request.inputs.specs[index])

    def _others(self, *, backwards: bool) -> Padding:
        return other_rows(self._request, self.rows, backwards=backwards)

    def _signed(self, fill: Callable[..., torch.Tensor]) -> Iterator[list[torch.Tensor | None]]:
        return signed_rows(self._request, self.rows, fill)

    def _wild(self) -> Iterator[Padding]:
        """Padding of numbers that no batch held."""
        yield from (Padding("large numbers", numbers, axes=self._along) for numbers in self._signed(large))
        yield Padding("random numbers of all magnitudes", self._random(), axes=self._along)

    def _far_apart(self) -> list[Padding]:
        """The padding of the rules, and such as few means or extremes take for the same."""
        others = self._others(backwards=True).rows
        made = [others] if self._is_limited else self._signed(large)
        mixed = ([b if a is None else a for a, b in zip(rows, others, strict=True)] for rows in made)
        return [BY_RULE, *(Padding("large numbers", rows, axes=self._along) for rows in mixed)]

    def _random(self) -> list[torch.Tensor | None]:
        request, generator = self._request, torch.Generator().manual_seed(0)
        count = request.size - self.rows
        shuffled = torch.randint(request.rows, (count,), generator=generator)
        every = range(len(request.inputs.specs))
        return [rows_for(request, i, count, shuffled, wide, generator) for i in every]

    @property
    def is_wanted(self) -> bool:
        """Whether there can be padding, and earlier batches have not shown all that batches can."""
        proof, specs = self._entry.proof, self._request.inputs.specs
        has_padding = self.rows != self._request.size and any(spec.dim is not None for spec in specs)
        return has_padding and (proof is None or (self._request.is_padded and not proof.is_complete))

    @property
    def is_ample(self) -> bool:
        """Whether there are two real rows and two of padding at least, along each dimension: enough for other sizes."""
        grid, size = self._request.grid, self._request.size
        pairs = ((axis.of(self.rows), axis.of(size)) for axis in (grid.axes if grid is not None else (ROWS,)))
        return all(_FEW <= real <= full - _FEW for real, full in pairs)

    def prove(self, alike: Mapping[int, torch.Tensor]) -> RowProof:
        """The proof. Call it right after the replay of the request's batch.

        ``alike`` are the arguments whose rows were all alike in that replay, padding rows among them.
        """
        with torch.no_grad():
            base = self._read()
            try:
                if self._is_cut:
                    self._replay(BY_RULE)
                    base = self._read()
                others = self._others(backwards=True)
                if self._is_other(others):
                    self._replay(others)
                    self._compare(others.name, base, self._read())
                self._is_limited = self._is_limited or not self._takes_all(base)
                self._prove_for_other_rows()
                self._prove_for_other_batches()
            except _DependentRowsError as found:
                return found.proof
        untested, assumed = self._untested(alike)
        repeats = self._is_deterministic is not False
        return RowProof(True, repeats, untested=untested, assumed=assumed, limited=self._is_limited)

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
            if self._request.backend.is_out_of_memory(error):
                raise
            self._request.backend.raise_if_lost(error)
            writes = isinstance(error, CaptureError) and error.reason is Reason.PADDING_WRITES_STATE
            reason = Reason.PADDING_WRITES_STATE if writes else Reason.VERIFICATION_FAILED
            what = str(error) if writes else f"the call raises {type(error).__name__}: {error}"
            raise _DependentRowsError(RowProof(False, perturbation=padding.name, what=what, reason=reason)) from error

    def _replay_anew(self) -> RowProof | None:
        """Replay with the padding of the rules; what that shows already if it cannot be."""
        try:
            self._replay(BY_RULE)
        except _DependentRowsError as found:
            return found.proof
        return None

    def _prove_for_other_rows(self) -> None:
        """Once more with other real rows, which hide less: those of each kind before the padding of the rules, and
        before their own kind. Kinds that the callable does not take are left out."""
        batch_base = self._base
        for name, make, behind in self._kinds_of_rows():
            made = zip(self._made(make, self.rows), self._request.arguments(), strict=True)
            self._base = Padding("", [], [value if other is None else other for other, value in made], self._along)
            try:
                self._replay(self._base)
            except _DependentRowsError:
                continue
            base = self._read()
            for rows in behind:
                self._replay(self._base._replace(rows=rows))
                self._compare(name, base, self._read())
        self._base = batch_base

    def _prove_for_other_batches(self) -> None:
        """Once more with other values of tensors of zeros, and with fewer rows; ``capture/dormant.py`` says why."""
        run, earlier, reason = self._attempt.warm_run, self._entry.proof, Reason.VERIFICATION_FAILED
        views, specs = self._request.inputs.views(self._request.size), self._request.inputs.specs
        rows = {storage_key(view) for spec, view in zip(specs, views, strict=True) if spec.spans}
        whole = (view for spec, view in zip(specs, views, strict=True) if not spec.spans)
        tensors = [] if earlier else [*self._entry.held, *whole]
        hiding, name, what = list(filter(_may_hide, tensors)), BY_RULE.name, None
        is_indexed = any(region.indices and storage_key(region.target) not in rows for region in run.regions)
        if hiding:
            from .dormant import difference_apart  # here, since most tensors hold something else than zeros

            name, paddings = "large numbers", self._far_apart()
            what = difference_apart(self._attempt, self._entry, hiding, self._state, self.rows, paddings)
        if what is None and is_indexed and (earlier is None or "state" in earlier.untested):
            from .dormant import writes_more_with_fewer_rows  # here, since few calls write by indices

            name, reason = BY_RULE.name, Reason.PADDING_WRITES_STATE
            self._needs_more_rows, what = writes_more_with_fewer_rows(self._attempt, self.rows)
        if what is not None:
            raise _DependentRowsError(RowProof(False, True, name, what, reason))

    def _kinds_of_rows(self) -> Iterator[tuple[str, Make, Iterable[Sequence[torch.Tensor | None]]]]:
        """What padding and real rows hold, in words; how real rows are made so; and the padding that is tried."""
        specs, arguments = self._request.inputs.specs, self._request.arguments()
        free = [i for i, spec in enumerate(specs) if self._may_replace(i) and not spec.dtype.is_complex]
        places = telling_places(specs, arguments, self.rows, [i for i in free if is_discrete(specs[i], arguments[i])])
        rows: list[Make] = [partial(uniform, place) for place in places]
        for make, other in zip(rows, [*rows[1:], *rows[:1]], strict=True):
            # What another row writes is other state.
            behind = [make] if self._state or self._unseen else [make, other]
            yield "one row of the batch (in place of the real rows, too)", make, map(self._padding_made, behind)
        takes = self._takes_any
        near: Make = partial(of_kind, takes, small)
        if takes and not self._is_limited:
            yield "large numbers (and small ones in the real rows)", near, self._signed(large)
        high, low = (partial(of_kind, takes, partial(edge if self._is_limited else far, sign)) for sign in (1, -1))
        numbers = "the largest or smallest numbers of the batch" if self._is_limited else "large numbers of one sign"
        for one_sign, other_sign in ((high, low), (low, high)) if takes else ():
            # Padding that a rule leaves as it is may hold anything, and nobody knows what it holds now.
            further = [near] if any(pad.kind == "leave" for spec in specs for pad in (spec.pad, *spec.pads)) else []
            kinds = [one_sign, *([other_sign] if self._is_limited else further)]
            yield f"{numbers} (in the real rows, too)", one_sign, map(self._padding_made, kinds)

    @property
    def _takes_any(self) -> list[int]:
        specs = enumerate(self._request.inputs.specs)
        return [i for i, spec in specs if spec.dim is not None and self._takes_any_value(i)]

    def _made(self, make: Make, rows: int) -> list[torch.Tensor | None]:
        parts = zip(self._request.inputs.specs, self._request.arguments(), strict=True)
        return [make(i, spec, value, rows) for i, (spec, value) in enumerate(parts)]

    def _padding_made(self, make: Make) -> list[torch.Tensor | None]:
        made = enumerate(self._made(make, self._padding_rows))
        return [rows if self._may_replace(index) else None for index, rows in made]

    def _may_replace(self, index: int) -> bool:
        """Whether padding of this argument may hold something else than what its rule says."""
        return may_replace(self._request.inputs.specs, index, self._request.options.padding_writes)

    @property
    def _padding_rows(self) -> int:
        """How many rows a padding of the proof has."""
        return self._request.size - self.rows

    def _compare(self, name: str, base: Sequence[_Value], got: Sequence[_Value]) -> None:
        for a, b in differing(base, got):
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
            if differing(base, self._read()):
                return False
        return True

    def _written_state(self) -> "Iterator[Region]":
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
            assert region.after is not None
            left = _without(region.read(), self._eager.effects.unwritten(region.after))
            values.append(_Value(f"state of shape {tuple(region.target.shape)}", left, is_state=True))
        return values

    def _untested(
        self, alike: Mapping[int, torch.Tensor]
    ) -> tuple[tuple[str, ...], tuple[tuple[int, torch.Tensor], ...]]:
        """Of which arguments this batch could not tell; and of these, the ones that were the same for long, with their
        row."""
        request, specs = self._request, self._request.inputs.specs
        fixed = {i for i, spec in enumerate(specs) if spec.dim is not None and not self._takes_any_value(i)}
        fixed = {i for i in fixed if i in alike or (specs[i].is_pad_given and not request.is_padded)}
        lasting = request.inputs.constants({i: alike[i] for i in fixed if i in alike})
        names = (specs[i].name for i in sorted(fixed - lasting))
        assumed = tuple((specs[i].position, alike[i]) for i in sorted(lasting & fixed))
        return (*names, *(["state"] if self._unseen or self._needs_more_rows else [])), assumed


def _may_hide(tensor: torch.Tensor) -> bool:
    """Whether a tensor begins with a zero, or holds truth values. Reads the zero back to the host."""
    if not tensor.numel() or tensor.is_quantized or tensor.is_meta or type(tensor) not in PLAIN_TENSORS:
        return False
    is_narrow = tensor.is_floating_point() and tensor.dtype.itemsize == 1
    return tensor.dtype is torch.bool or (not is_narrow and not bool(tensor[(0,) * tensor.dim()]))


def _without(value: torch.Tensor, unwritten: torch.Tensor | None) -> torch.Tensor:
    """A copy, in which zeros stand for what nothing wrote."""
    return value.clone() if unwritten is None else value.masked_fill(unwritten, 0)


def differing(base: Sequence[_Value], got: Sequence[_Value]) -> list[tuple[_Value, _Value]]:
    """What has other bits."""
    return [(a, b) for a, b in zip(base, got, strict=True) if not bits_equal(a.tensor, b.tensor)]
