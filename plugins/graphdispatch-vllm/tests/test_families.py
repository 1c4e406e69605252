"""The kept results of the families: what is served is what they show, and the README says the same."""

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM; make vllm-test makes an environment that has it")

from graphdispatch_vllm.support import SERVED

from .families import MODES, RESULTS, compare, is_right, table

ROOT = Path(__file__).resolve().parents[1]
KEPT = json.loads(RESULTS.read_text())


def test_what_is_served_is_what_was_shown() -> None:
    """Each family that is served had eager's tokens in both dtypes and in every mode, and no others are served."""
    right = {
        name
        for name, dtypes in KEPT.items()
        if all(is_right(dtypes.get(dtype, {}).get(mode)) for dtype in SERVED["dtype"] for mode in MODES)
    }
    classes = {"GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM" for name in right}
    assert SERVED["architecture"] == classes


def test_the_results_could_have_been_wrong() -> None:
    """The tokens of a family differ from each other, and prefixes were cached."""
    for dtypes in KEPT.values():
        for modes in dtypes.values():
            for result in modes.values():
                assert result["different tokens"] > 40
                assert result["cached"] > 0


def test_the_readme_has_the_table_of_the_results() -> None:
    """``python tests/families.py --table`` prints it."""
    assert table(KEPT) in (ROOT / "README.md").read_text()


def test_served_again_some_requests_of_one_family_are_right() -> None:
    """The script, and what it counts, as in the kept results."""
    found = compare(["GPT2"], ["FULL"], ["float32"], 20, [8, 64])
    assert is_right(found["GPT2"]["float32"]["FULL"])
