"""Which sizes to capture, for recorded traffic and within limits. Only ``CostModel.measure`` needs torch."""

from .cost import CostModel
from .plan import Evaluation, Plan
from .planner import plan_sizes
from .workload import Workload

__all__ = ["CostModel", "Evaluation", "Plan", "Workload", "plan_sizes"]
