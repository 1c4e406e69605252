"""Re-planning while serving: what comes, whether other sizes would pay for their captures, and what graphs cost here.

Decides only, over plain data. A callable serves every batch up to its largest size by the graph of the next size, so
eager times do not matter here: what a size costs is the padding that it leaves, and its capture.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError
from ..modes import CUDAGraphMode
from .cost import CostModel, Curve
from .planner import plan_capture_sizes
from .prior import Prior, reach
from .traffic import Floats, Ints
from .workload import Workload

__all__ = ["GraphFigures", "LiveTraffic", "Verdict", "measured_cost", "replan"]

_LEAST_WEIGHT = 1e-6


class LiveTraffic:
    """How often each size came, older steps weighing less: half as much for every ``half_life_steps``.

    Fed from counters that only grow, so that it costs nothing where they are counted. Not thread-safe.
    """

    def __init__(self, half_life_steps: float, start: Mapping[int, float] | None = None) -> None:
        if isinstance(half_life_steps, bool) or not 0 < half_life_steps < np.inf:
            raise ConfigError(f"half_life_steps must be a finite number above 0, got {half_life_steps!r}")
        self.half_life_steps = half_life_steps
        self.weights: dict[int, float] = dict(start or {})
        """The weight of steps by size."""
        self._seen: dict[int, int] = {}

    def update(self, counts: Mapping[int, int]) -> int:
        """Take in the counters as they are now, ``counts[n]`` steps of ``n`` rows so far; how many are new.

        Counters that fell were set back, and all that they hold is new.
        """
        before = self._seen if all(counts.get(size, 0) >= count for size, count in self._seen.items()) else {}
        new = {size: count - before.get(size, 0) for size, count in counts.items()}
        self._seen = dict(counts)
        steps = sum(new.values())
        if steps:
            fade = 2.0 ** (-steps / self.half_life_steps)
            faded = {size: weight * fade for size, weight in self.weights.items() if weight * fade > _LEAST_WEIGHT}
            self.weights = faded | {size: faded.get(size, 0.0) + count for size, count in new.items() if count}
        return steps


class Verdict(NamedTuple):
    """What re-planning came to.

    ``sizes`` are the sizes to use from now on, None to stay with those in use, for the ``reason``. ``saving_ms`` is the
    expected saving of a step, and ``captures`` are the sizes without a graph, the most used first.
    """

    sizes: tuple[int, ...] | None
    reason: str
    saving_ms: float = 0.0
    captures: tuple[int, ...] = ()


def replan(
    traffic: Mapping[int, float],
    sizes: tuple[int, ...],
    ready: Collection[int],
    cost: CostModel,
    *,
    max_graphs: int,
    horizon_steps: float,
    mode: CUDAGraphMode = CUDAGraphMode.FULL,
    prior: float | Prior = 0.02,
    without: Collection[int] = (),
) -> Verdict:
    """Whether at most ``max_graphs`` other sizes than ``sizes`` would save more than capturing them costs.

    ``traffic`` is the weight of steps by size; ``ready`` are the sizes that have graphs, whose use costs nothing. Every
    other capture must save its time within ``horizon_steps`` steps. The best sizes are found exactly among those in
    use, those ready, and those of a fresh plan, which also says how close graphs must lie for the guard of ``prior``;
    so a size is replaced only if that pays by itself. The largest of ``sizes`` always stays, and none of ``without``
    is captured. ``mode`` is the runtime mode of the graphs in ``cost``.
    """
    top = sizes[-1]
    served = {size: weight for size, weight in traffic.items() if size <= top and weight > 0}
    if not served:
        return Verdict(None, f"no step of at most {top} rows was seen")
    prior = Prior.of(prior)
    costs = cost.graphs(mode)
    seen = Workload.from_histogram(served)
    fresh = plan_capture_sizes(
        seen, _never_eager(cost, mode, top), max_graphs=max_graphs, max_size=top, must_include=(top,), prior=prior, mode=mode
    )
    known = {size for size in (*sizes, *ready) if size <= top}
    candidates = np.array(sorted((known | set(fresh.sizes)) - (set(without) - set(ready)) | {top}), np.int64)
    expected = prior.expected(seen.sizes, seen.counts, top)
    graph_ms, capture_ms = costs.step_ms.at(candidates), costs.capture_ms.at(candidates)
    prices = np.where(np.isin(candidates, list(ready)), 0.0, capture_ms / horizon_steps)
    regret = fresh.proof.regret if fresh.proof is not None else None
    chosen = _cheapest(candidates, expected, graph_ms, prices, max_graphs, regret)
    saving = _mean_ms(sizes, expected, costs.step_ms) - _mean_ms(chosen, expected, costs.step_ms)
    if chosen == sizes:
        return Verdict(None, "no other sizes save what capturing them costs")
    share = {size: float(part.sum()) for size, part in zip(chosen, np.split(expected, chosen[:-1]), strict=False)}
    captures = sorted(set(chosen) - set(ready), key=lambda size: -share[size])
    return Verdict(chosen, f"saves {saving:.4g} ms a step for {len(captures)} captures", saving, tuple(captures))


def _never_eager(cost: CostModel, mode: CUDAGraphMode, top: int) -> CostModel:
    """The same costs of graphs, and eager steps that never win."""
    return cost.model_copy(update={"eager_ms": Curve.of(1.0 + 2.0 * float(cost.graphs(mode).step_ms.at(top)))})


def _cheapest(
    candidates: Ints, expected: Floats, graph_ms: Floats, prices: Floats, max_graphs: int, regret: float | None
) -> tuple[int, ...]:
    """At most ``max_graphs`` of ``candidates``, the last among them, with the least time and prices together.

    A shortest path from 0 to the last candidate for each number of graphs.
    """
    ends = np.concatenate([[0], candidates])
    weight = np.concatenate([[0.0], np.cumsum(expected)])[ends]
    step = graph_ms * (weight[1:] - weight[:, None]) + prices
    step[ends[:, None] >= candidates] = np.inf
    if regret is not None:
        far = np.maximum(reach(candidates, regret), np.concatenate([candidates, candidates[-1:]]))
        step[candidates > far[:, None]] = np.inf
    least = np.concatenate([[0.0], np.full(len(candidates), np.inf)])
    layers: list[Ints] = []
    totals: list[float] = []
    for _ in range(min(max_graphs, len(candidates))):
        options = least[:, None] + step
        layers.append(options.argmin(axis=0))
        least = np.concatenate([[np.inf], options.min(axis=0)])
        totals.append(float(least[-1]))
    path = [len(candidates)]
    for layer in reversed(layers[1 : 1 + int(np.argmin(totals))]):
        path.append(int(layer[path[-1] - 1]))
    return tuple(int(ends[at]) for at in reversed(path))


def _mean_ms(sizes: Collection[int], expected: Floats, step_ms: Curve) -> float:
    """The expected time of a step that the graphs of ``sizes`` serve."""
    steps = np.arange(1, max(sizes) + 1)
    nearest = np.array(sizes)[np.searchsorted(sizes, steps)]
    return float(expected[: len(steps)] @ step_ms.at(nearest))
