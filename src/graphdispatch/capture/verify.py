"""Compares tensors of a graph with eager's: bit for bit where that is promised, within a tolerance elsewhere.

The tolerance is relative to the largest magnitude of eager's tensor, since padding may change the order of a sum and
so the last bits of every element, small ones included; a mixed-up row differs by the order of that magnitude itself.
"""

from typing import NamedTuple

import torch

from ..backends.operators import bits_equal

__all__ = ["Tolerance", "difference", "tolerance_for"]


class Tolerance(NamedTuple):
    """``|graph - eager| <= atol + rtol * max|eager|`` for every element; both zero means the same bits."""

    rtol: float
    atol: float

    @property
    def is_exact(self) -> bool:
        """Whether only the same bits agree."""
        return self.rtol == 0.0 and self.atol == 0.0


# About the square root of each type's resolution for the wide types, and a few units of it for the narrow ones.
_BY_DTYPE = {
    torch.float64: Tolerance(1e-9, 1e-12),
    torch.complex128: Tolerance(1e-9, 1e-12),
    torch.float32: Tolerance(1e-4, 1e-6),
    torch.complex64: Tolerance(1e-4, 1e-6),
    torch.float16: Tolerance(1e-2, 1e-4),
    torch.bfloat16: Tolerance(2e-2, 1e-3),
}


def tolerance_for(
    dtype: torch.dtype, *, exact: bool, rtol: float | None = None, atol: float | None = None
) -> Tolerance:
    """The tolerance for a type: none if ``exact``, for integers and for bool, else by type, unless overridden."""
    if exact or not (dtype.is_floating_point or dtype.is_complex):
        return Tolerance(0.0, 0.0)
    default = _BY_DTYPE.get(dtype, Tolerance(2e-2, 1e-3))
    return Tolerance(default.rtol if rtol is None else rtol, default.atol if atol is None else atol)


def difference(eager: torch.Tensor, graph: torch.Tensor, tolerance: Tolerance) -> str | None:
    """How two tensors disagree, as a sentence, or None if they agree. Reads values back to the host."""
    if eager.shape != graph.shape or eager.dtype != graph.dtype:
        return f"{tuple(graph.shape)} {graph.dtype} instead of {tuple(eager.shape)} {eager.dtype}"
    if eager.numel() == 0 or bits_equal(eager, graph):
        return None
    if not (eager.dtype.is_floating_point or eager.dtype.is_complex):
        return f"{int((eager != graph).sum())} of {eager.numel()} elements differ"
    wide = torch.promote_types(eager.dtype, torch.float32)
    a, b = eager.to(wide), graph.to(wide)
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)) or not torch.equal(_class(a), _class(b)):
        return "elements that are not finite differ"
    zero = torch.zeros((), dtype=a.dtype, device=a.device)
    gap = float(torch.where(finite, a - b, zero).abs().max())
    scale = float(torch.where(finite, a, zero).abs().max())
    if not tolerance.is_exact and gap <= tolerance.atol + tolerance.rtol * scale:
        return None
    if gap == 0.0:
        return None if not tolerance.is_exact else "bits differ (sign of zero or NaN payload)"
    return f"largest difference {gap:.3g} where eager's largest value is {scale:.3g}"


def _class(tensor: torch.Tensor) -> torch.Tensor:
    """0 for finite elements, another number for each kind that is not."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    kinds = torch.isnan(tensor).to(torch.int8) * 3
    return kinds + torch.isposinf(tensor).to(torch.int8) * 1 + torch.isneginf(tensor).to(torch.int8) * 2
