"""Plans beside the engines' capture sizes, planned on the first part of the traffic and judged on the rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..modes import CUDAGraphMode
from .cost import CostModel
from .plan import Evaluation, Plan
from .planner import plan_capture_sizes
from .workload import Workload

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True)
class Comparison:
    """One set of graphs and what it came to on traffic that it was not planned for.

    ``name`` is that of an engine's sizes; ``planned`` tells whether the set is a plan with their number of graphs
    (``share`` of it) instead of them.
    """

    name: str
    planned: bool
    share: float
    plan: Plan
    result: Evaluation

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data, for JSON."""
        return {
            "name": self.name,
            "planned": self.planned,
            "share": self.share,
            "sizes": list(self.plan.sizes),
            **self.result.to_dict(),
        }


def compare(
    workload: Workload,
    names: Sequence[str] = ("vllm",),
    cost: CostModel | None = None,
    *,
    fraction: float = 0.5,
    max_size: int = 512,
    shares: Sequence[float] = (1.0, 0.5),
    mode: CUDAGraphMode = CUDAGraphMode.FULL,
    **options: Any,
) -> tuple[Comparison, ...]:
    """Capture sizes by name up to ``max_size``, and plans of ``shares`` of as many graphs, judged out of sample.

    Plans see the first ``fraction`` of the ordered steps, and all sets are judged on the rest. ``options`` go to
    ``plan_capture_sizes``. Raises ``ConfigError`` for a workload without ordered steps.
    """
    seen, unseen = workload.split(fraction)
    rows = []
    for name in names:
        taken = Plan.from_sizes(name, max_size, mode=mode)
        rows.append(Comparison(name, False, 1.0, taken, taken.evaluate(unseen, cost)))
        for share in shares:
            graphs = max(1, round(share * len(taken.graphs)))
            plan = plan_capture_sizes(seen, cost, max_graphs=graphs, max_size=max_size, mode=mode, **options)
            rows.append(Comparison(name, True, share, plan, plan.evaluate(unseen, cost)))
    return tuple(rows)
