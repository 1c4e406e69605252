"""Eviction policies: what each one values, by name or installed."""

from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import CUDAGraphOptions
from graphdispatch.engines import CUDAGraphConfig, CUDAGraphEntry, CUDAGraphManager, EvictionPolicy
from graphdispatch.errors import ConfigError
from graphdispatch.memory import eviction
from graphdispatch.memory.cache import GraphCache
from graphdispatch.memory.eviction import GDSF, LFU, LRU, Frecency, available_evictions, make_eviction
from graphdispatch.memory.probation import Probation

from ..sized import MIB, entry, filled, gone

Make = Callable[[], EvictionPolicy]
POLICIES: dict[str, Make] = {
    "lru": LRU, "lfu": LFU, "gdsf": GDSF, "frecency": Frecency, "probation": lambda: Probation(3, GDSF()),
}  # fmt: skip


class Oldest(EvictionPolicy):
    """First captured, first out."""

    def scores(self, entries: Sequence[CUDAGraphEntry]) -> list[float]:
        return [entry.capture_time_ms for entry in entries]


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_every_policy_keeps_what_is_used(make: Make) -> None:
    """Unused entries go from the least recently used on, one that is replayed outlives a scan, and asking is free."""
    cache = GraphCache(3, eviction=make())
    entries = filled(cache, 0, 0, 0)
    assert [gone(cache.add(key, entry()))[0] for key in (3, 4, 5)] == entries
    used = cache.get(3)
    assert used is not None
    for key in range(6, 30):
        for _ in range(4):
            used.increment_replay()
        cache.add(key, entry())
    assert cache.get(3) is used
    held = list(cache)
    assert cache.limit.eviction.scores(held) == cache.limit.eviction.scores(held)


VALUES: list[tuple[Make, dict[str, float], dict[str, float], bool]] = [
    (LRU, {"replays": 1}, {"replays": 9}, True),
    (LFU, {"replays": 2}, {"replays": 1}, False),
    (GDSF, {"replays": 3}, {"replays": 2}, False),
    (GDSF, {"replays": 2, "capture_ms": 40.0}, {"replays": 3, "capture_ms": 10.0}, False),
    (GDSF, {"replays": 2, "nbytes": 2 * MIB}, {"replays": 3, "nbytes": 4 * MIB}, False),
    (GDSF, {"replays": 3, "nbytes": MIB}, {"replays": 2, "nbytes": 1}, False),  # small differences of bytes are noise
    (Frecency, {"replays": 3}, {"replays": 1}, False),
    (Frecency, {"replays": 2, "capture_ms": 40.0}, {"replays": 2, "capture_ms": 10.0}, False),
    (Frecency, {"replays": 2, "nbytes": MIB}, {"replays": 2, "nbytes": 4 * MIB}, False),
    (Frecency, {"replays": 200}, {"replays": 100_000}, True),  # above the cap uses count no further
    (lambda: Probation(3, LFU()), {"replays": 3}, {"replays": 1, "capture_ms": 1e6}, False),
]


@pytest.mark.parametrize(("make", "stays", "goes", "stays_is_later"), VALUES)
def test_what_a_policy_values(
    make: Make, stays: dict[str, float], goes: dict[str, float], stays_is_later: bool
) -> None:
    """The entry that is worth least goes, whichever was used last where that is not what the policy values."""
    for late in (True,) if stays_is_later else (True, False):
        cache = GraphCache(2, eviction=make())
        kinds: list[Any] = [goes, stays] if late else [stays, goes]
        for key, kind in enumerate(kinds):  # of a key that was captured before, in the same time
            cache.limit.eviction.scores([entry(capture_ms=kind.get("capture_ms", 1.0), key=key) for _ in range(3)])
        entries = [entry(**kind, key=key) for key, kind in enumerate(kinds)]
        for key, made in enumerate(entries):
            cache.add(key, made)
        for made in entries:
            made.increment_replay()
        assert gone(cache.make_room()) == [entries[not late]]


@pytest.mark.parametrize(("policy", "replays"), [("gdsf", 10), ("frecency", 9)])
def test_what_was_used_much_and_long_ago_goes(policy: str, replays: int) -> None:
    """It outlives some that were used later, and not many."""
    cache = GraphCache(2, eviction=policy)
    cache.add("favourite", entry(replays=replays, key="favourite"))
    for key in range(1000):
        cache.add(key, entry(replays=3, key=key))
        if cache.get("favourite") is None:
            break
    assert 1 < key < 100


def test_gdsf_counts_from_the_age_at_the_last_use() -> None:
    """An old entry that is used again after evictions scores higher than one that is not."""
    cache = GraphCache(3, eviction="gdsf")
    used, idle = entry(replays=4), entry(replays=4)
    cache.add("used", used)
    cache.add("idle", idle)
    cache.add(0, entry(replays=3))
    cache.add(1, entry(replays=1))  # evicts 0 and raises the age to its score
    used.increment_replay()
    assert cache.limit.eviction.scores([used, idle]) == pytest.approx([(3 + 5) / MIB, 4 / MIB])


def test_frecency_score_falls_with_the_time_since_the_last_use() -> None:
    """A score is uses cubed, the capture being the first, over the uses of any graph since."""
    idle, used = entry(MIB, replays=1), entry(MIB, key="other")
    for _ in range(3):
        used.increment_replay()
    assert Frecency().scores([idle, used]) == pytest.approx([2**3 / 5 / MIB, 4**3 / MIB])


def test_frecency_knows_a_graph_again() -> None:
    """A key captured anew begins with most of its uses, any other with none; a bounded number is known."""
    policy = Frecency()
    policy.evicted(entry(replays=99, key="known"), 0.0)
    known, new = entry(MIB, key="known"), entry(MIB, key="new")
    assert policy.scores([known])[0] / policy.scores([new])[0] == pytest.approx(76**3)
    for key in range(5000):
        policy.evicted(entry(key=key), 0.0)
    scores = [policy.scores([entry(MIB, key=key)])[0] for key in (0, 903, 904, 4999)]
    assert scores == pytest.approx([1 / MIB, 1 / MIB, 1.75**3 / MIB, 1.75**3 / MIB])


@pytest.mark.parametrize("make", [GDSF, Frecency])
@given(noise=st.lists(st.tuples(st.integers(0, 3), st.floats(1, 3.9)), max_size=40))
def test_noise_of_captures_orders_nothing(make: Make, noise: list[tuple[int, float]]) -> None:
    """Equal captures that were measured up to 3.9 times as long as each other score as if all had taken as long."""
    entries = [entry(replays=index % 3, key=key) for index, (key, _) in enumerate(noise)]
    quiet = make().scores(entries)
    for made, (_, factor) in zip(entries, noise, strict=True):
        made.capture_time_ms = 5.0 * factor
    assert make().scores(entries) == quiet


@pytest.mark.parametrize("captures", [1, 2, 3, 5])
def test_one_slow_capture_orders_nothing(captures: int) -> None:
    """A single capture that a busy machine held up for a hundred times as long does not tell what the graph costs."""
    policy = GDSF()
    usual, slow = ([entry(MIB, key=key) for _ in range(captures)] for key in ("usual", "slow"))
    slow[0].capture_time_ms = 100.0
    policy.scores([*usual, *slow])
    last = [entry(MIB, replays=1, key="usual"), entry(MIB, replays=1, key="slow")]
    assert len(set(policy.scores(last))) == 1


@pytest.mark.parametrize(("slower", "factor"), [(0.0, 1), (3.9, 1), (4.0, 4), (15.0, 4), (16.0, 16), (0.2, 0.25)])
def test_costs_count_in_steps_of_four(slower: float, factor: float) -> None:
    """Of a key that was captured three times, among others; a graph that somebody else captured costs the usual."""
    made = [entry(MIB, 1, slower if key == "odd" else 1.0, key) for key in ("odd", 1, 2, 3) for _ in range(3)]
    assert GDSF().scores(made) == pytest.approx([factor / MIB] * 3 + [1 / MIB] * 9)


def test_an_installed_policy_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point of the group is a name like those built in, and what it names is checked."""
    group = "graphdispatch.eviction"
    points = [EntryPoint("oldest", f"{__name__}:Oldest", group), EntryPoint("odd", "builtins:dict", group)]
    monkeypatch.setattr(EntryPoint, "load", lambda self: Oldest if self.name == "oldest" else dict)
    monkeypatch.setattr(eviction, "entry_points", lambda group: EntryPoints(points) if group == points[0].group else ())
    assert "oldest" in available_evictions()
    manager = CUDAGraphManager(CUDAGraphConfig(options=CUDAGraphOptions(eviction="oldest")))
    assert isinstance(manager.registry.cache.limit.eviction, Oldest)
    with pytest.raises(ConfigError, match="eviction 'odd' must be a subclass of EvictionPolicy, got 'builtins:dict'"):
        make_eviction("odd")


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: GraphCache(2, eviction="mru"), "eviction must be one of 'frecency', 'gdsf', 'lfu', 'lru', got 'mru'"),
        (lambda: GraphCache(2, eviction=3), "eviction must be one of .* got 3"),
        (lambda: Probation(-1, LRU()), "min_replays_to_keep must be an integer >= 0, got -1"),
        (lambda: Probation(True, LRU()), "min_replays_to_keep must be an integer >= 0, got True"),
    ],
)
def test_wrong_options_are_refused(make: Callable[[], Any], named: str) -> None:
    """The message lists what there is."""
    with pytest.raises(ConfigError, match=named):
        make()
