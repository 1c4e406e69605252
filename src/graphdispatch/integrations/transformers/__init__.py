"""transformers' ``generate`` and continuous batching by graphs. Install it as ``graphdispatch[transformers]``.

from graphdispatch.integrations.transformers import GraphedGeneration

with GraphedGeneration(model, cache_lengths=(256, 1024), max_batch_size=8):
    tokens = model.generate(**inputs, max_new_tokens=64)
"""

from .available import FIRST_VERSION, LAST_VERSION
from .batching import GraphedBatching, graphed_continuous_batching
from .generation import GraphedGeneration, graphed_generation
from .stats import BatchingStats, GenerationStats, NotServed

__all__ = [
    "FIRST_VERSION",
    "LAST_VERSION",
    "BatchingStats",
    "GenerationStats",
    "GraphedBatching",
    "GraphedGeneration",
    "NotServed",
    "graphed_continuous_batching",
    "graphed_generation",
]
