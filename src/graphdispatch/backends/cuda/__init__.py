"""The CUDA backend: ``torch.cuda.CUDAGraph``, with its traps handled. Importing it does not touch CUDA."""

from .backend import CUDABackend

__all__ = ["CUDABackend"]
