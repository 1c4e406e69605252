"""vLLM's CPU attention, said to be good for full graphs; and where it writes in its cache."""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadataBuilder

from .core import WRITTEN_PLACES

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


def _written_blocks(cache: torch.Tensor, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The blocks of a cache of keys or values that the slots of a step lie in; kernels order a block as they like.

    Slots of padding are negative.
    """
    slots, block_size = args[4], cache.shape[2]
    return [torch.unique(slots[slots >= 0] // block_size)]


WRITTEN_PLACES["_C::cpu_attn_reshape_and_cache"] = _written_blocks
