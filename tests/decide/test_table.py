"""The table of decisions: preferences, request limits, variants, cost, and an explicit answer for every miss."""

import os
import subprocess
import sys

import pytest

from graphdispatch import CUDAGraphMode as Mode
from graphdispatch import Reason
from graphdispatch.decide.table import KeyTable
from graphdispatch.engines import BatchDescriptor
from graphdispatch.errors import ConfigError, FallbackError

NONE, PIECEWISE, FULL = Mode.NONE, Mode.PIECEWISE, Mode.FULL


def key(tokens: int, reqs: int | None = None, uniform: bool = False, variant: object = None) -> BatchDescriptor:
    """A key, with short names."""
    return BatchDescriptor(tokens, reqs, uniform, variant)  # type: ignore[arg-type]


def table(
    full: list[BatchDescriptor], piecewise: list[BatchDescriptor] | None = None, query_len: int = 1, **options: object
) -> KeyTable:
    """An initialised table of these keys."""
    keys = {FULL: full, PIECEWISE: piecewise or []}
    return KeyTable(keys, mode=Mode.FULL_AND_PIECEWISE, query_len=query_len, **options)  # type: ignore[arg-type]


def test_a_better_mode_goes_before_a_nearer_size() -> None:
    """A uniform batch goes up to the next FULL graph, past the nearer PIECEWISE one."""
    plan = table([key(18, 3, True)], [key(16)], query_len=6)
    assert plan.decide(12, 2, query_len=6)[:4] == (FULL, key(18, 3, True), 18, Reason.PADDED)
    assert plan.decide(12, 2)[:4] == (PIECEWISE, key(16), 16, Reason.PADDED)


def test_an_exact_size_is_not_padded_further() -> None:
    """The nearest size wins within a mode."""
    plan = table([key(12, 2, True), key(18, 3, True)], query_len=6)
    assert plan.decide(12, 2, query_len=6)[:4] == (FULL, key(12, 2, True), 12, Reason.EXACT)


def test_a_uniform_graph_goes_before_a_general_one_of_its_size() -> None:
    """The specialised graph serves uniform batches, the general one all others."""
    plan = table([key(8, None, True), key(8)])
    assert plan.decide(8, 8, query_len=1).descriptor == key(8, None, True)
    assert plan.decide(8, 5).descriptor == key(8)


@pytest.mark.parametrize(("query_len", "served"), [(2, key(12, 6, True)), (3, key(12, 4, True)), (1, None)])
def test_query_lengths_that_share_a_size_keep_their_graphs(query_len: int, served: BatchDescriptor | None) -> None:
    """Two graphs of twelve tokens for different query lengths are both reached, and by nothing else."""
    plan = table([key(12, 6, True), key(12, 4, True)])
    assert plan.decide(12, 12 // query_len, query_len=query_len).descriptor == served


@pytest.mark.parametrize(("tokens", "reqs", "length"), [(12, 5, 3), (12, 5, None), (11, None, 3), (12, None, None)])
def test_a_batch_that_is_not_uniform_gets_no_uniform_graph(tokens: int, reqs: int | None, length: int | None) -> None:
    """Counts that contradict the query length make a batch mixed."""
    plan = table([key(12, 4, True)], [key(16)])
    assert plan.decide(tokens, reqs, query_len=length).descriptor == key(16)


def test_a_request_limit_sends_a_batch_on_to_a_graph_with_room() -> None:
    """A graph captured for four requests is passed by with five, though its tokens would do."""
    plan = table([key(8), key(16, 4), key(24)])
    assert [plan.decide(10, reqs).size for reqs in (4, 5)] == [16, 24]


def test_an_unknown_number_of_requests_counts_as_the_most_possible() -> None:
    """Without a count there may be as many requests as tokens, or as the scheduler admits."""
    keys = [key(16, 4), key(24)]
    assert table(keys).decide(10).size == 24
    assert table(keys, max_num_reqs=4).decide(10).size == 16


@pytest.mark.parametrize(("asked", "served"), [(0, 0), (1, 1), (2, 4), (4, 4), (False, 0)])
def test_a_count_is_rounded_up_to_a_captured_one(asked: int, served: int) -> None:
    """An integer variant is served by the next captured one."""
    plan = table([key(8, variant=count) for count in (0, 1, 4)])
    found = plan.decide(7, variant=asked)
    assert found.descriptor == key(8, variant=served)


def test_a_wide_gap_between_counts_is_rounded_up_too() -> None:
    """Counts far from any captured one find it."""
    assert table([key(8, variant=1000)]).decide(7, variant=1).descriptor == key(8, variant=1000)


def test_a_graph_for_more_adapters_serves_where_the_nearer_count_has_no_graph() -> None:
    """Sizes that only a larger variant has serve smaller variants."""
    plan = table([key(8, variant=1), key(16, variant=2)])
    assert plan.decide(10, variant=1).descriptor == key(16, variant=2)


@pytest.mark.parametrize("asked", [None, "b", 1])
def test_a_variant_that_is_no_count_must_be_captured_itself(asked: object) -> None:
    """Strings and None are never exchanged for another variant."""
    found = table([key(8, variant="a")]).decide(8, variant=asked)  # type: ignore[arg-type]
    assert found.reason is Reason.VARIANT_NOT_CAPTURED
    assert found.explain().endswith("captured: a)")


MISSES = [
    (table([]), {"num_tokens": 8}, Reason.NOT_CAPTURED),
    (KeyTable({}), {"num_tokens": 8, "variant": 3}, Reason.NOT_INITIALIZED),
    (KeyTable({}, mode=NONE, query_len=1), {"num_tokens": 8}, Reason.DISABLED),
    (table([key(8)]), {"num_tokens": 0}, Reason.NO_ROWS),
    (table([key(8)]), {"num_tokens": 9}, Reason.ABOVE_LARGEST_SIZE),
    (table([key(8)]), {"num_tokens": 9000}, Reason.ABOVE_LARGEST_SIZE),
    (table([key(8, variant=2)]), {"num_tokens": 8, "variant": 3}, Reason.VARIANT_NOT_CAPTURED),
    (table([key(8)]), {"num_tokens": 8, "excluded_modes": [FULL]}, Reason.MODE_EXCLUDED),
    (table([key(8)]), {"num_tokens": 8, "allowed_modes": {NONE}}, Reason.MODE_EXCLUDED),
    (table([key(8)]), {"num_tokens": 9, "excluded_modes": [FULL]}, Reason.ABOVE_LARGEST_SIZE),
    (table([key(8, None, True)]), {"num_tokens": 8}, Reason.MIXED_BATCH),
    (table([key(8, None, True)]), {"num_tokens": 8, "query_len": 2}, Reason.QUERY_LEN_NOT_CAPTURED),
    (table([key(8, 4)]), {"num_tokens": 8, "num_reqs": 5}, Reason.TOO_MANY_REQUESTS),
]


@pytest.mark.parametrize(("plan", "batch", "reason"), MISSES, ids=[str(miss[2]) for miss in MISSES])
def test_every_miss_has_its_own_reason(plan: KeyTable, batch: dict[str, int], reason: Reason) -> None:
    """No graph is an explicit answer: mode NONE, no descriptor, the real size, and why."""
    found = plan.decide(**batch)  # type: ignore[arg-type]
    assert found[:5] == (NONE, None, batch["num_tokens"], reason, batch["num_tokens"])
    assert found.explain().startswith("eager")


@pytest.mark.parametrize("tokens", [8, 7, 9, 10**6])
def test_a_batch_is_decided_once(tokens: int) -> None:
    """A hit or a miss, however large: the second time gives the very decision of the first, so that it is a lookup."""
    plan = table([key(8)])
    assert plan.decide(tokens, 3) is plan.decide(tokens, 3)


def test_a_batch_above_a_request_limit_is_decided_once_too() -> None:
    """Also where the number of requests matters."""
    plan = table([key(8, 2), key(16)])
    assert plan.decide(7, 3) is plan.decide(7, 3)
    assert plan.decide(7, 3).size == 16
    assert plan.decide(7, 2).size == 8


def test_a_miss_says_which_size_was_the_largest() -> None:
    """The line for a person names the size to go beyond."""
    assert table([key(8)]).decide(9).explain() == (
        "eager, 9 rows: the batch is larger than the largest graph for it (8); capture a larger size"
    )


def test_the_callers_sets_of_modes_stay_as_they_are() -> None:
    """Excluding modes does not shrink the set of allowed ones that the caller passed."""
    allowed, excluded = {NONE, PIECEWISE, FULL}, {FULL}
    assert table([key(8)], [key(8)]).decide(8, allowed_modes=allowed, excluded_modes=excluded).mode is PIECEWISE
    assert (allowed, excluded) == ({NONE, PIECEWISE, FULL}, {FULL})


@pytest.mark.parametrize("allowed", [[], [Mode.FULL_AND_PIECEWISE]])
def test_some_runtime_mode_must_be_allowed(allowed: list[Mode]) -> None:
    """No mode at all, or a configured one, is an error and no silent eager step."""
    with pytest.raises(ConfigError, match="allowed_modes less excluded_modes must leave"):
        table([key(8)]).decide(8, allowed_modes=allowed)


def test_a_batch_that_may_not_run_eagerly_raises_where_no_graph_serves_it() -> None:
    """Without NONE among the allowed modes a miss is an error that carries its reason."""
    with pytest.raises(FallbackError, match="must hold NONE") as caught:
        table([key(8)]).decide(9, allowed_modes=[FULL])
    assert caught.value.reason is Reason.ABOVE_LARGEST_SIZE


@pytest.mark.parametrize("batch", [{"num_tokens": -1}, {"num_tokens": 4, "query_len": 0}])
def test_a_count_that_no_batch_has_is_an_error(batch: dict[str, int]) -> None:
    """Negative tokens do not reach a row from its end."""
    with pytest.raises(ConfigError, match="num_tokens must be >= 0 and query_len >= 1"):
        table([key(8)]).decide(**batch)  # type: ignore[arg-type]


def cost(mode: Mode, padded: int, real: int) -> float:
    """Padded tokens count one each; a piecewise step costs two more, an eager one ten more."""
    return padded + {FULL: 0, PIECEWISE: 2, NONE: 10}[mode]


@pytest.mark.parametrize(("tokens", "mode"), [(16, FULL), (11, PIECEWISE), (20, NONE), (30, FULL)])
def test_a_cost_model_weighs_padding_against_the_better_mode(tokens: int, mode: Mode) -> None:
    """Too much padding makes the worse mode cheaper, or eager, which is then the policy's choice."""
    plan = table([key(16), key(32)], [key(12)], cost=cost)
    found = plan.decide(tokens, tokens)
    assert (found.mode, found.reason is Reason.POLICY) == (mode, mode is NONE)


def test_a_cost_model_does_not_choose_eager_where_it_is_not_allowed() -> None:
    """Without NONE the cheapest graph serves."""
    plan = table([key(32)], cost=cost)
    assert plan.decide(20).reason is Reason.POLICY
    assert plan.decide(20, allowed_modes=[FULL, PIECEWISE]).descriptor == key(32)


def test_the_best_mode_wins_a_tie() -> None:
    """A cost model without an opinion changes nothing."""
    plan = table([key(16)], [key(12)], cost=lambda mode, padded, real: 1.0)
    assert plan.decide(11).mode is FULL


def test_a_decision_does_not_depend_on_the_order_of_the_keys() -> None:
    """Processes with other hash seeds decide alike, also between keys that serve the same batches."""
    code = (
        "from graphdispatch.descriptors import BatchDescriptor as B;"
        "from graphdispatch.modes import CUDAGraphMode as M;"
        "from graphdispatch.decide.table import KeyTable as T;"
        "keys = [B(8, r, False, v) for r in (None, 8, 9) for v in ('a', 'b')];"
        "print(T({M.FULL: keys}, mode=M.FULL, query_len=1).decide(5, variant='a'))"
    )
    runs = set()
    for seed in ("1", "2", "3", "4"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        runs.add(done.stdout)
    assert len(runs) == 1
