"""Keeps autocast's cache of cast weights out of captures.

Note [autocast inside a capture]
    Autocast keeps the cast copies of weights until the outermost region ends, one cache for all threads. A graph that
    reads such a copy would go on with it after the weights were written in place, and after it was freed; a copy that a
    capture made is memory of the graph, which eager code of the same region would read. So nothing is looked up there
    and nothing is kept while a call is warmed up and recorded: the graph casts for itself, in each replay.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["uncached_casts"]


@contextmanager
def uncached_casts() -> Iterator[None]:
    """Within the block the calling thread casts weights anew each time; the cache is empty before it and after it."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()
