"""What an engine's configuration says of graphs: an object of the shape of vLLM's ``VllmConfig``."""

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from ..errors import ConfigError, shown
from ..modes import CUDAGraphMode

__all__ = ["EngineSettings", "mode_of"]


class EngineSettings(NamedTuple):
    """What a ``CudagraphKeyDispatcher`` takes from an engine's configuration; the defaults stand for no configuration."""

    capture_sizes: str | Iterable[int] = "auto"
    max_num_reqs: int = 256
    variants: Iterable[Hashable] = (None,)
    compile_sizes: Iterable[int] = ()
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
            compile_sizes=[size for size in getattr(compilation, "compile_sizes", None) or () if type(size) is int],
            piecewise=is_split is None or bool(is_split()),
            mode=CUDAGraphMode.NONE if mode is None else mode_of(mode),
        )


def mode_of(value: Any) -> CUDAGraphMode:
    """The mode that ``value`` is: a ``CUDAGraphMode``, or an engine's enumeration member of the same name."""
    mode = CUDAGraphMode.__members__.get(str(getattr(value, "name", "")))
    if mode is None:
        raise ConfigError(f"cudagraph_mode must be a CUDAGraphMode, got {shown(value)}")
    return mode
