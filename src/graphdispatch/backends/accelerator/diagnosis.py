"""What an error of a device during a capture means, from its code if torch provides one, else from its text: CUDA's."""

from typing import NamedTuple

import torch

from ...reasons import Reason


class Diagnosis(NamedTuple):
    """The reason of a failed capture, and a sentence that says what to do."""

    reason: Reason
    remedy: str


_UNKNOWN = Diagnosis(Reason.CAPTURE_FAILED, "see the original error")
MEMORY = Diagnosis(Reason.OUT_OF_MEMORY, "capture fewer or smaller sizes, or leave more memory to the graphs")
LOST = Diagnosis(Reason.CAPTURE_FAILED, "the device context is lost; restart the process")
"""Every later CUDA call will fail."""


def _unsafe(remedy: str) -> Diagnosis:
    return Diagnosis(Reason.CAPTURE_UNSAFE, remedy)


_SPOILT = _unsafe("an earlier operation could not be captured and its own error was swallowed; let that error through")

# CUDA's error code and text. The first text that occurs in the error decides, so specific texts come before general
# ones. A text without a code is torch's own.
_SIGNS: tuple[tuple[int | None, str, Diagnosis], ...] = (
    (2, "out of memory", MEMORY),
    (None, "cublas_status_alloc_failed", MEMORY),
    (
        None,
        "cannot copy between cpu and cuda tensors",
        _unsafe("it copies pageable host memory; keep the data on the device, or pin it"),
    ),
    (
        900,
        "operation not permitted when stream is capturing",
        _unsafe("it waits for the device (.item(), .cpu(), nonzero, printing a tensor); keep values on the device"),
    ),
    (901, "previous error during capture", _SPOILT),
    (None, "invalid stream capture status", _SPOILT),  # newer versions of torch check before CUDA does
    (904, "unjoined work", _unsafe("a side stream was not joined; let the current stream wait for it at the end")),
    (
        905,
        "uncaptured work in another stream",
        _unsafe("it waits for a side stream that is not part of the capture; let that stream wait for this one first"),
    ),
    (
        906,
        "depend on a capturing blocking stream",
        _unsafe("work went to the legacy default stream; use the current stream"),
    ),
    (
        907,
        "last recorded in a capturing stream",
        _unsafe("the host waits for an event of the capture; wait on the device (event.wait(stream)), or after it"),
    ),
    (
        None,
        "offset increment outside graph capture",
        _unsafe("it draws from a random generator that the graph does not know; use the default"),
    ),
    (
        None,
        "no warmup iterations occurred before capture",
        _unsafe("an algorithm search ran inside the capture; warm up at this size before"),
    ),
    (
        None,
        "stale reference to the default stream",
        _unsafe("autograd was warmed up on the default stream; run without gradients"),
    ),
    (None, "during cuda graph capture", _unsafe("an operation in it refuses to be captured")),
    (700, "illegal memory access", LOST),
    (710, "device-side assert", LOST),
    (719, "unspecified launch failure", LOST),
)
_BY_CODE = {code: diagnosis for code, _, diagnosis in _SIGNS if code is not None}


def diagnose(error: BaseException) -> Diagnosis:
    """The meaning of an error during a capture; ``CAPTURE_FAILED`` if neither its code nor its text is known."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return MEMORY
    if not isinstance(error, RuntimeError):  # every CUDA error is a RuntimeError; others are the user's own
        return _UNKNOWN
    known = _BY_CODE.get(getattr(error, "error_code", 0))  # an AcceleratorError of newer torch versions has it
    text = str(error).lower()
    return known or next((diagnosis for _, sign, diagnosis in _SIGNS if sign in text), _UNKNOWN)
