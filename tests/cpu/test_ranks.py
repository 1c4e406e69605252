"""Consensus of ranks: the merge of votes as a pure function, then real gloo processes."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch.engines.ranks import Agreement, RankConsensus, RankVote, decode_votes, encode_vote, merge_votes
from graphdispatch.errors import ConfigError
from graphdispatch.modes import CUDAGraphMode
from graphdispatch.reasons import Reason

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("rank_worker.py")
HANG_S = 120
"""Bound on a whole run of processes: reached only where something hangs, and then the test fails."""
NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
SIZES = (1, 2, 4, 8)
size_lists = st.lists(st.integers(1, 500), min_size=1, max_size=140, unique=True).map(lambda s: tuple(sorted(s)))


@st.composite
def elections(draw: st.DrawFn, least: int = 1) -> tuple[tuple[int, ...], list[RankVote]]:
    """Sizes, and the votes of some ranks."""
    sizes = draw(size_lists)
    masks = st.integers(0, (1 << len(sizes)) - 1) | st.just((1 << len(sizes)) - 1)
    modes = st.sampled_from((NONE, PIECEWISE, FULL, FULL))
    vote = st.builds(RankVote, st.integers(0, sizes[-1] + 1), modes, masks, masks, masks)
    return sizes, draw(st.lists(vote, min_size=least, max_size=5))


def has(mask: int, sizes: tuple[int, ...], size: int) -> bool:
    """Whether a mask names a size."""
    return bool(mask >> sizes.index(size) & 1)


@given(elections())
def test_a_graph_serves_every_rank(election: tuple[tuple[int, ...], list[RankVote]]) -> None:
    """An agreed graph holds the largest batch, in a mode that all allow, and all have it or all may capture it."""
    sizes, votes = election
    agreed = merge_votes(votes, sizes)
    if agreed.descriptor is None:
        assert not agreed.capture
        return
    assert agreed.size >= max(vote.rows for vote in votes)
    assert agreed.mode <= min(vote.mode for vote in votes)
    for vote in votes:
        assert has(vote.capturable if agreed.capture else vote.ready(agreed.mode), sizes, agreed.size)


@given(elections())
def test_eager_only_where_no_graph_serves_all(election: tuple[tuple[int, ...], list[RankVote]]) -> None:
    """An eager agreement means that no size at or above the largest batch is ready on all ranks in an allowed mode."""
    sizes, votes = election
    rows, mode = max(vote.rows for vote in votes), min(vote.mode for vote in votes)
    if rows == 0 or merge_votes(votes, sizes).descriptor is not None:
        return
    for candidate in (PIECEWISE, FULL):
        for size in sizes:
            if candidate <= mode and size >= rows:
                assert not all(has(vote.ready(candidate), sizes, size) for vote in votes)


@given(elections(least=2), st.randoms(use_true_random=False))
def test_the_order_of_ranks_does_not_matter(election: tuple[tuple[int, ...], list[RankVote]], draw: Any) -> None:
    """Mode, size, reason and capture are the same for any order of the votes."""
    sizes, votes = election
    shuffled = list(votes)
    draw.shuffle(shuffled)
    first, second = merge_votes(votes, sizes), merge_votes(shuffled, sizes)
    assert first.decision._replace(detail="") == second.decision._replace(detail="")
    assert first.capture is second.capture


@given(elections())
def test_votes_survive_the_transport(election: tuple[tuple[int, ...], list[RankVote]]) -> None:
    """Decoding encoded votes gives them back, and every number is a byte, so that no sum of ranks can overflow."""
    sizes, votes = election
    table = [encode_vote(vote, sizes) for vote in votes]
    assert decode_votes(table, sizes) == votes
    assert all(0 <= byte < 256 for row in table for byte in row)


def ready(*sizes: int) -> int:
    """A mask over ``SIZES``."""
    return sum(1 << SIZES.index(size) for size in sizes)


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([RankVote(3, FULL, full=ready(4)), RankVote(1, FULL, full=ready(1, 4))], (FULL, 4, Reason.PADDED, False)),
        ([RankVote(4, FULL, full=ready(4)), RankVote(1, FULL, full=ready(8))], (NONE, 4, Reason.NOT_CAPTURED, False)),
        ([RankVote(4, FULL, full=ready(4, 8)), RankVote(1, FULL, full=ready(8))], (FULL, 8, Reason.PADDED, False)),
        (
            [RankVote(4, FULL, full=ready(4), piecewise=ready(4)), RankVote(1, PIECEWISE, piecewise=ready(4))],
            (PIECEWISE, 4, Reason.EXACT, False),
        ),
        (
            [RankVote(4, FULL, full=ready(4), piecewise=ready(4)), RankVote(1, FULL, piecewise=ready(4))],
            (PIECEWISE, 4, Reason.EXACT, False),
        ),
        (
            [RankVote(2, FULL, full=ready(2), capturable=ready(2)), RankVote(1, FULL, capturable=ready(1, 2))],
            (FULL, 2, Reason.EXACT, True),
        ),
        ([RankVote(2, FULL, full=ready(2)), RankVote(2, NONE)], (NONE, 2, Reason.MODE_MISMATCH, False)),
        ([RankVote(9, FULL, full=15), RankVote(1, FULL, full=15)], (NONE, 9, Reason.ABOVE_LARGEST_SIZE, False)),
        ([RankVote(0, FULL, full=15), RankVote(0, FULL, full=15)], (NONE, 0, Reason.NO_ROWS, False)),
        ([RankVote(0, FULL, full=15), RankVote(1, FULL, full=15)], (FULL, 1, Reason.EXACT, False)),
    ],
)
def test_rules_of_the_merge(votes: list[RankVote], expected: tuple[Any, ...]) -> None:
    """Least mode, most rows, then a size that all have; capture where all may; eager with a reason elsewhere."""
    agreed = merge_votes(votes, SIZES)
    assert (agreed.mode, agreed.size, agreed.decision.reason, agreed.capture) == expected


def test_an_eager_agreement_names_the_ranks() -> None:
    """The explanation says which ranks hold the others back."""
    votes = [RankVote(4, FULL, full=ready(4)), RankVote(1, FULL), RankVote(1, FULL)]
    assert merge_votes(votes, SIZES).decision.explain() == "eager, 4 rows: no FULL graph of 4 rows on ranks 1, 2"


def test_a_rank_alone_agrees_with_itself() -> None:
    """Without torch.distributed nothing is exchanged, and captures, failures and releases count from the next step."""
    consensus = RankConsensus(sizes=SIZES)
    assert consensus.agree(3) == merge_votes([RankVote(3, FULL, capturable=15)], SIZES)
    consensus.record_captured(4)
    assert consensus.agree(3) == Agreement(consensus.agree(3).decision, capture=False)
    consensus.record_failed(4)
    assert consensus.agree(3).decision.reason is Reason.NOT_CAPTURED
    consensus.rearm()
    assert consensus.agree(3).capture
    assert consensus.exchanges == 0


@pytest.mark.parametrize("sizes", [(0, 1), (2, 2), (4, 2)])
def test_sizes_must_increase(sizes: tuple[int, ...]) -> None:
    """Sizes out of order are refused at once."""
    with pytest.raises(ConfigError, match="sizes must be positive and strictly increasing"):
        RankConsensus(sizes=sizes)


def test_bad_votes_are_refused() -> None:
    """Rows, modes and sizes that cannot be are named."""
    consensus = RankConsensus(sizes=SIZES)
    with pytest.raises(ConfigError, match="rows must be an integer >= 0, got -1"):
        consensus.agree(-1)
    with pytest.raises(ConfigError, match="mode must be FULL or PIECEWISE"):
        consensus.agree(1, CUDAGraphMode.FULL_DECODE_ONLY)
    with pytest.raises(ConfigError, match=r"size must be one of \[1, 2, 4, 8\], got 3"):
        consensus.record_captured(3)


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
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The scenarios on two processes."""
    return run_ranks(
        2, tmp_path_factory.mktemp("two"), "disagree", "collective", "functional_collectives", "sizes", "alone", "death"
    )


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The scenarios on four processes."""
    return run_ranks(4, tmp_path_factory.mktemp("four"), "disagree", "late")


@pytest.mark.parametrize("world", ["two", "four"])
def test_disagreeing_ranks_take_one_decision(world: str, request: pytest.FixtureRequest) -> None:
    """Random batches, modes and a failing capture: every rank decides alike in every step and answers as eager."""
    results = [result["disagree"] for result in request.getfixturevalue(world)]
    decisions = [[decision for decision, _ in result["steps"]] for result in results]
    assert all(one == decisions[0] for one in decisions)
    assert all(is_right for result in results for _, is_right in result["steps"])
    assert {decision[0] for decision in decisions[0]} == {"FULL", "NONE"}


@pytest.mark.parametrize("world", ["two", "four"])
def test_one_exchange_for_each_step(world: str, request: pytest.FixtureRequest) -> None:
    """A step costs one all-reduce, whatever comes of it."""
    for result in request.getfixturevalue(world):
        assert result["disagree"]["exchanges"] == len(result["disagree"]["steps"])


@pytest.mark.parametrize("world", ["two", "four"])
def test_a_failed_capture_is_known_to_all(world: str, request: pytest.FixtureRequest) -> None:
    """A size whose capture failed on one rank is tried once, and replayed by none."""
    results = request.getfixturevalue(world)
    steps = [decision for decision, _ in results[0]["disagree"]["steps"]]
    of_four = Counter(capture for mode, size, _, _, capture in steps if mode == "FULL" and size == 4)
    assert of_four == {True: 1}
    last = len(results) - 1
    assert any(f"no FULL graph of 4 rows on rank {last}" == detail for _, _, _, detail, _ in steps)


def test_collectives_inside_the_graph_pair_up(two: list[dict[str, Any]]) -> None:
    """Ranks that capture and replay in the same steps get the sum over ranks from the graph."""
    for result in two:
        assert all(is_right for _, is_right in result["collective"]["steps"])
        assert result["collective"]["hits"] == 4


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The functional collectives on one process."""
    return run_ranks(1, tmp_path_factory.mktemp("one"), "functional_collectives")


@pytest.mark.parametrize("world", ["one", "two"])
def test_functional_collectives_run_in_the_graph(world: str, request: pytest.FixtureRequest) -> None:
    """A replay runs the collective and its wait: two calls of four are hits, and all answers are eager's."""
    for result in request.getfixturevalue(world):
        assert result["functional_collectives"] == {
            name: [[True] * 4, 2] for name in ("reduced", "waited", "several", "gathered", "in_place")
        }


def test_other_sizes_are_refused(two: list[dict[str, Any]]) -> None:
    """A rank that is configured with other sizes is named, on every rank."""
    for result in two:
        assert "sizes must be the same on every rank; those of rank 1 differ from rank 0's" in result["sizes"]["error"]


def test_uncoupled_ranks_exchange_nothing(two: list[dict[str, Any]]) -> None:
    """With ``coupled=False`` each rank decides for itself, without a word to the others."""
    assert [result["alone"] for result in two] == [{"size": 1, "exchanges": 0}, {"size": 2, "exchanges": 0}]


def test_a_dead_rank_is_named(two: list[dict[str, Any]]) -> None:
    """A rank that ends without a word is an error for the others, which names it, before any timeout."""
    assert "no agreement in step 2: rank 1 did not vote" in two[0]["death"]["error"]


def test_a_late_rank_is_named(four: list[dict[str, Any]]) -> None:
    """The others give up at the timeout and name the late rank; when it comes, it gets an error too."""
    for result in four[:3]:
        assert "no agreement in step 2: rank 3 did not vote" in result["late"]["first"]
    assert "no agreement in step 2" in four[3]["late"]["first"]


def test_after_a_failure_nothing_is_agreed(four: list[dict[str, Any]]) -> None:
    """A consensus that failed once refuses to go on, since ranks may be out of step."""
    for result in four:
        assert "make a new RankConsensus" in result["late"]["second"]


def test_the_tensor_parallel_example_runs() -> None:
    """Two ranks decode with all-reduces inside their graphs, and agree with eager within the example's tolerance."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = [str(ROOT / "examples" / "tensor_parallel.py"), "--device", "cpu", "--steps", "24"]
    done = subprocess.run([*launcher, *example], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.split(" of ")[0] for line in lines] == ["rank 0", "rank 1"]
    assert all(re.search(r"24 steps, 4 captures, 1\d replays, 24 agreements", line) for line in lines)
