"""Operators that are taken for compiled ones: Python cannot compile C++ in a test's time, so it names a file of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["compiled_operator"]


@contextmanager
def compiled_operator(schema: str, fn: Callable[..., Any], key: str = "CPU") -> Iterator[Any]:
    """An operator of the namespace ``graphdispatch_compiled`` with one kernel; it goes with the block."""
    name = schema.partition("(")[0]
    library = torch._C._dispatch_library("FRAGMENT", "graphdispatch_compiled", "", "operators.cpp", 1)
    library.define(schema, "", ())
    library.impl(name, key, fn, False)
    namespace = torch.ops.graphdispatch_compiled
    yield getattr(namespace, name)
    delattr(namespace, name)
    namespace._dir.remove(name)
    library.reset()
