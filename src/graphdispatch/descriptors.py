"""What a batch *is* (``DispatchKey``), what a graph *serves* (``BatchDescriptor``), and what a step says of both."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from .errors import ConfigError, check_count, shown
from .modes import CUDAGraphMode


class BatchDescriptor(NamedTuple):
    """The key of a captured graph: padded tokens, requests, kind of batch, and a variant. Immutable and hashable.

    ``variant`` takes the place of vLLM's ``has_lora``.

    Args:
        num_tokens: The padded number of tokens.
        num_reqs: The number of requests. None: any number.
        is_uniform_decode: Whether every request schedules the same number of tokens.
        variant: Anything hashable, besides the shape, that the captured code depends on, for example the number of
            active LoRA adapters.
    """

    num_tokens: int
    num_reqs: int | None = None
    is_uniform_decode: bool = False
    variant: Hashable = None

    def relaxed(self) -> "BatchDescriptor":
        """The descriptor of a graph that serves any number of requests and any kind of batch."""
        return self._replace(num_reqs=None, is_uniform_decode=False)

    @property
    def non_uniform(self) -> "BatchDescriptor":
        """The same descriptor for a batch that is not uniform decode."""
        return self._replace(is_uniform_decode=False)


def size_text(key: Hashable) -> str:
    """The key of a graph as people read a size: ``8``, ``4 x 128``, or the tokens of a batch."""
    if isinstance(key, (BatchDescriptor, DispatchKey)):
        return str(key.num_tokens)
    return " x ".join(map(str, key)) if isinstance(key, tuple) else str(key)


class DispatchKey(NamedTuple):
    """What one batch is, before padding. Immutable and hashable.

    ``create_dispatch_key`` makes a checked one. Keys are compared and hashed as plain tuples.

    Args:
        num_tokens: The number of tokens, at least 1.
        num_reqs: The number of requests, at most ``num_tokens``.
        max_seq_len: The longest sequence in tokens; 0 if unknown.
        is_prefill: Whether the batch is a prefill.
    """

    num_tokens: int
    num_reqs: int
    max_seq_len: int = 0
    is_prefill: bool = False


def create_dispatch_key(num_tokens: int, num_reqs: int, max_seq_len: int = 0, is_prefill: bool = False) -> DispatchKey:
    """A checked ``DispatchKey``.

    Args:
        num_tokens: The number of tokens, at least 1.
        num_reqs: The number of requests, from 1 to ``num_tokens``, since each schedules at least one token.
        max_seq_len: The longest sequence in tokens; 0 if unknown.
        is_prefill: Whether the batch is a prefill.

    Returns:
        The key.

    Raises:
        ConfigError: No batch can have such a count.
    """
    check_count("num_tokens", num_tokens)
    check_count("num_reqs", num_reqs)
    check_count("max_seq_len", max_seq_len, 0)
    if num_reqs > num_tokens:
        raise ConfigError(
            f"num_reqs must be at most num_tokens={num_tokens}, got {num_reqs}; "
            "each request schedules at least one token"
        )
    return DispatchKey(num_tokens, num_reqs, max_seq_len, bool(is_prefill))


def get_padded_key(key: DispatchKey, pad_to: int = 8) -> DispatchKey:
    """``key`` with its tokens and its longest sequence rounded up to multiples of ``pad_to``.

    An unknown longest sequence (0) stays unknown. A decode key with one token for each request keeps ``num_reqs ==
    num_tokens``, so the padded batch is still uniform decode.

    Args:
        key: The key of the batch.
        pad_to: The multiple, at least 1.

    Returns:
        The padded key.

    Raises:
        ConfigError: ``pad_to`` is no positive integer.
    """
    check_count("pad_to", pad_to)
    tokens = -(-key.num_tokens // pad_to) * pad_to
    seq_len = -(-key.max_seq_len // pad_to) * pad_to
    reqs = tokens if not key.is_prefill and key.num_reqs == key.num_tokens else key.num_reqs
    return DispatchKey(tokens, reqs, seq_len, key.is_prefill)


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
    modes = (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
    if not isinstance(mode, CUDAGraphMode) or mode not in modes:  # a number equals a mode
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
