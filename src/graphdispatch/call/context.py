"""Tells wrappers the mode and the batch descriptor of a step, for code that cannot pass them down as arguments."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..descriptors import BatchDescriptor
from ..errors import ConfigError, shown
from ..modes import CUDAGraphMode

__all__ = ["cudagraph_context", "current_context"]

# A context variable, so that each thread and each asyncio task has its own value.
_CURRENT: ContextVar[tuple[CUDAGraphMode, BatchDescriptor | None] | None] = ContextVar(
    "cudagraph_context", default=None
)

current_context = _CURRENT.get
"""The mode and descriptor of the innermost ``cudagraph_context`` of this thread or task, or None."""


@contextmanager
def cudagraph_context(mode: CUDAGraphMode, descriptor: BatchDescriptor | None = None) -> Iterator[None]:
    """Within the block, wrappers that are called without a mode and descriptor use ``mode`` and ``descriptor``.

    ``mode`` is a runtime mode: ``NONE``, ``PIECEWISE`` or ``FULL``. Blocks nest. Each thread and each asyncio task has
    its own blocks. Raises ``ConfigError`` for another mode, or for a graph mode without a descriptor.
    """
    if mode not in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
        raise ConfigError(f"mode must be NONE, PIECEWISE or FULL for one step, got {shown(mode)}")
    if mode is not CUDAGraphMode.NONE and not isinstance(descriptor, BatchDescriptor):
        raise ConfigError(f"descriptor must be a BatchDescriptor in mode {mode.name}, got {shown(descriptor)}")
    token = _CURRENT.set((mode, descriptor))
    try:
        yield
    finally:
        _CURRENT.reset(token)
