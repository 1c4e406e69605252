"""What inference engines are built with: wrappers, managers, dispatchers, their keys, policies and sizes.

A name is imported when it is first used.
"""

from typing import Any

from .. import LazyNames

_NAMES = LazyNames(__name__, __file__)

__all__ = [*_NAMES]  # noqa: PLE0604 (the names of the stub)


def __getattr__(name: str) -> Any:
    return _NAMES.find(name)


def __dir__() -> list[str]:
    return sorted(__all__)
