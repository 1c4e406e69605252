"""vLLM's CPU platform with graphs."""

import os
from typing import Any, ClassVar

from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform

from .core import get_backend
from .support import why_not

__all__ = ["GraphCpuPlatform"]

_logger = init_logger("vllm.graphdispatch")
_ATTENTION = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
_HERE = "graphdispatch_vllm"
_WITH_GRAPHS, _WITHOUT = f"{_HERE}.worker.GraphCpuWorker", f"{_HERE}.plain.PlainCpuWorker"
"""The workers of configurations that were decided."""


class GraphCpuPlatform(CpuPlatform):
    """The CPU as a device whose steps graphs may serve: vLLM's own options say which (``cudagraph_mode``, sizes).

    A configuration that graphs do not serve gets what it would get of vLLM's own platform.
    """

    declines: ClassVar[bool] = False
    """Whether the latest configuration of this process has no graphs of this library."""

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        """Where vLLM first shows its platform a configuration: decide whether graphs serve it.

        The process of an engine shows it once more when it has started, with what vLLM derived since. What was decided
        stays.
        """
        worker = vllm_config.parallel_config.worker_cls
        if worker in (_WITH_GRAPHS, _WITHOUT):
            cls.declines = worker == _WITHOUT
        else:
            cls.declines = not cls._serves(vllm_config)
        super().apply_config_platform_defaults(vllm_config)

    @classmethod
    def _serves(cls, vllm_config: Any) -> bool:
        """Whether graphs serve a configuration; if the user wants some and they do not, a line of the log says why."""
        from vllm.config import CUDAGraphMode  # here, since it needs the platform

        if vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
            return False
        reason = why_not(vllm_config)
        if reason is not None:
            _logger.warning("graphdispatch does not serve this vLLM: %s", reason)
        return reason is None

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """Whether the configuration that vLLM is making may keep its graphs."""
        return not cls.declines

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        """The class that vLLM puts around the pieces of a model."""
        return f"{_HERE}.wrapper.StaticGraphWrapper"

    def graph_pool_handle(self) -> Any:
        """A pool of graph memory, with the backend that it belongs to."""
        backend = get_backend("cpu")
        return backend, backend.make_pool()

    @classmethod
    def get_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        """vLLM's choice; its plain attention as one that graphs may hold, where there are graphs."""
        from vllm.config import CUDAGraphMode, get_current_vllm_config  # here, since it needs the platform

        chosen: str = super().get_attn_backend_cls(*args, **kwargs)
        has_graphs = get_current_vllm_config().compilation_config.cudagraph_mode != CUDAGraphMode.NONE
        return f"{_HERE}.attention.GraphCpuAttention" if chosen == _ATTENTION and has_graphs else chosen

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """What vLLM settles for the CPU, but for the graphs: modes and sizes stay as vLLM's options have them.

        A model in pieces is traced and split, and no code is generated for the pieces: graphs run them.
        """
        from vllm.config import CompilationMode, CUDAGraphMode  # here, since it needs the platform

        compilation, parallel = vllm_config.compilation_config, vllm_config.parallel_config
        sizes, largest = compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size
        mode, graphs = compilation.mode, compilation.cudagraph_mode
        has_graphs = graphs != CUDAGraphMode.NONE
        if parallel.worker_cls == "auto":
            parallel.worker_cls = _WITH_GRAPHS if has_graphs else _WITHOUT
        super().check_and_update_config(vllm_config)
        if not has_graphs:
            return
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = sizes, largest
        if graphs.has_piecewise_cudagraphs() and mode == CompilationMode.VLLM_COMPILE:
            compilation.mode, compilation.backend = mode, "eager"
            compilation.ir_enable_torch_wrap = False
            # vLLM's own kernels, as it runs them eagerly: what it has generators fuse instead rounds in other places.
            compilation.custom_ops = ["all" if op == "none" else op for op in compilation.custom_ops]
            # Without generated code there is nothing to keep on disk; vLLM would look for it there at each step.
            os.environ["VLLM_USE_AOT_COMPILE"] = "0"
