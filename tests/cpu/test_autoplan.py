"""``AutoPlan``: real graphs, re-planned, captured and retired in pauses."""

import gc
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphMode, Graphed, Reason, graphed
from graphdispatch.errors import ConfigError
from graphdispatch.plan import CostModel, Plan
from graphdispatch.plan.autoplan import AutoPlan, IdleAction
from graphdispatch.plan.pauses import Pauses
from graphdispatch.plan.plan import PlannedGraph
from graphdispatch.plan.profile import Profile

SLOPED = CostModel.of(1000.0, lambda n: 8.0 + 100.0 * n)
"""Padding is dear beside whatever a capture takes here."""


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def model() -> torch.nn.Module:
    """Rows are independent of each other."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)).eval()


def make(model: torch.nn.Module, sizes: Sequence[int] = (4, 8, 16), **options: Any) -> Graphed[..., Any]:
    """The model behind ``graphed``."""
    return graphed(model, dynamic={"input": 0}, sizes=sizes, **options)


def serve(step: Graphed[..., Any], model: torch.nn.Module, rows: int, times: int = 1) -> None:
    """Calls of so many rows; each answer is eager's."""
    for _ in range(times):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(step(x), model(x))


def settle(auto: AutoPlan) -> list[IdleAction]:
    """What ``idle`` did until it had nothing to do."""
    done = []
    while (report := auto.idle()).action is not IdleAction.NOTHING:
        done.append(report.action)
    return done


def test_sizes_follow_the_traffic(model: torch.nn.Module) -> None:
    """One plan or capture each time; the old sizes serve until the last; then batches fit, and others are released."""
    step = make(model)
    auto = AutoPlan(step, SLOPED, half_life_steps=80)
    step.prewarm(torch.randn(4, 8))
    assert auto.idle().action is IdleAction.NOTHING
    serve(step, model, 5, 30)
    planned = auto.idle()
    assert (planned.action, planned.swapped, step.sizes, step.stats.captures) == (
        IdleAction.PLANNED,
        False,
        (4, 8, 16),
        3,
    )
    captures = 3
    while not (report := auto.idle()).swapped:
        captures += 1
        assert (report.action, step.sizes, step.stats.captures) == (IdleAction.CAPTURED, (4, 8, 16), captures)
        serve(step, model, 5)
    assert "in use" in str(report)
    assert {5, 16} <= set(step.sizes)
    assert len(step.sizes) <= 3
    assert [entry.size for entry in step.entries] == list(step.sizes)
    assert auto.plan.sizes == step.sizes
    padded = step.stats.padded_rows - step.stats.real_rows
    serve(step, model, 5, 10)
    assert step.stats.padded_rows - step.stats.real_rows == padded
    step.check_integrity()


def test_sizes_that_fit_are_kept(model: torch.nn.Module) -> None:
    """And nothing is planned again before a quarter of the half-life has passed."""
    step = make(model, (5, 16))
    step.prewarm(torch.randn(4, 8))
    auto = AutoPlan(step, SLOPED, half_life_steps=40)
    serve(step, model, 5, 20)
    assert settle(auto) == [IdleAction.KEPT]
    serve(step, model, 5, 9)
    assert settle(auto) == []
    serve(step, model, 5, 1)
    assert settle(auto) == [IdleAction.KEPT]


def test_a_size_that_cannot_be_captured_leaves_the_sizes_as_they_are(model: torch.nn.Module) -> None:
    """The plan is given up, not half made, and that size is left alone for a half-life."""
    step = make(model)
    auto = AutoPlan(step, SLOPED, half_life_steps=40)
    step.prewarm(torch.randn(4, 8))
    serve(step, model, 5, 20)
    step.sleep()
    assert [auto.idle().action for _ in range(2)] == [IdleAction.PLANNED, IdleAction.ABANDONED]
    assert step.sizes == (4, 8, 16)
    step.wake()
    assert auto.idle().action is IdleAction.NOTHING
    for calls in (20, 20):
        assert 5 not in step.sizes
        serve(step, model, 5, calls)
        settle(auto)
    assert 5 in step.sizes


def test_a_size_that_keeps_failing_waits_twice_as_long_each_time(model: torch.nn.Module) -> None:
    """After the second failure it is left alone for two half-lives."""
    step = make(model)
    auto = AutoPlan(step, SLOPED, half_life_steps=40)
    step.prewarm(torch.randn(4, 8))
    tried = []
    for served in range(0, 200, 10):
        serve(step, model, 5, 10)
        step.sleep()
        if IdleAction.ABANDONED in settle(auto):
            tried.append(served + 10)
        step.wake()
    waits = [later - earlier for earlier, later in pairwise(tried)]
    assert waits[:2] == [40, 80]


def test_pauses_say_when_to_plan_and_to_capture(model: torch.nn.Module) -> None:
    """Nothing is done in a burst or beyond the budget, and what captures took is counted."""
    now = [0.0]
    pauses = Pauses(capture_ms=50.0, allowance_ms=100.0, budget=0.0, clock=lambda: now[0])
    step = make(model)
    step.prewarm(torch.randn(4, 8))
    auto = AutoPlan(step, SLOPED, half_life_steps=80, pauses=pauses)
    serve(step, model, 5, 30)
    pauses.step_started()
    pauses.step_ended()
    assert "no pause" in auto.idle().detail
    now[0] += 0.06
    assert auto.idle().action is IdleAction.PLANNED
    assert auto.idle().action is IdleAction.CAPTURED
    assert pauses.capture_ms < 50.0
    pauses.record_capture(100.0)
    assert auto.idle().action is IdleAction.NOTHING


def test_a_callable_that_serves_already_is_taken_up(model: torch.nn.Module) -> None:
    """Its hits so far are the traffic, and its next call is the example; where the sizes come in does not matter."""
    step = make(model)
    step.prewarm(torch.randn(4, 8))
    serve(step, model, 5, 20)
    auto = AutoPlan(step, SLOPED, half_life_steps=40)
    hits = step.stats.hits
    serve(step, model, 5)
    assert step.stats.hits == hits + 1
    settle(auto)
    assert 5 in step.sizes


def test_sizes_that_somebody_else_changed_are_left_alone(model: torch.nn.Module) -> None:
    """The plan was made for other ones."""
    step = make(model)
    auto = AutoPlan(step, SLOPED, half_life_steps=40)
    serve(step, model, 5, 20)
    assert auto.idle().action is IdleAction.PLANNED
    step.use_sizes((2, 16))
    assert auto.idle().action is IdleAction.ABANDONED
    assert step.sizes == (2, 16)


def test_without_room_for_both_the_new_sizes_come_in_at_once(model: torch.nn.Module) -> None:
    """So that captures displace what is no longer used, and not each other; one that they displaced comes again."""
    step = make(model, max_cached_graphs=3)
    auto = AutoPlan(step, SLOPED, half_life_steps=80)
    step.prewarm(torch.randn(4, 8))
    for rows in (3, 5, 7):
        serve(step, model, rows, 10)
    assert auto.idle().action is IdleAction.PLANNED
    first = auto.idle()
    assert first.swapped
    settle(auto)
    new = set(step.sizes) - {4, 8, 16}
    assert len(new) == 2
    assert new <= {entry.size for entry in step.entries} <= set(step.sizes)
    serve(step, model, 16, 3)
    assert [entry.size for entry in step.entries] == list(step.sizes)


def test_a_profile_carries_over_to_the_next_start(model: torch.nn.Module, tmp_path: Path) -> None:
    """Its sizes are captured by prewarm, and its traffic and costs decide before any step was served."""
    step = make(model)
    auto = AutoPlan(step, SLOPED, half_life_steps=40)
    with pytest.raises(ConfigError, match="must hold traffic"):
        auto.profile()
    serve(step, model, 5, 20)
    settle(auto)
    auto.save_profile(tmp_path / "profile.json")
    again = graphed(model, dynamic={"input": 0}, sizes=tmp_path / "profile.json")
    assert again.sizes == step.sizes
    again.prewarm(torch.randn(4, 8))
    profile = Profile.load(tmp_path / "profile.json")
    assert profile.traffic == pytest.approx({5: 20.0})
    assert profile.cost.full is not None
    assert set(profile.cost.full.capture_ms.sizes) == {entry.size for entry in step.entries}
    serve(again, model, 5)
    assert again.last_decision is not None
    assert again.last_decision.reason in (Reason.EXACT, Reason.VERIFIED_NOW)
    assert AutoPlan(again, profile=profile).profile().traffic[5] > 20


def test_a_plan_that_fits_both_kinds_of_batch_is_needed(model: torch.nn.Module) -> None:
    """Counters do not tell the kinds apart; a callable without sizes has nothing to plan."""
    full, piecewise = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
    plan = Plan(CUDAGraphMode.FULL_AND_PIECEWISE, (PlannedGraph(piecewise, 16, 1), PlannedGraph(full, 8, 1)))
    step = make(model, plan, mode="FULL_AND_PIECEWISE", uniform_decode=lambda input: True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="one set of sizes"):
        AutoPlan(step)
    with pytest.raises(ConfigError, match="step must have capture sizes"):
        AutoPlan(make(model, mode="NONE"))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_graphs": 0}, "max_graphs must be an integer >= 1, got 0"),
        ({"half_life_steps": -1}, "half_life_steps must be"),
        ({"horizon_steps": 0}, "horizon_steps must be"),
        ({"profile": "p.json"}, r"profile must be a Profile or None, got 'p.json'; Profile.load\(\) reads one"),
        ({"cost": 3}, r"cost must be a CostModel or None, got 3; CostModel.load\(\) reads one"),
        ({"save_at_exit": 3}, "save_at_exit must be the path of a file or None, got 3"),
    ],
)
def test_bad_options_are_refused(model: torch.nn.Module, options: dict[str, Any], match: str) -> None:
    """Each by its name."""
    with pytest.raises(ConfigError, match=match):
        AutoPlan(make(model), **options)


def test_a_callable_without_sizes_is_refused(model: torch.nn.Module) -> None:
    """It must be graphed first."""
    with pytest.raises(
        ConfigError, match=r"step must be a callable with sizes, such as graphed\(\) makes, got Sequential"
    ):
        AutoPlan(model)  # type: ignore[arg-type]


def test_saving_at_exit_keeps_nothing_alive(model: torch.nn.Module, tmp_path: Path) -> None:
    """The plan and its callable go when their owner lets go, and nothing is saved then."""
    auto = AutoPlan(make(model), save_at_exit=tmp_path / "profile.json")
    gone = weakref.ref(auto)
    del auto
    gc.collect()
    assert gone() is None


def test_the_profile_is_saved_when_the_process_ends(tmp_path: Path) -> None:
    """If it was asked for and steps were served; the file of an earlier process stays where none was."""
    program = """
        import torch
        from graphdispatch import AutoPlan, graphed
        steps = [graphed(torch.nn.Linear(4, 4).eval(), dynamic={"input": 0}, sizes=(4, 8)) for _ in range(2)]
        plans = [AutoPlan(step, save_at_exit=f"{number}.json") for number, step in enumerate(steps)]
        with torch.no_grad():
            steps[0](torch.randn(3, 4))
    """
    (tmp_path / "1.json").write_text("earlier")
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert Profile.load(tmp_path / "0.json").traffic == {3: 1.0}
    assert (tmp_path / "1.json").read_text() == "earlier"
