"""Batch traces: what an engine's scheduler put into each step."""

import csv
import gzip
import random
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TextIO

from ..errors import ConfigError

__all__ = ["Step", "generate_trace", "read_trace"]

# The generated trace has the shape of a small chat service, in steps and tokens.
_ARRIVALS_PER_STEP = 0.06
_PROMPT_TOKENS = (4, 160)
_OUTPUT_TOKENS = (20, 200)
_TOKEN_BUDGET = 128

_MAX_DIGITS = 9


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


def read_trace(path: str | Path, limit: int | None = None) -> list[Step]:
    """The first ``limit`` steps (default: all) of a ``.csv`` or ``.csv.gz`` file. Other columns are ignored.

    Raises ``ConfigError``, which names the file and, if possible, the line and the column.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be >= 1 or None, got {limit}")
    try:
        with _open(path) as file:
            steps = list(islice(_parse(path, file), limit))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
        raise ConfigError(f"trace {path} cannot be read: {error}") from error
    if not steps:
        raise ConfigError(f"trace {path} has no steps; expected a header line and a line for each step")
    return steps


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


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _parse(path: Path, file: TextIO) -> Iterator[Step]:
    reader = csv.DictReader(file)
    missing = [name for name in Step._fields if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"trace {path} lacks the column(s) {', '.join(missing)} in its first line")
    for record in reader:
        where = f"trace {path}, line {reader.line_num}"
        tokens, reqs, query, context, uniform, prefills = (
            _number(record[name], f"{where}, column {name}") for name in Step._fields
        )
        if uniform > 1:
            raise ConfigError(f"{where}, column uniform_decode: expected 0 or 1, got {uniform}")
        step = Step(tokens, reqs, query, context, bool(uniform), prefills)
        _check(step, where)
        yield step


def _number(text: str | None, where: str) -> int:
    text = "" if text is None else text.strip()
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise ConfigError(f"{where}: expected an integer of at most {_MAX_DIGITS} digits, got {text[:40]!r}")
    return int(text)


def _check(step: Step, where: str) -> None:
    if step.num_reqs < 1:
        raise ConfigError(f"{where}, column num_reqs: expected at least one request, got {step.num_reqs}")
    if step.num_tokens < step.num_reqs:
        raise ConfigError(
            f"{where}, column num_tokens: expected at least num_reqs={step.num_reqs}, got {step.num_tokens}"
        )
    if step.num_prefill_reqs > step.num_reqs:
        raise ConfigError(
            f"{where}, column num_prefill_reqs: expected at most num_reqs={step.num_reqs}, got {step.num_prefill_reqs}"
        )
    if step.uniform_decode != (step.num_tokens == step.num_reqs):
        raise ConfigError(
            f"{where}, column uniform_decode: expected {int(step.num_tokens == step.num_reqs)} for "
            f"{step.num_tokens} tokens of {step.num_reqs} requests, got {int(step.uniform_decode)}"
        )
    if step.num_tokens > step.num_reqs and step.num_prefill_reqs == 0:
        raise ConfigError(
            f"{where}, column num_prefill_reqs: expected at least 1, since {step.num_tokens} tokens of "
            f"{step.num_reqs} requests are more than one for each, got 0"
        )
