"""``optimise``: the graphs with the least expected step time within budgets of number, capture time and memory.

Where all graphs cost the same, the budgets are a limit on the number, which depends on the pool and so on the last
graph. The least cost is convex in the number of graphs (it is Monge, see ``problem``), so a price for each graph finds
any number; where several numbers cost the same at one price, two paths are spliced. With ``max_padding`` a path may end
at a graph from which it cannot go on; the cost is then convex only among the paths with one last graph. ``_same_cost``
takes the last graphs in the order of their bounds, and is exact.

Where graphs differ, each budget gets a price (a Lagrange multiplier). Any prices prove a lower bound. A layered dynamic
programme over partial paths then looks for the best paths above that bound. Where a layer had no room for all, it says
what the others cost at least.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .problem import ROUNDING, Budgets, ModeProblem, Solution, Spent, walk
from .traffic import Floats, Ints

__all__ = ["optimise"]

_EXACT = 1e-12
_ROUNDS = 120
_MOST_PRICED = 300_000  # candidates in all rounds together
_MOST_KEPT = 10_000  # partial paths in all layers together
_MOST_COMPLETE = 1_000


def optimise(problems: Sequence[ModeProblem], budgets: Budgets) -> Solution | None:
    """The best paths within the budgets that were found, with a proved bound; None if none was found that fits."""
    limit = min(budgets.graphs, sum(len(problem.candidates) for problem in problems))
    for name, budget in (("capture_ms", budgets.capture_ms), ("graph_bytes", budgets.memory)):
        each = np.concatenate([getattr(problem, name) for problem in problems])
        if not math.isfinite(budget) or not each.any():
            continue
        if np.ptp(each) > 0:
            return _different_costs(problems, budgets)
        limit = min(limit, math.floor(budget / each[0] * (1 + ROUNDING)))
    if len(problems) > 1 and any(problem.may_stop_short for problem in problems):
        return _different_costs(problems, budgets)
    return _same_cost(problems, int(limit), budgets)


def _same_cost(problems: Sequence[ModeProblem], limit: int, budgets: Budgets) -> Solution | None:
    """The best paths of at most ``limit`` graphs that all cost the same memory and time, besides the pool.

    For each number of graphs there is a largest pool, and so a limit on the last graph; where a path may stop short,
    each last graph has its own number. ``_by_price`` finds the best paths within one such pair of limits.
    """
    stops_short = problems[0].may_stop_short
    limits, cuts = _pairs(problems, limit, budgets)
    if any(cut.max() < problem.last for problem, cut in zip(problems, cuts, strict=True)):
        return None
    if len(limits) == 1 and not stops_short:
        return _by_price([problem.upto(int(cut[0])) for problem, cut in zip(problems, cuts, strict=True)], limit)
    best, price, lower = None, 0.0, np.full(len(limits), -math.inf)
    while True:
        bound = -price * limits
        for problem, cut in zip(problems, cuts, strict=True):
            ending = _ending(problem, problem.cheapest(np.full(len(problem.ends), price))[0])
            bound = bound + (ending if stops_short else np.minimum.accumulate(ending))[cut]
        lower = np.maximum(lower, bound)
        at = int(lower.argmin())
        if lower[at] >= (math.inf if best is None else best.cost * (1 - _EXACT)):
            return best
        parts = [problem.upto(int(cut[at])) for problem, cut in zip(problems, cuts, strict=True)]
        if stops_short:
            parts = [replace(parts[0], last=int(cuts[0][at]))]
        here = _by_price(parts, int(limits[at]))
        if here is not None:
            price = here.price
            best = here if best is None or here.cost < best.cost else best
        lower[at] = math.inf


def _pairs(problems: Sequence[ModeProblem], limit: int, budgets: Budgets) -> tuple[Ints, list[Ints]]:
    """Numbers of graphs, and with each the largest graph of each problem whose pool then fits, or every last graph."""
    room, each = budgets.memory * (1 + ROUNDING), max(float(p.graph_bytes.max(initial=0.0)) for p in problems)
    if problems[0].may_stop_short:
        pool = np.concatenate([[0.0], problems[0].pool_bytes])
        cut = np.flatnonzero(pool <= room)
        fitting = (room - pool[cut]) // each if each and math.isfinite(room) else np.full(len(cut), limit)
        return np.minimum(fitting, limit).astype(np.int64), [cut]
    limits = np.arange(limit, -1, -1)
    left = room - (each * limits if math.isfinite(room) else 0.0)
    cuts = [np.searchsorted(problem.pool_bytes, left * np.ones(len(limits)), "right") for problem in problems]
    _, most = np.unique(np.stack(cuts), axis=1, return_index=True)  # of equal cuts, the most graphs
    return limits[most], [cut[most] for cut in cuts]


def _ending(problem: ModeProblem, least: Floats) -> Floats:
    """By last graph, the least cost of all batches; infinite where the path must not end."""
    ending = least + problem.rest
    ending[: problem.last] = math.inf
    return ending


def _solve(problems: Sequence[ModeProblem], price: float) -> Solution:
    """The best paths where each graph costs ``price`` besides."""
    paths = []
    for problem in problems:
        least, before = problem.cheapest(np.full(len(problem.ends), price))
        paths.append(walk(before, int(_ending(problem, least).argmin())))
    return Solution.of(problems, paths)._replace(price=price)


def _by_price(problems: Sequence[ModeProblem], limit: int) -> Solution | None:
    """The best paths of at most ``limit`` graphs, where the cost is convex in their number; None if none is allowed."""
    high, low = _solve(problems, 0.0), _solve(problems, sum(float(problem.rest[0]) for problem in problems) + 1.0)
    if high.graphs <= limit:
        return high._replace(bound=high.cost)
    if low.graphs > limit:
        return None
    while low.graphs < limit:
        chord = (low.cost - high.cost) / (high.graphs - low.graphs)
        price = math.sqrt(low.price * high.price) or chord
        middle = _solve(problems, price)
        if middle.graphs in (low.graphs, high.graphs):
            # Only the chord proves that there is no number between the two.
            price, middle = chord, _solve(problems, chord)
        least = low.cost + chord * low.graphs
        if price == chord and middle.cost + chord * middle.graphs >= least * (1 - _EXACT):
            best = _splice(problems, low, high, limit)
            return best._replace(bound=min(best.cost, least - chord * limit), price=chord)
        if middle.graphs <= limit:
            low = middle
        else:
            high = middle
    return low._replace(bound=low.cost)


def _splice(problems: Sequence[ModeProblem], low: Solution, high: Solution, count: int) -> Solution:
    """Paths of ``count`` graphs out of paths of fewer and of more that are best at one price."""
    pairs = [sorted(pair, key=len) for pair in zip(low.paths, high.paths, strict=True)]
    missing = count - sum(len(short) for short, _ in pairs)
    paths = []
    for problem, (short, long) in zip(problems, pairs, strict=True):
        more = min(missing, len(long) - len(short))
        missing -= more
        paths.append(_crossed(len(problem.ends), short, long, more))
    return Solution.of(problems, paths)


def _crossed(end: int, short: Sequence[int], long: Sequence[int], more: int) -> Sequence[int]:
    """The path that starts as ``long`` and ends as ``short``, with ``more`` graphs than ``short``.

    It changes over where a step of ``short`` encloses a step of ``long``. By Monge the two paths that result cost no
    more together, so both are best. ``end``, the end of all batches, counts as a last graph.
    """
    if not more or more == len(long) - len(short):
        return long if more else short
    a, b = (0, *short, end), (0, *long, end)
    here = next(t for t in range(len(a) - 1) if a[t] <= b[t + more] and b[t + more + 1] <= a[t + 1])
    return (*b[1 : here + more + 1], *a[here + 1 : -1])


def _different_costs(problems: Sequence[ModeProblem], budgets: Budgets) -> Solution | None:
    """Graphs that cost different time or bytes: prices that prove a good bound, then the best paths above it."""
    limited = np.isfinite(budgets.limits)
    scale = np.where(limited, 1 / np.where(limited, budgets.limits, 1.0), 0.0)
    eager = sum(float(problem.rest[0]) for problem in problems)
    best, bound, kept, price, step = None, -math.inf, np.zeros(3), np.zeros(3), 1.0
    candidates = sum(len(problem.candidates) for problem in problems)
    for _ in range(max(_ROUNDS // 4, min(_ROUNDS, _MOST_PRICED // max(candidates, 1)))):
        found, value, _ = _relaxed(problems, price * scale)
        proved = value - float(price.sum())
        if proved > bound:
            bound, kept = proved, price * scale
        else:
            step *= 0.9
        spent = Spent.by(problems, found.paths)
        if budgets.allow(spent) and (best is None or found.cost < best.cost):
            best = found
        over = np.array([spent.graphs, spent.capture_ms, spent.memory]) * scale - limited
        over[(price <= 0) & (over < 0)] = 0.0
        aim = best.cost if best is not None else eager
        if aim - bound <= ROUNDING * aim or not over.any():
            break
        price = np.maximum(price + step * max(aim - proved, ROUNDING * aim) / (over @ over) * over, 0.0)
    if best is None or best.cost - bound > ROUNDING * best.cost:
        best, left_out = _search(problems, budgets, kept, best)
        bound = max(bound, left_out)
    return best and best._replace(bound=min(bound, best.cost))


def _priced(problem: ModeProblem, prices: Floats) -> Floats:
    """By graph, from 0 on, its price besides the pool."""
    each = prices[0] + prices[1] * problem.capture_ms + prices[2] * problem.graph_bytes
    return np.concatenate([[0.0], each])


def _relaxed(problems: Sequence[ModeProblem], prices: Floats) -> tuple[Solution, float, list[Floats]]:
    """The best paths where each budget has a price and no limit, their cost with what is paid, and that by last graph.

    The pool is paid once, for its largest graph.
    """
    tables = [problem.cheapest(_priced(problem, prices)) for problem in problems]
    pools = [np.concatenate([[0.0], problem.pool_bytes]) for problem in problems]
    levels = np.unique(np.concatenate(pools)) if prices[2] else np.array([max(pool[-1] for pool in pools)])
    total, ends = prices[2] * levels, []
    for problem, (least, _), pool in zip(problems, tables, pools, strict=True):
        ending, fits = _ending(problem, least), np.searchsorted(pool, levels, "right")
        total = total + np.minimum.accumulate(ending)[fits - 1]
        ends.append((ending, fits))
    at = int(total.argmin())
    paths = [walk(before, int(e[: fits[at]].argmin())) for (_, before), (e, fits) in zip(tables, ends, strict=True)]
    return Solution.of(problems, paths), float(total[at]), [least for least, _ in tables]


class _Rules(NamedTuple):
    """For a search: the budgets, their prices, the most partial paths in a layer, and the cost that paths must meet."""

    budgets: Budgets
    prices: Floats
    width: int
    aim: float


def _search(
    problems: Sequence[ModeProblem], budgets: Budgets, prices: Floats, best: Solution | None
) -> tuple[Solution | None, float]:
    """The best paths found over partial paths, and what all those that were left out cost at least."""
    tables = _relaxed(problems, prices)[2]
    paid = float(prices[prices > 0] @ budgets.limits[prices > 0])
    floors = [float(_ending(problem, least).min()) for problem, least in zip(problems, tables, strict=True)]
    width = max(_MOST_KEPT // sum(len(problem.ends) for problem in problems), 2)
    rules = _Rules(budgets, prices, width, math.inf if best is None else best.cost * (1 + ROUNDING))
    left_out, rows = math.inf, np.zeros((1, 5))
    paths: list[tuple[tuple[int, ...], ...]] = [()]
    for r, problem in reversed(list(enumerate(problems))):
        still = tables[r] - _priced(problem, prices) + sum(floors[:r]) - paid
        layers = _Layers(problem, rules, still, rows)
        for graph in range(len(problem.ends) - 1, -1, -1):
            layers.fill(graph)
        complete = np.flatnonzero(layers.graphs[: layers.count] == 0)
        rows, left_out = layers.rows[complete], min(left_out, layers.left_out)
        ends = [layers.trace(int(at)) for at in complete]
        paths = [(path, *paths[start]) for path, start in ends]
    found = [Solution.of(problems, each) for each in paths]
    return min([*found, *([best] if best else [])], key=lambda each: each.cost, default=None), left_out


class _Layers:
    """Partial paths of one problem, from the end of all batches down: a layer for each graph that they have reached.

    ``rows`` hold for each partial path its cost, graphs, capture time, bytes and pool. The first of them are given:
    what the problems before came to. ``graphs`` has the graph that each has reached, and ``before`` the path that it
    extends. A layer holds no path that another is as good as in everything, and at most ``width``, of the least bounds.
    """

    def __init__(self, problem: ModeProblem, rules: _Rules, still: Floats, rows: Floats) -> None:
        """``still`` is by graph the bound of what is to come; ``rows`` are the paths to begin with."""
        self.problem, self.rules, self.still = problem, rules, still
        columns = (np.ones(len(problem.candidates)), problem.capture_ms, problem.graph_bytes, problem.pool_bytes)
        # What has no limit is not counted, so that more partial paths are no better than others.
        self.own = np.vstack([np.zeros(4), np.stack(columns, axis=1)]) * np.isfinite(rules.budgets.limits[[0, 1, 2, 2]])
        size = len(rows) + len(problem.candidates) * rules.width + _MOST_COMPLETE
        self.starts = self.count = len(rows)
        self.rows, self.graphs, self.before = np.zeros((size, 5)), np.full(size, -1), np.full(size, -1)
        self.rows[: self.count] = rows
        self.left_out = math.inf
        """What the paths that were left out for want of room cost at least."""

    def trace(self, at: int) -> tuple[tuple[int, ...], int]:
        """The graphs of the path ``at``, in increasing order, and the row that it began with."""
        graphs = []
        while at >= self.starts:
            graphs.append(int(self.graphs[at]))
            at = int(self.before[at])
        return tuple(graph for graph in graphs if graph), at

    def fill(self, graph: int) -> None:
        """Extend the paths of all higher layers to ``graph``; 0 completes them."""
        problem, rules, rows = self.problem, self.rules, self.rows[: self.count]
        above = self.graphs[self.starts : self.count]
        step = problem.step(np.full(len(above), graph), above)
        step[problem.least[above] > graph] = math.inf
        rest = np.full(self.starts, problem.rest[graph] if graph >= problem.last else math.inf)
        cost, spent = rows[:, 0] + np.concatenate([rest, step]), rows[:, 1:] + self.own[graph]
        spent[:, 3] = np.maximum(rows[:, 4], self.own[graph, 3])
        used = np.stack([spent[:, 0], spent[:, 1], spent[:, 2] + spent[:, 3]], axis=1)
        lower = cost + used @ rules.prices + self.still[graph]
        fits = (used <= rules.budgets.limits * (1 + ROUNDING)).all(axis=1) & (lower <= rules.aim) & np.isfinite(cost)
        fitting = np.flatnonzero(fits)
        fitting = fitting[np.argsort(lower[fitting], kind="stable")]
        new = np.concatenate([cost[fitting, None], spent[fitting]], axis=1)
        most = self.count + (rules.width if graph else _MOST_COMPLETE)
        while len(fitting) and self.count < most:
            self.rows[self.count], self.graphs[self.count], self.before[self.count] = new[0], graph, fitting[0]
            self.count += 1
            others = ~(new >= new[0]).all(axis=1)
            fitting, new = fitting[others], new[others]
        if len(fitting):
            self.left_out = min(self.left_out, float(lower[fitting[0]]))
