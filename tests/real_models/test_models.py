"""Models that people run, called as people call them: a fast part of ``make sweep``."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("benchmarks", reason="the benchmarks are not part of the source distribution")

from benchmarks.real_models.families import build_cases
from benchmarks.real_models.sweep import run_case

FAST = [
    ("encoder", "bert"),
    ("encoder", "deberta-v2"),
    ("decoder", "llama"),
    ("seq2seq", "t5"),
    ("vision", "vit"),
    ("audio", "wav2vec2"),
    ("nn", "LSTM"),
    ("nn", "TransformerEncoder, mask"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "name"), FAST, ids=[name for _, name in FAST])
def test_every_style_is_served(kind: str, name: str) -> None:
    """Every style of the family is fully served, and each answer is eager's."""
    outcomes = [run_case(case, times=False) for case in build_cases(kind, name)]
    assert outcomes
    for outcome in outcomes:
        assert (outcome.served, outcome.wrong) == ("full", ""), outcome
