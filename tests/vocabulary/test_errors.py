"""The error group: one base, and for each cause a builtin type that fits it."""

import pickle

import pytest

from graphdispatch import Reason, errors
from graphdispatch.errors import CaptureError, GraphDispatchError


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_has_the_one_base(name: str) -> None:
    """``except GraphDispatchError`` catches all that this library raises."""
    assert issubclass(getattr(errors, name), GraphDispatchError)


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigError", ValueError),
        ("BackendError", RuntimeError),
        ("CaptureError", RuntimeError),
        ("ReplayError", RuntimeError),
        ("GuardError", TypeError),
        ("VerificationError", RuntimeError),
        ("StaleOutputError", RuntimeError),
        ("FallbackError", RuntimeError),
        ("IntegrityError", AssertionError),
    ],
)
def test_an_error_is_also_its_builtin_kind(name: str, builtin: type[Exception]) -> None:
    """Code that knows nothing of this library catches the errors by their usual kind."""
    assert issubclass(getattr(errors, name), builtin)


def test_a_failed_capture_is_classified() -> None:
    """A capture error carries the reason that it was given, and a general one otherwise."""
    assert CaptureError("no").reason is Reason.CAPTURE_FAILED
    assert CaptureError("no", Reason.OUT_OF_MEMORY).reason is Reason.OUT_OF_MEMORY


def test_a_capture_error_survives_another_process() -> None:
    """A pickled error, as worker processes send it, keeps its message and reason."""
    copy = pickle.loads(pickle.dumps(CaptureError("no", Reason.OUT_OF_MEMORY)))
    assert (str(copy), copy.reason) == ("no", Reason.OUT_OF_MEMORY)
