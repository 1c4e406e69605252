"""What follows from an engine's configuration: its capture sizes and its mode."""

import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import ConfigError, check_count, shown
from ..modes import CUDAGraphMode
from ..sizes import check_sizes, named_sizes

__all__ = ["EngineSettings", "check_split", "get_cudagraph_sizes", "mode_of", "sorted_sizes"]

_AUTO_LARGEST = 512


class EngineSettings(NamedTuple):
    """What a ``CudagraphKeyDispatcher`` takes from an engine's configuration; the defaults stand for none."""

    capture_sizes: str | Iterable[int] = "auto"
    max_num_reqs: int = 256
    variants: Iterable[Hashable] = (None,)
    piecewise: bool = True
    mode: CUDAGraphMode = CUDAGraphMode.NONE

    @classmethod
    def of(cls, config: Any) -> "EngineSettings":
        """Read ``compilation_config``, ``scheduler_config`` and ``lora_config`` of ``config``, as vLLM 0.11.1 does.

        Their attributes may be missing or None, but for ``scheduler_config.max_num_seqs``. Raises ``ConfigError`` for
        an object of another shape.
        """
        compilation = getattr(config, "compilation_config", None)
        max_num_seqs = getattr(getattr(config, "scheduler_config", None), "max_num_seqs", None)
        if compilation is None or max_num_seqs is None:
            raise ConfigError(
                "vllm_config must have compilation_config and scheduler_config.max_num_seqs, as vLLM's VllmConfig has, "
                f"got {shown(config)}; give capture_sizes=, max_num_reqs= and the others instead"
            )
        variants: tuple[Hashable, ...] = (None,)
        if getattr(config, "lora_config", None) is not None:
            variants = (True, False) if getattr(compilation, "cudagraph_specialize_lora", True) else (True,)
        is_split = getattr(compilation, "is_attention_compiled_piecewise", None)
        mode = getattr(compilation, "cudagraph_mode", None)
        return cls(
            capture_sizes=getattr(compilation, "cudagraph_capture_sizes", None) or "auto",
            max_num_reqs=max_num_seqs,
            variants=variants,
            piecewise=is_split is None or bool(is_split()),
            mode=CUDAGraphMode.NONE if mode is None else mode_of(mode),
        )


def mode_of(value: Any) -> CUDAGraphMode:
    """The mode that ``value`` is: a ``CUDAGraphMode``, or an engine's enumeration member of the same name."""
    mode = CUDAGraphMode.__members__.get(str(getattr(value, "name", "")))
    if mode is None:
        raise ConfigError(f"cudagraph_mode must be a CUDAGraphMode, got {shown(value)}")
    return mode


def get_cudagraph_sizes(
    capture_sizes: str | Iterable[int] | None,
    max_num_reqs: int,
    max_num_tokens: int,
    mode: CUDAGraphMode,
    *,
    query_len: int = 1,
) -> list[int]:
    """The sizes, in tokens, to capture for an engine's limits.

    Args:
        capture_sizes: ``"auto"`` or None for vLLM's sizes up to ``min(2 * max_num_reqs, 512, max_num_tokens)``; another
            name of ``named_sizes`` for its sizes up to the same limit; or sizes in any order. To named sizes both
            limits are added where they are not larger. Explicit sizes above ``max_num_tokens``, which no batch can
            reach, are dropped with a ``UserWarning``.
        max_num_reqs: The most requests of a batch.
        max_num_tokens: The most tokens of a batch.
        mode: The configured mode. In ``FULL_DECODE_ONLY`` no size exceeds ``max_num_reqs * query_len``, the tokens of
            the largest uniform decode batch.
        query_len: The tokens that each request of a decode batch schedules; more than 1 with speculative decoding.

    Returns:
        The sizes, strictly increasing; empty in mode ``NONE``.

    Raises:
        ConfigError: An argument is wrong, or no explicit size is left.
    """
    if not isinstance(mode, CUDAGraphMode):
        raise ConfigError(f"mode must be a CUDAGraphMode, got {shown(mode)}; write for example CUDAGraphMode.FULL")
    check_count("max_num_reqs", max_num_reqs)
    check_count("max_num_tokens", max_num_tokens)
    check_count("query_len", query_len)
    if not mode.has_graphs():
        return []
    bound = max_num_tokens
    if mode is CUDAGraphMode.FULL_DECODE_ONLY:
        bound = min(bound, max_num_reqs * query_len)
    if capture_sizes is not None and not isinstance(capture_sizes, str):
        return _reachable(sorted_sizes(capture_sizes), max_num_tokens, bound)
    largest = min(2 * max_num_reqs, _AUTO_LARGEST, bound)
    exact = {size for size in (max_num_reqs, bound) if size <= largest}
    name = "vllm" if capture_sizes is None or capture_sizes == "auto" else capture_sizes
    return sorted(exact.union(named_sizes(name, largest)))


def sorted_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """``sizes`` in increasing order, each once. Raises ``ConfigError`` as ``check_sizes`` does for anything else."""
    if isinstance(sizes, (str, bytes, Mapping)) or not isinstance(sizes, Iterable):
        raise ConfigError(f"capture_sizes must be sizes, as [8, 16], got {shown(sizes)}")
    given = tuple(sizes)
    for index, size in enumerate(given):
        check_count(f"capture_sizes[{index}]", size)
    return check_sizes(sorted(set(given)), "capture_sizes")


def _reachable(sizes: Sequence[int], max_num_tokens: int, bound: int) -> list[int]:
    kept = [size for size in sizes if size <= bound]
    if not kept:
        raise ConfigError(
            f"capture_sizes must hold a size that a batch of at most {bound} tokens reaches, got {sizes[0]} as the "
            "smallest"
        )
    dropped = [size for size in sizes if size > max_num_tokens]
    if dropped:
        warnings.warn(
            f"capture_sizes {', '.join(map(str, dropped))} are above max_num_tokens={max_num_tokens} and were dropped: "
            "no batch reaches them",
            UserWarning,
            stacklevel=3,
        )
    return kept


def check_split(mode: CUDAGraphMode, piecewise: bool) -> None:
    """Raise ``ConfigError`` for a mode that needs piecewise graphs if the model is not split for them."""
    if mode.has_piecewise_cudagraphs() and not piecewise:
        raise ConfigError(
            f"cudagraph_mode must not need piecewise graphs with piecewise=False, got {mode.name}; "
            "split the model around attention, or use FULL or FULL_DECODE_ONLY"
        )
