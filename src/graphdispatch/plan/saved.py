"""Files that say which sizes to capture: plans and profiles."""

from os import PathLike
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ..errors import ConfigError
from .plan import Plan
from .profile import Profile
from .storage import read_document

__all__ = ["read_sizes"]


class _Kind(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    format: Literal["graphdispatch.plan", "graphdispatch.profile"]


def read_sizes(sizes: object) -> object:
    """The plan or profile that was saved to a path; what is no path, as it is.

    Raises ``ConfigError`` for a file that holds neither.
    """
    if isinstance(sizes, str) and Path(sizes).suffix:
        raise ConfigError(
            f"sizes must not be the name of a file as text, got {sizes!r}; give a pathlib.Path for a saved plan"
        )
    if not isinstance(sizes, PathLike):
        return sizes
    path = Path(sizes)
    kind = read_document(path, _Kind).format
    return Plan.load(path) if kind == "graphdispatch.plan" else Profile.load(path)
