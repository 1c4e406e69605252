"""Graphs that are captured as they are named, why steps ran eagerly, and agreement of ranks."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_tp_group, model_parallel_is_initialized

from .core import CUDAGraphWrapper, Decision, Reason

__all__ = ["EagerSteps", "EngineGraphs", "least_of_ranks", "on_all_ranks"]

_QUIET = (Reason.DISABLED, Reason.MODE_EXCLUDED)
"""What the engine or its user wants."""


class EngineGraphs(CUDAGraphWrapper):
    """Captures a descriptor when it first comes: vLLM names all of them at its warm-up."""

    _captures_at_once = True

    @property
    def why_eager(self) -> Decision | None:
        """The decision of the calling thread's latest call, if it ran eagerly; None if a graph served it.

        Where the graph was captured in another state of the model, the detail says what has changed since.
        """
        decision = self._server.decision
        if decision is None or decision.mode.has_graphs():
            return None
        if decision.reason is Reason.FROZEN:
            change = self._graphs.latest_change
            detail = f"what it reads has changed since its graph was captured at the warm-up ({change})"
            return decision._replace(detail=detail)
        return decision


class EagerSteps(Counter[Reason]):
    """Steps that no graph served, by reason; the first of each reason is a line of ``log``. Not thread-safe.

    ``what`` names a step in that line.
    """

    def __init__(self, what: str, log: logging.Logger) -> None:
        super().__init__()
        self._what, self._log, self._logged = what, log, set[Reason](_QUIET)

    def note(self, decision: Decision, *, counts: bool = True) -> None:
        """Count a step that ran eagerly, unless somebody else ``counts`` it, and log why."""
        reason = decision.reason
        if counts:
            self[reason] += 1
        if reason not in self._logged and not reason.leads_to_graph:
            self._logged.add(reason)
            self._log.warning("graphdispatch: a %s ran eagerly: %s", self._what, decision.detail or reason.text)


def least_of_ranks() -> Callable[[Sequence[int]], list[int]] | None:
    """What gives for each of some integers the least one of all ranks that share the collectives of a model, by one
    small all-reduce between hosts. None where a rank is alone.

    Those are the ranks of tensor parallelism: no model is served whose layers talk to others.
    """
    if not model_parallel_is_initialized() or get_tp_group().world_size == 1:
        return None

    def least(numbers: Sequence[int]) -> list[int]:
        votes = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        get_tp_group().cpu_group.allreduce(
            [votes], dist.ReduceOp.MIN
        ).wait()  # which vLLM ends, so that nobody keeps it
        found: list[int] = votes.tolist()
        return found

    return least


def on_all_ranks(is_so: bool) -> bool:
    """Whether something is so on all of them, each of which calls this."""
    least = least_of_ranks()
    return is_so if least is None else bool(least([is_so])[0])
