"""Traffic as arrays: ordered steps and requests, and the checks that every number of them passes."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ConfigError

__all__ = [
    "LARGEST_STEP",
    "Bools",
    "Floats",
    "Ints",
    "Requests",
    "Steps",
    "booleans",
    "floats",
    "integers",
    "read_only",
]

LARGEST_STEP = 2**20
"""The most tokens of a step, as in ``CUDAGraphConfig``: tables have an entry for each, so a typo would fill memory."""

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]


class Steps(NamedTuple):
    """Steps in the order in which they ran, one element each; ``num_reqs`` where it is known.

    ``is_decode`` says that the step is uniform decode: every request scheduled the same number of tokens.
    """

    num_tokens: Ints
    is_decode: Bools
    num_reqs: Ints | None = None


class Requests(NamedTuple):
    """Requests in the order of their arrival, one element each: when (milliseconds), and tokens in and out."""

    arrival_ms: Floats
    prompt_tokens: Ints
    output_tokens: Ints


def integers(name: str, values: ArrayLike, most: int = LARGEST_STEP) -> Ints:
    """A read-only int64 copy of ``values`` in one dimension; raises ``ConfigError`` unless all are 1 to ``most``."""
    array = _vector(name, values)
    if array.dtype.kind not in "iu":
        raise ConfigError(f"{name} must be integers that fit 64 bits, got {array.dtype}; cast them")
    _check_each(name, array, (array >= 1) & (array <= most), f"an integer from 1 to {most}")
    return read_only(array.astype(np.int64))


def floats(name: str, values: ArrayLike) -> Floats:
    """A read-only float64 copy of ``values`` in one dimension; raises ``ConfigError`` unless all are finite, >= 0."""
    array = _vector(name, values)
    if array.dtype.kind not in "iuf":
        raise ConfigError(f"{name} must be numbers, got {array.dtype}; cast them")
    _check_each(name, array, (array >= 0) & np.isfinite(array), "a finite number >= 0")
    return read_only(array.astype(np.float64))


def booleans(name: str, values: ArrayLike) -> Bools:
    """A read-only copy of ``values`` as booleans; raises ``ConfigError`` unless all are booleans, 0 or 1."""
    array = _vector(name, values)
    if array.dtype.kind not in "biu" or not np.isin(array, (0, 1)).all():
        raise ConfigError(f"{name} must be booleans, or 0 and 1, got {array.dtype}")
    return read_only(array.astype(np.bool_))


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """``array`` itself, which can no longer be written to."""
    array.flags.writeable = False
    return array


def _check_each(name: str, array: NDArray[Any], is_right: Bools, expected: str) -> None:
    if not is_right.all():
        index = int(is_right.argmin())
        raise ConfigError(f"{name}[{index}] must be {expected}, got {array[index]}")


def _vector(name: str, values: ArrayLike) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{name} must be numbers in one dimension: {error}") from error
    if array.ndim != 1 or not array.size:
        raise ConfigError(f"{name} must hold at least one number, in one dimension, got shape {array.shape}")
    return array
