"""What an error of a device means, from its text: CUDA's, which is the same in every language, and the host's."""

from typing import NamedTuple

import torch

from ..reasons import Reason


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

_SIGNS = {
    "out of memory": MEMORY,
    "cublas_status_alloc_failed": MEMORY,
    "can't allocate memory": MEMORY,  # of the host: torch's allocator tells of it in the text alone
    "not enough memory": MEMORY,
    "cannot copy between cpu and cuda tensors": _unsafe(
        "it copies pageable host memory; keep the data on the device, or pin it"
    ),
    "operation not permitted when stream is capturing": _unsafe(
        "it waits for the device (.item(), .cpu(), nonzero, printing a tensor); keep values on the device"
    ),
    "previous error during capture": _SPOILT,
    "invalid stream capture status": _SPOILT,  # newer versions of torch check before CUDA does
    "unjoined work": _unsafe("a side stream was not joined; let the current stream wait for it at the end"),
    "uncaptured work in another stream": _unsafe(
        "it waits for a side stream that is not part of the capture; let that stream wait for this one first"
    ),
    "depend on a capturing blocking stream": _unsafe("work went to the legacy default stream; use the current stream"),
    "last recorded in a capturing stream": _unsafe(
        "the host waits for an event of the capture; wait on the device (event.wait(stream)), or after it"
    ),
    "offset increment outside graph capture": _unsafe(
        "it draws from a random generator that the graph does not know; use the default"
    ),
    "no warmup iterations occurred before capture": _unsafe(
        "an algorithm search ran inside the capture; warm up at this size before"
    ),
    "stale reference to the default stream": _unsafe(
        "autograd was warmed up on the default stream; run without gradients"
    ),
    "during cuda graph capture": _unsafe("an operation in it refuses to be captured"),
    "illegal memory access": LOST,
    "device-side assert triggered": LOST,  # torch names device-side assertions in every error of CUDA
    "unspecified launch failure": LOST,
}
"""What torch, CUDA or the host's allocator say. The first text that occurs in an error decides, so specific ones come
before general ones."""


def diagnose(error: BaseException) -> Diagnosis:
    """The meaning of an error during a capture; ``CAPTURE_FAILED`` if its text is not known."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return MEMORY
    if not isinstance(error, RuntimeError):  # every CUDA error is a RuntimeError; others are the user's own
        return _UNKNOWN
    text = str(error).lower()
    return next((diagnosis for sign, diagnosis in _SIGNS.items() if sign in text), _UNKNOWN)
