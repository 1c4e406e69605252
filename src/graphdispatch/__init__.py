"""The CUDA-graph layer that every inference engine writes for itself: pad, dispatch, replay, slice.

Start with ``graphed``; engines start in ``graphdispatch.engines``, whose names are found here, too. Importing the
package does not import torch; a name that needs it does so when it is first used.
"""

from typing import Any

from .exports import LazyNames

_NAMES = LazyNames(__name__, __file__)

__all__ = ["__version__", *_NAMES]  # noqa: PLE0604 (the names of the stub)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("graphdispatch")
    return _NAMES.find(name)


def __dir__() -> list[str]:
    return sorted(__all__)
