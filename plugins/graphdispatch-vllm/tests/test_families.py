"""The kept results of the families: what is served is what they show, and the README says the same."""

import json

import pytest

pytest.importorskip("vllm", reason="needs vLLM; make vllm-test makes an environment that has it")

from graphdispatch_vllm.support import SERVED

from .families import ALONE, MODES, README, RESULTS, THREADS, Engine, Results, compare, has_bits, is_right, table

KEPT: Results = json.loads(RESULTS.read_text())
FAMILIES = {Engine(*key.split()).family for key in KEPT}


def test_what_is_served_is_what_was_shown() -> None:
    """Each family that is served had eager's tokens in both dtypes, in every mode, with one thread and with two; and no
    others are served."""
    for family in FAMILIES:
        wanted = [Engine(family, dtype, mode, n) for dtype in SERVED["dtype"] for mode in MODES for n in THREADS]
        assert [str(each) for each in wanted if str(each) not in KEPT or not is_right(KEPT[str(each)])] == []
    assert SERVED["architecture"] == {
        "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM" for family in FAMILIES
    }


def test_logprobs_have_other_bits_only_where_eager_differs_from_itself() -> None:
    """Those of eager, one request at a time, have other bits than those of eager with several, too."""
    other = {Engine(*key.split()) for key, each in KEPT.items() if not has_bits(each)}
    for each in other:
        assert not has_bits(KEPT[str(each._replace(mode=ALONE))])
    assert {each.family for each in other if each.dtype == "float32"} == {"Qwen2Moe"}


def test_the_results_could_have_been_wrong() -> None:
    """The tokens of a family differ from each other, and prefixes were cached."""
    for result in KEPT.values():
        assert result["different tokens"] > 40
        assert result["cached"] > 0


def test_the_readme_has_the_table_of_the_results() -> None:
    """``make vllm-families`` puts it there."""
    assert table(KEPT) in README.read_text()


def test_part_of_the_results_again() -> None:
    """Requests with attention groups of two kinds, by two threads, have eager's tokens and bits."""
    found = compare(["Gemma3"], ["FULL"], ["float32"], ["2"], 20, [8, 64])
    assert list(found) == ["Gemma3 float32 FULL 2"]
    assert is_right(found["Gemma3 float32 FULL 2"])
    assert has_bits(found["Gemma3 float32 FULL 2"])
