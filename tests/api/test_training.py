"""``graphed(step, gradients="inside")``: whole training steps, beside the same step run eagerly on a twin.

After every call the twins agree bit for bit: answers, parameters, buffers, gradients, and the optimizers' state.
"""

import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_pre_hook

import graphdispatch as gd
from graphdispatch import CUDAGraphOptions, Reason
from graphdispatch.errors import ConfigError

from ..helpers import assert_same

PATIENT = CUDAGraphOptions(capture_share=None)
"""Captures are made as soon as they are due, whatever they cost."""


@pytest.fixture(autouse=True)
def _gradients() -> Iterator[None]:
    """Steps are called as in any training loop: with gradients on."""
    with torch.enable_grad():
        yield


class Learner:
    """Networks, and optimizers of them, that a subclass trains in ``step``."""

    nets: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]

    def step(self, *batch: Any) -> Any:
        """One training step."""
        raise NotImplementedError

    def batch(self) -> tuple[Tensor, ...]:
        """A random batch."""
        return torch.randn(16, 4), torch.randn(16, 3)

    def state(self) -> dict[str, Any]:
        """Everything that a step changes."""
        gradients = {name: one.grad for name, one in self.nets.named_parameters()}
        moments = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        return {"nets": dict(self.nets.state_dict()), "gradients": gradients, "moments": moments}


class Twins:
    """One learner whose steps are served, and one whose steps are eager, from the same numbers."""

    def __init__(self, make: Callable[[], Learner], **how: Any) -> None:
        self.served, self.plain = (self._made(make) for _ in range(2))
        settings = {"dynamic": {}, "gradients": "inside", "options": PATIENT} | how
        self.step = gd.graphed(self.served.step, **settings)
        self.calls = 0

    @staticmethod
    def _made(make: Callable[[], Learner]) -> Learner:
        torch.manual_seed(0)
        return make()

    def both(self, change: Callable[[Learner], object]) -> None:
        """Change both learners between steps."""
        change(self.served)
        change(self.plain)

    def call(self, *batch: Any) -> Reason:
        """One step of both, which agree then; returns why it was served as it was."""
        self.calls += 1
        torch.manual_seed(self.calls)
        batch = batch or self.served.batch()
        torch.manual_seed(1000 + self.calls)
        answer = self.step(*batch)
        after = torch.get_rng_state()
        torch.manual_seed(1000 + self.calls)
        with torch.enable_grad():
            expected = self.plain.step(*batch)
        assert_same(answer, torch.utils._pytree.tree_map(lambda one: one.detach(), expected))
        assert torch.equal(after, torch.get_rng_state()), "the random generator"
        self.agree()
        return self.step.last_decision.reason

    def agree(self) -> None:
        """Assert that both are the same now."""
        assert_same(self.served.state(), self.plain.state(), f"after {self.calls} calls")

    def calls_of(self, count: int) -> list[Reason]:
        """The reasons of several calls."""
        return [self.call() for _ in range(count)]

    def settle(self) -> None:
        """Call until graphs serve."""
        reasons = self.calls_of(5)
        assert reasons[-1] is Reason.EXACT, self.step.explain(*self.served.batch())


def perceptron(inputs: int = 4, outputs: int = 3) -> nn.Sequential:
    """A small network."""
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


class Regression(Learner):
    """A small network, by any optimizer."""

    def __init__(self, optimizer: Any = SGD, **settings: Any) -> None:
        self.nets = perceptron()
        self.optimizers = (optimizer(self.nets.parameters(), **{"lr": 1e-2} | settings),)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """The natural step, as it stands in every tutorial."""
        (optimizer,) = self.optimizers
        optimizer.zero_grad()
        loss = functional.mse_loss(self.nets(x), y)
        loss.backward()
        optimizer.step()
        return loss


class Language(Learner):
    """A causal language model with AdamW, and with clipping."""

    class Model(nn.Module):
        """Attention and a feed-forward network over embedded ids."""

        def __init__(self, width: int = 16) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, width), nn.Linear(width, 20)
            self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)

        def forward(self, ids: Tensor) -> Tensor:
            """Logits of the next ids."""
            x = self.embed(ids)
            q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.mix(self.norm(x)).chunk(3, -1))
            x = x + self.out(
                functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            )
            logits: Tensor = self.head(self.drop(x))
            return logits

    def __init__(self) -> None:
        self.nets = self.Model()
        self.optimizers = (AdamW(self.nets.parameters(), lr=1e-3, fused=True),)

    def batch(self) -> tuple[Tensor, ...]:
        return (torch.randint(0, 20, (4, 9)),)

    def step(self, ids: Tensor) -> dict[str, Tensor]:
        (optimizer,) = self.optimizers
        optimizer.zero_grad()
        loss = functional.cross_entropy(self.nets(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.nets.parameters(), 1.0)
        optimizer.step()
        return {"loss": loss, "norm": norm}


class Images(Learner):
    """A convolution network with batch norm and dropout."""

    def __init__(self) -> None:
        first, last = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)
        pool = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2)
        self.nets = nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(), *pool, last)
        self.optimizers = (SGD(self.nets.parameters(), lr=1e-2, momentum=0.9),)

    def batch(self) -> tuple[Tensor, ...]:
        return torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,))

    def step(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        (optimizer,) = self.optimizers
        optimizer.zero_grad()
        logits = self.nets(images)
        loss = functional.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        return loss, (logits.argmax(-1) == labels).float().mean()


class SoftActorCritic(Learner):
    """Two optimizers, target networks, and actions that are drawn."""

    def __init__(self) -> None:
        self.nets = nn.ModuleDict({"actor": perceptron(4, 4), "critic": perceptron(6, 1), "target": perceptron(6, 1)})
        self.nets["target"].load_state_dict(self.nets["critic"].state_dict())
        parts = (self.nets["actor"], self.nets["critic"])
        self.optimizers = tuple(Adam(part.parameters(), lr=1e-3, fused=True) for part in parts)

    def batch(self) -> tuple[Tensor, ...]:
        return torch.randn(16, 4), torch.rand(16, 2), torch.randn(16, 1), torch.randn(16, 4)

    def act(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """An action, and the logarithm of its density."""
        mean, spread = self.nets["actor"](seen).chunk(2, -1)
        normal = torch.distributions.Normal(mean, spread.tanh().exp(), validate_args=False)
        drawn = normal.rsample()
        action = drawn.tanh()
        return action, (normal.log_prob(drawn) - (1 - action.pow(2) + 1e-6).log()).sum(-1, keepdim=True)

    def step(self, seen: Tensor, action: Tensor, reward: Tensor, then: Tensor) -> tuple[Tensor, Tensor]:
        actor, critic = self.optimizers
        with torch.no_grad():
            later, density = self.act(then)
            wanted = reward + 0.99 * (self.nets["target"](torch.cat([then, later], -1)) - 0.2 * density)
        loss = functional.mse_loss(self.nets["critic"](torch.cat([seen, action], -1)), wanted)
        critic.zero_grad()
        loss.backward()
        critic.step()
        chosen, density = self.act(seen)
        regret = (0.2 * density - self.nets["critic"](torch.cat([seen, chosen], -1))).mean()
        actor.zero_grad()
        regret.backward()
        actor.step()
        with torch.no_grad():
            for ours, theirs in zip(self.nets["critic"].parameters(), self.nets["target"].parameters(), strict=True):
                theirs.lerp_(ours, 0.005)
        return loss, regret


class Values(Learner):
    """Deep Q-learning beside a target network that nobody trains."""

    def __init__(self) -> None:
        self.nets = nn.ModuleDict({"online": perceptron(4, 2), "target": perceptron(4, 2)})
        self.optimizers = (Adam(self.nets["online"].parameters(), lr=1e-3, fused=True),)

    def batch(self) -> tuple[Tensor, ...]:
        return torch.randn(16, 4), torch.randint(0, 2, (16, 1)), torch.randn(16), torch.randn(16, 4)

    def step(self, seen: Tensor, action: Tensor, reward: Tensor, then: Tensor) -> Tensor:
        (optimizer,) = self.optimizers
        with torch.no_grad():
            wanted = reward + 0.99 * self.nets["target"](then).amax(-1)
        loss = functional.smooth_l1_loss(self.nets["online"](seen).gather(-1, action)[:, 0], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss


class Proximal(Learner):
    """Proximal policy optimization: a ratio, an entropy, a value, and clipping."""

    def __init__(self) -> None:
        self.nets = perceptron(4, 3)
        self.optimizers = (Adam(self.nets.parameters(), lr=1e-3, eps=1e-5, fused=True),)

    def batch(self) -> tuple[Tensor, ...]:
        return torch.randn(16, 4), torch.randint(0, 2, (16,)), torch.rand(16).log(), torch.randn(16), torch.randn(16)

    def step(self, seen: Tensor, action: Tensor, before: Tensor, gain: Tensor, wanted: Tensor) -> Tensor:
        (optimizer,) = self.optimizers
        *logits, value = self.nets(seen).unbind(-1)
        policy = torch.distributions.Categorical(logits=torch.stack(logits, -1), validate_args=False)
        ratio = (policy.log_prob(action) - before).exp()
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        clipped = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
        loss = clipped - 0.01 * policy.entropy().mean() + 0.5 * (value - wanted).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.nets.parameters(), 0.5)
        optimizer.step()
        return loss


class Physics(Learner):
    """A network that is to solve the heat equation: second derivatives."""

    def __init__(self) -> None:
        self.nets = perceptron(2, 1)
        self.optimizers = (Adam(self.nets.parameters(), lr=1e-3, fused=True),)

    def batch(self) -> tuple[Tensor, ...]:
        return (torch.rand(16, 2),)

    def step(self, places: Tensor) -> Tensor:
        (optimizer,) = self.optimizers
        places = places.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.nets(places).sum(), places, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 1].sum(), places, create_graph=True)
        loss = (slope[:, 0] - bend[:, 1]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss


class Accumulated(Regression):
    """Four backward passes for one step, one of them in bfloat16."""

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        (optimizer,) = self.optimizers
        optimizer.zero_grad()
        for part, wanted in zip(x.chunk(4), y.chunk(4), strict=True):
            functional.mse_loss(self.nets(part), wanted).backward()
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.nets(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss


LEARNERS: dict[str, Callable[[], Learner]] = {
    "sgd": Regression,
    "sgd_with_momentum": lambda: Regression(momentum=0.9, nesterov=True),
    "adam": lambda: Regression(Adam, fused=True),
    "adamw": lambda: Regression(AdamW, fused=True),
    "adam_tensor_rate": lambda: Regression(Adam, fused=True, lr=torch.tensor(1e-2)),
    **{one.__name__: one for one in (Language, Images, SoftActorCritic, Values, Proximal, Physics, Accumulated)},
}


@pytest.mark.parametrize("name", LEARNERS)
def test_a_training_step_is_served_whole(name: str) -> None:
    """Nothing differs in any bit after two hundred steps, called with gradients on, and graphs serve from the fourth
    call on: two lead to the capture, and a third is compared."""
    twins = Twins(LEARNERS[name])
    assert twins.calls_of(3) == [Reason.FIRST_SIGHTING, Reason.CAPTURED_NOW, Reason.VERIFIED_NOW]
    assert set(twins.calls_of(197)) == {Reason.EXACT}


def test_outputs_are_detached_and_owned() -> None:
    """Of eager steps and of graphs."""
    twins = Twins(Regression)
    kept = [twins.step(*twins.served.batch()) for _ in range(6)]
    assert not any(loss.requires_grad for loss in kept)
    assert len({loss.data_ptr() for loss in kept}) == len(kept)
    assert torch.is_grad_enabled()


def test_gradients_between_steps_are_the_callers() -> None:
    """The caller may read, clip, scale, rebind or drop them; a step that adds to them adds to what is there."""

    class Adds(Regression):
        def step(self, x: Tensor, y: Tensor) -> Tensor:
            loss = functional.mse_loss(self.nets(x), y)
            loss.backward()
            self.optimizers[0].step()
            return loss

    twins = Twins(Adds)

    def drop(learner: Learner) -> None:
        for one in learner.nets.parameters():
            one.grad = None

    def rebind(learner: Learner) -> None:
        for one in learner.nets.parameters():
            one.grad = torch.full_like(one, 0.25)

    def drop_one(learner: Learner) -> None:
        next(iter(learner.nets.parameters())).grad = None

    twins.settle()
    for change in (drop, rebind, drop_one, lambda one: nn.utils.clip_grad_norm_(one.nets.parameters(), 0.1)):
        for _ in range(12):
            twins.both(change)
            reason = twins.call()
        assert reason is Reason.EXACT, change
    twins.settle()


@pytest.mark.parametrize("zeroes", [False, True])
def test_a_gradient_that_the_caller_binds_stays_its_own(zeroes: bool) -> None:
    """A step adds to the very tensor that was bound before it, or leaves that alone and makes another one."""

    class Steps(Regression):
        def step(self, x: Tensor, y: Tensor) -> Tensor:
            if zeroes:
                self.optimizers[0].zero_grad()
            loss = functional.mse_loss(self.nets(x), y)
            loss.backward()
            self.optimizers[0].step()
            return loss

    twins, bound = Twins(Steps), list[list[Tensor]]()

    def bind(learner: Learner) -> None:
        bound.append([torch.full_like(one, 0.25) for one in learner.nets.parameters()])
        for one, grad in zip(learner.nets.parameters(), bound[-1], strict=True):
            one.grad = grad

    twins.settle()
    for number in range(12):
        bound.clear()
        twins.both(bind)
        if number == 6:
            twins.step.explain(*twins.served.batch())
        reason = twins.call()
        served, plain = bound
        assert all(map(torch.equal, served, plain))
        kept = [one.grad is grad for one, grad in zip(twins.served.nets.parameters(), served, strict=True)]
        assert kept == [not zeroes] * len(served)
    assert reason is Reason.EXACT


def test_weights_loaded_between_steps() -> None:
    """Into the same memory: the graphs go on with the new numbers. As other tensors: captured anew."""
    twins = Twins(Regression)
    saved = {name: value.clone() for name, value in twins.plain.nets.state_dict().items()}
    twins.settle()
    twins.both(lambda one: one.nets.load_state_dict(saved))
    assert twins.call() is Reason.EXACT
    twins.both(lambda one: one.nets.load_state_dict({n: v.clone() for n, v in saved.items()}, assign=True))
    twins.both(lambda one: one.optimizers[0].param_groups[0].update(params=list(one.nets.parameters())))
    assert twins.calls_of(24)[-1] is Reason.EXACT


def test_optimizer_state_loaded_between_steps() -> None:
    """``load_state_dict`` puts other tensors in place of the moments, so that the graphs are captured anew."""
    twins = Twins(lambda: Regression(Adam, fused=True))
    twins.settle()
    saved = deepcopy(twins.plain.optimizers[0].state_dict())
    twins.calls_of(3)
    twins.both(lambda one: one.optimizers[0].load_state_dict(deepcopy(saved)))
    assert twins.calls_of(24)[-1] is Reason.EXACT


def test_a_layer_is_frozen_and_thawed() -> None:
    """Its gradient is dropped with ``zero_grad``, and comes again."""
    twins = Twins(lambda: Regression(Adam, fused=True))
    twins.settle()
    twins.both(lambda one: one.nets[0].requires_grad_(False))
    assert twins.calls_of(24)[-1] is Reason.EXACT
    twins.both(lambda one: one.nets[0].requires_grad_(True))
    assert twins.calls_of(24)[-1] is Reason.EXACT


def test_parameters_are_added() -> None:
    """A layer that comes later is trained, once its own first step was eager."""
    twins = Twins(lambda: Regression(Adam, fused=True))
    twins.settle()

    def grow(learner: Learner) -> None:
        torch.manual_seed(7)
        learner.nets.append(nn.Linear(3, 3))
        learner.optimizers[0].add_param_group({"params": list(learner.nets[-1].parameters())})

    twins.both(grow)
    assert twins.calls_of(24)[-1] is Reason.EXACT


def test_a_rate_that_is_a_number_is_named() -> None:
    """A scheduler that changes it makes each step another one; it is named, and each step is right."""
    twins = Twins(Regression)
    twins.settle()
    for rate in (0.02, 0.03, 0.04):
        twins.both(lambda one, rate=rate: one.optimizers[0].param_groups[0].update(lr=rate))
        assert not twins.call().is_graph
        assert twins.step._graphs.latest_change.startswith("lr: ")
    assert twins.calls_of(24)[-1] is Reason.EXACT


def test_a_rate_that_is_a_tensor_is_served() -> None:
    """What a scheduler writes into it, the next replay reads."""
    twins = Twins(LEARNERS["adam_tensor_rate"])
    twins.settle()
    for rate in (0.02, 0.03, 0.04):
        twins.both(lambda one, rate=rate: one.optimizers[0].param_groups[0]["lr"].fill_(rate))
        assert twins.call() is Reason.EXACT


def test_a_step_that_raises_leaves_what_eager_leaves() -> None:
    """Also while it would be captured, and served."""

    class Careful(Regression):
        def step(self, x: Tensor, y: Tensor) -> Tensor:
            self.optimizers[0].zero_grad()
            loss = functional.mse_loss(self.nets(x), y)
            loss.backward()
            if x.shape[0] == 3:
                raise ArithmeticError("NaN")
            self.optimizers[0].step()
            return loss

    twins = Twins(Careful)
    for _ in range(4):
        for rows in (3, 16, 3):
            x, y = torch.randn(rows, 4), torch.randn(rows, 3)
            if rows == 3:
                for step in (twins.step, twins.plain.step):
                    with pytest.raises(ArithmeticError):
                        step(x, y)
                twins.agree()
            else:
                twins.call(x, y)
    assert twins.step.stats.hits


def test_each_shape_has_its_own_graph() -> None:
    """The last, smaller batch of an epoch: its rows are not padded, since the loss mixes them."""
    twins = Twins(Regression)
    for _ in range(5):
        reasons = [twins.call(torch.randn(rows, 4), torch.randn(rows, 3)) for rows in (16, 16, 7)]
    assert set(reasons) == {Reason.EXACT}


def test_a_smaller_batch_is_never_padded() -> None:
    """With a dynamic dimension, too: a size of its own is served, and another batch stays eager, as rows mix."""
    twins = Twins(Regression, dynamic={"x": 0, "y": 0}, sizes=[16])
    for _ in range(6):
        full, rest = (twins.call(torch.randn(rows, 4), torch.randn(rows, 3)) for rows in (16, 7))
    assert (full, rest) == (Reason.EXACT, Reason.PADDING_UNPROVEN)
    said = twins.step.explain(torch.randn(7, 4), torch.randn(7, 3))
    assert "sizes=" in said
    assert "rows='independent'" not in said  # which is not so


def test_evaluation_in_between() -> None:
    """Another graphed callable of the same network sees each step's weights, in eval mode and back."""
    twins = Twins(Images)
    evaluate = gd.graphed(twins.served.nets, dynamic={"input": 0}, sizes=[6])
    twins.settle()
    for _ in range(8):
        twins.both(lambda one: one.nets.eval())
        images, _ = twins.served.batch()
        with torch.no_grad():
            assert_same(evaluate(images), twins.plain.nets(images))
        twins.both(lambda one: one.nets.train())
        reason = twins.call()
    assert (reason, evaluate.last_decision.reason) == (Reason.EXACT, Reason.EXACT)


def test_an_optimizer_is_replaced() -> None:
    """The graphs of the old one are not used."""
    twins = Twins(lambda: Regression(Adam, fused=True))
    twins.settle()
    twins.both(lambda one: vars(one).update(optimizers=(SGD(one.nets.parameters(), lr=0.1),)))
    assert twins.calls_of(24)[-1] is Reason.EXACT


def test_a_second_backward_raises_as_eager_does() -> None:
    """The caller gets torch's error, and the state of the failed step."""

    class Twice(Regression):
        def step(self, x: Tensor, y: Tensor) -> Tensor:
            loss = functional.mse_loss(self.nets(x), y)
            loss.backward()
            loss.backward()
            return loss

    twins = Twins(Twice)
    for _ in range(4):
        batch = twins.served.batch()
        for step in (twins.step, twins.plain.step):
            with pytest.raises(RuntimeError, match="second time"):
                step(*batch)
        twins.agree()


def test_adam_without_fused_names_the_remedy() -> None:
    """It reads its count of steps on the host; what the reason names is served."""
    twins = Twins(lambda: Regression(Adam))
    twins.calls_of(3)
    assert "Adam(fused=True)" in twins.step.explain(*twins.served.batch())


def test_an_argument_that_requires_a_gradient_runs_eagerly() -> None:
    """Its gradient is the caller's to have, which no step gives by a graph."""
    twins = Twins(Regression)
    twins.settle()
    x, y = twins.served.batch()
    x.requires_grad_()
    twins.step(x, y)
    assert x.grad is not None
    assert twins.step.last_decision.reason is Reason.NEEDS_GRADIENTS
    assert "detach()" in twins.step.last_decision.explain()


def test_data_parallel_training_runs_eagerly() -> None:
    """Its processes might capture at different steps, and then wait for each other."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:

        class Parallel(Regression):
            def __init__(self) -> None:
                super().__init__()
                self.nets = nn.parallel.DistributedDataParallel(self.nets)

        twins = Twins(Parallel)
        assert set(twins.calls_of(4)) == {Reason.CAPTURE_UNSAFE}
        assert "data parallel" in twins.step.explain(*twins.served.batch())
    finally:
        dist.destroy_process_group()


def test_a_failed_capture_leaves_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails at its very end: parameters, moments and gradients are those of one step."""
    from graphdispatch.proof.check import pipeline

    twins = Twins(lambda: Regression(Adam, fused=True))
    twins.call()

    def fail(*_: Any) -> None:
        raise RuntimeError("injected")

    for place in ("prove_rows", "record_at_once", "make_entry", "check_replay"):
        with monkeypatch.context() as patched:
            patched.setattr(pipeline, place, fail)
            assert twins.call() is Reason.CAPTURE_FAILED, place
        twins.step.clear()
        twins.call()
    twins.settle()


def test_an_interrupted_step_leaves_what_eager_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is pressed while the graph is recorded ends the call; the step itself was made once."""
    from graphdispatch.proof.check import pipeline

    twins = Twins(lambda: Regression(Adam, fused=True))
    twins.call()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    batch = twins.served.batch()
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "record_at_once", interrupt)
        with pytest.raises(KeyboardInterrupt):
            twins.step(*batch)
    twins.plain.step(*batch)
    assert_same(twins.served.state()["nets"], twins.plain.state()["nets"])
    twins.both(lambda one: one.nets.zero_grad())
    twins.settle()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_trains_on() -> None:
    """It has the same state, and its steps are right."""
    twins = Twins(lambda: Regression(Adam, fused=True))
    twins.settle()
    child = os.fork()
    if not child:
        status = 1
        try:
            status = 0 if twins.calls_of(6)[-1] is Reason.EXACT else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert twins.call() is Reason.EXACT


def test_a_prewarm_does_not_train() -> None:
    """It leaves parameters, moments and gradients as they are, and the next call is served."""
    twins = Twins(lambda: Regression(Adam, fused=True))
    twins.call()
    before = twins.plain.state()
    twins.step.prewarm(*twins.served.batch())
    assert_same(twins.served.state(), before)
    assert twins.call() is Reason.EXACT


def test_settings_that_cannot_be() -> None:
    """Each names the argument and what to do."""
    for settings, words in (
        ({"gradients": "yes"}, "gradients must be 'eager' or 'inside'"),
        ({"gradients": "inside", "outputs": "view"}, "outputs must be 'clone'"),
        ({"gradients": "inside", "mode": "PIECEWISE"}, "mode must be FULL or NONE"),
    ):
        with pytest.raises(ConfigError, match=words):
            gd.graphed(lambda x: x, dynamic={}, **settings)
    for front_end in (gd.graphed, gd.attach):
        with pytest.raises(ConfigError, match="fn must be a whole training step"):
            front_end(perceptron(), dynamic={}, gradients="inside")


def test_it_is_the_callable_that_it_wraps() -> None:
    """Its signature and attributes are those of the step."""
    learner = Regression()
    step = gd.graphed(learner.step, dynamic={}, gradients="inside")
    assert step.unwrap() == learner.step
    assert list(step.__signature__.parameters) == ["x", "y"]


def test_gradients_change_places() -> None:
    """A step that binds the gradient of one parameter to another, and back."""

    class Swaps(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.nets = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
            self.optimizers = (SGD(self.nets.parameters(), lr=1e-2),)

        def step(self, x: Tensor, y: Tensor) -> Tensor:
            first, second = self.nets[0].weight, self.nets[1].weight
            loss = functional.mse_loss(self.nets(x), y)
            loss.backward()
            first.grad, second.grad = second.grad, first.grad
            self.optimizers[0].step()
            return loss

    twins = Twins(Swaps)
    twins.settle()
    assert twins.calls_of(24)[-1] is Reason.EXACT


def test_hooks_that_come_later() -> None:
    """Of a gradient, and of what happens once it is there: graphs without them do not serve on."""
    twins = Twins(Regression)
    for hook in (lambda grad: grad * 0.5, lambda grad: grad * 3):
        twins.settle()
        twins.both(lambda one, hook=hook: one.nets[0].weight.register_hook(hook))
        assert twins.calls_of(24)[-1] is Reason.EXACT

    def shrink(parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)  # type: ignore[union-attr]

    twins.both(lambda one: one.nets[2].weight.register_post_accumulate_grad_hook(shrink))
    assert twins.calls_of(24)[-1] is Reason.EXACT


def larger(*given: Any) -> Any:
    """What a hook gives in the place of its last argument: ten times that. One of an optimizer gives nothing."""
    if isinstance(given[0], torch.optim.Optimizer):
        for parameter in given[0].param_groups[0]["params"]:
            parameter.grad.mul_(10)
        return None
    return tuple(None if grad is None else grad * 10 for grad in given[1])


BACKWARD_HOOKS: dict[str, Callable[[Any], Any]] = {
    "of the backward pass": lambda one: one.nets[2].register_full_backward_hook(larger),
    "before the backward pass": lambda one: one.nets[2].register_full_backward_pre_hook(larger),
    "of an optimizer's step": lambda one: one.optimizers[0].register_step_pre_hook(larger),
}
HOOKS_OF_ALL: dict[str, Callable[[Any], Any]] = {
    "of the backward pass": nn.modules.module.register_module_full_backward_hook,
    "before the backward pass": nn.modules.module.register_module_full_backward_pre_hook,
    "of an optimizer's step": register_optimizer_step_pre_hook,
}


@pytest.mark.parametrize("name", BACKWARD_HOOKS)
def test_hooks_of_modules_that_come_and_go(name: str) -> None:
    """What they make of gradients is eager's from the next step on; once they are removed, too."""
    twins, handles = Twins(Regression), list[Any]()
    twins.settle()
    twins.both(lambda one: handles.append(BACKWARD_HOOKS[name](one)))
    assert twins.calls_of(24)[-1] is Reason.EXACT
    for handle in handles:
        handle.remove()
    assert twins.calls_of(24)[-1] is Reason.EXACT


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the first layer's inputs require no gradients
@pytest.mark.parametrize("name", HOOKS_OF_ALL)
def test_hooks_of_all_modules_that_come_and_go(name: str) -> None:
    """As those of one."""
    twins = Twins(Regression)
    twins.settle()
    handle = HOOKS_OF_ALL[name](larger)
    try:
        assert twins.calls_of(24)[-1] is Reason.EXACT
    finally:
        handle.remove()
    assert twins.calls_of(24)[-1] is Reason.EXACT


def test_a_sparse_gradient_stays_eager() -> None:
    """It has no memory that each step could write to."""

    class Sparse(Regression):
        def __init__(self) -> None:
            self.nets = nn.Embedding(10, 3, sparse=True)
            self.optimizers = (SGD(self.nets.parameters(), lr=1e-2),)

        def batch(self) -> tuple[Tensor, ...]:
            return torch.randint(0, 10, (6,)), torch.randn(6, 3)

        def state(self) -> dict[str, Any]:
            (grad,) = (one.grad for one in self.nets.parameters())
            return {"weights": dict(self.nets.state_dict()), "gradient": None if grad is None else grad.to_dense()}

    twins = Twins(Sparse)
    assert twins.calls_of(6)[1] is Reason.STATE_REBOUND


def test_a_step_under_no_grad_sees_frozen_layers_too() -> None:
    """One that turns gradients on itself, without the option: a replay would go on training a frozen layer."""
    learner, twin = Twins._made(Regression), Twins._made(Regression)
    for one in (learner, twin):
        one.optimizers[0].zero_grad = partial(one.optimizers[0].zero_grad, set_to_none=False)  # type: ignore[method-assign]
        for parameter in one.nets.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            return learner.step(x, y).detach()

    serve = gd.graphed(step, dynamic={}, options=PATIENT)
    for call in range(16):
        if call == 8:
            assert serve.last_decision.reason is Reason.EXACT
            for one in (learner, twin):
                one.nets[0].requires_grad_(False)
        batch = learner.batch()
        with torch.no_grad():
            serve(*batch)
        twin.step(*batch)
        assert_same(learner.state()["nets"], twin.state()["nets"])


def test_gradients_that_add_up_over_calls() -> None:
    """The caller steps and clears after each fourth call: with and without gradients at its begin, a graph serves."""

    class Adds(Regression):
        def step(self, x: Tensor, y: Tensor) -> Tensor:
            loss = functional.mse_loss(self.nets(x), y)
            loss.backward()
            return loss

    def finish(learner: Learner) -> None:
        learner.optimizers[0].step()
        learner.optimizers[0].zero_grad()

    twins, reasons = Twins(Adds), []
    for _ in range(10):
        reasons += twins.calls_of(4)
        twins.both(finish)
    assert set(reasons[-16:]) == {Reason.EXACT}


def test_two_steps_share_their_networks() -> None:
    """As those of a generator and its judge: each leaves gradients that the other clears."""

    class Adversaries(Learner):
        def __init__(self) -> None:
            self.nets = nn.ModuleDict({"makes": nn.Linear(4, 3), "judges": nn.Linear(3, 1)})
            self.optimizers = tuple(Adam(part.parameters(), lr=1e-3, fused=True) for part in self.nets.values())

        def step(self, noise: Tensor, real: Tensor) -> Tensor:
            made = self.nets["makes"](noise).detach()
            loss = (self.nets["judges"](real) - 1).pow(2).mean() + self.nets["judges"](made).pow(2).mean()
            self.optimizers[1].zero_grad()
            loss.backward()
            self.optimizers[1].step()
            return loss

        def make(self, noise: Tensor) -> Tensor:
            loss = (self.nets["judges"](self.nets["makes"](noise)) - 1).pow(2).mean()
            self.optimizers[0].zero_grad()
            loss.backward()
            self.optimizers[0].step()
            return loss

    twins = Twins(Adversaries)
    make = gd.graphed(twins.served.make, dynamic={}, gradients="inside", options=PATIENT)
    for _ in range(20):
        reason = twins.call()
        noise = torch.randn(16, 4)
        assert_same(make(noise), twins.plain.make(noise).detach())
        twins.agree()
    assert (reason, make.last_decision.reason) == (Reason.EXACT, Reason.EXACT)


def test_weights_of_another_type() -> None:
    """``double()`` gives parameters and gradients other memory in place: captured anew."""
    twins = Twins(Regression)
    twins.settle()
    twins.both(lambda one: one.nets.double())
    for _ in range(12):
        reason = twins.call(*(one.double() for one in twins.served.batch()))
    assert reason is Reason.EXACT
