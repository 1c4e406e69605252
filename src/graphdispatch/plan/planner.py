"""``plan_sizes``: the sizes with the least expected step time within the limits.

With one dynamic dimension, a set of sizes is a path upwards: the steps between two sizes run in the graph of the larger
one. So the best set of each number of sizes is a shortest path, which a textbook table finds exactly. With several, the
size that saves most is added until the limits are reached, and then sizes are swapped while that helps.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ..config import parse_mode
from ..errors import ConfigError, check_count, check_type
from ..modes import CUDAGraphMode
from ..sizes import named_sizes
from .cost import CostModel
from .plan import Plan, weights_by_mode
from .workload import LARGEST_SIZE, Floats, Ints, Workload

_MOST_CANDIDATES = 1024  # sizes of one dimension
_MOST_POINTS = 1600  # combinations of sizes of several dimensions
_VLLM_LARGEST = 512
_SMALL = (1, 2, 4, 8)
_FACTORS = np.geomspace(0.25, 4.0, 31)
_NEARNESS = 1 - np.abs(np.log(_FACTORS)) / math.log(4.0)
_ANYWHERE = 0.02

_Chosen = list[tuple[CUDAGraphMode, tuple[int, ...]]]


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
        max_graphs: The most graphs, of all modes together. Without any of the first three limits, as many as vLLM
            captures by default: up to 51.
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
    check_type("workload", workload, Workload, "a Workload, as Workload.from_steps() makes")
    cost = CostModel.default() if cost is None else cost
    check_type("cost", cost, CostModel, "a CostModel or None")
    mode, limits = parse_mode(mode), _Limits.of(max_graphs, memory, capture_time)
    check_count("multiple_of", multiple_of)
    top = workload.largest + -workload.largest % multiple_of if max_size is None else max_size
    check_count("max_size", top, multiple_of)
    if not 0 <= smoothing < 1 - _ANYWHERE:
        raise ConfigError(f"smoothing must be a share from 0 to below {1 - _ANYWHERE}, got {smoothing!r}")
    if limits == _Limits():
        limits = _Limits(len(named_sizes("vllm", min(top, _VLLM_LARGEST))))
    weights = {kind: each for kind, each in weights_by_mode(mode, workload).items() if kind.has_graphs() and each.any()}
    shapes = workload.histogram[0]
    if not weights or (len(weights) > 1 and shapes.shape[1] > 1):
        raise ConfigError(f"mode must have graphs for the steps, and one mode for several dimensions, got {mode.name}")
    if shapes.shape[1] == 1:
        if top > LARGEST_SIZE:
            raise ConfigError(f"max_size must be at most {LARGEST_SIZE} in one dimension, got {top}")
        top = top // multiple_of * multiple_of
        chosen = _shortest_path(shapes[:, 0], weights, cost, limits, top, multiple_of, smoothing)
    else:
        chosen = _greedy(shapes, *weights.popitem(), cost, limits, top, multiple_of)
    graphs: dict[CUDAGraphMode, tuple[int | tuple[int, ...], ...]] = {}
    for kind, point in sorted(chosen):
        graphs[kind] = (*graphs.get(kind, ()), point if len(point) > 1 else point[0])
    return Plan(mode=mode, graphs=graphs)


@dataclass(frozen=True)
class _Limits:
    """The most that all graphs together may take."""

    graphs: float = math.inf
    capture_ms: float = math.inf
    memory: float = math.inf

    @classmethod
    def of(cls, max_graphs: int | None, memory: float | None, capture_time: float | None) -> "_Limits":
        """Those of the options; None is no limit."""
        if max_graphs is not None:
            check_count("max_graphs", max_graphs)
        for name, amount in (("memory", memory), ("capture_time", capture_time)):
            if amount is not None and not (isinstance(amount, (int, float)) and 0 < amount < math.inf):
                raise ConfigError(f"{name} must be a finite number above 0, got {amount!r}")
        return cls(max_graphs or math.inf, 1e3 * (capture_time or math.inf), memory or math.inf)

    def own(self, cost: CostModel, tokens: Floats | Ints) -> Floats:
        """What each graph takes: capture time, bytes of its own, bytes of the pool. One at least must be allowed."""
        own = np.array([cost.at(name, tokens) for name in ("capture_ms", "graph_bytes", "pool_bytes")])
        if not self.allow(own).any():
            needed = f"{own[1:].sum(0).min():.0f} bytes and {own[0].min() / 1e3:g} s"
            raise ConfigError(f"memory and capture_time must leave room for a graph, which takes {needed}; raise them")
        return own

    def allow(self, spent: Floats) -> NDArray[np.bool_]:
        """Whether capture times, bytes of graphs and bytes of the pool, by row, are within the limits."""
        slack = 1 + 1e-9
        allowed: NDArray[np.bool_]
        allowed = (spent[0] <= self.capture_ms * slack) & (spent[1] + spent[2] <= self.memory * slack)
        return allowed


def _shortest_path(
    sizes: Ints,
    weights: Mapping[CUDAGraphMode, Floats],
    cost: CostModel,
    limits: _Limits,
    top: int,
    multiple_of: int,
    smoothing: float,
) -> _Chosen:
    """The best sizes of one dimension. Several modes share one path: each goes on where the one before has ended."""
    eager = cost.at("eager_ms", np.arange(top + 1))
    chosen: _Chosen = []
    begins: list[int] = []  # by candidate, the place where its mode begins
    kept: list[int] = []
    weight, time, step_ms = np.zeros(1), np.zeros(1), np.zeros(0)  # weight and eager time up to each candidate
    for mode, each in weights.items():
        expected, begin = _expected(sizes, each, top, smoothing), len(chosen)
        candidates = _thinned(expected, multiple_of, _MOST_CANDIDATES // len(weights))
        own_ms = cost.step_ms(mode, candidates)
        if smoothing:
            small = _SMALL[: int(min(limits.graphs, top) / (4 * len(weights)))]
            gains = np.flatnonzero(own_ms < eager[candidates])
            kept += [begin + 1 + int(at) for at in gains if candidates[at] in small or at == gains[-1]]
        chosen += [(mode, (int(size),)) for size in candidates]
        begins += [begin] * len(candidates)
        weight = np.append(weight, weight[-1] + expected.cumsum()[candidates])
        time = np.append(time, time[-1] + (expected * eager).cumsum()[candidates])
        step_ms = np.append(step_ms, own_ms)
    after = np.maximum(np.arange(len(chosen) + 1)[:, None], begins)
    table = step_ms * (weight[1:] - weight[after]) + time[after] - time[:, None]
    table[np.tril_indices(len(chosen) + 1, -1, len(chosen))] = np.inf
    own = limits.own(cost, np.array([size for _, (size,) in chosen]))
    path = _cheapest(table, time[-1] - time, own, limits, kept)
    if path is None:
        path = _cheapest(table, time[-1] - time, own, limits, ())
    return [chosen[place] for place in path or ()]


def _cheapest(table: Floats, rest: Floats, own: Floats, limits: _Limits, kept: Sequence[int]) -> list[int] | None:
    """The candidates of the cheapest path within the limits that leaves out none of ``kept``; None if there is none.

    ``table[i, j]`` is the cost of candidate ``j`` after place ``i``, that of candidate ``i - 1`` or the start, and
    ``rest[i]`` the cost of ending there.
    """
    table, rest = table.copy(), rest.copy()
    for place in kept:
        table[:place, place:] = rest[:place] = np.inf
    count = table.shape[1]
    best, levels, end = float(rest[0]), 0, 0
    least, spent = np.append(0.0, np.full(count, np.inf)), np.zeros((3, count + 1))
    before: list[Ints] = []
    while len(before) < min(limits.graphs, count):
        ways = least[:, None] + table
        at = ways.argmin(0)
        before.append(at)
        least[1:], least[0] = ways[at, np.arange(count)], np.inf
        spent[2, 1:] = np.maximum(spent[2, at], own[2])
        spent[:2, 1:] = spent[:2, at] + own[:2]
        allowed = limits.allow(spent) & np.isfinite(least)
        if not allowed.any():
            break
        total = np.where(allowed, least + rest, np.inf)
        if total.min() < best:
            best, levels, end = float(total.min()), len(before), int(total.argmin())
    path: list[int] = []
    for places in reversed(before[:levels]):
        path.append(end - 1)
        end = int(places[end - 1])
    return path if math.isfinite(best) else None


def _expected(sizes: Ints, weights: Floats, top: int, smoothing: float) -> Floats:
    """The weight of the steps of each size from 0 to ``top``, with a share of them moved to other sizes."""
    seen = np.zeros(top + 1)
    np.add.at(seen, sizes[sizes <= top], weights[sizes <= top])
    if not smoothing or not seen.any():
        return seen
    every, moved = np.arange(1, top + 1), np.zeros_like(seen)
    for factor, nearness in zip(_FACTORS, _NEARNESS, strict=True):
        to = np.maximum(np.rint(every * factor), 1).astype(np.int64)
        np.add.at(moved, to[to <= top], nearness * seen[1:][to <= top])
    anywhere = np.append(0.0, 1 / every)
    parts = ((1 - smoothing - _ANYWHERE, seen), (smoothing, moved), (_ANYWHERE, anywhere))
    expected: Floats = seen.sum() * sum(share * part / part.sum() for share, part in parts)
    return expected


def _thinned(expected: Floats, multiple_of: int, most: int) -> Ints:
    """The candidates: all multiples, or of too many the most frequent and an even grid."""
    every = np.arange(multiple_of, len(expected), multiple_of)
    if len(every) <= most:
        return every
    served = np.diff(expected.cumsum()[every], prepend=0.0)
    grid = np.linspace(0, len(every) - 1, most // 2).round().astype(np.int64)
    return every[np.union1d(np.argsort(-served, kind="stable")[: most // 2], grid)]


def _greedy(
    shapes: Ints, mode: CUDAGraphMode, weights: Floats, cost: CostModel, limits: _Limits, top: int, multiple_of: int
) -> _Chosen:
    """Combinations of sizes of several dimensions: added one by one while that helps, then swapped while that helps."""
    most = int(_MOST_POINTS ** (1 / shapes.shape[1]))
    axes = [_spread(column + -column % multiple_of, most) for column in shapes.T]
    # A step counts as one of the next candidate in each dimension, as which every graph would serve it.
    cells = np.stack([axis[np.searchsorted(axis, column)] for axis, column in zip(axes, shapes.T, strict=True)], axis=1)
    kinds, index = np.unique(cells, axis=0, return_inverse=True)
    weight = np.bincount(index.ravel(), weights)
    eager = np.bincount(index.ravel(), weights * cost.at("eager_ms", shapes.prod(1)))
    points = np.array([point for point in product(*axes) if math.prod(point) <= top])
    if not len(points):
        raise ConfigError(f"max_size must leave room for a graph, got {top}")
    tokens = points.prod(1)
    step_ms = np.where((points[:, None] >= kinds).all(2), cost.step_ms(mode, tokens)[:, None], np.inf)
    own = limits.own(cost, tokens)

    def with_one_more(chosen: list[int]) -> tuple[float, int]:
        """The least time with one graph more that the limits allow, and the graph."""
        ways = np.minimum(step_ms, step_ms[chosen].min(0, initial=np.inf))
        served = np.isfinite(ways)
        time = np.where(served, ways, 0.0) @ weight + ~served @ eager
        spent = own + np.append(own[:2, chosen].sum(1), 0.0)[:, None]
        spent[2] = np.maximum(spent[2], own[2, chosen].max(initial=0.0))
        time[~limits.allow(spent)] = np.inf
        return float(time.min()), int(time.argmin())

    chosen: list[int] = []
    least, place = float(eager.sum()), 0
    while len(chosen) < limits.graphs and (found := with_one_more(chosen))[0] < least * (1 - 1e-9):
        least, place = found
        chosen.append(place)
    number, since = 0, 0
    while since < len(chosen):  # until no graph has another that is better in its place
        found = with_one_more(chosen[:number] + chosen[number + 1 :])
        since += 1
        if found[0] < least * (1 - 1e-9):
            (least, chosen[number]), since = found, 0
        number = (number + 1) % len(chosen)
    return [(mode, tuple(points[place].tolist())) for place in chosen]


def _spread(values: Ints, most: int) -> Ints:
    """The different values; of too many, some that are evenly spread among the shapes, with the largest."""
    distinct = np.unique(values)
    if len(distinct) <= most:
        return distinct
    return np.unique(np.quantile(values, np.linspace(0, 1, most), method="higher"))
