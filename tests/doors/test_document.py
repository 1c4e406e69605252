"""Keeps ``docs/doors.md`` true: it is what the tests declare."""

from .doors import DOORS
from .features import FEATURES, LACKS
from .table import DOCUMENT, cases, document


def test_the_document_is_what_the_tests_say() -> None:
    """If this fails, run ``python -m tests.doors.table`` and read what changed."""
    assert DOCUMENT.read_text(encoding="utf-8") == document()


def test_every_door_says_what_it_lacks() -> None:
    """One table has a line for each door, and every reason is for something that cases may need."""
    assert list(LACKS) == list(DOORS)
    assert all(set(lacks) <= set(FEATURES) and all(lacks.values()) for lacks in LACKS.values())


def test_every_feature_is_needed() -> None:
    """No door excuses itself from something that no case needs."""
    needed = {feature for case in cases() for feature in case.needs}
    assert needed == set(FEATURES)


def test_every_case_has_a_door() -> None:
    """Each case runs through at least one door."""
    for case in cases():
        assert any(not set(case.needs) & set(lacks) for lacks in LACKS.values()), case.name
