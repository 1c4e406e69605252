"""The user's rules for arguments: which have a batch dimension, how to pad them, which are static."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..axes import ROWS, Axis
from ..descriptors import size_text
from ..errors import ConfigError, check_callable, shown
from .padding import Pad, as_pad
from .spec import FlatCall, Leaf, declared_names, describe, parameter_names

if TYPE_CHECKING:
    from .dims import Grid

__all__ = ["ArgumentRules", "callable_name", "graph_name", "make_rules"]


class ArgumentRules(NamedTuple):
    """What the user said of the arguments, by top-level name or by path (``batch['ids']``).

    ``dynamic``: the batch dimension of each argument that has one. ``pad``: the pad rules other than zeros. ``static``:
    tensors whose address never changes, and objects that are the same on each call; they are not copied.
    ``check_addresses``: whether each call compares the addresses of static tensors. ``grid``: the dimensions of all
    arguments where several change; ``dynamic`` has the first one of each argument then.
    """

    dynamic: Mapping[str, int]
    pad: Mapping[str, Pad]
    static: frozenset[str]
    check_addresses: bool = True
    grid: "Grid | None" = None

    def dim_of(self, leaf: Leaf, tensor: torch.Tensor) -> int | None:
        """The batch dimension of a tensor, counted from the front; None if it has none, as a static tensor.

        Raises ``ConfigError`` if the user named a dimension that the tensor does not have.
        """
        given = self.dynamic.get(leaf.path, self.dynamic.get(leaf.argument))
        if given is None or self.is_static(leaf):
            return None
        if not -tensor.dim() <= given < tensor.dim():
            raise ConfigError(
                f"dynamic[{leaf.path!r}] = {given} is out of range: the tensor has shape {tuple(tensor.shape)}; "
                f"give a dimension from {-tensor.dim()} to {tensor.dim() - 1}"
                if tensor.dim()
                else f"dynamic[{leaf.path!r}] = {given}, but the tensor has no dimensions; leave it out of dynamic="
            )
        return given % tensor.dim()

    def axes_of(self, leaf: Leaf, tensor: torch.Tensor) -> Sequence[tuple[int, Axis]]:
        """The dynamic dimensions of a tensor, each with its axis. Raises as ``dim_of`` does."""
        if self.grid is not None:
            return () if self.is_static(leaf) else self.grid.axes_of(leaf, tensor)
        dim = self.dim_of(leaf, tensor)
        return () if dim is None else ((dim, ROWS),)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The dynamic dimensions of a batch."""
        return self.grid.axes if self.grid is not None else (ROWS,)

    def pad_of(self, leaf: Leaf, axis: Axis) -> Pad | None:
        """The user's pad rule of an argument along one axis, if there is one."""
        along = self.grid.rule_of(axis, leaf.path, leaf.argument) if self.grid is not None else None
        return along or self.pad.get(leaf.path, self.pad.get(leaf.argument))

    def is_static(self, leaf: Leaf) -> bool:
        """Whether the user declared an argument static."""
        return leaf.path in self.static or leaf.argument in self.static

    def check_names(self, fn: Callable[..., Any], call: FlatCall) -> None:
        """Raise ``ConfigError`` if ``dynamic`` names nothing that this call has, nor arguments that it leaves out.

        Any argument may be left out or be None, also one that only ``**kwargs`` takes, if another one is there."""
        names = {leaf.path for leaf in call.leaves} | {leaf.argument for leaf in call.leaves}
        unknown = [name for name in self.dynamic if name not in declared_names(fn)]
        if unknown and names.isdisjoint(self.dynamic):
            raise ConfigError(
                f"dynamic names {unknown[0]!r}, which is no argument of this call of {callable_name(fn)}; "
                f"expected one of {sorted(names)}"
            )


def make_rules(
    fn: Callable[..., Any], dynamic: Mapping[str, int], pad: Mapping[str, Any], static: Iterable[str]
) -> ArgumentRules:
    """The rules from a user's options. Raises ``ConfigError`` for mistakes that can be seen before any call."""
    check_callable("fn", fn)
    if not isinstance(dynamic, Mapping):
        raise ConfigError(f"dynamic must map argument names to dimensions, as {{'input': 0}}, got {shown(dynamic)}")
    for name, dim in dynamic.items():
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise ConfigError(
                f"dynamic[{name!r}] must be the number of a dimension, or as {{0: 'batch', 1: 'length'}}, "
                f"got {shown(dim)}"
            )
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
            top = name.split("[", 1)[0].split(".", 1)[0]
            if known is not None and top not in known:
                raise ConfigError(
                    f"{option} names {name!r}, which is no argument of {callable_name(fn)}; "
                    f"expected one of {list(known)}"
                )
    for name in pad:
        if name not in dynamic:
            raise ConfigError(f"pad names {name!r}, which dynamic does not; only arguments with a batch dimension pad")
    if both := names & set(dynamic):
        raise ConfigError(f"{sorted(both)} are in both dynamic and static; a static tensor keeps its shape")
    return ArgumentRules(dict(dynamic), {name: as_pad(name, rule) for name, rule in pad.items()}, names)


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
