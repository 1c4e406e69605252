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

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "gdsf": GDSF,
    "frecency": Frecency,
    "probation": lambda: Probation(3, GDSF()),
}
every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)


class Oldest(EvictionPolicy):
    """First captured, first out."""

    def scores(self, entries: Sequence[CUDAGraphEntry]) -> list[float]:
        return [entry.capture_time_ms for entry in entries]


def measured(cache: GraphCache, key: int, **kind: Any) -> CUDAGraphEntry:
    """An entry of this kind whose key has been captured three times before, in the same time."""
    cache.limit.eviction.scores([entry(capture_ms=kind.get("capture_ms", 1.0), key=key) for _ in range(3)])
    return entry(**kind, key=key)


@every_policy
def test_the_unused_go_in_the_order_of_their_capture(make: Callable[[], EvictionPolicy]) -> None:
    """Entries that differ in nothing else go from the least recently used on."""
    cache = GraphCache(3, eviction=make())
    entries = filled(cache, 0, 0, 0)
    order = [gone(cache.add(key, entry()))[0] for key in (3, 4, 5)]
    assert order == entries


@every_policy
def test_what_is_used_stays(make: Callable[[], EvictionPolicy]) -> None:
    """An entry that is replayed between all captures outlives a scan of others."""
    cache = GraphCache(3, eviction=make())
    used, *_ = filled(cache, 0, 0, 0)
    for key in range(3, 30):
        for _ in range(4):
            used.increment_replay()
        cache.add(key, entry())
    assert cache.get(0) is used


@every_policy
def test_scores_are_only_read(make: Callable[[], EvictionPolicy]) -> None:
    """Asking twice gives the same."""
    policy = make()
    entries = [entry(MIB, replays) for replays in (0, 1, 5)]
    assert policy.scores(entries) == policy.scores(entries)


def test_lru_values_the_last_use() -> None:
    """Many replays long ago count for nothing."""
    cache = GraphCache(2, eviction="lru")
    first, _ = entry(replays=9), entry()
    cache.add(0, first)
    cache.add(1, entry(replays=1))
    assert gone(cache.make_room()) == [first]


def test_lfu_values_the_number_of_uses() -> None:
    """One replay less, and a later last use does not help."""
    cache = GraphCache(2, eviction="lfu")
    cache.add(0, entry(replays=2))
    late = entry(replays=1)
    cache.add(1, late)
    assert gone(cache.make_room()) == [late]


@pytest.mark.parametrize(
    ("stays", "goes"),
    [
        ({"replays": 3}, {"replays": 2}),
        ({"replays": 2, "capture_ms": 40.0}, {"replays": 3, "capture_ms": 10.0}),
        ({"replays": 2, "nbytes": 2 * MIB}, {"replays": 3, "nbytes": 4 * MIB}),
        ({"replays": 3, "nbytes": MIB}, {"replays": 2, "nbytes": 1}),
    ],
    ids=["uses", "capture time", "bytes", "small differences of bytes are noise"],
)
def test_gdsf_values_uses_times_time_for_each_byte(stays: dict[str, float], goes: dict[str, float]) -> None:
    """The entry of least replays x capture time / bytes goes, whichever was used last."""
    for late in (True, False):
        cache = GraphCache(2, eviction="gdsf")
        kinds = (stays, goes) if late else (goes, stays)
        entries = [measured(cache, key, **kind) for key, kind in enumerate(kinds)]
        for key, made in enumerate(entries):
            cache.add(key, made)
        assert gone(cache.make_room()) == [entries[late]]


def test_gdsf_lets_go_of_what_was_used_much_and_long_ago() -> None:
    """Each eviction raises the score of what is used from then on, until the old favourite has the lowest."""
    cache = GraphCache(2, eviction="gdsf")
    favourite = entry(replays=10)
    cache.add("favourite", favourite)
    for key in range(20):
        cache.add(key, entry(replays=3))
        if cache.get("favourite") is None:
            break
    assert 1 < key < 10


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


@pytest.mark.parametrize(
    ("stays", "goes"),
    [
        ({"replays": 3}, {"replays": 1}),
        ({"replays": 2, "capture_ms": 40.0}, {"replays": 2, "capture_ms": 10.0}),
        ({"replays": 2, "nbytes": MIB}, {"replays": 2, "nbytes": 4 * MIB}),
    ],
    ids=["uses", "capture time", "bytes"],
)
def test_frecency_values_uses_time_and_bytes(stays: dict[str, float], goes: dict[str, float]) -> None:
    """What is used little, is cheap to capture or is large goes first, be it used a little later or earlier."""
    for late in (True, False):
        cache = GraphCache(2)
        kinds = (stays, goes) if late else (goes, stays)
        entries = [measured(cache, key, **kind) for key, kind in enumerate(kinds)]
        for key, made in enumerate(entries):
            cache.add(key, made)
        entries[0].increment_replay()
        entries[1].increment_replay()
        assert gone(cache.make_room()) == [entries[late]]


def test_frecency_score_falls_with_the_time_since_the_last_use() -> None:
    """A score is uses cubed, the capture being the first, over the uses of any graph since."""
    idle, used = entry(MIB, replays=1), entry(MIB, key="other")
    for _ in range(3):
        used.increment_replay()
    assert Frecency().scores([idle, used]) == pytest.approx([2**3 / 5 / MIB, 4**3 / MIB])


def test_frecency_gives_a_frequent_graph_more_time() -> None:
    """A graph with many uses outlives one with few that was used later, and goes when it is out of use for long."""
    cache = GraphCache(2)
    favourite = entry(replays=9, key="favourite")
    cache.add("favourite", favourite)
    for key in range(1000):
        cache.add(key, entry(replays=3, key=key))
        if cache.get("favourite") is None:
            break
    assert 3 < key < 100


def test_frecency_counts_no_further_than_its_cap() -> None:
    """Two graphs that were used above the cap differ by their last use alone."""
    cache = GraphCache(2)
    favourite, later = entry(replays=100_000, key=0), entry(replays=200, key=1)
    cache.add(0, favourite)
    cache.add(1, later)
    assert gone(cache.make_room()) == [favourite]


def test_frecency_knows_a_graph_again() -> None:
    """A key that was evicted and captured anew begins with most of its uses; any other begins with none."""
    policy = Frecency()
    policy.evicted(entry(replays=99, key="known"), 0.0)
    known, new = entry(MIB, key="known"), entry(MIB, key="new")
    assert policy.scores([known])[0] / policy.scores([new])[0] == pytest.approx(76**3)


def test_frecency_remembers_a_bounded_number_of_keys() -> None:
    """The keys that left longest ago are forgotten."""
    policy = Frecency()
    for key in range(5000):
        policy.evicted(entry(key=key), 0.0)
    scores = [policy.scores([entry(MIB, key=key)])[0] for key in (0, 903, 904, 4999)]
    assert scores == pytest.approx([1 / MIB, 1 / MIB, 1.75**3 / MIB, 1.75**3 / MIB])


@pytest.mark.parametrize("make", [GDSF, Frecency])
@given(noise=st.lists(st.tuples(st.integers(0, 3), st.floats(1, 3.9)), max_size=40))
def test_noise_of_captures_orders_nothing(make: Callable[[], EvictionPolicy], noise: list[tuple[int, float]]) -> None:
    """Equal captures that were measured up to 3.9 times as long as each other score as if all had taken as long."""
    entries = [entry(replays=index % 3, key=key) for index, (key, _) in enumerate(noise)]
    quiet = make().scores(entries)
    for made, (_, factor) in zip(entries, noise, strict=True):
        made.capture_time_ms = 5.0 * factor
    assert make().scores(entries) == quiet


@pytest.mark.parametrize("make", [GDSF, Frecency])
@pytest.mark.parametrize("captures", [1, 2, 3, 5])
def test_one_slow_capture_orders_nothing(make: Callable[[], EvictionPolicy], captures: int) -> None:
    """A single capture that a busy machine held up for a hundred times as long does not tell what the graph costs."""
    policy = make()
    usual, slow = ([entry(MIB, key=key) for _ in range(captures)] for key in ("usual", "slow"))
    slow[0].capture_time_ms = 100.0
    last = [entry(MIB, replays=1, key="usual"), entry(MIB, replays=1, key="slow")]
    policy.scores([*usual, *slow])
    last[1].last_used = last[0].last_used
    assert len(set(policy.scores(last))) == 1


@pytest.mark.parametrize(("slower", "factor"), [(1.0, 1), (3.9, 1), (4.0, 4), (15.0, 4), (16.0, 16), (0.2, 0.25)])
def test_costs_count_in_steps_of_four(slower: float, factor: float) -> None:
    """Of a key that was captured three times, among others that were captured more often."""
    policy = GDSF()
    made = [entry(MIB, 1, slower if key == "odd" else 1.0, key) for key in ("odd", 1, 2, 3) for _ in range(3)]
    scores = policy.scores(made)
    assert scores[:3] == pytest.approx([factor / MIB] * 3)
    assert scores[3:] == pytest.approx([1 / MIB] * 9)


def test_captures_without_a_time_cost_the_usual() -> None:
    """Graphs that somebody else captured have none."""
    policy = GDSF()
    made = [entry(MIB, 1, 0.0 if key < 2 else 1.0, key) for key in range(5) for _ in range(3)]
    assert policy.scores(made) == pytest.approx([1 / MIB] * 15)


def test_probation_comes_before_the_score() -> None:
    """An entry with too few replays goes first, be it ever so expensive."""
    cache = GraphCache(2, eviction=Probation(3, LFU()))
    costly, proven = entry(replays=2, capture_ms=1e6), entry(replays=3)
    cache.add(0, proven)
    cache.add(1, costly)
    assert gone(cache.make_room()) == [costly]


def test_an_installed_policy_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point of the group is a name like those built in."""
    point = EntryPoint("oldest", f"{__name__}:Oldest", "graphdispatch.eviction")
    monkeypatch.setattr(EntryPoint, "load", lambda self: Oldest)
    monkeypatch.setattr(eviction, "entry_points", lambda group: EntryPoints([point]) if group == point.group else ())
    assert "oldest" in available_evictions()
    assert isinstance(make_eviction("oldest"), Oldest)
    assert isinstance(
        CUDAGraphManager(CUDAGraphConfig(options=CUDAGraphOptions(eviction="oldest"))).registry.cache.limit.eviction,
        Oldest,
    )


def test_an_installed_policy_must_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an entry point names is checked when it is made."""
    point = EntryPoint("odd", "builtins:dict", "graphdispatch.eviction")
    monkeypatch.setattr(eviction, "entry_points", lambda group: EntryPoints([point]))
    with pytest.raises(ConfigError, match="eviction 'odd' must be a subclass of EvictionPolicy, got 'builtins:dict'"):
        make_eviction("odd")


@pytest.mark.parametrize("name", ["mru", "", 3])
def test_an_unknown_name_is_refused(name: str) -> None:
    """The message lists what there is."""
    with pytest.raises(ConfigError, match=f"eviction must be one of 'frecency', 'gdsf', 'lfu', 'lru', got {name!r}"):
        GraphCache(2, eviction=name)


@pytest.mark.parametrize("least", [-1, True, 1.5])
def test_min_replays_is_checked(least: int) -> None:
    """A number of replays is a whole number."""
    with pytest.raises(ConfigError, match=f"min_replays_to_keep must be an integer >= 0, got {least!r}"):
        Probation(least, LRU())
