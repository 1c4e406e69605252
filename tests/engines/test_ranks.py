"""Consensus of ranks: the merge of votes as a pure function, then real gloo processes."""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import CUDAGraphMode, Reason
from graphdispatch.engines import Agreement, RankConsensus, RankVote
from graphdispatch.engines.ranks import merge_votes
from graphdispatch.errors import CaptureError
from graphdispatch.runtime.ranks import UNEQUAL, Ranks

from ..helpers import run_python

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("rank_worker.py")
HANG_S = 120
"""Bound on a whole run of processes: reached only where something hangs, and then the test fails."""
NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
SIZES = (1, 2, 4, 8)
EVERY = [(mode, size) for mode in (FULL, PIECEWISE) for size in SIZES]
graphs = st.frozensets(st.sampled_from(EVERY)) | st.just(frozenset(EVERY))
modes = st.sampled_from((NONE, PIECEWISE, FULL, FULL))
elections = st.lists(st.builds(RankVote, st.integers(0, 9), modes, st.booleans(), graphs), min_size=1, max_size=5)


@given(elections, graphs)
def test_a_graph_serves_every_rank(votes: list[RankVote], tried: frozenset[tuple[CUDAGraphMode, int]]) -> None:
    """An agreed graph holds the largest batch, in a mode that all allow. All ranks have it, or all would capture it and
    it was not tried."""
    agreed = merge_votes(votes, SIZES, tried)
    if agreed.descriptor is None:
        assert not agreed.capture
        return
    graph = (agreed.mode, agreed.size)
    assert agreed.size >= max(vote.rows for vote in votes)
    assert agreed.mode <= min(vote.mode for vote in votes)
    assert all(vote.may_capture if agreed.capture else graph in vote.graphs for vote in votes)
    assert not (agreed.capture and graph in tried)


@given(elections)
def test_eager_only_where_no_graph_serves_all(votes: list[RankVote]) -> None:
    """An eager agreement means that no size at or above the largest batch is ready on all ranks in an allowed mode."""
    rows, mode = max(vote.rows for vote in votes), min(vote.mode for vote in votes)
    if rows and merge_votes(votes, SIZES).descriptor is None:
        allowed = [(kind, size) for kind, size in EVERY if kind <= mode and size >= rows]
        assert not any(all(graph in vote.graphs for vote in votes) for graph in allowed)


def vote(
    rows: int, mode: CUDAGraphMode = FULL, *, full: Any = (), piecewise: Any = (), may_capture: bool = False
) -> RankVote:
    """A vote with graphs of these sizes."""
    return RankVote(rows, mode, may_capture, frozenset([(FULL, s) for s in full] + [(PIECEWISE, s) for s in piecewise]))


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([vote(3, full=[4]), vote(1, full=[1, 4])], (FULL, 4, False, "")),
        ([vote(4, full=[4]), vote(1), vote(1)], (NONE, 4, False, "no FULL graph of 4 rows on ranks [1, 2]")),
        ([vote(4, full=[4, 8]), vote(1, full=[8])], (FULL, 8, False, "")),
        ([vote(4, full=[4], piecewise=[4]), vote(1, PIECEWISE, piecewise=[4])], (PIECEWISE, 4, False, "")),
        ([vote(4, full=[4], piecewise=[4]), vote(1, piecewise=[4])], (PIECEWISE, 4, False, "")),
        ([vote(2, full=[2], may_capture=True), vote(1, may_capture=True)], (FULL, 2, True, "")),
        ([vote(2, full=[4], may_capture=True), vote(1, full=[4])], (FULL, 4, False, "")),
        ([vote(2, full=[2]), vote(2, NONE)], (NONE, 2, False, "no graph may serve the rows of ranks [1]")),
        ([vote(9, full=SIZES), vote(1, full=SIZES)], (NONE, 9, False, "no graph may serve the rows of ranks [0]")),
        ([vote(0, full=SIZES), vote(0, full=SIZES)], (NONE, 0, False, "no rank has rows")),
        ([vote(0, full=SIZES), vote(1, full=SIZES)], (FULL, 1, False, "")),
    ],
)
def test_rules_of_the_merge(votes: list[RankVote], expected: tuple[Any, ...]) -> None:
    """Least mode, most rows, then a size that all have; capture where all would; else eager, and because of whom."""
    assert merge_votes(votes, SIZES) == expected


def test_a_rank_alone_agrees_with_itself() -> None:
    """Without torch.distributed: a size is captured once. If that failed it stays eager, and if the graph goes later it
    is captured again."""
    consensus = RankConsensus(sizes=SIZES)
    graph = [(FULL, 4)]
    steps = [consensus.agree(3, graphs) for graphs in ([], [], graph, [])]
    assert [(one.mode, one.capture) for one in steps] == [(FULL, True), (NONE, False), (FULL, False), (FULL, True)]
    assert consensus.agree(3, [], may_capture=False) == Agreement(
        NONE, 3, detail="no FULL graph of 4 rows on ranks [0]"
    )


def run_ranks(world: int, folder: Path, *scenarios: str) -> list[dict[str, Any]]:
    """What every rank wrote."""
    command = [sys.executable, "-W", "error", str(WORKER)]
    processes = [
        subprocess.Popen([*command, str(rank), str(world), str(folder), *scenarios], stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    try:
        errors = [process.communicate(timeout=HANG_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world, errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The scenarios on three processes."""
    scenarios = ("disagree", "functional_collectives", "sizes", "late", "death")
    return run_ranks(3, tmp_path_factory.mktemp("three"), *scenarios)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two processes, of which one alone finds something; they hang where ranks are not in step."""
    return run_ranks(2, tmp_path_factory.mktemp("two"), "refusals", "losses")


def test_disagreeing_ranks_take_one_decision(three: list[dict[str, Any]]) -> None:
    """Random batches, modes and a failing capture: every rank decides alike in every step and answers as eager."""
    results = [result["disagree"] for result in three]
    decisions = [[decision for decision, _ in steps] for steps in results]
    assert all(one == decisions[0] for one in decisions)
    assert all(is_right for steps in results for _, is_right in steps)
    assert {decision[0] for decision in decisions[0]} == {"FULL", "NONE"}


def test_a_failed_capture_is_known_to_all(three: list[dict[str, Any]]) -> None:
    """A size whose capture failed on one rank is tried once, and replayed by none."""
    steps = [decision for decision, _ in three[0]["disagree"]]
    of_four = Counter(capture for mode, size, capture, _ in steps if mode == "FULL" and size == 4)
    assert of_four == {True: 1}
    assert any(detail == "no FULL graph of 4 rows on ranks [2]" for *_, detail in steps)


def test_functional_collectives_run_in_the_graph(three: list[dict[str, Any]]) -> None:
    """A replay runs the collective and its wait: two calls of four are hits, and all answers are eager's."""
    for result in three:
        assert result["functional_collectives"] == {
            name: [[True] * 5, True] for name in ("reduced", "waited", "several", "gathered", "in_place")
        }


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("counts", "state_rebound"),
        ("reads", "capture_unsafe"),
        ("shows", "capture_unsafe"),
        ("lies", "verification_failed"),
        ("draws", "state_unseen"),
    ],
)
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_what_one_rank_refuses_all_refuse(two: list[dict[str, Any]], mode: str, what: str, reason: str) -> None:
    """Behind its eager run, within its recording or by its comparison: nobody waits for ever, no collective meets that
    of another run, and the reason is that of the rank that refused."""
    assert [result["refusals"][f"{mode} {what}"] for result in two] == [[[True] * 4, {reason: 4}, 0]] * 2


def test_ranks_alike_capture_and_compare_in_step(two: list[dict[str, Any]]) -> None:
    """Where nobody refuses, a capture, a comparison, and then replays."""
    made = {"captured_now": 1, "verified_now": 1}
    for mode in ("FULL", "PIECEWISE"):
        assert [result["refusals"][f"{mode} nothing"] for result in two] == [[[True] * 4, made, 2]] * 2


@pytest.mark.parametrize("when", ["first", "cleared", "moved", "unfrozen"])
def test_a_graph_that_one_rank_lost_is_captured_by_all(two: list[dict[str, Any]], when: str) -> None:
    """One that is gone, or whose weights have moved, also while captures were frozen."""
    assert [result["losses"][when] for result in two] == [["captured_now", "verified_now", "exact"]] * 2


def test_frozen_ranks_need_no_agreement(two: list[dict[str, Any]]) -> None:
    """One runs eagerly what the other replays: each call is one run."""
    assert [result["losses"]["frozen"] for result in two] == [["exact"] * 2] * 2
    assert [result["losses"]["moved while frozen"] for result in two] == [["exact"] * 2, ["frozen"] * 2]


def test_what_one_rank_has_to_compare_all_compare(two: list[dict[str, Any]]) -> None:
    """Its ``verify_every`` is another."""
    steps = ["captured_now", "verified_now", "exact", "exact", "verified_now", "exact"]
    assert [result["losses"]["due"] for result in two] == [steps] * 2


def test_a_graph_for_which_one_rank_has_no_room_serves_none(two: list[dict[str, Any]]) -> None:
    """The other has captured it, and does not replay it."""
    found = [result["losses"]["without room"] for result in two]
    assert found == [["captured_now", "cache_full", "cache_full"], ["cache_full"] * 3]


def test_ranks_that_run_a_call_in_other_ways_have_no_graph() -> None:
    """Both sides say so, whichever run or end the other is at."""
    others: list[int] = []

    def least(numbers: Sequence[int]) -> list[int]:
        return [min(pair) for pair in zip(numbers, others, strict=True)]

    for stage in ("warming up", "replaying"):
        others[:] = numbers_of(lambda ranks, stage=stage: ranks.begin_run(stage))
        assert Ranks(least).end(Reason.CAPTURED_NOW, is_good=True) == (Reason.CAPTURE_FAILED, UNEQUAL)
        for other in (
            lambda ranks: ranks.end(Reason.CAPTURED_NOW, is_good=True),
            lambda ranks: ranks.begin_run("recording"),
        ):
            others[:] = numbers_of(other)
            with pytest.raises(CaptureError, match="equally often"):
                Ranks(least).begin_run(stage)


def numbers_of(step: Callable[[Ranks], Any]) -> list[int]:
    """What a rank says at a step."""
    said: list[int] = []

    def alone(numbers: Sequence[int]) -> Sequence[int]:
        said.extend(numbers)
        return numbers

    step(Ranks(alone))
    return said


def test_other_sizes_are_refused(three: list[dict[str, Any]]) -> None:
    """If a rank is configured with other sizes, every rank says which it has."""
    for rank, result in enumerate(three):
        assert f"sizes must be the same on every rank; rank {rank} has" in result["sizes"]


def test_a_dead_rank_is_an_error(three: list[dict[str, Any]]) -> None:
    """A rank that ends without a word is an error for the others, before any timeout."""
    assert "rank 0 got no agreement, as a rank did not vote" in three[0]["death"]


def test_a_late_rank_is_an_error(three: list[dict[str, Any]]) -> None:
    """The others give up at the timeout; when the late rank comes, it gets an error too. A consensus that failed once
    refuses to go on, since ranks may be out of step."""
    for rank, result in enumerate(three):
        assert f"rank {rank} got no agreement" in result["late"][0]
        assert "make a new RankConsensus" in result["late"][1]


def test_the_tensor_parallel_example_runs() -> None:
    """Two ranks decode with all-reduces inside their graphs, and agree with eager within the example's tolerance."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = [str(ROOT / "examples" / "tensor_parallel.py"), "--device", "cpu", "--steps", "24"]
    lines = sorted(run_python(*launcher, *example).splitlines())
    assert [line.split(" of ")[0] for line in lines] == ["rank 0", "rank 1"]
    assert all(re.search(r"24 steps, 4 captures, 1\d replays,", line) for line in lines)
