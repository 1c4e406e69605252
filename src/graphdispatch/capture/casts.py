"""Keeps autocast's cache of cast weights out of captures.

Note [autocast inside a capture]
    Autocast keeps cast copies of weights until the outermost region ends, in one cache for all threads. A graph that
    reads such a copy would go on reading it after the weights were written in place, and after the copy was freed. A
    copy that a capture makes lies in the graph's memory, and eager code of the same region would read it. So the cache
    is off while a call is warmed up and recorded: the graph casts the weights itself in each replay.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["uncached_casts"]


@contextmanager
def uncached_casts() -> Iterator[None]:
    """Within the block the calling thread casts weights anew each time. The cache is cleared before and after."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()
