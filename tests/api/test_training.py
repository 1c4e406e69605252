"""``graphed(step, gradients="inside")``: whole training steps, beside the same step run eagerly on a twin.

After every call the twins agree bit for bit: answers, parameters, buffers, gradients, and the optimizers' state.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional
from torch.nn.modules.module import register_module_full_backward_hook, register_module_full_backward_pre_hook
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_pre_hook

import graphdispatch as gd
from graphdispatch import CUDAGraphOptions, Reason
from graphdispatch.errors import ConfigError
from graphdispatch.proof.check import pipeline
from graphdispatch.proof.check.attempt import CaptureAttempt

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

    def loss(self, *batch: Any) -> Tensor:
        """What the step makes smaller."""
        x, y = batch
        return functional.mse_loss(self.nets(x), y)

    def step(self, *batch: Any) -> Any:
        """The natural step, as it stands in every tutorial."""
        (optimizer,) = self.optimizers
        optimizer.zero_grad()
        loss = self.loss(*batch)
        loss.backward()
        self.update()
        return loss

    def update(self) -> None:
        """Use the gradients."""
        self.optimizers[0].step()

    def batch(self) -> tuple[Tensor, ...]:
        """A random batch."""
        kind = next(self.nets.parameters()).dtype
        return torch.randn(16, 4, dtype=kind), torch.randn(16, 3, dtype=kind)

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

    def step(self, x: Tensor, y: Tensor) -> Any:
        """The same with names."""
        return super().step(x, y)


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

    def loss(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return functional.cross_entropy(self.nets(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.nets.parameters(), 1.0)
        super().update()


class Images(Learner):
    """A convolution network with batch norm and dropout."""

    def __init__(self) -> None:
        first, last = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)
        pool = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2)
        self.nets = nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(), *pool, last)
        self.optimizers = (SGD(self.nets.parameters(), lr=1e-2, momentum=0.9),)

    def batch(self) -> tuple[Tensor, ...]:
        return torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,))

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return functional.cross_entropy(self.nets(images), labels)


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


class Physics(Learner):
    """A network that is to solve the heat equation: second derivatives."""

    def __init__(self) -> None:
        self.nets = perceptron(2, 1)
        self.optimizers = (Adam(self.nets.parameters(), lr=1e-3, fused=True),)

    def batch(self) -> tuple[Tensor, ...]:
        return (torch.rand(16, 2),)

    def loss(self, places: Tensor) -> Tensor:  # type: ignore[override]
        places = places.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.nets(places).sum(), places, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 1].sum(), places, create_graph=True)
        return (slope[:, 0] - bend[:, 1]).pow(2).mean()


class Accumulated(Regression):
    """Five backward passes for one step, one of them in bfloat16."""

    def loss(self, *batch: Tensor) -> Tensor:
        x, y = batch
        for part, wanted in zip(x.chunk(4), y.chunk(4), strict=True):
            functional.mse_loss(self.nets(part), wanted).backward()
        with torch.autocast("cpu", torch.bfloat16):
            return self.nets(x).float().pow(2).mean()


LEARNERS: dict[str, Callable[[], Learner]] = {
    "sgd": Regression,
    "sgd_with_momentum": lambda: Regression(momentum=0.9, nesterov=True),
    "adam": lambda: Regression(Adam, fused=True),
    "adam_tensor_rate": lambda: Regression(Adam, fused=True, lr=torch.tensor(1e-2)),
    **{one.__name__: one for one in (Language, Images, SoftActorCritic, Physics, Accumulated)},
}

ADAM = LEARNERS["adam"]


@pytest.mark.parametrize("name", LEARNERS)
def test_a_training_step_is_served_whole(name: str) -> None:
    """Nothing differs in any bit after sixty steps, called with gradients on, and graphs serve from the fourth call on:
    two lead to the capture, and a third is compared."""
    twins = Twins(LEARNERS[name])
    assert twins.calls_of(3) == [Reason.FIRST_SIGHTING, Reason.CAPTURED_NOW, Reason.VERIFIED_NOW]
    assert set(twins.calls_of(57)) == {Reason.EXACT}


def test_outputs_are_detached_and_owned() -> None:
    """Of eager steps and of graphs."""
    twins = Twins(Regression)
    kept = [twins.step(*twins.served.batch()) for _ in range(6)]
    assert not any(loss.requires_grad for loss in kept)
    assert len({loss.data_ptr() for loss in kept}) == len(kept)
    assert torch.is_grad_enabled()


def drop(learner: Learner) -> None:
    """Drop all gradients."""
    for one in learner.nets.parameters():
        one.grad = None


def drop_one(learner: Learner) -> None:
    """Drop the gradient of the first parameter."""
    next(iter(learner.nets.parameters())).grad = None


def rebind(learner: Learner) -> None:
    """Put other gradients in place of all."""
    for one in learner.nets.parameters():
        one.grad = torch.full_like(one, 0.25)


class Adds(Regression):
    """Adds to the gradients that are there."""

    def step(self, *batch: Tensor) -> Tensor:
        loss = self.loss(*batch)
        loss.backward()
        self.update()
        return loss


def load_in_place(learner: Learner) -> None:
    """Halve the weights in their memory."""
    learner.nets.load_state_dict({name: value / 2 for name, value in learner.nets.state_dict().items()})


def load_by_assignment(learner: Learner) -> None:
    """Put other tensors in the place of the weights."""
    saved = {name: value / 2 for name, value in learner.nets.state_dict().items()}
    learner.nets.load_state_dict(saved, assign=True)
    learner.optimizers[0].param_groups[0].update(params=list(learner.nets.parameters()))


def load_moments(learner: Learner) -> None:
    """Put copies in the place of the optimizer's state."""
    learner.optimizers[0].load_state_dict(deepcopy(learner.optimizers[0].state_dict()))


def replace_optimizer(learner: Learner) -> None:
    """Go on with another one."""
    learner.optimizers = (SGD(learner.nets.parameters(), lr=0.1),)


def grow(learner: Learner) -> None:
    """Add a layer."""
    torch.manual_seed(7)
    learner.nets.append(nn.Linear(3, 3))
    learner.optimizers[0].add_param_group({"params": list(learner.nets[-1].parameters())})


def freeze(learner: Learner) -> Callable[[], object]:
    """Freeze the first layer; returns what thaws it."""
    learner.nets[0].requires_grad_(False)
    return lambda: learner.nets[0].requires_grad_(True)


def double(learner: Learner) -> Callable[[], object]:
    """Give parameters and gradients memory of another type; returns what takes that back."""
    learner.nets.double()
    return lambda: learner.nets.float()


def shrink(parameter: Tensor) -> None:
    """Halve a gradient once it is there."""
    parameter.grad.mul_(0.5)  # type: ignore[union-attr]


def larger(*given: Any) -> Any:
    """What a hook gives in the place of its last argument: ten times that. One of an optimizer gives nothing."""
    if isinstance(given[0], torch.optim.Optimizer):
        for parameter in given[0].param_groups[0]["params"]:
            parameter.grad.mul_(10)
        return None
    return tuple(None if grad is None else grad * 10 for grad in given[1])


def tripled(grad: Tensor) -> Tensor:
    """What a hook makes of a gradient."""
    return grad * 3


def hook(register: Callable[..., Any], *given: Any) -> Callable[[], object]:
    """Register a hook; returns what removes it."""
    handle: Any = register(*given)
    return lambda: handle.remove()


SERVED_AT_ONCE: dict[str, tuple[Callable[[], Learner], Callable[[Any], object]]] = {
    "weights loaded in place": (Regression, load_in_place),
    "rate that is a tensor": (
        LEARNERS["adam_tensor_rate"],
        lambda one: one.optimizers[0].param_groups[0]["lr"].fill_(0.02),
    ),
    "gradients clipped": (Adds, lambda one: nn.utils.clip_grad_norm_(one.nets.parameters(), 0.1)),
}
"""What may happen between two steps so that the next one is still served."""
SERVED_AGAIN: dict[str, tuple[Callable[[], Learner], Callable[[Any], Any]]] = {
    "gradients dropped": (Adds, drop),
    "a gradient dropped": (Adds, drop_one),
    "gradients replaced": (Adds, rebind),
    "weights loaded by assignment": (Regression, load_by_assignment),
    "optimizer's state loaded": (ADAM, load_moments),
    "optimizer replaced": (ADAM, replace_optimizer),
    "layer added": (ADAM, grow),
    "layer frozen": (ADAM, freeze),
    "weights of another type": (Regression, double),
    "hook of a gradient": (Regression, lambda one: hook(one.nets[0].weight.register_hook, tripled)),
    "hook of a gradient that is there": (
        Regression,
        lambda one: hook(one.nets[2].weight.register_post_accumulate_grad_hook, shrink),
    ),
    "hook of the backward pass": (Regression, lambda one: hook(one.nets[2].register_full_backward_hook, larger)),
    "hook before the backward pass": (
        Regression,
        lambda one: hook(one.nets[2].register_full_backward_pre_hook, larger),
    ),
    "hook of an optimizer's step": (Regression, lambda one: hook(one.optimizers[0].register_step_pre_hook, larger)),
    "hook of all backward passes": (Regression, lambda _: hook(register_module_full_backward_hook, larger)),
    "hook before all backward passes": (Regression, lambda _: hook(register_module_full_backward_pre_hook, larger)),
    "hook of all optimizers": (Regression, lambda _: hook(register_optimizer_step_pre_hook, larger)),
}
"""What makes each step another one, and what may take it back."""


@pytest.mark.parametrize("name", SERVED_AT_ONCE)
def test_what_happens_between_steps_is_seen_by_replays(name: str) -> None:
    """Numbers that change in their memory end no graph."""
    make, change = SERVED_AT_ONCE[name]
    twins = Twins(make)
    twins.settle()
    for _ in range(3):
        twins.both(change)
        assert twins.call() is Reason.EXACT


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the first layer's inputs require no gradients
@pytest.mark.parametrize("name", SERVED_AGAIN)
def test_what_happens_between_steps_has_graphs_of_its_own(name: str) -> None:
    """The steps behind it are eager's, and are served in the end; so they are once it is taken back."""
    make, change = SERVED_AGAIN[name]
    twins = Twins(make)
    twins.settle()
    back = [change(learner) for learner in (twins.served, twins.plain)]
    assert twins.calls_of(24)[-1] is Reason.EXACT
    if callable(back[0]):
        for take_back in back:
            take_back()
        assert twins.calls_of(24)[-1] is Reason.EXACT


@pytest.mark.parametrize("zeroes", [False, True])
def test_a_gradient_that_the_caller_binds_stays_its_own(zeroes: bool) -> None:
    """A step adds to the very tensor that was bound before it, or leaves that alone and makes another one."""
    twins, bound = Twins(Regression if zeroes else Adds), list[list[Tensor]]()

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


def halved() -> Any:
    """Hooks by which a backward pass computes with other numbers than were saved."""
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 0.5, lambda saved: saved)


@pytest.mark.parametrize("is_first", [False, True])
def test_hooks_of_saved_tensors_around_a_step(is_first: bool) -> None:
    """A step within them is eager's, and one after them has nothing of them."""
    twins = Twins(Regression)
    for is_hooked in (is_first, True, False):
        for _ in range(5):
            with halved() if is_hooked else nullcontext():
                reason = twins.call()
            assert not (is_hooked and reason.is_graph)
    assert twins.calls_of(64)[-1] is Reason.EXACT


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected")
def test_anomaly_detection_around_a_step_finds_what_it_finds_in_eager() -> None:
    """No graph serves while it is on, or is made."""
    twins = Twins(Regression)
    twins.settle()
    x, y = twins.served.batch()
    with torch.autograd.detect_anomaly():
        assert not any(reason.is_graph for reason in twins.calls_of(5))
        with pytest.raises(RuntimeError, match="returned nan"):
            twins.step(x * float("inf"), y)


def test_one_gradient_of_two_parameters_is_refused() -> None:
    """A step would keep them apart, where eager adds both to the one."""
    twins = Twins(Adds)
    twins.settle()
    first, _, second, _ = twins.served.nets.parameters()
    second.data = torch.randn_like(first)
    first.grad = second.grad = torch.zeros_like(first)
    with pytest.raises(ConfigError, match="gradient of its own"):
        twins.step(*twins.served.batch())


def test_a_rate_that_is_a_number_is_named() -> None:
    """A scheduler that changes it makes each step another one; it is named, and each step is right."""
    twins = Twins(Regression)
    twins.settle()
    for rate in (0.02, 0.03, 0.04):
        twins.both(lambda one, rate=rate: one.optimizers[0].param_groups[0].update(lr=rate))
        assert not twins.call().is_graph
        assert twins.step._graphs.latest_change.startswith("lr: ")
    assert twins.calls_of(24)[-1] is Reason.EXACT


def test_a_step_that_raises_leaves_what_eager_leaves() -> None:
    """Also while it would be captured, and served."""

    class Careful(Regression):
        def loss(self, *batch: Tensor) -> Tensor:
            loss = super().loss(*batch)
            if len(batch[0]) == 3:
                loss.backward()
                raise ArithmeticError("NaN")
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


@pytest.mark.parametrize("place", ["prove_rows", "record_at_once", "make_entry", "check_replay"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_capture_leaves_one_step(
    place: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, moments and gradients are those of one step, also where a key is pressed while a graph is made."""
    twins = Twins(ADAM)
    twins.call()

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(CaptureAttempt if place == "record_at_once" else pipeline, place, fail)
        if error is RuntimeError:
            assert twins.call() is Reason.CAPTURE_FAILED
        else:
            batch = twins.served.batch()
            with pytest.raises(KeyboardInterrupt):
                twins.step(*batch)
            twins.plain.step(*batch)
            twins.agree()
    twins.step.clear()
    twins.call()
    twins.settle()


def test_a_prewarm_does_not_train() -> None:
    """It leaves parameters, moments and gradients as they are, and the next call is served."""
    twins = Twins(ADAM)
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

    class OnlyAdds(Adds):
        def update(self) -> None:
            pass

    def finish(learner: Learner) -> None:
        learner.optimizers[0].step()
        learner.optimizers[0].zero_grad()

    twins, reasons = Twins(OnlyAdds), []
    for _ in range(10):
        reasons += twins.calls_of(4)
        twins.both(finish)
    assert set(reasons[-16:]) == {Reason.EXACT}
