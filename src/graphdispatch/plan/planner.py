"""``plan_capture_sizes``: the graphs with the least expected step time within the budgets."""

import math
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..config import parse_mode
from ..errors import ConfigError
from ..modes import CUDAGraphMode
from ..sizes import named_sizes
from .cost import CostModel
from .optimum import optimise
from .plan import Plan, PlannedGraph, Proof, weights_by_mode
from .prior import Prior, reach
from .problem import Budgets, ModeProblem, Solution, Spent
from .traffic import LARGEST_STEP, Floats
from .workload import Workload

__all__ = ["plan_capture_sizes"]

_LOOSEST = 16.0
_TIGHT = 4
_FOR_THE_GUARD = 0.9
_FOR_A_LOOSE_GUARD = 0.6


def plan_capture_sizes(
    workload: Workload,
    cost: CostModel | None = None,
    *,
    max_graphs: int | None = None,
    memory: float | None = None,
    capture_time: float | None = None,
    max_size: int | None = None,
    must_include: Iterable[int] = (),
    multiple_of: int = 1,
    max_padding: float | None = None,
    prior: float | Prior = 0.02,
    mode: CUDAGraphMode = CUDAGraphMode.FULL,
) -> Plan:
    """The plan with the least expected step time for ``workload``, within all budgets at once.

    ``cost`` says what steps, captures and memory cost (default: ``CostModel.default()``). ``max_graphs``, ``memory``
    in bytes and ``capture_time`` in seconds limit all graphs of all modes together; without any of them there may be as
    many graphs as vLLM has sizes. No graph is above ``max_size`` tokens (default: the largest size of the workload).
    Each mode gets the sizes ``must_include``; all are multiples of ``multiple_of``. ``max_padding`` limits what any
    batch up to the largest graph is padded by, as a share of its tokens. ``prior`` is the share of steps that may have
    any size, or a whole ``Prior``; 0 plans for exactly the workload. ``mode`` FULL or PIECEWISE plans one set of graphs
    for all batches; the composite modes plan FULL graphs for uniform decode alone.

    If each graph costs the same memory and time, the plan is an exact optimum among the sets that the prior's guard
    allows, and planning takes time about in proportion to the range. If graphs cost different memory or time, or for
    ``max_padding`` with two sets of graphs, a better plan may exist; ``Plan.proof`` bounds how much better. Raises
    ``ConfigError`` for bad or contradictory arguments, and for budgets that no graph fits.
    """
    _check_types(workload, cost, must_include)
    cost, prior, mode = cost or CostModel.default(), Prior.of(prior), parse_mode(mode)
    if not mode.has_graphs():
        raise ConfigError("mode must have graphs to plan, got NONE")
    grid = _grid(workload, max_size, must_include, multiple_of, max_padding)
    if max_graphs is None and memory is None and capture_time is None:
        max_graphs = len(named_sizes("vllm", grid.top))
    budgets = Budgets(
        math.inf if max_graphs is None else _whole("max_graphs", max_graphs),
        math.inf if capture_time is None else 1e3 * _amount("capture_time", capture_time),
        math.inf if memory is None else _amount("memory", memory),
    )
    problems, constant = _problems(workload, cost, prior, mode, grid)
    _check_one_graph_fits(problems, budgets)
    guarded, regret = _guarded(problems, budgets, prior.regret)
    best = optimise(guarded, budgets)
    if best is None and regret is not None:
        guarded, regret = problems, None
        best = optimise(guarded, budgets)
    if best is None:
        raise ConfigError(
            f"the budgets must pay for must_include={grid.must} with max_padding={max_padding}, and do not; raise "
            "max_graphs, memory or capture_time, or ask for less"
        )
    expected_ms, bound_ms = best.cost + constant, best.bound + constant
    proof = Proof(expected_ms, bound_ms, cost.source, prior.share, prior.drift, regret, grid.top)
    return Plan(mode, _graphs(guarded, best), proof)


class _Grid(NamedTuple):
    """Which sizes may be captured: multiples up to ``top``; which must be; and how far batches may be padded."""

    top: int
    multiple_of: int
    must: tuple[int, ...]
    max_padding: float | None

    def reach(self, largest: int) -> int:
        """The end of the range of a kind of batch of which ``largest`` was seen: twice that, on the grid."""
        return max(min(self.top, math.ceil(2 * largest / self.multiple_of) * self.multiple_of), *self.must, 1)


def _grid(
    workload: Workload, max_size: int | None, must_include: Iterable[int], multiple_of: int, max_padding: float | None
) -> _Grid:
    multiple_of = _whole("multiple_of", multiple_of)
    if max_size is None:
        max_size = min(math.ceil(workload.largest / multiple_of) * multiple_of, LARGEST_STEP)
    top = _whole("max_size", max_size) // multiple_of * multiple_of
    if not top:
        raise ConfigError(f"max_size must be at least multiple_of={multiple_of}, got {max_size}")
    must = tuple(sorted({_whole("must_include", size) for size in must_include}))
    for size in must:
        if size % multiple_of:
            raise ConfigError(f"must_include must hold multiples of multiple_of={multiple_of}, got {size}")
        if size > top:
            raise ConfigError(f"must_include must not exceed max_size={max_size}, got {size}; raise max_size")
    if max_padding is not None and not 0 <= max_padding < math.inf:
        raise ConfigError(f"max_padding must be a finite share from 0, got {max_padding!r}")
    if max_padding is not None and multiple_of > 1 + max_padding:
        raise ConfigError(
            f"max_padding must be at least {multiple_of - 1} with multiple_of={multiple_of}, got {max_padding}"
        )
    return _Grid(top, multiple_of, must, max_padding)


def _check_types(workload: object, cost: object, must_include: object) -> None:
    if not isinstance(workload, Workload):
        raise ConfigError(
            f"workload must be a Workload, got {reprlib.repr(workload)}; Workload.from_steps() makes one of numbers of "
            "tokens, Workload.from_trace() of a file"
        )
    if cost is not None and not isinstance(cost, CostModel):
        raise ConfigError(
            f"cost must be a CostModel or None, got {reprlib.repr(cost)}; CostModel.of() makes one of numbers, "
            "CostModel.load() of a file"
        )
    if not isinstance(must_include, Iterable):
        raise ConfigError(f"must_include must be sizes, as (1, 8), got {must_include!r}")


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= LARGEST_STEP:
        raise ConfigError(f"{name} must be an integer from 1 to {LARGEST_STEP}, got {value!r}")
    return int(value)


def _amount(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a finite number above 0, got {value!r}")
    return float(value)


def _problems(
    workload: Workload, cost: CostModel, prior: Prior, mode: CUDAGraphMode, grid: _Grid
) -> tuple[list[ModeProblem], float]:
    """A problem for each runtime mode that serves steps, and the expected time of the steps that run eagerly anyway."""
    problems, constant = [], 0.0
    for kind, weights in weights_by_mode(mode, workload).items():
        seen = weights > 0
        if kind is CUDAGraphMode.NONE:
            constant += float(weights @ cost.eager_ms.at(workload.sizes)) / workload.total
        elif seen.any():
            end = grid.reach(int(workload.sizes[seen][-1])) if mode.separate_routine() else grid.top
            expected = float(weights.sum()) / workload.total * prior.expected(workload.sizes[seen], weights[seen], end)
            problem, above = _problem(kind, expected, end, cost, grid, prior != Prior(0.0, 0.0, None))
            problems.append(problem)
            constant += above
    if not any(len(problem.candidates) for problem in problems):
        raise ConfigError(f"mode and max_size must leave steps to serve, and {mode.name} up to {grid.top} serves none")
    return problems, constant


def _problem(
    mode: CUDAGraphMode, expected: Floats, end: int, cost: CostModel, grid: _Grid, is_open: bool
) -> tuple[ModeProblem, float]:
    """The problem of a mode up to ``end``, and the expected time of the steps above, which run eagerly.

    ``expected`` are the shares of steps by size. Sizes that no expected step needs are candidates where the plan is
    ``is_open`` to unseen traffic, or where ``max_padding`` may ask for them.
    """
    batches = np.flatnonzero(expected) + 1
    eager_ms = cost.eager_ms.at(batches)
    above = batches > end
    rest = float(expected[batches[above] - 1] @ eager_ms[above])
    batches, eager_ms = batches[~above], eager_ms[~above]
    candidates = np.arange(grid.multiple_of, end + 1, grid.multiple_of)
    if not is_open and grid.max_padding is None:
        needed = np.union1d(-(-batches // grid.multiple_of) * grid.multiple_of, np.array(grid.must, np.int64))
        candidates = needed[needed <= end]
    costs = cost.graphs(mode)
    columns = (costs.step_ms, costs.capture_ms, costs.graph_bytes, costs.pool_bytes)
    step_ms, capture_ms, graph_bytes, pool_bytes = (column.at(candidates) for column in columns)
    least = np.zeros(len(candidates) + 1, np.int64)
    must = np.searchsorted(candidates, grid.must) + 1
    for number in must:
        least[number + 1 :] = number
    if grid.max_padding is not None:
        below = np.ceil(candidates / (1 + grid.max_padding) - 1e-9).astype(np.int64) - 1
        numbers = np.where(below > 0, np.searchsorted(candidates, below) + 1, 0)
        least[1:] = np.maximum(least[1:], numbers)
    least = np.maximum.accumulate(least)
    problem = ModeProblem(
        mode=mode,
        sizes=batches,
        weights=expected[batches - 1],
        eager_ms=eager_ms,
        candidates=candidates,
        graph_ms=step_ms,
        capture_ms=capture_ms,
        graph_bytes=graph_bytes,
        pool_bytes=pool_bytes,
        least=least,
        last=int(max(must, default=0)),
    )
    return problem, rest


def _guarded(
    problems: list[ModeProblem], budgets: Budgets, regret: float | None
) -> tuple[list[ModeProblem], float | None]:
    """The problems with the guard against unseen traffic, at the least regret that leaves some of each budget."""
    wanted = regret
    while wanted is not None and regret is not None and regret <= _LOOSEST:
        guarded = [_guard(problem, budgets, regret) for problem in problems]
        share = _FOR_THE_GUARD if regret <= _TIGHT * wanted else _FOR_A_LOOSE_GUARD
        if budgets.allow(Spent.by(guarded, [_shortest(problem) for problem in guarded]), share):
            return guarded, regret
        regret *= 2
    return problems, None


def _guard(problem: ModeProblem, budgets: Budgets, regret: float) -> ModeProblem:
    """The problem with graphs as close together as ``regret`` asks, up to the largest that is faster than eager."""
    affordable = int(np.searchsorted(problem.pool_bytes, budgets.memory / 2, "right"))
    winning = [j for j in range(1, affordable + 1) if problem.splits[j] < problem.ends[j]]
    if not winning:
        return problem
    near = np.searchsorted(reach(problem.candidates, regret), problem.candidates)
    near = np.minimum(near, np.arange(len(near)))  # a coarse grid may leave only the next candidate
    least = np.maximum(problem.least, np.concatenate([[0], near]))
    last = max(problem.last, winning[-1])
    return replace(replace(problem, least=least).upto(last), last=last)


def _shortest(problem: ModeProblem) -> tuple[int, ...]:
    """The path of the fewest graphs that the problem allows."""
    path, graph = [], problem.last
    while graph:
        path.append(graph)
        graph = int(problem.least[graph])
    return tuple(reversed(path))


def _check_one_graph_fits(problems: Sequence[ModeProblem], budgets: Budgets) -> None:
    """Raise ``ConfigError`` that names the budget below the cost of every graph."""
    for name, budget, unit, each in (
        ("capture_time", budgets.capture_ms, 1e-3, [r.capture_ms.min(initial=math.inf) for r in problems]),
        ("memory", budgets.memory, 1.0, [(r.graph_bytes + r.pool_bytes).min(initial=math.inf) for r in problems]),
    ):
        if budget < min(each):
            raise ConfigError(
                f"{name}={budget * unit:g} is too small for one graph, which takes {min(each) * unit:g}; raise it"
            )


def _graphs(problems: Sequence[ModeProblem], solution: Solution) -> tuple[PlannedGraph, ...]:
    graphs = []
    for problem, path in zip(problems, solution.paths, strict=True):
        above = 0
        for graph in path:
            size = int(problem.candidates[graph - 1])
            min_batch = 1 + (int(problem.candidates[above - 1]) if above else 0)
            if problem.splits[graph] == problem.ends[graph]:
                min_batch = size + 1
            elif problem.splits[graph] > problem.ends[above]:
                min_batch = int(problem.sizes[problem.splits[graph]])
            graphs.append(PlannedGraph(problem.mode, size, min_batch))
            above = graph
    return tuple(sorted(graphs))
