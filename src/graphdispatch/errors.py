"""The errors of this library, by cause. An exception of the user's own model passes through unchanged."""

import signal
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial
from inspect import getattr_static
from types import FunctionType, MethodType
from typing import Any

from .reasons import Reason

__all__ = [
    "BackendError",
    "CaptureError",
    "ConfigError",
    "ConsensusError",
    "CopyError",
    "DeviceLostError",
    "FallbackError",
    "GraphDispatchError",
    "GuardError",
    "IntegrityError",
    "ReplayError",
    "StaleOutputError",
    "VerificationError",
]


class GraphDispatchError(Exception):
    """Base of every error that this library raises."""


class ConfigError(GraphDispatchError, ValueError):
    """An option or argument is wrong. The message names it, says what was expected and what to do."""


class BackendError(GraphDispatchError, RuntimeError):
    """A backend is unknown, or its device is not available here."""


class DeviceLostError(BackendError):
    """Every request to the device fails, so nothing can run on it, not even eagerly. Restart the process.

    ``__cause__`` is the device's own error.
    """


class CaptureError(GraphDispatchError, RuntimeError):
    """A capture failed or was refused. ``__cause__`` is the original error.

    Args:
        message: What failed, and the remedy.
        reason: Which kind of failure it is.

    Attributes:
        reason: Which kind of failure it is.
    """

    def __init__(self, message: str, reason: Reason = Reason.CAPTURE_FAILED) -> None:
        super().__init__(message)
        self.reason = reason


class ReplayError(GraphDispatchError, RuntimeError):
    """A graph could not be replayed: it was released, the device refused it, or a break changed since its capture.

    Attributes:
        had_effects: Whether the step already wrote memory that the caller can see, or ran a break, which may have done
            anything; so it is not run again. If it is false, nothing happened.
    """

    had_effects: bool = False


class GuardError(GraphDispatchError, TypeError):
    """An argument does not fit the graph. Nothing was copied."""


class VerificationError(GraphDispatchError, RuntimeError):
    """A graph's result or effect differed from eager's."""


class StaleOutputError(GraphDispatchError, RuntimeError):
    """A view of a graph's output was read after a later replay overwrote its memory."""


class FallbackError(GraphDispatchError, RuntimeError):
    """With ``strict=True``, a step would have run eagerly.

    Args:
        message: Which step, and the remedy.
        reason: Why it would have run eagerly.

    Attributes:
        reason: Why it would have run eagerly.
    """

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


class CopyError(GraphDispatchError, TypeError):
    """Something that holds a graph or a device's memory was copied or pickled."""


class ConsensusError(GraphDispatchError, RuntimeError):
    """The ranks did not agree: one did not vote within the timeout, or ended."""


class IntegrityError(GraphDispatchError, AssertionError):
    """A cache's own figures disagree with its content. This is a defect of this library."""


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise ``ConfigError`` that names the argument unless ``value`` is an integer of at least ``least``."""
    # True and False are integers to isinstance, but never meant as a number.
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer >= {least}, got {shown(value)}")


def check_type(name: str, value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Raise ``ConfigError`` that names the argument unless ``value`` is of type ``kind``, in words: ``what``."""
    if not issubclass(type(value), kind):
        raise ConfigError(f"{name} must be {what}, got {shown(value)}")


def check_callable(name: str, value: object, what: str = "callable") -> None:
    """Raise ``ConfigError`` that names the argument unless ``value`` can be called."""
    if not callable(value):
        raise ConfigError(f"{name} must be {what}, got {shown(value)}")


def shown(value: object) -> str:
    """A value in one line of a message: its own words, or its type where these are long, or cannot be had."""
    try:
        text = repr(value)
    except Exception:  # of the user's class
        text = ""
    return text if text and len(text) < 200 and "\n" not in text else f"an object of type {type(value).__qualname__}"


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """The end of a message about a name: ``; did you mean 'vllm'?`` where one that is known is close to it, else empty.

    Args:
        given: What was given as a name.
        known: The names that there are.
    """
    by_letters = {name.lower(): name for name in known}
    close = get_close_matches(given.lower(), by_letters, 1) if isinstance(given, str) else []
    return f"; did you mean {by_letters[close[0]]!r}?" if close else ""


def error_of_signal(error: BaseException | None) -> BaseException | None:
    """What a handler of a signal raised, as that of a time limit, if it is an error or its cause: it tells nothing of
    what it stopped.

    Args:
        error: The error.

    Returns:
        What the handler raised, or None.
    """
    codes = {id(_code_of(signal.getsignal(number))) for number in signal.valid_signals()}  # not all can be hashed
    while error is not None and not any(id(f.f_code) in codes for f, _ in traceback.walk_tb(error.__traceback__)):
        error = error.__cause__
    return error


def _code_of(handler: Any) -> Any:
    """The code that a handler of a signal runs first: that of a function, a method, an object or a partial call."""
    while isinstance(handler, partial):
        handler = handler.func
    if not isinstance(handler, FunctionType | MethodType):
        handler = getattr_static(type(handler), "__call__", None)
    return getattr(getattr(handler, "__func__", handler), "__code__", None)
