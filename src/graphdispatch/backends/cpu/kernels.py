"""Chooses the call that replays an operator into existing memory with the same bits.

Most operators have an ``out=`` overload, and most of these have a binding in ``torch`` that is faster to call.
Neither is trusted. While recording, each candidate runs once on the real arguments. It is used only if it reaches
exactly that overload and gives the same bits. An operator without such a call is called as recorded, and its result
is copied. So is one whose result might have another shape in another replay.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from ..operators import bits_equal, has_fixed_shapes
from ..tracing import UntracedMode

__all__ = ["Kernel", "Kernels", "choose_kernel", "in_place_method"]


class Kernel(NamedTuple):
    """A call that writes an operator's results into given tensors.

    It is called as ``function(*args, **kwargs, **outs)``, where ``outs`` holds the result tensors by ``out_names``, and
    reaches ``overload``. A ``packed`` binding takes them all as ``out``: one tensor, or a tuple of several.
    """

    function: Callable[..., Any]
    overload: OpOverload
    out_names: tuple[str, ...]
    packed: bool = False

    def out_kwargs(self, outs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        """The keyword arguments that pass ``outs`` to the function."""
        if self.packed:
            return {"out": outs[0] if len(outs) == 1 else outs}
        return dict(zip(self.out_names, outs, strict=True))


class _Calls(UntracedMode):
    """Records which overloads a call reaches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[OpOverload] = []

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Kernels:
    """What ``choose_kernel`` chose in one recording, by operator and by what the arguments look like."""

    def __init__(self) -> None:
        self._chosen: dict[Any, Kernel | None] = {}

    def choose(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[torch.Tensor]
    ) -> Kernel | None:
        """``choose_kernel``, once for calls whose tensors differ in their values alone."""
        try:
            key = func, _looks(args), _looks(tuple(kwargs.items())), _looks(results)
            if key not in self._chosen:
                self._chosen[key] = choose_kernel(func, args, kwargs, results)
            return self._chosen[key]
        except TypeError:  # an argument that has no hash
            return choose_kernel(func, args, kwargs, results)


def _looks(value: Any) -> Any:
    """All of an argument that a kernel is chosen by: of a tensor everything but its values."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind, *map(_looks, value)
    if not isinstance(value, torch.Tensor):
        return kind, value
    where = torch._C.TensorBase.data_ptr(value) % _ALIGNMENT  # torch.Tensor's listens for reads of the host
    return kind, value.dtype, value.size(), value.stride(), where, value.is_conj(), value.is_neg(), value.requires_grad


_ALIGNMENT = 64  # bytes, of memory that torch makes


def choose_kernel(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[torch.Tensor]
) -> Kernel | None:
    """The fastest call that writes exactly these results into given tensors; None if the results must be copied."""
    overload = _out_overload(func) if has_fixed_shapes(func) else None
    if overload is None or len(results) != len(overload._schema.returns):
        return None
    names = tuple(arg.name for arg in overload._schema.arguments if arg.is_out)
    plain = Kernel(getattr(overload, "_op", overload), overload, names)
    if not _agrees(plain, None, args, kwargs, results):
        return None
    for home in (torch._C._VariableFunctions, torch._C._nn):
        binding = getattr(home, func._schema.name.removeprefix("aten::"), None)
        if binding is None:
            continue
        packed = Kernel(binding, overload, names, packed=True)
        if _agrees(packed, overload, args, kwargs, results):
            return packed
    return plain


def _agrees(
    kernel: Kernel,
    overload: OpOverload | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    results: list[torch.Tensor],
) -> bool:
    outs = tuple(torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device) for t in results)
    places = [t.data_ptr() for t in outs]
    try:
        with _Calls() as calls:
            kernel.function(*args, **kwargs, **kernel.out_kwargs(outs))
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return False
    if overload is not None and calls.seen != [overload]:
        return False
    return all(
        new.data_ptr() == place and new.stride() == old.stride() and bits_equal(new, old)
        for new, old, place in zip(outs, results, places, strict=True)
    )


@cache
def _out_overload(func: OpOverload) -> OpOverload | None:
    packet = func.overloadpacket
    wanted = [(arg.name, str(arg.type)) for arg in func._schema.arguments]
    for name in packet.overloads():
        candidate: OpOverload = getattr(packet, name)
        arguments = candidate._schema.arguments
        if any(arg.is_out for arg in arguments) and wanted == [
            (arg.name, str(arg.type)) for arg in arguments if not arg.is_out
        ]:
            return candidate
    return None


def in_place_method(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """The tensor's method for an in-place operator, which is faster to call; None if it reaches another overload.

    The method is tried on meta tensors, since an in-place operator must not run twice.
    """
    name = func._schema.name.removeprefix("aten::")
    target = args[0] if args else None
    if not isinstance(target, torch.Tensor) or not name.endswith("_") or not hasattr(target, name):
        return None
    meta_args, meta_kwargs = tree_map(lambda v: v.to("meta") if isinstance(v, torch.Tensor) else v, (args, kwargs))
    try:
        with _Calls() as reached:
            getattr(meta_args[0], name)(*meta_args[1:], **meta_kwargs)
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    method: Callable[..., Any] = getattr(target, name)
    return method if reached.seen == [func] else None
