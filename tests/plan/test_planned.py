"""The dispatcher of a plan decides as the plan says."""

from itertools import pairwise

import numpy as np
import pytest

from graphdispatch.config import CUDAGraphConfig
from graphdispatch.decide.decision import SizeTable
from graphdispatch.errors import ConfigError
from graphdispatch.modes import CUDAGraphMode
from graphdispatch.plan.cost import CostModel
from graphdispatch.plan.dispatcher import planned_dispatcher
from graphdispatch.plan.plan import Plan, PlannedGraph
from graphdispatch.plan.workload import Workload
from graphdispatch.reasons import Reason

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
COST = CostModel.of(lambda n: 5.0 + n, lambda n: 1.0 + n, lambda n: 2.0 + n)


@pytest.mark.parametrize("mode", [FULL, PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY])
@pytest.mark.parametrize("seed", range(3))
def test_served_in_time_it_is_what_the_plan_expects(mode: CUDAGraphMode, seed: int) -> None:
    """Step by step through the plan's dispatcher, random graphs with gaps take the time and hits of ``evaluate``."""
    rng = np.random.default_rng(seed)
    kind = mode.decode_mode()
    sizes = sorted(rng.choice(np.arange(1, 41), 6, replace=False).tolist())
    below = [0, *sizes]
    graphs = [PlannedGraph(kind, s, int(rng.integers(b + 1, s + 2))) for b, s in zip(below, sizes, strict=False)]
    plan = Plan(mode, tuple(graphs))
    workload = Workload.from_steps(rng.integers(1, 50, 300), rng.random(300) < 0.7)
    expected = plan.evaluate(workload, COST)
    dispatcher, tokens, is_decode = planned_dispatcher(plan, max_num_reqs=50), *workload.steps[:2]
    decisions = [
        dispatcher.decide(t, t if d else None, query_len=1 if d else None)
        for t, d in zip(tokens.tolist(), is_decode.tolist(), strict=True)
    ]
    curves = {
        CUDAGraphMode.NONE: COST.eager_ms,
        FULL: COST.graphs(FULL).step_ms,
        PIECEWISE: COST.graphs(PIECEWISE).step_ms,
    }
    taken = sum(float(curves[one.mode].at(one.size)) for one in decisions)
    assert taken == pytest.approx(300 * expected.step_ms)
    assert np.mean([one.mode is not CUDAGraphMode.NONE for one in decisions]) == pytest.approx(expected.hit_rate)


@pytest.mark.parametrize("seed", range(5))
def test_a_configuration_serves_what_its_dispatcher_serves(seed: int) -> None:
    """``CUDAGraphConfig`` and ``planned_dispatcher`` agree about each batch, gaps included."""
    rng = np.random.default_rng(seed)
    sizes = sorted(rng.choice(np.arange(1, 41), 6, replace=False).tolist())
    graphs = [PlannedGraph(FULL, s, int(rng.integers(b + 1, s + 1))) for b, s in pairwise([0, *sizes])]
    plan = Plan(FULL, tuple(graphs))
    dispatcher, config = planned_dispatcher(plan, max_num_reqs=50), CUDAGraphConfig(capture_sizes=plan)
    table = SizeTable.of(config.resolve(), FULL)
    served: dict[int, list[int]] = {size: [] for size in sizes}
    for rows in range(1, 50):
        decision, expected = table.decide(rows), dispatcher.decide(rows, rows)
        assert (decision.mode, decision.size) == (expected.mode, expected.size if expected.mode is FULL else rows)
        assert config.should_use_cudagraph(rows, 1) == (decision.mode is FULL)
        assert config.get_padded_batch_size(rows) == decision.size
        if decision.mode is FULL:
            served[decision.size].append(rows)
        elif rows <= sizes[-1]:
            assert decision.reason is Reason.POLICY
    assert served == {size: list(table.served_by(size)) for size in sizes}


def test_each_mode_has_its_own_sizes() -> None:
    """A plan with other sizes for decode than for the rest is kept apart, as vLLM's one list cannot."""
    plan = Plan.of(CUDAGraphMode.FULL_AND_PIECEWISE, {FULL: (2, 6), PIECEWISE: (4, 8)})
    dispatcher = planned_dispatcher(plan, max_num_reqs=4)
    keys = {mode: {key.num_tokens for key in keys} for mode, keys in dispatcher.cudagraph_keys.items()}
    assert keys == {FULL: {2, 6}, PIECEWISE: {4, 8}}
    assert dispatcher.decide(3, 3, query_len=1).size == 6
    assert dispatcher.decide(3, 2).size == 4


def test_a_plan_without_graphs_has_no_dispatcher() -> None:
    """There would be nothing to decide."""
    with pytest.raises(ConfigError, match="plan must have graphs"):
        planned_dispatcher(Plan(FULL, ()))


def test_sizes_are_no_plan() -> None:
    """The message says what makes one of them."""
    with pytest.raises(
        ConfigError, match=r"plan must be a Plan, got \(1, 2, 4\); Plan.from_sizes\(\) makes one of sizes"
    ):
        planned_dispatcher((1, 2, 4))  # type: ignore[arg-type]
