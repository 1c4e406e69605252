"""The words of the library: modes as tables, the reasons, the errors with their one base, keys and descriptors."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import CUDAGraphMode as Mode
from graphdispatch import Reason, errors
from graphdispatch.engines import BatchDescriptor, DispatchKey, create_dispatch_key, get_padded_key
from graphdispatch.errors import CaptureError, ConfigError, GraphDispatchError


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


# Keys and descriptors: what makes them equal, how they relax, and how a key is padded.


keys = st.integers(1, 500).flatmap(
    lambda tokens: st.builds(DispatchKey, st.just(tokens), st.integers(1, tokens), st.integers(0, 5000), st.booleans())
)


def test_a_key_prints_as_the_call_that_makes_it() -> None:
    """In the names of its parts, and comes back from a pickle."""
    key = DispatchKey(8, 4, 100, True)
    assert pickle.loads(pickle.dumps(key)) == key
    assert key == create_dispatch_key(8, 4, 100, True)
    assert repr(key) == "DispatchKey(num_tokens=8, num_reqs=4, max_seq_len=100, is_prefill=True)"


def test_a_relaxed_descriptor_forgets_requests_and_kind() -> None:
    """Tokens and variant stay, since the graph's code depends on them."""
    assert BatchDescriptor(8, 4, True, "lora").relaxed() == BatchDescriptor(8, None, False, "lora")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0, 1), "num_tokens must be an integer >= 1, got 0"),
        ((8, 0), "num_reqs must be an integer >= 1, got 0"),
        ((8, 1, -1), "max_seq_len must be an integer >= 0, got -1"),
        ((True, 1), "num_tokens must be an integer >= 1, got True"),
        ((2, 3), "num_reqs must be at most num_tokens=2, got 3"),
    ],
)
def test_a_key_that_no_batch_can_have_is_refused(arguments: tuple[Any, ...], expected: str) -> None:
    """The error names the count at fault."""
    with pytest.raises(ConfigError, match=expected):
        create_dispatch_key(*arguments)


def test_a_prefill_key_keeps_its_requests() -> None:
    """Padding a prefill adds tokens to it, not requests."""
    assert get_padded_key(DispatchKey(9, 3, 17, True)) == DispatchKey(16, 3, 24, True)
    assert get_padded_key(DispatchKey(5, 5), pad_to=4) == DispatchKey(8, 8)  # decode is decode again


@given(keys, st.integers(1, 64))
def test_padding_reaches_the_next_multiple(key: DispatchKey, pad_to: int) -> None:
    """Tokens and sequence grow by less than ``pad_to`` to a multiple of it."""
    padded = get_padded_key(key, pad_to)
    for before, after in ((key.num_tokens, padded.num_tokens), (key.max_seq_len, padded.max_seq_len)):
        assert after % pad_to == 0
        assert 0 <= after - before < pad_to
    assert get_padded_key(padded, pad_to) == padded


@pytest.mark.parametrize("bad", [0, -8, True, 2.0])
def test_a_multiple_below_one_is_refused(bad: Any) -> None:
    """The error names ``pad_to`` and what was given."""
    with pytest.raises(ConfigError, match=r"pad_to must be an integer >= 1, got"):
        get_padded_key(DispatchKey(1, 1), bad)
