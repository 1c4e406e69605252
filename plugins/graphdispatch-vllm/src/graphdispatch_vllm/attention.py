"""vLLM's CPU attention, said to be good for full graphs."""

from typing import ClassVar

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadataBuilder

__all__ = ["GraphCpuAttention", "GraphCpuMetadata"]


class GraphCpuMetadata(CPUAttentionMetadataBuilder):
    """Makes new metadata each step, as vLLM's; each graph has a copy at fixed addresses (``steps.py``)."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS


class GraphCpuAttention(CPUAttentionBackend):
    """The same kernels, for batches of any kind."""

    @staticmethod
    def get_builder_cls() -> type[GraphCpuMetadata]:
        """The builder whose metadata graphs may use."""
        return GraphCpuMetadata
