"""The backend over ``torch.accelerator`` on the test device: the hazards are harmless, and what fails is said."""

import gc
import threading
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest
import torch
from queued_device import DEVICE, delays, fail_after, held, limit_memory, lose, memory_snapshot, pool_bytes, recover

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, DispatchKey, Reason, eager_break, graphed
from graphdispatch.backends import Backend, get_backend
from graphdispatch.backends.accelerator.graph import AcceleratorCapture
from graphdispatch.backends.accelerator.pool import AcceleratorPool
from graphdispatch.backends.base import Stream
from graphdispatch.backends.operator_mode import reveal_operators
from graphdispatch.engines import (
    AdaptiveDispatchPolicy,
    BatchDescriptor,
    CudagraphDispatcher,
    CUDAGraphWrapper,
    StreamDispatcher,
    cudagraph_context,
)
from graphdispatch.errors import BackendError, CaptureError, DeviceLostError, ReplayError

from ..helpers import AT_ONCE, Behind, assert_served, compiled_operator, in_threads, may_capture, run_python


@pytest.fixture
def backend() -> Backend:
    """The device's."""
    return get_backend("queued")


def x_of(value: float, rows: int = 4) -> torch.Tensor:
    """A batch."""
    return torch.full((rows, 3), float(value), device=DEVICE)


@pytest.mark.parametrize(
    ("owner", "name", "is_before"),
    [
        (AcceleratorPool, "begin_recording", False),
        (AcceleratorCapture, "resume", False),
        (AcceleratorCapture, "_end_on_own_stream", True),
        (AcceleratorCapture, "_end_on_own_stream", False),
    ],
)
def test_an_interrupt_ends_the_capture_on_the_device(
    owner: Any, name: str, is_before: bool, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes: the stream records no more, and the next calls are captured."""
    work = getattr(owner, name)

    def stopped(*args: Any) -> None:
        monkeypatch.undo()
        if not is_before:
            work(*args)
        raise KeyboardInterrupt

    step = graphed(lambda x: x * 2, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE, strict=True)
    monkeypatch.setattr(owner, name, stopped)
    stream = backend.current_stream()
    with pytest.raises(KeyboardInterrupt):
        step(x_of(1.0))
    assert (backend.current_stream(), backend.is_watched(), may_capture()) == (stream, False, True)
    for value in range(4):
        assert step(x_of(value)).cpu()[0, 0] == 2 * value
    assert step.last_decision.reason is Reason.EXACT


def test_a_caller_on_another_stream_waits() -> None:
    """The hazard of a missing wait: the pool's last use is waited for, however long it takes."""
    step = graphed(lambda x: (x * 2).cumsum(0), dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    for _ in range(4):
        step(torch.randn(4, 3, device=DEVICE))
    one, other = torch.Stream(DEVICE), torch.Stream(DEVICE)
    batches = [torch.randn(4, 3, device=DEVICE) for _ in range(2)]
    torch.accelerator.synchronize()
    with held(one):
        with one:
            first = step(batches[0])
        with other:
            second = step(batches[1])
        assert not other.query()
    one.synchronize()
    other.synchronize()
    assert step.last_decision.reason.is_graph
    torch.testing.assert_close([first, second], [(batch * 2).cumsum(0) for batch in batches])


def test_graphs_that_draw_run_one_after_the_other() -> None:
    """Those of one generator share its offset, in whatever pools and on whatever streams they are."""
    steps = [graphed(lambda x: (x * 2).cumsum(0), dynamic={"x": 0}, sizes=(4,), options=AT_ONCE) for _ in range(2)]
    for step in steps * 4:
        step(torch.randn(4, 3, device=DEVICE))
    for draws in (False, True):
        for step in steps:
            step.entries[0].uses_rng = draws
            step.entries[0]._plans.clear()
            step._route.groups[0].hits.clear()
        one, other = torch.Stream(DEVICE), torch.Stream(DEVICE)
        batches = [torch.randn(4, 3, device=DEVICE) for _ in steps]
        torch.accelerator.synchronize()
        with held(one):
            with one:
                steps[0](batches[0])
            with other:
                steps[1](batches[1])
            if draws:
                assert not other.query()
            else:
                other.synchronize()
        torch.accelerator.synchronize()


def test_a_callable_that_is_dropped_keeps_its_inputs_until_its_replay_is_done() -> None:
    """Nobody releases its graphs: the memory of its static inputs goes to others only after the stream's work."""
    step = graphed(lambda x: (x * 2).cumsum(0), dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    for _ in range(4):
        step(torch.randn(4, 3, device=DEVICE))
    batch, other = torch.randn(4, 3, device=DEVICE), torch.Stream(DEVICE)
    torch.accelerator.synchronize()
    with held(other):
        with other:
            answer = step(batch)
        del step
        gc.collect()
        junk = [torch.full((4, 3), 7.0, device=DEVICE) for _ in range(8)]
    torch.accelerator.synchronize()
    torch.testing.assert_close(answer, (batch * 2).cumsum(0))
    assert all(bool((one == 7).all()) for one in junk)


def test_static_inputs_of_another_signature_stand_against_no_break() -> None:
    """At a break the pool notes on which stream they were used, while the callable's operators are watched."""

    @eager_break
    def total(x: torch.Tensor) -> torch.Tensor:
        return x + float(x.sum())

    step = graphed(lambda x: total(x) * 2, dynamic={"x": 0}, sizes=(4,), mode="PIECEWISE", options=AT_ONCE)
    for dtype in (torch.float32, torch.float64):
        for _ in range(3):
            answer = step(x_of(1).to(dtype))
            assert (answer.cpu() == 26).all()
        assert step.last_decision.mode is CUDAGraphMode.PIECEWISE, step.last_decision


def test_a_pool_forgets_graphs_that_somebody_drops(backend: Backend) -> None:
    """Two callables share it. One of them ends without a word; with the graphs of the other its memory comes back."""
    pool = backend.make_pool()
    both = [CUDAGraphWrapper(lambda x: (x * 2).cumsum(0), backend=backend, pool=pool) for _ in range(2)]
    with cudagraph_context(CUDAGraphMode.FULL, BatchDescriptor(4)):
        for wrapper in both:
            wrapper(x_of(1.0))
    assert len(pool._graphs) == 2
    del wrapper, both[0]
    gc.collect()
    both[0].clear_cache()
    assert (len(pool._graphs), pool.nbytes) == (0, 0)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_delays_change_no_answer(seed: int) -> None:
    """On several streams, with batches of several sizes."""
    step = graphed(lambda x: (x * 2).softmax(-1) + x, dynamic={"x": 0}, sizes=(2, 4), options=AT_ONCE)
    streams = [torch.Stream(DEVICE) for _ in range(3)]
    delays(seed, 200)
    torch.manual_seed(seed)
    for turn in range(12):
        stream = streams[turn % 3]
        with stream:
            x = torch.randn(turn % 4 + 1, 3, device=DEVICE)
            torch.testing.assert_close(step(x).cpu(), (x * 2).softmax(-1).cpu() + x.cpu())


@pytest.mark.parametrize("calls", range(12))
@pytest.mark.parametrize("fault", ["allocation", "launch"])
def test_a_fault_of_a_capture_is_contained(fault: str, calls: int) -> None:
    """Whichever allocation or launch of the first calls fails: eager's error, or eager's answer; then it serves."""
    step = graphed(lambda x: (x * 2).cumsum(0), dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    x = torch.randn(4, 3, device=DEVICE)
    expected = (x * 2).cumsum(0).cpu()
    fail_after(fault, calls)
    for _ in range(2):
        try:
            answer = step(x)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            assert "injected" in str(error) or "out of memory" in str(error)  # noqa: PT017
        else:
            fail_after(fault, -1)
            torch.testing.assert_close(answer.cpu(), expected)
    recover()
    assert may_capture()
    assert torch.accelerator.current_stream().stream_id == 0
    for _ in range(70):
        torch.testing.assert_close(step(x).cpu(), expected)
    assert_served(step, x)


@pytest.mark.parametrize("calls", [1, 2, 4])
def test_a_lost_device_is_said(calls: int) -> None:
    """By a hit, by a comparison, and where batches are looked at before one; nobody remembers it afterwards."""
    step = graphed(lambda x: x + 1, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    for value in range(calls):
        x = x_of(value)
        step(x)
    lose()
    with pytest.raises(DeviceLostError, match="restart the process"):
        step(x)
    recover()
    assert may_capture()


@pytest.mark.parametrize("reads", [False, True])
def test_captures_and_comparisons_draw_and_write_nothing(reads: bool) -> None:
    """The calls see eager's numbers and leave eager's state and generator, also where the capture fails."""

    def counting(count: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        factor = float(x.sum()) if reads else 1.0
        return x * count.add_(1) * factor + torch.rand_like(x)

    ours, eager = (torch.zeros(1, device=DEVICE) for _ in range(2))
    options = CUDAGraphOptions(capture_after=1, verify_every=2)
    step = graphed(lambda x: counting(ours, x), dynamic={"x": 0}, sizes=(4,), options=options)
    module = torch.get_device_module(DEVICE)
    before = module.get_rng_state()
    got = [step(x_of(value)) for value in range(8)]
    after = module.get_rng_state()
    module.set_rng_state(before)
    for value, answer in enumerate(got):
        assert torch.equal(answer, counting(eager, x_of(value)))
    assert torch.equal(ours, eager)
    assert torch.equal(module.get_rng_state(), after)
    assert (step.stats.hits > 0) is not reads


def test_a_capture_without_memory_is_given_up() -> None:
    """The calls run eagerly, with the reason, and the memory is whole; with memory they are captured."""
    step = graphed(lambda x: (x.repeat(1, 40_000) * 2)[:, :3], dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    x = torch.randn(4, 3, device=DEVICE)
    expected = (x * 2).cpu()
    torch.testing.assert_close(step.unwrap()(x).cpu(), expected)
    torch.accelerator.empty_cache()
    limit_memory(torch.accelerator.memory_reserved() + (6 << 20))
    torch.testing.assert_close(step(x).cpu(), expected)
    assert step.last_decision.reason is Reason.OUT_OF_MEMORY, step.explain(x)
    limit_memory()
    for _ in range(40):
        x = torch.randn(4, 3, device=DEVICE)
        torch.testing.assert_close(step(x).cpu(), (x * 2).cpu())
    assert step.last_decision.reason.is_graph, step.explain(x)


def test_a_poisoned_capture_gives_its_handle_up(backend: Backend) -> None:
    """A graph of before keeps its memory; the next capture gets new memory, and works."""
    pool, x = backend.make_pool(), x_of(1)
    with backend.begin_capture(pool) as first:
        out = x + 1
    with (
        pytest.raises(CaptureError, match="previous error during capture") as caught,
        backend.begin_capture(pool),
        suppress(RuntimeError),
    ):
        x.sum().item()
    assert caught.value.reason is Reason.CAPTURE_UNSAFE
    with backend.begin_capture(pool) as second:
        other = x + 2
    first.graph.replay()
    second.graph.replay()
    assert (out.cpu()[0, 0], other.cpu()[0, 0]) == (2, 3)
    del out, other
    first.graph.reset()
    second.graph.reset()
    pool.trim()
    assert pool.nbytes == 0


def test_a_pools_bytes_are_the_allocators(backend: Backend) -> None:
    """And one replay that fails is reported."""
    pool, x = backend.make_pool(), x_of(1)
    with backend.begin_capture(pool) as capture:
        out = x + 1
    assert pool.nbytes == pool_bytes(pool.handle()) > 0
    fail_after("launch", 0)
    with pytest.raises(ReplayError, match="invalid configuration"):
        capture.graph.replay()
    capture.graph.replay()
    assert out.cpu()[0, 0] == 2


def pools() -> set[tuple[int, int]]:
    """The private pools that have memory."""
    return {each["segment_pool_id"] for each in memory_snapshot()} - {(0, 0)}


def test_static_outputs_of_a_released_graph_keep_no_memory() -> None:
    """They go before the graph does: its pool can only give back what nobody holds."""
    options = CUDAGraphOptions(memory_budget_bytes=100_000)
    step = graphed(lambda x: x.repeat(1, 100), dynamic={"x": 0}, sizes=(4,), options=options, outputs="static")
    before = pools()
    for value in range(4):
        step(x_of(value))
    assert (step.stats.captures, step.memory_bytes, step.entries) == (1, 0, [])
    assert pools() <= before


def test_a_compiled_operator_without_a_key_is_seen() -> None:
    """As on the CPU and CUDA: its work on raw memory would be seen by nobody."""

    def bump(x: torch.Tensor) -> None:
        x.add_(1)

    with compiled_operator("bump(Tensor(a!) x) -> ()", bump, "CompositeImplicitAutograd") as operator:
        names, x = list[str](), x_of(1)
        reveal_operators(x.device)
        with Behind(lambda func, result: (names.append(func.name()), result)[1]):
            operator(x)
    assert names == ["graphdispatch_compiled::bump"]


def test_a_step_of_a_dispatcher_keeps_the_callers_memory() -> None:
    """The caller's stream allocated it, and may have it back before the worker's stream has read it."""
    options = CUDAGraphOptions(verify=False)
    dispatcher = StreamDispatcher(lambda x: x * 2, 2, backend=get_backend("queued"), options=options)
    key = DispatchKey(4, 4)
    dispatcher.capture(key, (x_of(0),))
    torch.accelerator.synchronize()
    with ExitStack() as stack:
        for worker in dispatcher.workers:
            stack.enter_context(held(worker.stream))
        x = x_of(3)
        result, address = dispatcher.submit(key, x), x.data_ptr()
        del x
        other = x_of(50)
        assert other.data_ptr() != address
    assert result.result().cpu()[0, 0] == 6
    dispatcher.close()


@pytest.mark.parametrize(("tokens", "rows"), [(4, 4), (4, 3), (5, 5)], ids=["graph", "other shape", "no graph"])
def test_a_step_of_a_dispatcher_waits_for_the_caller_and_the_caller_for_it(tokens: int, rows: int) -> None:
    """A worker's stream waits for what the caller's was given before, and each that takes the result for the step;
    steps of one worker, given while it waits, keep their own inputs and outputs. So do steps that run eagerly."""
    options = CUDAGraphOptions(verify=False)
    dispatcher = StreamDispatcher(lambda x: x * 2, 1, backend=get_backend("queued"), options=options)
    key = DispatchKey(4, 4)
    dispatcher.capture(key, (x_of(0),))
    own, other = torch.Stream(DEVICE), torch.Stream(DEVICE)
    torch.accelerator.synchronize()
    with held(own):
        with own:
            batches = [x_of(value, rows) for value in (3, 4)]
            submitted = [dispatcher.submit(DispatchKey(tokens, tokens), x) for x in batches]
        assert not any(one.is_done for one in submitted)
        with other:
            sums = [one.result() + 1 for one in submitted]
    other.synchronize()
    assert all(one.is_done for one in submitted)
    assert [one.cpu()[0, 0] for one in sums] == [7, 9]
    dispatcher.close()


def test_a_weak_reference_keeps_nothing(backend: Backend) -> None:
    """Its memory is given again."""
    x = x_of(1)
    weak, address = backend.weak_reference(x), x.data_ptr()
    del x
    other = x_of(7)
    assert other.data_ptr() == address
    assert weak.cpu()[0, 0] == 7


def test_threads_on_one_stream_go_back_to_their_own(backend: Backend) -> None:
    """Whoever leaves it first: torch's stream, entered itself, would lead each to where the other one was."""
    shared, inside, left, after = backend.make_stream(), [threading.Event(), threading.Event()], threading.Event(), []

    def leaves_first() -> None:
        with backend.use_stream(backend.make_stream()) as own:
            with backend.use_stream(shared):
                inside[0].set()
                inside[1].wait(30)
            after.append(backend.current_stream() == own)
        left.set()

    def leaves_last() -> None:
        with backend.use_stream(backend.make_stream()) as own:
            inside[0].wait(30)
            with backend.use_stream(shared):
                inside[1].set()
                left.wait(30)
            after.append(backend.current_stream() == own)

    in_threads(leaves_first, leaves_last)
    assert after == [True, True]


def test_no_made_stream_is_that_of_captures(backend: Backend) -> None:
    """Although torch hands out the same few in turn."""
    streams = [backend.make_stream() for _ in range(100)]
    assert len(set(streams)) > 8
    assert backend.capture_stream not in streams


@pytest.mark.parametrize("gradients", [False, True])
def test_a_call_that_another_thread_records_is_refused(backend: Backend, gradients: bool) -> None:
    """A thread with torch's own stream, which is that of captures: what it submits is recorded, so its call says so;
    also one that needs gradients, and that no graph would serve."""
    step, x, results = graphed(lambda x: x + 1, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE), x_of(5), list[Any]()
    step(x), step(x)
    assert_served(step, x)
    x.requires_grad_(gradients)

    def call(stream: Stream) -> None:
        try:
            with torch.enable_grad(), backend.use_stream(stream):
                results.append(step(x).detach().cpu())
        except BackendError as error:
            results.append(str(error))

    streams = backend.capture_stream, backend.make_stream()
    capture = backend.begin_capture(backend.make_pool())
    try:
        for stream in streams:
            in_threads(partial(call, stream))
    finally:
        capture.abort()
    assert "another thread is capturing" in results[0]
    torch.testing.assert_close(results[1], torch.full((4, 3), 6.0))


NOT_LOADED = """
import sys, graphdispatch, torch
graphdispatch.graphed(lambda x: x, dynamic={"x": 0})(torch.ones(2))
assert not [name for name in sys.modules if "backends.accelerator" in name], sys.modules
"""


def test_nobody_loads_it_by_chance() -> None:
    """The import of the library, and a call on the CPU, leave it where it is."""
    run_python("-c", NOT_LOADED)


NO_GRAPHS = """
import torch
from graphdispatch.backends.accelerator import backend_of
from graphdispatch.errors import CaptureError
backend = backend_of("foo")(torch.device("cuda", 0))
try:
    backend.make_graph(None)
except CaptureError as error:
    print(error)
"""


def test_a_device_without_graphs_is_refused_in_words() -> None:
    """With what to install."""
    assert "has no graphs for 'cuda' devices; install a newer one" in run_python("-c", NO_GRAPHS)


def test_a_policy_that_learns_takes_no_times_within_a_capture() -> None:
    """A graph holds the step."""
    inner = CudagraphDispatcher(lambda x: x * 2, policy=AdaptiveDispatchPolicy())
    step = graphed(lambda x: inner.dispatch(DispatchKey(4, 4), x) + 1, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    for value in range(4):
        step(x_of(value))
    assert step.last_decision.reason is Reason.EXACT
