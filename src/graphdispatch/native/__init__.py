"""The native parts: C++ beside a Python implementation that means the same, and serves where they are missing.

The core (``core/``) is built without torch, and bound to the installed one here. ``GRAPHDISPATCH_NATIVE=0`` in the
environment, when graphdispatch is first imported, leaves everything to Python.
"""

import os
import sys
from pathlib import Path
from types import ModuleType

import torch

__all__ = ["CORE", "IS_ENABLED", "WHY_NO_CORE"]

IS_ENABLED = os.environ.get("GRAPHDISPATCH_NATIVE", "1") != "0"
"""Whether native parts may be used in this process."""


def _load() -> tuple[ModuleType | None, str]:
    if not IS_ENABLED:
        return None, "GRAPHDISPATCH_NATIVE=0 turns it off"
    try:
        from . import _core
    except ImportError as error:
        return None, f"it was not compiled when the package was installed, or cannot be loaded: {error}"
    suffix = "dylib" if sys.platform == "darwin" else "so"
    library = Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"
    with torch.inference_mode(False), torch.no_grad():
        grid = torch.zeros(2, 3)
        samples = (grid, grid.t(), grid[1:, 1:], torch.zeros(()), torch.nn.Parameter(grid.clone()), torch.zeros(0, 4))
    try:
        _core.bind(str(library), torch.Tensor, torch.nn.Parameter, samples)
    except ImportError as error:
        return None, str(error)
    return _core, ""


_loaded = _load()
CORE: ModuleType | None = _loaded[0]
"""The extension module, or None."""
WHY_NO_CORE: str = _loaded[1]
"""Why there is no extension module; empty if there is one."""
