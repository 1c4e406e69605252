"""The native parts: C++ beside a Python implementation that means the same, and serves where they are missing.

``GRAPHDISPATCH_NATIVE=0`` in the environment, when graphdispatch is first imported, leaves everything to Python. What
is here needs no torch; ``bound`` has the parts that look at tensors.
"""

import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

from .build import CORE_SOURCES, fingerprint

F = TypeVar("F", bound=Callable[..., Any])

IS_ENABLED = os.environ.get("GRAPHDISPATCH_NATIVE", "1") != "0"
"""Whether native parts may be used in this process."""


def done_by_core(method: F) -> F:
    """Mark a method whose usual case the core does itself, from the attributes that the method reads. It calls an
    override in a subclass."""
    marked: Any = method
    marked._is_done_by_core = True
    return method


def is_done_by_core(method: Callable[..., Any]) -> bool:
    """Whether a method has that mark."""
    return getattr(method, "_is_done_by_core", False)


def _load() -> tuple[ModuleType | None, str]:
    if not IS_ENABLED:
        return None, "GRAPHDISPATCH_NATIVE=0 turns it off"
    try:
        core = import_module("._core", __name__)
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError)
        return None, "it was not compiled at installation" if is_missing else f"it cannot be loaded: {error}"
    if CORE_SOURCES.is_dir() and fingerprint() != core.SOURCES:  # a checkout, whose sources may have changed since
        return None, "it is older than its sources; compile it with make, or with python native/build.py"
    return core, ""


EXTENSION, WHY_NO_EXTENSION = _load()
"""The extension module, not bound to torch, or None; and why there is none, empty if there is one."""
