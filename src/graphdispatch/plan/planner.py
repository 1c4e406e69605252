"""``plan_capture_sizes``: the graphs with the least expected step time within the budgets."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from ..config import parse_mode
from ..errors import ConfigError
from ..modes import CUDAGraphMode
from ..sizes import ladder
from .budgets import Budgets, Spent, optimise
from .cost import CostModel
from .intervals import Found, Routine
from .plan import Plan, PlannedGraph, Proof, routines_of
from .prior import Prior, widest
from .traffic import LARGEST_STEP, Floats, Ints
from .workload import Workload

__all__ = ["plan_capture_sizes"]

_LOOSEST = 16.0
_FOR_THE_GUARD = 0.9
_FOR_A_LOOSER_GUARD = 0.6


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
    many graphs as vLLM's ladder has. No graph is above ``max_size`` tokens (default: the largest size of the workload).
    Each mode gets the sizes ``must_include``; all are multiples of ``multiple_of``. ``max_padding`` limits what any
    batch up to the largest graph is padded by, as a share of its tokens. ``prior`` is the share of steps that may be of
    any size, or all that is expected beyond the workload; 0 plans for exactly the workload. ``mode`` FULL or PIECEWISE
    plans one set of graphs for all batches; the composite modes plan FULL graphs for uniform decode alone.

    Where each graph costs the same memory and time, the plan is an exact optimum, in time about proportional to the
    range. Else ``Plan.proof`` carries the proved bound. Raises ``ConfigError`` for bad or contradictory arguments, and
    for budgets that no graph fits.
    """
    cost, prior, mode = cost or CostModel.default(), Prior.of(prior), parse_mode(mode)
    if not mode.has_graphs():
        raise ConfigError("mode must have graphs to plan, got NONE")
    multiple_of = _whole("multiple_of", multiple_of)
    if max_size is None:
        max_size = min(math.ceil(workload.largest / multiple_of) * multiple_of, LARGEST_STEP)
    top = _whole("max_size", max_size) // multiple_of * multiple_of
    if not top:
        raise ConfigError(f"max_size must be at least multiple_of={multiple_of}, got {max_size}")
    must = _checked_must(must_include, multiple_of, max_size)
    if max_padding is not None and not 0 <= max_padding < math.inf:
        raise ConfigError(f"max_padding must be a finite share from 0, got {max_padding!r}")
    if max_graphs is None and memory is None and capture_time is None:
        max_graphs = len(ladder("vllm", top))
    budgets = Budgets(
        math.inf if max_graphs is None else _whole("max_graphs", max_graphs),
        math.inf if capture_time is None else 1e3 * _amount("capture_time", capture_time),
        math.inf if memory is None else _amount("memory", memory),
    )
    if max_padding is not None and multiple_of > 1 + max_padding:
        raise ConfigError(f"max_padding must be at least {multiple_of - 1} with multiple_of={multiple_of}, got {max_padding}")
    everywhere = prior.share > 0 or prior.regret is not None or max_padding is not None
    routines, constant = [], 0.0
    for kind, weights in routines_of(mode, workload).items():
        share = float(weights.sum()) / workload.total
        if not weights.any():
            continue
        sizes = workload.sizes[weights > 0]
        if kind is CUDAGraphMode.NONE:
            constant += share * float(cost.eager_ms.at(sizes) @ weights[weights > 0]) / float(weights.sum())
            continue
        reach = top if not mode.separate_routine() else _reach(int(sizes[-1]), top, multiple_of, must)
        routine, rest = _routine(kind, sizes, weights[weights > 0], share, reach, cost, prior, (multiple_of, must, everywhere))
        constant += rest
        routines.append(routine)
    if not any(len(routine.candidates) for routine in routines):
        raise ConfigError(f"mode and max_size must leave steps to serve, and {mode.name} up to {max_size} serves none")
    _check_one_graph_fits(routines, budgets)
    limited = [_limited(routine, must, max_padding) for routine in routines]
    guarded, regret = _guarded(limited, budgets, prior.regret)
    best = optimise(guarded, budgets)
    if best is None and regret is not None:
        regret, best = None, optimise(limited, budgets)
    if best is None:
        raise ConfigError(
            f"the budgets must pay for must_include={must} with max_padding={max_padding}, and do not; raise "
            "max_graphs, memory or capture_time, or ask for less"
        )
    found, bound = best
    proof = Proof(
        expected_ms=found.cost + constant,
        bound_ms=bound + constant,
        cost=cost.source,
        prior=prior.share,
        drift=prior.drift,
        regret=regret,
        largest=top,
    )
    return Plan(mode, _graphs(guarded, found), proof)


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= LARGEST_STEP:
        raise ConfigError(f"{name} must be an integer from 1 to {LARGEST_STEP}, got {value!r}")
    return int(value)


def _amount(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a finite number above 0, got {value!r}")
    return float(value)


def _reach(largest: int, top: int, multiple_of: int, must: Sequence[int]) -> int:
    """The end of the range of one kind of batch of which ``largest`` was seen: twice that, on the grid."""
    return max(min(top, math.ceil(2 * largest / multiple_of) * multiple_of), *must, 1)


def _checked_must(must_include: Iterable[int], multiple_of: int, max_size: int) -> tuple[int, ...]:
    must = tuple(sorted({_whole("must_include", size) for size in must_include}))
    for size in must:
        if size % multiple_of:
            raise ConfigError(f"must_include must hold multiples of multiple_of={multiple_of}, got {size}")
        if size > max_size:
            raise ConfigError(f"must_include must not exceed max_size={max_size}, got {size}; raise max_size")
    return must


def _routine(
    mode: CUDAGraphMode,
    sizes: Ints,
    weights: Floats,
    share: float,
    largest: int,
    cost: CostModel,
    prior: Prior,
    rules: tuple[int, tuple[int, ...], bool],
) -> tuple[Routine, float]:
    """The routine of a mode up to ``largest``, and the expected time of the steps above, which run eagerly."""
    multiple_of, must, everywhere = rules
    expected = share * prior.expected(sizes, weights, largest)
    batches = np.flatnonzero(expected) + 1
    eager_ms = cost.eager_ms.at(batches)
    above = batches > largest
    rest = float(expected[batches[above] - 1] @ eager_ms[above])
    batches, eager_ms = batches[~above], eager_ms[~above]
    candidates = np.arange(multiple_of, largest + 1, multiple_of)
    if not everywhere:
        needed = np.union1d(-(-batches // multiple_of) * multiple_of, np.array(must, np.int64))
        candidates = needed[needed <= largest]
    costs = cost.graphs(mode)
    columns = (costs.step_ms, costs.capture_ms, costs.graph_bytes, costs.pool_bytes)
    free = np.zeros(len(candidates) + 1, np.int64)
    values = (column.at(candidates) for column in columns)
    return Routine(mode, batches, expected[batches - 1], eager_ms, candidates, *values, free), rest


def _limited(routine: Routine, must: Sequence[int], max_padding: float | None) -> Routine:
    """With the predecessors that ``must_include`` and ``max_padding`` allow."""
    count = len(routine.candidates)
    numbers = np.searchsorted(routine.candidates, must) + 1
    least = np.zeros(count + 1, np.int64)
    for number in numbers:
        least[number + 1 :] = number
    if max_padding is not None:
        below = np.ceil(routine.candidates / (1 + max_padding) - 1e-9).astype(np.int64) - 1
        least[1:] = np.maximum(least[1:], _number(routine, below))
    return replace(routine, least=np.maximum.accumulate(least), last=int(numbers.max(initial=0)))


def _number(routine: Routine, sizes: Ints) -> Ints:
    """The number of the first graph of at least each of ``sizes``; 0 for 0."""
    return np.where(sizes > 0, np.searchsorted(routine.candidates, sizes) + 1, 0)


def _guarded(routines: list[Routine], budgets: Budgets, regret: float | None) -> tuple[list[Routine], float | None]:
    """With the guard against unseen traffic, at the least regret that leaves the budgets something for what was seen."""
    share = _FOR_THE_GUARD
    while regret is not None and regret <= _LOOSEST:
        guarded = [_guard(routine, budgets, regret) for routine in routines]
        if budgets.allow(Spent.by(guarded, [_fewest(routine) for routine in guarded]), share):
            return guarded, regret
        regret, share = 2 * regret, _FOR_A_LOOSER_GUARD
    return routines, None


def _guard(routine: Routine, budgets: Budgets, regret: float) -> Routine:
    """With graphs as near to each other as ``regret`` asks, up to the largest one that is faster than eager."""
    table = routine.table
    affordable = int(np.searchsorted(routine.pool_bytes, budgets.memory / 2, "right"))
    winning = [j for j in range(1, affordable + 1) if table.splits[j] < table.ends[j]]
    if not winning:
        return routine
    below = routine.candidates - widest(routine.candidates, regret)
    least = np.minimum(_number(routine, below), np.arange(len(below)))
    least = np.maximum.accumulate(np.maximum(routine.least, np.concatenate([[0], least])))
    last = max(routine.last, winning[-1])
    return replace(replace(routine, least=least).upto(last), last=last)


def _fewest(routine: Routine) -> tuple[int, ...]:
    """The path of the fewest graphs that the routine allows."""
    path, graph = [], routine.last
    while graph:
        path.append(graph)
        graph = int(routine.least[graph])
    return tuple(reversed(path))


def _check_one_graph_fits(routines: Sequence[Routine], budgets: Budgets) -> None:
    """Raise ``ConfigError`` that names the budget below the cost of every graph."""
    for name, budget, unit, each in (
        ("capture_time", budgets.capture_ms, 1e-3, [r.capture_ms.min(initial=math.inf) for r in routines]),
        ("memory", budgets.memory, 1.0, [(r.graph_bytes + r.pool_bytes).min(initial=math.inf) for r in routines]),
    ):
        if budget < min(each):
            raise ConfigError(f"{name}={budget * unit:g} is too small for one graph, which takes {min(each) * unit:g}; raise it")


def _graphs(routines: Sequence[Routine], found: Found) -> tuple[PlannedGraph, ...]:
    graphs = []
    for routine, path in zip(routines, found.paths, strict=True):
        table, above = routine.table, 0
        for graph in path:
            size, first = int(routine.candidates[graph - 1]), 1 + (int(routine.candidates[above - 1]) if above else 0)
            if table.splits[graph] == table.ends[graph]:
                first = size + 1
            elif table.splits[graph] > table.ends[above]:
                first = int(routine.sizes[table.splits[graph]])
            graphs.append(PlannedGraph(routine.mode, size, first))
            above = graph
    return tuple(sorted(graphs))
