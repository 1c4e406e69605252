"""Replays that show whether padding along a length is harmless, where elements along it mix: in attention under a mask.

That rows are independent follows from the operators. That a mask hides padding does not: it holds for some data
alone. So where elements mix along an axis, the graph replays the same real elements before other padding along it, and
real elements must keep their bits. This is done once for a signature, and in the same way where a user says that rows
are independent.

Note [what keeps its padding]
    A mask, zeros and ones along a further dimension, says which elements are padding: other values in its own padding
    would make real elements of it. So where other padding everywhere matters, it is tried again with the padding of
    masks left as their rule says, which is what every replay has there. The other arguments must not matter then. It is
    tried once more for rows with a single real element, which hide the least. A row that its mask hides altogether may
    attend to padding as to all else: that is a limit.

Note [what real elements hide]
    Whether padding is neutral may depend on the real elements: a minimum of at most zero hides zeros, and a mask that
    hides something in each row hides that padding is hidden, too. So eager runs real elements of other kinds, without
    padding, and a replay must give the same. A gate that is shut hides whatever lies behind it. So arguments without
    the axis, flags and floating-point numbers, are opened, too, as is one that holds nothing but zeros. Integers are
    not: another one may name no place. That is a limit. But where all along the axis is what padding is, but for masks,
    the replays show nothing, and the next padded batch is compared, too.

Note [what a length hides]
    Elements that meet in blocks, or as far ahead as a window reaches, meet padding at some lengths alone. So padding
    is replaced behind the shortest length that would be padded, the longest, and one between, too; and again for a
    graph of a longer one. A count of the elements of a length is that of the graph, whatever padding holds, and may
    matter at some lengths alone. So eager runs each of these batches, and a replay must give the same. Another length
    may decide which elements meet padding, as in causal attention to another sequence. So padding is replaced before
    the longest along the other axes, too. The masks of a batch, or the lengths of its rows, may hide the elements that
    meet padding. So it is replaced behind elements that they show, too.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ...backends.operators import bits_equal, storage_key, tensors_in
from ...reasons import Reason
from ...runtime.entry import CUDAGraphEntry
from ...runtime.protocols import CaptureRequest
from ...runtime.signature import InputSpec
from ...runtime.static_inputs import holds_flags
from ...sizes import Axis, extents_text, lengths_of, pack
from ..watch.operator_trace import OperatorTrace
from .attempt import CaptureAttempt, ends_capture
from .compare import coarsest, difference, tolerance_for
from .licence import RowProof, float_types_of, shown_of
from .padding import Padding, Rows, edge, far, may_replace, takes_any_value, uniform
from .row_proof import batch_of

_Read = Sequence[tuple[str, torch.Tensor]]


class PaddingReplays:
    """Replays of a padded batch, which agreed with eager, with other padding along some axes.

    The ``attempt`` puts everything back to where the eager run began before each replay.

    Args:
        attempt: The comparison under way.
        entry: The graph.
        axes: The axes along which padding is replaced.
        others: Further batches (their numbers) that would be padded along them.
    """

    def __init__(
        self, attempt: CaptureAttempt, entry: CUDAGraphEntry, axes: Collection[Axis], others: Sequence[int] = ()
    ) -> None:
        self._attempt, self._entry, self._request = attempt, entry, attempt.request
        self._specs, self._arguments = self._request.inputs.specs, self._request.arguments()
        self._along, self._rows, self._others = tuple(axes), self._request.rows, others
        shown = shown_of(entry)
        self._operators = shown.operators if shown is not None else OperatorTrace()

    def objection(self) -> str:
        """Why padding along the axes is not harmless; empty if it is. Raises what ends a capture."""
        found = ""
        for kept in self._choices():
            if not (what := self._changes(kept)):
                return ""
            found = found or what
        names = " and ".join(repr(axis.name) for axis in self._along)
        remedy = "a mask that is padded with zeros must hide it, in a mean, too; else have a size for each length"
        return f"real rows depend on padding along {names}: with {found}; {remedy}"

    @property
    def tell(self) -> bool:
        """Whether anything along the axes, but for masks, is not what padding is: see Note [what real elements hide].
        Reads values back to the host."""
        along = [i for i, spec in enumerate(self._specs) if any(axis in self._along for _, axis in spec.spans)]
        others = [i for i in along if not (_is_mask(self._arguments[i]) and bool(self._arguments[i].any()))]
        return any(map(self._differs_from_padding, others or along))

    def _differs_from_padding(self, index: int) -> bool:
        spec, value = self._specs[index], self._arguments[index]
        if takes_any_value(spec, self._operators) and not self._operators.limits_values:
            return True
        fill = next(pad.fill for (_, axis), pad in zip(spec.spans, spec.pads, strict=True) if axis in self._along)
        return bool((value != (value.flatten()[0] if fill is None else fill)).any())

    def _choices(self) -> Iterator[tuple[int, ...]]:
        """Which arguments (by index) keep their padding: none, then each mask, then all of them. See Note [what
        keeps its padding]."""
        yield ()
        rows = self._request.inputs.axes[0]
        pairs = list(zip(self._specs, self._arguments, strict=True))
        further = [i for i, (spec, _) in enumerate(pairs) if any(axis is not rows for _, axis in spec.spans)]
        masks = [i for i in further if not pairs[i][0].is_pad_given and _is_mask(pairs[i][1])]
        for kept in [(mask,) for mask in masks] + ([tuple(masks)] if len(masks) > 1 else []):
            others = {axis for i, (spec, _) in enumerate(pairs) if i not in kept for _, axis in spec.spans}
            if others >= {axis for i in kept for _, axis in pairs[i][0].spans}:
                yield kept

    def _changes(self, kept: tuple[int, ...]) -> str:
        """What padding changes, in words, if these arguments keep theirs; empty for nothing."""
        paddings: list[tuple[str, Rows]] = [("what its rule says", []), *self._paddings(kept)]
        for name, rows, real, is_made in self._batches(kept):
            before = self._eager(rows, real)
            for what, padding in paddings if before or not is_made else ():
                try:
                    self._attempt.replay_with(self._entry, rows, Padding(what, padding, real, self._along))
                except Exception as error:
                    if ends_capture(self._request.backend, error):
                        raise
                    if is_made:  # it may not take such elements
                        break
                    return f"{what}{name} the call raises {type(error).__name__}: {error}"
                read = self._replayed(rows)
                if gap := self._gap(before, read) if padding else self._gap_to_eager(before, read):
                    return f"{what} in the padding{name}, {gap}"
                before = read
        return ""

    def _batches(self, kept: Collection[int]) -> Iterator[tuple[str, int, Sequence[torch.Tensor], bool]]:
        """What batches are called, their numbers and elements, and whether their elements are made, so that the
        callable may not take them: see Note [what real elements hide] and Note [what a length hides]."""
        for name, other in self._other_reals(kept):
            yield f" behind {name}", self._rows, other, True
        if kept:
            yield " behind a single real element", self._rows, self._with_single(kept), False
        for rows in (self._rows, *self._others):
            name = f" of {extents_text(self._request.inputs.axes, rows)}" if rows != self._rows else ""
            given = batch_of(self._request, rows)
            shown = [self._shown(index, value, rows) for index, value in enumerate(given)]
            yield name, rows, given, False
            if not all(map(bits_equal, given, shown)):
                yield name, rows, shown, False

    def _shown(self, index: int, value: torch.Tensor, rows: int) -> torch.Tensor:
        """An argument that hides no element: of a mask ones; of integers of rows, which may be lengths, the shortest of
        the batch; of one with a given pad value other numbers than that."""
        spec, lengths = self._specs[index], lengths_of(self._request.inputs.axes, rows)[1:]
        if not spec.is_pad_given and _is_mask(self._arguments[index]):
            return torch.ones_like(value)
        is_of_rows = [axis for _, axis in spec.spans] == [self._request.inputs.axes[0]]
        if spec.is_integer and is_of_rows and lengths and takes_any_value(spec, self._operators):
            return torch.full_like(value, min(*lengths, torch.iinfo(value.dtype).max))
        for pad in spec.pads if spec.is_pad_given else ():
            if pad.fill is not None and (others := value[value != pad.fill]).numel():
                value = value.masked_fill(value == pad.fill, others[0])
        return value

    def _eager(self, rows: int, real: Sequence[torch.Tensor]) -> _Read:
        """What eager leaves for these elements; nothing if the callable does not take them."""
        alone = [spec.cut(value, rows).clone() for spec, value in zip(self._specs, real, strict=True)]
        self._attempt.start_over("running eager on other elements")
        values, shown = self._request.values_with(alone), shown_of(self._entry)
        is_alike = shown is not None and shown.has_path(rows) and not shown.may_leave_effects

        def read(output: Any) -> _Read:
            return self._read(tensors_in(output), alone)

        try:
            if is_alike:
                return self._attempt.run_alike(values, read)
            return self._attempt.run_and_undo(values, lambda _, output: read(output))
        except Exception as error:
            if ends_capture(self._request.backend, error):
                raise
            return []

    def _gap_to_eager(self, want: _Read, got: _Read) -> str:
        for (name, a), (_, b) in zip(want, got, strict=bool(want)):
            dtype = coarsest(a.dtype, float_types_of(self._entry))
            if (gap := difference(a, b, tolerance_for(dtype, exact=False))) is not None:
                return f"{name} is not what eager gives: {gap}"
        return ""

    def _other_reals(self, kept: Collection[int]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Real elements of other kinds: of one sign, or all those of the place with the largest or the smallest number,
        where masks show all."""
        for sign, name in ((1, "large numbers"), (-1, "small numbers")):
            real = list(self._arguments)
            place = self._place(sign, kept)
            for i, spec in enumerate(self._specs):
                is_gate = not any(axis in self._along for _, axis in spec.spans)
                if i in kept:
                    real[i] = torch.ones_like(real[i])
                elif is_gate and spec.dtype is torch.bool:
                    real[i] = torch.full_like(real[i], sign > 0)
                elif (spec.dtype.is_floating_point and spec.dtype.itemsize > 1) or (
                    spec.is_integer and not is_gate and takes_any_value(spec, self._operators)
                ):
                    is_limited = self._operators.limits_values
                    if is_gate and is_limited:
                        continue
                    is_shut = is_gate or not (is_limited or spec.is_pad_given or bool(real[i].any()))
                    real[i] = (real[i].abs() * sign).masked_fill((real[i] == 0) & is_shut, sign)
                elif spec.spans:
                    real[i] = uniform(place, spec, real[i], self._rows)
            yield name, real

    def _place(self, sign: int, kept: Collection[int]) -> dict[Axis, int]:
        """Where the first of the integers has its largest number, or the smallest, among the elements that no given pad
        value hides. Reads the result back to the host."""
        for i, spec in enumerate(self._specs):
            if i not in kept and spec.spans and not (spec.dtype.is_floating_point or spec.dtype.is_complex):
                value = self._arguments[i].to(torch.float64) * sign
                for hidden in self._hidden(i):
                    value = value.masked_fill(hidden, -math.inf)
                at = np.unravel_index(int(value.argmax()), value.shape)  # torch's own imports sympy, which takes long
                return {axis: int(at[dim]) for dim, axis in spec.spans}
        return {}

    def _hidden(self, index: int) -> Iterator[torch.Tensor]:
        """Where arguments of the same shape and axes hold the pad value that was given for them."""
        spans, shape = self._specs[index].spans, self._arguments[index].shape
        for spec, value in zip(self._specs, self._arguments, strict=True):
            for pad in spec.pads if spec.is_pad_given and spec.spans == spans and value.shape == shape else ():
                if pad.fill is not None:
                    yield value == pad.fill

    def _with_single(self, kept: Collection[int]) -> list[torch.Tensor]:
        """The arguments, with masks that leave one element of each row."""
        real = list(self._arguments)
        for index in kept:
            real[index] = real[index].clone()
            for dim, axis in self._specs[index].spans:
                if axis in self._along and axis.of(self._rows) > 1:
                    real[index].narrow(dim, 1, real[index].shape[dim] - 1).zero_()
        return real

    def _paddings(self, kept: Collection[int]) -> Iterator[tuple[str, Rows]]:
        """Two kinds of padding: see Note [what padding may hold]."""
        axes = self._request.inputs.axes
        last = {axis: extent - 1 for axis, extent in zip(axes, lengths_of(axes, self._rows), strict=True)}
        for sign, place, name in ((1, {}, "large numbers"), (-1, last, "small numbers")):
            specs = enumerate(self._specs)
            yield name, [None if i in kept else self._other_padding(i, spec, sign, place) for i, spec in specs]

    def _other_padding(self, index: int, spec: InputSpec, sign: int, place: dict[Axis, int]) -> torch.Tensor | None:
        operators, value, size = self._operators, self._arguments[index], self._request.size
        if not may_replace(self._specs, index, operators, self._request.options.padding_writes):
            return None
        if takes_any_value(spec, operators):
            return (edge if operators.limits_values else far)(sign, spec, value, size)
        return uniform(place, spec, value, size)

    def _gap(self, base: _Read, got: _Read) -> str:
        for (name, a), (_, b) in zip(base, got, strict=True):
            exact = not self._operators.groups_rows  # groups of rows are multiplied with what lies beside them
            gap = None if bits_equal(a, b) else difference(a, b, tolerance_for(a.dtype, exact=exact))
            if gap is not None:
                return f"{name} changes: {gap}"
        return ""

    def _replayed(self, rows: int) -> _Read:
        """The real elements of what the latest replay left."""
        inputs = self._request.inputs
        arguments = [inputs.real(index, rows, self._request.size) for index in range(len(self._specs))]
        return self._read(self._entry.outputs.peek(rows), arguments)

    def _read(self, outputs: Iterable[torch.Tensor], arguments: Sequence[torch.Tensor]) -> _Read:
        """Copies of these outputs, of the arguments that the call writes, and of the state that padding must leave
        alone."""
        request, entry, eager = self._request, self._entry, self._attempt.eager
        values = [(f"output {index}", output.clone()) for index, output in enumerate(outputs)]
        for index in entry.mutated:
            name = f"argument {self._specs[index].name!r}, which the call writes,"
            values.append((name, arguments[index].clone()))
        if request.options.padding_writes == "refuse":
            own = set(map(storage_key, eager.arguments))
            for region in eager.effects.regions:
                if not region.is_generator and storage_key(region.target) not in own:
                    values.append((f"state of shape {tuple(region.target.shape)}", region.read().clone()))
        return values


def _is_mask(value: torch.Tensor) -> bool:
    """Whether a tensor holds flags; integers with a one: if they held none, it might name no place. Reads the result
    back to the host."""
    is_number = value.dtype is torch.bool or value.is_floating_point()
    return holds_flags(value) and (is_number or bool(value.any()))


def replay_other_padding(attempt: CaptureAttempt, entry: CUDAGraphEntry, proof: RowProof) -> None:
    """Note in the proof of a graph what other padding of the request's batch shows, where its structure does not: along
    each axis along which elements mix and that is padded, and along the rows by the user's word."""
    request = attempt.request
    axes, rows = request.inputs.axes, request.inputs.axes[0]
    padded = [axis for axis in axes if axis.of(request.rows) != axis.of(request.size)]
    by_word = proof.is_word and rows in padded and not proof.is_compared
    if by_word and (found := PaddingReplays(attempt, entry, [rows]).objection()):
        proof.against_rows = Reason.ROWS_MIX, f"rows='independent' is not so: {found}"
    for axis in padded:
        if proof.is_open(axis, request.size):
            others = [one for one in _other_lengths(request, axis) if proof.speaks_for(one, request.size)]
            replays = PaddingReplays(attempt, entry, [axis], others)
            if found := replays.objection():
                proof.along[axis] = Reason.ROWS_MIX, found
            if found or replays.tell:
                proof.shown_along.setdefault(axis, set()).add(request.size)


def _other_lengths(request: CaptureRequest, axis: Axis) -> set[int]:
    """Batches as the request's whose lengths along an axis are padded to that of the graph: the shortest, the longest,
    and one between; as long as it along the further axes, and as long as the graph."""
    axes, size, own = request.inputs.axes, axis.of(request.size), request.rows
    extents = {axis.of(own), *(extent for extent in (2, size // 2 + 1, size - 1) if 1 < extent < size)}
    full = pack(axes, [a.of(own if a is axes[0] else request.size) for a in axes])
    return {pack(axes, [x if a is axis else a.of(one) for a in axes]) for x in extents for one in (own, full)} - {own}
