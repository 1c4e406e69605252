"""The words of the library: modes as tables, the reasons, and the errors with their one base."""

import json
import pickle

import pytest

from graphdispatch import CUDAGraphMode as Mode
from graphdispatch import Reason, errors
from graphdispatch.engines import DispatchMode, EntryState
from graphdispatch.errors import CaptureError, GraphDispatchError


@pytest.mark.parametrize(
    ("question", "modes"),
    [
        (Mode.has_graphs, {Mode.PIECEWISE, Mode.FULL, Mode.FULL_DECODE_ONLY, Mode.FULL_AND_PIECEWISE}),
        (Mode.has_full_cudagraphs, {Mode.FULL, Mode.FULL_DECODE_ONLY, Mode.FULL_AND_PIECEWISE}),
        (Mode.has_piecewise_cudagraphs, {Mode.PIECEWISE, Mode.FULL_AND_PIECEWISE}),
        (Mode.separate_routine, {Mode.FULL_DECODE_ONLY, Mode.FULL_AND_PIECEWISE}),
    ],
    ids=["graphs", "full", "piecewise", "separate"],
)
def test_a_question_is_true_of_these_modes(question: object, modes: set[Mode]) -> None:
    """Each question is answered with yes by exactly the modes of the table."""
    assert callable(question)
    assert {mode for mode in Mode if question(mode)} == modes


def test_mode_values_are_vllms() -> None:
    """The values that other programs store stay what they are."""
    names = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
    assert [(mode.name, mode.value) for mode in Mode] == list(zip(names, range(5), strict=True))


def test_dispatch_modes_and_states_are_stored_by_their_lower_case_name() -> None:
    """What reports write for a mode or a state is its name."""
    for member in (*DispatchMode, *EntryState):
        assert member.value == member.name.lower()


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_sentence(reason: Reason) -> None:
    """A person reads a sentence of its own, without a full stop, so that it fits into another one."""
    assert len(reason.text.split()) >= 3
    assert [other for other in Reason if other.text == reason.text] == [reason]
    assert not reason.text.endswith(".")


def test_two_reasons_mean_that_a_graph_served_the_step() -> None:
    """A step that captured or checked a graph counts as eager."""
    assert {reason for reason in Reason if reason.is_graph} == {Reason.EXACT, Reason.PADDED}


def test_a_reason_is_its_own_word_in_json() -> None:
    """Reports store a reason as a lower-case word that reads back as the reason."""
    stored = json.loads(json.dumps(Reason.STATE_TOO_LARGE))
    assert stored == "state_too_large"
    assert Reason(stored) is Reason.STATE_TOO_LARGE


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
    """It carries the reason that it was given, also to another process, and a general one otherwise."""
    assert CaptureError("no").reason is Reason.CAPTURE_FAILED
    copy = pickle.loads(pickle.dumps(CaptureError("no", Reason.OUT_OF_MEMORY)))
    assert (str(copy), copy.reason) == ("no", Reason.OUT_OF_MEMORY)
