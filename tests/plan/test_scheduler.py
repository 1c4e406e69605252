"""The scheduler model against its rules, and against steps that vLLM's own scheduler made."""

import csv
import gzip
import os
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from graphdispatch.errors import ConfigError
from graphdispatch.plan.scheduler import SchedulerModel
from graphdispatch.plan.traffic import Requests

TRACES = os.environ.get("GRAPHDISPATCH_TRACES")
"""A folder of traces that vLLM's own scheduler made, a row for each step."""

MODELS = {"azure_code_256": 256, "azure_conv_256_light": 256, "servegen_r1_64": 64}


def requests(*rows: tuple[float, int, int]) -> Requests:
    """Requests by arrival, prompt and output."""
    arrival, prompt, output = zip(*rows, strict=True)
    return Requests(np.array(arrival, float), np.array(prompt), np.array(output))


def shapes(model: SchedulerModel, *rows: tuple[float, int, int]) -> list[tuple[int, int]]:
    """Tokens and requests of each step."""
    steps = model.run(requests(*rows))
    assert steps.num_reqs is not None
    return list(zip(steps.num_tokens.tolist(), steps.num_reqs.tolist(), strict=True))


def unit(**limits: object) -> SchedulerModel:
    """A small scheduler whose steps take a millisecond."""
    return SchedulerModel(**{"step_ms": lambda _: 1.0, "max_num_seqs": 4, "max_num_batched_tokens": 8, **limits})  # type: ignore[arg-type]


def test_the_last_chunk_of_a_prompt_puts_out_the_first_token() -> None:
    """A request of p prompt and o output tokens takes one prompt step and o - 1 decode steps."""
    assert shapes(unit(), (0, 5, 3)) == [(5, 1), (1, 1), (1, 1)]
    assert shapes(unit(), (0, 5, 1)) == [(5, 1)]


def test_a_long_prompt_is_chunked_behind_the_requests_that_decode() -> None:
    """Decoding requests get their token first; the prompt takes what is left of the budget."""
    assert shapes(unit(), (0, 2, 4), (1, 20, 1)) == [(2, 1), (8, 2), (8, 2), (7, 2)]


def test_without_chunking_a_prompt_waits_until_it_fits() -> None:
    """A prompt of the whole budget waits for the running request, and one behind it waits too."""
    model = unit(chunked_prefill=False)
    assert shapes(model, (0, 2, 3), (1, 8, 1), (1, 1, 1)) == [(2, 1), (1, 1), (1, 1), (8, 1), (1, 1)]
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens must be at least the longest prompt \(9\)"):
        model.run(requests((0, 9, 1)))


def test_no_more_requests_run_than_allowed() -> None:
    """A request beyond the limit waits for one that ends."""
    assert shapes(unit(max_num_seqs=2), (0, 1, 2), (0, 1, 3), (0, 1, 1)) == [(2, 2), (2, 2), (2, 2)]


def test_an_idle_engine_waits_for_the_next_request() -> None:
    """No steps without requests."""
    assert shapes(unit(), (0, 1, 1), (100, 3, 1)) == [(1, 1), (3, 1)]


def test_requests_join_at_the_first_step_that_starts_after_their_arrival() -> None:
    """Runs of equal steps end where somebody joins, at the very step."""
    assert shapes(unit(), (0, 1, 6), (2.5, 4, 1)) == [(1, 1), (1, 1), (1, 1), (5, 2), (1, 1), (1, 1)]
    assert shapes(unit(), (0, 1, 6), (2.0, 4, 1))[2] == (5, 2)


@pytest.mark.parametrize(("seqs", "tokens"), [(0, 8), (9, 8), (4, 2**21)])
def test_limits_that_cannot_be_are_refused(seqs: int, tokens: int) -> None:
    """Each running request needs a token of the budget."""
    with pytest.raises(ConfigError, match="max_num_seqs"):
        SchedulerModel(max_num_seqs=seqs, max_num_batched_tokens=tokens)


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_equal_steps_are_those_of_single_steps(seed: int) -> None:
    """Skipping ahead changes nothing: a plain scheduler that makes each step by itself gives the same steps."""
    rng = np.random.default_rng(seed)
    count = 40
    arrival = np.sort(rng.integers(0, 60, count)).astype(float)
    traffic = Requests(arrival, rng.integers(1, 30, count), rng.integers(1, 12, count))
    model = unit(max_num_seqs=int(rng.integers(1, 9)), chunked_prefill=True)
    steps = model.run(traffic)
    assert steps.num_reqs is not None
    found = list(zip(steps.num_tokens.tolist(), steps.num_reqs.tolist(), strict=True))
    assert found == plain_schedule(model, traffic)
    assert steps.num_tokens.sum() == traffic.prompt_tokens.sum() + traffic.output_tokens.sum() - count


def plain_schedule(model: SchedulerModel, traffic: Requests) -> list[tuple[int, int]]:
    """Every step by itself: [tokens left of the prompt, tokens left to put out] of each running request."""
    waiting = [list(row) for row in zip(*(column.tolist() for column in traffic), strict=True)]
    running: list[list[int]] = []
    clock, found = 0.0, []
    while waiting or running:
        if not running:
            clock = max(clock, waiting[0][0])
        budget, reqs = model.max_num_batched_tokens, 0
        for request in running:
            share = min(max(request[0], 1), budget)
            request[0] -= share
            budget -= share
            reqs += share > 0
        while waiting and waiting[0][0] <= clock and budget and len(running) < model.max_num_seqs:
            _, prompt, output = waiting.pop(0)
            share = min(prompt, budget)
            running.append([prompt - share, output])
            budget -= share
            reqs += 1
        for request in running:
            request[1] -= request[0] <= 0
        running = [[max(left, 0), output] for left, output in running if output]
        found.append((model.max_num_batched_tokens - budget, reqs))
        clock += model.step_ms(found[-1][0])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_it_makes_the_steps_of_vllms_scheduler(name: str) -> None:
    """Requests read back out of a trace of vLLM's scheduler become that very trace again, step by step."""
    if TRACES is None:
        pytest.skip("GRAPHDISPATCH_TRACES names no folder of traces")
    with gzip.open(Path(TRACES) / f"{name}.csv.gz", "rt") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in islice(csv.DictReader(file), 20_000)]
    steps = SchedulerModel(max_num_seqs=MODELS[name]).run(read_back(rows))
    assert steps.num_reqs is not None
    made = zip(*(column[: len(rows)].tolist() for column in steps if column is not None), strict=True)
    assert list(made) == [(row["num_tokens"], bool(row["uniform_decode"]), row["num_reqs"]) for row in rows]


def read_back(rows: list[dict[str, float]]) -> Requests:
    """Requests that explain a trace: a prompt is cut wherever a step ends its chunk, who ends first is first come."""
    arrival: list[float] = []
    prompt: list[int] = []
    output: list[int] = []
    decoding: list[int] = []
    partial = False
    end = 0.0
    for index, row in enumerate(rows):
        tokens, reqs, prefills = int(row["num_tokens"]), int(row["num_reqs"]), int(row["num_prefill_reqs"])
        started = len(prompt) - partial
        joined = prefills - partial
        known = len(prompt) + joined + int(row["num_waiting"])
        # Whoever came while the engine was busy came at some time during the last step.
        came = row["t_ms"] if row["t_ms"] > end + 0.1 else row["t_ms"] - 1.0
        arrival += [came] * (known - len(arrival))
        prompt += [0] * joined
        output += [1] * joined
        share = tokens - (reqs - prefills)
        for request in range(started, len(prompt)):
            taken = 1 if request < len(prompt) - 1 else share
            prompt[request] += taken
            share -= taken
        following = rows[index + 1] if index + 1 < len(rows) else {"num_reqs": 0.0, "num_prefill_reqs": 0.0}
        stay = int(following["num_reqs"]) - int(following["num_prefill_reqs"])
        partial = tokens == 8192 and prefills > 0 and stay < reqs
        decoding += range(started, len(prompt) - partial)
        stay += partial
        del decoding[: reqs - stay]
        for request in decoding:
            output[request] += 1
        end = row["t_ms"] + 8 + 0.03 * tokens
    return Requests(np.array(arrival[: len(prompt)]), np.array(prompt), np.array(output))
