"""``plan_capture_grid``: combinations of batch size and sequence length to capture, for traffic that varies in both.

The plan is made of shelves: the lengths are cut into ranges, and each range has batch sizes of its own, at its longest
length. All products of some lengths with some batch sizes are such plans. The best one is found exactly, by dynamic
programming: for each range of lengths the best batch sizes of every number, and then the best cuts. The search leaves
out of account that a graph of another shelf may serve a call faster still. How much better any set could be is bounded:
a graph of ``b x s`` tokens serves no call of more. So the optimum for numbers of tokens alone, which ``optimise`` has,
is a proved lower bound.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError, shown
from ..modes import CUDAGraphMode
from .cost import CostModel
from .optimum import optimise
from .problem import Budgets, ModeProblem
from .traffic import LARGEST_STEP, Floats, Ints

__all__ = ["GridEvaluation", "GridPlan", "plan_capture_grid"]

_MOST_CANDIDATES = 48  # lengths, and batch sizes
_MOST_GRAPHS = 64
_PRICES = 24  # that are tried until the plan fits budgets other than the number of graphs


class _Traffic(NamedTuple):
    """How often calls of each batch size and length come, as arrays of the same length; weights add up to 1."""

    batches: Ints
    lengths: Ints
    weights: Floats

    @property
    def cells(self) -> Ints:
        return self.batches * self.lengths


@dataclass(frozen=True)
class GridEvaluation:
    """What a plan comes to on traffic; shares are of its calls, times are means over its calls. ``padding`` is padding
    tokens as a share of all tokens that graphs compute."""

    graphs: int
    hit_rate: float
    padding: float
    step_ms: float
    eager_ms: float
    capture_ms: float
    memory: float

    def __str__(self) -> str:
        return (
            f"{self.graphs} graphs serve {100 * self.hit_rate:.1f} % of calls with {100 * self.padding:.1f} % padding; "
            f"{self.step_ms:.3f} ms a call ({self.eager_ms:.3f} ms eagerly); captures {self.capture_ms / 1e3:.1f} s, "
            f"{self.memory / 2**20:.0f} MiB"
        )


@dataclass(frozen=True)
class GridPlan:
    """The combinations ``(batch size, length)`` to capture; ``graphed`` takes it as ``sizes``. Immutable plain data.

    ``expected_ms`` is the mean time of a call of the traffic that it was made for. ``bound_ms`` is proved: no set of
    combinations within the budgets is faster. Both are 0.0 for a plan that nobody optimised.
    """

    points: tuple[tuple[int, int], ...]
    cost: CostModel
    expected_ms: float = 0.0
    bound_ms: float = 0.0

    @property
    def gap(self) -> float:
        """How much faster another set could be at most, as a share of the time of a call."""
        return max(0.0, 1.0 - self.bound_ms / self.expected_ms) if self.expected_ms else math.inf

    @classmethod
    def of(cls, batches: Sequence[int], lengths: Sequence[int], cost: CostModel | None = None) -> "GridPlan":
        """All combinations of some batch sizes and lengths, to compare a plan with."""
        return cls(tuple(product(batches, lengths)), cost or CostModel.default())

    def evaluate(self, traffic: Any) -> GridEvaluation:
        """What the combinations come to on traffic, as ``plan_capture_grid`` takes it. A call runs in the graph of the
        fewest tokens that has room for it, or eagerly where none has."""
        seen, costs = _read(traffic), self.cost.graphs(CUDAGraphMode.FULL)
        served = _served_by(self.points, seen)
        eager_ms, is_hit = self.cost.eager_ms.at(seen.cells), served > 0
        step_ms = np.where(is_hit, costs.step_ms.at(np.maximum(served, 1)), eager_ms)
        tokens = float(seen.weights @ served)
        sizes = np.array([batch * length for batch, length in self.points], np.int64)
        pool = float(costs.pool_bytes.at(sizes).max(initial=0.0))
        return GridEvaluation(
            graphs=len(self.points),
            hit_rate=float(seen.weights @ is_hit),
            padding=1.0 - float(seen.weights[is_hit] @ seen.cells[is_hit]) / tokens if tokens else 0.0,
            step_ms=float(seen.weights @ step_ms),
            eager_ms=float(seen.weights @ eager_ms),
            capture_ms=float(costs.capture_ms.at(sizes).sum()),
            memory=float(costs.graph_bytes.at(sizes).sum()) + pool,
        )


def plan_capture_grid(
    traffic: Iterable[tuple[int, int]] | Mapping[tuple[int, int], float],
    cost: CostModel | None = None,
    *,
    max_graphs: int = 12,
    memory: float | None = None,
    capture_time: float | None = None,
) -> GridPlan:
    """The combinations of batch size and length with the least expected time of a call, within all budgets at once.

    ``traffic`` are the calls, as pairs of batch size and length, or how often each pair comes. ``cost`` says what they,
    captures and memory cost by the number of tokens, the product (default: ``CostModel.default()``). ``max_graphs``,
    ``memory`` in bytes and ``capture_time`` in seconds limit all graphs together. It plans for what was seen alone.

    Exact among plans of shelves (see the module) at up to 48 different batch sizes and lengths; of more, 48 of each are
    candidates. ``GridPlan.gap`` bounds how much better any other set could be. Takes about a second for 48 of each.
    Raises ``ConfigError`` for bad arguments, and for budgets that no graph fits.
    """
    cost, seen = cost or CostModel.default(), _read(traffic)
    if not isinstance(cost, CostModel):
        raise ConfigError(f"cost must be a CostModel or None, got {shown(cost)}; CostModel.of() makes one of numbers")
    if isinstance(max_graphs, bool) or not isinstance(max_graphs, int) or not 1 <= max_graphs <= _MOST_GRAPHS:
        raise ConfigError(f"max_graphs must be an integer from 1 to {_MOST_GRAPHS}, got {shown(max_graphs)}")
    for name, amount in (("memory", memory), ("capture_time", capture_time)):
        if amount is not None and (isinstance(amount, bool) or not isinstance(amount, int | float) or not amount > 0):
            raise ConfigError(f"{name} must be a number above 0 or None, got {shown(amount)}")
    budgets = Budgets(
        max_graphs,
        math.inf if capture_time is None else 1e3 * capture_time,
        math.inf if memory is None else float(memory),
    )
    shelves, best = _Shelves(seen, cost, budgets), None
    low, high, price = 0.0, math.inf, 0.0
    for _ in range(_PRICES):
        plan = GridPlan(_used(shelves.best(price), seen), cost)
        found = plan.evaluate(seen)
        fits = found.capture_ms <= budgets.capture_ms and found.memory <= budgets.memory
        if fits and plan.points and (best is None or found.step_ms < best[1]):
            best = plan, found.step_ms
        if fits and price == 0.0:
            break
        low, high = (low, price) if fits else (price, high)
        price = (low + high) / 2 if high < math.inf else max(4 * price, found.step_ms / 64)
    if best is None:
        raise ConfigError(
            "the budgets must pay for one graph that is faster than eager, and do not; raise memory or capture_time, "
            "or plan with other costs"
        )
    bound = min(_bound(seen, cost, budgets), best[1])
    return GridPlan(best[0].points, cost, best[1], bound)


def _read(traffic: Any) -> _Traffic:
    if isinstance(traffic, _Traffic):
        return traffic
    counts: dict[tuple[int, int], float] = {}
    pairs = traffic.items() if isinstance(traffic, Mapping) else ((pair, 1.0) for pair in traffic)
    for pair, weight in pairs:
        numbers = tuple(pair) if isinstance(pair, Iterable) and not isinstance(pair, str) else ()
        if len(numbers) != 2 or not all(isinstance(n, int | np.integer) and 1 <= n <= LARGEST_STEP for n in numbers):
            raise ConfigError(f"traffic must hold pairs of batch size and length from 1 on, got {shown(pair)}")
        if not isinstance(weight, int | float | np.number) or not 0 <= weight < math.inf:
            raise ConfigError(f"traffic[{pair!r}] must be how often such calls come, got {shown(weight)}")
        key = int(numbers[0]), int(numbers[1])
        counts[key] = counts.get(key, 0.0) + float(weight)
    total = sum(counts.values())
    if not total:
        raise ConfigError("traffic must hold at least one call, got none")
    batches, lengths = (np.array(column, np.int64) for column in zip(*counts, strict=True))
    return _Traffic(batches, lengths, np.array(list(counts.values())) / total)


def _served_by(points: Sequence[tuple[int, int]], seen: _Traffic) -> Ints:
    """For each kind of call the tokens of the graph that serves it; 0 where none has room."""
    served = np.zeros(len(seen.weights), np.int64)
    for batch, length in sorted(points, key=lambda point: -point[0] * point[1]):
        served[(seen.batches <= batch) & (seen.lengths <= length)] = batch * length
    return served


def _used(points: Sequence[tuple[int, int]], seen: _Traffic) -> tuple[tuple[int, int], ...]:
    """The points by which some call is served."""
    served = set(_served_by(points, seen).tolist())
    return tuple(sorted(point for point in points if point[0] * point[1] in served))


def _bound(seen: _Traffic, cost: CostModel, budgets: Budgets) -> float:
    """The least time of a call of any set of graphs within the budgets, if a graph could serve all calls of as many
    tokens or fewer."""
    cells, places = np.unique(seen.cells, return_inverse=True)
    costs = cost.graphs(CUDAGraphMode.FULL)
    problem = ModeProblem(
        mode=CUDAGraphMode.FULL,
        sizes=cells,
        weights=np.bincount(places, seen.weights).astype(np.float64),
        eager_ms=cost.eager_ms.at(cells),
        candidates=cells,
        graph_ms=costs.step_ms.at(cells),
        capture_ms=costs.capture_ms.at(cells),
        graph_bytes=costs.graph_bytes.at(cells),
        pool_bytes=costs.pool_bytes.at(cells),
        least=np.zeros(len(cells) + 1, np.int64),
    )
    found = optimise([problem], budgets)
    return found.bound if found is not None else 0.0


class _Shelves:
    """Finds the best plan of shelves at a price for what graphs take of the budgets."""

    def __init__(self, seen: _Traffic, cost: CostModel, budgets: Budgets) -> None:
        self._batches, self._lengths = _candidates(seen.batches), _candidates(seen.lengths)
        at = np.searchsorted(self._batches, seen.batches), np.searchsorted(self._lengths, seen.lengths)
        shape = len(self._batches), len(self._lengths)
        weights, eager = np.zeros(shape), np.zeros(shape)
        np.add.at(weights, at, seen.weights)
        np.add.at(eager, at, seen.weights * cost.eager_ms.at(seen.cells))
        # By number of the first batches and lengths: their weight, and their eager time.
        self._weights, self._eager = (np.pad(one, ((1, 0), (1, 0))).cumsum(0).cumsum(1) for one in (weights, eager))
        cells, costs = np.outer(self._batches, self._lengths), cost.graphs(CUDAGraphMode.FULL)
        self._step_ms = costs.step_ms.at(cells)
        taken = costs.capture_ms.at(cells) / budgets.capture_ms + costs.graph_bytes.at(cells) / budgets.memory
        self._taken = taken
        self._fits = costs.graph_bytes.at(cells) + costs.pool_bytes.at(cells) <= budgets.memory
        self._most = int(min(budgets.graphs, cells.size))

    def best(self, price: float) -> list[tuple[int, int]]:
        """The points of the best plan, if what a graph takes of the budgets costs ``price`` for the whole of them."""
        fixed = np.where(self._fits, price * self._taken, math.inf)
        count, most = len(self._lengths), self._most
        least = np.full((count + 1, most + 1), math.inf)
        least[0, 0] = 0.0
        chosen: dict[tuple[int, int], tuple[int, int, list[int]]] = {}
        for end in range(1, count + 1):
            for begin in range(end):
                costs, sizes = self._shelf(begin, end, fixed[:, end - 1])
                for number, cost in enumerate(costs):
                    total = least[begin, : most + 1 - number] + cost
                    better = np.flatnonzero(total < least[end, number:] - 1e-15)
                    for before in better.tolist():
                        least[end, before + number] = total[before]
                        chosen[end, before + number] = begin, before, sizes[number]
        points, end, number = [], count, int(least[count].argmin())
        while end:
            begin, number_before, sizes_of = chosen[end, number]
            points += [(int(self._batches[size]), int(self._lengths[end - 1])) for size in sizes_of]
            end, number = begin, number_before
        return points

    def _shelf(self, begin: int, end: int, fixed: Floats) -> tuple[list[float], list[list[int]]]:
        """By number of graphs, the least time of the calls of lengths from ``begin`` to before ``end``, all padded to
        the last of these, and the batch sizes (by place) that give it. Batches above the largest run eagerly."""
        weight = self._weights[:, end] - self._weights[:, begin]
        eager = self._eager[:, end] - self._eager[:, begin]
        step, count = self._step_ms[:, end - 1], len(self._batches)
        # By first batch that it serves and by size: what a graph costs.
        cost = (weight[None, 1:] - weight[:-1, None]) * step[None] + fixed[None]
        cost[np.tril_indices(count, -1)] = math.inf
        rest = eager[-1] - eager[1:]
        least, before = np.full(count + 1, math.inf), []
        least[0] = 0.0
        costs: list[float] = [float(eager[-1])]
        sizes: list[list[int]] = [[]]
        for number in range(1, min(self._most, count) + 1):
            totals = least[:-1, None] + cost
            before.append(totals.argmin(0))
            least = np.concatenate([[math.inf], totals.min(0)])
            last = int((least[1:] + rest).argmin())
            if not math.isfinite(least[1:][last]):
                break
            costs.append(float(least[1:][last] + rest[last]))
            path, place = [], last
            for level in reversed(range(number)):
                path.append(place)
                place = int(before[level][place]) - 1
            sizes.append(path)
        return costs, sizes


def _candidates(values: Ints) -> Ints:
    """The different values; of too many, some that are as far apart as can be in their order, with the largest."""
    distinct = np.unique(values)
    if len(distinct) > _MOST_CANDIDATES:
        distinct = distinct[np.unique(np.linspace(0, len(distinct) - 1, _MOST_CANDIDATES).round().astype(np.int64))]
    return distinct
