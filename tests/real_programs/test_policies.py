"""Policies of Stable-Baselines3 and tensordict: what keeps its last distribution, or writes its input, is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphdispatch as gd

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = (4, 3, 8, 5, 3, 3, 5, 5, 4, 4)


def served(policy: Callable[..., Any], width: int, **how: Any) -> gd.Graphed[..., Any]:
    """A policy by graphs, after calls that all answered as eager does."""
    step = gd.graphed(policy, dynamic={"obs": 0}, sizes=(4, 8), options=gd.CUDAGraphOptions(capture_share=None))
    with torch.inference_mode():
        for rows in ROWS:
            obs = torch.randn(rows, width)
            torch.testing.assert_close(step(obs, **how), policy(obs, **how))
    return step


def test_a_policy_that_keeps_its_distribution_is_refused() -> None:
    """PPO's module holds the last distribution, which a replay would leave as it was; the reason names it."""
    sb3 = pytest.importorskip("stable_baselines3")
    policy = sb3.PPO("MlpPolicy", "CartPole-v1", device="cpu", n_steps=64).policy.eval()
    step = served(policy, 4, deterministic=True)
    assert step.last_decision.reason is gd.Reason.STATE_REBOUND
    assert "action_dist.distribution" in step.last_decision.explain()


def test_a_module_that_writes_into_a_tensordict_is_refused() -> None:
    """Its results are entries of the dict that it is given; the reason says what it did."""
    tensordict = pytest.importorskip("tensordict")
    nn = pytest.importorskip("tensordict.nn")
    module = nn.TensorDictModule(torch.nn.Linear(4, 2), in_keys=["obs"], out_keys=["out"])

    def act(obs: torch.Tensor) -> torch.Tensor:
        return module(tensordict.TensorDict({"obs": obs}, batch_size=[obs.shape[0]]))["out"]  # type: ignore[no-any-return]

    assert served(act, 4).last_decision.reason is gd.Reason.STATE_UNSEEN
    plain = served(lambda obs: module.module(obs), 4)
    assert plain.stats.hits >= 4
