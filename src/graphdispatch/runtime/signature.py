"""Signatures: everything about a call's arguments, except the number of rows, that a graph was captured for.

A signature is made once from a call, where everything that can be refused is refused with a reason or an error, and
then only compared with later calls.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import torch

from ..errors import shown
from ..native.bound import CORE
from ..reasons import Reason
from ..sizes import ROWS, Axis, pack
from .constants import CONSTANTS, IN_CORE, exactly, is_constant
from .flatten import Leaf, describe, is_tensor
from .rules import ArgumentRules, Pad

NO_MATCH = -1
_MOST_SHAPES = 4096  # per tensor; more are compared each time
_is_inference = torch.is_inference_mode_enabled
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Refusal(NamedTuple):
    """Why a call cannot be served by any graph."""

    reason: Reason
    detail: str


@dataclass(frozen=True)
class InputSpec:
    """One tensor argument.

    ``position`` is its place among the call's values; ``shape`` has 0 where it follows the batch; ``order`` lists the
    dimensions from the slowest to the fastest in memory.
    """

    name: str
    position: int
    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    spans: tuple[tuple[int, Axis], ...] = ()
    """The dimensions that follow the batch, each with its axis."""
    pads: tuple[Pad, ...] = ()
    """The pad rule along each of ``spans``."""
    is_dense: bool = True
    """Whether the caller's tensors leave no gaps in memory; the buffer never does, so that eager may compute a tensor
    with gaps by another kernel."""
    is_pad_given: bool = False
    """Whether the user gave a rule of what padding rows hold; then nothing else is ever put there. Rows that are left
    as they are may hold anything that came before."""
    look: tuple[Any, ...] = ()
    """What the captured call's tensor had of ``PROPERTIES``."""

    @property
    def is_integer(self) -> bool:
        """Whether it holds integers, which may be indices."""
        return not (self.dtype.is_floating_point or self.dtype.is_complex or self.dtype is torch.bool)

    def sized(self, rows: int) -> tuple[int, ...]:
        """The shape with ``rows`` rows."""
        shape = list(self.shape)
        for dim, axis in self.spans:
            shape[dim] = axis.of(rows)
        return tuple(shape)

    def cut(self, tensor: torch.Tensor, rows: int, axes: Collection[Axis] = ()) -> torch.Tensor:
        """A view of the first ``rows`` rows, along these axes; empty: all."""
        for dim, axis in self.spans:
            if not axes or axis in axes:
                tensor = tensor.narrow(dim, 0, axis.of(rows))
        return tensor

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands in for the argument: a new tensor, made so that it has what the captured call's tensor had."""
        for one, captured in zip(PROPERTIES, self.look, strict=False):
            if one.give is not None and one.read(tensor) != captured:
                tensor = one.give(tensor, captured)
        return tensor

    def padded_with_copies(self) -> "InputSpec":
        """The same argument, with copies of the last row for padding, unless the user gave a rule."""
        if self.is_pad_given or not self.spans:
            return self
        return replace(self, pads=(Pad.repeat_last(),) * len(self.pads), is_pad_given=self.is_integer)

    def repeated(
        self, tensor: torch.Tensor, rows: int, shift: int = 0, keeps: Collection[Axis] = (), *, gaps: bool = False
    ) -> torch.Tensor:
        """The rows of a tensor in turn, from row ``shift`` on, until there are ``rows`` of them; along the axes that it
        ``keeps`` from the first element on. They lie in memory in the argument's order; ``gaps``: with gaps between
        them. Integers that rise, as offsets, do not fall again: the last one is repeated."""
        rises = self.is_integer and tensor.dim() == 1 and bool((tensor[1:] >= tensor[:-1]).all())
        for dim, axis in self.spans:
            first, count = 0 if axis in keeps else shift, tensor.shape[dim]
            index = torch.arange(axis.of(rows), device=tensor.device) + first
            index = index.clamp(max=count - 1) if rises and axis.of(rows) > count else index % count
            tensor = tensor.index_select(dim, index)  # which forgets the order in memory
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        ordered = tensor.permute(self.order)
        if gaps:
            return self.like(torch.cat([ordered, ordered[..., :1]], -1))[..., :-1].permute(back).detach()
        return self.like(ordered.contiguous()).permute(back).detach()

    def extents(self, shape: torch.Size) -> tuple[int, int] | None:
        """What a shape says of the number of its batch, and the bits in which that stands; None if it does not fit."""
        spans = dict(self.spans)
        if len(shape) != len(self.shape) or any(n != self.shape[d] for d, n in enumerate(shape) if d not in spans):
            return None
        number = known = 0
        for dim, axis in self.spans:
            extent = axis.put(shape[dim])
            if (number ^ extent) & known & axis.bits:
                return None
            number, known = number | extent, known | axis.bits
        return number, known


class Property(NamedTuple):
    """Something of a tensor argument that each call compares, beside its type, its shape and its order in memory."""

    name: str
    read: Callable[[torch.Tensor], Any]
    """What a tensor has; it is compared by ``==``."""
    give: Callable[[torch.Tensor, Any], torch.Tensor] | None = None
    """What gives it to a new tensor that stands in for an argument: to the memory that graphs read, of which the inputs
    of all sizes are views, and to batches that are made of an example. It must outlive ``as_strided`` and ``detach``,
    and take ``copy_`` in any mode. None: they have it by themselves, or a call that has it is refused."""
    in_core: bool = False
    """Whether ``has_form`` of ``native/core/signature.cpp`` compares it. Where one is not, Python matches all calls."""


PROPERTIES = [
    *(Property(name, attrgetter(name), in_core=True) for name in ("dtype", "device", "layout")),
    *(Property(name, methodcaller(name), in_core=True) for name in ("is_conj", "is_neg")),
]
"""One row for each."""


class _TensorCheck(NamedTuple):
    form: InputSpec
    position: int
    kind: type
    shapes: dict[torch.Size, tuple[int, int]]
    """Shapes that fit, with what they say of the batch (see ``InputSpec.extents``); filled as they come, so that a hit
    compares a shape by one lookup."""
    contiguous: bool


class Signature:
    """What a call must look like to be served by the graphs of one group.

    Make it only from a call for which ``refusal`` finds nothing.
    """

    __slots__ = ("__dict__", "native")

    def __init__(
        self, leaves: Sequence[Leaf], values: Sequence[Any], rules: ArgumentRules, device: torch.device
    ) -> None:
        self.device = device
        self.axes = rules.axes
        """The dynamic dimensions of a batch, each with its place in the number that stands for the batch."""
        self._inference, self._autocast = _is_inference(), _autocast_dtype(device.type)
        self._device_type = device.type
        self.inputs: list[InputSpec] = []
        self._checks: list[_TensorCheck] = []
        self._addresses: list[tuple[int, int]] = []
        self._constants: list[tuple[int, type[Any], Any, Any]] = []
        self._objects: list[tuple[int, Any]] = []
        self._leaves = leaves
        self.native: Any = None
        """What matches a call in the core; None where Python does."""
        for position, (leaf, value) in enumerate(zip(leaves, values, strict=True)):
            if is_tensor(value):
                self._add_tensor(position, leaf, value, rules)
            elif type(value) in CONSTANTS:
                self._constants.append((position, *exactly(value), value))
            else:
                self._objects.append((position, value))
        found = {axis for check in self._checks for _, axis in check.form.spans}
        self.has_rows = bool(found)
        """Whether any argument has a batch dimension."""
        self._known = pack(self.axes, [0 if axis in found else 1 for axis in self.axes])
        """What stands in the number of each call: a dimension that none of its arguments has is as short as can be."""
        in_core = CORE is not None and all(map(attrgetter("in_core"), PROPERTIES))
        if in_core and all(one[1] in IN_CORE for one in self._constants):
            self.native = self._native(values)

    def _add_tensor(self, position: int, leaf: Leaf, tensor: torch.Tensor, rules: ArgumentRules) -> None:
        spans = dict(rules.axes_of(leaf, tensor))
        shape, pads, is_given = list(tensor.shape), [], False
        for dim, axis in spans.items():
            shape[dim], given = 0, rules.pad_of(leaf, axis)
            pads.append(given or Pad.zero())
            is_given |= given is not None and not given.is_left
        order, dense = _memory_order(tensor)
        about = leaf.path, position, tuple(shape), order, tensor.dtype, tensor.device
        look = tuple([one.read(tensor) for one in PROPERTIES])
        spec = InputSpec(*about, tuple(spans.items()), tuple(pads), dense, is_given, look)
        self._checks.append(_TensorCheck(spec, position, type(tensor), {}, tensor.is_contiguous()))
        if not rules.is_static(leaf):
            self.inputs.append(spec)
        elif rules.check_addresses:
            self._addresses.append((position, tensor.data_ptr()))

    def _native(self, values: Sequence[Any]) -> Any:
        """The same signature in the core."""
        tensors = []
        for form, position, *_, contiguous in self._checks:
            spans = tuple((dim, axis.shift, axis.mask) for dim, axis in form.spans)
            tensors.append((position, values[position], form.shape, form.order, spans, contiguous, form.is_dense))
        constants: list[tuple[int, Any, Any]] = [
            (position, kind, value) for position, kind, _, value in self._constants
        ]
        constants += [(position, None, value) for position, value in self._objects]
        autocast = torch.empty(0, dtype=self._autocast, device="cpu") if self._autocast is not None else None
        about = len(values), self._inference, _number_of(self._device_type), autocast
        assert CORE is not None
        return CORE.Signature(*about, tuple(tensors), tuple(constants), tuple(self._addresses), self._known)

    def match(self, values: Sequence[Any]) -> int:
        """The rows of a call that fits (1 if it has no batch dimension), else ``NO_MATCH``.

        Where there are several dynamic dimensions it is the number of all extents.
        """
        if _is_inference() is not self._inference or (
            (self._autocast is not None or torch.is_autocast_enabled(self._device_type))
            and _autocast_dtype(self._device_type) is not self._autocast
        ):
            return NO_MATCH
        for position, kind, exact, value in self._constants:
            given = values[position]
            if given is not value and (type(given) is not kind or exactly(given)[1] != exact):
                return NO_MATCH
        rows, known = self._known, 0
        try:
            for form, position, kind, shapes, contiguous in self._checks:
                tensor = values[position]
                if type(tensor) is not kind:
                    return NO_MATCH
                for one, captured in zip(PROPERTIES, form.look, strict=True):
                    if one.read(tensor) != captured:
                        return NO_MATCH
                found = shapes.get(tensor.shape) or _learn(form, tensor.shape, shapes)
                if found is None or (rows ^ found[0]) & known & found[1]:
                    return NO_MATCH
                rows, known = rows | found[0], known | found[1]
                is_plain = contiguous and tensor.is_contiguous()
                if not is_plain and _memory_order(tensor) != (form.order, form.is_dense):
                    return NO_MATCH
        except RuntimeError:  # a sparse tensor has no strides to compare
            return NO_MATCH
        for position, address in self._addresses:
            if values[position].data_ptr() != address:
                return NO_MATCH
        for position, held in self._objects:
            if values[position] is not held:
                return NO_MATCH
        return rows if known else 1

    def pad_with_copies(self) -> bool:
        """Have padding rows be copies of the last real row in all arguments for which the user gave no rule; False if
        they are, or if there are several dynamic dimensions."""
        before = list(self.inputs)
        if self.axes == (ROWS,):
            self.inputs = [spec.padded_with_copies() for spec in before]
        return self.inputs != before

    def changed_constant(self, values: Sequence[Any]) -> str:
        """Of the constants in which alone a call differs the first, in words; empty if it differs in more."""
        found, like_these = "", list(values)
        for position, kind, exact, value in self._constants:
            given = values[position]
            if type(given) in CONSTANTS and exactly(given) != (kind, exact):
                found = found or f"argument {self._leaves[position].path!r} was {shown(value)}, and is {shown(given)}"
                like_these[position] = value
        return found if self.match(like_these) != NO_MATCH else ""

    def misfit(self, values: Sequence[Any]) -> str:
        """Why a call does not match, as a sentence with a remedy."""
        return f"{self.difference(values)}; cast or reshape it, or capture anew"

    def difference(self, values: Sequence[Any]) -> str:
        """What of a call would have to be otherwise for it to match: the first that is found."""
        for form, position, kind, *_ in self._checks:
            given = values[position]
            axes = dict(form.spans)
            shape = ", ".join(axes[dim].name if dim in axes else str(n) for dim, n in enumerate(form.shape))
            properties = zip((one.name for one in PROPERTIES), form.look, strict=True)
            wanted, got = {"shape": f"({shape})", **dict(properties)}, describe(given)
            if is_tensor(given) and type(given) is kind:
                found = {"shape": tuple(given.shape)} | {one.name: one.read(given) for one in PROPERTIES}
                fitting = ["shape"] * (form.extents(given.shape) is not None)
                wanted = {name: one for name, one in wanted.items() if name not in fitting and one != found[name]}
                got = ", ".join(str(found[name]) for name in wanted)
            if wanted:
                what = f"a tensor of {', '.join(f'{name} {one}' for name, one in wanted.items())}, got {got}"
                is_longer = list(wanted) == ["shape"] and is_tensor(given) and given.dim() == len(form.shape)
                return f"input {form.name!r} must be {what}{', or have a dimension in dynamic=' * is_longer}"
            if _memory_order(given) != (form.order, form.is_dense):
                layout = "contiguous" if form.order == tuple(range(given.dim())) else f"laid out by {form.order}"
                return f"input {form.name!r} must be {layout} in memory"
        for position, kind, exact, value in self._constants:
            if exactly(values[position]) != (kind, exact):
                return f"argument {self._leaves[position].path!r} must be {shown(value)}, got {shown(values[position])}"
        if (now := _autocast_dtype(self._device_type)) is not self._autocast:
            return f"autocast must be {self._autocast or 'off'}, got {now or 'off'}"
        if self.match_in_any_mode(values) != NO_MATCH:
            return f"torch.inference_mode must be {'on' if self._inference else 'off'}"
        return "numbers of rows must agree, and static tensors and objects be the same"

    def match_in_any_mode(self, values: Sequence[Any]) -> int:
        """``match``, be the thread in inference mode or not: a replay gives the same values in both."""
        with torch.inference_mode(self._inference):
            return self.match(values)


class ForeignSignature(Signature):
    """What is known of the calls that somebody else's graph serves: the addresses that it reads, if they were given."""

    def __init__(self, addresses: tuple[int, ...] | None) -> None:
        self.addresses = addresses
        """The addresses of a call's tensors, in order; None where the graph's owner answers for what it reads."""
        self.axes = (ROWS,)
        self.inputs, self._checks = [], []
        self.has_rows = False
        self.native = None
        self._inference = False
        self._constants, self._leaves = [], []
        self._autocast, self._device_type = None, "cpu"

    def match(self, values: Sequence[Any]) -> int:
        """1 if the call's tensors lie where the graph reads, else ``NO_MATCH``."""
        if self.addresses is None:
            return 1
        found = tuple(value.data_ptr() for value in values if is_tensor(value))
        return 1 if found == self.addresses else NO_MATCH


def refusal(
    leaves: Sequence[Leaf], values: Sequence[Any], rules: ArgumentRules, device: torch.device
) -> Refusal | None:
    """Why a call can never be graphed on a backend's device, or None.

    Raises ``ConfigError`` if a batch dimension is out of range.
    """
    tensors = [(leaf, v) for leaf, v in zip(leaves, values, strict=True) if is_tensor(v)]
    for leaf, tensor in tensors:
        if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested tensor" if tensor.is_nested else type(tensor).__name__
            what = f"{kind} of layout {tensor.layout}"
            return Refusal(Reason.TENSOR_SUBCLASS, f"argument {leaf.path!r} is a {what}")
        if tensor.is_conj() or tensor.is_neg():
            return Refusal(Reason.TENSOR_SUBCLASS, f"argument {leaf.path!r} is a lazy conjugate or negative view")
        if tensor.is_quantized:
            return Refusal(Reason.TENSOR_SUBCLASS, f"argument {leaf.path!r} is a quantized tensor; dequantize() it")
    if len({tensor.device for _, tensor in tensors}) > 1:
        on = ", ".join(f"{leaf.path!r} on {tensor.device}" for leaf, tensor in tensors)
        return Refusal(Reason.DEVICES_DISAGREE, f"arguments are on different devices: {on}")
    if tensors and tensors[0][1].device.type != device.type:
        return Refusal(Reason.DEVICE_UNSUPPORTED, f"the arguments are on {tensors[0][1].device}, not on {device}")
    extents: dict[str, dict[str, int]] = {}
    for leaf, tensor in tensors:
        for dim, axis in rules.axes_of(leaf, tensor):
            what = "numbers of rows" if axis is ROWS else f"lengths along {axis.name!r}"
            extents.setdefault(what, {})[leaf.path if axis is ROWS else f"{leaf.path}[{dim}]"] = tensor.shape[dim]
    for what, found in extents.items():
        if len(set(found.values())) > 1:
            remedy = "leave out of dynamic= what has no rows, or name each number, as {0: 'nodes'}, {0: 'edges'}"
            return Refusal(Reason.ROWS_DISAGREE, f"arguments have different {what}: {found}; {remedy}")
    for leaf, value in zip(leaves, values, strict=True):
        if not _is_plain(value) and is_cache(value) and (advice := advice_for([value])):
            return Refusal(Reason.STATE_REBOUND, f"argument {leaf.path!r}: {advice}")
        if _is_odd(leaf, value, rules):
            return Refusal(
                Reason.UNGUARDED_ARGUMENT,
                f"argument {leaf.path!r} is {describe(value)}, whose change cannot be seen; "
                "pass tensors and constants, or name it in static= if it is the same each time",
            )
    return None


def device_of(
    leaves: Sequence[Leaf], values: Sequence[Any], rules: ArgumentRules, held: Callable[[], Sequence[torch.Tensor]]
) -> torch.device | None:
    """The device of a call's tensors; None without any. A call of constants alone, none of them with a batch dimension,
    may read and write what the callable holds: then it is the device of ``held()``."""
    tensors: list[torch.Tensor] = list(filter(is_tensor, values))
    if not tensors and not rules.dynamic and not any(map(_is_odd, leaves, values, repeat(rules))):
        tensors = sorted(held(), key=lambda tensor: tensor.device.type == "cpu")
    return tensors[0].device if tensors else None


def _is_odd(leaf: Leaf, value: Any, rules: ArgumentRules) -> bool:
    """Whether the change of an argument cannot be seen: no tensor, no constant, no cache, and not declared static."""
    return not (_is_plain(value) or rules.is_static(leaf) or is_cache(value))


def no_tensors(leaves: Sequence[Leaf], values: Sequence[Any]) -> Refusal:
    """Why arguments among which no tensor is found cannot be served; those that may hold some are named."""
    odd = [(leaf, value) for leaf, value in zip(leaves, values, strict=True) if not _is_plain(value)]
    named = [f"argument {leaf.path!r} is {describe(value)}" for leaf, value in odd]
    return Refusal(Reason.NO_TENSORS, "; ".join([Reason.NO_TENSORS.text, *named]))


def _learn(form: InputSpec, shape: torch.Size, shapes: dict[torch.Size, tuple[int, int]]) -> tuple[int, int] | None:
    if len(shapes) >= _MOST_SHAPES:
        shapes.clear()
    found = form.extents(shape)
    if found is not None:
        shapes[shape] = found
    return found


def _is_plain(value: Any) -> bool:
    return is_tensor(value) or is_constant(value)


def _number_of(device_type: str) -> int:
    """The number of a device type; one that torch does not name is the type that others give a name to."""
    kinds = torch._C._autograd.DeviceType.__members__
    number: int = {name.lower(): kind for name, kind in kinds.items()}.get(device_type, kinds["PrivateUse1"]).value
    return number


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _memory_order(tensor: torch.Tensor) -> tuple[tuple[int, ...], bool]:
    """The dimensions from slowest to fastest in memory, and whether they leave no gaps.

    Where a dimension has one element its stride says nothing; such dimensions may end up in another place than in a
    larger batch, which makes another signature, and no other harm. What an expanded tensor is computed into lies in
    memory as if that were contiguous.
    """
    if tensor.is_contiguous():
        return tuple(range(tensor.dim())), True
    stride, shape = tensor.stride(), tensor.shape
    if any(step == 0 and extent > 1 for step, extent in zip(stride, shape, strict=True)):
        return tuple(range(tensor.dim())), False
    order = sorted(range(tensor.dim()), key=lambda d: (-stride[d], d))
    expected = 1
    dense = True
    for d in reversed(order):
        dense = dense and (stride[d] == expected or shape[d] == 1)
        expected *= max(shape[d], 1)
    return tuple(order), dense


# Key-value caches of transformers are found by names of classes, since nothing is imported. A cache is an argument that
# is the same object in each call, like one that is named in ``static=``.
_HOME = "transformers.cache_utils"
_GROWS = "a DynamicCache grows by concatenation; use a static cache (transformers.StaticCache)"
_COUNTS = "a sliding window counts its tokens in Python; graphdispatch.integrations.transformers serves it"


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of transformers."""
    return "Cache" in _names(value)


def advice_for(values: Iterable[Any]) -> str:
    """Why no graph can write to one of these caches or layers, and what to use instead; empty if there is no reason."""
    for value in values:
        names = _names(value)
        if "DynamicLayer" in names or ("DynamicCache" in names and _grows(value)):
            return _GROWS
        if "StaticSlidingWindowLayer" in names:
            return _COUNTS
    return ""


def _grows(cache: Any) -> bool:
    """Whether a cache grows: it has growing layers, or will make its layers when it is used."""
    layers = vars(cache).get("layers")
    return not layers or any("DynamicLayer" in _names(layer) for layer in layers)


def _names(value: Any) -> list[str]:
    return [kind.__name__ for kind in type(value).__mro__ if kind.__module__ == _HOME]
