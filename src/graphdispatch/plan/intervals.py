"""The least expected step time by captured sizes: an exact shortest path for each price of a graph.

A batch runs in the smallest graph that holds it, or eagerly where that is faster. So a set of sizes is a path from 0
upwards, and the batches in ``(i, j]`` cost ``C(i, j) = sum of w(x) * min(eager(x), graph(j))``. As ``graph`` does not
fall, ``C(a, c) + C(b, d) <= C(a, d) + C(b, c)`` for ``a <= b <= c <= d`` (Monge). Two things follow:

- Of two predecessors, once the larger is better it stays so for all larger sizes. ``cheapest`` keeps the predecessors
  in a queue, each with the size from which it is best, which for straight pieces is a division and a bisection.
- The least cost is convex in the number of graphs: a price for each graph finds any number (``by_count``), and where
  several numbers cost the same at one price, paths are spliced.

Both hold with lower limits on the predecessor (``least``) that do not fall, which is what ``must_include`` and the
guard against unseen traffic amount to. With ``max_padding`` a path may end where it cannot go on; the second then
holds only among the paths with one last graph, and ``by_count`` tries the last graphs in the order of their bounds.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..modes import CUDAGraphMode
from .traffic import Floats, Ints

__all__ = ["Found", "Optimum", "Routine", "by_count", "cheapest", "walk"]

_ROUNDING = 1e-12
_EQUAL = 1e-9


@dataclass(frozen=True, eq=False)
class Routine:
    """The batches that one mode serves, and the sizes that may be captured for them.

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

    def upto(self, count: int) -> "Routine":
        """The same with only the first ``count`` candidates."""
        cut = {name: getattr(self, name)[:count] for name in _BY_CANDIDATE}
        return replace(self, **cut, least=self.least[: count + 1])

    @cached_property
    def table(self) -> "Table":
        """What ``cheapest`` walks over."""
        ends = np.searchsorted(self.sizes, self.candidates, side="right")
        splits = np.minimum(np.searchsorted(self.eager_ms, self.graph_ms * (1 + _EQUAL), "right"), ends)
        weight = np.concatenate([[0.0], np.cumsum(self.weights)])
        eager = np.concatenate([[0.0], np.cumsum(self.weights * self.eager_ms)])
        least = self.least.tolist()
        return Table(
            [0, *ends.tolist()],
            [0, *splits.tolist()],
            [0.0, *self.graph_ms.tolist()],
            weight.tolist(),
            eager.tolist(),
            least,
            [bisect_right(least, i) for i in range(len(least))],
        )

    @property
    def may_stop_short(self) -> bool:
        """Whether a path may end at a graph from which it could not go on to the last candidate."""
        return bool(self.least[-1] > self.last)

    def cost(self, path: Sequence[int]) -> float:
        """The expected time of the batches with the graphs of ``path``, in increasing order."""
        table = self.table
        pairs = zip((0, *path), path, strict=False)
        return sum(table.cost(i, j) for i, j in pairs) + table.rest(path[-1] if path else 0)


_BY_CANDIDATE = ("candidates", "graph_ms", "capture_ms", "graph_bytes", "pool_bytes")


class Table(NamedTuple):
    """Lists by graph: where its batches end, up to where eager is faster, its time, predecessors; and running sums."""

    ends: list[int]
    splits: list[int]
    graph_ms: list[float]
    weight: list[float]
    eager: list[float]
    least: list[int]
    expires: list[int]

    def cost(self, i: int, j: int) -> float:
        """``C(i, j)``."""
        begin = self.ends[i]
        split = max(self.splits[j], begin)
        replayed = self.weight[self.ends[j]] - self.weight[split]
        return self.eager[split] - self.eager[begin] + self.graph_ms[j] * replayed

    def rest(self, i: int) -> float:
        """The eager time of all batches above graph ``i``."""
        return self.eager[-1] - self.eager[self.ends[i]]


class Found(NamedTuple):
    """A path for each routine, their expected time, and the number of their graphs."""

    paths: tuple[tuple[int, ...], ...]
    cost: float
    graphs: int

    @classmethod
    def of(cls, routines: Sequence[Routine], paths: Sequence[Sequence[int]]) -> "Found":
        """The paths with what they cost."""
        cost = sum(routine.cost(path) for routine, path in zip(routines, paths, strict=True))
        return cls(tuple(map(tuple, paths)), cost, sum(map(len, paths)))


def cheapest(table: Table, prices: Sequence[float]) -> tuple[list[float], list[int]]:
    """For each graph, the least cost of a path that ends there and pays ``prices`` for its graphs; its predecessor."""
    ends, splits, graph_ms, weight, eager, _, expires = table
    count = len(ends)
    least, before = [0.0] * count, [0] * count
    queue, begins, head = [0], [1], 0

    def takes_over(a: int, b: int) -> int:
        """The first graph above ``b`` to which ``b`` is a predecessor at least as good as ``a``, below ``b``."""
        gain, heavier = least[b] - least[a], weight[ends[b]] - weight[ends[a]]
        limit = max(expires[a], b + 1)
        first = b + 1 if gain <= 0 else limit
        if heavier:
            first = bisect_left(graph_ms, gain / heavier, b + 1, limit)
        if first < limit and splits[first] > ends[a]:
            # Part of the batches run eagerly, and save less than the graph's whole time: a later start, by bisection.
            first += bisect_left(range(first, limit), gain, key=lambda j: table.cost(a, j) - table.cost(b, j))
        return first

    for j in range(1, count):
        while head + 1 < len(queue) and begins[head + 1] <= j:
            head += 1
        before[j] = i = queue[head]
        begin = ends[i]
        split = splits[j] if splits[j] > begin else begin  # table.cost(i, j), without the call
        step = eager[split] - eager[begin] + graph_ms[j] * (weight[ends[j]] - weight[split])
        least[j] = least[i] + step + prices[j]
        begin = takes_over(queue[-1], j)
        while begin <= begins[-1]:
            queue.pop()
            begins.pop()
            begin = takes_over(queue[-1], j)
        if begin < count:
            queue.append(j)
            begins.append(begin)
    return least, before


def walk(before: Sequence[int], end: int) -> tuple[int, ...]:
    """The path that ends in graph ``end``."""
    path = []
    while end:
        path.append(end)
        end = before[end]
    return tuple(reversed(path))


def solve(routines: Sequence[Routine], price: float) -> Found:
    """The best paths where each graph costs ``price`` besides."""
    paths = []
    for routine in routines:
        table = routine.table
        least, before = cheapest(table, [price] * len(table.ends))
        paths.append(walk(before, min(range(routine.last, len(least)), key=lambda i: least[i] + table.rest(i))))
    return Found.of(routines, paths)


class Optimum(NamedTuple):
    """The best paths of at most some number of graphs, a proved lower bound of their cost, and the price of a graph."""

    found: Found
    bound: float
    price: float


def by_count(routines: Sequence[Routine], limit: int) -> Optimum | None:
    """The best paths of at most ``limit`` graphs together; None if none is allowed.

    Takes time in proportion to the number of candidates, for each of some ten prices that it tries. Of a routine that
    may stop short there must be no other beside it.
    """
    if not any(routine.may_stop_short for routine in routines):
        return _by_price(routines, limit)
    (routine,) = routines
    table = routine.table
    best, price = None, 0.0
    lower = np.full(len(table.ends), -np.inf)
    rest = np.array([table.rest(i) for i in range(len(table.ends))])
    lower[: routine.last] = np.inf
    while True:
        lower = np.maximum(lower, np.array(cheapest(table, [price] * len(rest))[0]) + rest - price * limit)
        last = int(lower.argmin())
        if best is not None and lower[last] >= best.cost * (1 - _ROUNDING):
            return Optimum(best, min(best.cost, float(lower[last])), price)
        if not np.isfinite(lower[last]):
            return None if best is None else Optimum(best, best.cost, price)
        here = _by_price([replace(routine.upto(last), last=last)], limit) if last else None
        found = Found.of(routines, [()]) if not last else here.found if here is not None else None
        if found is not None and (best is None or found.cost < best.cost):
            best = found
        price = here.price if here is not None else price
        lower[last] = np.inf


def _by_price(routines: Sequence[Routine], limit: int) -> Optimum | None:
    """The best paths of at most ``limit`` graphs, where the cost is convex in their number."""
    high, low_price, high_price = solve(routines, 0.0), sum(routine.table.eager[-1] for routine in routines) + 1.0, 0.0
    if high.graphs <= limit:
        return Optimum(high, high.cost, 0.0)
    low = solve(routines, low_price)
    if low.graphs > limit:
        return None
    while low.graphs < limit:
        chord = (low.cost - high.cost) / (high.graphs - low.graphs)
        # The price is about a power of the number, which finds the number in a few tries; only the chord proves an end.
        # Where one end is near, aim beyond ``limit``, so that the other end comes near too.
        under, over = limit - low.graphs, high.graphs - limit
        goal = limit - 2 * over if 8 * over < under else limit + 2 * under if 8 * under < over else limit
        price = _between(low.graphs, low_price, high.graphs, high_price, goal)
        if price is None:
            price = chord
        middle = solve(routines, price)
        if middle.graphs in (low.graphs, high.graphs):
            price, middle = chord, solve(routines, chord)
        least = low.cost + chord * low.graphs
        if price == chord and middle.cost + chord * middle.graphs >= least - _ROUNDING * least:
            best = _splice(routines, low, high, limit)
            return Optimum(best, min(best.cost, least - chord * limit), chord)
        if middle.graphs <= limit:
            low, low_price = middle, price
        else:
            high, high_price = middle, price
    return Optimum(low, low.cost, low_price)


def _between(low: int, low_price: float, high: int, high_price: float, count: int) -> float | None:
    """The price for ``count`` graphs if it is a power of the number; None where that says nothing."""
    if not (low and high_price > 0 and low_price > high_price and high > 1.05 * low):
        return None
    return low_price * math.exp(math.log(high_price / low_price) * math.log(count / low) / math.log(high / low))


def _splice(routines: Sequence[Routine], low: Found, high: Found, count: int) -> Found:
    """Paths of ``count`` graphs out of paths of fewer and of more that are best at one price."""
    pairs = [sorted(pair, key=len) for pair in zip(low.paths, high.paths, strict=True)]
    missing = count - sum(len(short) for short, _ in pairs)
    paths = []
    for routine, (short, long) in zip(routines, pairs, strict=True):
        more = min(missing, len(long) - len(short))
        missing -= more
        paths.append(_crossed(routine, short, long, more))
    return Found.of(routines, paths)


def _crossed(routine: Routine, short: Sequence[int], long: Sequence[int], more: int) -> Sequence[int]:
    """The path that starts as ``long`` and ends as ``short``, with ``more`` graphs than ``short``.

    It changes over where a step of ``short`` encloses a step of ``long``; by Monge the two paths that result cost no
    more together, so that both are best. The end of all batches counts as a last graph.
    """
    if not more or more == len(long) - len(short):
        return long if more else short
    end = len(routine.table.ends)
    a, b = (0, *short, end), (0, *long, end)
    here = next(t for t in range(len(a) - 1) if a[t] <= b[t + more] and b[t + more + 1] <= a[t + 1])
    return (*b[1 : here + more + 1], *a[here + 1 : -1])
