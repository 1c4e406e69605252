"""``Plan``: what it comes to on a workload, and its file."""

import json
from pathlib import Path
from typing import Any

import pytest

from graphdispatch import CUDAGraphMode
from graphdispatch.engines import named_sizes
from graphdispatch.errors import ConfigError
from graphdispatch.plan import CostModel, Plan, Workload, plan_capture_sizes
from graphdispatch.plan.compare import compare
from graphdispatch.plan.plan import PlannedGraph

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
COST = CostModel.of(
    10.0, {1: 1.0, 8: 8.0}, {1: 2.0, 8: 9.0}, capture_ms=3.0, graph_bytes=5.0, pool_bytes={1: 1.0, 8: 8.0}
)


def test_figures_of_a_plan() -> None:
    """By hand: three of four steps are served, of 1, 3 and 4 tokens in graphs of 1, 4 and 4."""
    workload = Workload.from_histogram(dict.fromkeys((1, 3, 4, 6), 1.0))
    result = Plan.from_sizes((1, 4)).evaluate(workload, COST)
    assert (result.hit_rate, result.eager_share) == (0.75, 0.25)
    assert result.padding == pytest.approx(1 / 8)
    assert result.step_ms == pytest.approx((1 + 4 + 4 + 10) / 4)
    assert result.eager_ms == 10.0
    assert (result.graphs, result.capture_ms, result.graph_bytes, result.pool_bytes, result.memory) == (2, 6, 10, 4, 14)
    assert (result.worst_padding, result.worst_size) == (1.0, 2)
    assert result.to_dict()["memory"] == 14
    assert str(result).startswith("2 graphs serve 75.0 % of steps with 12.50 % padding; 4.750 ms a step")


def test_kinds_of_batch_go_to_their_own_graphs() -> None:
    """Uniform decode to FULL, others to PIECEWISE, or eagerly where their mode has none; the pool is shared."""
    workload = Workload.from_histogram({2: 2.0}, {2: 1.0})
    both = Plan.from_sizes((4,), mode=CUDAGraphMode.FULL_AND_PIECEWISE).evaluate(workload, COST)
    assert both.step_ms == pytest.approx((4 + 5) / 2)
    assert (both.graphs, both.graph_bytes, both.pool_bytes) == (2, 10, 4)
    decode = Plan.from_sizes((4,), mode=CUDAGraphMode.FULL_DECODE_ONLY).evaluate(workload, COST)
    assert decode.step_ms == pytest.approx((4 + 10) / 2)
    assert decode.hit_rate == 0.5


def test_a_plan_without_graphs_is_eager() -> None:
    """It serves nothing and costs nothing."""
    result = Plan(FULL, ()).evaluate(Workload.from_histogram({3: 1.0}), COST)
    assert (result.step_ms, result.hit_rate, result.memory, result.padding, result.worst_padding) == (10.0, 0, 0, 0, 0)


def test_sizes_by_name_and_by_size() -> None:
    """By an engine's name, or as given."""
    assert Plan.from_sizes("sglang", 64).sizes == named_sizes("sglang", 64)
    plan = Plan.from_sizes((2, 6), mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    assert plan.graphs == (
        PlannedGraph(PIECEWISE, 2, 1),
        PlannedGraph(PIECEWISE, 6, 3),
        PlannedGraph(FULL, 2, 1),
        PlannedGraph(FULL, 6, 3),
    )
    assert repr(plan) == "<Plan 2 PIECEWISE, 2 FULL graphs up to 6>"
    with pytest.raises(ConfigError, match="sizes must be strictly increasing"):
        Plan.from_sizes((6, 2))


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    """With its proof, and by an older file's replacement in one step."""
    workload = Workload.from_histogram({3: 1.0, 9: 2.0, 50: 1.0}, {3: 1.0})
    path = tmp_path / "plan.json"
    for plan in (plan_capture_sizes(workload, max_graphs=5, mode="full_and_piecewise"), Plan.from_sizes("pow2", 8)):
        plan.save(path)
        assert Plan.load(path) == plan
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "not valid at version"),
        ({"format": "graphdispatch.cost"}, "not valid at format"),
        ({"mode": "full"}, "not valid at mode"),
        ({"mode": "PIECEWISE"}, "graphs must be of the modes of PIECEWISE"),
        ({"graphs": [{"mode": "FULL", "size": 0, "min_batch": 1}]}, "not valid at graphs.0.size"),
        ({"graphs": [{"mode": "FULL", "size": 1.5, "min_batch": 1}]}, "not valid at graphs.0.size"),
        ({"graphs": [{"mode": "FULL", "size": 2**40, "min_batch": 1}]}, "not valid at graphs.0.size"),
        ({"graphs": [{"mode": "FULL", "size": 4, "min_batch": 9}]}, "1 <= min_batch <= size"),
        ({"graphs": [{"mode": "FULL", "size": 4, "min_batch": 1}] * 2}, "each once"),
        ({"graphs": None}, "not valid at graphs"),
        ({"extra": 1}, "not valid at extra"),
    ],
)
def test_a_bad_file_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    """With the file and the field at fault."""
    path = tmp_path / "plan.json"
    Plan.from_sizes((2, 4)).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message) as raised:
        Plan.load(path)
    assert "plan.json" in str(raised.value)


def test_a_report_tells_sizes_proof_and_what_is_unseen() -> None:
    """Readable text: the sizes by mode, where eager is faster, and how far the guard reaches."""
    workload = Workload.from_histogram({5: 10.0, 60: 1.0})
    text = str(plan_capture_sizes(workload, max_graphs=40))
    assert text.startswith("<Plan 40 FULL graphs up to 60>\nFULL: 1 2 3")
    assert "the least within the budgets; costs: default" in text
    assert "sizes that were not seen, up to 60: padded by at most 0.75 % of their tokens more" in text
    gaps = plan_capture_sizes(
        Workload.from_histogram({2: 1, 9: 1}), CostModel.of({1: 1, 9: 9}, 4.0), max_graphs=1, prior=0
    )
    assert "FULL: faster eagerly: 1-8" in str(gaps)


def test_a_comparison_judges_on_what_was_not_planned_for() -> None:
    """Plans see the first half alone; each engine's sizes stand beside plans of all and of half their graphs."""
    workload = Workload.from_steps([5] * 50 + [7] * 50)
    rows = compare(workload, ("pow2", "vllm"), max_size=8, prior=0)
    assert [(row.name, row.planned, row.share) for row in rows] == [
        ("pow2", False, 1.0),
        ("pow2", True, 1.0),
        ("pow2", True, 0.5),
        ("vllm", False, 1.0),
        ("vllm", True, 1.0),
        ("vllm", True, 0.5),
    ]
    assert rows[0].plan.sizes == (1, 2, 4, 8)
    assert rows[0].result.padding == pytest.approx(1 / 7)
    assert rows[1].plan.sizes == (5,)
    assert rows[1].result.hit_rate == 0.0
    assert rows[1].to_dict()["sizes"] == [5]


def test_a_comparison_needs_order() -> None:
    """A histogram has no first half."""
    with pytest.raises(ConfigError, match="without ordered steps"):
        compare(Workload.from_histogram({4: 1.0}))
