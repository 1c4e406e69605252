"""The extension module, bound to the installed torch: what looks at tensors."""

import sys
from pathlib import Path
from types import ModuleType

import torch

from . import EXTENSION, WHY_NO_EXTENSION
from .ambient import find_ambient

__all__ = ["ASKED", "CORE", "WHY_NO_CORE"]


def _bind() -> tuple[ModuleType | None, str, tuple[str, ...]]:
    if EXTENSION is None:
        return None, WHY_NO_EXTENSION, ()
    library = Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{'dylib' if sys.platform == 'darwin' else 'so'}"
    with torch.inference_mode(False), torch.no_grad():
        grid = torch.zeros(2, 3)
        shapes = (grid, grid.t(), grid[1:, 1:], torch.zeros(()), torch.nn.Parameter(grid.clone()), torch.zeros(0, 4))
        kinds = grid.double(), grid.half(), grid.long(), grid.bool(), torch.frombuffer(bytearray(8), dtype=torch.int8)
    try:
        EXTENSION.bind(str(library), torch.Tensor, torch.nn.Parameter, (*shapes, *kinds))
    except ImportError as error:
        return None, str(error), ()
    return EXTENSION, "", find_ambient(EXTENSION, str(library))


_bound = _bind()
CORE: ModuleType | None = _bound[0]
"""The extension module after its self-test on this torch, or None."""
WHY_NO_CORE: str = _bound[1]
"""Why there is none; empty if there is one."""
ASKED: tuple[str, ...] = _bound[2]
"""What the core asks of Python on each call, since its own way did not pass its test."""
