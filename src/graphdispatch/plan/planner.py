"""``plan_sizes``: the sizes with the least expected step time within the limits.

With one dynamic dimension, a set of sizes is a path upwards: the steps between two sizes run in the graph of the larger
one. So the best set of each number of sizes is a shortest path, which a textbook table finds exactly. With several, the
size that saves most is added until the limits are reached, and then sizes are swapped while that helps.
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config import parse_mode
from ..errors import ConfigError
from ..modes import CUDAGraphMode
from ..sizes import named_sizes
from .cost import CostModel
from .plan import Plan, weights_by_mode
from .workload import LARGEST_SIZE, Floats, Ints, Shape, Workload

__all__ = ["plan_sizes"]

_MOST_CANDIDATES = 1024  # sizes of one dimension
_MOST_POINTS = 1600  # combinations of sizes of several dimensions
_SMALL = (1, 2, 4, 8)
_FACTORS = np.geomspace(0.25, 4.0, 31)
_NEARNESS = 1 - np.abs(np.log(_FACTORS)) / math.log(4.0)
_ANYWHERE = 0.02
_PRICES = (0.0, *np.geomspace(1e-4, 1.0, 12))


def plan_sizes(
    workload: Workload,
    cost: CostModel | None = None,
    *,
    max_graphs: int | None = None,
    memory: float | None = None,
    capture_time: float | None = None,
    max_size: int | None = None,
    multiple_of: int = 1,
    smoothing: float = 0.7,
    mode: str | CUDAGraphMode = CUDAGraphMode.FULL,
) -> Plan:
    """The plan with the least expected step time for a workload, within all limits at once.

    With one dimension it is an exact optimum for the smoothed traffic, if all graphs cost the same memory and time and
    there are at most 1,024 candidates; of more, the most frequent and an even grid are candidates. Else it is a good
    plan, never one beyond a limit.

    Args:
        workload: The traffic to expect.
        cost: What steps and graphs cost. By default ``CostModel.default()``.
        max_graphs: The most graphs, of all modes together. Without any of the first three limits, as many as vLLM has
            sizes.
        memory: The most bytes of all graphs and their pool.
        capture_time: The most seconds of all captures.
        max_size: The most tokens of a graph. By default those of the largest step.
        multiple_of: Every size is a multiple of this, in each dimension.
        smoothing: The share of the steps, from 0 to below 1, that may come with up to four times smaller or larger
            sizes than were seen; it applies to one dimension. Traffic moves, and a plan for exactly what was seen
            breaks then: so the sizes 1, 2, 4, 8 and the largest have graphs, too, as far as the limits leave most of
            them for the others. 0 plans for exactly the workload.
        mode: The configured mode. One that tells uniform decode from other steps gets sizes for each.

    Raises:
        ConfigError: If an argument is wrong, or the limits leave room for no graph.
    """
    for name, given, kind in (("workload", workload, Workload), ("cost", cost, CostModel | None)):
        if not isinstance(given, kind):
            raise ConfigError(f"{name} must be a {kind}, got {reprlib.repr(given)}")
    cost, mode = cost or CostModel.default(), parse_mode(mode)
    step = _whole("multiple_of", multiple_of)
    top = workload.largest + -workload.largest % step if max_size is None else _whole("max_size", max_size)
    if not 0 <= smoothing < 1 - _ANYWHERE:
        raise ConfigError(f"smoothing must be a share from 0 to below {1 - _ANYWHERE}, got {smoothing!r}")
    if top < step:
        raise ConfigError(f"max_size must be at least multiple_of={step}, got {max_size}")
    if max_graphs is None and memory is None and capture_time is None:
        max_graphs = len(named_sizes("vllm", min(top, LARGEST_SIZE)))
    limits = _Limits(
        math.inf if max_graphs is None else _whole("max_graphs", max_graphs),
        math.inf if capture_time is None else 1e3 * _amount("capture_time", capture_time),
        math.inf if memory is None else _amount("memory", memory),
    )
    weights = {kind: each for kind, each in weights_by_mode(mode, workload).items() if kind.has_graphs() and each.any()}
    if not weights:
        raise ConfigError(f"mode must have graphs for the steps of the workload, got {mode.name}")
    shapes = workload.histogram[0]
    if shapes.shape[1] == 1:
        graphs = _shortest_path(shapes[:, 0], weights, cost, limits, top // step * step, step, smoothing)
    else:
        graphs = _greedy(shapes, weights, cost, limits, top, step)
    return Plan(mode=mode, graphs=graphs)


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ConfigError(f"{name} must be an integer >= 1, got {value!r}")
    return int(value)


def _amount(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a finite number above 0, got {value!r}")
    return float(value)


class _Limits(NamedTuple):
    """The most that all graphs together may take."""

    graphs: float
    capture_ms: float
    memory: float

    def allow(self, spent: Floats) -> NDArray[np.bool_]:
        """Whether capture times, graph bytes and pool bytes, by row, are within the limits."""
        slack = 1 + 1e-9
        within: NDArray[np.bool_] = (spent[0] <= self.capture_ms * slack) & (spent[1] + spent[2] <= self.memory * slack)
        return within

    def shares(self, own: Floats) -> Floats:
        """What each graph takes of the limits."""
        shares: Floats = own[0] / self.capture_ms + own[1] / self.memory
        return shares


class _Candidates(NamedTuple):
    """The graphs that may be captured: their modes and points, their step times, and what they take of the limits."""

    modes: tuple[CUDAGraphMode, ...]
    points: Ints
    step_ms: Floats
    own: Floats

    @classmethod
    def of(cls, points: Mapping[CUDAGraphMode, Ints], cost: CostModel) -> "_Candidates":
        """Those of each mode, one mode after the other."""
        tokens = {mode: each.prod(1) for mode, each in points.items()}
        every = np.concatenate(list(tokens.values()))
        return cls(
            tuple(mode for mode, each in points.items() for _ in each),
            np.concatenate(list(points.values())),
            np.concatenate([cost.step_ms(mode, each) for mode, each in tokens.items()]),
            np.array([cost.at(name, every) for name in ("capture_ms", "graph_bytes", "pool_bytes")]),
        )

    def chosen(self, indices: Sequence[int], limits: _Limits) -> dict[CUDAGraphMode, tuple[Shape, ...]]:
        """The sizes by mode. Raises ``ConfigError`` if the limits allow no candidate."""
        if not limits.allow(self.own).any():
            raise ConfigError(
                "the limits must leave room for a graph: the smallest takes "
                f"{self.own[1:].sum(0).min():.0f} bytes and {self.own[0].min() / 1e3:g} s; raise memory or capture_time"
            )
        points = [(self.modes[index], tuple(self.points[index].tolist())) for index in indices]
        sizes: dict[CUDAGraphMode, tuple[Shape, ...]] = {}
        for mode, point in sorted(points):
            sizes[mode] = (*sizes.get(mode, ()), point if len(point) > 1 else point[0])
        return sizes


def _shortest_path(
    sizes: Ints,
    weights: Mapping[CUDAGraphMode, Floats],
    cost: CostModel,
    limits: _Limits,
    top: int,
    step: int,
    smoothing: float,
) -> dict[CUDAGraphMode, tuple[Shape, ...]]:
    """The best sizes of one dimension. The sizes of several modes are one path: each mode goes on where one ended."""
    total = sum(float(each.sum()) for each in weights.values())
    expected = {mode: _expected(sizes, each / total, top, smoothing) for mode, each in weights.items()}
    eager = cost.at("eager_ms", np.arange(top + 1))
    points = {mode: _thinned(each, step, _MOST_CANDIDATES // len(weights)) for mode, each in expected.items()}
    found = _Candidates.of({mode: each[:, None] for mode, each in points.items()}, cost)
    weight, time, begins, kept = np.zeros(1), np.zeros(1), [], []
    for mode, each in points.items():
        begin = len(weight) - 1
        begins += [begin] * len(each)
        weight = np.concatenate([weight, weight[-1] + expected[mode].cumsum()[each]])
        time = np.concatenate([time, time[-1] + (expected[mode] * eager).cumsum()[each]])
        if smoothing:
            small = _SMALL[: int(min(limits.graphs, top) / (4 * len(points)))]
            faster = np.flatnonzero(cost.step_ms(mode, each) < eager[each])
            kept += [begin + 1 + index for index in {*np.flatnonzero(np.isin(each, small)), *faster[-1:]}]
    table = _Table.of(weight, time, np.array(begins), found, limits)
    best = table.best(kept) or table.best(())
    return found.chosen(best or (), limits)


def _expected(sizes: Ints, weights: Floats, top: int, smoothing: float) -> Floats:
    """The weight of the steps of each size from 0 to ``top``, with a share of them moved to other sizes."""
    seen = np.bincount(np.minimum(sizes, top + 1), weights, top + 2)[: top + 1]
    if not smoothing or not seen.any():
        return seen
    moved, every = np.zeros(top + 1), np.arange(1, top + 1)
    for factor, nearness in zip(_FACTORS, _NEARNESS, strict=True):
        to = np.maximum(np.rint(every * factor), 1).astype(np.int64)
        moved += np.bincount(to[to <= top], nearness * seen[1:][to <= top], top + 1)
    anywhere = np.concatenate([[0.0], 1 / every])
    parts = ((1 - smoothing - _ANYWHERE, seen), (smoothing, moved), (_ANYWHERE, anywhere))
    expected: Floats = seen.sum() * sum(share * part / part.sum() for share, part in parts)
    return expected


def _thinned(expected: Floats, step: int, most: int) -> Ints:
    """The candidates: all multiples of ``step``, or of too many the most frequent and an even grid."""
    every = np.arange(step, len(expected), step)
    if len(every) <= most:
        return every
    served = np.diff(expected.cumsum()[every], prepend=0.0)
    grid = np.linspace(0, len(every) - 1, most // 2).round().astype(np.int64)
    return every[np.union1d(np.argsort(-served, kind="stable")[: most // 2], grid)]


class _Table(NamedTuple):
    """What each candidate costs after each other one, as the next larger graph; 0 is the start."""

    cost: Floats
    rest: Floats
    own: Floats
    limits: _Limits

    @classmethod
    def of(cls, weight: Floats, time: Floats, begins: Ints, found: _Candidates, limits: _Limits) -> "_Table":
        """The table of running weights and eager times. Steps of a mode above its last graph run eagerly."""
        count = len(begins)
        after = np.maximum(np.arange(count + 1)[:, None], begins)
        cost = found.step_ms * (weight[1:] - weight[after]) + time[after] - time[:, None]
        cost[np.tril_indices(count + 1, -1, count)] = np.inf
        return cls(cost, time[-1] - time, found.own, limits)

    def best(self, kept: Sequence[int]) -> tuple[int, ...] | None:
        """The candidates of the best path within the limits that leaves out none of ``kept``; None if there is none."""
        table = self._replace(cost=self.cost.copy(), rest=self.rest.copy())
        for place in kept:
            table.cost[:place, place:] = table.rest[:place] = np.inf
        # Where graphs differ in what they take, a price for that finds sets that take less.
        prices = _PRICES if np.ptp(self.own[:2], axis=1).any() else _PRICES[:1]
        least, path = min((table._cheapest(price * self.rest[0]) for price in prices), key=lambda found: found[0])
        return path if math.isfinite(least) else None

    def _cheapest(self, price: float) -> tuple[float, tuple[int, ...]]:
        """The best path by step time and ``price`` for what graphs take, of those within the limits; and its time."""
        count = self.cost.shape[1]
        priced = self.cost + price * self.limits.shares(self.own)
        found = (float(self.rest[0]), 0, 0)
        least, time, spent = np.full(count + 1, np.inf), np.zeros(count + 1), np.zeros((3, count + 1))
        least[0] = 0.0
        before: list[Ints] = []
        while len(before) < min(self.limits.graphs, count):
            ways = least[:, None] + priced
            at = ways.argmin(0)
            before.append(at)
            least = np.append(np.inf, ways[at, np.arange(count)])
            time = np.append(np.inf, time[at] + self.cost[at, np.arange(count)])
            sums, pool = spent[:2, at] + self.own[:2], np.maximum(spent[2, at], self.own[2])
            spent = np.concatenate([np.zeros((3, 1)), np.vstack([sums, pool])], axis=1)
            total = np.where(self.limits.allow(spent), time + self.rest, np.inf)
            end = int(total.argmin())
            if total[end] < found[0] * (1 - 1e-12) or (math.isinf(found[0]) and math.isfinite(total[end])):
                found = (float(total[end]), len(before), end)
            if not np.isfinite(least).any() or not self.limits.allow(spent)[1:].any():
                break
        best, level, end = found
        path = []
        for places in reversed(before[:level]):
            path.append(end - 1)
            end = int(places[end - 1])
        return best, tuple(path)


def _greedy(
    shapes: Ints, weights: Mapping[CUDAGraphMode, Floats], cost: CostModel, limits: _Limits, top: int, step: int
) -> dict[CUDAGraphMode, tuple[Shape, ...]]:
    """Good combinations of sizes of several dimensions. Every shape counts as the next candidate in each dimension."""
    most = int((_MOST_POINTS / len(weights)) ** (1 / shapes.shape[1]))
    axes = [_spread(column + -column % step, most) for column in shapes.T]
    cells = np.stack([axis[np.searchsorted(axis, column)] for axis, column in zip(axes, shapes.T, strict=True)], axis=1)
    kinds, index = np.unique(cells, axis=0, return_inverse=True)
    eager = cost.at("eager_ms", shapes.prod(1))
    points = np.array([point for point in product(*axes) if math.prod(point) <= top])
    if not len(points):
        raise ConfigError(f"max_size must leave room for a graph of some steps, got {top}")
    found = _Candidates.of(dict.fromkeys(weights, points), cost)
    fits = (points[:, None] >= kinds).all(2)
    count = len(kinds) * len(weights)
    price, weight, without = np.full((len(found.modes), count), np.inf), np.zeros(count), np.zeros(count)
    for number, each in enumerate(weights.values()):
        rows, columns = (slice(number * len(one), (number + 1) * len(one)) for one in (points, kinds))
        price[rows, columns] = np.where(fits, found.step_ms[rows, None], np.inf)
        weight[columns] = np.bincount(index.ravel(), each, len(kinds))
        without[columns] = np.bincount(index.ravel(), each * eager, len(kinds))
    return found.chosen(_swapped(_Search(price, weight, without, found.own, limits)), limits)


def _spread(values: Ints, most: int) -> Ints:
    """The different values; of too many, some that are as often reached as each other, and the largest."""
    distinct = np.unique(values)
    if len(distinct) <= most:
        return distinct
    return np.unique(np.quantile(values, np.linspace(0, 1, most), method="higher"))


class _Search(NamedTuple):
    """The time of a step of each kind by each candidate, infinite where it does not fit, the weights of the kinds, and
    their eager time in all."""

    price: Floats
    weight: Floats
    without: Floats
    own: Floats
    limits: _Limits

    def best(self, chosen: Sequence[int]) -> tuple[float, int]:
        """The least time in all with one candidate more that the limits allow, and the candidate."""
        kept = self.price[list(chosen)].min(0, initial=np.inf)
        ways = np.minimum(self.price, kept)
        fits = np.isfinite(ways)
        time = np.where(fits, ways, 0.0) @ self.weight + ~fits @ self.without
        spent = self.own + np.array([*self.own[:2, list(chosen)].sum(1), 0.0])[:, None]
        spent[2] = np.maximum(spent[2], self.own[2, list(chosen)].max(initial=0.0))
        time = np.where(self.limits.allow(spent), time, np.inf)
        return float(time.min()), int(time.argmin())


def _swapped(search: _Search) -> list[int]:
    """Candidates added one by one while that helps, then swapped while that helps."""
    chosen: list[int] = []
    least = float(search.without.sum())
    while len(chosen) < search.limits.graphs:
        time, place = search.best(chosen)
        if not time < least * (1 - 1e-9):
            break
        chosen.append(place)
        least = time
    improved = bool(chosen)
    while improved:
        improved = False
        for number in range(len(chosen)):
            time, place = search.best(chosen[:number] + chosen[number + 1 :])
            if time < least * (1 - 1e-9):
                chosen[number], least, improved = place, time, True
    return chosen
