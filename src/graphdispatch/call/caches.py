"""Key-value caches of transformers, known by names of classes: which of them a graph can write to.

Nothing is imported. A cache is an argument that is the same object in each call, like one that is named in ``static=``.
"""

from collections.abc import Iterable
from typing import Any

__all__ = ["advice_for", "is_cache"]

_HOME = "transformers.cache_utils"
_GROWS = "a DynamicCache grows by concatenation; use a static cache (transformers.StaticCache)"
_COUNTS = "a sliding window counts its tokens in Python; graphdispatch.integrations.transformers serves it"


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of transformers."""
    return "Cache" in _names(value)


def advice_for(values: Iterable[Any]) -> str:
    """Why no graph can write to one of these caches or layers, and what to use instead; empty if there is no reason."""
    for value in values:
        names = _names(value)
        if "DynamicLayer" in names or ("DynamicCache" in names and _grows(value)):
            return _GROWS
        if "StaticSlidingWindowLayer" in names:
            return _COUNTS
    return ""


def _grows(cache: Any) -> bool:
    """Whether a cache grows: it has growing layers, or will make its layers when it is used."""
    layers = vars(cache).get("layers")
    return not layers or any("DynamicLayer" in _names(layer) for layer in layers)


def _names(value: Any) -> list[str]:
    return [kind.__name__ for kind in type(value).__mro__ if kind.__module__ == _HOME]
