"""What a CUDA error during a capture means, read from its text, since the code itself does not reach Python."""

from typing import NamedTuple

import torch

from ...reasons import Reason

__all__ = ["Diagnosis", "diagnose", "is_out_of_memory"]


class Diagnosis(NamedTuple):
    """The reason of a failed capture, and a sentence that says what to do."""

    reason: Reason
    remedy: str


_UNKNOWN = Diagnosis(Reason.CAPTURE_FAILED, "see the original error")
_MEMORY = Diagnosis(Reason.OUT_OF_MEMORY, "capture fewer or smaller sizes, or leave more memory to the graphs")

# The first text that occurs in the error decides, so that the specific ones stand before the general ones.
_SIGNS: tuple[tuple[str, Diagnosis], ...] = (
    ("out of memory", _MEMORY),
    ("cublas_status_alloc_failed", _MEMORY),
    (
        "cannot copy between cpu and cuda tensors",
        Diagnosis(Reason.CAPTURE_UNSAFE, "it copies pageable host memory; keep the data on the device, or pin it"),
    ),
    (
        "operation not permitted when stream is capturing",
        Diagnosis(
            Reason.CAPTURE_UNSAFE,
            "it waits for the device (.item(), .cpu(), nonzero, printing a tensor); keep values on the device",
        ),
    ),
    (
        "unjoined work",
        Diagnosis(Reason.CAPTURE_UNSAFE, "a side stream was not joined; let the current stream wait for it at the end"),
    ),
    (
        "depend on a capturing blocking stream",
        Diagnosis(Reason.CAPTURE_UNSAFE, "work went to the legacy default stream; use the current stream"),
    ),
    (
        "previous error during capture",
        Diagnosis(
            Reason.CAPTURE_UNSAFE,
            "an earlier operation could not be captured and its own error was swallowed; let that error through",
        ),
    ),
    (
        "offset increment outside graph capture",
        Diagnosis(
            Reason.CAPTURE_UNSAFE, "it draws from a random generator that the graph does not know; use the default"
        ),
    ),
    (
        "no warmup iterations occurred before capture",
        Diagnosis(Reason.CAPTURE_UNSAFE, "an algorithm search ran inside the capture; warm up at this size before"),
    ),
    (
        "stale reference to the default stream",
        Diagnosis(Reason.CAPTURE_UNSAFE, "autograd was warmed up on the default stream; run without gradients"),
    ),
    (
        "during cuda graph capture",
        Diagnosis(Reason.CAPTURE_UNSAFE, "an operation in it refuses to be captured"),
    ),
    (
        "illegal memory access",
        Diagnosis(Reason.CAPTURE_FAILED, "the device context is lost; restart the process"),
    ),
    (
        "device-side assert",
        Diagnosis(Reason.CAPTURE_FAILED, "the device context is lost; restart the process"),
    ),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that the device has no memory left."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or diagnose(error) is _MEMORY


def diagnose(error: BaseException) -> Diagnosis:
    """The meaning of an error that came up during a capture; ``CAPTURE_FAILED`` where its text says nothing."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return _MEMORY
    if not isinstance(error, RuntimeError):  # every CUDA error is one; the rest is the user's own
        return _UNKNOWN
    text = str(error).lower()
    return next((diagnosis for sign, diagnosis in _SIGNS if sign in text), _UNKNOWN)
