"""What the core finds out without Python: modes of the thread and flags of a tensor, tested before they are trusted."""

from types import ModuleType

import torch

__all__ = ["find_ambient"]

_FACTS = ("inference mode", "autocast", "requires_grad", "lazy views")
_CPU = 0  # the number of the device type


def find_ambient(core: ModuleType, library: str) -> tuple[str, ...]:
    """Have the core look up what tells them, and compare it with Python in every state. Returns what it cannot tell.

    Python is asked for that. Where lazy views cannot be told from plain tensors, torch copies all inputs.
    """
    with torch.inference_mode(False), torch.no_grad():
        plain = (torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64), torch.zeros(3, 2).t(), _complex())
        lazy = (torch._neg_view(torch.zeros(2)), _complex().conj())
    with torch.inference_mode():
        made_there = torch.zeros(2)
    asked = (torch.is_inference_mode_enabled, torch.is_autocast_enabled, torch.get_autocast_dtype)
    core.find_ambient(library, asked, plain, *lazy, made_there)
    wrong: set[int] = set()
    for tensor, is_plain in (*((t, True) for t in (*plain, made_there)), *((t, False) for t in lazy)):
        try:
            wrong.update(_differences(core, tensor, is_plain))
        except RuntimeError:  # a torch that refuses one of the states
            wrong.update(range(len(_FACTS)))
    for place in wrong:
        core.forget_ambient(place)
    return tuple(_FACTS[place] for place in sorted(wrong))


def _complex() -> torch.Tensor:
    return torch.zeros(2, dtype=torch.complex64)


def _differences(core: ModuleType, tensor: torch.Tensor, is_plain: bool) -> set[int]:
    """The places of the facts that the core does not tell as Python does, in any of the modes."""
    wrong: set[int] = set()
    was = torch.is_autocast_enabled("cpu")
    try:
        for inference in (False, True):
            for autocast in (False, True):
                torch.set_autocast_enabled("cpu", autocast)
                with torch.inference_mode(inference):
                    for one in (tensor, *([] if inference else _trainable(tensor))):
                        told = core.read_ambient(one, _CPU)
                        true = (inference, autocast, one.requires_grad, is_plain)
                        wrong.update(place for place in range(len(_FACTS)) if told[place] is not true[place])
    finally:
        torch.set_autocast_enabled("cpu", was)
    return wrong


def _trainable(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A parameter of the same values, if there can be one."""
    if not tensor.is_floating_point() or tensor.is_inference() or tensor.is_neg():
        return []
    return [torch.nn.Parameter(tensor.clone())]
