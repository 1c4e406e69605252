"""A list that tests note things in from inside a callable, unseen: the library does not look into its own objects."""

from typing import Any

__all__ = ["Spy"]


class Spy(list[Any]):
    """What a callable under test reports. It counts as an object of the library, so no guard follows or restores it."""

    __module__ = "graphdispatch.spy"
