"""What is to be planned: the batches and graphs of each runtime mode, the budgets, and solutions with what they cost.

A batch runs in the smallest graph that holds it, or eagerly where that is faster. So a set of sizes is a path from 0
upwards, and the batches in ``(i, j]`` cost ``C(i, j) = sum of w(x) * min(eager(x), graph(j))``. As ``graph`` does not
fall, ``C(a, c) + C(b, d) <= C(a, d) + C(b, c)`` for ``a <= b <= c <= d`` (Monge). So once the larger of two
predecessors is better, it stays better for all larger sizes, and ``cheapest`` keeps the predecessors in a queue, each
with the size from which it is best. That also holds with lower limits on the predecessor (``least``) that do not fall;
``must_include``, ``max_padding`` and the guard against unseen traffic are such limits.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..modes import CUDAGraphMode
from .traffic import Floats, Ints

__all__ = ["ROUNDING", "Budgets", "ModeProblem", "Solution", "Spent", "walk"]

ROUNDING = 1e-9
"""Costs and budgets that differ by less than this share count as equal."""


@dataclass(frozen=True, eq=False)
class ModeProblem:
    """The batches that one runtime mode serves, and the graphs that may be captured for them.

    ``sizes`` and ``weights`` are of the batches, ``eager_ms`` their eager times; ``candidates`` may be captured, with
    ``graph_ms``, ``capture_ms``, ``graph_bytes`` and ``pool_bytes`` by candidate. Graphs are numbered from 1, and 0 is
    the start of a path. ``least[j]`` is the smallest predecessor of graph ``j``, ``last`` the smallest last graph.
    """

    mode: CUDAGraphMode
    sizes: Ints
    weights: Floats
    eager_ms: Floats
    candidates: Ints
    graph_ms: Floats
    capture_ms: Floats
    graph_bytes: Floats
    pool_bytes: Floats
    least: Ints
    last: int = 0

    def upto(self, count: int) -> "ModeProblem":
        """The same with only the first ``count`` candidates."""
        if count == len(self.candidates):
            return self
        cut = {name: getattr(self, name)[:count] for name in _BY_CANDIDATE}
        return replace(self, **cut, least=self.least[: count + 1])

    @cached_property
    def ends(self) -> Ints:
        """By graph, how many of the batches it is large enough for."""
        return np.concatenate([[0], np.searchsorted(self.sizes, self.candidates, side="right")])

    @cached_property
    def splits(self) -> Ints:
        """By graph, how many of the batches are faster eagerly."""
        found = np.searchsorted(self.eager_ms, self.graph_ms * (1 + ROUNDING), "right")
        splits: Ints = np.minimum(np.concatenate([[0], found]), self.ends)
        return splits

    @cached_property
    def _sums(self) -> tuple[Floats, Floats]:
        """The weight and the eager time of the first batches, by their number."""
        by_batch = self.weights, self.weights * self.eager_ms
        return tuple(np.concatenate([[0.0], np.cumsum(each)]) for each in by_batch)  # type: ignore[return-value]

    @cached_property
    def _lists(self) -> "_Lists":
        # Element by element, lists are several times faster than arrays.
        weight, eager = self._sums
        expires = np.searchsorted(self.least, np.arange(len(self.least)), "right")
        arrays = self.ends, self.splits, expires, np.concatenate([[0.0], self.graph_ms]), weight, eager
        return _Lists(*(array.tolist() for array in arrays))

    @cached_property
    def rest(self) -> Floats:
        """By last graph, the eager time of all batches above it."""
        eager = self._sums[1]
        rest: Floats = eager[-1] - eager[self.ends]
        return rest

    @property
    def may_stop_short(self) -> bool:
        """Whether a path may end at a graph from which it could not go on to the last candidate."""
        return bool(self.least[-1] > self.last)

    def step(self, i: Ints, j: Ints) -> Floats:
        """``C(i, j)`` by pair; ``j`` is at least 1."""
        weight, eager = self._sums
        begin, end = self.ends[i], self.ends[j]
        split = np.maximum(self.splits[j], begin)
        return eager[split] - eager[begin] + self.graph_ms[j - 1] * (weight[end] - weight[split])

    def cost(self, path: Sequence[int]) -> float:
        """The expected time of the batches with the graphs of ``path``, in increasing order."""
        graphs = np.array([0, *path])
        return float(self.step(graphs[:-1], graphs[1:]).sum() + self.rest[graphs[-1]])

    def cheapest(self, prices: Floats) -> tuple[Floats, list[int]]:
        """For each graph, the least cost of a path that ends there and pays ``prices`` for its graphs; its predecessor.

        Takes time in proportion to the number of candidates, but for a logarithm.
        """
        ends, splits, expires, graph_ms, weight, eager = self._lists
        each, count = prices.tolist(), len(ends)
        least, before = [0.0] * count, [0] * count
        queue, begins, head = [0], [1], 0

        def step(i: int, j: int) -> float:
            begin = ends[i]
            split = splits[j] if splits[j] > begin else begin
            cost: float = eager[split] - eager[begin] + graph_ms[j] * (weight[ends[j]] - weight[split])
            return cost

        def takes_over(a: int, b: int) -> int:
            """The first graph above ``b`` to which ``b`` is a predecessor at least as good as ``a``, below ``b``."""
            gain, heavier = least[b] - least[a], weight[ends[b]] - weight[ends[a]]
            limit = max(expires[a], b + 1)
            first = b + 1 if gain <= 0 else limit
            if heavier:
                first = bisect_left(graph_ms, gain / heavier, b + 1, limit)
            if first < limit and splits[first] > ends[a]:
                # Some of the batches run eagerly and save less than the graph's whole time, so it takes over later.
                first += bisect_left(range(first, limit), gain, key=lambda j: step(a, j) - step(b, j))
            return first

        for j in range(1, count):
            while head + 1 < len(queue) and begins[head + 1] <= j:
                head += 1
            before[j] = i = queue[head]
            begin = ends[i]
            split = splits[j] if splits[j] > begin else begin  # step(i, j), without the call
            cost = eager[split] - eager[begin] + graph_ms[j] * (weight[ends[j]] - weight[split])
            least[j] = least[i] + cost + each[j]
            begin = takes_over(queue[-1], j)
            while begin <= begins[-1]:
                queue.pop()
                begins.pop()
                begin = takes_over(queue[-1], j)
            if begin < count:
                queue.append(j)
                begins.append(begin)
        return np.array(least), before


class _Lists(NamedTuple):
    """By graph: its batches, up to where eager is faster, the graph from which it is no predecessor, its time; and the
    running sums by batch."""

    ends: list[int]
    splits: list[int]
    expires: list[int]
    graph_ms: list[float]
    weight: list[float]
    eager: list[float]


_BY_CANDIDATE = ("candidates", "graph_ms", "capture_ms", "graph_bytes", "pool_bytes")


class Spent(NamedTuple):
    """What graphs cost besides step time."""

    graphs: float = 0.0
    capture_ms: float = 0.0
    graph_bytes: float = 0.0
    pool_bytes: float = 0.0

    @property
    def memory(self) -> float:
        """The bytes of the graphs and of the pool."""
        return self.graph_bytes + self.pool_bytes

    @classmethod
    def by(cls, problems: Sequence[ModeProblem], paths: Sequence[Sequence[int]]) -> "Spent":
        """What all graphs of ``paths`` cost."""
        chosen = [(p, np.array(path, np.int64) - 1) for p, path in zip(problems, paths, strict=True) if len(path)]
        return cls(
            float(sum(map(len, paths))),
            float(sum(p.capture_ms[at].sum() for p, at in chosen)),
            float(sum(p.graph_bytes[at].sum() for p, at in chosen)),
            max((float(p.pool_bytes[at].max()) for p, at in chosen), default=0.0),
        )


@dataclass(frozen=True)
class Budgets:
    """The most that all graphs together may cost; infinity where there is no limit."""

    graphs: float = math.inf
    capture_ms: float = math.inf
    memory: float = math.inf

    @cached_property
    def limits(self) -> Floats:
        """The budgets in this order."""
        return np.array([self.graphs, self.capture_ms, self.memory])

    def allow(self, spent: Spent, share: float = 1.0) -> bool:
        """Whether ``spent`` is within ``share`` of the budgets (of the memory besides the pool)."""
        slack = 1 + ROUNDING
        return (
            spent.graphs <= self.graphs * share * slack
            and spent.capture_ms <= self.capture_ms * share * slack
            and spent.graph_bytes <= (self.memory * slack - spent.pool_bytes) * share
        )


class Solution(NamedTuple):
    """A path for each problem, their expected time, a proved lower bound of it, and the price of one graph more."""

    paths: tuple[tuple[int, ...], ...]
    cost: float
    bound: float
    price: float = 0.0

    @classmethod
    def of(
        cls, problems: Sequence[ModeProblem], paths: Sequence[Sequence[int]], bound: float = -math.inf
    ) -> "Solution":
        """The paths with what they cost."""
        cost = sum(problem.cost(path) for problem, path in zip(problems, paths, strict=True))
        return cls(tuple(map(tuple, paths)), cost, min(bound, cost))

    @property
    def graphs(self) -> int:
        """How many graphs all paths have together."""
        return sum(map(len, self.paths))


def walk(before: Sequence[int], end: int) -> tuple[int, ...]:
    """The path that ends in graph ``end``."""
    path = []
    while end:
        path.append(end)
        end = before[end]
    return tuple(reversed(path))
