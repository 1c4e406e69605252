"""All that the plug-in takes from graphdispatch: its public names, and four modules that are internal to it."""

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Decision, Reason
from graphdispatch.backends import get_backend
from graphdispatch.backends.operators import WRITTEN_PLACES, bits_equal, tensors_in
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper
from graphdispatch.engines.keys import KeyTable, mode_of
from graphdispatch.errors import ConfigError, FallbackError
from graphdispatch.runtime.decide import Memo

__all__ = [
    "WRITTEN_PLACES",
    "BatchDescriptor",
    "CUDAGraphMode",
    "CUDAGraphOptions",
    "CUDAGraphWrapper",
    "ConfigError",
    "Decision",
    "FallbackError",
    "KeyTable",
    "Memo",
    "Reason",
    "bits_equal",
    "get_backend",
    "mode_of",
    "tensors_in",
]
