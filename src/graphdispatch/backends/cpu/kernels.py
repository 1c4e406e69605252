"""Chooses the overload that replays an operator into existing memory with the same bits.

Most operators have an ``out=`` overload. It is not trusted: while recording, it runs once on the real arguments, and is
used only if it gives the same bits. An operator without one is called as recorded, and its result is copied. So is one
whose result might have another shape in another replay.
"""

from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from ..operators import bits_equal, has_fixed_shapes

__all__ = ["choose_kernel", "out_names"]


def choose_kernel(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[torch.Tensor]
) -> OpOverload | None:
    """The overload that writes exactly these results into given tensors; None if the results must be copied."""
    overload = _out_overload(func) if has_fixed_shapes(func) else None
    if overload is None or len(results) != len(overload._schema.returns):
        return None
    outs = [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device) for t in results]
    places = [t.data_ptr() for t in outs]
    try:
        overload(*args, **kwargs, **dict(zip(out_names(overload), outs, strict=True)))
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None
    is_same = all(
        new.data_ptr() == place and new.stride() == old.stride() and bits_equal(new, old)
        for new, old, place in zip(outs, results, places, strict=True)
    )
    return overload if is_same else None


@cache
def out_names(overload: OpOverload) -> tuple[str, ...]:
    """The names of the arguments that take the results."""
    return tuple(arg.name for arg in overload._schema.arguments if arg.is_out)


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
