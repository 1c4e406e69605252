"""``Prior``: what a plan expects of traffic that its workload does not show."""

from dataclasses import dataclass, fields

import numpy as np

from ..errors import ConfigError
from ..sizes import ladder
from .traffic import Floats, Ints

__all__ = ["Prior", "widest"]

_FACTORS = np.geomspace(0.5, 2.0, 21)


@dataclass(frozen=True)
class Prior:
    """How far to trust a workload: a plan for exactly what was seen is fragile where traffic moves.

    ``share`` of the steps is expected anywhere in the range, half of it as 1/size and half at the powers of two, where
    the limits of engines lie at which an overloaded one runs. ``drift`` of the steps is expected at half to twice their
    size, evenly over the logarithm, as when the load changes. ``regret`` is a guard: graphs lie so close that steps
    spread evenly over the sizes between two graphs are padded by at most that share of their tokens more than by vLLM's
    ladder. Where that takes more than nine tenths of a budget it is doubled until it takes at most six tenths, so that
    something is left for what was seen. None means no guard.
    """

    share: float = 0.02
    drift: float = 0.3
    regret: float | None = 0.0075

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "regret":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise ConfigError(f"{field.name} of the prior must be from 0 to below 1, got {value!r}")
        if self.share + self.drift >= 1:
            raise ConfigError(f"share and drift of the prior must be below 1 together, got {self.share + self.drift}")

    @classmethod
    def of(cls, prior: "float | Prior") -> "Prior":
        """The prior of that share; one of 0 trusts the workload entirely, without drift and guard."""
        if isinstance(prior, Prior):
            return prior
        return cls(prior) if prior else cls(0.0, 0.0, None)

    def expected(self, sizes: Ints, weights: Floats, largest: int) -> Floats:
        """The expected share of the steps by size, from 1 to the larger of ``largest`` and the last of ``sizes``.

        ``weights`` are of the steps of ``sizes``; ``largest`` is the end of the range. The result sums to 1.
        """
        top = max(largest, int(sizes[-1]))
        seen = np.bincount(sizes, weights / weights.sum(), top + 1)[1:]
        anywhere, moved = np.zeros((2, top))
        if self.share:
            anywhere[:largest] = 0.5 / np.arange(1, largest + 1) / (1.0 / np.arange(1, largest + 1)).sum()
            powers = 2 ** np.arange(largest.bit_length())
            anywhere[powers - 1] += 0.5 / len(powers)
        if self.drift:
            shifted = np.maximum(np.rint(np.outer(_FACTORS, sizes)), 1).astype(np.int64).ravel()
            reached = shifted <= top
            moved = np.bincount(shifted[reached], np.tile(weights, len(_FACTORS))[reached], top + 1)[1:]
            moved /= moved.sum()
        return (1.0 - self.share - self.drift) * seen + self.share * anywhere + self.drift * moved


def widest(candidates: Ints, regret: float) -> Ints:
    """For each of ``candidates``, how far below it the next graph may lie for the guard of ``regret``.

    Between graphs ``d`` apart, padding at a size ``n`` is ``(d - 1) / (2 n)`` on average; so ``d`` may be
    ``2 n * regret`` more than the step of vLLM's ladder there.
    """
    steps = np.array(ladder("vllm", max(int(candidates[-1]), 16)))
    gaps = np.diff(steps, prepend=0)
    gaps = gaps[np.minimum(np.searchsorted(steps, candidates), len(gaps) - 1)]
    return np.floor(gaps + 2 * regret * candidates).astype(np.int64)
