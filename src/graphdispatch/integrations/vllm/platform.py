"""vLLM's CPU platform with graphs."""

import os
from typing import Any

from vllm.platforms.cpu import CpuPlatform

from ...backends import get_backend

__all__ = ["GraphCpuPlatform"]

_ATTENTION = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
_HERE = "graphdispatch.integrations.vllm"


class GraphCpuPlatform(CpuPlatform):
    """The CPU as a device whose steps graphs may serve: vLLM's own options say which (``cudagraph_mode``, sizes)."""

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """Yes."""
        return True

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
        """vLLM's choice; its plain attention as one that graphs may hold."""
        chosen: str = super().get_attn_backend_cls(*args, **kwargs)
        return f"{_HERE}.attention.GraphCpuAttention" if chosen == _ATTENTION else chosen

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """What vLLM settles for the CPU, but for the graphs: modes and sizes stay as vLLM's options have them.

        A model in pieces is traced and split, and no code is generated for the pieces: graphs run them.
        """
        from vllm.config import CompilationMode, CUDAGraphMode  # here, since it asks for the platform

        compilation = vllm_config.compilation_config
        sizes, largest = compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size
        mode, graphs = compilation.mode, compilation.cudagraph_mode
        parallel = vllm_config.parallel_config
        wants_graphs = graphs is not None and graphs != CUDAGraphMode.NONE
        if wants_graphs and parallel.worker_cls == "auto":
            parallel.worker_cls = f"{_HERE}.worker.GraphCpuWorker"
        super().check_and_update_config(vllm_config)
        if not wants_graphs:
            return
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = sizes, largest
        if graphs.has_piecewise_cudagraphs() and mode == CompilationMode.VLLM_COMPILE:
            compilation.mode, compilation.backend = mode, "eager"
            compilation.ir_enable_torch_wrap = False
            # Without generated code there is nothing to keep on disk; vLLM would look for it there at each step.
            os.environ["VLLM_USE_AOT_COMPILE"] = "0"
