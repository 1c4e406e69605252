"""Which batches a model's attention supports in full graphs, and which mode that allows."""

import warnings
from collections.abc import Mapping
from enum import IntEnum

from ..errors import ConfigError
from ..modes import CUDAGraphMode

__all__ = ["AttentionSupport", "resolve_cudagraph_mode"]


class AttentionSupport(IntEnum):
    """Which batches an attention backend can serve in a full graph, by vLLM's levels; a larger value can do more.

    Attributes:
        NEVER: No batch.
        UNIFORM_SINGLE_TOKEN_DECODE: Decode batches with one token for each request.
        UNIFORM_BATCH: Batches whose requests all schedule the same number of tokens.
        ALWAYS: All batches.
    """

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


def resolve_cudagraph_mode(
    cudagraph_mode: CUDAGraphMode,
    supports: Mapping[str, AttentionSupport],
    *,
    uniform_decode_query_len: int = 1,
    piecewise: bool = True,
) -> CUDAGraphMode:
    """The mode that all attention backends of a model can serve: ``cudagraph_mode``, or a lower one.

    The lowest level decides. Each step down is a ``UserWarning`` that says what is lost. The rules are vLLM's:

    - ``FULL`` needs ``ALWAYS``, and otherwise becomes ``FULL_AND_PIECEWISE``, or ``FULL_DECODE_ONLY`` without a split.
    - Full graphs of uniform decode need ``UNIFORM_BATCH`` for a query length above 1, and any level but ``NEVER`` for
      1. Otherwise the mode becomes ``PIECEWISE``, or ``NONE`` without a split.

    Args:
        cudagraph_mode: The mode that was configured.
        supports: The level of every attention backend in the model, by name. Without any, the mode stays.
        uniform_decode_query_len: The tokens that each request of a uniform decode batch schedules, at least 1.
        piecewise: Whether the model is split around attention, so that it can run in piecewise graphs.

    Returns:
        The mode.

    Raises:
        ConfigError: The query length is wrong, the mode is ``FULL`` and a backend supports no full graph at all, or it
            needs piecewise graphs and the model is not split.
    """
    if uniform_decode_query_len < 1:
        raise ConfigError(f"uniform_decode_query_len must be >= 1, got {uniform_decode_query_len}")
    if cudagraph_mode.has_piecewise_cudagraphs() and not piecewise:
        raise ConfigError(
            f"cudagraph_mode must not need piecewise graphs with piecewise=False, got {cudagraph_mode.name}; "
            "split the model around attention, or use FULL or FULL_DECODE_ONLY"
        )
    if not supports:
        return cudagraph_mode
    name, least = min(supports.items(), key=lambda item: item[1])
    mode = cudagraph_mode
    if mode.mixed_mode() is CUDAGraphMode.FULL and least is not AttentionSupport.ALWAYS:
        if least is AttentionSupport.NEVER:
            raise ConfigError(
                f"cudagraph_mode must not be FULL with attention backend {name!r}, which supports no full graph; "
                "use PIECEWISE with a model that is split around attention, or NONE"
            )
        lowered = CUDAGraphMode.FULL_AND_PIECEWISE if piecewise else CUDAGraphMode.FULL_DECODE_ONLY
        mode = _lower(mode, lowered, name, least, "mixed batches lose their full graphs")
    is_single = uniform_decode_query_len == 1
    needed = AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE if is_single else AttentionSupport.UNIFORM_BATCH
    if mode.decode_mode() is CUDAGraphMode.FULL and least < needed:
        lowered = CUDAGraphMode.PIECEWISE if piecewise else CUDAGraphMode.NONE
        lost = f"decode of query length {uniform_decode_query_len} loses its full graphs"
        mode = _lower(mode, lowered, name, least, lost)
    return mode


def _lower(
    mode: CUDAGraphMode, lowered: CUDAGraphMode, name: str, support: AttentionSupport, lost: str
) -> CUDAGraphMode:
    left = "nothing is left but eager" if lowered is CUDAGraphMode.NONE else f"{lowered.name} is left"
    text = (
        f"cudagraph_mode {mode.name} is lowered to {lowered.name}: attention backend {name!r} supports {support.name}"
    )
    warnings.warn(f"{text}, so {lost}; {left}", UserWarning, stacklevel=3)
    return lowered
