"""A scripted graph with fault injection, for people who test their own dispatchers."""

from .mock import MockCUDAGraph

__all__ = ["MockCUDAGraph"]
