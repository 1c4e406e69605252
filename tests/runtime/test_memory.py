"""What graphs hold: one pool for all sizes, figures that are the bytes of what is alive; which graphs go at a limit."""

import gc
import json
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from graphdispatch import CUDAGraphConfig, CUDAGraphManager, CUDAGraphOptions, Graphed, Reason, eager_break, graphed
from graphdispatch.backends import get_backend
from graphdispatch.engines import EntryState, named_sizes

from ..helpers import AT_ONCE, check_rows, make, with_options

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


# Memory that a graph reads and nobody guards: it is held alive, and its growth or move after the capture is noticed.


class _Library:
    """Keeps a workspace where no guard looks, as kernels' libraries do, and grows it in place on request."""

    __module__ = "graphdispatch.spy"  # no guard looks into the library's own objects

    def __init__(self) -> None:
        self.spaces = MappingProxyType({"float32": {"main": torch.arange(8.0)}})

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.spaces["float32"]["main"][: x.shape[1]]


def test_growth_after_the_capture_makes_the_graph_stale() -> None:
    """The storage grows where it stands; the graph that read the old one is released and captured anew."""
    library = _Library()
    step = graphed(library, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    check_rows(step, *[4] * 4, width=8)
    assert (step.stats.captures, step.stats.hits) == (1, 2)
    space = library.spaces["float32"]["main"]
    space.untyped_storage().resize_(1 << 20)
    space.copy_(torch.arange(8.0) * 10)
    assert not check_rows(step, 4, 4, 4, width=8)[0].is_graph
    assert (step.stats.captures, step.stats.hits) == (2, 3)
    assert step.stats.eviction_reasons == {"stale": 1}


def test_it_is_held_while_a_graph_reads_it() -> None:
    """A library that drops its workspace does not take it away from the graph; a released graph lets go of it."""
    library = _Library()
    space = StorageWeakRef(library.spaces["float32"]["main"].untyped_storage())
    step = graphed(library, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    x = torch.randn(4, 8)
    step(x)
    assert step.entries[0].workspaces is not None
    library.spaces["float32"].clear()
    gc.collect()
    assert torch.equal(step.entries[0].replay({"x": x}), x + torch.arange(8.0))
    assert not space.expired()
    step.clear()
    assert space.expired()
