"""The list of reasons is complete: each has a sentence, and two of them mean that a graph served the step."""

import json

import pytest

from graphdispatch import Reason


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_sentence(reason: Reason) -> None:
    """A person reads a sentence, without a full stop, so that it fits into another one."""
    assert len(reason.text.split()) >= 3
    assert not reason.text.endswith(".")


def test_no_two_reasons_read_the_same() -> None:
    """A sentence identifies its reason."""
    assert len({reason.text for reason in Reason}) == len(Reason)


def test_two_reasons_mean_that_a_graph_served_the_step() -> None:
    """A step that captured or checked a graph counts as eager."""
    assert {reason for reason in Reason if reason.is_graph} == {Reason.EXACT, Reason.PADDED}


def test_a_reason_is_its_own_word_in_json() -> None:
    """Reports store a reason as a lower-case word that reads back as the reason."""
    stored = json.loads(json.dumps(Reason.STATE_TOO_LARGE))
    assert stored == "state_too_large"
    assert Reason(stored) is Reason.STATE_TOO_LARGE
