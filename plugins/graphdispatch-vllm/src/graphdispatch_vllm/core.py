"""All that the plug-in takes from graphdispatch: its public names, and two modules that are internal to it."""

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Decision, Reason
from graphdispatch.backends import get_backend
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper
from graphdispatch.engines.keys import KeyTable, mode_of
from graphdispatch.errors import ConfigError, FallbackError

__all__ = [
    "BatchDescriptor",
    "CUDAGraphMode",
    "CUDAGraphOptions",
    "CUDAGraphWrapper",
    "ConfigError",
    "Decision",
    "FallbackError",
    "KeyTable",
    "Reason",
    "get_backend",
    "mode_of",
]
