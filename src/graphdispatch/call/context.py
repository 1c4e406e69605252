"""The mode and the batch descriptor of a step, for code that cannot pass them to wrappers as arguments."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..descriptors import BatchDescriptor
from ..errors import ConfigError, shown
from ..modes import CUDAGraphMode

# A context variable, so that each thread and each asyncio task has its own value.
_CURRENT: ContextVar[tuple[CUDAGraphMode, BatchDescriptor | None] | None] = ContextVar(
    "cudagraph_context", default=None
)

REAL_ROWS: ContextVar[int | None] = ContextVar("cudagraph_rows", default=None)
"""How many rows of the current step's batch are real, if its caller padded it and said so, or None."""

current_context = _CURRENT.get
"""The mode and descriptor of the innermost ``cudagraph_context`` of this thread or task, or None."""


@contextmanager
def cudagraph_context(
    mode: CUDAGraphMode, descriptor: BatchDescriptor | None = None, *, rows: int | None = None
) -> Iterator[None]:
    """Within the block, wrappers that are called without a mode and descriptor use ``mode`` and ``descriptor``.

    Blocks nest. Each thread and each asyncio task has its own blocks.

    Args:
        mode: A runtime mode: ``NONE``, ``PIECEWISE`` or ``FULL``.
        descriptor: What the graph serves; needed unless ``mode`` is ``NONE``.
        rows: How many rows of the padded batch are real; comparisons with eager leave out the others. None: all.

    Raises:
        ConfigError: The mode is no runtime mode, a graph mode has no descriptor, or the descriptor has fewer rows.
    """
    if mode not in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
        raise ConfigError(f"mode must be NONE, PIECEWISE or FULL for one step, got {shown(mode)}")
    if mode is not CUDAGraphMode.NONE and not isinstance(descriptor, BatchDescriptor):
        raise ConfigError(f"descriptor must be a BatchDescriptor in mode {mode.name}, got {shown(descriptor)}")
    most = descriptor.num_tokens if descriptor is not None else 0
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= most):
        raise ConfigError(
            f"rows must be how many of the descriptor's {most} tokens are real, from 1 on, or None; got {shown(rows)}"
        )
    token, rows_token = _CURRENT.set((mode, descriptor)), REAL_ROWS.set(rows)
    try:
        yield
    finally:
        REAL_ROWS.reset(rows_token)
        _CURRENT.reset(token)
