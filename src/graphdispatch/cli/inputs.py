"""What the commands are given: traffic, plans and costs, each from a file or by default."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..modes import CUDAGraphMode
from ..plan.cost import CostModel
from ..plan.plan import Plan
from ..plan.scheduler import SchedulerModel
from ..plan.workload import Workload
from ..sizes import NAMED_SIZES
from .options import GraphMode

__all__ = [
    "generated_workload",
    "largest_size",
    "read_cost",
    "read_numbers",
    "read_plan",
    "read_sizes",
    "read_workload",
    "runtime_mode",
]

_GENERATED_STEPS = 2000
_LARGEST = 512  # vLLM's default limit
_STEP = 16  # the largest step of vLLM's capture sizes, the only ones that may end below the largest size
_MOST_DIGITS = 9


def read_workload(
    paths: Sequence[Path] | None, requests: bool, max_num_seqs: int | None, max_num_batched_tokens: int | None
) -> Workload:
    """The steps in all of ``paths``, one after the other; without any, those of a small generated trace.

    With ``requests`` a scheduler with these limits (None: its defaults) makes the steps.
    """
    if not paths:
        if requests:
            raise ConfigError("--requests needs a TRACE of requests")
        return generated_workload()
    scheduler = None
    if requests:
        limits: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        scheduler = SchedulerModel(**{name: limit for name, limit in limits.items() if limit is not None})
    first, *others = [_read_one(path, scheduler) for path in paths]
    return first.merge(*others) if others else first


def _read_one(path: Path, scheduler: SchedulerModel | None) -> Workload:
    if scheduler is not None:
        return Workload.from_requests(path, scheduler)
    return Workload.load(path) if path.suffix == ".json" else Workload.from_trace(path)


def generated_workload() -> Workload:
    """The steps of the generated trace that the demo runs by default."""
    from ..demo.trace import generate_trace

    tokens, reqs, _, _, uniform, _ = zip(*generate_trace(_GENERATED_STEPS), strict=True)
    return Workload.from_steps(tokens, uniform, reqs)


def read_cost(path: Path | None) -> CostModel:
    """The cost model in a file, or the default one."""
    return CostModel.load(path) if path is not None else CostModel.default()


def runtime_mode(mode: GraphMode | None) -> CUDAGraphMode:
    """What ``--mode`` stands for."""
    return CUDAGraphMode[mode.value] if mode is not None else CUDAGraphMode.FULL


def largest_size(max_size: int | None, workload: Workload | None = None) -> int:
    """What ``--max-size`` stands for; by default no sizes end below the largest step, up to vLLM's limit."""
    if max_size is not None:
        return max_size
    return min(_LARGEST, -(-workload.largest // _STEP) * _STEP) if workload is not None else _LARGEST


def read_plan(path: Path | None, sizes: str | None, mode: GraphMode | None, max_size: int | None) -> Plan:
    """The plan in a file, or of ``sizes``: an engine's by name, or numbers. One of both must be given."""
    if (path is None) == (sizes is None):
        raise ConfigError("expected either a plan's file or --sizes, and not both")
    if sizes is not None:
        return Plan.from_sizes(read_sizes("--sizes", sizes), largest_size(max_size), mode=runtime_mode(mode))
    if mode is not None or max_size is not None:
        raise ConfigError("--mode and --max-size go with --sizes; a plan has a mode and a largest size of its own")
    assert path is not None
    return Plan.load(path)


def read_sizes(option: str, text: str) -> str | tuple[int, ...]:
    """The name of an engine's sizes, or sizes in increasing order from ``1,2,4``."""
    return text if text in NAMED_SIZES else read_numbers(option, text, f", or one of {', '.join(NAMED_SIZES)}")


def read_numbers(option: str, text: str, alternative: str = "") -> tuple[int, ...]:
    """The sizes in ``1,2,4``, in increasing order."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) <= _MOST_DIGITS for word in words):
        raise ConfigError(f"{option} must be sizes such as 1,2,4{alternative}; got {text[:40]!r}")
    return tuple(sorted({int(word) for word in words}))
