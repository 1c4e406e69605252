"""For people who test their own dispatchers: a scripted graph, and fault injection."""

from .mock import MockCUDAGraph

__all__ = ["MockCUDAGraph"]
