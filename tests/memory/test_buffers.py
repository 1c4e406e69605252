"""Outputs in preallocated memory: a ring of copies, and tensors that the caller gives."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from graphdispatch.api.graphed import graphed
from graphdispatch.api.manager import CUDAGraphManager
from graphdispatch.backends import get_backend
from graphdispatch.backends.base import Pool
from graphdispatch.call.rules import make_rules
from graphdispatch.call.spec import CallSpec
from graphdispatch.config import CUDAGraphConfig, CUDAGraphOptions
from graphdispatch.decide.decision import SizeTable
from graphdispatch.errors import CaptureError, ConfigError, StaleOutputError
from graphdispatch.memory.buffers import OutputRing
from graphdispatch.memory.cache import GraphCache
from graphdispatch.memory.given import CallerBuffers, copy_into
from graphdispatch.memory.outputs import OutputRule, Outputs, OutputView
from graphdispatch.modes import CUDAGraphMode
from graphdispatch.reasons import Reason
from graphdispatch.serve.graphs import GraphSet
from graphdispatch.serve.group import Route

CAPACITY = 8
ROWS = OutputRule((((0, 1),),))


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def pool() -> Pool:
    """An empty pool of the CPU backend."""
    return get_backend("cpu").make_pool()


def test_a_ring_takes_its_copies_in_turn(pool: Pool) -> None:
    """N results live at a time, each in memory of its own, and the oldest is overwritten next."""
    memory = torch.zeros(4, 2)
    outputs = Outputs(memory, ROWS, [True], "ring:2", pool, OutputRing(2, CAPACITY))
    views = [outputs.taker(3)() for _ in (memory.fill_(1.0),)]
    views += [outputs.taker(2)() for _ in (memory.fill_(2.0),)]
    assert [view.get().tolist() for view in views] == [[[1.0, 1.0]] * 3, [[2.0, 2.0]] * 2]
    addresses = [view.get().data_ptr() for view in views]
    memory.fill_(3.0)
    third = outputs.taker(4)()
    assert (views[0].is_stale, views[1].is_stale, third.is_stale) == (True, False, False)
    assert third.get().data_ptr() == addresses[0] != addresses[1]
    with pytest.raises(StaleOutputError, match="or a longer ring"):
        views[0].get()


def test_all_sizes_share_one_ring(pool: Pool) -> None:
    """It has room for the largest number of rows, and further graphs allocate nothing."""
    ring = OutputRing(3, CAPACITY)
    small, large = (Outputs(torch.full((n, 2), float(n)), ROWS, [True], "ring:3", pool, ring) for n in (2, 8))
    assert ring.nbytes == 3 * CAPACITY * 2 * 4
    first, *others = small.taker(1)(), large.taker(8)(), large.taker(7)()
    assert torch.equal(first.get(), torch.full((1, 2), 2.0))
    small.taker(2)()
    assert (first.is_stale, *(view.is_stale for view in others)) == (True, False, False)


def test_a_ring_refuses_outputs_of_another_kind(pool: Pool) -> None:
    """A size whose outputs have another type cannot share it; that is a failed capture."""
    ring = OutputRing(1, CAPACITY)
    Outputs(torch.zeros(2, 2), ROWS, [True], "ring:1", pool, ring)
    with pytest.raises(CaptureError, match="cannot share a ring") as caught:
        Outputs(torch.zeros(2, 2).double(), ROWS, [True], "ring:1", pool, ring)
    assert caught.value.reason is Reason.OUTPUT_UNSUPPORTED


def test_a_ring_leaves_foreign_outputs_alone(pool: Pool) -> None:
    """A cache that the model returns is handed out itself, and constants come back."""
    cache = torch.ones(5)
    ring = OutputRing(2, CAPACITY)
    rule = OutputRule((((0, 1),), ()))
    outputs = Outputs((torch.ones(4), cache, "name"), rule, [True, False], "ring:2", pool, ring)
    own, foreign, name = outputs.taker(2)().get()
    assert (own.shape, foreign is cache, name) == ((2,), True, "name")
    assert ring.nbytes == 2 * CAPACITY * 4


def test_a_hit_allocates_nothing(pool: Pool) -> None:
    """The second time around, the ring hands out the very tensors of the first time."""
    take = Outputs(torch.zeros(4, 2), ROWS, [True], "ring:2", pool, OutputRing(2, CAPACITY)).taker(3)
    first = [take().get() for _ in range(2)]
    again = [take().get() for _ in range(2)]
    assert all(a is b for a, b in zip(first, again, strict=True))


def test_graphed_with_a_ring() -> None:
    """Graphs and eager steps alike return handles; each is right for N - 1 further calls."""
    step = graphed(lambda x: {"y": x * 2}, dynamic={"x": 0}, sizes=(2, 4), outputs="ring:2", capture_after=1)
    kept: list[tuple[torch.Tensor, OutputView]] = []
    for turn, rows in enumerate([4, 4, 3, 2, 9, 4, 1, 2, 4, 4, 3, 4]):
        x = torch.full((rows, 2), float(turn))
        kept.append((x, step(x)))  # type: ignore[arg-type]
    assert step.stats.hits >= 4
    for x, view in kept:
        if not view.is_stale:
            assert torch.equal(view.get()["y"], x * 2)
    assert [view.is_stale for _, view in kept[-3:]] == [True, False, False]


def test_a_manager_with_a_ring() -> None:
    """It hands out handles too, whichever way a batch runs."""
    config = CUDAGraphConfig(backend="cpu", capture_sizes=(4,), options=CUDAGraphOptions(outputs="ring:1"))
    manager = CUDAGraphManager(config)
    views = [manager.execute_or_capture(4, 1, lambda x: x + 1, {"x": torch.ones(4) * n}) for n in range(6)]
    assert all(isinstance(view, OutputView) for view in views)
    assert torch.equal(views[-1].get(), torch.full((4,), 6.0))


GOOD = {"y": torch.zeros(CAPACITY, 2), "z": torch.zeros(())}


def graphs_with(out: Any) -> tuple[GraphSet, Any]:
    """A set that copies outputs into ``out``, and its group of calls of two columns."""
    fn = lambda x: {"y": x * 2, "z": x.sum()}  # noqa: E731
    graphs = GraphSet(fn, CUDAGraphOptions(verify=False), GraphCache(4), backend=get_backend("cpu"), out=out)
    table = SizeTable.of_one(CAPACITY, CUDAGraphMode.FULL, pads=True)
    route = Route(0, table, make_rules(fn, {"x": 0}, {}, ()))
    made = graphs.make_group(0, route, CallSpec(fn, 1, ()), [torch.ones(4, 2)])
    assert isinstance(made, tuple)
    return graphs, made[0]


def test_outputs_go_to_the_callers_tensors() -> None:
    """The call returns views of their first rows; what was there behind those stays."""
    out = {"y": torch.full((CAPACITY, 2), -1.0), "z": torch.full((), -1.0)}
    graphs, group = graphs_with(out)
    entry = graphs.capture(group, [torch.ones(4, 2)], 4, 4).entry
    assert entry is not None
    got = entry.serve([torch.full((3, 2), 2.0)], 3)
    assert got["y"].data_ptr() == out["y"].data_ptr()
    assert got["y"].tolist() == [[4.0, 4.0]] * 3
    assert out["y"][3:].eq(-1).all()
    assert got["z"].data_ptr() == out["z"].data_ptr()
    assert graphs.memory_report().ring_bytes == 0


def test_eager_steps_go_there_too() -> None:
    """What an eager step returned is copied, and the same views come back."""
    graphs, _ = graphs_with({"y": torch.zeros(CAPACITY, 2), "z": torch.zeros(())})
    got = graphs.handout.give(graphs.fn(torch.ones(5, 2)))
    assert got["y"].data_ptr() == graphs.handout.out["y"].data_ptr()
    assert (got["y"].tolist(), got["z"].item()) == ([[2.0, 2.0]] * 5, 10.0)


def test_an_eager_result_may_be_a_view_of_the_callers_tensor() -> None:
    """Where it overlaps the place that it goes to, it is copied first."""
    out = torch.arange(8.0)
    assert copy_into(out, out[1:7]).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_only_what_is_copied_may_be_placed() -> None:
    """``out`` and a handle or graph memory contradict each other."""
    with pytest.raises(ConfigError, match="out must come with outputs='clone', got outputs='view'"):
        GraphSet(lambda x: x, CUDAGraphOptions(outputs="view"), GraphCache(4), out=torch.zeros(3))


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (None, "out must be a tensor or a nest of tensors, got None"),
        ([3], r"out must be a tensor or a nest of tensors, got \[3\]"),
        (torch.zeros(3, requires_grad=True), "dense tensors that require no gradient"),
        (torch.eye(3).to_sparse(), "dense tensors that require no gradient"),
        (torch.zeros(1).expand(3), "that do not overlap in memory"),
        ((GOOD["y"][:3], GOOD["y"][2:]), "that do not overlap in memory"),
    ],
)
def test_unusable_tensors_are_refused_at_once(out: Any, words: str) -> None:
    """What could never be written to is an error before anything runs."""
    with pytest.raises(ConfigError, match=words):
        CallerBuffers(out, CAPACITY)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (torch.zeros(CAPACITY, 2), "out must have the structure of the outputs, .*'y', 'z'"),
        (GOOD | {"y": torch.zeros(7, 2)}, r"room for the outputs of 8 rows, \(8, 2\), got a tensor of shape \(7, 2\)"),
        (GOOD | {"y": torch.zeros(8, 3)}, r"\(8, 2\), got a tensor of shape \(8, 3\)"),
        (GOOD | {"y": torch.zeros(8, 2).double()}, "a tensor like 2 dimensions of torch.float32 .* torch.float64"),
        (GOOD | {"z": torch.zeros(1)}, "a tensor like 0 dimensions of .* got 1 dimensions"),
        (GOOD | {"z": 3}, "a tensor like 0 dimensions of .* got 3"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_at_the_capture(out: Any, words: str) -> None:
    """Structure, room, type and device are compared when the graph is made, and the error reaches the caller."""
    graphs, group = graphs_with(out)
    with pytest.raises(ConfigError, match=words):
        graphs.capture(group, [torch.ones(4, 2)], 4, 4)
    assert len(graphs.cache) == 0


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (torch.zeros(9, 2), r"no room for an output of shape \(9, 2\) in a tensor of shape \(8, 2\)"),
        (torch.zeros(3, 2).half(), "a tensor like 2 dimensions of torch.float16"),
        ((torch.zeros(3, 2),), "out must have the structure"),
        (torch.zeros(3, 2, requires_grad=True), "requires a gradient; call under torch.no_grad"),
    ],
)
def test_an_eager_result_that_does_not_fit_is_an_error(result: Any, words: str) -> None:
    """It is neither cast nor cut nor left where the caller does not look."""
    with pytest.raises(ConfigError, match=words):
        copy_into(torch.zeros(CAPACITY, 2), result)


def test_inference_tensors_are_refused_where_they_cannot_be_written() -> None:
    """Outside of inference mode; inside, they serve."""
    with torch.inference_mode():
        out = torch.zeros(4)
        assert copy_into(out, torch.ones(2)).tolist() == [1.0, 1.0]
    with pytest.raises(ConfigError, match=r"got 1 dimensions of torch\.float32 on cpu, an inference tensor"):
        copy_into(out, torch.ones(2))


def test_what_the_callable_returns_itself_is_no_place_for_it(pool: Pool) -> None:
    """A cache that is returned cannot be copied onto itself."""
    cache = torch.zeros(CAPACITY)
    with pytest.raises(ConfigError, match="out must not be memory that the callable itself returns"):
        Outputs(cache[:2], ROWS, [False], "clone", pool, CallerBuffers(cache, CAPACITY))
