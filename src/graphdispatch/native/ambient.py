"""What the core finds out without Python: modes of the thread and flags of a tensor, tested before they are trusted."""

from itertools import product
from types import ModuleType

import torch

__all__ = ["find_ambient"]

_FACTS = ("inference mode", "autocast", "requires_grad", "lazy views", "a profiler", "clones")
_CPU = 0  # the number of the device type


def find_ambient(core: ModuleType, library: str) -> tuple[str, ...]:
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
