"""What the tests of the kernels in ``copies.cu`` share: their structures, and launches that are noted."""

import ctypes
from typing import Any, NamedTuple

from graphdispatch.backends.base import CopyKernel

LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3)
"""``cuLaunchKernel``."""


class Input(ctypes.Structure):
    """``CopiedInput``."""

    _fields_ = (
        ("fill", ctypes.c_ubyte * 16),
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("real", ctypes.c_ulonglong),
        ("all", ctypes.c_ulonglong),
        ("row", ctypes.c_ulonglong),
        ("gap", ctypes.c_ulonglong),
    )


class Place(ctypes.Structure):
    """``Place``."""

    _fields_ = (("address", ctypes.c_void_p), ("bytes", ctypes.c_ulonglong))


class Inputs(ctypes.Structure):
    """``CopiedInputs``."""

    _fields_ = (
        ("each", Input * 16),
        ("outputs", Place * 8),
        ("wanted", ctypes.POINTER(Place)),
        ("gap", ctypes.c_ulonglong),
    )


class Launch(NamedTuple):
    """A launch of ``copy_inputs`` that was not refused."""

    inputs: int
    outputs: dict[int, int]
    """The addresses where outputs are wanted, and how many bytes of each."""


def noting(kernel: CopyKernel, made: list[Launch]) -> tuple[CopyKernel, Any]:
    """The same kernel, with its launches noted; and what must live as long."""
    launch = LAUNCH(kernel.launch)

    def note(*arguments: Any) -> int:
        inputs = Inputs.from_address(ctypes.c_void_p.from_address(arguments[9]).value or 0)
        wanted = {place.address: place.bytes for place in inputs.outputs if place.bytes and inputs.wanted}
        refused = launch(*arguments)
        if not refused:
            made.append(Launch(arguments[2], wanted))
        return refused

    noted = LAUNCH(note)
    return kernel._replace(launch=ctypes.cast(noted, ctypes.c_void_p).value or 0), noted
