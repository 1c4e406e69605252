"""Batch traces: what an engine's scheduler put into each step."""

import random
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from ..plan.workload import LARGEST_SIZE, read_rows

__all__ = ["Step", "generate_trace", "read_trace"]

# The generated trace has the shape of a small chat service, in steps and tokens.
_ARRIVALS_PER_STEP = 0.06
_PROMPT_TOKENS = (4, 160)
_OUTPUT_TOKENS = (20, 200)
_TOKEN_BUDGET = 128


class Step(NamedTuple):
    """One step of a trace, with the columns of its file.

    ``num_prefill_reqs`` requests are still in their prompt; each other request schedules one token. ``max_query_len``
    is the largest number of tokens of one request. ``max_seq_len`` is the longest context, this step's tokens
    included. ``uniform_decode`` says that every request schedules exactly one token.
    """

    num_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    uniform_decode: bool
    num_prefill_reqs: int


_RANGES = {
    "num_tokens": (1, LARGEST_SIZE),
    "num_reqs": (1, LARGEST_SIZE),
    "max_query_len": (0, LARGEST_SIZE),
    "max_seq_len": (0, 10**9),
    "uniform_decode": (0, 1),
    "num_prefill_reqs": (0, LARGEST_SIZE),
}


def read_trace(path: str | Path, limit: int | None = None) -> list[Step]:
    """The first ``limit`` steps (default: all) of a trace: CSV, JSON lines or Parquet, also as .gz.

    Other columns are ignored. Raises ``ConfigError``, which names the file, the line and the column.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be >= 1 or None, got {limit}")
    steps = []
    for line, row in islice(read_rows(path), limit):
        where, values = f"{path}, line {line}", []
        for name, (least, most) in _RANGES.items():
            text = str(row.get(name))
            if not (text.isascii() and text.isdigit() and len(text) < 19 and least <= int(text) <= most):
                raise ConfigError(
                    f"{where}, column {name}: expected an integer from {least} to {most}, got {text[:40]!r}"
                )
            values.append(int(text))
        tokens, reqs, longest, context, is_decode, prefills = values
        steps.append(Step(tokens, reqs, longest, context, bool(is_decode), prefills))
        _check(steps[-1], where)
    if not steps:
        raise ConfigError(f"trace {path} has no steps; expected a header line and a line for each step")
    return steps


def _check(step: Step, where: str) -> None:
    tokens, reqs, *_ = step
    for name, is_right, expected in (
        ("num_tokens", tokens >= reqs, f"at least num_reqs={reqs}"),
        ("num_prefill_reqs", step.num_prefill_reqs <= reqs, f"at most num_reqs={reqs}"),
        (
            "uniform_decode",
            step.uniform_decode == (tokens == reqs),
            f"{int(tokens == reqs)} for {tokens} tokens of {reqs} requests",
        ),
        (
            "num_prefill_reqs",
            tokens == reqs or step.num_prefill_reqs > 0,
            f"at least 1, since {tokens} tokens of {reqs} requests are more than one for each",
        ),
    ):
        if not is_right:
            raise ConfigError(f"{where}, column {name}: expected {expected}, got {int(getattr(step, name))}")


def generate_trace(num_steps: int, max_num_reqs: int = 16, seed: int = 0) -> list[Step]:
    """A synthetic trace with at most ``max_num_reqs`` requests at once. The same arguments give the same trace.

    Requests arrive at random. Their prompts are scheduled in chunks within a token budget; then they decode.
    """
    if num_steps < 1:
        raise ConfigError(f"num_steps must be >= 1, got {num_steps}")
    if max_num_reqs < 1:
        raise ConfigError(f"max_num_reqs must be >= 1, got {max_num_reqs}")
    rng = random.Random(seed)
    running: list[_Request] = []
    steps = []
    for _ in range(num_steps):
        arrives = not running or rng.random() < _ARRIVALS_PER_STEP
        if arrives and len(running) < max_num_reqs:
            running.append(_Request(rng.randint(*_PROMPT_TOKENS), rng.randint(*_OUTPUT_TOKENS)))
        steps.append(_schedule(running))
        running = [request for request in running if request.computed < request.total]
    return steps


class _Request:
    """A request of the generated trace: prompt length, total length, and the tokens computed so far."""

    def __init__(self, prompt: int, output: int) -> None:
        self.prompt = prompt
        self.total = prompt + output
        self.computed = 0


def _schedule(running: list[_Request]) -> Step:
    decoding = [request for request in running if request.computed >= request.prompt]
    budget = _TOKEN_BUDGET - len(decoding)
    shares = [(request, 1) for request in decoding]
    for request in running:
        if request.computed < request.prompt and budget > 0:
            chunk = min(request.prompt - request.computed, budget)
            budget -= chunk
            shares.append((request, chunk))
    for request, share in shares:
        request.computed += share
    tokens = sum(share for _, share in shares)
    longest = max(share for _, share in shares)
    context = max(request.computed for request, _ in shares)
    return Step(tokens, len(shares), longest, context, longest == 1, len(shares) - len(decoding))
