"""Soft actor-critic learns to swing up a pendulum: each update, three losses and three optimizers, is one graph."""

import math
import time
from collections.abc import Callable

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Adam

import graphdispatch as gd

PENDULUMS, STEPS, UPDATES, BATCH, WIDTH = 8, 200, 2, 128, 64
EPISODES = 12


def perceptron(inputs: int, outputs: int) -> nn.Sequential:
    """A network of two hidden layers."""
    hidden = nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(WIDTH, outputs))


class Agent:
    """An actor, two critics with slow copies of them, and the weight of the entropy."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.actor, self.critics = perceptron(3, 2), nn.ModuleList([perceptron(4, 1), perceptron(4, 1)])
        self.targets = nn.ModuleList([perceptron(4, 1), perceptron(4, 1)]).requires_grad_(False)
        self.targets.load_state_dict(self.critics.state_dict())
        self.log_weight = nn.Parameter(torch.zeros(1))
        self.of_critics = Adam(self.critics.parameters(), lr=1e-3, fused=True)
        self.of_actor = Adam(self.actor.parameters(), lr=1e-3, fused=True)
        self.of_weight = Adam([self.log_weight], lr=1e-3, fused=True)

    def act(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Draw an action, with the logarithm of its density."""
        mean, spread = self.actor(seen).chunk(2, -1)
        normal = torch.distributions.Normal(mean, (3.5 * spread.tanh() - 1.5).exp(), validate_args=False)
        drawn = normal.rsample()
        action = drawn.tanh()
        return action, normal.log_prob(drawn) - (1 - action.pow(2) + 1e-6).log()

    def update(self, seen: Tensor, action: Tensor, reward: Tensor, then: Tensor) -> Tensor:
        """One whole update: the critics, the actor, the weight of the entropy, the slow copies."""
        with torch.no_grad():
            later, density = self.act(then)
            pair = torch.cat([then, later], -1)
            value = torch.min(self.targets[0](pair), self.targets[1](pair)) - self.log_weight.exp() * density
            wanted = reward + 0.99 * value
        pair = torch.cat([seen, action], -1)
        loss = mse_loss(self.critics[0](pair), wanted) + mse_loss(self.critics[1](pair), wanted)
        self.of_critics.zero_grad()
        loss.backward()
        self.of_critics.step()

        chosen, density = self.act(seen)
        pair = torch.cat([seen, chosen], -1)
        worth = torch.min(self.critics[0](pair), self.critics[1](pair))
        regret = (self.log_weight.exp().detach() * density - worth).mean()
        self.of_actor.zero_grad()
        regret.backward()
        self.of_actor.step()

        balance = (-self.log_weight.exp() * (density.detach() - 1.0)).mean()
        self.of_weight.zero_grad()
        balance.backward()
        self.of_weight.step()

        with torch.no_grad():
            for ours, slow in zip(self.critics.parameters(), self.targets.parameters(), strict=True):
                slow.lerp_(ours, 0.005)
        return loss

    def parameters(self) -> list[Tensor]:
        """All that an update changes, but for the optimizers' own."""
        return [*self.actor.parameters(), *self.critics.parameters(), *self.targets.parameters(), self.log_weight]


def swing(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """One step of pendulums, each an angle and a speed, and the reward for it."""
    angle, speed = state.unbind(-1)
    torque = 2 * action[:, 0]
    off = (angle + math.pi) % (2 * math.pi) - math.pi
    reward = -(off.pow(2) + 0.1 * speed.pow(2) + 0.001 * torque.pow(2))
    speed = (speed + 0.05 * (15 * angle.sin() + 3 * torque)).clamp(-8, 8)
    return torch.stack([angle + 0.05 * speed, speed], -1), reward


def look(state: Tensor) -> Tensor:
    """What the agent sees of a pendulum."""
    return torch.stack([state[:, 0].cos(), state[:, 0].sin(), state[:, 1] / 8], -1)


def train(agent: Agent, update: Callable[..., Tensor]) -> list[float]:
    """Play and learn; returns the mean return of each episode."""
    room = EPISODES * STEPS * PENDULUMS
    memory, filled = [torch.zeros(room, width) for width in (3, 1, 1, 3)], 0
    returns = []
    for _ in track(range(EPISODES), "learning"):
        total, state = 0.0, torch.stack([(2 * torch.rand(PENDULUMS) - 1) * math.pi, 2 * torch.rand(PENDULUMS) - 1], -1)
        for _ in range(STEPS):
            seen = look(state)
            with torch.no_grad():
                action, _ = agent.act(seen)
            state, reward = swing(state, action)
            for kept, new in zip(memory, (seen, action, 0.1 * reward[:, None], look(state)), strict=True):
                kept[filled : filled + PENDULUMS] = new
            filled, total = filled + PENDULUMS, total + float(reward.mean())
            for _ in range(UPDATES if filled >= 8 * BATCH else 0):
                rows = torch.randint(filled, (BATCH,))
                update(*(kept[rows] for kept in memory))
        returns.append(total)
    return returns


def compare(update: Callable[..., Tensor], agent: Agent, other: Agent, rounds: int = 200) -> tuple[float, float]:
    """Update both agents on the same random batches; the milliseconds of an update, by graphs and eagerly. Exits with
    an error if any bit differs."""
    seconds = [0.0, 0.0]
    for number in range(rounds):
        torch.manual_seed(number)
        batch = torch.randn(BATCH, 3), 2 * torch.rand(BATCH, 1) - 1, torch.randn(BATCH, 1), torch.randn(BATCH, 3)
        for place, run in enumerate((update, other.update)):
            torch.manual_seed(number)  # both draw the same actions
            start = time.perf_counter()
            run(*batch)
            seconds[place] += (time.perf_counter() - start) * (number >= rounds // 2)
    if not all(map(torch.equal, agent.parameters(), other.parameters())):
        raise SystemExit("the parameters differ from eager's")
    graphs, eager = (1e3 * one / (rounds - rounds // 2) for one in seconds)
    return graphs, eager


def main() -> None:
    """Compare with eager, then learn by graphs."""
    torch.set_num_threads(1)
    agent, other = Agent(), Agent()
    update = gd.graphed(agent.update, dynamic={}, gradients="inside")
    graphs, eager = compare(update, agent, other)
    print(f"200 updates, the same bits as eager; {graphs:.2f} ms by graphs, {eager:.2f} ms eagerly")
    returns = train(agent, update)
    low, high = min(returns), max(returns)
    bars = "".join("▁▂▃▄▅▆▇█"[int(7 * (one - low) / (high - low + 1e-9))] for one in returns)
    print(f"return of each episode: {returns[0]:.0f} {bars} {returns[-1]:.0f}")
    print(f"{update.stats.calls} updates, {100 * update.stats.graph_ratio:.1f} % by graphs")


if __name__ == "__main__":
    main()
