"""``SchedulerModel``: the steps into which continuous batching turns requests.

The rules are those of vLLM's V1 scheduler (first come, first served; chunked prefill) as its documentation describes
them: each running request that decodes gets one token; what is left of the token budget goes to the prompt that is
under way, then to waiting requests in the order of their arrival.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf

import numpy as np

from ..errors import ConfigError
from .traffic import LARGEST_STEP, Requests, Steps, read_only

__all__ = ["SchedulerModel"]


def _default_step_ms(num_tokens: int) -> float:
    return 8.0 + 0.03 * num_tokens


@dataclass(frozen=True)
class SchedulerModel:
    """Continuous batching of at most ``max_num_seqs`` requests and ``max_num_batched_tokens`` tokens in a step.

    Without ``chunked_prefill`` a prompt waits until the whole of it fits. ``step_ms(num_tokens)`` is how long a step
    takes; the default, 8 ms and 0.03 ms for each token, stands for an 8-billion-parameter model on one large GPU. The
    KV cache is taken to be large enough: nothing is preempted and no prefix is shared. Raises ``ConfigError`` for
    limits that no scheduler can have.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    chunked_prefill: bool = True
    step_ms: Callable[[int], float] = _default_step_ms

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if not self.max_num_seqs <= self.max_num_batched_tokens <= LARGEST_STEP:
            raise ConfigError(
                f"max_num_batched_tokens must be from max_num_seqs={self.max_num_seqs} to {LARGEST_STEP}, "
                f"got {self.max_num_batched_tokens}"
            )

    def run(self, requests: Requests) -> Steps:
        """The steps that serve all of ``requests``, in order. Raises ``ConfigError`` for a prompt that never fits."""
        longest = int(requests.prompt_tokens.max())
        if not self.chunked_prefill and longest > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens must be at least the longest prompt ({longest}) without chunked_prefill, "
                f"got {self.max_num_batched_tokens}"
            )
        return _Run(self, requests).steps()


class _Run:
    """One run: the clock, the requests that decode (by the step in which they end), and the prompt under way."""

    def __init__(self, model: SchedulerModel, requests: Requests) -> None:
        self.model = model
        self.arrivals = [*requests.arrival_ms.tolist(), inf]
        self.prompts = requests.prompt_tokens.tolist()
        self.outputs = requests.output_tokens.tolist()
        self.clock = 0.0
        self.step = 0
        self.next = 0
        """The first request that has not been admitted."""
        self.partial: tuple[int, int] | None = None
        """The prompt under way: what is left of it, and how many tokens it will put out."""
        self.ends: list[int] = []
        """A heap of the last steps of the requests that decode."""
        self.shapes: list[tuple[int, int, int]] = []
        """Tokens, requests, and how many equal steps of these follow each other."""

    def steps(self) -> Steps:
        while self.next < len(self.prompts) or self.ends or self.partial:
            if not self.ends and not self.partial:
                self.clock = max(self.clock, self.arrivals[self.next])
            self.advance()
        shapes = np.array(self.shapes, np.int64).T
        tokens, reqs = np.repeat(shapes[0], shapes[2]), np.repeat(shapes[1], shapes[2])
        return Steps(read_only(tokens), read_only(tokens == reqs), read_only(reqs))

    def advance(self) -> None:
        """One step, or as many as are alike: all requests decode, none ends before the last, none can join."""
        reqs = tokens = len(self.ends)
        finishing: list[int] = []
        for chunk, output in self.prefills(self.model.max_num_batched_tokens - tokens):
            tokens += chunk
            reqs += 1
            if output is not None:
                finishing.append(output)
        count = self.alike(tokens) if reqs == len(self.ends) else 1
        self.clock += count * self.model.step_ms(tokens)
        self.step += count
        self.shapes.append((tokens, reqs, count))
        while self.ends and self.ends[0] == self.step:
            heappop(self.ends)
        for output in finishing:
            # The last chunk of the prompt puts out the first token.
            if output > 1:
                heappush(self.ends, self.step + output - 1)

    def prefills(self, budget: int) -> list[tuple[int, int | None]]:
        """The prompt tokens of this step, by request: the chunk, and the output tokens of a prompt that it ends."""
        chunks: list[tuple[int, int | None]] = []
        room = self.model.max_num_seqs - len(self.ends)
        while budget and room:
            if self.partial is not None:
                left, output = self.partial
            elif self.arrivals[self.next] <= self.clock:
                left, output = self.prompts[self.next], self.outputs[self.next]
                if left > budget and not self.model.chunked_prefill:
                    break
                self.next += 1
            else:
                break
            chunk = min(left, budget)
            self.partial = (left - chunk, output) if chunk < left else None
            chunks.append((chunk, None if self.partial else output))
            budget -= chunk
            room -= 1
        return chunks

    def alike(self, tokens: int) -> int:
        """How many steps of ``tokens`` decoding requests follow each other."""
        until_end = self.ends[0] - self.step
        if len(self.ends) == self.model.max_num_seqs or self.arrivals[self.next] <= self.clock:
            return until_end
        until_arrival = (self.arrivals[self.next] - self.clock) / self.model.step_ms(tokens)
        return until_end if until_arrival >= until_end else max(1, ceil(until_arrival))
