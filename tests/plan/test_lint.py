"""The lint of a plan: one finding for each defect, with sizes and remedy, and none for a sound plan."""

from typing import Any

import pytest

from graphdispatch import CUDAGraphMode as Mode
from graphdispatch.decide.table import KeyTable
from graphdispatch.engines import BatchDescriptor as Key
from graphdispatch.engines import CudagraphKeyDispatcher
from graphdispatch.errors import ConfigError
from graphdispatch.plan.lint import LintCode, LintFinding, lint

PIECEWISE, FULL = Mode.PIECEWISE, Mode.FULL


def table(full: list[Key], piecewise: list[Key] | None = None, query_len: int = 1, **options: Any) -> KeyTable:
    """An initialised table of these keys."""
    keys = {FULL: full, PIECEWISE: piecewise or []}
    return KeyTable(keys, mode=Mode.FULL_AND_PIECEWISE, query_len=query_len, **options)


def found(plan: KeyTable, tokens: int, reqs: int, query_len: int = 1) -> dict[LintCode, tuple[int, ...]]:
    """The sizes by code."""
    findings = lint(plan, max_num_tokens=tokens, max_num_reqs=reqs, query_len=query_len)
    return {finding.code: finding.sizes for finding in findings}


def decode(*sizes: int) -> list[Key]:
    """Uniform keys as vLLM 0.11.1 writes them."""
    return [Key(size, None, True) for size in sizes]


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("query_len", [1, 3])
def test_a_staged_plan_up_to_the_limits_is_sound(mode: Mode, query_len: int) -> None:
    """Sizes staged up to the scheduler's limits have no findings in any mode, and no warning."""
    limits = {"max_num_reqs": 20, "max_num_tokens": 24}
    dispatcher = CudagraphKeyDispatcher(capture_sizes=[3, 6, 12, 24], query_lens=[query_len], **limits)
    dispatcher.initialize_cudagraph_keys(mode, query_len)
    assert lint(dispatcher, query_len=query_len, **limits) == []


def test_a_graph_larger_than_any_batch_is_unreachable() -> None:
    """The scheduler never sends what only the largest graph serves."""
    assert found(table([Key(8), Key(16), Key(32)]), tokens=12, reqs=12) == {LintCode.UNREACHABLE_GRAPH: (32,)}


def test_a_graph_for_more_requests_than_there_are_is_unreachable() -> None:
    """Decode graphs beyond the scheduler's requests hold memory for nothing."""
    assert found(table(decode(4, 8, 16)), tokens=64, reqs=8) == {LintCode.UNREACHABLE_GRAPH: (16,)}


def test_a_uniform_piecewise_key_is_unreachable() -> None:
    """Piecewise graphs are looked up without the kind of batch."""
    assert found(table([Key(8)], [Key(8, None, True)]), tokens=8, reqs=8) == {LintCode.UNREACHABLE_GRAPH: (8,)}


def test_a_piecewise_graph_behind_a_full_one_is_shadowed() -> None:
    """It serves only calls that exclude full graphs."""
    assert found(table([Key(8)], [Key(8)]), tokens=8, reqs=8) == {LintCode.SHADOWED_GRAPH: (8,)}


def test_two_keys_for_the_same_batches_are_duplicates() -> None:
    """A request count that the tokens imply already makes no other graph."""
    assert found(table([Key(8), Key(8, 8)]), tokens=8, reqs=8) == {LintCode.DUPLICATE_GRAPH: (8,)}


def test_a_size_that_the_query_length_does_not_divide_is_named() -> None:
    """Sizes taken as they are under speculation are no multiples."""
    codes = found(table(decode(4, 6, 8, 12), query_len=3), tokens=12, reqs=4, query_len=3)
    assert codes == {LintCode.NOT_DIVISIBLE: (4, 8)}


def test_decode_batches_beyond_the_largest_graph_are_a_cliff() -> None:
    """The scheduler sends more requests than the largest graph holds."""
    (finding,) = lint(table(decode(4, 8)), max_num_tokens=64, max_num_reqs=10)
    assert (finding.code, finding.sizes) == (LintCode.LARGEST_BELOW_LIMIT, (9, 10))
    assert finding.message == (
        "the largest FULL graph for decode serves 8 tokens, and the scheduler sends up to 10: batches of 9-10 tokens "
        "run eagerly; capture size 10 too"
    )


def test_falling_from_full_to_piecewise_is_a_cliff_too() -> None:
    """A limit that is no capture size leaves the fullest batches to the worse mode."""
    assert found(table(decode(4, 8), [Key(16)]), tokens=16, reqs=10) == {LintCode.LARGEST_BELOW_LIMIT: (9, 10)}


def test_large_mixed_batches_without_a_graph_are_no_finding() -> None:
    """Engines run long prefills eagerly by choice."""
    assert found(table(decode(4, 8), [Key(8)]), tokens=64, reqs=8) == {}


def test_a_hole_that_request_limits_leave_is_unserved() -> None:
    """Mixed batches with more requests than a graph was captured for have none, though larger batches have."""
    codes = found(table([Key(4), Key(8, 2)]), tokens=8, reqs=4)
    assert codes[LintCode.UNSERVED_SIZES] == (5, 6, 7, 8)


def test_a_plan_for_another_query_length_serves_no_decode() -> None:
    """All decode batches are named, as none has a graph."""
    assert found(table(decode(4, 8)), tokens=8, reqs=4, query_len=2)[LintCode.UNSERVED_SIZES] == (2, 4, 6, 8)


def test_eager_by_the_cost_model_is_no_finding() -> None:
    """What was chosen is not missing."""
    plan = table([Key(8)], cost=lambda mode, padded, real: 1.0 if mode is Mode.NONE and real < 4 else 2.0)
    assert found(plan, tokens=8, reqs=8) == {}


def test_variants_share_a_finding() -> None:
    """One sentence for all variants with the same gap, which names them."""
    keys = [Key(4, variant="a"), Key(4, variant="b"), Key(8, variant="c")]
    findings = lint(table(keys), max_num_tokens=8, max_num_reqs=8)
    assert [finding.message.rpartition(" (")[2] for finding in findings] == ["variants: a, b)"]


def test_nothing_to_lint_before_the_keys_are_initialised() -> None:
    """A dispatcher without graphs has no findings."""
    assert lint(CudagraphKeyDispatcher(), max_num_tokens=8, max_num_reqs=8) == []


def test_limits_must_be_positive() -> None:
    """The error names the limit."""
    with pytest.raises(ConfigError, match="max_num_reqs must be >= 1, got 0"):
        lint(table([Key(8)]), max_num_tokens=8, max_num_reqs=0)


def test_a_long_list_of_sizes_is_shortened_for_people() -> None:
    """The message leaves out the middle; the finding keeps all sizes."""
    sizes = range(20, 60, 2)
    (finding,) = lint(table([Key(8), *map(Key, sizes)]), max_num_tokens=8, max_num_reqs=8)
    assert "20, 22, 24, 26, ..., 54, 56, 58 tokens" in finding.message
    assert isinstance(finding, LintFinding)
    assert finding.sizes == tuple(sizes)
