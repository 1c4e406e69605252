"""Keeping entries: how many, how many bytes, which one goes when there is no room; and the graphs of one callable."""

from .graphset import GraphSet
from .registry import CUDAGraphRegistry
from .store import GraphCache

__all__ = ["CUDAGraphRegistry", "GraphCache", "GraphSet"]
