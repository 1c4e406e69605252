"""How large a batch is along its dynamic dimensions, and which batch sizes get a graph.

A batch runs in the next larger captured size: more sizes mean more graphs and less padding. The rules
below are the defaults of the engines they are named after; none of them imports anything of those engines.

Note [one number for a batch]
    Where there is one dynamic dimension the number is its rows. Where there are several, each has bits of its own in
    it. So a lookup by the number is one lookup, whatever it stands for.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from .errors import ConfigError, check_count, did_you_mean, shown

_BITS = 21
MOST_AXES = 3
LONGEST = (1 << _BITS) - 1
"""What a longer extent counts as; no size is as large."""


class Axis(NamedTuple):
    """One dynamic dimension, and where its extent is in the number."""

    name: str
    shift: int = 0
    mask: int = -1

    def of(self, number: int) -> int:
        """The extent along this axis."""
        return number >> self.shift & self.mask

    @property
    def bits(self) -> int:
        """Where the extent is in the number."""
        return self.mask << self.shift

    def put(self, extent: int) -> int:
        """The number of a batch that has this extent, and none along other axes. What is too long counts as longest."""
        return (extent if self.mask < 0 else min(extent, self.mask)) << self.shift


ROWS = Axis("rows")
"""The only dynamic dimension: the number is its extent."""


def axes_of(names: Sequence[str]) -> tuple[Axis, ...]:
    """Axes for at most ``MOST_AXES`` dimensions; the first of several is in the highest bits."""
    if len(names) == 1:
        return (Axis(names[0]),)
    shifts = range(_BITS * (len(names) - 1), -1, -_BITS)
    return tuple(Axis(name, shift, LONGEST) for name, shift in zip(names, shifts, strict=True))


def lengths_of(axes: Sequence[Axis], number: int) -> tuple[int, ...]:
    """The extents of a batch, one for each axis."""
    return tuple([number >> axis.shift & axis.mask for axis in axes])


def extents_text(axes: Sequence[Axis], number: int) -> str:
    """The extents of a batch for a person: ``4 x 37``, or its rows."""
    return " x ".join(map(str, lengths_of(axes, number)))


class Extents(int):
    """The number of a batch with several dynamic dimensions; as text it names the extents, ``4 x 37``."""

    axes: tuple[Axis, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The extents, one for each axis."""
        return lengths_of(self.axes, self)

    @property
    def cells(self) -> int:
        """Their product: what graphs compute on, as far as that follows the extents."""
        return prod(self.lengths)

    def __str__(self) -> str:
        return extents_text(self.axes, self)

    __repr__ = __str__


def pack(axes: Sequence[Axis], lengths: Sequence[int]) -> int:
    """The number of a batch with these extents, one for each axis: its rows, if these are the only axis."""
    if tuple(axes) == (ROWS,):
        return lengths[0]
    extents = Extents(sum(axis.put(length) for axis, length in zip(axes, lengths, strict=True)))
    extents.axes = tuple(axes)
    return extents


def cells_of(number: int) -> int:
    """The rows of a batch, or the product of its extents where there are several dynamic dimensions."""
    cells: int = getattr(number, "cells", number)
    return cells


NAMED_SIZES: Mapping[str, Callable[[int], Iterable[int]]] = {
    # 1, 2, 4, then steps of 8 below 256 and of 16 from there (``vllm/config/vllm.py``, vLLM 0.32).
    "vllm": lambda most: [1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)],
    # Every size up to 32, then vLLM's steps (``performance_mode="interactivity"``, vLLM 0.32).
    "vllm-interactivity": lambda most: [*range(1, 33), *range(40, 256, 8), *range(256, most + 1, 16)],
    # Steps of 8 to 256, 16 to 512 and 32 beyond, with the largest (SGLang ``arg_groups/cuda_graph_hook.py``).
    "sglang": lambda most: [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, most, 32), most],
    # Steps of 8 to 128 and of 64 beyond, with the largest (TensorRT-LLM ``llmapi/llm_args.py``, padding on).
    "trtllm": lambda most: [1, 2, 4, *range(8, 129, 8), *range(192, most, 64), most],
    # The largest halved down to 1 (Megatron-LM's exponential distribution, one tensor-parallel rank).
    "megatron": lambda most: [most >> shift for shift in range(most.bit_length())],
    # The powers of two, with the largest.
    "pow2": lambda most: [*(1 << shift for shift in range(most.bit_length())), most],
    # Every size: no padding, and a graph for each.
    "dense": lambda most: range(1, most + 1),
}
"""The rules by name; ``named_sizes`` sorts what they give and cuts it at the largest size."""


def named_sizes(name: str, max_size: int) -> tuple[int, ...]:
    """The capture sizes of an engine by name.

    ``vllm`` and ``vllm-interactivity`` stop at their last step at or below ``max_size``, as vLLM does; all others
    contain ``max_size``.

    Args:
        name: ``"vllm"``, ``"vllm-interactivity"``, ``"sglang"``, ``"trtllm"``, ``"megatron"``, ``"pow2"`` or
            ``"dense"``.
        max_size: The largest size.

    Returns:
        The sizes, strictly increasing.

    Raises:
        ConfigError: The name is unknown, or ``max_size`` is no positive integer.
    """
    if name not in NAMED_SIZES:
        raise ConfigError(
            f"the name of capture sizes must be one of {', '.join(map(repr, NAMED_SIZES))}, got {shown(name)}"
            f"{did_you_mean(name, NAMED_SIZES)}"
        )
    check_count("max_size", max_size)
    return tuple(sorted({size for size in NAMED_SIZES[name](max_size) if size <= max_size}))


def check_sizes(sizes: Iterable[int], name: str = "capture_sizes") -> tuple[int, ...]:
    """``sizes`` as a tuple, if they are positive integers in strictly increasing order.

    Raises ``ConfigError`` that names the argument as ``name`` and the first entry or pair at fault.
    """
    if not isinstance(sizes, Iterable) or isinstance(sizes, (str, bytes, Mapping)):
        raise ConfigError(f"{name} must be increasing sizes, as (1, 2, 4, 8), got {shown(sizes)}")
    checked = tuple(sizes)
    if not checked:
        raise ConfigError(f"{name} must hold at least one size, got none; use mode NONE to switch graphs off")
    for index, size in enumerate(checked):
        check_count(f"{name}[{index}]", size)
    for index, (left, right) in enumerate(pairwise(checked)):
        if left >= right:
            raise ConfigError(
                f"{name} must be strictly increasing, got {left} before {right} at index {index}; "
                "sort the sizes and drop repeats"
            )
    return checked


@lru_cache(maxsize=64)
def resolve_sizes(capture_sizes: str | tuple[int, ...], max_batch_size: int) -> tuple[int, ...]:
    """The sizes that an option stands for. Computed once for equal options."""
    if not isinstance(capture_sizes, str):
        return capture_sizes
    name = "vllm" if capture_sizes == "auto" else capture_sizes
    return tuple(sorted({*named_sizes(name, max_batch_size), max_batch_size}))
