"""A generated trace: which tokens the scheduler of a small chat service puts into each step."""

import random
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Step", "generate_trace"]

_BURSTS_PER_STEP = 0.08
_LARGEST_BURST = 8
_TOKEN_BUDGET = 128


class Step(NamedTuple):
    """One step. Each row is one token: of the request in ``slots[i]``, at ``positions[i]`` of its sequence."""

    slots: list[int]
    positions: list[int]

    @property
    def num_tokens(self) -> int:
        """The number of rows."""
        return len(self.slots)

    @property
    def num_reqs(self) -> int:
        """The number of requests that have a row."""
        return len(set(self.slots))


@dataclass
class _Request:
    slot: int
    prompt: int
    total: int
    done: int = 0


def generate_trace(num_steps: int, slots: int = 16, seed: int = 0, *, window: int = 64) -> list[Step]:
    """A trace in which requests arrive in bursts. The same arguments give the same trace.

    Decoding requests come first in a step, with one token each. Then come prompts, in chunks within a budget of 128
    tokens for the step.

    Args:
        num_steps: The number of steps.
        slots: The most requests that run at once, from 1 to 128.
        seed: Seeds arrivals and lengths.
        window: The longest sequence in tokens, at least 8: a prompt takes at most half of it, and an output, too.
    """
    rng = random.Random(seed)
    free, running = list(range(slots)), list[_Request]()
    steps = []
    for _ in range(num_steps):
        if not running or rng.random() < _BURSTS_PER_STEP:
            for _ in range(min(len(free), rng.randint(1, _LARGEST_BURST))):
                prompt, output = rng.randint(2, window // 2), rng.randint(window // 8, window // 2)
                running.append(_Request(free.pop(), prompt, prompt + output))
        step = Step([], [])
        for request in sorted(running, key=lambda each: each.done < each.prompt):
            count = min(max(1, request.prompt - request.done), _TOKEN_BUDGET - step.num_tokens)
            step.slots.extend([request.slot] * count)
            step.positions.extend(range(request.done, request.done + count))
            request.done += count
        steps.append(step)
        free += [request.slot for request in running if request.done == request.total]
        running = [request for request in running if request.done < request.total]
    return steps
