"""The CUDA-graph layer that every inference engine writes for itself: pad, dispatch, replay, slice.

Start with ``graphed``; engines start with ``CUDAGraphWrapper``, ``CUDAGraphManager`` or ``CudagraphDispatcher``.
Importing the package does not import torch; a name that needs it does so when it is first used. ``__init__.pyi`` says
the same to type checkers.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "backends": ("available_backends", "get_backend", "register_backend"),
    "api.adaptive_wrapper": ("AdaptiveCUDAGraphWrapper",),
    "auditing.audit": ("audit",),
    "auditing.result": ("Audit",),
    "plan.autoplan": ("AutoPlan", "IdleAction", "IdleReport"),
    "calibration.calibrate": ("Calibration", "calibrate"),
    "memory.budget": ("MemoryBudget",),
    "memory.eviction": ("EvictionPolicy",),
    "api.registry": ("CUDAGraphRegistry",),
    "call.breaks": ("eager_break", "remove_eager_break"),
    "call.context": ("cudagraph_context",),
    "memory.entry": ("CUDAGraphEntry", "GraphEntry"),
    "memory.outputs": ("OutputView",),
    "call.dims": ("Dim",),
    "call.padding": ("Pad",),
    "capture.piecewise": ("BreakFigures", "break_figures"),
    "config": ("CUDAGraphConfig", "CUDAGraphOptions"),
    "descriptors": ("BatchDescriptor", "DispatchKey", "create_dispatch_key", "get_padded_key"),
    "decide.adaptive": ("AdaptiveDispatchPolicy",),
    "api.composite": ("CompositeDispatcher",),
    "decide.decision": ("Decision",),
    "api.dispatcher": ("CudagraphDispatcher",),
    "decide.engine": ("get_cudagraph_sizes",),
    "decide.keys": ("CudagraphKeyDispatcher",),
    "plan.lint": ("LintCode", "LintFinding", "lint"),
    "plan.dispatcher": ("planned_dispatcher",),
    "plan.prediction": ("Prewarmer", "SizePredictor"),
    "decide.policies": ("DefaultDispatchPolicy", "DispatchPolicy"),
    "api.workers": ("StreamResult",),
    "ranks.consensus": ("Agreement", "RankConsensus", "RankVote"),
    "api.stats": ("DispatchStats",),
    "api.streams": ("StreamDispatcher",),
    "decide.support": ("AttentionSupport", "resolve_cudagraph_mode"),
    "errors": (
        "BackendError",
        "CaptureError",
        "ConfigError",
        "ConsensusError",
        "CopyError",
        "DeviceLostError",
        "FallbackError",
        "GraphDispatchError",
        "GuardError",
        "IntegrityError",
        "ReplayError",
        "StaleOutputError",
        "VerificationError",
    ),
    "api.graphed": ("Graphed", "graphed"),
    "api.manager": ("CUDAGraphManager",),
    "modes": ("CUDAGraphMode", "DispatchMode", "EntryState"),
    "plan.compare": ("Comparison", "compare"),
    "plan.cost": ("CostModel",),
    "plan.grid": ("GridEvaluation", "GridPlan", "plan_capture_grid"),
    "plan.plan": ("Evaluation", "Plan"),
    "plan.planner": ("plan_capture_sizes",),
    "plan.prior": ("Prior",),
    "plan.profile": ("Profile",),
    "plan.scheduler": ("SchedulerModel",),
    "plan.workload": ("Workload",),
    "reasons": ("Reason",),
    "report": ("Report", "audit_report", "callable_report", "plan_report"),
    "report.timeline": ("Timeline", "timeline"),
    "simulation.simulator": ("SimulationResult", "simulate"),
    "sizes": ("named_sizes",),
    "stats": ("CUDAGraphStats",),
    "testing.mock": ("MockCUDAGraph",),
    "api.wrapper": ("CUDAGraphWrapper",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]  # noqa: PLE0604 (the names of the table above)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("graphdispatch")
    if name == "metrics":  # a module: its names need the extra of that name
        return import_module(".metrics", __name__)
    if name in _HOME_OF:
        value = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
