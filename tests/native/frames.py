"""Which functions of Python a call enters."""

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["frames_of"]


def frames_of(call: Callable[[], Any]) -> list[str]:
    """The functions of Python that a call enters, itself left out."""
    names: list[str] = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [name for name in names if name != call.__name__]
