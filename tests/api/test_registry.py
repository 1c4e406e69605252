"""``CUDAGraphRegistry``: graphs by exact (batch size, sequence length), captured from functions of named tensors."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from graphdispatch import CUDAGraphOptions, Reason
from graphdispatch.engines import CUDAGraphConfig, CUDAGraphRegistry, EntryState
from graphdispatch.errors import CaptureError, ConfigError, GuardError, ReplayError

from ..helpers import with_options
from ..spy import Spy


@pytest.fixture
def registry() -> Iterator[CUDAGraphRegistry]:
    """A registry with the default limits, whose accounting is checked after the test."""
    made = CUDAGraphRegistry()
    yield made
    made.check_integrity()


def double(x: torch.Tensor) -> torch.Tensor:
    """Twice the input."""
    return x * 2


def test_shapes_are_given(registry: CUDAGraphRegistry) -> None:
    """From ``input_shapes`` alone a graph is captured; it answers for other values as eager does."""
    entry = registry.capture(4, 1, double, {"x": (4, 3)}, {"y": (4, 3)})
    x = torch.randn(4, 3)
    assert torch.equal(entry.replay({"x": x}), x * 2)


def test_shapes_are_read_off_the_inputs(registry: CUDAGraphRegistry) -> None:
    """An example batch tells shapes and dtypes."""
    entry = registry.capture(4, 1, double, inputs={"x": torch.ones(4, 3, dtype=torch.int64)})
    assert entry.replay({"x": torch.full((4, 3), 5)}).tolist() == [[10] * 3] * 4


def test_shapes_that_contradict_the_inputs_are_refused(registry: CUDAGraphRegistry) -> None:
    """The message names the input and both shapes."""
    with pytest.raises(ConfigError, match=r"input 'x' must have shape \(4, 9\) as input_shapes says, got \(4, 3\)"):
        registry.capture(4, 1, double, {"x": (4, 9)}, inputs={"x": torch.ones(4, 3)})


def test_a_shape_without_its_input_is_refused(registry: CUDAGraphRegistry) -> None:
    """A name that the example lacks is a mistake, not an input of zeros."""
    with pytest.raises(ConfigError, match="input_shapes names 'z', which inputs does not"):
        registry.capture(4, 1, double, {"z": (4,)}, inputs={"x": torch.ones(4, 3)})


def test_a_capture_needs_shapes_or_inputs(registry: CUDAGraphRegistry) -> None:
    """Without either there is nothing to run."""
    with pytest.raises(ConfigError, match="input_shapes must name the inputs"):
        registry.capture(4, 1, double)


def test_zeros_have_the_dtypes_given(registry: CUDAGraphRegistry) -> None:
    """An embedding needs integers; ``dtypes`` says so, and its example is token 0."""
    table = nn.Embedding(8, 2)
    seen = Spy()

    def embed(ids: torch.Tensor) -> torch.Tensor:
        seen.append((ids.dtype, ids.device.type))
        return table(ids)

    entry = registry.capture(4, 1, embed, {"ids": (4,)}, dtypes={"ids": torch.int64})
    assert set(seen) == {(torch.int64, "cpu")}
    ids = torch.tensor([7, 1, 0, 3])
    assert torch.equal(entry.replay({"ids": ids}), table(ids).detach())


@pytest.mark.parametrize("shapes", [{"y": (4, 9)}, {"y": (4, 3), "z": (4,)}])
def test_wrong_output_shapes_leave_no_graph(registry: CUDAGraphRegistry, shapes: dict[str, tuple[int, ...]]) -> None:
    """An output that is another one than promised, or missing, is an error, and the graph is released."""
    with pytest.raises(ConfigError, match="as output_shapes says"):
        registry.capture(4, 1, double, {"x": (4, 3)}, shapes)
    assert not registry.has(4, 1)


def test_outputs_are_checked_by_name_where_they_have_names(registry: CUDAGraphRegistry) -> None:
    """Of a mapping the names count, not the order."""

    def both(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": x.sum(1), "same": x + 0}

    entry = registry.capture(4, 1, both, {"x": (4, 3)}, {"same": (4, 3), "sum": (4,)})
    assert entry.replay({"x": torch.ones(4, 3)})["sum"].tolist() == [3.0] * 4


@pytest.mark.parametrize("bad", [0, -1, True, 2.0])
def test_a_batch_has_rows(registry: CUDAGraphRegistry, bad: Any) -> None:
    """A number of rows that no batch has is refused."""
    with pytest.raises(ConfigError, match="batch_size must be an integer >= 1"):
        registry.capture(bad, 1, double, {"x": (4, 3)})


def test_keys_are_exact(registry: CUDAGraphRegistry) -> None:
    """Neither another batch size nor another length finds a graph."""
    entry = registry.capture(4, 16, double, {"x": (4, 3)})
    assert registry.get(4, 16) is entry
    assert registry.has(4, 16)
    assert [registry.get(3, 16), registry.get(5, 16), registry.get(4, 15)] == [None] * 3


def test_dynamic_says_where_the_batch_is(registry: CUDAGraphRegistry) -> None:
    """The batch may be another dimension, and an input may have none."""

    def fn(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale[:, None]

    example = {"x": torch.randn(3, 2), "scale": torch.randn(3)}
    entry = registry.capture(2, 1, fn, inputs=example, dynamic={"x": 1}, size=4)
    x, scale = torch.randn(3, 2), torch.randn(3)
    assert torch.equal(entry.replay({"x": x, "scale": scale}), fn(x, scale))


def test_a_function_of_one_batch_size_has_no_batch_dimension(registry: CUDAGraphRegistry) -> None:
    """With ``dynamic={}`` a function that fits one size alone is captured as it is, and takes that size alone."""
    weights = torch.randn(4, 3)
    with pytest.raises(CaptureError, match="if it takes one size alone"):
        registry.capture(4, 1, lambda x: x * weights, {"x": (4, 3)})
    entry = registry.capture(4, 1, lambda x: x * weights, {"x": (4, 3)}, dynamic={})
    assert torch.equal(entry.replay({"x": torch.ones(4, 3)}), weights)
    with pytest.raises(GuardError, match=r"must have shape \(4, 3\)"):
        entry.replay({"x": torch.ones(3, 3)})


def test_an_input_without_the_batch_is_named(registry: CUDAGraphRegistry) -> None:
    """An input whose first dimension is not the batch needs ``dynamic``."""
    with pytest.raises(ConfigError, match=r"input 'scale' has shape \(3,\), whose dimension 0 is not batch_size=4"):
        registry.capture(4, 1, lambda x, scale: x * scale, {"x": (4, 3), "scale": (3,)})


def test_dynamic_names_inputs(registry: CUDAGraphRegistry) -> None:
    """A name that is no input is a mistake."""
    with pytest.raises(ConfigError, match="dynamic names 'y', which is no input"):
        registry.capture(4, 1, double, {"x": (4, 3)}, dynamic={"y": 0})


def test_a_capture_leaves_no_effect(registry: CUDAGraphRegistry) -> None:
    """What the example's runs wrote to state and random generator is put back; a replay writes."""
    count = torch.zeros(1)

    def step(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x + torch.rand_like(x)

    torch.manual_seed(0)
    before = torch.get_rng_state()
    entry = registry.capture(4, 1, step, {"x": (4, 3)})
    assert count.item() == 0
    assert torch.equal(torch.get_rng_state(), before)
    entry.replay({"x": torch.zeros(4, 3)})
    assert count.item() == 1


def test_an_example_that_is_written_is_put_back(registry: CUDAGraphRegistry) -> None:
    """The caller's example tensors are as they were."""
    example = torch.ones(4, 3)
    registry.capture(4, 1, lambda x: x.add_(1), inputs={"x": example})
    assert torch.equal(example, torch.ones(4, 3))


def test_capturing_a_key_again_replaces_its_graph(registry: CUDAGraphRegistry) -> None:
    """The old graph is released, and the new function answers."""
    old = registry.capture(4, 1, double, {"x": (4, 3)})
    new = registry.capture(4, 1, lambda x: x * 3, {"x": (4, 3)})
    assert registry.get(4, 1) is new
    assert old.state is EntryState.EVICTED
    assert registry.num_graphs == 1
    assert torch.equal(new.replay({"x": torch.ones(4, 3)}), torch.full((4, 3), 3.0))


def test_removing_releases(registry: CUDAGraphRegistry) -> None:
    """The graph can no longer be replayed, and the key has none."""
    entry = registry.capture(4, 1, double, {"x": (4, 3)})
    assert registry.remove(4, 1)
    assert not registry.remove(4, 1)
    assert not registry.has(4, 1)
    with pytest.raises(ReplayError, match="evicted"):
        entry.replay({"x": torch.ones(4, 3)})


def test_clear_releases_all_and_keeps_the_counts(registry: CUDAGraphRegistry) -> None:
    """Memory goes back, the statistics stay, and the registry goes on."""
    for size in (4, 2):
        registry.capture(size, 1, lambda x: (x * 2).cumsum(0).relu(), {"x": (size, 3)})
    assert registry.memory_bytes > 0
    registry.clear()
    assert (registry.num_graphs, registry.memory_bytes, registry.stats.captures) == (0, 0, 2)
    registry.capture(4, 1, double, {"x": (4, 3)})
    assert registry.has(4, 1)


def test_a_failing_capture_leaves_the_registry_usable(registry: CUDAGraphRegistry) -> None:
    """It raises with a reason and the cause, makes no entry, and touches no other."""
    kept = registry.capture(4, 1, double, {"x": (4, 3)})
    with pytest.raises(CaptureError, match=r"no graph for batch_size=4, seq_len=2: .*item") as caught:
        registry.capture(4, 2, lambda x: x * x.sum().item(), {"x": (4, 3)})
    assert caught.value.reason is Reason.CAPTURE_UNSAFE
    assert caught.value.__cause__ is not None
    assert (registry.num_graphs, registry.stats.capture_failures) == (1, 1)
    assert registry.get(4, 1) is kept
    registry.capture(4, 2, double, {"x": (4, 3)})
    assert registry.num_graphs == 2


def test_an_error_of_the_function_passes_through(registry: CUDAGraphRegistry) -> None:
    """The function's own exception is not dressed up; no entry stays."""

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        registry.capture(4, 1, broken, {"x": (4, 3)})
    assert registry.num_graphs == 0


def test_a_call_without_tensors_is_refused(registry: CUDAGraphRegistry) -> None:
    """There is nothing to feed a graph with."""
    with pytest.raises(CaptureError, match="no argument is a tensor") as caught:
        registry.capture(4, 1, lambda: torch.ones(4), inputs={})
    assert caught.value.reason is Reason.NO_TENSORS


def test_the_count_is_limited() -> None:
    """The least recently used graph makes room, and is counted."""
    registry = CUDAGraphRegistry(CUDAGraphConfig(options=CUDAGraphOptions(max_cached_graphs=2)))
    for length in (1, 2):
        registry.capture(4, length, double, {"x": (4, 3)})
    registry.get(4, 1).replay({"x": torch.ones(4, 3)})  # type: ignore[union-attr]
    registry.capture(4, 3, double, {"x": (4, 3)})
    assert [registry.has(4, length) for length in (1, 2, 3)] == [True, False, True]
    assert registry.stats.evictions == 1
    registry.check_integrity()


def test_the_bytes_are_limited() -> None:
    """Graphs over the budget go; one that is over it by itself is refused, and says what it holds."""
    sizes = {"capture_sizes": (4,), "max_batch_size": 4}
    alone = CUDAGraphRegistry(CUDAGraphConfig(**sizes))
    one = alone.capture(4, 1, double, {"x": (4, 3)}).inputs.nbytes
    held = alone.memory_bytes
    limit = held + 2 * one
    registry = CUDAGraphRegistry(CUDAGraphConfig(**with_options(sizes, memory_budget_bytes=limit)))
    first = registry.capture(4, 1, double, {"x": (4, 3)})
    second = registry.capture(4, 2, double, {"x": (4, 3, 1)})
    registry.capture(4, 3, double, {"x": (4, 3, 1, 1)})
    registry.capture(4, 4, double, {"x": (4, 3, 1, 1, 1)})
    assert registry.memory_bytes <= limit
    assert first.state is EntryState.EVICTED
    budget = held - 1
    with pytest.raises(CaptureError, match=f"holds {held} bytes, for which there is no room in .*={budget}"):
        CUDAGraphRegistry(CUDAGraphConfig(**with_options(sizes, memory_budget_bytes=budget))).capture(
            4, 1, double, {"x": (4, 3)}
        )
    assert (first.key, second.key) == ((4, 1), (4, 2))


def test_a_partly_filled_graph_is_named_by_its_size(registry: CUDAGraphRegistry) -> None:
    """With ``size`` the example fills some rows; the key is that of the graph."""
    entry = registry.capture(3, 1, double, {"x": (3, 3)}, size=4)
    assert (registry.has(3, 1), registry.get(4, 1)) == (False, entry)
    assert entry.size == 4


def test_an_entry_refuses_too_many_rows(registry: CUDAGraphRegistry) -> None:
    """A batch larger than the graph never reaches its memory."""
    entry = registry.capture(4, 1, double, {"x": (4, 3)})
    with pytest.raises(GuardError, match="1 to 4 rows for this graph, got 5"):
        entry.replay({"x": torch.ones(5, 3)})


def test_what_the_first_run_alone_makes_stays(registry: CUDAGraphRegistry) -> None:
    """A table that a module makes when it is first called is made by the warm-up, and does not stop the capture."""

    class Lazy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.full((3,), 2.0)
            return x * self.table

    model = Lazy()
    entry = registry.capture(4, 1, model, {"x": (4, 3)})
    x = torch.randn(4, 3)
    assert model.table is not None
    assert torch.equal(entry.replay({"x": x}), x * 2)
