"""What can go wrong, by cause. An exception of the user's own model passes through unchanged."""

from .reasons import Reason

__all__ = [
    "BackendError",
    "CaptureError",
    "ConfigError",
    "ConsensusError",
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
    """An option or argument is wrong; the message names it, what was expected and what to do."""


class BackendError(GraphDispatchError, RuntimeError):
    """A backend is unknown, or its device is not available here."""


class DeviceLostError(BackendError):
    """The device fails whatever it is asked, so that nothing can be served, eagerly either; restart the process.

    ``__cause__`` is the device's own error.
    """


class CaptureError(GraphDispatchError, RuntimeError):
    """A capture failed or was refused; ``reason`` classifies it and ``__cause__`` is the original."""

    def __init__(self, message: str, reason: Reason = Reason.CAPTURE_FAILED) -> None:
        super().__init__(message)
        self.reason = reason


class ReplayError(GraphDispatchError, RuntimeError):
    """A graph could not be replayed: it was released, the device refused it, or a break did not keep to its capture.

    ``had_effects`` tells whether memory that the caller can see was changed before; if not, nothing has happened.
    """

    had_effects: bool = False


class GuardError(GraphDispatchError, TypeError):
    """An argument does not fit the graph that it was given to; nothing was copied."""


class VerificationError(GraphDispatchError, RuntimeError):
    """A graph's answer or effect differed from eager's."""


class StaleOutputError(GraphDispatchError, RuntimeError):
    """A view of a graph's output was read after a later replay overwrote its memory."""


class FallbackError(GraphDispatchError, RuntimeError):
    """With ``strict=True``: a step would have run eagerly; ``reason`` says why."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


class ConsensusError(GraphDispatchError, RuntimeError):
    """The ranks could not agree within the timeout; names those that did not come, where that can be known."""


class IntegrityError(GraphDispatchError, AssertionError):
    """A cache's own accounting disagrees with its content: a defect of this library."""
