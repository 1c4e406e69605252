"""The extension module, bound to the installed torch: what looks at tensors and modes, tested before it is trusted."""

import sys
from itertools import product
from pathlib import Path
from types import ModuleType

import torch

from . import EXTENSION, WHY_NO_EXTENSION

__all__ = ["ASKED", "CORE", "WHY_NO_CORE"]


_FACTS = ("inference mode", "autocast", "requires_grad", "lazy views", "a profiler", "clones")
_CPU = 0  # the number of the device type


def _find_ambient(core: ModuleType, library: str) -> tuple[str, ...]:
    """Have the core look up what tells them, and compare it with Python in every state. Returns what it cannot tell.

    Python is asked for that. Where lazy views cannot be told from plain tensors, torch copies all inputs.
    """
    with torch.inference_mode():
        made_there = torch.zeros(2)
    with torch.inference_mode(False), torch.no_grad():
        pair = torch.zeros(2, dtype=torch.complex64)
        plain = (torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64), torch.zeros(3, 2).t(), pair)
        lazy = (torch._neg_view(torch.zeros(2)), pair.conj())
        trained = torch.nn.Parameter(torch.zeros(2))
        profiler = torch._C._autograd._profiler_enabled
        asked = (torch.is_inference_mode_enabled, torch.is_autocast_enabled, torch.get_autocast_dtype, profiler)
        bindings = library.replace("libtorch_cpu", "libtorch_python")
        core.find_ambient(library, bindings, asked, plain, *lazy, made_there)
    samples = [*((t, True) for t in (*plain, trained, made_there)), *((t, False) for t in lazy)]
    was = torch.is_autocast_enabled("cpu")
    wrong: set[int] = set()
    try:
        for inference, autocast in product((False, True), repeat=2):
            torch.set_autocast_enabled("cpu", autocast)
            with torch.inference_mode(inference):
                for tensor, is_plain in samples:
                    told = (*core.read_ambient(tensor, _CPU), True)
                    figures = inference, autocast, tensor.requires_grad, is_plain, profiler()
                    true = (*figures, _is_clone(core, tensor, is_plain))
                    wrong.update(place for place in range(len(_FACTS)) if told[place] is not true[place])
    except RuntimeError:  # a torch that refuses one of the states
        wrong.update(range(len(_FACTS)))
    finally:
        torch.set_autocast_enabled("cpu", was)
    for place in wrong:
        core.forget_ambient(place)
    return tuple(_FACTS[place] for place in sorted(wrong))


def _is_clone(core: ModuleType, tensor: torch.Tensor, is_plain: bool) -> bool:
    """Whether the core's copy of a tensor is what torch's is; of a lazy view it makes none."""
    with torch.no_grad():
        made, true = core.try_clone(tensor), tensor.clone()
    if not (is_plain and tensor.is_contiguous()):
        return made is None
    figures = ("shape", "dtype", "requires_grad", "grad_fn")
    return (
        type(made) is torch.Tensor
        and all(getattr(made, name) == getattr(true, name) for name in figures)
        and (made.stride(), made.is_inference()) == (true.stride(), true.is_inference())
        and made.data_ptr() != tensor.data_ptr()
        and bool(torch.equal(made, true))
    )


def _bind() -> tuple[ModuleType | None, str, tuple[str, ...]]:
    if EXTENSION is None:
        return None, WHY_NO_EXTENSION, ()
    library = Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{'dylib' if sys.platform == 'darwin' else 'so'}"
    with torch.inference_mode(False), torch.no_grad():
        grid = torch.zeros(2, 3)
        shapes = (grid, grid.t(), grid[1:, 1:], torch.zeros(()), torch.nn.Parameter(grid.clone()), torch.zeros(0, 4))
        kinds = grid.double(), grid.half(), grid.long(), grid.bool(), torch.frombuffer(bytearray(8), dtype=torch.int8)
    try:
        EXTENSION.bind(str(library), torch.Tensor, torch.nn.Parameter, (*shapes, *kinds))
    except ImportError as error:
        return None, str(error), ()
    return EXTENSION, "", _find_ambient(EXTENSION, str(library))


def _bind_without_modes() -> tuple[ModuleType | None, str, tuple[str, ...]]:
    """What the importing thread does to torch's functions is no part of the test: a default device may not be there."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    try:
        return _bind()
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


_bound = _bind_without_modes()
CORE: ModuleType | None = _bound[0]
"""The extension module after its self-test on this torch, or None."""
WHY_NO_CORE: str = _bound[1]
"""Why there is none; empty if there is one."""
ASKED: tuple[str, ...] = _bound[2]
"""What the core asks of Python on each call, since its own way did not pass its test."""
