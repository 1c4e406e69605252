"""``CUDAGraphEntry``: one captured graph with its buffers, outputs and statistics."""

from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch.engines import EntryState
from graphdispatch.engines.registered_graphs import entry_around
from graphdispatch.errors import GuardError, ReplayError

from ..helpers import make, scripted


def capture(fn: Any, *, options: gd.CUDAGraphOptions | None = None, **shapes: tuple[int, ...]) -> gd.CUDAGraphEntry:
    """A graph of ``fn`` for four rows."""
    config = gd.CUDAGraphConfig(options=options or gd.CUDAGraphOptions())
    return gd.CUDAGraphRegistry(config).capture(4, 1, fn, shapes or {"x": (4, 3)})


def padded(fn: Any) -> gd.CUDAGraphEntry:
    """A graph of ``fn`` for four rows, of which the example fills one: its padding was compared with eager."""
    return gd.CUDAGraphRegistry().capture(1, 1, fn, inputs={"x": torch.ones(1, 3)}, size=4)


@pytest.fixture
def entry() -> gd.CUDAGraphEntry:
    """A graph that doubles up to four rows of three."""
    return padded(lambda x: x * 2)


def test_a_batch_is_cut_to_its_rows(entry: gd.CUDAGraphEntry) -> None:
    """Fewer rows are padded, the answer has as many and is the caller's; ``output`` has all rows, inputs stay."""
    memory, addresses = entry.output, entry.input_addresses
    first = entry.replay({"x": torch.ones(3, 3)})
    assert torch.equal(first, torch.full((3, 3), 2.0))
    assert memory.tolist() == [[2.0] * 3] * 3 + [[0.0] * 3]
    entry.replay({"x": torch.zeros(4, 3)})
    assert torch.equal(first, torch.full((3, 3), 2.0))
    assert entry.input_addresses == addresses == (entry.inputs.views(4)[0].data_ptr(),)


def test_padding_that_nobody_compared_is_refused() -> None:
    """Without eager at hand nothing shows that the rows are independent; a full batch is served."""
    entry = capture(lambda x: x - x.mean(0))
    with pytest.raises(ReplayError, match="3 rows in a graph of 4: rows mix in aten::mean"):
        entry.replay({"x": torch.randn(3, 3)})
    x = torch.randn(4, 3)
    assert torch.equal(entry.replay({"x": x}), x - x.mean(0))
    with pytest.raises(ReplayError, match="3 rows in a graph of 4: the batch needs padding"):
        capture(lambda x: x * 2).replay({"x": torch.randn(3, 3)})


def test_a_comparison_that_is_due_is_not_skipped() -> None:
    """With ``verify_every`` an entry that stands alone stops, since it has nothing to be compared with."""
    entry = capture(lambda x: x * 2, options=gd.CUDAGraphOptions(verify_every=2))
    x = torch.randn(4, 3)
    for _ in range(2):
        assert torch.equal(entry.replay({"x": x}), x * 2)
    with pytest.raises(ReplayError, match="must be compared with eager now"):
        entry.replay({"x": x})


def test_buffers_filled_by_hand_are_padded_again(entry: gd.CUDAGraphEntry) -> None:
    """What was left in them is not taken for padding by the next, smaller batch."""
    entry.inputs.views(4)[0].fill_(9)
    entry.replay()
    entry.replay({"x": torch.ones(2, 3)})
    assert torch.equal(entry.inputs.views(4)[0], torch.tensor([[1.0] * 3] * 2 + [[0.0] * 3] * 2))


def test_replays_are_counted(entry: gd.CUDAGraphEntry) -> None:
    """By the entry, and by the front end that captured it."""
    before = entry.last_used
    entry.replay({"x": torch.ones(3, 3)})
    entry.replay()
    stats = entry.stats
    assert (entry.replay_count, stats.replays, stats.hits, stats.real_rows, stats.padded_rows) == (2, 2, 2, 7, 8)
    entry.increment_replay()
    assert entry.replay_count == 3
    assert entry.last_used > before


def test_a_replay_for_the_time_alone_does_not_count(entry: gd.CUDAGraphEntry) -> None:
    """Its time is noted as that of one."""
    entry.time_replay(*entry.check({"x": torch.ones(4, 3)}))
    assert (entry.replay_count, entry.times) == (0, 1)


MISFITS: list[tuple[Any, ...]] = [
    ({"x": torch.ones(4, 3), "z": torch.ones(1)}, r"inputs must be named \['x'\], got \['x', 'z'\]"),
    ({"x": 1.0}, "input 'x' must be a tensor .* got 1.0"),
    ({"x": torch.ones(4, 3).to_sparse()}, "input 'x' must be a tensor of layout torch.strided, got torch.sparse_coo"),
    ({"x": torch.ones(4, 1)}, r"input 'x' must be .* of shape \(rows, 3\).* got \(4, 1\).*reshape it"),
    ({"x": torch.ones(4, 3, dtype=torch.half)}, "a tensor of dtype torch.float32, got torch.float16; cast"),
    ({"x": torch.ones(4, 3, device="meta")}, "a tensor of device cpu, got meta"),
    ({"x": torch.ones(0, 3)}, "inputs must have 1 to 4 rows for this graph, got 0"),
    ({"x": torch.ones(5, 3)}, "inputs must have 1 to 4 rows for this graph, got 5"),
]


@pytest.mark.parametrize(("inputs", "named"), MISFITS)
def test_inputs_that_do_not_fit_are_refused(entry: gd.CUDAGraphEntry, inputs: dict[str, Any], named: str) -> None:
    """The message names the argument, what it must be and what it is; nothing is copied or counted."""
    before = entry.inputs.views(4)[0].clone()
    with pytest.raises(GuardError, match=named):
        entry.replay(inputs)
    assert torch.equal(entry.inputs.views(4)[0], before)
    assert entry.replay_count == 0


def test_inputs_with_several_dimensions_are_checked() -> None:
    """Whichever argument comes first, each tells what it has of the batch; too long a one is named."""
    dynamic = {"y": {0: "batch"}, "x": {0: "batch", 1: gd.Dim("seq", [4])}}
    step = make(lambda y, x: x + y[:, None], dynamic=dynamic, sizes=[4])
    y, x = torch.randn(4), torch.randn(4, 4)
    for _ in range(2):
        step(y, x.mul(2))
    entry = step.entries[0]
    assert torch.equal(entry.replay({"y": y, "x": x}), x + y[:, None])
    for bad in ({"y": y, "x": torch.randn(4, 9)}, {"y": y, "x": torch.randn(3, 4)}, {"y": y[:0], "x": x[:0]}):
        with pytest.raises(GuardError, match=r"must have|numbers of rows"):
            entry.replay(bad)


def test_inputs_that_share_written_memory_are_refused() -> None:
    """A write to one would have to show in the other, which copies cannot do; their rows agree."""
    entry = capture(lambda a, b: (a.add_(1), b * 1)[1], a=(4, 3), b=(4, 3))
    with pytest.raises(GuardError, match="numbers of rows must agree"):
        entry.replay({"a": torch.ones(2, 3), "b": torch.ones(3, 3)})
    memory = torch.zeros(4, 3)
    with pytest.raises(GuardError, match=r"\['a', 'b'\] share memory, .*; pass copies"):
        entry.replay({"a": memory, "b": memory})


def test_the_state_of_a_generator_is_no_memory_that_arguments_share() -> None:
    """It is read as a copy, whose place a later argument may take; a replay counts as one with effects all the same."""
    generator = torch.Generator()
    entry = capture(lambda x: x + torch.rand(x.shape, generator=generator))
    assert entry.writes_outside
    assert not entry.written.spans


def test_release_is_idempotent(entry: gd.CUDAGraphEntry) -> None:
    """Released once, its bytes are gone and every way to replay raises."""
    held = capture(lambda x: x + torch.arange(3), x=(4, 3))
    assert (held.nbytes, len(held.input_addresses)) == (3 * 8, 1)
    for _ in range(2):
        held.release()
        entry.release()
    assert (held.state, held.nbytes, entry.nbytes, held.input_addresses) == (EntryState.EVICTED, 0, 0, ())
    for how in (lambda: entry.replay({"x": torch.ones(4, 3)}), entry.replay):
        with pytest.raises(ReplayError, match="evicted"):
            how()


def test_an_entry_describes_itself(entry: gd.CUDAGraphEntry) -> None:
    """Descriptor, mode, capture time, the average time of a replay, and a status line."""
    assert entry.batch_descriptor == entry.descriptor
    assert (entry.descriptor, entry.mode, entry.size) == (gd.BatchDescriptor(4, 4, True), gd.CUDAGraphMode.FULL, 4)
    assert entry.capture_time_ms > 0
    assert entry.avg_replay_time_ms == 0.0
    entry.replay({"x": torch.ones(4, 3)})
    assert entry.avg_replay_time_ms > 0.0
    assert repr(entry) == f"<CUDAGraphEntry FULL 4 rows, captured, 1 replays, {entry.nbytes} bytes>"


def test_a_foreign_graph_gets_an_entry() -> None:
    """The key gives the size; outputs are returned as they are; releasing leaves the graph."""
    graph, memory = scripted(), torch.zeros(3)
    entry = entry_around(graph, gd.DispatchKey(6, 2), {"out": memory})
    assert (entry.size, entry.state, entry.nbytes) == (6, EntryState.VERIFIED, 0)
    assert entry.replay()["out"] is memory
    assert graph.replays == 1
    entry.release()
    with pytest.raises(ReplayError, match="evicted"):
        entry.replay()
    assert graph.is_captured


def test_a_replay_that_would_lose_gradients_is_refused() -> None:
    """What the graph reads trains, and gradients are on."""
    weight = torch.ones(3)
    entry = capture(lambda x: x * weight)
    with torch.enable_grad():
        assert torch.equal(entry.replay({"x": torch.ones(4, 3)}), torch.ones(4, 3))
        weight.requires_grad_()
        with pytest.raises(ReplayError, match="the call needs gradients"):
            entry.replay({"x": torch.ones(4, 3)})
    assert torch.equal(entry.replay({"x": torch.ones(4, 3)}), torch.ones(4, 3))
