"""What a walk meets in large numbers and seldom finds changed: empty containers, most of them for hooks, and functions,
most of them methods. They are compared in loops of C."""

import types
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from . import holders, objects
from .holders import Holder, writer

__all__ = ["Bulk"]

_attributes_of = attrgetter("__dict__")


class Bulk:
    """Such objects as they were when they were added, each with the path at which it was met. Holds all of them."""

    def __init__(self) -> None:
        self._empty: list[Any] = []
        self._empty_paths: list[Any] = []
        self._ordered: list[Any] = []
        """Those of the empty containers that may have attributes."""
        self._functions: list[types.FunctionType] = []
        self._function_paths: list[Any] = []
        self._parts: list[Any] = []

    def add_empty(self, container: Any, path: Any) -> None:
        """Note an empty container of a class of Python's own, without attributes."""
        self._empty.append(container)
        self._empty_paths.append(path)
        if type(container) is OrderedDict:
            self._ordered.append(container)

    def add_function(self, fn: types.FunctionType, path: Any) -> None:
        """Note the code, the defaults, the name and the text of a function."""
        self._functions.append(fn)
        self._function_paths.append(path)
        self._parts += holders.parts_of_function(fn)

    def suspects(self) -> Iterator[Holder]:
        """Holders of all that is not as it was; of functions, one that changed brings all of them."""
        if any(self._empty) or any(map(_attributes_of, self._ordered)):
            for value, path in zip(self._empty, self._empty_paths, strict=True):
                if value:
                    yield Holder(path, value, objects.content, writer("write_container"), [])
                if type(value) is OrderedDict and value.__dict__:
                    yield Holder(path, value, holders.read_attributes, writer("write_attributes"), {})
        if not all(map(is_, chain.from_iterable(map(holders.parts_of_function, self._functions)), self._parts)):
            parts = iter(self._parts)
            for fn, path in zip(self._functions, self._function_paths, strict=True):
                before = dict(zip(holders.LABELS_OF_FUNCTIONS, parts, strict=False))
                yield Holder(path, fn, holders.read_function, writer("write_function"), before)
