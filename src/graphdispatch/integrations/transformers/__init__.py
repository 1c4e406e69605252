"""transformers' ``generate`` by graphs. ``pip install '.[transformers]'`` brings it.

from graphdispatch.integrations.transformers import GraphedGeneration

with GraphedGeneration(model, cache_lengths=(256, 1024), max_batch_size=8):
    tokens = model.generate(**inputs, max_new_tokens=64)
"""

from .available import FIRST_VERSION, LAST_VERSION
from .generation import GraphedGeneration, graphed_generation
from .slots import GenerationStats, NotServed

__all__ = [
    "FIRST_VERSION",
    "LAST_VERSION",
    "GenerationStats",
    "GraphedGeneration",
    "NotServed",
    "graphed_generation",
]
