"""``CostModel``: costs by size, its file, and measurements of a real callable."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import CUDAGraphMode, eager_break
from graphdispatch.errors import CaptureError, ConfigError
from graphdispatch.plan import CostModel

from ..helpers import Spy

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


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


def test_it_saves_and_loads_exactly(tmp_path: Path) -> None:
    """As JSON."""
    CostModel.default().save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == CostModel.default()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "eager_ms: Field required"),
        ({"eager_ms": {}}, "eager_ms: .* at least 1 item"),
        ({"eager_ms": -1}, r"eager_ms\.1: .* greater than or equal to 0, got -1"),
        ({"eager_ms": float("inf")}, "eager_ms.* finite number"),
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
        seen.append(tuple(x.shape))
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


def test_pieces_are_measured() -> None:
    """By mode."""

    @eager_break
    def between(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    cost = CostModel.measure(
        lambda x: between(x * 2) * 3, {"x": torch.ones(2, 3)}, [2], mode="PIECEWISE", seconds=0.001
    )
    assert cost.full_ms is None
    assert list(cost.piecewise_ms or ()) == [2]


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
