"""Keeps the outputs in ``docs/audit.md`` true."""

import pytest

from .document import DOCUMENT, OUTPUT, output

pytest.importorskip("transformers")
OUTPUTS = {found[2]: found[3] for found in OUTPUT.finditer(DOCUMENT.read_text("utf-8"))}


def test_the_document_has_its_examples() -> None:
    """The search did not silently find nothing."""
    assert list(OUTPUTS) == ["demo", "bert", "bert_full_mask", "experts", "ranker"]


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_output_is_what_the_command_prints(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, run ``python -m tests.audit.document`` and read what changed."""
    monkeypatch.chdir(DOCUMENT.parents[1])  # lines of code are printed as seen from here
    assert OUTPUTS[name] == output(name)
