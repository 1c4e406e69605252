"""The best graphs under several budgets at once: number, capture time and memory.

Where every graph costs the same time and bytes, all budgets are one limit on the number, which depends on the pool and
so on the largest size: ``by_count`` for each such limit, exactly. Else the budgets get prices (Lagrange multipliers):
any prices prove a lower bound, and paths that the prices suggest, mended until they fit, give a plan. A search over
partial paths closes the gap between the two where it is small enough to finish; where it is not, the bound is returned
with the plan.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .intervals import Found, Routine, by_count, cheapest, walk
from .traffic import Floats

__all__ = ["Budgets", "Spent", "optimise"]

_ROUNDS = 120
_MOST_TRIED = 100_000
_NEARLY = 1.1
_ROUNDING = 1e-9


class Spent(NamedTuple):
    """What graphs cost besides step time."""

    graphs: float = 0.0
    capture_ms: float = 0.0
    graph_bytes: float = 0.0
    pool_bytes: float = 0.0

    def plus(self, routine: Routine, graph: int) -> "Spent":
        """With one graph more."""
        at = graph - 1
        return Spent(
            self.graphs + 1,
            self.capture_ms + float(routine.capture_ms[at]),
            self.graph_bytes + float(routine.graph_bytes[at]),
            max(self.pool_bytes, float(routine.pool_bytes[at])),
        )

    @classmethod
    def by(cls, routines: Sequence[Routine], paths: Sequence[Sequence[int]]) -> "Spent":
        """What all graphs of ``paths`` cost."""
        spent = cls()
        for routine, path in zip(routines, paths, strict=True):
            for graph in path:
                spent = spent.plus(routine, graph)
        return spent


@dataclass(frozen=True)
class Budgets:
    """The most that all graphs together may cost; infinity where there is no limit."""

    graphs: float = math.inf
    capture_ms: float = math.inf
    memory: float = math.inf

    def allow(self, spent: Spent, share: float = 1.0) -> bool:
        """Whether ``spent`` is within ``share`` of the budgets (of the memory besides the pool)."""
        slack = 1 + _ROUNDING
        return (
            spent.graphs <= self.graphs * share * slack
            and spent.capture_ms <= self.capture_ms * share * slack
            and spent.graph_bytes <= (self.memory * slack - spent.pool_bytes) * share
        )


def optimise(routines: Sequence[Routine], budgets: Budgets) -> tuple[Found, float] | None:
    """The best paths within the budgets and a proved lower bound of the cost; None if none was found that fits."""
    limit = min(budgets.graphs, sum(len(routine.candidates) for routine in routines))
    for name, budget in (("capture_ms", budgets.capture_ms), ("graph_bytes", budgets.memory)):
        each = np.concatenate([getattr(routine, name) for routine in routines])
        if not math.isfinite(budget) or not each.any():
            continue
        if np.ptp(each) > 0:
            return _priced(routines, budgets)
        limit = min(limit, math.floor(budget / each[0] * (1 + _ROUNDING)))
    if len(routines) > 1 and any(routine.may_stop_short for routine in routines):
        return _priced(routines, budgets)
    each_bytes = max(float(routine.graph_bytes.max(initial=0.0)) for routine in routines)
    if math.isinf(budgets.memory):
        each_bytes = 0.0
    return _by_pool(routines, int(limit), budgets, each_bytes)


def _by_pool(routines: Sequence[Routine], limit: int, budgets: Budgets, each: float) -> tuple[Found, float] | None:
    """At most ``limit`` graphs that cost ``each`` bytes, and the pool of the largest.

    A span of numbers is bounded by its largest number with the pool that its smallest leaves room for; what that finds
    is the best of the span if it fits, else the span is halved.
    """
    best: tuple[Found, float] | None = None
    spans = [(0, limit)]
    while spans:
        low, high = spans.pop()
        room = budgets.memory * (1 + _ROUNDING) - each * low
        fitting = [int(np.searchsorted(routine.pool_bytes, room, "right")) for routine in routines]
        if any(count < routine.last for count, routine in zip(fitting, routines, strict=True)):
            continue
        cut = [routine.upto(count) for count, routine in zip(fitting, routines, strict=True)]
        found = by_count(cut, high)
        if found is None or (best is not None and found.bound >= best[0].cost):
            continue
        if budgets.allow(Spent.by(routines, found.found.paths)):
            if best is None or found.found.cost < best[0].cost:
                best = found.found, min(found.bound, best[1]) if best else found.bound
        elif low < high:
            middle = (low + high) // 2
            spans += [(low, middle), (middle + 1, high)]
    return best


class _Prices(NamedTuple):
    """The price of a graph, a millisecond of capture, and a byte."""

    graphs: float = 0.0
    capture_ms: float = 0.0
    memory: float = 0.0

    def of(self, routine: Routine) -> Floats:
        """By graph, from 0 on."""
        each = self.graphs + self.capture_ms * routine.capture_ms + self.memory * routine.graph_bytes
        return np.concatenate([[0.0], each])

    def value(self, spent: Spent) -> float:
        """What is paid for ``spent``."""
        memory = spent.graph_bytes + spent.pool_bytes
        return self.graphs * spent.graphs + self.capture_ms * spent.capture_ms + self.memory * memory


class _Relaxed(NamedTuple):
    """The best paths at some prices: what they cost with what is paid, and the same by last graph of each routine."""

    found: Found
    value: float
    least: list[list[float]]


def _relaxed(routines: Sequence[Routine], prices: _Prices) -> _Relaxed:
    """The best paths where budgets have prices instead of limits. The pool is paid once, for its largest graph."""
    tables = [cheapest(routine.table, prices.of(routine).tolist()) for routine in routines]
    pools = [np.concatenate([[0.0], routine.pool_bytes]) for routine in routines]
    levels = np.unique(np.concatenate(pools)) if prices.memory else np.array([max(pool[-1] for pool in pools)])
    total, ends = prices.memory * levels, []
    for routine, (least, _), pool in zip(routines, tables, pools, strict=True):
        ending = np.array(least) + np.array([routine.table.rest(i) for i in range(len(least))])
        ending[: routine.last] = np.inf
        fits = np.searchsorted(pool, levels, "right")
        total = total + np.minimum.accumulate(ending)[fits - 1]
        ends.append((ending, fits))
    at = int(total.argmin())
    paths = [walk(before, int(e[: fits[at]].argmin())) for (_, before), (e, fits) in zip(tables, ends, strict=True)]
    return _Relaxed(Found.of(routines, paths), float(total[at]), [least for least, _ in tables])


def _priced(routines: Sequence[Routine], budgets: Budgets) -> tuple[Found, float] | None:
    """Graphs that cost different time or bytes: raise the prices, mend what they suggest, search what is left open."""
    limits = np.array([budgets.graphs, budgets.capture_ms, budgets.memory])
    limited = np.isfinite(limits)
    price, scale = np.zeros(3), np.where(limited, 1 / np.where(limited, limits, 1.0), 0.0)
    eager = sum(routine.table.eager[-1] for routine in routines)
    best = _mended(routines, budgets, Found.of(routines, _relaxed(routines, _Prices(*eager * scale)).found.paths))
    bound, kept = -math.inf, _Prices()
    step = 1.0
    for _ in range(_rounds(routines)):
        prices = _Prices(*price * scale)
        relaxed = _relaxed(routines, prices)
        proved = relaxed.value - float(price.sum())
        if proved > bound:
            bound, kept = proved, prices
        else:
            step *= 0.9
        mended = _mended(routines, budgets, relaxed.found)
        if mended is not None and (best is None or mended.cost < best.cost):
            best = mended
        spent = Spent.by(routines, relaxed.found.paths)
        over = np.array([spent.graphs, spent.capture_ms, spent.graph_bytes + spent.pool_bytes]) * scale - limited
        over[(price <= 0) & (over < 0)] = 0.0
        aim = best.cost if best is not None else eager
        if aim - bound <= _ROUNDING * aim or not over.any():
            break
        price = np.maximum(price + step * max(aim - proved, _ROUNDING * aim) / (over @ over) * over, 0.0)
    best = best and _improved(routines, budgets, best)
    if best is not None and best.cost - bound <= _ROUNDING * best.cost:
        return best, min(bound, best.cost)
    searched, whole = _search(routines, budgets, kept, best)
    if searched is None or whole:
        return searched and (searched, searched.cost)
    return searched, min(bound, searched.cost)


def _rounds(routines: Sequence[Routine]) -> int:
    """How many prices to try: fewer where each takes long."""
    candidates = sum(len(routine.candidates) for routine in routines)
    return max(_ROUNDS // 4, min(_ROUNDS, 3 * _MOST_TRIED // max(candidates, 1)))


def _mended(routines: Sequence[Routine], budgets: Budgets, found: Found) -> Found | None:
    """``found`` without the graphs that matter least, until it is within the budgets; None if it is far from that."""
    paths = [list(path) for path in found.paths]
    if not budgets.allow(Spent.by(routines, paths), _NEARLY):
        return None
    while not budgets.allow(Spent.by(routines, paths)):
        losses = [
            (loss, r, at)
            for r, (routine, path) in enumerate(zip(routines, paths, strict=True))
            for at in range(len(path))
            if (loss := _loss(routine, path, at)) is not None
        ]
        if not losses:
            return None
        _, r, at = min(losses)
        del paths[r][at]
    return Found.of(routines, paths)


def _loss(routine: Routine, path: Sequence[int], at: int) -> float | None:
    """What the step time gains when a graph is left out; None if it must stay."""
    table = routine.table
    i, j = path[at - 1] if at else 0, path[at]
    if at + 1 == len(path):
        return table.rest(i) - table.cost(i, j) - table.rest(j) if i >= routine.last else None
    k = path[at + 1]
    return table.cost(i, k) - table.cost(i, j) - table.cost(j, k) if table.least[k] <= i else None


def _improved(routines: Sequence[Routine], budgets: Budgets, found: Found) -> Found:
    """``found`` after adding and moving single graphs for as long as that helps and fits."""
    paths = [list(path) for path in found.paths]
    places = [(r, at, kept) for r, path in enumerate(paths) for at in range(len(path) + 1) for kept in (at, at + 1)]
    while sum(_place(routines, budgets, paths, *place) for place in places):
        continue
    return Found.of(routines, paths)


def _place(routines: Sequence[Routine], budgets: Budgets, paths: list[list[int]], r: int, at: int, after: int) -> bool:
    """Put the best graph that fits between two of a path, instead of what is there; whether that helped."""
    routine, path = routines[r], paths[r]
    if after > len(path):
        return False
    table, (i, *_), between = routine.table, [*path[at - 1 : at], 0], path[at:after]
    k = path[after] if after < len(path) else len(table.ends)

    def cost(*graphs: int) -> float:
        steps = zip((i, *graphs), graphs, strict=False)
        ending = table.rest((i, *graphs)[-1]) if k == len(table.ends) else table.cost((i, *graphs)[-1], k)
        return sum(table.cost(a, b) for a, b in steps) + ending

    first = table.least[k] if k < len(table.ends) else routine.last
    choices = sorted((cost(j), j) for j in range(max(i + 1, first), k) if table.least[j] <= i)
    usual = cost(*between) * (1 - _ROUNDING)
    spent = Spent.by(routines, [*paths[:r], [*path[:at], *path[after:]], *paths[r + 1 :]])
    for ms, j in choices:
        if ms >= usual:
            break
        if budgets.allow(spent.plus(routine, j)):
            path[at:after] = [j]
            return True
    return False


class _Label(NamedTuple):
    """A partial path from the end of all batches down to a graph: its cost, what it spent, its graphs by routine."""

    cost: float
    spent: Spent
    paths: tuple[tuple[int, ...], ...]


def _search(
    routines: Sequence[Routine], budgets: Budgets, prices: _Prices, best: Found | None
) -> tuple[Found | None, bool]:
    """The best paths by all partial paths that the bound of ``prices`` leaves open, and whether none was left out."""
    relaxed = _relaxed(routines, prices)
    limits = _Prices(budgets.graphs, budgets.capture_ms, budgets.memory)
    paid = sum(price * limit for price, limit in zip(prices, limits, strict=True) if price)
    floors = [
        min(least[i] + routine.table.rest(i) for i in range(routine.last, len(least)))
        for routine, least in zip(routines, relaxed.least, strict=True)
    ]
    aim = best.cost if best is not None else math.inf
    tried, labels = 0, [_Label(0.0, Spent(), ())]
    for r in range(len(routines) - 1, -1, -1):
        routine, table, least = routines[r], routines[r].table, relaxed.least[r]
        floor, each = sum(floors[:r]) - paid, prices.of(routine)
        at: list[list[_Label]] = [[] for _ in table.ends]

        def reach(graph: int, label: _Label, cost: float) -> None:
            spent = label.spent.plus(routine, graph) if graph else label.spent  # noqa: B023
            known = label.cost + cost
            lower = known + prices.value(spent) + least[graph] - each[graph] + floor  # noqa: B023
            if budgets.allow(spent) and lower <= aim * (1 + _ROUNDING):
                paths = ((graph, *label.paths[0]), *label.paths[1:]) if graph else label.paths
                at[graph].append(_Label(known, spent, paths))  # noqa: B023

        for label in labels:
            for graph in range(routine.last, len(table.ends)):
                reach(graph, _Label(label.cost, label.spent, ((), *label.paths)), table.rest(graph))
        for graph in range(len(table.ends) - 1, 0, -1):
            at[graph] = _undominated(at[graph])
            tried += len(at[graph]) * (graph - table.least[graph])
            if tried > _MOST_TRIED:
                return best, False
            for label in at[graph]:
                for i in range(table.least[graph], graph):
                    reach(i, label, table.cost(i, graph))
        labels = _undominated(at[0])
    found = [Found.of(routines, label.paths) for label in labels]
    return min([*found, *([best] if best else [])], key=lambda each: each.cost, default=None), True


def _undominated(labels: list[_Label]) -> list[_Label]:
    """The labels of which no other is as good in everything."""
    kept: list[_Label] = []
    for label in sorted(labels):
        if not any(all(map(float.__le__, other.spent, label.spent)) for other in kept):
            kept.append(label)
    return kept
