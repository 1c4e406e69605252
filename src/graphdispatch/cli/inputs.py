"""What the commands are given: traffic, modes and sizes."""

from ..errors import ConfigError
from ..modes import CUDAGraphMode
from ..plan.workload import Workload
from .options import GraphMode

__all__ = ["generated_workload", "read_numbers", "runtime_mode"]

_GENERATED_STEPS = 2000
_MOST_DIGITS = 9


def generated_workload() -> Workload:
    """The steps of the generated trace that the demo runs by default."""
    from ..demo.trace import generate_trace

    steps = generate_trace(_GENERATED_STEPS)
    return Workload.from_steps([step.num_tokens for step in steps], [step.uniform_decode for step in steps])


def runtime_mode(mode: GraphMode | None) -> CUDAGraphMode:
    """What ``--mode`` stands for."""
    return CUDAGraphMode[mode.value] if mode is not None else CUDAGraphMode.FULL


def read_numbers(option: str, text: str) -> tuple[int, ...]:
    """The sizes in ``1,2,4``, in increasing order."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) <= _MOST_DIGITS for word in words):
        raise ConfigError(f"{option} must be sizes such as 1,2,4; got {text[:40]!r}")
    return tuple(sorted({int(word) for word in words}))
