"""What only a GPU can show, through the front ends: other threads, evictions, failed captures, generators, memory."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

import graphdispatch as gd
from graphdispatch import Reason
from graphdispatch.backends import Backend, Capture

from ..helpers import AT_ONCE, check_calls, in_threads

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 4, 8)
WIDTH = 256


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """As in the threads that the tests start."""
    with torch.inference_mode():
        yield


@pytest.fixture
def model(cuda: Backend) -> torch.nn.Module:
    """Matrix products in half precision, which use cuBLAS workspaces."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH)]
    return torch.nn.Sequential(*layers).to(cuda.device, torch.float16).eval()


def batch(rows: int, width: int = WIDTH) -> Tensor:
    """Half precision rows on the GPU."""
    return torch.randn(rows, width, device="cuda:0", dtype=torch.float16)


def agrees(served: Callable[[Tensor], Tensor], model: Callable[[Tensor], Tensor], rows: int) -> None:
    """One call gives eager's rows."""
    x = batch(rows)
    torch.testing.assert_close(served(x), model(x), rtol=1e-2, atol=1e-2)


def is_healthy(cuda: Backend, model: torch.nn.Module) -> None:
    """New captures work, random numbers can be drawn, nothing is being captured, and the stream is the default one."""
    assert not cuda.is_capturing()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.rand(8, device=cuda.device).unique().numel() > 1
    fresh = gd.graphed(model, dynamic={"input": 0}, sizes=(4,))
    fresh.prewarm(batch(4))
    agrees(fresh, model, 4)
    assert fresh.last_decision.reason is Reason.EXACT
    fresh.clear()
    torch.cuda.synchronize()


@pytest.fixture
def busy_gpu(cuda: Backend) -> Iterator[None]:
    """Another thread allocates, computes, reads back and frees on a stream that is not that of captures, all the
    time."""
    stop, failed = threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            with cuda.use_stream(cuda.make_stream()):
                while not stop.is_set():
                    x = torch.ones(1 << 18, device="cuda:0")
                    assert (x @ x).item() == 1 << 18
                    torch.ones(1 << 16).pin_memory().to("cuda:0", non_blocking=True)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    stop.set()
    thread.join()
    assert failed == []


@pytest.mark.usefixtures("busy_gpu")
def test_captures_beside_another_threads_work(model: torch.nn.Module) -> None:
    """Neither the captures nor the other thread fail, and the graphs are right."""
    served = gd.graphed(model, dynamic={"input": 0}, sizes=ROWS)
    served.prewarm(batch(3))
    assert len(served.entries) == len(ROWS)
    for rows in (*ROWS, 3, 7):
        agrees(served, model, rows)


def test_evicted_graphs_take_no_workspace_with_them(model: torch.nn.Module) -> None:
    """With room for two of four sizes each capture evicts a graph; what stays is right, whatever takes the memory."""
    served = gd.graphed(
        model, dynamic={"input": 0}, sizes=ROWS, options=gd.CUDAGraphOptions(max_cached_graphs=2, capture_after=1)
    )
    for rows in (8, 4, 8, 2, 8, 1, 8, 4, 2, 1, 8, 4):
        for _ in range(3):
            agrees(served, model, rows)
        torch.cuda.empty_cache()
        junk = [torch.full((8 << 20,), float("nan"), device="cuda:0") for _ in range(4)]
        agrees(served, model, rows)
        del junk
    assert served.stats.evictions > 0
    served.check_integrity()


def _allocates_by_itself(x: Tensor) -> Tensor:
    """Calls the CUDA runtime, as a library with its own allocator does; no torch mode can see it."""
    pointer = ctypes.c_void_p()
    runtime = ctypes.CDLL(None)
    if runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(1 << 20)) == 0:
        runtime.cudaFree(pointer)
    return x * 2


def _forks_and_forgets(x: Tensor) -> Tensor:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().wait_stream(side)
    return y


def _runs_out_of_memory(x: Tensor) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        torch.empty(1 << 50, dtype=torch.uint8, device=x.device)
    return x * 2


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: x * x.abs().max().item(), Reason.CAPTURE_UNSAFE),
        (lambda x: x + torch.ones(WIDTH, dtype=x.dtype).to(x.device), Reason.CAPTURE_UNSAFE),  # pageable memory
        (_allocates_by_itself, Reason.CAPTURE_UNSAFE),
        (_forks_and_forgets, Reason.CAPTURE_UNSAFE),
        (_runs_out_of_memory, Reason.OUT_OF_MEMORY),
    ],
)
def test_a_failed_capture_leaves_the_process_healthy(
    cuda: Backend, model: torch.nn.Module, fn: Callable[[Tensor], Tensor], reason: Reason
) -> None:
    """Eager's answer with the reason; older graphs, new captures, the generator and the stream are as before."""
    if fn is _allocates_by_itself and not hasattr(ctypes.CDLL(None), "cudaMalloc"):
        pytest.skip("the CUDA runtime's symbols are not visible in this process")
    older = gd.graphed(model, dynamic={"input": 0}, sizes=(4,))
    older.prewarm(batch(4))
    served = gd.graphed(fn, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    x = batch(4)
    for _ in range(2):
        torch.testing.assert_close(served(x=x), fn(x))
    assert served.entries == []
    assert served.stats.reasons[reason] > 0
    agrees(older, model, 3)
    is_healthy(cuda, model)


@contextmanager
def beside_a_capture(cuda: Backend, work: Callable[[], object], seconds: float = 0.2) -> Iterator[Capture]:
    """A capture in which the block is recorded, and another thread then begins ``work``; that is done after it."""
    thread = threading.Thread(target=torch.inference_mode()(work))
    with cuda.begin_capture(cuda.make_pool()) as capture:
        yield capture
        thread.start()
        thread.join(seconds)
    thread.join()


def test_random_numbers_are_eagers(cuda: Backend) -> None:
    """From one seed, graphed calls draw what eager calls draw, capture and checks included."""

    def noisy(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    served = gd.graphed(noisy, dynamic={"x": 0}, sizes=(4,), options=gd.CUDAGraphOptions(capture_after=2))
    batches = [torch.randn(4, 64, device=cuda.device) for _ in range(8)]
    torch.cuda.manual_seed(7)
    expected = [noisy(x) for x in batches]
    torch.cuda.manual_seed(7)
    for x, right in zip(batches, expected, strict=True):
        torch.testing.assert_close(served(x=x), right)
    assert served.stats.hits > 0


def test_a_replay_that_draws_during_a_capture_elsewhere(cuda: Backend) -> None:
    """It is served in the end, whether torch lets it or not while the capture is under way."""
    served = gd.graphed(lambda x: x + torch.rand_like(x), dynamic={"x": 0}, sizes=(4,))
    x, seen = torch.zeros(4, 8, device=cuda.device), list[Tensor]()
    served.prewarm(x=x)
    served(x=x)
    with beside_a_capture(cuda, lambda: seen.append(served(x=x))) as capture:
        torch.zeros(4, device=cuda.device)
    assert seen[0].unique().numel() > 1
    capture.graph.reset()


def test_a_comparison_during_a_capture_elsewhere(cuda: Backend) -> None:
    """It waits for its own stream alone: nobody may wait for a device of which some stream is being captured."""
    served = gd.graphed(lambda x: x.sin() + 1, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    served._graphs.clock = lambda: time.perf_counter()  # so that the time is taken
    x = torch.randn(4, 8, device=cuda.device)
    served(x)
    reasons = list[Reason]()

    def compare() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.testing.assert_close(served(x + 1), (x + 1).sin() + 1)
            reasons.append(served.last_decision.reason)

    with beside_a_capture(cuda, compare, seconds=2) as capture:
        torch.zeros(4, device=cuda.device)
    assert reasons == [Reason.VERIFIED_NOW]
    capture.graph.reset()


def test_graphs_go_to_sleep_during_a_capture_elsewhere(cuda: Backend) -> None:
    """They wait for its end: to wait for the device before would make it invalid."""
    served = gd.graphed(lambda x: x.sin() + 1, dynamic={"x": 0}, sizes=(4,))
    served.prewarm(torch.randn(4, 8, device=cuda.device))
    count = torch.zeros(1, device=cuda.device)
    with beside_a_capture(cuda, served.sleep) as capture:
        count.add_(1)
    assert served.entries == []
    capture.graph.replay()
    assert count.item() == 1
    capture.graph.reset()


def test_a_side_stream_that_is_joined_is_part_of_the_graph(cuda: Backend) -> None:
    """Forked and joined inside the call, on a stream made once."""
    side = torch.cuda.Stream()

    def two_streams(x: Tensor) -> Tensor:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            left = x.sin()
        right = x.cos()
        current.wait_stream(side)
        return left + right

    served = gd.graphed(two_streams, dynamic={"x": 0}, sizes=(4,))
    served.prewarm(torch.randn(4, 64, device=cuda.device))
    batches = [torch.randn(rows, 64, device=cuda.device) for rows in (4, 3)]
    reasons = check_calls(served, *batches, fn=lambda x: x.sin() + x.cos(), rtol=1.3e-6, atol=1e-5)
    assert all(reason.is_graph for reason in reasons)


def test_workers_overlap(cuda: Backend) -> None:
    """A short step on one worker is done while a long one on another is still running."""

    def model(x: Tensor, cycles: int) -> Tensor:
        torch.cuda._sleep(cycles)
        return x + 1

    long, short = gd.DispatchKey(4, 4), gd.DispatchKey(2, 2)
    options = gd.CUDAGraphOptions(verify=False)
    workers = gd.StreamDispatcher(model, 2, backend=cuda, options=options)
    x, y = torch.zeros(4, device=cuda.device), torch.zeros(2, device=cuda.device)
    workers.capture(long, (x, 500_000_000))
    workers.capture(short, (y, 1))
    torch.cuda.synchronize()
    slow = workers.submit(long, x, 500_000_000)
    fast = workers.submit(short, y, 1)
    assert {slow.worker, fast.worker} == {0, 1}
    workers.workers[fast.worker].stream.synchronize()
    was_running = not slow.is_done
    assert (fast.result().tolist(), slow.result().tolist()) == ([1.0] * 2, [1.0] * 4)
    assert was_running
    workers.close()


def test_workers_serve_several_threads(cuda: Backend, model: torch.nn.Module) -> None:
    """Workers capture, compare and replay on streams of their own, for threads that have streams of their own."""
    key = gd.DispatchKey(4, 4)
    dispatcher = gd.StreamDispatcher(model, 2, backend=cuda)
    dispatcher.capture(key, (batch(4),))
    inputs = [batch(4) for _ in range(16)]
    expected = [model(x) for x in inputs]
    torch.cuda.synchronize()

    def serve(outputs: list[Tensor]) -> None:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            outputs += [dispatcher.dispatch(key, x) for x in inputs]
            torch.cuda.current_stream().synchronize()

    all_outputs = [list[Tensor]() for _ in range(3)]
    in_threads(*(partial(serve, outputs) for outputs in all_outputs))
    torch.testing.assert_close(all_outputs, [expected] * 3, rtol=1e-2, atol=1e-2)
    assert dispatcher.stats.graph + dispatcher.stats.reasons[Reason.VERIFIED_NOW] == 3 * len(inputs)
    assert dispatcher.stats.graph >= 3 * len(inputs) - 4, "each worker compares once, or twice at the same time"
    dispatcher.close()
    is_healthy(cuda, model)


def test_new_numbers_of_rows_beside_a_capture(cuda: Backend, model: torch.nn.Module) -> None:
    """The first hits of each number of rows, which prepare a replay, do not disturb the captures of another thread."""
    served = gd.graphed(model, dynamic={"input": 0}, sizes=(64,))
    served.prewarm(batch(1))
    inputs = [batch(rows) for rows in range(1, 65)]
    expected = [model(x) for x in inputs]
    example, outputs, captured = batch(3), list[Tensor](), list[int]()
    torch.cuda.synchronize()

    def serve() -> None:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            outputs.extend(served(x) for x in inputs)
            torch.cuda.current_stream().synchronize()

    def capture() -> None:
        with torch.inference_mode():
            for _ in range(3):
                other = gd.graphed(model, dynamic={"input": 0}, sizes=ROWS)
                other.prewarm(example)
                captured.append(len(other.entries))

    in_threads(serve, capture)
    torch.testing.assert_close(outputs, expected, rtol=1e-2, atol=1e-2)
    assert served.stats.hits == len(inputs), served.stats.reasons
    assert captured == [len(ROWS)] * 3
    is_healthy(cuda, model)


def test_moved_weights_are_never_read_at_the_old_place(cuda: Backend, model: torch.nn.Module) -> None:
    """A model that went to the host and back, or was loaded by assignment, is captured anew."""
    served = gd.graphed(model, dynamic={"input": 0}, sizes=(4,))
    served.prewarm(batch(4))
    agrees(served, model, 4)
    model.cpu()
    junk = torch.full((32 << 20,), float("nan"), device=cuda.device)
    model.to(cuda.device)
    for _ in range(4):
        agrees(served, model, 4)
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()}, assign=True)
    for _ in range(4):
        agrees(served, model, 4)
    assert served.stats.captures == 3
    assert bool(junk.isnan().all())


def test_graphs_dropped_in_flight_do_no_harm(cuda: Backend, model: torch.nn.Module) -> None:
    """A served callable that goes out of scope while its replay is queued: the answer is right."""
    x = batch(4)
    expected = model(x)

    def call_once() -> Tensor:
        served = gd.graphed(model, dynamic={"input": 0}, sizes=(4,))
        served.prewarm(x)
        torch.cuda._sleep(100_000_000)
        return served(x)

    torch.testing.assert_close(call_once(), expected, rtol=1e-2, atol=1e-2)
    is_healthy(cuda, model)


def test_memory_is_what_the_driver_says(cuda: Backend, model: torch.nn.Module) -> None:
    """What the graphs hold by our account is what the device lost; after ``clear`` it is free again."""
    served = gd.graphed(model, dynamic={"input": 0}, sizes=(256, 512, 1024))
    model(batch(1024))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    (before, _), reserved = torch.cuda.mem_get_info(cuda.device), torch.cuda.memory_reserved(cuda.device)
    served.prewarm(batch(1024))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held, (after, _) = served.memory_bytes, torch.cuda.mem_get_info(cuda.device)
    slack = 64 << 20  # contexts of kernels loaded on the way, and segments that are not full
    assert 0 < held <= before - after + slack
    assert before - after <= held + slack
    served.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info(cuda.device)[0] >= before - slack
    assert torch.cuda.memory_reserved(cuda.device) <= reserved + (4 << 20)
