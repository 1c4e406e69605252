"""Keeping entries: which get a graph, how many, how many bytes, which one goes; and the graphs of one callable."""

from .admission import Admission
from .budget import MemoryBudget
from .eviction import EvictionPolicy, Frecency, Probation
from .graphset import GraphSet
from .registry import CUDAGraphRegistry
from .store import GraphCache, make_cache

__all__ = [
    "Admission",
    "CUDAGraphRegistry",
    "EvictionPolicy",
    "Frecency",
    "GraphCache",
    "GraphSet",
    "MemoryBudget",
    "Probation",
    "make_cache",
]
