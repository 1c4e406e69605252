"""The adaptive policy on simulated devices: total cost, thresholds, captures, trials, saved state and threads."""

import json
import random
import threading
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from graphdispatch.decide.adaptive import AdaptiveDispatchPolicy
from graphdispatch.decide.adaptive_state import Place, Standing
from graphdispatch.decide.estimates import CostCurve, bucket_of
from graphdispatch.demo.trace import generate_trace
from graphdispatch.descriptors import DispatchKey
from graphdispatch.errors import ConfigError
from graphdispatch.modes import DispatchMode
from graphdispatch.sizes import named_sizes

EAGER, GRAPH, PIECEWISE = DispatchMode.EAGER, DispatchMode.CUDAGRAPH, DispatchMode.PIECEWISE
BOTH = (GRAPH, EAGER)
SIZES = named_sizes("vllm", 512)
CHANGE = 0.4

Cost = Callable[[int, float], float]

KEYS = [
    DispatchKey(step.num_tokens, step.num_reqs, step.max_seq_len, step.num_prefill_reqs > 0)
    for step in generate_trace(20_000, 64, seed=1)
]


class Device(NamedTuple):
    """Milliseconds by tokens and progress, eager and by graph; ``noise`` is the spread of the logarithm."""

    eager: Cost
    graph: Cost
    noise: float = 0.05

    def costs(self, tokens: int, progress: float) -> dict[DispatchMode, float]:
        padded = SIZES[bisect_left(SIZES, tokens)]
        return {GRAPH: self.graph(padded, progress), EAGER: self.eager(tokens, progress)}


DEVICES = {
    "graphs always win": Device(lambda n, _: 6 + 0.02 * n, lambda n, _: 2 + 0.02 * n),
    "graphs always lose": Device(lambda n, _: 2 + 0.02 * n, lambda n, _: 3 + 0.03 * n),
    "cross-over in size": Device(lambda n, _: 4 + 0.02 * n, lambda n, _: 1.5 + 0.06 * n),
    "padding cliff": Device(lambda n, _: 3 + 0.02 * n, lambda n, _: 1 + 0.02 * n + 6 * (n > 48)),
    "graphs become slow": Device(lambda n, _: 4 + 0.02 * n, lambda n, t: (2 + 0.02 * n) * (3 if t > CHANGE else 1)),
    "graphs become fast": Device(lambda n, _: 4 + 0.02 * n, lambda n, t: (2 + 0.02 * n) * (1 if t > CHANGE else 3)),
    "noise, graphs win": Device(lambda n, _: 5 + 0.02 * n, lambda n, _: 4 + 0.02 * n, 0.5),
    "noise, graphs lose": Device(lambda n, _: 4 + 0.02 * n, lambda n, _: 5 + 0.02 * n, 0.5),
}


@pytest.mark.parametrize("name", DEVICES)
def test_total_is_near_the_best_mode_and_never_far_above_the_default(name: str) -> None:
    """Within 2 % of the best mode for each step, and at most 1.05 times the default, with late, shuffled records.

    The 2 % leave out a warm-up of a tenth of the steps, at the start and after a drift.
    """
    device, rng, policy = DEVICES[name], random.Random(7), AdaptiveDispatchPolicy(sizes=SIZES)
    waiting: list[tuple[DispatchKey, DispatchMode, float]] = []
    spent = default = late = best = 0.0
    for step, key in enumerate(KEYS):
        progress = step / len(KEYS)
        costs = device.costs(key.num_tokens, progress)
        mode = policy.select_mode(key, BOTH)
        waiting.append((key, mode, costs[mode] * rng.lognormvariate(-(device.noise**2) / 2, device.noise)))
        if len(waiting) > 8:
            policy.record(*waiting.pop(rng.randrange(len(waiting))))
        spent += costs[mode]
        default += costs[GRAPH]
        if 0.1 <= progress < CHANGE or progress >= CHANGE + 0.1:
            late += costs[mode]
            best += min(costs.values())
    assert late <= 1.02 * best
    assert spent <= 1.05 * default


def feed(policy: AdaptiveDispatchPolicy, mode: DispatchMode, tokens: int, cost: float, times: int = 20) -> None:
    """Record one cost a few times."""
    for _ in range(times):
        policy.record(DispatchKey(tokens, 1), mode, cost)


def chosen(policy: AdaptiveDispatchPolicy, tokens: int) -> DispatchMode:
    """The preferred mode, without a trial: the first answer may be one."""
    policy.select_mode(DispatchKey(tokens, 1), BOTH)
    return policy.select_mode(DispatchKey(tokens, 1), BOTH)


def test_without_records_it_prefers_graphs() -> None:
    """A new policy decides as the default policy does: full graph, then piecewise, then eager."""
    policy = AdaptiveDispatchPolicy()
    key = DispatchKey(8, 8)
    assert policy.select_mode(key, (EAGER, PIECEWISE, GRAPH)) is GRAPH
    assert policy.select_mode(key, (EAGER, PIECEWISE)) is PIECEWISE
    assert policy.select_mode(key, (EAGER,)) is EAGER


def test_a_batch_runs_eagerly_where_its_large_graph_is_slower() -> None:
    """With sizes 256 and 512, a batch of 260 goes eager and one of 500 takes the graph, though neither was measured."""
    policy = AdaptiveDispatchPolicy(sizes=(256, 512))
    for _ in range(20):
        for tokens in (240, 480):
            feed(policy, EAGER, tokens, 0.02 * tokens, 1)
        feed(policy, GRAPH, 250, 4.0, 1)
        feed(policy, GRAPH, 480, 8.0, 1)
    assert chosen(policy, 260) is EAGER
    assert chosen(policy, 500) is GRAPH


def test_one_outlier_does_not_turn_a_decision() -> None:
    """A single stall of a hundred times the usual cost leaves the choice as it was, and the estimate nearly so."""
    policy = AdaptiveDispatchPolicy()
    feed(policy, EAGER, 8, 2.0)
    feed(policy, GRAPH, 8, 1.0)
    policy.record(DispatchKey(8, 1), GRAPH, 100.0)
    assert chosen(policy, 8) is GRAPH
    assert policy.estimates(DispatchKey(8, 1))[GRAPH].mean < 1.1


def test_a_small_difference_does_not_turn_a_decision() -> None:
    """Eager that is half a percent faster does not displace the graph, however often it is measured."""
    policy = AdaptiveDispatchPolicy(window=10_000)
    for _ in range(3000):
        feed(policy, EAGER, 8, 0.995, 1)
        feed(policy, GRAPH, 8, 1.0, 1)
    assert chosen(policy, 8) is GRAPH


def test_a_mode_that_became_slow_is_dropped_and_gets_another_chance() -> None:
    """A graph that became twenty times slower is left for eager within a few records, and is tried again later."""
    policy = AdaptiveDispatchPolicy()
    key = DispatchKey(8, 1)
    feed(policy, EAGER, 8, 1.0)
    feed(policy, GRAPH, 8, 0.5)
    feed(policy, GRAPH, 8, 20.0, 8)
    assert chosen(policy, 8) is EAGER
    tried = []
    for _ in range(8000):
        tried.append(policy.select_mode(key, BOTH))
        policy.record(key, tried[-1], 1.0 if tried[-1] is EAGER else 20.0)
    assert 1 <= tried.count(GRAPH) <= 5


def test_a_settled_place_is_reviewed_at_every_sixteenth_record() -> None:
    """Reviews come after 1, 2, 4, 8 and then 16 further records; after news they start over."""
    standing, reviews = Standing(Place(False, 8, 8), (CostCurve(100),) * 3), []
    for standing.sightings in range(64):
        if standing.sightings >= standing.due:
            reviews.append(standing.sightings)
            standing.reviewed(news=standing.sightings in (0, 47))
    assert reviews == [0, 1, 3, 7, 15, 31, 47, 48, 50, 54, 62]


def test_news_of_one_size_reaches_the_guess_for_another() -> None:
    """A size that never ran follows its neighbour at once when the neighbour's graph becomes slow."""
    policy = AdaptiveDispatchPolicy()
    feed(policy, EAGER, 32, 2.0)
    feed(policy, GRAPH, 32, 1.0)
    assert policy.should_use_graph(DispatchKey(36, 1), True)
    feed(policy, GRAPH, 32, 20.0, 8)
    assert not policy.should_use_graph(DispatchKey(36, 1), True)


def test_a_limit_within_a_bucket_parts_it() -> None:
    """Batches on both sides of a limit share measurements, not the choice."""
    policy = AdaptiveDispatchPolicy(sizes=(1024,), max_tokens_for_graph=1000)
    for _ in range(40):
        for tokens in (1000, 1001):
            feed(policy, GRAPH, tokens, 1.0, 1)
            feed(policy, EAGER, tokens, 5.0, 1)
    assert [chosen(policy, tokens) for tokens in (1000, 1001)] == [GRAPH, EAGER]


def test_batches_beyond_the_largest_graph_share_their_places() -> None:
    """Above the capture sizes no graph tells batches apart, so that one bucket is one place."""
    policy = AdaptiveDispatchPolicy(sizes=(8,))
    for tokens in range(513, 577):
        feed(policy, EAGER, tokens, 1.0, 1)
    assert [place["graph_size"] for place in policy.to_dict()["places"]] == [576]


def test_what_was_idle_longest_is_forgotten_first() -> None:
    """Of more sizes than there is room for, the one that keeps coming stays, and the latest do."""
    policy = AdaptiveDispatchPolicy(history_size=16)
    for tokens in range(16, 64):
        feed(policy, EAGER, 8, 1.0, 1)
        feed(policy, EAGER, tokens, 1.0, 1)
        state = policy.to_dict()
        places = [place["graph_size"] for place in state["places"]]
        cells = [cell[0] for curve in state["curves"] for cell in curve["cells"]]
        assert {8, tokens} <= set(places)
        assert {8, bucket_of(tokens)} <= set(cells)
        assert min(14, tokens - 14) <= len(places) <= 16
        assert len(cells) == len(set(cells)) <= 16
    assert len(cells) >= 14


def test_trials_stay_within_their_budget() -> None:
    """Trials of a mode that costs fifty times as much cost at most the share given, and one trial more."""
    policy = AdaptiveDispatchPolicy(exploration=0.01)
    key, trials = DispatchKey(8, 1), 0
    for _ in range(20_000):
        mode = policy.select_mode(key, BOTH)
        trials += mode is EAGER
        policy.record(key, mode, 50.0 if mode is EAGER else 1.0)
    extra, total = 49.0 * trials, 20_000 + 49.0 * trials
    assert 0 < extra <= 0.01 * total + 49.0


def test_without_a_budget_there_are_no_trials() -> None:
    """With ``exploration=0`` only the graph ever runs, since nothing says that eager is faster."""
    policy = AdaptiveDispatchPolicy(exploration=0.0)
    key = DispatchKey(8, 1)
    for _ in range(500):
        mode = policy.select_mode(key, BOTH)
        assert mode is GRAPH
        policy.record(key, mode, 1.0)


def test_prefill_and_decode_are_learnt_apart() -> None:
    """A prefill batch for which eager is faster leaves decode batches of the same size on the graph."""
    policy = AdaptiveDispatchPolicy()
    feed(policy, GRAPH, 8, 1.0)
    feed(policy, EAGER, 8, 3.0)
    prefill = DispatchKey(8, 1, 8, True)
    for _ in range(20):
        policy.record(prefill, GRAPH, 3.0)
        policy.record(prefill, EAGER, 1.0)
    assert not policy.should_use_graph(prefill, True)
    assert policy.should_use_graph(DispatchKey(8, 1), True)


def test_thresholds_follow_the_measurements() -> None:
    """Where large graphs lose, the upper threshold comes down to the largest size whose graph wins."""
    policy = AdaptiveDispatchPolicy(max_tokens_for_graph=1000)
    assert (policy.min_tokens_for_graph, policy.max_tokens_for_graph) == (1, 1000)
    for tokens in (8, 32, 128, 512):
        feed(policy, EAGER, tokens, 4.0)
        feed(policy, GRAPH, tokens, 1.0 if tokens < 100 else 9.0)
    assert (policy.min_tokens_for_graph, policy.max_tokens_for_graph) == (1, 32)


def test_thresholds_say_when_no_graph_wins() -> None:
    """The upper threshold is 0 where every measured size prefers eager."""
    policy = AdaptiveDispatchPolicy()
    for _ in range(20):
        feed(policy, GRAPH, 8, 2.0, 1)
        feed(policy, EAGER, 8, 1.0, 1)
    assert policy.max_tokens_for_graph == 0
    assert "no size" in repr(policy)


def test_limits_hold_whatever_was_measured() -> None:
    """Outside of the limits given, the answer is eager even if the graph is faster."""
    policy = AdaptiveDispatchPolicy(min_tokens_for_graph=4, max_tokens_for_graph=16)
    for tokens in (2, 8, 32):
        feed(policy, GRAPH, tokens, 1.0)
        feed(policy, EAGER, tokens, 5.0)
    assert [chosen(policy, tokens) for tokens in (2, 8, 32)] == [EAGER, GRAPH, EAGER]


def test_a_capture_must_pay_for_itself() -> None:
    """A size is captured once its sightings times the saving of each exceed what a capture costs."""
    policy = AdaptiveDispatchPolicy(sizes=(8, 16))
    policy.record_capture(DispatchKey(8, 1), 100.0)
    feed(policy, GRAPH, 8, 1.0)
    feed(policy, EAGER, 8, 2.0)
    seen = 0
    while not policy.should_capture(DispatchKey(16, 1)):
        feed(policy, EAGER, 16, 6.0, 1)
        seen += 1
    estimates = policy.estimates(DispatchKey(16, 1))
    saving = estimates[EAGER].mean - estimates[GRAPH].mean
    assert (seen - 1) * saving < 100.0 <= seen * saving * 1.01


def test_unmeasured_captures_wait_for_the_second_sighting() -> None:
    """Before a graph was ever measured, the first sighting captures nothing and the second does."""
    policy = AdaptiveDispatchPolicy()
    feed(policy, EAGER, 8, 1.0, 1)
    assert not policy.should_capture(DispatchKey(8, 1))
    feed(policy, EAGER, 8, 1.0, 1)
    assert policy.should_capture(DispatchKey(8, 1))


def test_graphs_that_lose_are_not_captured() -> None:
    """However often a size comes, no graph is captured where graphs are slower."""
    policy = AdaptiveDispatchPolicy()
    feed(policy, GRAPH, 8, 2.0)
    feed(policy, EAGER, 8, 1.0, 1000)
    assert not policy.should_capture(DispatchKey(8, 1))


def test_it_saves_and_loads(tmp_path: Path) -> None:
    """A loaded policy has the saved one's state and decides as it does."""
    policy = AdaptiveDispatchPolicy(sizes=SIZES)
    for key in KEYS[:500]:
        mode = policy.select_mode(key, BOTH)
        policy.record(key, mode, DEVICES["graphs always lose"].costs(key.num_tokens, 0)[mode])
    policy.save(tmp_path / "policy.json")
    loaded = AdaptiveDispatchPolicy.load(tmp_path / "policy.json")
    assert loaded.to_dict() == policy.to_dict()
    assert repr(loaded) == repr(policy)
    assert [file.name for file in tmp_path.iterdir()] == ["policy.json"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 2}, "version"),
        ({"records": -1}, "records"),
        ({"spent_ms": "much"}, "spent_ms"),
        ({"history_size": 0}, "history_size must be"),
        ({"window": 0}, "window must be"),
        ({"exploration": 2.0}, "exploration must be"),
        ({"limits": [4, 2]}, "max_tokens_for_graph must be"),
        ({"sizes": [8, 4]}, "sizes must be strictly increasing"),
        ({"surprise": 1}, "surprise"),
        ({"curves": [{"mode": "eager", "prefill": False, "cells": [[8, 8.0, float("nan"), 0, 1, 1.0, 1]]}]}, "cells"),
        ({"curves": [{"mode": "eager", "prefill": False, "cells": [[8, 8.0, 1.0, 0, 1, 1.0, 1]]}]}, "as many records"),
        ({"places": [{"prefill": False, "graph_size": 8, "bucket": 8, "order": ["eager"] * 3, "seen": 1}]}, "each of"),
        ({"rng": random.Random()}, "to_dict"),
    ],
)
def test_a_state_that_is_not_valid_is_refused(change: dict[str, Any], match: str) -> None:
    """Every wrong value in a saved state is a ``ConfigError`` that names it."""
    state = AdaptiveDispatchPolicy().to_dict() | change
    with pytest.raises(ConfigError, match=match):
        AdaptiveDispatchPolicy.from_dict(state)


@pytest.mark.parametrize("text", ["", "[]", "{", json.dumps({"version": 1})])
def test_a_file_that_holds_no_policy_is_refused_by_name(tmp_path: Path, text: str) -> None:
    """Loading another file is a ``ConfigError`` that names the file."""
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json: the saved policy is not valid"):
        AdaptiveDispatchPolicy.load(path)


@pytest.mark.parametrize("latency", [-1.0, float("nan"), float("inf")])
def test_impossible_latencies_are_refused(latency: float) -> None:
    """A latency that no step can have is a ``ConfigError``, not a poisoned estimate."""
    with pytest.raises(ConfigError, match="latency must be a finite number of milliseconds"):
        AdaptiveDispatchPolicy().record(DispatchKey(8, 1), GRAPH, latency)


def test_only_modes_that_run_are_recorded() -> None:
    """``HYBRID`` is a permission, not a way to run."""
    with pytest.raises(ConfigError, match="record what really ran"):
        AdaptiveDispatchPolicy().record(DispatchKey(8, 1), DispatchMode.HYBRID, 1.0)


def test_threads_may_select_and_record_at_once() -> None:
    """Eight threads that select and record lose no record and raise nothing."""
    policy = AdaptiveDispatchPolicy(history_size=20, sizes=SIZES)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(500):
                key = DispatchKey(rng.randint(1, 600), 1)
                policy.record(key, policy.select_mode(key, BOTH), rng.random())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert policy.to_dict()["records"] == 4000


def test_a_restart_after_a_drift_follows_the_new_cost() -> None:
    """A curve that measured 1 ms a hundred times says about 3 ms after six records of 3 ms."""
    curve = CostCurve(window=100)
    for now in range(100):
        curve.add(8, 8, 1.0, now)
    for now in range(100, 106):
        curve.add(8, 8, 3.0, now)
    estimate = curve.at(8, 8, 106)
    assert estimate is not None
    assert 2.4 < estimate.mean < 3.0


def test_buckets_end_at_multiples_of_their_width() -> None:
    """Up to 16 tokens each has its own bucket; 256 and 257 never share one."""
    assert [bucket_of(tokens) for tokens in (1, 16, 17, 256, 257, 288, 289)] == [1, 16, 18, 256, 288, 288, 320]


def test_beyond_the_measured_sizes_cost_grows_by_less_than_size() -> None:
    """Four times the size is guessed to cost twice as much, with an error that grows with the distance."""
    curve = CostCurve(window=100)
    curve.add(16, 16, 4.0, 0)
    near, far = curve.at(32, 32, 1), curve.at(64, 64, 1)
    assert near is not None
    assert far is not None
    assert far.mean == pytest.approx(8.0)
    assert far.error > near.error
