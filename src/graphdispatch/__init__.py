"""The CUDA-graph layer that every inference engine writes for itself: pad, dispatch, replay, slice.

Start with ``graphed``; engines start in ``graphdispatch.engines``, whose names are found here, too. Importing the
package does not import torch; a name that needs it does so when it is first used.
"""

import ast
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any


class LazyNames:
    """Public names that are imported when they are first used.

    They are those that the stub beside ``file``, an ``__init__.py``, exports from ``package`` to type checkers, too.

    ``from .a import b as b`` exports the name ``b`` of the module ``a``, and ``from . import a as a`` the module.
    ``from .a import *`` exports nothing, but ``find`` finds what ``a`` lists in its ``__all__``.
    """

    def __init__(self, package: str, file: str) -> None:
        self._package = package
        self._homes: dict[str, str] = {}
        self._others: list[str] = []
        for node in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom):
                home = "." * node.level + (node.module or "")
                for alias in node.names:
                    if alias.name == "*":
                        self._others.append(home)
                    else:
                        self._homes[alias.name] = home

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._homes))

    def find(self, name: str) -> Any:
        """What ``name`` stands for. Raises ``AttributeError`` for a name that is not in the stub."""
        if name in self._homes:
            home = self._homes[name]
            value = self._import(f".{name}") if home == "." else getattr(self._import(home), name)
            setattr(sys.modules[self._package], name, value)  # so that it is looked up once
            return value
        for other in map(self._import, self._others):
            if name in other.__all__:
                return getattr(other, name)
        raise AttributeError(f"module {self._package!r} has no attribute {name!r}")

    def _import(self, name: str) -> Any:
        return import_module(name, self._package)


_NAMES = LazyNames(__name__, __file__)

__all__ = ["__version__", *_NAMES]  # noqa: PLE0604 (the names of the stub)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("graphdispatch")
    return _NAMES.find(name)


def __dir__() -> list[str]:
    return sorted(__all__)
