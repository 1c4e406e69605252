"""What graphs hold: one pool for the outputs of all sizes, and figures that are the bytes of the living storages."""

import gc
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphdispatch import CUDAGraphOptions, Graphed, eager_break, graphed
from graphdispatch.backends import get_backend
from graphdispatch.engines import named_sizes

QUICK = CUDAGraphOptions(gc_disable=False)  # no collection of the whole process around few captures


def made(sizes: Any = "vllm", **options: Any) -> Graphed[..., Any]:
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
    every, largest = made(mode=mode), made((512,), mode=mode)
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
    step = made((2, 4), outputs=outputs)
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
