"""Planning without a device: workloads, traffic models, cost models and capture plans. Needs numpy, never torch."""

from .workload import Steps, Workload

__all__ = ["Steps", "Workload"]
