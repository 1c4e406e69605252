"""``Prior``: what a plan expects of traffic that its workload does not show."""

from dataclasses import dataclass, fields

import numpy as np

from ..errors import ConfigError
from ..sizes import named_sizes
from .traffic import Floats, Ints

__all__ = ["Prior", "reach"]

_FIRST_LIMIT = 6
_FACTORS = np.geomspace(0.5, 2.0, 21)


@dataclass(frozen=True)
class Prior:
    """How far to trust a workload: traffic moves, and a plan for exactly what was seen breaks then.

    ``share`` of the steps may have any size in the range. Half of them are spread as 1/size; the other half lie on the
    powers of two, where engines have their limits and an overloaded engine runs. ``drift`` of the steps may have half
    to twice the size that was seen, spread evenly over the logarithm, as when the load changes.

    ``regret`` is a guard for sizes that were not seen; None means no guard. Graphs lie so close together that steps
    spread evenly over the sizes between two graphs are padded by at most about that share of their tokens more than by
    vLLM's capture sizes. Each power of two from 64 has a graph. A guard that takes more than nine tenths of a budget is
    doubled; from four times its value on, it is doubled until it takes six tenths. So something is left for what was
    seen.
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
        anywhere, moved = np.zeros(top), np.zeros(top)
        if self.share:
            anywhere[:largest] = 0.5 / np.arange(1, largest + 1) / (1.0 / np.arange(1, largest + 1)).sum()
            powers = 1 << np.arange(largest.bit_length())
            anywhere[powers - 1] += 0.5 / len(powers)
        if self.drift:
            shifted = np.maximum(np.rint(np.outer(_FACTORS, sizes)), 1).astype(np.int64).ravel()
            reached = shifted <= top
            counts = np.bincount(shifted[reached], np.tile(weights, len(_FACTORS))[reached], top + 1)[1:]
            moved = counts / counts.sum()
        return (1.0 - self.share - self.drift) * seen + self.share * anywhere + self.drift * moved


def reach(candidates: Ints, regret: float) -> Ints:
    """How far above 0 and each of ``candidates`` the next graph may lie for the guard of ``regret``; it rises.

    Between graphs ``d`` apart, padding at a size ``n`` is ``(d - 1) / (2 n)`` on average; so ``d`` may be
    ``2 n * regret`` more than the steps between vLLM's sizes there (the mean of two, so that graphs need not be its
    own).
    """
    sizes = np.concatenate([[0], candidates])
    steps = np.array(named_sizes("vllm", max(int(sizes[-1]), 16)))
    gaps = np.diff(steps, prepend=0)
    after = np.searchsorted(steps, sizes + 1)
    here, above = (gaps[np.minimum(at, len(gaps) - 1)] for at in (after, after + 1))
    far = np.maximum.accumulate(np.floor(sizes + (here + above) / 2 + 2 * regret * sizes).astype(np.int64))
    for limit in 2 ** np.arange(_FIRST_LIMIT, int(sizes[-1]).bit_length()):
        far[sizes < limit] = np.minimum(far[sizes < limit], limit)
    return far
