"""Re-planning while serving: recent traffic, measured costs, and whether other sizes would pay for their captures.

These are pure decisions over plain data. The graph of the next larger size serves every batch up to the largest size.
So eager times do not matter here: a size is worth the padding that it saves.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from ..errors import ConfigError
from ..modes import CUDAGraphMode
from .cost import CostModel, Curve, GraphCosts
from .planner import plan_capture_sizes
from .prior import Prior
from .traffic import Floats, Ints
from .workload import Workload

__all__ = ["GraphFigures", "LiveTraffic", "Verdict", "graphs_of", "measured_cost", "replan"]

_LEAST_WEIGHT = 1e-6


class LiveTraffic:
    """How often each size came. A step weighs half as much after every ``half_life_steps``.

    It reads counters that a callable keeps anyway, and that only grow. ``start`` is the weight of steps by size to
    begin with. Not thread-safe.
    """

    def __init__(self, half_life_steps: float, start: Mapping[int, float] | None = None) -> None:
        if isinstance(half_life_steps, bool) or not 0 < half_life_steps < np.inf:
            raise ConfigError(f"half_life_steps must be a finite number above 0, got {half_life_steps!r}")
        self.half_life_steps = half_life_steps
        self.weights: dict[int, float] = dict(start or {})
        """The weight of steps by size; the latest step weighs 1."""
        self._counted: dict[int, int] = {}

    def update(self, counts: Mapping[int, int]) -> int:
        """Take in the counters as they are now, ``counts[n]`` steps of ``n`` rows in all; returns how many are new.

        If one fell, they were reset, and everything in them is new.
        """
        before = self._counted
        if any(counts.get(size, 0) < count for size, count in before.items()):
            before = {}
        new = {size: more for size, count in counts.items() if (more := count - before.get(size, 0))}
        self._counted = dict(counts)
        steps = sum(new.values())
        fade = 2.0 ** (-steps / self.half_life_steps)
        faded = {size: weight * fade for size, weight in self.weights.items() if weight * fade > _LEAST_WEIGHT}
        self.weights = faded | {size: faded.get(size, 0.0) + more for size, more in new.items()}
        return steps


class GraphFigures(Protocol):
    """What is asked of a captured graph: its rows, and what it cost."""

    @property
    def size(self) -> int:
        """The rows that it computes."""

    @property
    def capture_time_ms(self) -> float:
        """What its capture took."""

    @property
    def nbytes(self) -> int:
        """Its own bytes."""

    @property
    def avg_replay_time_ms(self) -> float:
        """What a replay takes; 0.0 if none was measured."""


def graphs_of(cost: CostModel) -> tuple[CUDAGraphMode, GraphCosts]:
    """The mode whose costs decide, FULL if it is known."""
    mode = CUDAGraphMode.FULL if cost.full is not None else CUDAGraphMode.PIECEWISE
    return mode, cost.graphs(mode)


def measured_cost(base: CostModel, graphs: Iterable[GraphFigures]) -> CostModel:
    """``base`` with measured values in place of its own: captures and bytes, and replays if two sizes were measured.

    If a size has several graphs, capturing it costs the sum of what they took.
    """
    capture_ms: dict[int, float] = {}
    graph_bytes: dict[int, float] = {}
    replays: dict[int, list[float]] = {}
    for graph in graphs:
        capture_ms[graph.size] = capture_ms.get(graph.size, 0.0) + graph.capture_time_ms
        graph_bytes[graph.size] = graph_bytes.get(graph.size, 0.0) + graph.nbytes
        if graph.avg_replay_time_ms:
            replays.setdefault(graph.size, []).append(graph.avg_replay_time_ms)
    if not capture_ms:
        return base
    mode, costs = graphs_of(base)
    found = {"capture_ms": Curve.of(capture_ms, "capture_ms"), "graph_bytes": Curve.of(graph_bytes, "graph_bytes")}
    if len(replays) > 1:
        found["step_ms"] = Curve.of({size: sum(each) / len(each) for size, each in replays.items()}, "step_ms")
    return base.model_copy(update={mode.name.lower(): costs.model_copy(update=found)})


class Verdict(NamedTuple):
    """The result of re-planning: the sizes to use from now on, or None to keep those in use; and why.

    ``saving_ms`` is the expected saving of a step, in milliseconds; ``captures`` are the sizes that must get a graph,
    the most used first.
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
    without: Collection[int] = (),
    prior: float | Prior = 0.02,
) -> Verdict:
    """Whether at most ``max_graphs`` other sizes than ``sizes`` would save more than capturing them costs.

    ``traffic`` is the weight of steps by size. ``ready`` are the sizes that have graphs and cost nothing more. Any
    other size must save the time of its capture within ``horizon_steps`` steps. The result is exactly the best choice
    among the sizes in use, the ready ones and those of a fresh plan, so that a size is replaced only if that pays by
    itself.
    The largest of ``sizes`` always stays, so that as many steps are served as before. Sizes in ``without`` are neither
    captured nor added. ``prior`` says what is expected beyond the traffic.
    """
    top = sizes[-1]
    served = {size: weight for size, weight in traffic.items() if size <= top and weight > 0}
    if not served:
        return Verdict(None, f"no step of at most {top} rows was seen")
    prior, seen = Prior.of(prior), Workload.from_histogram(served)
    mode, costs = graphs_of(cost)
    never = Curve.of(1.0 + 2.0 * float(costs.step_ms.at(top)), "eager_ms")
    fresh = plan_capture_sizes(
        seen,
        cost.model_copy(update={"eager_ms": never}),
        max_graphs=max_graphs,
        max_size=top,
        prior=prior,
        mode=mode,
    )
    allowed = {*sizes, *(size for size in ready if size <= top), *set(fresh.sizes).difference(without)}
    candidates = np.array(sorted(allowed), np.int64)
    expected = prior.expected(seen.sizes, seen.counts, top)
    prices = np.where(np.isin(candidates, list(ready)), 0.0, costs.capture_ms.at(candidates) / horizon_steps)
    chosen = _cheapest(candidates, expected, costs.step_ms.at(candidates), prices, max_graphs)
    if chosen == sizes:
        return Verdict(None, "no other sizes save what their captures cost")
    saving = _mean_ms(sizes, expected, costs.step_ms) - _mean_ms(chosen, expected, costs.step_ms)
    use = dict(zip(chosen, np.add.reduceat(expected, (0, *chosen[:-1])).tolist(), strict=True))
    captures = sorted(set(chosen).difference(ready, without), key=lambda size: (-use[size], size))
    return Verdict(chosen, f"a step is expected to change by {-saving:+.3g} ms", saving, tuple(captures))


def _cheapest(candidates: Ints, expected: Floats, graph_ms: Floats, prices: Floats, max_graphs: int) -> tuple[int, ...]:
    """At most ``max_graphs`` of ``candidates``, with the last of them, that have the least sum of step time and prices.

    This is the shortest path from 0 to the last candidate, over all numbers of graphs.
    """
    ends = np.concatenate([[0], candidates])
    weight = np.concatenate([[0.0], np.cumsum(expected)])[ends]
    costs = graph_ms * (weight[1:] - weight[:, None]) + prices
    costs[ends[:, None] >= candidates] = np.inf
    least = np.concatenate([[0.0], np.full(len(candidates), np.inf)])
    before: list[Ints] = []
    totals: list[float] = []
    for _ in range(min(max_graphs, len(candidates))):
        ways = least[:, None] + costs
        before.append(ways.argmin(axis=0))
        least = np.concatenate([[np.inf], ways.min(axis=0)])
        totals.append(float(least[-1]))
    path = [len(candidates)]
    for step in range(int(np.argmin(totals)), 0, -1):
        path.append(int(before[step][path[-1] - 1]))
    return tuple(int(ends[graph]) for graph in reversed(path))


def _mean_ms(sizes: tuple[int, ...], expected: Floats, step_ms: Curve) -> float:
    """The expected time of a step if the graphs of ``sizes`` serve all of them."""
    nearest = np.searchsorted(sizes, np.arange(1, sizes[-1] + 1))
    return float(expected @ step_ms.at(sizes)[nearest])
