"""``Plan`` and ``CostModel``: what a plan comes to on a workload, who takes it; costs by size, and measurements."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import CUDAGraphMode, graphed
from graphdispatch.engines import CUDAGraphConfig, named_sizes
from graphdispatch.errors import CaptureError, ConfigError
from graphdispatch.plan import CostModel, Plan, Workload, plan_sizes

from ..helpers import Spy

FULL, PIECEWISE, BOTH = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE
PLAN = Plan(mode=BOTH, graphs={FULL: (2, 6), PIECEWISE: (4,)})
COST = CostModel(
    eager_ms=10, full_ms={1: 1, 8: 8}, piecewise_ms={1: 2, 8: 9}, capture_ms=3, graph_bytes=5, pool_bytes={1: 1, 8: 8}
)


def test_figures_of_a_plan() -> None:
    """By hand: three of four steps are served, of 1, 3 and 4 tokens in graphs of 1, 4 and 4."""
    result = Plan.from_sizes((1, 4)).evaluate(Workload.from_histogram(dict.fromkeys((1, 3, 4, 6), 1.0)), COST)
    assert (result.graphs, result.hit_rate, result.eager_ms) == (2, 0.75, 10.0)
    assert result.padding == pytest.approx(1 / 8)
    assert result.step_ms == pytest.approx((1 + 4 + 4 + 10) / 4)
    assert (result.capture_ms, result.memory) == (6, 14)
    assert "padding          12.50 %" in str(result)


def test_kinds_of_step_go_to_their_own_graphs() -> None:
    """Uniform decode to FULL, others to PIECEWISE, or eagerly where their mode has none; the pool is shared."""
    workload = Workload.from_histogram({2: 2.0}, {2: 1.0})
    both = Plan.from_sizes((4,), mode=BOTH).evaluate(workload, COST)
    assert (both.step_ms, both.graphs, both.memory) == (pytest.approx((4 + 5) / 2), 2, 14)
    decode = Plan.from_sizes((4,), mode="FULL_DECODE_ONLY").evaluate(workload, COST)
    assert (decode.step_ms, decode.hit_rate) == (pytest.approx((4 + 10) / 2), 0.5)


def test_a_step_of_two_dimensions_runs_in_the_graph_of_the_fewest_tokens() -> None:
    """Of those that it fits in both: (2, 3) fits (4, 4), not (8, 2), and (1, 2) the smaller of the two."""
    plan = Plan.from_sizes([(4, 4), (8, 2)])
    cost = CostModel(eager_ms=100, full_ms={1: 1, 32: 32})
    result = plan.evaluate(Workload.from_steps([(2, 3), (5, 2), (8, 3)]), cost)
    assert (result.step_ms, result.hit_rate) == (pytest.approx((16 + 16 + 100) / 3), pytest.approx(2 / 3))


def test_a_cliff_above_the_largest_graph_is_a_warning() -> None:
    """Steps that a larger graph would speed up, with the size to capture; not those that are faster eagerly."""
    workload = Workload.from_steps([1, 2, 2, 6])
    (cliff,) = Plan.from_sizes((1, 2)).evaluate(workload, COST).warnings
    assert cliff.startswith("25.00 % of the steps fit no FULL graph")
    assert cliff.endswith("capture up to 6 tokens")
    slow = CostModel(eager_ms={1: 3, 2: 3.5, 6: 4}, full_ms={1: 1, 6: 6})
    assert Plan.from_sizes((1, 2)).evaluate(workload, slow).warnings == ()


def test_a_graph_that_no_step_reaches_is_a_warning() -> None:
    """Named by its size; of many, the first."""
    (idle,) = Plan.from_sizes((1, 2, 4)).evaluate(Workload.from_steps([1, 3]), COST).warnings
    assert idle == "no step reaches the FULL graphs of 2: drop them to free memory"
    (many,) = Plan.from_sizes(range(1, 13)).evaluate(Workload.from_steps([12]), COST).warnings
    assert "of 1, 2, 3, 4, 5, 6, 7, 8 and 3 more: drop" in many


def test_sizes_by_name_and_by_mode() -> None:
    """By an engine's name, or as given; each mode has its own."""
    assert Plan.from_sizes("sglang", 64).sizes == named_sizes("sglang", 64)
    assert (PLAN.sizes, PLAN.sizes_of(FULL), PLAN.sizes_of(PIECEWISE)) == ((2, 4, 6), (2, 6), (4,))
    assert Plan.from_sizes((3,)).sizes_of(PIECEWISE) == ()
    assert str(PLAN) == "<Plan 2 FULL and 1 PIECEWISE graphs up to 6>\nFULL       2 6\nPIECEWISE  4"


@pytest.mark.parametrize("saved", [PLAN, Plan.from_sizes([(1, 8), (8, 64)]), Plan(graphs={}), CostModel.default()])
def test_it_saves_and_loads_exactly(saved: Plan | CostModel, tmp_path: Path) -> None:
    """As JSON, with modes by name."""
    saved.save(tmp_path / "saved.json")
    assert type(saved).load(tmp_path / "saved.json") == saved
    if isinstance(saved, Plan):
        assert f'"mode":"{saved.mode.name}"' in (tmp_path / "saved.json").read_text()


NO_PLANS: list[tuple[Any, ...]] = [
    ("[", "is no Plan that was saved: Invalid JSON"),
    ("{}", "is no Plan that was saved: graphs: Field required"),
    ('{"graphs": {"FULL": [0]}}', r"graphs\.FULL\.0.*greater than or equal to 1"),
    ('{"graphs": {"FULL": [4, 2]}}', "graphs of FULL must be in increasing order"),
    ('{"graphs": {"FULL": [2, [1, 2]]}}', "graphs must all have the same number of dimensions"),
    ('{"graphs": {"PIECEWISE": [4]}}', r"graphs must be of the modes of FULL, got \['PIECEWISE'\]"),
    ('{"mode": "sideways", "graphs": {}}', "mode must be one of"),
    ('{"graphs": {}, "more": 1}', "more: Extra inputs"),
]


@pytest.mark.parametrize(("content", "message"), NO_PLANS)
def test_a_file_that_holds_no_plan_is_refused(content: str, message: str, tmp_path: Path) -> None:
    """It names the file and the field."""
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"plan\.json.*{message}"):
        Plan.load(tmp_path / "plan.json")


def test_a_missing_file_and_bad_sizes_are_named(tmp_path: Path) -> None:
    """Before anything else happens."""
    with pytest.raises(ConfigError, match=r"none\.json cannot be read"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"name of capture sizes must be one of .*; did you mean 'vllm'\?$"):
        Plan.from_sizes("vlm")
    with pytest.raises(ConfigError, match="workload must have the 1 dimensions of the plan, got 2"):
        Plan.from_sizes((1, 2)).evaluate(Workload.from_steps([(1, 2)]))


@pytest.mark.parametrize(("mode", "sizes"), [(BOTH, (2, 6)), (FULL, (2, 6)), (PIECEWISE, (4, 12))])
def test_a_configuration_takes_the_sizes_of_its_mode(mode: CUDAGraphMode, sizes: tuple[int, ...]) -> None:
    """Where the mode tells uniform decode from other batches, those of uniform decode."""
    plan = Plan(mode=BOTH, graphs={FULL: (2, 6), PIECEWISE: (4, 12)})
    assert CUDAGraphConfig(capture_sizes=plan, mode=mode, max_batch_size=12).capture_sizes == sizes


@pytest.mark.parametrize("form", ["plan", "path", "text"])
def test_graphed_takes_a_plan_and_its_file(form: str, tmp_path: Path) -> None:
    """The object, its path, or its name as text."""
    plan = plan_sizes(Workload.from_steps([3, 6]), smoothing=0)
    plan.save(tmp_path / "plan.json")
    sizes: Any = {"plan": plan, "path": tmp_path / "plan.json", "text": str(tmp_path / "plan.json")}[form]
    assert graphed(torch.nn.Tanh(), dynamic={"input": 0}, sizes=sizes).sizes == (3, 6)


def test_costs_lie_on_lines_between_points() -> None:
    """Flat below the first point, rising on above the last, and one number for all sizes."""
    cost = CostModel(eager_ms=7, full_ms={4: 3.0, 2: 1.0, 8: 5.0})
    assert cost.at("eager_ms", [1, 500]).tolist() == [7, 7]
    assert cost.step_ms(FULL, [1, 2, 3, 6, 8, 11]).tolist() == pytest.approx([1, 1, 2, 4, 5, 7])


@given(points=st.dictionaries(st.integers(1, 5000), st.floats(0, 1e6), min_size=1, max_size=20))
def test_costs_never_fall_with_the_size(points: dict[int, float]) -> None:
    """Whatever was measured: else the nearest graph would not be the fastest."""
    values = CostModel(eager_ms=points).at("eager_ms", np.arange(1, 6000))
    assert (np.diff(values) >= -1e-6).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eager_ms": {}}, "eager_ms: .* at least 1 item"),
        ({"eager_ms": -1}, r"eager_ms\.1: .* greater than or equal to 0, got -1"),
        ({"eager_ms": {0: 1}}, "eager_ms.* greater than or equal to 1"),
        ({"eager_ms": 1, "half_ms": 2}, "half_ms: Extra inputs"),
    ],
)
def test_a_bad_cost_is_named(options: dict[str, Any], message: str) -> None:
    """As are modes without figures."""
    with pytest.raises(ConfigError, match=message):
        CostModel(**options)
    with pytest.raises(ConfigError, match="cost must know graphs of mode PIECEWISE; give piecewise_ms"):
        CostModel(eager_ms=1, full_ms=1).step_ms(PIECEWISE, [1])


def test_a_callable_is_measured() -> None:
    """Steps, captures and bytes at each size; rows are repeated or left out, in whatever dimension they are."""
    seen = Spy([])  # no guard takes its content for state

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(map(int, x.shape)))
        return x.mul(2).relu().sub(1).mul(weight)

    example = {"x": torch.arange(12.0).view(3, 4), "weight": torch.ones(3, 1)}
    cost = CostModel.measure(step, example, [2, 6], dynamic={"x": 1}, seconds=0.001)
    assert {(3, 2), (3, 6)} <= set(seen)
    assert cost.piecewise_ms is None
    for name in ("eager_ms", "full_ms", "capture_ms", "graph_bytes", "pool_bytes"):
        points = getattr(cost, name)
        assert sorted(points) == [2, 6]
        assert all(value >= 0 for value in points.values())
    assert cost.eager_ms[2] > 0 < cost.capture_ms[6]
    assert cost.graph_bytes[6] + cost.pool_bytes[6] >= 3 * 6 * 4


def test_what_cannot_be_captured_is_not_measured() -> None:
    """It says why."""
    with pytest.raises(CaptureError, match=r"no FULL graph of 2 rows: .*item"):
        CostModel.measure(lambda x: x * x.sum().item(), {"x": torch.ones(2, 3)}, [2], seconds=0.001)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": [0]}, "sizes must be an integer >= 1"),
        ({"sizes": []}, "sizes must hold at least one"),
        ({"example": {"x": 3}, "dynamic": {"x": 0}}, "example must hold a tensor 'x' with rows in dimension 0, got 3"),
        ({"dynamic": {"y": 0}}, "example must hold a tensor 'y'"),
        ({"mode": "FULL_AND_PIECEWISE"}, "mode must be FULL or PIECEWISE"),
    ],
)
def test_a_bad_argument_is_named(changes: dict[str, Any], message: str) -> None:
    """Before anything runs."""
    arguments = {"example": {"x": torch.ones(2, 3)}, "sizes": [2]} | changes
    with pytest.raises(ConfigError, match=message):
        CostModel.measure(lambda x: x, **arguments)
