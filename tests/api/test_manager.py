"""``CUDAGraphManager`` decides which batches graphs serve, and pads them; ``CUDAGraphRegistry`` keeps the graphs.

Arrays of NumPy are served as tensors are, and answered in arrays.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Reason, eager_break
from graphdispatch.engines import CUDAGraphConfig, CUDAGraphManager, CUDAGraphRegistry
from graphdispatch.errors import CaptureError, ConfigError, FallbackError, GuardError, ReplayError

from ..helpers import Behind, collecting, double, in_threads, with_options

FULL, NONE, DECODE = CUDAGraphMode.FULL, CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY


@pytest.fixture
def registry() -> Iterator[CUDAGraphRegistry]:
    """A registry with the default limits, whose accounting is checked after the test."""
    made = CUDAGraphRegistry()
    yield made
    made.check_integrity()


def make(**settings: Any) -> CUDAGraphManager:
    """A manager with the sizes 2, 4 and 8 that captures at once."""
    defaults: dict[str, Any] = {"capture_sizes": (2, 4, 8), "max_batch_size": 8}
    return CUDAGraphManager(CUDAGraphConfig(**with_options(defaults | settings, capture_after=1)))


def unsafe(x: torch.Tensor) -> torch.Tensor:
    """What no graph can hold."""
    return x * x.sum().item()


def run(manager: CUDAGraphManager, fn: Callable[..., Any], rows: int = 4, times: int = 1, seq_len: int = 1) -> None:
    """Serve so many batches, each compared with eager."""
    for _ in range(times):
        x = torch.randn(rows, 3)
        assert torch.equal(manager.execute_or_capture(rows, seq_len, fn, {"x": x}), fn(x))


def test_the_third_batch_is_a_hit() -> None:
    """The first captures, the second compares, the third is a replay, with no more configuration than a size.

    ``should_capture`` knows it, and that nothing is captured frozen, be it of a size that never came.
    """
    assert (CUDAGraphManager().mode, CUDAGraphManager().is_enabled) == (FULL, True)
    manager = make()
    assert manager.should_capture(3, 1)
    run(manager, double, 4, times=3)
    assert (manager.stats.captures, manager.stats.verifications, manager.stats.hits) == (1, 1, 1)
    assert (manager.should_capture(3, 1), manager.should_capture(5, 1)) == (False, True)
    manager.freeze()
    assert not manager.should_capture(5, 1)
    assert repr(manager).startswith("<CUDAGraphManager FULL: 1 graphs, <CUDAGraphStats 3 calls, 33.3 % by graphs")


def test_a_size_is_captured_when_it_was_seen_often_enough() -> None:
    """``capture_after`` sightings of a padded size lead to a capture, whatever the batches; ``reset`` forgets them."""
    manager = make(capture_after=3)
    run(manager, double, 3)
    assert not manager.should_capture(4, 1)
    run(manager, double, 4)
    assert manager.should_capture(3, 1)
    assert manager.stats.captures == 0
    run(manager, double, 3)
    assert manager.stats.captures == 1
    assert manager.stats.reasons[Reason.FIRST_SIGHTING] == 2
    manager.reset()
    assert (manager.num_graphs, manager.stats.calls) == (0, 0)
    run(manager, double, 4)
    assert manager.stats.reasons == {Reason.FIRST_SIGHTING: 1}


@pytest.mark.parametrize(("mode", "decode", "mixed"), [(FULL, FULL, FULL), (DECODE, FULL, NONE), (NONE, NONE, NONE)])
def test_the_mode_of_a_batch(mode: CUDAGraphMode, decode: CUDAGraphMode, mixed: CUDAGraphMode) -> None:
    """One token per row is decode; FULL_DECODE_ONLY leaves all else to eager, with its reason."""
    manager = make(mode=mode)
    assert (manager.get_mode_for_batch(4, 1), manager.get_mode_for_batch(4, 16)) == (decode, mixed)
    run(manager, double, times=3, seq_len=16)
    run(manager, double, times=3)
    assert manager.stats.hits == (decode is FULL) + (mixed is FULL)
    assert manager.stats.reasons[Reason.MODE_MISMATCH] == 3 * (mode is DECODE)


@pytest.mark.parametrize("config", [None, CUDAGraphConfig.disabled()], ids=["later", "disabled"])
def test_the_mode_is_settable_by_name_and_value(config: CUDAGraphConfig | None) -> None:
    """Graphs stay while it is NONE and serve again after; a manager may begin with it."""
    manager = CUDAGraphManager(config) if config else make(mode="none")
    run(manager, double)
    assert (manager.mode, manager.is_enabled, manager.should_capture(2, 1)) == (NONE, False, False)
    assert manager.stats.reasons == {Reason.DISABLED: 1}
    manager.mode = FULL
    run(manager, double, times=4)
    captures, hits = manager.stats.captures, manager.stats.hits
    manager.mode = "none"
    run(manager, double)
    assert (captures, manager.stats.reasons[Reason.DISABLED]) == (1, 2)
    manager.mode = 2
    run(manager, double)
    assert (manager.mode, manager.stats.hits, manager.stats.captures) == (FULL, hits + 1, 1)


def test_all_modes_are_served() -> None:
    """In FULL_AND_PIECEWISE decode batches go to full graphs and others to graphs in pieces."""
    manager = make(mode="FULL_AND_PIECEWISE")
    host = eager_break(lambda x: x + float(x.sum() * 0))
    run(manager, double, times=4)
    run(manager, lambda x: host(x) * 2, times=4, seq_len=7)
    entries = [manager.get(4, length) for length in (1, 7)]
    assert [entry is not None and entry.mode for entry in entries] == [FULL, CUDAGraphMode.PIECEWISE]
    assert manager.stats.hits == 4


@pytest.mark.parametrize(
    ("rows", "seq_len", "reason", "option"),
    [
        (9, 1, Reason.ABOVE_LARGEST_SIZE, "max_batch_size"),
        (4, 9000, Reason.NOT_CAPTURED, "max_seq_len"),
        (0, 1, Reason.NO_ROWS, ""),
    ],
)
def test_what_no_size_holds_is_eager(
    rows: int, seq_len: int, reason: Reason, option: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch past a limit runs eagerly, with the reason, which names the option that sets the limit."""
    manager = make()
    with caplog.at_level("INFO", "graphdispatch"):
        run(manager, double, rows, seq_len=seq_len)
    assert option in caplog.text
    assert manager.stats.reasons == {reason: 1}
    assert manager.get_mode_for_batch(rows, seq_len) is NONE


def test_callables_that_alternate_both_keep_their_graphs() -> None:
    """Two models under one key are captured once each, and the size is seen often enough for each by itself."""
    manager = make(capture_after=2)
    models = [nn.Linear(3, 3).eval().requires_grad_(False) for _ in range(2)]
    for i in range(40):
        model, x = models[i % 2], torch.randn(4, 3)
        assert torch.equal(manager.execute_or_capture(4, 1, model, {"input": x}), model(x))
    assert (manager.stats.captures, manager.stats.hits) == (2, 40 - 2 * 3)
    assert manager.stats.reasons[Reason.FIRST_SIGHTING] == 2


def test_callables_that_come_once_are_not_kept() -> None:
    """Closures that are new each time are neither captured nor remembered, and take no graph from others."""
    manager = make(capture_after=2)
    run(manager, double, times=3)
    for _ in range(50):
        weight = torch.randn(3)
        run(manager, lambda x, weight=weight: x * weight)
    run(manager, double)
    assert (manager.stats.captures, manager.num_graphs) == (1, 1)
    assert len(manager._callables) == 1 + 8
    assert manager.stats.hits == 1


@pytest.mark.parametrize("times", [1, 3])
def test_output_shapes_are_checked_on_every_path(times: int) -> None:
    """Whether eager, at the capture or on a hit: an output that is not as promised is an error."""
    manager = make()
    run(manager, double, times=times - 1)
    with pytest.raises(ConfigError, match=r"output 'y' must have shape \(4, 9\) as output_shapes says, got \(4, 3\)"):
        manager.execute_or_capture(4, 1, double, {"x": torch.randn(4, 3)}, {"x": (4, 3)}, {"y": (4, 9)})


def test_a_finalizer_calls_the_manager() -> None:
    """The collector calls it wherever the manager looks for its callables, whose lock the thread holds then."""
    manager, functions = make(), [lambda x, by=by: x * by for by in range(3)]

    def calls() -> None:
        for fn in functions:
            run(manager, fn)

    in_threads(lambda: collecting(calls, lambda: run(manager, double)))


def test_a_graph_is_captured_and_replayed_by_hand() -> None:
    """For the size that serves the batch; smaller batches go to it padded, if they have the rows that were said, and
    nothing runs in Python."""
    manager = make()
    with pytest.raises(ReplayError, match=r"no graph serves batch_size=4, seq_len=1; capture_graph\(\) it first"):
        manager.replay_graph(4, 1, {"x": torch.randn(4, 3)})
    assert manager.capture_graph(3, 1, double, {"x": (3, 3)}, {"y": (3, 3)}).size == 4
    for rows in (3, 4, 3):  # the first is compared with the function, since the example was zeros
        x = torch.randn(rows, 3)
        assert torch.equal(manager.replay_graph(rows, 1, {"x": x}), x * 2)
    with pytest.raises(GuardError, match="inputs must have batch_size=4 rows, got 3"):
        manager.replay_graph(4, 1, {"x": torch.ones(3, 3)})
    assert (manager.stats.captures, manager.stats.verifications, manager.stats.hits) == (1, 1, 2)


def test_outputs_are_checked_by_name_where_they_have_names(registry: CUDAGraphRegistry) -> None:
    """Of a mapping the names count, not the order."""
    entry = registry.capture(4, 1, lambda x: {"sum": x.sum(1), "x": x + 0}, {"x": (4, 3)}, {"x": (4, 3), "sum": (4,)})
    assert entry.replay({"x": torch.ones(4, 3)})["sum"].tolist() == [3.0] * 4


def test_keys_are_exact(registry: CUDAGraphRegistry) -> None:
    """Neither another batch size nor another length finds a graph, and one that was removed is found no more."""
    entry = registry.capture(4, 16, double, {"x": (4, 3)})
    assert registry.get(4, 16) is entry
    assert [registry.get(3, 16), registry.get(5, 16), registry.get(4, 15)] == [None] * 3
    assert registry.remove(4, 16)
    assert not registry.remove(4, 16)
    assert (registry.has(4, 16), registry.memory_bytes) == (False, 0)
    with pytest.raises(ReplayError, match="evicted"):
        entry.replay({"x": torch.ones(4, 3)})


def test_dynamic_says_where_the_batch_is(registry: CUDAGraphRegistry) -> None:
    """The batch may be another dimension, and an input may have none; ``size`` names a partly filled graph."""
    example = {"x": torch.randn(3, 2), "scale": torch.randn(3)}
    entry = registry.capture(2, 1, lambda x, scale: x * scale[:, None], inputs=example, dynamic={"x": 1}, size=4)
    assert (registry.has(2, 1), registry.get(4, 1), entry.size) == (False, entry, 4)
    x, scale = torch.randn(3, 2), torch.randn(3)
    assert torch.equal(entry.replay({"x": x, "scale": scale}), x * scale[:, None])
    with pytest.raises(GuardError, match="1 to 4 rows for this graph, got 5"):
        entry.replay({"x": torch.ones(3, 5), "scale": scale})


def test_a_function_of_one_batch_size_has_no_batch_dimension(registry: CUDAGraphRegistry) -> None:
    """With ``dynamic={}`` a function that fits one size alone is captured as it is, and takes that size alone; without
    it no other batch is served."""
    weights = torch.randn(4, 3)
    entry = registry.capture(4, 1, lambda x: x * weights, {"x": (4, 3)})
    assert torch.equal(entry.replay({"x": torch.ones(4, 3)}), weights)
    with pytest.raises(ReplayError, match="3 rows in a graph of 4"):
        entry.replay({"x": torch.ones(3, 3)})
    entry = registry.capture(4, 1, lambda x: x * weights, {"x": (4, 3)}, dynamic={})
    assert torch.equal(entry.replay({"x": torch.ones(4, 3)}), weights)
    with pytest.raises(GuardError, match=r"of shape \(4, 3\)"):
        entry.replay({"x": torch.ones(3, 3)})


def test_a_new_graph_of_a_key_takes_the_place_of_the_old_one() -> None:
    """Also where there may be no more graphs: that of another key stays, though it was used longer ago. A registry that
    refuses captures keeps the old graph."""
    options = CUDAGraphOptions(max_cached_graphs=2)
    registry = CUDAGraphRegistry(CUDAGraphConfig(capture_sizes=(1, 2), options=options))
    other = registry.capture(2, 1, double, {"x": (2, 3)})
    old = registry.capture(1, 1, double, {"x": (1, 3)})
    new = registry.capture(1, 1, lambda x: x * 3, {"x": (1, 3)})
    assert (registry.get(1, 1), registry.get(2, 1), old.is_released) == (new, other, True)
    registry.freeze()
    with pytest.raises(CaptureError, match="freeze"):
        registry.capture(1, 1, double, {"x": (1, 3)})
    assert registry.get(1, 1) is new


def test_a_failing_capture_leaves_the_registry_usable(registry: CUDAGraphRegistry) -> None:
    """It raises with a reason and the cause, or the function's own error; it makes no entry, and touches no other."""
    kept = registry.capture(4, 1, double, {"x": (4, 3)})
    with pytest.raises(CaptureError, match=r"no graph for batch_size=4, seq_len=2: .*item") as caught:
        registry.capture(4, 2, unsafe, {"x": (4, 3)})
    assert caught.value.reason is Reason.CAPTURE_UNSAFE
    assert caught.value.__cause__ is not None
    with pytest.raises(KeyError, match="mine"):
        registry.capture(4, 2, lambda x: {}["mine"], {"x": (4, 3)})
    assert (registry.num_graphs, registry.stats.capture_failures) == (1, 1)
    assert registry.get(4, 1) is kept
    registry.capture(4, 2, double, {"x": (4, 3)})
    assert registry.num_graphs == 2


@pytest.mark.parametrize("how", ["sleep", "clear"])
def test_nothing_is_held_asleep_or_cleared(how: str) -> None:
    """Neither static inputs whose graph went for one of another callable, nor callables, which may hold weights."""
    manager = make(options=CUDAGraphOptions(max_cached_graphs=1))
    weights = [torch.full((3,), float(number)) for number in range(3)]
    for weight in weights:
        run(manager, lambda x, weight=weight: x * weight, times=3)
    assert (manager.stats.captures, manager.num_graphs) == (3, 1)
    held = [weakref.ref(weight) for weight in weights]
    getattr(manager, how)()
    assert manager.memory_bytes == 0
    del weights, weight
    gc.collect()
    assert [ref() for ref in held] == [None] * 3
    manager.wake()
    run(manager, double, times=3)
    assert manager.stats.captures == 4


def test_a_graph_of_a_callable_that_is_remembered_no_more_is_invalidated_too() -> None:
    """A call was still under way when others took its callable's place."""
    manager = make()
    one = manager._find(double)
    manager._callables = []
    for _ in range(3):
        one.server.serve(manager._route(one, 4, 1, FULL, {"x": 0}), (), {"x": torch.randn(4, 3)})
    entry = next(iter(manager._graph_cache))
    manager.invalidate()
    assert (manager.num_graphs, entry.is_released) == (0, True)


def doubled(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Twice the input, and its sums."""
    return {"y": x * 2, "sums": x.sum(1)}


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_arrays_come_back_as_arrays(mode: str) -> None:
    """On every path: eager, capturing, comparing, replaying; padded or not."""
    served = make(mode=mode)
    for rows in (4, 4, 3, 3, 4, 3, 9):
        x = np.random.default_rng(rows).standard_normal((rows, 5), dtype=np.float32)
        found = served.execute_or_capture(rows, 1, doubled, {"x": x})
        assert type(found["y"]) is type(found["sums"]) is np.ndarray
        np.testing.assert_array_equal(found["y"], x * 2)
        np.testing.assert_array_equal(found["sums"], torch.from_numpy(x).sum(1).numpy())
    assert bool(served.stats.hits) is (mode == "FULL")


@pytest.mark.parametrize("is_inference", [False, True])
def test_what_is_written_is_in_the_array(is_inference: bool) -> None:
    """By eager as by a graph, and in one that torch shares. Memory that is read-only says so; what nobody writes is
    taken."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1).sum(1)

    served, plain = make(), np.arange(20, dtype=np.float32).reshape(4, 5)
    with torch.inference_mode(is_inference):
        for made in (plain.copy, lambda: plain.astype(">f4"), lambda: plain[:, ::-1].copy()[:, ::-1]):
            for _ in range(4):
                x = made()
                served.execute_or_capture(4, 1, step, {"x": x})
                np.testing.assert_array_equal(x, plain + 1)
        assert served.stats.hits
        fixed = plain.copy()
        fixed.setflags(write=False)
        with pytest.raises(ValueError, match="read-only"):
            served.execute_or_capture(4, 1, step, {"x": fixed})
        np.testing.assert_array_equal(served.execute_or_capture(4, 1, doubled, {"x": fixed})["y"], plain * 2)


@pytest.mark.parametrize("turn", [slice(None), slice(None, None, -1)], ids=["shared", "copied"])
def test_arrays_that_share_memory(turn: slice) -> None:
    """One array under two names is one tensor. Two of which one tensor would not see what is written to the other are
    refused, unless nothing is written."""
    served, plain = make(), np.arange(20, dtype=np.float32).reshape(4, 5)
    for _ in range(4):
        x = plain.copy()[:, turn]
        found = served.execute_or_capture(4, 1, lambda x, y: x.add_(1) + y, {"x": x, "y": x})
        np.testing.assert_array_equal(found, 2 * (plain[:, turn] + 1))
        np.testing.assert_array_equal(x, plain[:, turn] + 1)
        both = {"x": x, "y": x[:, ::-1]}
        np.testing.assert_array_equal(served.execute_or_capture(4, 1, lambda x, y: x * y, both), x * x[:, ::-1])
        with pytest.raises(ConfigError, match="shares memory with input 'y'"):
            served.execute_or_capture(4, 1, lambda x, y: x.add_(1) + y, both)


def test_a_graph_captured_from_arrays_is_replayed_with_arrays() -> None:
    """By hand, too; one graph serves arrays and tensors. Who has tensors gets them, as what NumPy lacks."""
    served = make(capture_after=2)
    x = np.arange(20, dtype=np.float32).reshape(4, 5)
    served.capture_graph(4, 1, doubled, inputs={"x": x})
    for _ in range(2):  # compared, then replayed
        x = x + 1
        np.testing.assert_array_equal(served.replay_graph(4, 1, {"x": x})["y"], x * 2)
    found = served.replay_graph(4, 1, {"x": torch.from_numpy(x)})
    assert torch.equal(found["y"], torch.from_numpy(x) * 2)
    mixed = served.execute_or_capture(4, 1, lambda x, y: x + y, {"x": x, "y": torch.from_numpy(x)})
    assert torch.equal(mixed, torch.from_numpy(x) * 2)
    halves = served.execute_or_capture(4, 1, lambda x: (x, x.bfloat16()), {"x": x})
    assert [type(one) for one in halves] == [np.ndarray, torch.Tensor]
    assert served.num_graphs == 1


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(4, 3)[::-1],
        np.arange(12.0).reshape(4, 3).T,
        np.arange(12, dtype=">i4").reshape(4, 3),
        np.broadcast_to(np.arange(3.0), (4, 3)),
        np.zeros((4, 3), [("a", "i1"), ("b", "<f4")])["b"],
        np.zeros((0, 3)),
        np.ones((4, 3), bool),
        np.ones((4, 3), np.complex64),
        np.array(3.5),
    ],
    ids=["reversed", "transposed", "big endian", "read-only", "strided", "empty", "bool", "complex", "scalar"],
)
def test_every_array_is_taken(array: Any) -> None:
    """Those whose memory torch cannot share are copied, without a warning."""
    found = make(mode="NONE").execute_or_capture(4, 1, torch.clone, {"input": array}, dynamic={})
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([object()]), np.zeros(2, "M8[s]")])
def test_a_dtype_that_torch_lacks_is_named(array: Any) -> None:
    """With the input's name."""
    with pytest.raises(ConfigError, match="input 'x' is an array of dtype"):
        make(capture_after=2).execute_or_capture(1, 1, doubled, {"x": array})
    with pytest.raises(ConfigError, match="input 'x' must be a tensor"):  # a mask would be lost
        make(capture_after=2).execute_or_capture(1, 1, doubled, {"x": np.ma.masked_array([[1.0]], [[True]])})


def test_a_replay_that_would_pass_a_mode_by_is_refused() -> None:
    """``replay_graph`` raises inside a mode of torch that sees operators; ``execute_or_capture`` runs eagerly there."""
    manager, x = make(), torch.randn(4, 3)
    run(manager, double, 4, times=3)
    with Behind(lambda func, result: result + 1 if func is torch.ops.aten.mul.Tensor else result):
        with pytest.raises(ReplayError, match="no graph may replay now: a mode, transform or trace of torch"):
            manager.replay_graph(4, 1, {"x": x})
        assert torch.equal(manager.execute_or_capture(4, 1, double, {"x": x}), double(x))


def test_a_replay_that_would_lose_gradients_is_refused() -> None:
    """As ``execute_or_capture`` runs eagerly: of a module in training mode, with gradients on."""
    manager, module = make(), torch.nn.Linear(3, 3)
    inputs = {"input": torch.randn(4, 3)}
    manager.capture_graph(4, 1, module, inputs=inputs)
    with torch.enable_grad():
        with pytest.raises(ReplayError, match="the call needs gradients"):
            manager.replay_graph(4, 1, inputs)
        assert manager.execute_or_capture(4, 1, module, inputs).requires_grad
    assert torch.equal(manager.replay_graph(4, 1, inputs), module(inputs["input"]))


def test_strict_raises_instead_of_eager() -> None:
    """Steps on the way to a graph are allowed, a fallback is not; the message has the detail of a failed capture."""
    manager = make(strict=True)
    run(manager, double, times=3)
    with pytest.raises(FallbackError, match="larger than the largest graph") as caught:
        run(manager, double, 9)
    assert caught.value.reason is Reason.ABOVE_LARGEST_SIZE
    with pytest.raises(FallbackError, match="item"):
        run(manager, unsafe)
