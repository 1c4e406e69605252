"""The routes of a front end that has many: one for each key."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from .group import Route

__all__ = ["Routes"]

R = TypeVar("R", bound=Route)


class Routes(dict[Hashable, R], Generic[R]):
    """The routes of a front end by its own keys; ``routes[key]`` makes one that is new.

    Not thread-safe: used with the server's lock held, but for lookups with ``get``.

    Args:
        make: Makes the route of a key.
        most: Beyond so many routes, those that no call has made a group of are forgotten.
    """

    __slots__ = ("_make", "_most")

    def __init__(self, make: Callable[..., R], most: int = 1024) -> None:
        super().__init__()
        self._make = make
        self._most = most

    def __missing__(self, key: Hashable) -> R:
        if len(self) >= self._most:
            for known, route in list(self.items()):
                if not route.spellings:
                    del self[known]
        route = self[key] = self._make(key)
        return route
