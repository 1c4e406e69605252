"""What graphs hold: one pool for all sizes, figures that are the bytes of what is alive; which graphs go at a limit."""

import gc
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from graphdispatch import CUDAGraphConfig, CUDAGraphManager, CUDAGraphOptions, Graphed, Reason, eager_break, graphed
from graphdispatch.backends import Graph, get_backend
from graphdispatch.engines import CUDAGraphEntry, EntryState, EvictionReason, named_sizes
from graphdispatch.runtime.cache import GraphCache

from ..helpers import check_rows, make, with_options
from ..sized import Sized, Unused, entry

QUICK = CUDAGraphOptions(gc_disable=False)  # no collection of the whole process around few captures


def prewarmed(sizes: Any = "vllm", **options: Any) -> Graphed[..., Any]:
    """A small network whose output is its largest tensor, with graphs of ``sizes`` up to 512 rows."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 64)).eval()
    step = graphed(model, dynamic={"input": 0}, sizes=sizes, max_size=512, options=QUICK, **options)
    step.prewarm(torch.randn(512, 8))
    return step


def living_bytes() -> int:
    """Bytes of all storages that the collector can find."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.layout is torch.strided:
            thing = thing.untyped_storage()
        if type(thing) is torch.UntypedStorage:
            storages[thing._cdata] = thing.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_51_sizes_cost_what_the_largest_costs(mode: str) -> None:
    """Static inputs and outputs of all of vLLM's sizes hold at most 1.1 times the bytes of the largest size alone."""
    every, largest = prewarmed(mode=mode), prewarmed((512,), mode=mode)
    assert len(every.entries) == len(named_sizes("vllm", 512)) == 51
    written = sum(entry.output.nbytes for entry in every.entries)
    assert written > 10 * largest.entries[0].output.nbytes
    assert every.memory_bytes <= 1.1 * largest.memory_bytes
    assert len(arenas(every)) == 1, "every size writes its outputs to one arena"


def arenas(step: Graphed[..., Any]) -> set[int]:
    """Where the storages of the graphs' outputs begin."""
    return {entry.outputs.tree.untyped_storage().data_ptr() for entry in step.entries}


@pytest.mark.parametrize("outputs", ["view", "static"])
def test_outputs_in_graph_memory_are_not_shared(outputs: str) -> None:
    """Where callers get graph memory itself, each size keeps its own, so that another size leaves it alone."""
    step = prewarmed((2, 4), outputs=outputs)
    assert len(arenas(step)) == 2


def test_an_output_that_somebody_holds_is_not_shared() -> None:
    """It stays where its holder sees the replays, as on a device; the others of the nest are shared."""
    backend = get_backend("cpu")
    pool, x, kept = backend.make_pool(), torch.ones(4, 2), []
    with backend.begin_capture(pool) as capture:
        kept.append(x * 2)
        capture.set_outputs({"kept": kept[0], "input": x, "free": x * 3}, shared=True)
    held, given, free = capture.outputs.values()
    x.fill_(5.0)
    capture.graph.replay()
    assert (kept[0][0, 0], held[0, 0], free[0, 0]) == (10, 10, 15)
    assert held.data_ptr() == kept[0].data_ptr()
    assert given is x
    assert (capture.graph.nbytes, pool.nbytes) == (4 * 2 * 4, 64)


_double = eager_break(lambda x: x * 2)
MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "plain": (lambda x: (x @ x.t()[:, :1]).relu(), {}),
    "several outputs": (lambda x: {"a": x * 2, "b": (x.sum(), x.t())}, {}),
    "constants": (lambda x: x + torch.arange(4).float(), {}),
    "views": (lambda x: x.cumsum(0), {"outputs": "view"}),
    "pieces": (lambda x: _double(x.relu()) + 1, {"mode": "PIECEWISE"}),
}


def test_the_reports_are_what_is_alive() -> None:
    """Together they are, but for the few bytes of literals, by how much the storages of the process fall when all is
    cleared."""
    example = torch.randn(256, 4)
    steps = [graphed(fn, dynamic={"x": 0}, sizes=(64, 128, 256), options=QUICK, **how) for fn, how in MODELS.values()]
    for step in steps:
        step.prewarm(example)
    totals, before = [step.memory_bytes for step in steps], living_bytes()
    for step in steps:
        step.clear()
    assert sum(totals) == pytest.approx(before - living_bytes(), abs=100)
    assert min(totals) > 2 * 256 * 4


def test_a_report_is_plain_and_readable() -> None:
    """It adds up, JSON can hold it, and its text names each part."""
    step = graphed(lambda x: x + torch.arange(3.0), dynamic={"x": 0}, sizes=(2, 4), options=QUICK)
    step.prewarm(torch.randn(4, 3))
    report = step.memory_report()
    assert (report.input_bytes, report.driver_bytes) == (4 * 3 * 4, 0)
    assert report.graphs == (("2", "FULL"), ("4", "FULL"))
    assert report.entry_bytes == 24
    assert report.total == step.memory_bytes == report.pool_bytes + 48 + 24
    assert json.loads(json.dumps(report.to_dict()))["total"] == report.total
    for line in ("static inputs         48 B", "2 graphs              24 B"):
        assert line in str(report)


class Kind(NamedTuple):
    """What an entry holds for itself, which pool it is in, how much of that it needs, and whether it may go."""

    own: int
    pool: int = 0
    part: int = 0
    may_go: bool = True


class Part(Sized):
    """A graph that needs ``part`` bytes of its pool."""

    def __init__(self, own: int, part: int) -> None:
        super().__init__(own)
        self.part = part


class Shared(Unused):
    """A pool as large as the largest part that one of its graphs needs."""

    def nbytes_of(self, graphs: Sequence[Graph]) -> int:
        return max((graph.part for graph in graphs if isinstance(graph, Part)), default=0)


def made(kinds: Iterable[Kind]) -> list[CUDAGraphEntry]:
    """Entries of these kinds; equal numbers of pools are one pool."""
    pools: dict[int, Shared] = {}
    entries = []
    for key, kind in enumerate(kinds):
        entries.append(entry(key=key))
        entries[-1].graph = Part(kind.own, kind.part)
        entries[-1].pool = pools.setdefault(kind.pool, Shared())
    return entries


def holds(kinds: Collection[Kind]) -> int:
    """The bytes that these hold together."""
    pools = {kind.pool for kind in kinds}
    return sum(kind.own for kind in kinds) + sum(max(k.part for k in kinds if k.pool == pool) for pool in pools)


def agrees(kinds: list[Kind], victims: set[int] | None, fits: Callable[[list[Kind]], bool]) -> None:
    """``victims`` are what has to go, in the order of ``kinds``; or None, and nothing that may go is enough."""

    def without(dropped: Collection[int]) -> bool:
        return fits([kind for index, kind in enumerate(kinds) if index not in dropped])

    allowed = [index for index, kind in enumerate(kinds) if kind.may_go]
    subsets = [subset for count in range(len(allowed) + 1) for subset in combinations(allowed, count)]
    assert (victims is not None) is any(without(subset) for subset in subsets)
    if victims is not None:
        assert victims <= set(allowed)
        assert without(victims)
        assert not any(without(victims - {index}) for index in victims)
        fewest = next(count for count in range(len(allowed) + 1) if without(allowed[:count]))
        assert victims <= set(allowed[:fewest])
        assert not fewest or allowed[fewest - 1] in victims


KINDS = st.lists(st.builds(Kind, st.integers(0, 30), st.integers(0, 2), st.integers(0, 30), st.booleans()), max_size=6)
BYTES, COUNT = st.none() | st.integers(1, 90), st.none() | st.integers(1, 6)


@given(KINDS, st.none() | st.builds(Kind, st.integers(0, 30), st.integers(0, 2), st.integers(0, 30)), BYTES, COUNT)
@example([Kind(0), Kind(11)], None, 20, 2)
@example([Kind(1, may_go=False), Kind(1), Kind(30)], None, 40, None)
def test_room_is_made_if_there_can_be(
    kinds: list[Kind], newcomer: Kind | None, most_bytes: int | None, most: int | None
) -> None:
    """It is enough exactly if some set of entries that may go is, and then no more of them go than must.

    What is not known of a newcomer counts as the average of all entries before any of them goes.
    """
    kinds = sorted(kinds, key=lambda kind: not kind.may_go)  # those used last may not go
    *entries, new = made([*kinds, newcomer or Kind(0)])
    cache = GraphCache(10)
    for one in entries:
        assert cache.add(one) == []
    cache.max_bytes, cache.max_graphs = most_bytes, most or 10
    since = next((one.last_used for one, kind in zip(entries, kinds, strict=True) if not kind.may_go), None)
    average = sum(kind.own for kind in kinds) // max(len(kinds), 1)

    def fits(kept: list[Kind]) -> bool:
        held = holds(kept) + average if newcomer is None else holds([*kept, newcomer])
        return (most is None or len(kept) < most) and (most_bytes is None or held <= most_bytes)

    victims = cache.victims(None if newcomer is None else new, since)
    keys = None if victims is None else {int(victim.entry.key) for victim in victims}  # type: ignore[call-overload]
    agrees(kinds, keys, fits)
    is_count = most is not None and len(kinds) >= most
    reason = EvictionReason.COUNT if is_count else EvictionReason.BYTES
    assert all(victim.reason is reason for victim in victims or [])
    assert len(cache) == len(kinds)


def test_an_evicted_graph_gives_its_memory_back() -> None:
    """Static inputs and outputs go with the last graph that uses them, and are there again for the next."""
    step = make(sizes=(4,), max_cached_graphs=1)
    for width in (10, 5000, 20):
        check_rows(step, *[(4, width)] * 4)
        (held,) = step.entries
        assert held.state is EntryState.VERIFIED
        assert held.inputs.nbytes == 4 * width * 4
        assert step.memory_bytes < 3 * held.inputs.nbytes + 256


def limited(*sizes: int, **how: Any) -> Any:
    """A callable with room for 100,000 bytes, far less than a graph of 64 rows takes."""
    wide = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64)).eval().requires_grad_(False)
    return graphed(wide, dynamic={"input": 0}, sizes=sizes, **with_options({"memory_budget_bytes": 100_000} | how))


@pytest.mark.parametrize("outputs", ["clone", "static"])
def test_a_graph_over_the_budget_is_not_kept(outputs: str) -> None:
    """It is captured once, its memory is given back, and the reason says how much it took."""
    step = limited(64, outputs=outputs)
    check_rows(step, *[64] * 100, width=64)
    assert (step.stats.captures, step.memory_bytes, step.entries) == (1, 0, [])
    assert step.stats.reasons[Reason.CACHE_FULL] == 99
    held = int(step.last_decision.explain().split("its graph holds ")[1].split()[0])
    assert held > 100_000
    assert "for which there is no room in memory_budget_bytes=100000" in step.explain(torch.randn(64, 64))
    step.check_integrity()
    step.invalidate()
    check_rows(step, 64, 64, width=64)
    assert step.stats.captures == 2


def test_what_another_callable_evicts_gives_its_memory_back() -> None:
    """Its static inputs and its hits, too: all callables of a manager share one budget."""
    calls = [(lambda x, add=add: torch.relu(x) + add) for add in range(4)]
    x = torch.randn(256, 64)

    def kept(budget: int | None, number: int) -> CUDAGraphManager:
        options = CUDAGraphOptions(memory_budget_bytes=budget)
        manager = CUDAGraphManager(CUDAGraphConfig(capture_sizes=(256,), options=options))
        for place, fn in enumerate(calls[:number]):
            manager.capture_graph(256, place + 1, fn, inputs={"x": x})
        return manager

    budget = kept(None, 1).memory_bytes + 1
    manager = kept(budget, len(calls))
    assert manager.num_graphs == 1
    assert manager.memory_bytes <= budget
