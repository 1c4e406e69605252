"""The words of the library: modes as tables, the reasons, and the errors with their one base."""

import pickle
from collections.abc import Callable

import pytest

from graphdispatch import CUDAGraphMode as Mode
from graphdispatch import Reason, errors
from graphdispatch.errors import CaptureError, GraphDispatchError


@pytest.mark.parametrize(
    ("question", "modes"),
    [
        (Mode.has_graphs, {Mode.PIECEWISE, Mode.FULL, Mode.FULL_DECODE_ONLY, Mode.FULL_AND_PIECEWISE}),
        (Mode.has_full_cudagraphs, {Mode.FULL, Mode.FULL_DECODE_ONLY, Mode.FULL_AND_PIECEWISE}),
        (Mode.has_piecewise_cudagraphs, {Mode.PIECEWISE, Mode.FULL_AND_PIECEWISE}),
        (Mode.separate_routine, {Mode.FULL_DECODE_ONLY, Mode.FULL_AND_PIECEWISE}),
    ],
)
def test_a_question_is_true_of_these_modes(question: Callable[[Mode], bool], modes: set[Mode]) -> None:
    """Each question is answered with yes by exactly the modes of the table."""
    assert {mode for mode in Mode if question(mode)} == modes


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_sentence(reason: Reason) -> None:
    """A person reads a sentence of its own, without a full stop, so that it fits into another one."""
    assert len(reason.text.split()) >= 3
    assert [other for other in Reason if other.text == reason.text] == [reason]
    assert not reason.text.endswith(".")


AT_RUN_TIME = ("BackendError", "CaptureError", "FallbackError", "ReplayError", "StaleOutputError", "VerificationError")
BUILTIN: dict[str, type[Exception]] = dict.fromkeys(AT_RUN_TIME, RuntimeError)
BUILTIN |= {"ConfigError": ValueError, "GuardError": TypeError, "IntegrityError": AssertionError}


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_has_the_one_base_and_its_builtin_kind(name: str) -> None:
    """``except GraphDispatchError`` catches all; code that knows nothing of this library, by their usual kind."""
    assert issubclass(getattr(errors, name), GraphDispatchError)
    assert issubclass(getattr(errors, name), BUILTIN.get(name, Exception))


def test_a_failed_capture_is_classified() -> None:
    """It carries the reason that it was given, also to another process, and a general one otherwise."""
    assert CaptureError("no").reason is Reason.CAPTURE_FAILED
    copy = pickle.loads(pickle.dumps(CaptureError("no", Reason.OUT_OF_MEMORY)))
    assert (str(copy), copy.reason) == ("no", Reason.OUT_OF_MEMORY)
