"""What captures do where the batch has several dynamic dimensions: output rules, proofs and comparisons by dimension.

Note [what keeps its padding]
    Along a further dimension an argument may say which elements are padding: a mask of zeros and ones. Other values in
    its padding would make real elements of it. So where the proof fails, it is tried again with the padding of such
    arguments left as their rule says, which is what every replay has there. The other arguments must not matter then.
    A row that its mask hides altogether may still attend to padding, as to all else. Where masks that hide all show
    this, each call is looked at, and runs eagerly if it has such a row: unless the user gave the mask a pad rule.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from ..axes import Axis
from ..backends.operators import tensors_in
from ..call.dims import GridSignature
from ..errors import CaptureError
from ..extents import Extents
from ..memory.outputs import OutputRule, extents_of
from ..memory.proof import RowProof
from ..reasons import Reason
from .padding import BY_RULE, Padding, holds_flags, large, wide
from .proof import RowProver, differing
from .request import CaptureRequest

if TYPE_CHECKING:
    from .attempt import CaptureAttempt

__all__ = ["GridCapture", "GridProver"]


class GridCapture:
    """What is different in a capture or comparison whose batch has several dynamic dimensions."""

    def __init__(self, request: CaptureRequest) -> None:
        self._request = request
        assert isinstance(request.inputs.capacity, Extents)
        self.axes = request.inputs.capacity.axes
        self.prover = GridProver
        self.batch = Extents.of(self.axes, request.rows)
        self.size = Extents.of(self.axes, request.size)

    @cached_property
    def masks(self) -> list[int]:
        """The arguments (by index) along a further dimension that hold nothing but zeros and ones."""
        pairs = enumerate(zip(self._request.inputs.specs, self._request.arguments(), strict=True))
        along = [(i, value) for i, (spec, value) in pairs if any(axis is not self.axes[0] for _, axis in spec.axes)]
        return [i for i, value in along if holds_flags(value)]

    def output_rule(self, output: Any, attempt: "CaptureAttempt") -> OutputRule:
        """Which dimensions of the outputs follow which axis: that of an earlier size if there is one, else found by one
        run for each axis that differs from the batch along it alone.

        Raises ``CaptureError`` for an output that cannot be cut, or that follows the batch otherwise than before.
        """
        eager = tensors_in(attempt.eager.opened)
        rule = self._request.rule
        if rule is None:
            probes = [self._other(place) for place in range(len(self.axes))]
            found = [(axis, n, tensors_in(attempt.run_with(n))) for axis, n in zip(self.axes, probes, strict=True)]
            follows = [self._follows(index, tensor, found) for index, tensor in enumerate(eager)]
            rule = OutputRule(tuple(follows))
        for index, (dims, real, full) in enumerate(zip(rule.follows, eager, tensors_in(output), strict=True)):
            if any(
                tuple(tensor.shape) != _expected(full, dims, number)
                for tensor, number in ((real, self.batch), (full, self.size))
            ):
                raise CaptureError(
                    f"output {index} has shape {tuple(real.shape)} for a batch of {self.batch} and {tuple(full.shape)} "
                    f"for {self.size}, where only dimensions {[dim for dim, *_ in dims]} follow the batch; {_REMEDY}",
                    Reason.OUTPUT_ROWS_UNKNOWN,
                )
        return rule

    def _other(self, place: int) -> Extents:
        """The batch with another extent along one axis: that of the graph, else one less, or one more than one."""
        lengths = list(self.batch.lengths)
        own, full = lengths[place], self.size.lengths[place]
        lengths[place] = full if full != own else own - 1 if own > 1 else 2
        return Extents.pack(self.axes, lengths)

    def _follows(
        self, index: int, tensor: torch.Tensor, probes: Sequence[tuple[Axis, Extents, Sequence[torch.Tensor]]]
    ) -> tuple[tuple[int, int, Axis], ...]:
        dims: dict[int, tuple[int, int, Axis]] = {}
        for axis, number, outputs in probes:
            other, m, n = outputs[index], axis.of(self.batch), axis.of(number)
            shapes = list(zip(tensor.shape, other.shape, strict=False))
            for dim, (a, b) in enumerate(shapes):
                if a == b:
                    continue
                if tensor.dim() != other.dim() or dim in dims or a % m or b % n or a // m != b // n:
                    raise CaptureError(
                        f"output {index} has shape {tuple(tensor.shape)} for a batch of {self.batch} and "
                        f"{tuple(other.shape)} for {number}; {_REMEDY}",
                        Reason.OUTPUT_ROWS_UNKNOWN,
                    )
                dims[dim] = dim, a // m, axis
        return tuple(dims[dim] for dim in sorted(dims))


_Fill = Callable[[torch.Tensor, torch.Size, int], torch.Tensor]
_REMEDY = "a graph can be cut only along dimensions that are a fixed multiple of one dynamic dimension each"


def _expected(full: torch.Tensor, dims: tuple[tuple[Any, ...], ...], number: int) -> tuple[int, ...]:
    return tuple({**dict(enumerate(full.shape)), **extents_of(dims, number)}.values())


class GridProver(RowProver):
    """Replays a graph with other padding along all dimensions at once; and, if that changes real elements, with that of
    masks left alone, and along each dimension by itself. See Note [what keeps its padding]."""

    def __init__(self, request: CaptureRequest, *how: Any) -> None:
        grid = request.grid
        assert grid is not None
        self._grid = grid
        self._kept: Collection[int] = ()
        self._along: tuple[Axis, ...] = ()
        super().__init__(request, *how)
        self._is_cut = self.rows != request.rows

    def _real_rows(self, request: CaptureRequest) -> int:
        """The batch, and half of each dimension that it fills."""
        pairs = zip(self._grid.batch.lengths, self._grid.size.lengths, strict=True)
        return Extents.pack(self._grid.axes, [own if own != full else (full + 1) // 2 for own, full in pairs])

    def prove(self, alike: Mapping[int, torch.Tensor]) -> RowProof:
        """The proof for all dimensions together, else for each by itself."""
        whole = self._prove_along((), alike)
        if whole.independent:
            return whole
        alone = {axis: self._prove_along((axis,), alike) for axis in self._grid.axes}
        bound = tuple(axis for axis, proof in alone.items() if not proof.independent)
        found = next((proof for proof in alone.values() if not proof.independent), whole)
        names = " and ".join(repr(axis.name) for axis in bound or self._grid.axes)
        return replace(found, bound=bound or self._grid.axes, perturbation=f"{found.perturbation} along {names}")

    def _prove_along(self, axes: tuple[Axis, ...], alike: Mapping[int, torch.Tensor]) -> RowProof:
        self._along, first = axes, None
        for kept in self._choices():
            self._kept, self._base, self._is_limited = kept, BY_RULE, self._entry.program.limits_values
            # The graph's own replay is no base for a proof along one axis: load it again.
            failed = self._replay_anew() if first is not None or axes else None
            proof = failed or super().prove(alike)
            if proof.independent:
                self._prove_hidden(kept)
                return replace(proof, kept=tuple(kept))
            first = first or proof
        assert first is not None
        return first

    def _prove_hidden(self, kept: Collection[int]) -> None:
        """Once more with masks that hide all that is real. If padding matters then, have each call looked at."""
        request, specs = self._request, self._request.inputs.specs
        arguments = enumerate(request.arguments())
        self._base = Padding("", [], [torch.zeros_like(v) if i in kept else v for i, v in arguments], self._along)
        if not kept or not self._takes(self._base):
            return
        base, others = self._read(), self._others(backwards=True).rows
        for rows in (others, *self._signed(large)):
            if not self._takes(self._base._replace(rows=rows)) or differing(base, self._read()):
                assert isinstance(request.signature, GridSignature)
                request.signature.watch([(specs[i].position, specs[i].axes[-1][0]) for i in kept])
                return

    def _choices(self) -> Iterator[Collection[int]]:
        """Which arguments keep their padding: none, then each mask, then all of them."""
        yield ()
        request = self._request
        masks = [i for i in self._grid.masks if not request.inputs.specs[i].is_pad_given]
        choices = [(mask,) for mask in masks] + ([tuple(masks)] if len(masks) > 1 else [])
        for kept in choices:
            others = {axis for i, spec in enumerate(request.inputs.specs) if i not in kept for _, axis in spec.axes}
            if others >= {axis for i in kept for _, axis in request.inputs.specs[i].axes}:
                yield kept

    def _takes_any_value(self, index: int) -> bool:
        return index not in self._kept and super()._takes_any_value(index)

    def _may_replace(self, index: int) -> bool:
        return index not in self._kept and super()._may_replace(index)

    @property
    def _padding_rows(self) -> int:
        return self._request.size  # of which what is real is left out

    def _others(self, *, backwards: bool) -> Padding:
        if not backwards:
            return BY_RULE
        rows = self._elements(torch.Generator().manual_seed(0), backwards=True)
        return Padding("other real elements", rows, axes=self._along)

    def _random(self) -> list[torch.Tensor | None]:
        generator = torch.Generator().manual_seed(0)
        rows = self._elements(generator, backwards=False)
        return self._filled(rows, lambda value, shape, dim: wide(value, shape, dim, generator))

    def _signed(self, fill: Callable[..., torch.Tensor]) -> Iterator[list[torch.Tensor | None]]:
        for sign in (1, -1):
            yield self._filled([], partial(_with_signs, fill, sign, torch.Generator().manual_seed(0)))

    def _filled(self, rows: Sequence[torch.Tensor | None], fill: _Fill) -> list[torch.Tensor | None]:
        """``rows``, but made by ``fill`` for arguments whose padding may hold any value."""
        request = self._request
        filled = list(rows) or [None] * len(request.inputs.specs)
        for index, (spec, value) in enumerate(zip(request.inputs.specs, request.arguments(), strict=True)):
            if spec.axes and self._takes_any_value(index):
                filled[index] = fill(value.detach(), torch.Size(spec.sized(request.size)), spec.axes[-1][0])
        return filled

    def _elements(self, generator: torch.Generator, *, backwards: bool) -> list[torch.Tensor | None]:
        """Each argument with real elements in its padding: from the last one backwards, or any. All arguments take the
        same ones, since they may belong together."""
        index: dict[Axis, torch.Tensor] = {}
        for axis in self._grid.axes:
            real, full = axis.of(self.rows), axis.of(self._request.size)
            rest = (real - 1 - torch.arange(full - real)) % real
            chosen = rest if backwards else torch.randint(real, (full - real,), generator=generator)
            index[axis] = torch.cat([torch.arange(real), chosen])
        rows: list[torch.Tensor | None] = []
        specs, arguments = self._request.inputs.specs, self._request.arguments()
        for place, (spec, value) in enumerate(zip(specs, arguments, strict=True)):
            whole = value.detach() if self._may_replace(place) else None
            for dim, axis in spec.spans if whole is not None else ():
                whole = whole.index_select(dim, index[axis].to(value.device)) if whole is not None else None
            rows.append(whole)
        return rows


def _with_signs(
    fill: Callable[..., torch.Tensor],
    sign: int,
    generator: torch.Generator,
    value: torch.Tensor,
    shape: torch.Size,
    dim: int,
) -> torch.Tensor:
    """What ``fill`` makes with a random sign for each place along a dimension, or with the other one for each."""
    signs = (torch.randint(2, (shape[dim],), generator=generator) * 2 - 1) * sign
    return fill(signs, value, shape, dim, generator)
