"""``CostModel`` and its curves."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import CUDAGraphMode
from graphdispatch.errors import ConfigError
from graphdispatch.plan import CostModel
from graphdispatch.plan.cost import Curve

HEAD = '{"format": "graphdispatch.cost", "version": 1, "source": "stated", '


def test_a_curve_goes_through_its_points_and_straight_between() -> None:
    """Flat below the first, and rising above the last as steeply as before it."""
    curve = Curve.of({4: 2.0, 8: 3.0, 16: 7.0})
    assert curve.at([1, 4, 6, 8, 12, 16, 32]).tolist() == [2.0, 2.0, 2.5, 3.0, 5.0, 7.0, 15.0]
    assert curve.moved == 0.0


def test_a_flat_end_does_not_hide_the_average_rise() -> None:
    """Beyond its points a curve rises at least as on average: two equal last points must not make huge graphs free."""
    assert Curve.of({1: 0.0, 9: 8.0, 17: 8.0}).at(33).item() == pytest.approx(16.0)


@given(points=st.dictionaries(st.integers(1, 5000), st.floats(0, 1e6), min_size=1, max_size=30))
def test_a_fit_never_falls_and_keeps_the_mean(points: dict[int, float]) -> None:
    """The isotonic fit of points without errors: rising, of the same mean, and itself where they rise already."""
    curve = Curve.of(points)
    fitted = curve.fitted
    assert all(left <= right for left, right in itertools.pairwise(fitted))
    assert math.fsum(fitted) == pytest.approx(math.fsum(curve.values))
    rising = Curve(sizes=curve.sizes, values=fitted)
    assert rising.fitted == fitted
    assert rising.moved == 0.0


def test_errors_weigh_in_the_fit_and_are_kept() -> None:
    """A point known well moves less than one known badly; the error bars are there to read."""
    curve = Curve.of({1: (10.0, 1.0), 2: (7.0, 0.1)})
    assert curve.fitted == (pytest.approx((10 + 700) / 101),) * 2
    assert curve.moved == pytest.approx(1 - 710 / 1010)
    assert curve.error_at([1, 2, 9]).tolist() == [1.0, 0.1, 0.1]
    assert Curve.of(3.0).error_at([5]).tolist() == [0.0]


def test_functions_are_sampled() -> None:
    """Close to the function in between and beyond."""
    curve = Curve.of(lambda n: 8 + 0.03 * n)
    assert curve.at([1, 64, 1000, 30_000]) == pytest.approx([8.03, 9.92, 38.0, 908.0])


def test_the_source_is_told() -> None:
    """Points are measured, numbers and functions stated, and the default says that it is one."""
    assert CostModel.of({1: 2.0}, {1: 1.0}).source == "measured"
    assert CostModel.of(2.0, {1: 1.0}).source == "stated"
    assert CostModel.default().source == "default"
    assert repr(CostModel.default()) == "<CostModel default, eager and FULL and PIECEWISE>"
    assert repr(CostModel.of({1: 2.0, 2: 1.0}, 1.0)) == (
        "<CostModel stated, eager and FULL, fit moved points by up to 33.3 %>"
    )


def test_the_default_gains_nothing_by_large_graphs() -> None:
    """Small eager steps wait for their launches; above 533 tokens eager is as fast as a FULL graph."""
    cost = CostModel.default()
    full = cost.graphs(CUDAGraphMode.FULL).step_ms
    assert cost.eager_ms.at(1).item() > 2 * full.at(1).item()
    assert cost.eager_ms.at([534, 8192, 20_000]) == pytest.approx(full.at([534, 8192, 20_000]), rel=1e-9)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    """All of it, with errors."""
    cost = CostModel.of({1: (2.0, 0.5), 8: (3.0, 0.5)}, {1: 1.0}, capture_ms=lambda n: 50.0 + n)
    cost.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == cost


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid at the whole"),
        ('{"format": "graphdispatch.plan", "version": 1}', "not valid at format"),
        ('{"format": "graphdispatch.cost", "version": 2, "eager_ms": {"sizes": [1], "values": [1.0]}}', "at version"),
        ('{"eager_ms": {"sizes": [1], "values": [1.0]}}', "not valid at format"),
        (HEAD + '"eager_ms": {"sizes": [2, 1], "values": [1.0, 1.0]}}', "increasing order"),
        (HEAD + '"eager_ms": {"sizes": [1], "values": [NaN]}}', "eager_ms.values.0"),
        (HEAD + '"eager_ms": {"sizes": [1], "values": [1e999]}}', "eager_ms.values.0"),
        (HEAD + '"eager_ms": {"sizes": [99999999999999999999], "values": [1.0]}}', "eager_ms.sizes.0"),
        (HEAD + '"eager_ms": {"sizes": [1], "values": [1.0]}, "__class__": "x"}', "__class__"),
    ],
)
def test_a_bad_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """With the file and the field at fault."""
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        CostModel.load(path)
    assert "cost.json" in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eager_ms": 1.0}, "full_ms or piecewise_ms must be given"),
        ({"eager_ms": -1.0, "full_ms": 1.0}, "eager_ms.values.0 is not valid"),
        ({"eager_ms": 1.0, "full_ms": {}}, "full_ms must hold a point"),
        ({"eager_ms": 1.0, "full_ms": {0: 1.0}}, "full_ms.sizes.0"),
        ({"eager_ms": 1.0, "full_ms": lambda n: float("nan")}, "full_ms.values.0"),
        ({"eager_ms": 1.0, "full_ms": 1.0, "pool_bytes": math.inf}, "pool_bytes.values.0"),
    ],
)
def test_bad_costs_are_named(arguments: dict[str, Any], message: str) -> None:
    """The argument, and which of its points."""
    with pytest.raises(ConfigError, match=message):
        CostModel.of(**arguments)
