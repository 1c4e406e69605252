"""``CUDAGraphManager``: decides by configuration which batches graphs serve, pads them, and serves them."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Reason, eager_break
from graphdispatch.backends import get_backend
from graphdispatch.engines import CUDAGraphConfig, CUDAGraphManager, OutputView
from graphdispatch.errors import ConfigError, FallbackError, GuardError, ReplayError, StaleOutputError

from ..helpers import with_options

FULL, NONE, DECODE = CUDAGraphMode.FULL, CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY
PIECEWISE = CUDAGraphMode.PIECEWISE


def make(**settings: Any) -> CUDAGraphManager:
    """A manager with the sizes 2, 4 and 8 that captures at once."""
    defaults: dict[str, Any] = {"capture_sizes": (2, 4, 8), "max_batch_size": 8}
    return CUDAGraphManager(CUDAGraphConfig(**with_options(defaults | settings, capture_after=1)))


def double(x: torch.Tensor) -> torch.Tensor:
    """Twice the input."""
    return x * 2


def run(manager: CUDAGraphManager, fn: Callable[..., Any], rows: int, times: int = 1, seq_len: int = 1) -> None:
    """Serve so many different batches, and compare each with eager."""
    for _ in range(times):
        x = torch.randn(rows, 3)
        assert torch.equal(manager.execute_or_capture(rows, seq_len, fn, {"x": x}), fn(x))


def test_a_manager_needs_no_configuration() -> None:
    """The defaults serve FULL graphs."""
    manager = CUDAGraphManager()
    assert (manager.mode, manager.is_enabled) == (FULL, True)


def test_the_third_batch_is_a_hit() -> None:
    """The first captures, the second compares, the third is a replay; all are right."""
    manager = make()
    run(manager, double, 4, times=3)
    assert (manager.stats.captures, manager.stats.verifications, manager.stats.hits) == (1, 1, 1)


def test_a_size_is_captured_when_it_was_seen_often_enough() -> None:
    """``capture_after`` sightings of a padded size, from whatever batches, lead to a capture."""
    manager = make(capture_after=3)
    run(manager, double, 3)
    assert not manager.should_capture(4, 1)
    run(manager, double, 4)
    assert manager.should_capture(3, 1)
    assert manager.stats.captures == 0
    run(manager, double, 3)
    assert manager.stats.captures == 1
    assert manager.stats.reasons[Reason.FIRST_SIGHTING] == 2


def test_batches_are_padded_to_the_next_size() -> None:
    """One graph serves all batches up to its size, and the padding is counted."""
    manager = make()
    for rows in (3, 4, 3, 4):
        run(manager, double, rows)
    assert manager.registry.num_graphs == 1
    assert (manager.stats.real_rows, manager.stats.padded_rows) == (7, 8)


def test_a_function_that_mixes_rows_is_never_served_padded() -> None:
    """Captured and compared with full batches, it is compared again when padding comes, and stays eager."""
    manager = make()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)

    run(manager, fn, 4, times=3)
    assert manager.stats.hits == 1
    run(manager, fn, 3, times=3)
    assert (manager.stats.hits, manager.stats.reasons[Reason.VERIFICATION_FAILED]) == (1, 3)


@pytest.mark.parametrize(("mode", "decode", "mixed"), [(FULL, FULL, FULL), (DECODE, FULL, NONE), (NONE, NONE, NONE)])
def test_the_mode_of_a_batch(mode: CUDAGraphMode, decode: CUDAGraphMode, mixed: CUDAGraphMode) -> None:
    """One token per row is decode; FULL_DECODE_ONLY leaves all else to eager."""
    manager = make(mode=mode)
    assert (manager.get_mode_for_batch(4, 1), manager.get_mode_for_batch(4, 16)) == (decode, mixed)


def test_decode_only_serves_decode_only() -> None:
    """A mixed batch runs eagerly, with its reason, and makes no graph."""
    manager = make(mode="full_decode_only")
    run(manager, double, 4, times=3, seq_len=16)
    assert manager.stats.reasons == {Reason.MODE_MISMATCH: 3}
    run(manager, double, 4, times=3)
    assert manager.stats.hits == 1


def test_the_mode_is_settable_by_name_and_value() -> None:
    """Graphs stay while it is NONE and serve again after."""
    manager = make()
    run(manager, double, 4, times=3)
    manager.mode = "none"
    assert (manager.mode, manager.is_enabled, manager.should_capture(2, 1)) == (NONE, False, False)
    run(manager, double, 4)
    assert manager.stats.reasons[Reason.DISABLED] == 1
    manager.mode = 2
    run(manager, double, 4)
    assert (manager.mode, manager.stats.hits, manager.stats.captures) == (FULL, 2, 1)


def test_all_modes_are_served() -> None:
    """In FULL_AND_PIECEWISE decode batches go to full graphs and others to graphs in pieces."""
    manager = make(mode="FULL_AND_PIECEWISE")
    host = eager_break(lambda x: x + float(x.sum() * 0))

    def prefill(x: torch.Tensor) -> torch.Tensor:
        return host(x) * 2

    run(manager, double, 4, times=4)
    for _ in range(4):
        x = torch.randn(4, 3)
        with torch.no_grad():
            assert torch.equal(manager.execute_or_capture(4, 7, prefill, {"x": x}), x * 2)
    entries = [manager.registry.get(4, length) for length in (1, 7)]
    assert [entry is not None and entry.mode for entry in entries] == [FULL, PIECEWISE]
    assert manager.stats.hits == 4


def test_a_mode_may_replace_disabled() -> None:
    """The sizes of the configuration are there whatever mode it began with."""
    manager = CUDAGraphManager(CUDAGraphConfig.disabled())
    run(manager, double, 4)
    assert manager.stats.reasons == {Reason.DISABLED: 1}
    manager.mode = FULL
    run(manager, double, 4, times=4)
    assert manager.stats.captures == 1


@pytest.mark.parametrize(
    ("rows", "seq_len", "reason"),
    [(9, 1, Reason.ABOVE_LARGEST_SIZE), (4, 9000, Reason.NOT_CAPTURED), (0, 1, Reason.NO_ROWS)],
)
def test_what_no_size_holds_is_eager(rows: int, seq_len: int, reason: Reason) -> None:
    """A batch past a limit runs eagerly, with the reason."""
    manager = make()
    run(manager, double, rows, seq_len=seq_len)
    assert manager.stats.reasons == {reason: 1}
    assert manager.get_mode_for_batch(rows, seq_len) is NONE


def test_should_capture_is_false_once_captured() -> None:
    """It tells what the next call does: capture the first time, replay after."""
    manager = make()
    assert manager.should_capture(3, 1)
    run(manager, double, 3)
    assert not manager.should_capture(3, 1)
    assert not manager.should_capture(4, 1)


def test_a_failed_capture_is_not_tried_at_once() -> None:
    """It answers eagerly, is quarantined with its reason, and no exception is seen."""
    manager = make()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum())

    run(manager, fn, 4, times=3)
    assert manager.stats.reasons == {Reason.CAPTURE_UNSAFE: 3}
    assert manager.stats.capture_failures == 1
    assert not manager.should_capture(4, 1)


def test_lambdas_in_a_loop_are_one_callable() -> None:
    """A lambda that is written anew each time, over the same variables, is served by one graph."""
    manager = make()
    weight = torch.randn(3)
    for _ in range(4):
        x = torch.randn(4, 3)
        assert torch.equal(manager.execute_or_capture(4, 1, lambda x: x * weight, {"x": x}), x * weight)
    assert (manager.stats.captures, manager.stats.hits) == (1, 2)


def test_another_callable_is_not_served_by_the_old_graph() -> None:
    """Under the same key each callable has a graph of its own."""
    manager = make()
    run(manager, double, 4, times=3)
    run(manager, lambda x: x * 3, 4, times=3)
    assert (manager.stats.captures, manager.registry.num_graphs) == (2, 2)


def test_callables_that_alternate_both_keep_their_graphs() -> None:
    """Two models under one key are captured once each, and the size is seen often enough for each by itself."""
    manager = make(capture_after=2)
    models = [nn.Linear(3, 3).eval().requires_grad_(False) for _ in range(2)]
    for i in range(40):
        model, x = models[i % 2], torch.randn(4, 3)
        assert torch.equal(manager.execute_or_capture(4, 1, model, {"input": x}), model(x))
    assert (manager.stats.captures, manager.stats.hits) == (2, 40 - 2 * 3)
    assert manager.stats.reasons[Reason.FIRST_SIGHTING] == 2


def test_callables_share_the_room_there_is() -> None:
    """They keep within ``max_cached_graphs``, and what alternates under it does not thrash."""
    manager = make(capture_after=2, max_cached_graphs=1)
    fns = [lambda x, n=n: x * n for n in range(3)]
    for i in range(60):
        manager.execute_or_capture(4, 1, fns[i % 3], {"x": torch.randn(4, 3)})
    assert manager.registry.num_graphs == 1
    assert (manager.stats.captures, manager.stats.hits) == (1, 17)
    manager.registry.check_integrity()


def test_callables_that_come_once_are_not_kept() -> None:
    """Closures that are new each time are neither captured nor remembered, and take no graph from others."""
    manager = make(capture_after=2)
    run(manager, double, 4, times=3)
    for _ in range(50):
        weight = torch.randn(3)
        run(manager, lambda x, weight=weight: x * weight, 4, times=1)
    run(manager, double, 4, times=1)
    assert (manager.stats.captures, manager.registry.num_graphs) == (1, 1)
    assert len(manager.registry._callables) == 1 + 8
    assert manager.stats.hits == 1


def test_moved_weights_are_captured_anew() -> None:
    """Weights that moved are never read at their old place."""
    manager = make()
    model = nn.Linear(3, 3).requires_grad_(False)

    def step(x: torch.Tensor) -> Any:
        return model(x)

    run(manager, step, 4, times=3)
    model.weight.data = torch.randn(3, 3)
    run(manager, step, 4, times=3)
    assert (manager.stats.captures, manager.stats.hits) == (2, 2)


def test_inputs_of_another_kind_have_a_graph_of_their_own() -> None:
    """Another dtype under the same key is not cast into the graph."""
    manager = make()
    run(manager, double, 4, times=3)
    x = torch.arange(12).reshape(4, 3)
    for _ in range(4):
        assert torch.equal(manager.execute_or_capture(4, 1, double, {"x": x}), x * 2)
    assert (manager.stats.captures, manager.registry.num_graphs) == (2, 2)


def test_state_is_written_once_for_each_call() -> None:
    """Through capture, comparison and hit a counter counts calls."""
    manager = make()
    count = torch.zeros(1)

    def step(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * 2

    for calls in range(1, 6):
        manager.execute_or_capture(4, 1, step, {"x": torch.randn(4, 3)})
        assert count.item() == calls
    assert manager.stats.hits == 3


def test_gradients_run_eagerly() -> None:
    """An input that requires a gradient gets an output that can give it."""
    manager = make()
    x = torch.randn(4, 3, requires_grad=True)
    assert manager.execute_or_capture(4, 1, double, {"x": x}).requires_grad
    assert manager.stats.reasons == {Reason.NEEDS_GRADIENTS: 1}


def test_nothing_replays_inside_a_capture() -> None:
    """While another capture watches the thread the manager calls the function as it is."""
    manager = make()
    run(manager, double, 4, times=3)
    with get_backend("cpu").watched():
        run(manager, double, 4)
    assert manager.stats.reasons[Reason.INSIDE_CAPTURE] == 1
    assert manager.stats.hits == 1


@pytest.mark.parametrize("times", [1, 3])
def test_output_shapes_are_checked_on_every_path(times: int) -> None:
    """Whether eager, at the capture or on a hit: an output that is not as promised is an error."""
    manager = make()
    for _ in range(times - 1):
        run(manager, double, 4)
    with pytest.raises(ConfigError, match=r"output 'y' must have shape \(4, 9\) as output_shapes says, got \(4, 3\)"):
        manager.execute_or_capture(4, 1, double, {"x": torch.randn(4, 3)}, {"x": (4, 3)}, {"y": (4, 9)})


def test_input_shapes_are_checked_before_anything_runs() -> None:
    """Inputs that are not as promised never reach the function."""
    runs: list[torch.Tensor] = []
    with pytest.raises(ConfigError, match=r"input 'x' must have shape \(4, 9\)"):
        make().execute_or_capture(4, 1, runs.append, {"x": torch.randn(4, 3)}, {"x": (4, 9)})
    assert runs == []


def test_strict_raises_instead_of_eager() -> None:
    """Steps on the way to a graph are allowed, a fallback is not."""
    manager = make(strict=True)
    run(manager, double, 4, times=3)
    with pytest.raises(FallbackError, match="larger than the largest graph") as caught:
        run(manager, double, 9)
    assert caught.value.reason is Reason.ABOVE_LARGEST_SIZE


def test_strict_tells_why_a_capture_failed() -> None:
    """The message has the detail, not only the class of failure."""
    with pytest.raises(FallbackError, match="item"):
        make(strict=True).execute_or_capture(4, 1, lambda x: x * x.sum().item(), {"x": torch.randn(4, 3)})


def test_an_error_of_the_function_passes_through() -> None:
    """The function's own exception is the caller's, and the manager goes on."""
    manager = make()

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        manager.execute_or_capture(4, 1, broken, {"x": torch.randn(4, 3)})
    run(manager, double, 4, times=3)
    assert manager.stats.hits == 1


def test_views_come_from_every_path() -> None:
    """With ``outputs='view'`` every answer is a handle; that of a replay goes stale with the next."""
    manager = make(options=CUDAGraphOptions(outputs="view"))
    answers = [manager.execute_or_capture(4, 1, double, {"x": torch.randn(4, 3)}) for _ in range(4)]
    answers.append(manager.execute_or_capture(9, 1, double, {"x": torch.randn(9, 3)}))
    assert all(isinstance(answer, OutputView) for answer in answers)
    with pytest.raises(StaleOutputError):
        answers[2].get()
    assert not answers[3].is_stale
    assert not answers[0].is_stale


def test_a_graph_is_captured_and_replayed_by_hand() -> None:
    """For the size that serves the batch; smaller batches go to it padded, and nothing runs in Python."""
    manager = make()
    entry = manager.capture_graph(3, 1, double, {"x": (3, 3)}, {"y": (3, 3)})
    assert entry.size == 4
    for rows in (3, 4, 3):  # the first is compared with the function, since the example was zeros
        x = torch.randn(rows, 3)
        assert torch.equal(manager.replay_graph(rows, 1, {"x": x}), x * 2)
    assert (manager.stats.captures, manager.stats.verifications, manager.stats.hits) == (1, 1, 2)


def test_a_graph_that_cannot_serve_is_not_captured() -> None:
    """A batch past the limits has no size to be captured for."""
    with pytest.raises(ConfigError, match="batch_size=9, seq_len=1 is served by no graph in mode FULL with at most 8"):
        make().capture_graph(9, 1, double, {"x": (9, 3)})


def test_replaying_needs_a_graph() -> None:
    """The message says how to get one."""
    with pytest.raises(ReplayError, match=r"no graph serves batch_size=4, seq_len=1; capture_graph\(\) it first"):
        make().replay_graph(4, 1, {"x": torch.randn(4, 3)})


def test_replaying_after_weights_moved_is_refused() -> None:
    """By hand there is no eager to go to, so it is an error."""
    manager = make()
    model = nn.Linear(3, 3).requires_grad_(False)
    manager.capture_graph(4, 1, lambda x: model(x), {"x": (4, 3)})
    model.weight.data = torch.randn(3, 3)
    with pytest.raises(ReplayError, match="no graph serves batch_size=4, seq_len=1"):
        manager.replay_graph(4, 1, {"x": torch.randn(4, 3)})


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({"y": torch.ones(4, 3)}, r"inputs must be named \['x'\], got \['y'\]"),
        ({}, r"inputs must be named \['x'\], got \[\]"),
        ({"x": torch.ones(3, 3)}, "inputs must have batch_size=4 rows, got 3"),
        ({"x": torch.ones(4, 3, dtype=torch.float64)}, "got .*float64"),
        ({"x": torch.ones(4, 1)}, r"must have shape \(4, 3\)"),
        ({"x": torch.ones(4, 3).to_sparse()}, "must be a strided tensor, got torch.sparse_coo"),
        ({"x": [[1.0] * 3] * 4}, "must be a strided tensor, got list"),
    ],
)
def test_replaying_refuses_inputs_that_do_not_fit(inputs: dict[str, Any], named: str) -> None:
    """Before anything is copied: the static input is what it was."""
    manager = make()
    entry = manager.capture_graph(4, 1, double, {"x": (4, 3)})
    before = entry.inputs.views(4)[0].clone()
    with pytest.raises(GuardError, match=named):
        manager.replay_graph(4, 1, inputs)
    assert torch.equal(entry.inputs.views(4)[0], before)


def test_reset_forgets_everything() -> None:
    """Graphs, sightings and counts; the next call begins anew."""
    manager = make(capture_after=2)
    run(manager, double, 4, times=4)
    manager.reset()
    assert (manager.registry.num_graphs, manager.stats.calls) == (0, 0)
    run(manager, double, 4)
    assert manager.stats.reasons == {Reason.FIRST_SIGHTING: 1}


def test_threads_share_a_manager() -> None:
    """Every thread gets its own batch's answer."""
    manager = make()
    wrong: list[torch.Tensor] = []

    def serve(seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for step in range(30):
            x = torch.randn(1 + step % 8, 3, generator=draw)
            if not torch.equal(manager.execute_or_capture(len(x), 1, double, {"x": x}), x * 2):
                wrong.append(x)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert manager.stats.calls == 120
    manager.registry.check_integrity()


def test_repr_is_a_status_line() -> None:
    """Mode, graphs and what was served."""
    manager = make()
    run(manager, double, 4, times=3)
    assert repr(manager).startswith("<CUDAGraphManager FULL: 1 graphs, <CUDAGraphStats 3 calls, 33.3 % by graphs")
