"""Planning without a device: workloads, cost models and capture plans. Needs numpy, never torch."""

from .cost import CostModel
from .plan import Evaluation, Plan
from .planner import plan_capture_sizes
from .workload import Steps, Workload

__all__ = ["CostModel", "Evaluation", "Plan", "Steps", "Workload", "plan_capture_sizes"]
