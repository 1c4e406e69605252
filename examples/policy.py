"""A policy network in a loop over environments: as poles fall, fewer are left, and the batch shrinks."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import graphdispatch as gd

ENVIRONMENTS, STEPS = 32, 200


class Policy(nn.Module):
    """Observations [N, 4] -> the logits of two actions, and a value."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.logits, self.value = nn.Linear(width, 2), nn.Linear(width, 1)

    def forward(self, observation: Tensor) -> dict[str, Tensor]:
        """A dict comes back as a dict."""
        hidden = self.trunk(observation)
        return {"logits": self.logits(hidden), "value": self.value(hidden)[:, 0]}


def advance(state: Tensor, push: Tensor) -> Tensor:
    """One step of poles on carts: position, speed, angle and turning speed of each."""
    x, speed, angle, turning = state.unbind(-1)
    force = 20.0 * push - 10.0
    pull = (force + 0.05 * turning**2 * angle.sin()) / 1.1
    turn = (9.8 * angle.sin() - angle.cos() * pull) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    slide = pull - 0.05 * turn * angle.cos() / 1.1
    return torch.stack([x + 0.02 * speed, speed + 0.02 * slide, angle + 0.02 * turning, turning + 0.02 * turn], -1)


def play(policy: Callable[[Tensor], dict[str, Tensor]]) -> tuple[list[dict[str, Tensor]], list[int], float]:
    """Each step's answers, how many environments were left, and the seconds that the policy took."""
    state = torch.randn(ENVIRONMENTS, 4, generator=torch.Generator().manual_seed(1)) * 0.05
    answers, left, seconds = [], [], 0.0
    for _ in range(STEPS):
        start = time.perf_counter()
        answer = policy(state)
        seconds += time.perf_counter() - start
        answers.append(answer)
        left.append(len(state))
        state = advance(state, answer["logits"].argmax(-1))
        state = state[(state[:, 2].abs() < 0.21) & (state[:, 0].abs() < 2.4)]
        if not len(state):
            break
    return answers, left, seconds


@torch.inference_mode()
def main() -> None:
    """Play eagerly and by graphs, and compare. Exits with an error if an answer differs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    policy = Policy().eval().requires_grad_(False)
    serve = gd.graphed(policy, dynamic={"observation": 0}, max_size=ENVIRONMENTS)
    serve.prewarm(torch.randn(ENVIRONMENTS, 4))

    for one in (policy, serve):  # both are warm before the clock runs
        play(one)
    expected, left, eager = play(policy)
    answers, same, graphs = play(serve)
    if left != same:
        raise SystemExit("the environments took another course than with eager")
    difference = max(float((a[k] - b[k]).abs().max()) for a, b in zip(answers, expected, strict=True) for k in a)
    print(f"{len(left)} steps with {left[0]} to {left[-1]} environments; {serve.stats}")
    print(f"largest difference from eager {difference:.1e}; eager {1e3 * eager:.1f} ms, graphs {1e3 * graphs:.1f} ms")
    if not difference < 1e-4:
        raise SystemExit("the answers differ from eager's")


if __name__ == "__main__":
    main()
