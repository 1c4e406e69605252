"""What an error of a device means, from its text, which is the same in every language."""

from collections.abc import Mapping
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
"""Every later request to the device will fail."""


def unsafe(remedy: str) -> Diagnosis:
    """A capture holds what no graph can hold.

    Args:
        remedy: What to do, as a sentence.
    """
    return Diagnosis(Reason.CAPTURE_UNSAFE, remedy)


def diagnose(error: BaseException, signs: Mapping[str, Diagnosis]) -> Diagnosis:
    """The meaning of an error during a capture; ``CAPTURE_FAILED`` if its text has none of the signs.

    Args:
        error: The error.
        signs: Texts in lower case. The first that occurs decides, so specific ones come before general ones.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return MEMORY
    if not isinstance(error, RuntimeError):  # every error of a device is a RuntimeError; others are the user's own
        return _UNKNOWN
    text = str(error).lower()
    return next((diagnosis for sign, diagnosis in signs.items() if sign in text), _UNKNOWN)
