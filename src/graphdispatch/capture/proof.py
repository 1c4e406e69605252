"""Proves that the real rows of a graph do not depend on its padding rows.

A replay runs the same kernels on the same shapes. So if rows are independent, the real rows have the same bits whatever
the padding rows hold. The proof replays a graph on the same real rows with other padding, and compares bits.

Note [what padding rows may hold]
    Only values that cannot break the callable. Floating-point arguments get large, small and random numbers, finite
    ones. Integers may be indices, so they get rows that occur in the batch, or the padding of their rule. All integer
    arguments of a padding row come from one real row, since they may belong together (the begin and end of a range).
    An argument with a pad rule of the user's keeps its rule: what padding rows hold there is what the user promised.
    With ``padding_writes="allow"`` and no pad rule of the user's all integers keep zero, which may be a scratch slot.
    A callable may take no such numbers: it checks its data, or makes indices or probabilities of them. A GPU that meets
    an index out of range is lost to the process. So if the eager run did anything of the kind, or a replay with such
    numbers fails (which says nothing about rows), padding gets the largest and the smallest number of the batch.
    Last, the real rows themselves get small numbers, so that ``x.amax(0).clamp(max=1)`` cannot hide its padding.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ..axes import Axis
from ..backends.operators import bits_equal, storage_key
from ..call.inputs import InputSpec
from ..errors import CaptureError
from ..memory.entry import CUDAGraphEntry
from ..memory.outputs import first_rows
from ..memory.proof import RowProof
from ..reasons import Reason
from .eager_run import EagerRun
from .effects import Region
from .request import CaptureRequest
from .verify import difference, tolerance_for

__all__ = ["BY_RULE", "Padding", "RowProver", "differing", "large", "takes_any_value", "wide"]

_WIDEST = 20  # powers of two


class Padding(NamedTuple):
    """Other padding: what it is, in words, and for each argument (by index) its rows, or None for those of its rule.

    ``real``: what the arguments hold instead of their values; empty for their values. Where there are several dynamic
    dimensions, ``rows`` are whole arguments, of which the padding along ``axes`` (empty: all) is taken.
    """

    name: str
    rows: Sequence[torch.Tensor | None]
    real: Sequence[torch.Tensor] = ()
    axes: Sequence[Axis] = ()


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

    ``replay_with`` puts everything back to where the eager run began, loads the first so many rows and a padding, and
    replays.
    """

    _along: Sequence[Axis] = ()

    def __init__(
        self,
        request: CaptureRequest,
        eager: EagerRun,
        entry: CUDAGraphEntry,
        replay_with: Callable[[CUDAGraphEntry, int, Padding], None],
    ) -> None:
        self.rows = self._real_rows(request)
        self._request = request
        self._eager = eager
        self._entry = entry
        self._replay_with = replay_with
        self._is_deterministic: bool | None = None
        self._is_limited = eager.effects.limits_values
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
        return _other_rows(self._request, self.rows, backwards=backwards)

    def _signed(self, fill: Callable[..., torch.Tensor]) -> Iterator[list[torch.Tensor | None]]:
        return _signed_rows(self._request, self.rows, fill)

    def _wild(self) -> Iterator[Padding]:
        """Padding of numbers that no batch held."""
        yield from (Padding("large numbers", numbers, axes=self._along) for numbers in self._signed(large))
        yield Padding("random numbers of all magnitudes", self._random(), axes=self._along)

    def _limited(self) -> Iterator[Padding]:
        name = "the largest and the smallest number of the batch"
        return (Padding(name, numbers, axes=self._along) for numbers in self._signed(_extreme))

    def _random(self) -> list[torch.Tensor | None]:
        request, generator = self._request, torch.Generator().manual_seed(0)
        count = request.size - self.rows
        shuffled = torch.randint(request.rows, (count,), generator=generator)
        every = range(len(request.inputs.specs))
        return [_rows_for(request, i, count, shuffled, wide, generator) for i in every]

    @property
    def is_wanted(self) -> bool:
        """Whether there can be padding, and no earlier batch has tested all arguments."""
        proof, specs = self._entry.proof, self._request.inputs.specs
        has_padding = self.rows != self._request.size and any(spec.dim is not None for spec in specs)
        return has_padding and (proof is None or (self._request.is_padded and not proof.is_complete))

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
                self._prove_for(base, [self._others(backwards=True)])
                self._is_limited = self._is_limited or not self._takes_all(base)
                if self._is_limited:
                    self._prove_for(base, self._limited())
                else:
                    self._prove_for_small_rows()
            except _DependentRowsError as found:
                return found.proof
        untested, assumed = self._untested(alike)
        repeats = self._is_deterministic is not False
        return RowProof(True, repeats, untested=untested, assumed=assumed, limited=self._is_limited)

    def _prove_for(self, base: Sequence[_Value], paddings: Iterable[Padding]) -> None:
        for padding in filter(self._is_other, paddings):
            self._replay(padding)
            self._compare(padding.name, base, self._read())

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
            self._replay_with(self._entry, self.rows, padding)
        except Exception as error:
            if self._request.backend.is_out_of_memory(error):
                raise
            self._request.backend.raise_if_lost(error)
            writes = isinstance(error, CaptureError) and error.reason is Reason.PADDING_WRITES_STATE
            reason = Reason.PADDING_WRITES_STATE if writes else Reason.VERIFICATION_FAILED
            what = str(error) if writes else f"the call raises {type(error).__name__}: {error}"
            raise _DependentRowsError(RowProof(False, perturbation=padding.name, what=what, reason=reason)) from error

    def _prove_for_small_rows(self) -> None:
        """Once more with small numbers in the real rows, which hide less. Not where they decide where it writes."""
        request = self._request
        parts = list(zip(request.inputs.specs, request.arguments(), strict=True))
        shrinks = [spec.dim is not None and self._takes_any_value(i) for i, (spec, _) in enumerate(parts)]
        real = [_small(value) if small else value for small, (_, value) in zip(shrinks, parts, strict=True)]
        if all(small is value for small, (_, value) in zip(real, parts, strict=True)):
            return
        self._base = Padding("", [], real, self._along)
        try:
            self._replay(self._base)
        except _DependentRowsError:
            return
        base = self._read()
        for rows in self._signed(large):
            self._replay(self._base._replace(rows=rows))
            self._compare("large numbers behind small real rows", base, self._read())

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

    def _written_state(self) -> Iterator[Region]:
        """The state that the eager run wrote."""
        arguments = set(map(storage_key, self._request.arguments()))
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
        lasting: set[int] = set()
        if any(i not in fixed for i, spec in enumerate(specs) if spec.dim is not None):  # a dummy batch tells nothing
            lasting = request.inputs.constants({i: alike[i] for i in fixed if i in alike})
        names = (specs[i].name for i in sorted(fixed - lasting))
        assumed = tuple((specs[i].position, alike[i]) for i in sorted(lasting & fixed))
        return (*names, *(["state"] if self._unseen else [])), assumed


BY_RULE = Padding("the padding of the pad rules", [])


def _without(value: torch.Tensor, unwritten: torch.Tensor | None) -> torch.Tensor:
    """A copy, in which zeros stand for what nothing wrote."""
    return value.clone() if unwritten is None else value.masked_fill(unwritten, 0)


def differing(base: Sequence[_Value], got: Sequence[_Value]) -> list[tuple[_Value, _Value]]:
    """What has other bits."""
    return [(a, b) for a, b in zip(base, got, strict=True) if not bits_equal(a.tensor, b.tensor)]


def takes_any_value(spec: InputSpec) -> bool:
    """Whether padding rows may hold values that occur nowhere in the batch."""
    return not spec.is_pad_given and (spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype is torch.bool)


def _signed_rows(
    request: CaptureRequest, rows: int, fill: Callable[..., torch.Tensor]
) -> Iterator[list[torch.Tensor | None]]:
    """Padding rows of both signs, in turns where there are several."""
    generator, count = torch.Generator().manual_seed(0), request.size - rows
    for sign in ((torch.arange(count) % 2) * 2 - 1,) if count > 1 else (torch.ones(1), -torch.ones(1)):
        every = range(len(request.inputs.specs))
        yield [_rows_for(request, i, count, None, partial(fill, sign), generator) for i in every]


def _other_rows(request: CaptureRequest, rows: int, *, backwards: bool) -> Padding:
    """Rows of the batch, from its last one backwards, or those behind the first ``rows``."""
    places = torch.arange(request.size - rows)
    source = (request.rows - 1 - places if backwards else rows + places) % request.rows
    every = range(len(request.inputs.specs))
    return Padding("other real rows", [_rows_for(request, i, len(places), source, None, None) for i in every])


_Fill = Callable[[torch.Tensor, torch.Size, int, torch.Generator], torch.Tensor]


def _rows_for(
    request: CaptureRequest,
    index: int,
    count: int,
    source: torch.Tensor | None,
    fill: _Fill | None,
    generator: torch.Generator | None,
) -> torch.Tensor | None:
    """Padding rows of one argument: made by ``fill`` if it takes any value, else the real rows ``source``."""
    specs = request.inputs.specs
    spec, value = specs[index], request.arguments()[index].detach()
    if spec.dim is None or spec.is_pad_given:
        return None
    if fill is not None and generator is not None and takes_any_value(spec):
        return fill(value, torch.Size(spec.sized(count)), spec.dim, generator)
    is_told = request.options.padding_writes == "refuse" or any(other.is_pad_given for other in specs)
    if source is None or not (is_told or takes_any_value(spec)):
        return None
    return value.index_select(spec.dim, source.to(value.device))


def _extreme(
    signs: torch.Tensor, value: torch.Tensor, shape: torch.Size, dim: int, generator: torch.Generator
) -> torch.Tensor:
    """The largest number of the real rows where the sign is positive, else the smallest."""
    signs = signs.view([-1 if d == dim else 1 for d in range(len(shape))]).to(value.device)
    if value.is_complex() or not value.numel():
        return torch.zeros(shape, dtype=value.dtype, device=value.device)
    wide = value.to(torch.float64)
    numbers = wide[wide.isfinite()] if bool(wide.isfinite().any()) else torch.zeros_like(wide).flatten()
    return torch.where(signs > 0, numbers.amax(), numbers.amin()).to(value.dtype).expand(shape)


def large(
    signs: torch.Tensor, value: torch.Tensor, shape: torch.Size, dim: int, generator: torch.Generator
) -> torch.Tensor:
    """Numbers several times as large as those of the real rows, with one sign for each row."""
    signs = signs.view([-1 if d == dim else 1 for d in range(len(shape))]).to(value.device)
    if value.dtype is torch.bool:
        return (signs > 0).expand(shape)
    magnitude = (value if value.is_complex() else value.to(torch.float64)).abs()
    largest = magnitude.where(magnitude.isfinite(), 0.0).amax() if value.numel() else 0.0
    numbers = (torch.rand(shape, generator=generator, dtype=torch.float64) + 1).to(value.device)
    return _as_finite(numbers * signs * (4 * largest + 4), value.dtype)


def _small(value: torch.Tensor) -> torch.Tensor:
    wide = value.detach() if value.is_complex() else value.detach().to(torch.float64)
    return (wide * 2.0**-10).to(value.dtype)


def wide(value: torch.Tensor, shape: torch.Size, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Numbers of both signs from tiny to large, such that squares of them are finite."""
    signs = torch.randint(2, shape, generator=generator) * 2 - 1
    if value.dtype is torch.bool:
        return (signs > 0).to(value.device)
    exponent = min(_WIDEST, math.log2(torch.finfo(value.dtype).max) / 2)
    numbers = torch.rand(shape, generator=generator, dtype=torch.float64)
    return _as_finite((signs * 2 ** ((2 * numbers - 1) * exponent)).to(value.device), value.dtype)


def _as_finite(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Wide numbers as finite numbers of a narrower type; of a complex one, the real part alone."""
    return numbers.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
