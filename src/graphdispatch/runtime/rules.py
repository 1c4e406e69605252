"""The user's rules for arguments: which dimensions are dynamic, how to pad them, which arguments are static.

A padding row runs through the model like any other row. If it points at a cache slot in use, it overwrites that slot.
So each argument has its own pad rule, and the library does not guess one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, ClassVar, NamedTuple

import torch

from ..descriptors import size_text
from ..errors import ConfigError, check_callable, check_count, did_you_mean, shown
from ..sizes import LONGEST, MOST_AXES, ROWS, Axis, axes_of, check_sizes
from .flatten import FlatCall, Leaf, declared_names, describe, parameter_names

_SHORTEST, _LONGEST = 16, 512


class Pad(ABC):
    """How the padding rows of one argument are filled: a rule for ``pad`` of ``graphed``.

    Make one with ``zero``, ``value``, ``repeat_last``, ``leave`` or ``function``. A rule of your own is a subclass with
    a ``filler``, whose objects do not change.
    """

    zero: ClassVar[type["_Zero"]]
    """``Pad.zero()``: zeros (the default)."""
    value: ClassVar[type["_Value"]]
    """``Pad.value(fill)``: one value, of a type that the argument's dtype can hold; for example the index of a scratch
    slot."""
    repeat_last: ClassVar[type["_RepeatLast"]]
    """``Pad.repeat_last()``: the last real row."""
    leave: ClassVar[type["_Leave"]]
    """``Pad.leave()``: what earlier, larger batches put there; only for arguments whose padding rows are never used."""
    function: ClassVar[type["_Function"]]
    """``Pad.function(call)``: what ``call(padding, real)`` writes, on every padded call. It writes the view ``padding``
    in place, and may read the view ``real``. Both are views of one buffer of the graph, valid during the call alone;
    ``real`` has at least one row."""

    rules: ClassVar[dict[str, type["Pad"]]] = {}
    """The rules that have a name, which is also an attribute of this class."""
    follows_data: ClassVar[bool] = True
    """Whether padding rows depend on the real rows or on how many there are, so that all are filled anew on each call.
    Without that a padding row is filled where a longer batch has been, and must depend on its place alone."""
    repeats_rows: ClassVar[bool] = False
    """Whether padding rows are copies of the last real row: then they write what that wrote last, and nothing else."""
    runs_code: ClassVar[bool] = True
    """Whether code of the user's fills padding rows, which may do anything besides."""
    is_left: ClassVar[bool] = False
    """Whether padding rows hold whatever was there before: then ``filler`` gives None."""
    fill: float | int | bool | complex | None = None
    """The value of all padding; None if it is not one value."""

    def __init_subclass__(cls, name: str = "") -> None:
        super().__init_subclass__()
        if name:
            Pad.rules[name] = cls
            cls.__qualname__ = f"Pad.{name}"  # where it is found, and what its objects print
            setattr(Pad, name, cls)

    @abstractmethod
    def filler(self, padding: torch.Tensor, real: torch.Tensor, dim: int) -> Callable[[], Any] | None:
        """What fills ``padding`` from what ``real`` holds at the time of each call.

        Args:
            padding: The view of the padding rows, of the argument's dtype, be it integers or bool. What raises for it
                leaves such calls eager.
            real: The view of the real rows, of the same buffer; at least one row.
            dim: The dimension along which the buffer is cut.

        Returns:
            A function without arguments; None to leave the padding as it is.
        """


@dataclass(frozen=True)
class _Value(Pad, name="value"):
    fill: float | int | bool | complex
    follows_data = runs_code = False

    def filler(self, padding: torch.Tensor, real: torch.Tensor, dim: int) -> Callable[[], Any]:
        return partial(padding.fill_, self.fill)


@dataclass(frozen=True)
class _Zero(_Value, name="zero"):
    fill: int = field(default=0, init=False, repr=False)


@dataclass(frozen=True)
class _RepeatLast(Pad, name="repeat_last"):
    runs_code = False
    repeats_rows = True

    def filler(self, padding: torch.Tensor, real: torch.Tensor, dim: int) -> Callable[[], Any]:
        return partial(padding.copy_, real.narrow(dim, real.shape[dim] - 1, 1).expand_as(padding))


@dataclass(frozen=True)
class _Leave(Pad, name="leave"):
    follows_data = runs_code = False
    is_left = True

    def filler(self, padding: torch.Tensor, real: torch.Tensor, dim: int) -> None:
        return None


@dataclass(frozen=True)
class _Function(Pad, name="function"):
    call: Callable[[torch.Tensor, torch.Tensor], Any]

    def filler(self, padding: torch.Tensor, real: torch.Tensor, dim: int) -> Callable[[], Any]:
        call = self.call
        return lambda: call(padding.view_as(padding), real.view_as(real))


def as_pad(name: str, rule: Any) -> Pad:
    """``rule`` as a ``Pad``. It may be a ``Pad``, a number, the name of a rule without arguments, or a function.

    Raises ``ConfigError`` for anything else.
    """
    if isinstance(rule, Pad):
        return rule
    if isinstance(rule, (bool, int, float, complex)):
        return Pad.value(rule)
    named = {name: cls for name, cls in Pad.rules.items() if not signature(cls).parameters}
    if isinstance(rule, str) and rule in named:
        return named[rule]()
    if callable(rule) and not isinstance(rule, type):
        return Pad.function(rule)
    raise ConfigError(
        f"pad[{name!r}] must be a Pad, a number, one of {', '.join(map(repr, named))}, or a function "
        f"(padding, real) -> None, got {shown(rule)}{did_you_mean(rule, named)}"
    )


@dataclass(frozen=True)
class Dim:
    """A dynamic dimension with a name, and the sizes to which batches are padded along it.

    It stands in ``dynamic`` of ``graphed``, where its name comes first: ``{"ids": {0: "batch", 1: Dim("seq", [32,
    64])}}``. Frozen.

    Args:
        name: The name of the dimension. Arguments that use the same name have the same length there in each call.
        sizes: The sizes, strictly increasing. None: powers of two from 16 to ``max_size``; for the first dimension,
            what ``sizes`` and ``max_size`` of ``graphed`` say.
        max_size: The largest size. None: the largest of ``sizes``, or 512. With ``sizes`` it must be their largest.
        pad: The rule for padding along this dimension: one for all arguments, as an entry of ``pad`` of ``graphed``, or
            a mapping from arguments to rules. An argument without a rule here takes its rule in ``pad`` of ``graphed``,
            and zeros without one.

    Raises:
        ConfigError: The name is empty, or the sizes are out of order, too large or contradict ``max_size``.
    """

    name: str
    sizes: Sequence[int] | None = None
    max_size: int | None = None
    pad: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"the name of a Dim must be text, as Dim('seq'), got {shown(self.name)}")
        if self.sizes is not None:
            object.__setattr__(self, "sizes", check_sizes(self.sizes, f"sizes of Dim({self.name!r})"))
        if self.max_size is not None:
            check_count(f"max_size of Dim({self.name!r})", self.max_size)
        largest = self.all_sizes()[-1]
        if largest >= LONGEST:
            raise ConfigError(f"the sizes of Dim({self.name!r}) must be below {LONGEST}, got {largest}")
        if self.sizes is not None and self.max_size is not None and largest != self.max_size:
            raise ConfigError(f"Dim({self.name!r}) has sizes, and another max_size={self.max_size}; give one of them")

    def all_sizes(self) -> tuple[int, ...]:
        """The sizes, made concrete and increasing."""
        if self.sizes is not None:
            return tuple(self.sizes)
        largest = _LONGEST if self.max_size is None else self.max_size
        doubled = [_SHORTEST << i for i in range(largest.bit_length()) if _SHORTEST << i < largest]
        return (*doubled, largest)


class ArgumentRules(NamedTuple):
    """What the user said of the arguments, by top-level name or by path (``batch['ids']``).

    ``dynamic``: the dynamic dimensions of each argument that has any, each with its axis. ``pad``: the pad rules other
    than zeros. ``static``: tensors whose address never changes, and objects that are the same on each call; they are
    not copied. ``check_addresses``: whether each call compares the addresses of static tensors. ``axes``: the dynamic
    dimensions of a batch; the first one is the batch. ``dims``: what the user said of each, if they have names.
    ``chosen``: the combinations of sizes, where the user gave these; else all of the sizes of each.
    """

    dynamic: Mapping[str, Mapping[int, Axis]]
    pad: Mapping[str, Pad]
    static: frozenset[str]
    check_addresses: bool = True
    axes: tuple[Axis, ...] = (ROWS,)
    dims: tuple[Dim, ...] = ()
    chosen: tuple[tuple[int, ...], ...] = ()

    def axes_of(self, leaf: Leaf, tensor: torch.Tensor) -> Sequence[tuple[int, Axis]]:
        """The dynamic dimensions of a tensor, counted from the front, each with its axis; none of a static tensor.

        Raises ``ConfigError`` if the user named a dimension that the tensor does not have, or one dimension twice.
        """
        if self.is_static(leaf):
            return ()
        found: dict[int, Axis] = {}
        for dim, axis in self.dynamic.get(leaf.path, self.dynamic.get(leaf.argument, {})).items():
            named = f"dynamic[{leaf.path!r}]" + (f"[{dim}] = {axis.name!r}" if self.dims else f" = {dim}")
            if not -tensor.dim() <= dim < tensor.dim():
                raise ConfigError(
                    f"{named} is out of range: the tensor has shape {tuple(tensor.shape)}; give a dimension that it "
                    "has, or leave it out of dynamic="
                )
            if found.setdefault(dim % tensor.dim(), axis) is not axis:
                raise ConfigError(
                    f"dynamic[{leaf.path!r}] names dimension {dim % tensor.dim()} of the tensor twice, as "
                    f"{found[dim % tensor.dim()].name!r} and {axis.name!r}; name it once"
                )
        return sorted(found.items())

    def rule_along(self, axis: Axis, leaf: str, argument: str) -> Pad | None:
        """The pad rule of an argument along one axis, if the user gave one for that axis."""
        rule = self.dims[self.axes.index(axis)].pad if self.dims else None
        if isinstance(rule, Mapping):
            rule = rule.get(leaf, rule.get(argument))
        return None if rule is None else as_pad(argument, rule)

    def pad_of(self, leaf: Leaf, axis: Axis) -> Pad | None:
        """The user's pad rule of an argument along one axis, if there is one."""
        along = self.rule_along(axis, leaf.path, leaf.argument)
        return along or self.pad.get(leaf.path, self.pad.get(leaf.argument))

    def points(self, rows: Sequence[int]) -> list[tuple[int, ...]]:
        """All combinations of the sizes, with ``rows`` for the first dimension."""
        points: list[tuple[int, ...]] = [(size,) for size in rows]
        for dim in self.dims[1:]:
            points = [(*point, size) for point in points for size in dim.all_sizes()]
        return points

    def checked_points(self, sizes: Any) -> list[tuple[int, ...]]:
        """Combinations of sizes that the user gave as such. Raises ``ConfigError``."""
        points = [
            tuple(point) if isinstance(point, (tuple, list)) else (point,) for point in getattr(sizes, "sizes", sizes)
        ]
        for point in points:
            if len(point) != len(self.axes):
                raise ConfigError(
                    f"sizes must have a size for each of {[axis.name for axis in self.axes]}, got {shown(point)}"
                )
            for axis, size in zip(self.axes, point, strict=True):
                check_count(f"the size of {axis.name!r} in {point}", size)
        if not points or len(set(points)) < len(points):
            raise ConfigError(f"sizes must hold at least one combination, and each once, got {shown(sizes)}")
        return points

    def is_static(self, leaf: Leaf) -> bool:
        """Whether the user declared an argument static."""
        return leaf.path in self.static or leaf.argument in self.static

    def check_names(self, fn: Callable[..., Any], call: FlatCall) -> None:
        """Raise ``ConfigError`` if ``dynamic`` names nothing that this call has, nor arguments that it leaves out.

        Any argument may be left out or be None, also one that only ``**kwargs`` takes, if another one is there."""
        names = {leaf.path for leaf in call.leaves} | {leaf.argument for leaf in call.leaves} if self.dynamic else set()
        if not self.dynamic or not names.isdisjoint(self.dynamic):
            return
        declared = declared_names(fn)
        unknown = [name for name in self.dynamic if name not in declared]
        if unknown:
            raise ConfigError(
                f"dynamic names {unknown[0]!r}, which is no argument of this call of {callable_name(fn)}; "
                f"expected one of {sorted(names)}"
            )


def make_rules(
    fn: Callable[..., Any], dynamic: Mapping[str, Any], pad: Mapping[str, Any], static: Iterable[str]
) -> ArgumentRules:
    """The rules from a user's options. Raises ``ConfigError`` for mistakes that can be seen before any call."""
    check_callable("fn", fn)
    if isinstance(fn, type) and issubclass(fn, torch.nn.Module):
        raise ConfigError(f"fn must be a module, got the class {fn.__name__}; give an object of it, {fn.__name__}(...)")
    if not isinstance(dynamic, Mapping):
        raise ConfigError(f"dynamic must map argument names to dimensions, as {{'input': 0}}, got {shown(dynamic)}")
    rules = _read_dynamic(dynamic)
    if not isinstance(pad, Mapping):
        raise ConfigError(f"pad must map argument names to pad rules, as {{'ids': 0}}, got {shown(pad)}")
    if not isinstance(static, Iterable):
        raise ConfigError(f"static must name arguments, got {describe(static)}")
    names = frozenset([static] if isinstance(static, str) else static)
    known = parameter_names(fn)
    for option, given in (("dynamic", dynamic), ("pad", pad), ("static", names)):
        for name in given:
            if not isinstance(name, str):
                raise ConfigError(f"{option} must name arguments by text, got {describe(name)}")
            top = name.partition("[")[0].partition(".")[0]
            if known is not None and top not in known:
                raise ConfigError(
                    f"{option} names {name!r}, which is no argument of {callable_name(fn)}; "
                    f"expected one of {list(known)}"
                )
    for name in pad:
        if name not in dynamic:
            raise ConfigError(f"pad names {name!r}, which dynamic does not; only arguments with a batch dimension pad")
    if both := names & set(dynamic):
        raise ConfigError(
            f"{min(both)!r} is in both dynamic and static; a static tensor keeps its shape, so name it once"
        )
    pads = {name: as_pad(name, rule) for name, rule in pad.items()}
    return rules._replace(pad=pads, static=names)


def _read_dynamic(dynamic: Mapping[str, Any]) -> ArgumentRules:
    """What ``dynamic`` says. An int stands for the first dimension that it names, and for the rows if it names none.

    Raises ``ConfigError`` that names the argument.
    """
    dims: dict[str, Dim] = {}
    named: dict[str, dict[int, str]] = {}
    for name, places in dynamic.items():
        if isinstance(places, Mapping):
            named[name] = {dim: _read_dim(name, dim, one, dims) for dim, one in places.items()}
            if not places:
                raise ConfigError(
                    f"dynamic[{name!r}] must name a dimension, as {{0: 'batch'}}, or be left out, got {{}}"
                )
        elif isinstance(places, bool) or not isinstance(places, int):
            raise ConfigError(
                f"dynamic[{name!r}] must be the number of a dimension, or as {{0: 'batch', 1: 'length'}}, "
                f"got {shown(places)}"
            )
    if len(dims) > MOST_AXES:
        raise ConfigError(f"dynamic must name at most {MOST_AXES} different dimensions, got {list(dims)}")
    axes = {axis.name: axis for axis in axes_of(list(dims))} if dims else {ROWS.name: ROWS}
    first = next(iter(axes))
    for name, places in dynamic.items():
        if isinstance(places, int):
            named[name] = {places: first}
    every = {name: {dim: axes[one] for dim, one in named[name].items()} for name in dynamic}
    rules = ArgumentRules(every, {}, frozenset(), axes=tuple(axes.values()), dims=tuple(dims.values()))
    _check_pads(rules)
    return rules


def _read_dim(name: str, dim: Any, one: Any, dims: dict[str, Dim]) -> str:
    """The name of a dimension; ``dims`` has what is known of each name."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        path = (
            f"; a tensor within the argument is named by its path, {f'{name}[{dim!r}]'!r}"
            if isinstance(dim, str)
            else ""
        )
        raise ConfigError(f"dynamic[{name!r}] must map numbers of dimensions to names, got {shown(dim)}{path}")
    if isinstance(one, str) and one:
        one = Dim(one)
    if not isinstance(one, Dim):
        raise ConfigError(f"dynamic[{name!r}][{dim}] must be a name, as 'seq', or a Dim, got {shown(one)}")
    if one not in (dims.setdefault(one.name, one), Dim(one.name)):
        raise ConfigError(
            f"dynamic has two different Dims of the name {one.name!r}; give one where the name comes first, and its "
            "name elsewhere"
        )
    return one.name


def _check_pads(rules: ArgumentRules) -> None:
    for dim, axis in zip(rules.dims, rules.axes, strict=False):  # there is no Dim of rows without a name
        for name in dim.pad if isinstance(dim.pad, Mapping) else ():
            if axis not in rules.dynamic.get(name, {}).values():
                raise ConfigError(f"pad of Dim({dim.name!r}) names {name!r}, which has no such dimension in dynamic")
        for name in rules.dynamic if dim.pad is not None else ():
            rules.rule_along(axis, name, name)


def graph_name(fn: Callable[..., Any], key: Hashable) -> str:
    """The name of a callable's graph in profiles: ``decode 8``."""
    return f"{callable_name(fn)} {size_text(key)}"


def callable_name(fn: Callable[..., Any]) -> str:
    """The name of a callable, for messages; of a module that is served in place the name of its class."""
    if type(fn) is MethodType and fn.__func__ is torch.nn.Module._call_impl:
        return type(fn.__self__).__qualname__
    kinds = (FunctionType, BuiltinFunctionType, MethodType, type)
    name: str = fn.__qualname__ if issubclass(type(fn), kinds) else type(fn).__qualname__
    return name
