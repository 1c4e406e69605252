"""The CUDA backend keeps the contract of ``backends/base.py``: capture, replay, failure, memory."""

import contextlib
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from graphdispatch import Reason
from graphdispatch.backends.base import Graph
from graphdispatch.backends.cuda import CUDABackend
from graphdispatch.backends.cuda.pool import CUDAPool
from graphdispatch.errors import BackendError, CaptureError, ReplayError

pytestmark = pytest.mark.gpu

Record = Callable[[Callable[[], object]], Graph]
LONG_WAIT_CYCLES = 200_000_000
"""Clock cycles for which a stream is held busy, so that work behind it cannot have run by chance."""


def fail_to_capture(cuda: CUDABackend, pool: CUDAPool, value: torch.Tensor) -> RuntimeError:
    """Read ``value`` on the host inside a capture, and return the error."""
    with pytest.raises(RuntimeError, match="captur") as caught, cuda.begin_capture(pool):
        value.item()
    return caught.value


def in_thread(work: Callable[[], None]) -> None:
    """Run ``work`` on another thread to its end; raises what it raised."""
    raised: list[BaseException] = []

    def target() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def test_capture_does_not_execute_and_replay_does(cuda: CUDABackend, pool: CUDAPool) -> None:
    """Recording leaves memory alone; each replay does the work once."""
    count = torch.zeros(4, device=cuda.device)
    with cuda.begin_capture(pool) as capture:
        count.add_(1)
    before = count.tolist()
    capture.graph.replay()
    capture.graph.replay()
    assert (before, count.tolist()) == ([0.0] * 4, [2.0] * 4)
    capture.graph.reset()


def test_replay_equals_eager_on_new_input(cuda: CUDABackend, record: Record) -> None:
    """A graph computes on what its input holds now, into the same memory every time."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(cuda.device)
    static, outputs = torch.zeros(16, 64, device=cuda.device), list[torch.Tensor]()
    with torch.inference_mode():
        graph = record(lambda: outputs.append(model(static)))
        address = outputs[-1].data_ptr()
        for _ in range(3):
            batch = torch.randn_like(static)
            static.copy_(batch)
            graph.replay()
            torch.testing.assert_close(outputs[-1], model(batch))
    assert outputs[-1].data_ptr() == address


def test_replay_on_another_stream_is_ordered(cuda: CUDABackend, pool: CUDAPool, record: Record) -> None:
    """``order_after_last_use`` makes a replay wait for the stream that used the pool before."""
    source, target = torch.zeros(4, device=cuda.device), torch.zeros(4, device=cuda.device)
    graph = record(lambda: target.copy_(source))
    pool.order_after_last_use()
    torch.cuda._sleep(LONG_WAIT_CYCLES)
    source.fill_(7)
    stream = cuda.make_stream()
    with cuda.use_stream(stream):
        pool.order_after_last_use()
        graph.replay()
    stream.synchronize()
    assert target.tolist() == [7.0] * 4


def test_an_error_in_a_capture_is_kept_and_everything_is_restored(cuda: CUDABackend, pool: CUDAPool) -> None:
    """The user's exception comes out as it is; stream, device and lock are as before."""
    stream, failure = torch.cuda.current_stream(), ValueError("the model broke")
    with pytest.raises(ValueError, match="the model broke") as caught, cuda.begin_capture(pool):
        raise failure
    assert caught.value is failure
    assert torch.cuda.current_stream() == stream
    assert not cuda.is_capturing()
    in_thread(lambda: cuda.begin_capture(cuda.make_pool()).abort())


def test_a_host_read_in_a_capture_leaves_the_process_healthy(cuda: CUDABackend, pool: CUDAPool, record: Record) -> None:
    """After ``.item()``: classified, the stream restored, old graphs, random numbers and new captures work."""
    value = torch.ones(2, device=cuda.device)
    earlier = record(lambda: value.add_(1))
    stream = torch.cuda.current_stream()
    error = fail_to_capture(cuda, pool, value[0])
    assert cuda.classify_error(error) is Reason.CAPTURE_UNSAFE
    assert torch.cuda.current_stream() == stream
    assert torch.rand(8, device=cuda.device).unique().numel() > 1
    later = record(lambda: value.mul_(10))
    value.fill_(1)
    earlier.replay()
    later.replay()
    assert value.tolist() == [20.0, 20.0]


def test_failing_again_and_again_does_not_pile_up_memory(cuda: CUDABackend, pool: CUDAPool) -> None:
    """A failed capture gives back what it allocated."""
    value = torch.ones(1, device=cuda.device)

    def attempt() -> int:
        with contextlib.suppress(RuntimeError), cuda.begin_capture(pool):
            torch.empty(64 << 20, dtype=torch.uint8, device=cuda.device)
            value.item()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(cuda.device)

    first = attempt()
    assert max(attempt() for _ in range(4)) <= first + (64 << 20)


def test_a_swallowed_error_is_reported_at_the_end(cuda: CUDABackend, pool: CUDAPool) -> None:
    """A capture that CUDA made invalid cannot end well, even if the model caught the error."""
    value = torch.ones(1, device=cuda.device)
    capture = cuda.begin_capture(pool)
    with pytest.raises(RuntimeError, match="captur"):
        value.item()
    with pytest.raises(CaptureError, match="own error was swallowed") as caught:
        capture.end()
    assert caught.value.reason is Reason.CAPTURE_UNSAFE
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not cuda.is_capturing()


def test_an_unjoined_side_stream_is_named(cuda: CUDABackend, pool: CUDAPool) -> None:
    """Work on a side stream that nobody waits for makes the capture fail, and the message says so."""
    value, side = torch.ones(1, device=cuda.device), torch.cuda.Stream()

    def fork() -> None:
        with cuda.begin_capture(pool):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                value.add_(1)

    with pytest.raises(CaptureError, match="a side stream was not joined") as caught:
        fork()
    assert caught.value.reason is Reason.CAPTURE_UNSAFE


def test_a_capture_inside_a_capture_is_refused(cuda: CUDABackend, pool: CUDAPool) -> None:
    """The inner one says why, and the outer one goes on."""
    count = torch.zeros(1, device=cuda.device)
    with cuda.begin_capture(pool) as outer:
        with pytest.raises(CaptureError, match="under way") as caught:
            cuda.begin_capture(pool)
        count.add_(1)
    outer.graph.replay()
    assert caught.value.reason is Reason.INSIDE_CAPTURE
    assert count.item() == 1
    outer.graph.reset()


def test_another_thread_may_use_the_gpu_during_a_capture(cuda: CUDABackend, pool: CUDAPool) -> None:
    """Allocations and host reads of other threads do not make a capture invalid."""
    count, seen = torch.zeros(1, device=cuda.device), list[float]()
    with cuda.begin_capture(pool) as capture:
        in_thread(lambda: seen.append(torch.ones(1 << 20, device=cuda.device).sum().item()))
        count.add_(1)
    capture.graph.replay()
    assert (seen, count.item()) == ([float(1 << 20)], 1)
    capture.graph.reset()


def test_captures_of_several_threads_take_turns(cuda: CUDABackend) -> None:
    """Threads that capture at the same time all succeed, each with its own work."""
    results: dict[int, float] = {}

    def work(number: int) -> None:
        pool, target = cuda.make_pool(), torch.zeros(1, device=cuda.device)
        with cuda.begin_capture(pool) as capture:
            target.fill_(float(number))
        capture.graph.replay()
        results[number] = target.item()
        capture.graph.reset()
        pool.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: float(number) for number in range(4)}


def test_pool_counts_its_bytes_and_gives_them_back(cuda: CUDABackend) -> None:
    """A pool holds what its graphs allocated until they are gone, and serves again after that."""
    pool, size = cuda.make_pool(), 32 << 20
    torch.cuda.empty_cache()
    before = (pool.nbytes, torch.cuda.memory_reserved(cuda.device))
    with cuda.begin_capture(pool) as capture:
        torch.zeros(size, dtype=torch.uint8, device=cuda.device)
    held = pool.nbytes
    capture.graph.reset()
    assert before[0] == 0
    assert held >= size
    assert pool.nbytes == 0
    assert torch.cuda.memory_reserved(cuda.device) <= before[1]
    with cuda.begin_capture(pool) as capture:
        torch.zeros(size, dtype=torch.uint8, device=cuda.device)
    capture.graph.replay()
    assert pool.nbytes >= size
    pool.close()
    assert pool.nbytes >= size  # while a graph is there
    capture.graph.reset()
    torch.cuda.empty_cache()
    assert pool.nbytes == 0
    assert torch.cuda.memory_reserved(cuda.device) <= before[1]


def test_counting_the_bytes_of_a_pool_drops_no_reference(cuda: CUDABackend) -> None:
    """To its handle's numbers, which Python frees where they are not small: see Note [all segments are asked for]."""
    while torch.cuda.graph_pool_handle()[1] < 300:
        pass
    pool = cuda.make_pool()
    with cuda.begin_capture(pool) as capture:
        torch.zeros(8, device=cuda.device)
    assert pool._hold is not None
    number = max(pool._hold.handle)
    held = sys.getrefcount(number)
    assert (number > 256, pool.nbytes > 0, sys.getrefcount(number)) == (True, True, held)
    capture.graph.reset()
    pool.close()


def test_graphs_of_one_pool_share_memory(cuda: CUDABackend, pool: CUDAPool, record: Record) -> None:
    """A second graph of the same size needs no more memory, for it is captured on the same stream."""
    total = torch.zeros(1, device=cuda.device)

    def work() -> None:
        total.copy_(torch.ones(8 << 20, device=cuda.device).sum())

    record(work)
    first = pool.nbytes
    record(work)
    assert (first > 0, pool.nbytes) == (True, first)


def test_releasing_a_graph_harms_no_other(cuda: CUDABackend, pool: CUDAPool, record: Record) -> None:
    """The cuBLAS scratch memory of one graph does not depend on another graph, in its pool or in another."""
    a, b = (torch.randn(512, 512, device=cuda.device, dtype=torch.float16) for _ in range(2))
    expected, out = a @ b, torch.empty_like(a)
    other = cuda.make_pool()
    with cuda.begin_capture(other) as first:
        torch.mm(b, a, out=torch.empty_like(a))
    kept = record(lambda: torch.mm(a, b, out=out))
    first.graph.reset()
    other.close()
    torch.cuda.empty_cache()
    junk = [torch.full((8 << 20,), float("nan"), device=cuda.device) for _ in range(8)]
    out.zero_()
    kept.replay()
    torch.testing.assert_close(out, expected)
    assert all(bool(block.isnan().all()) for block in junk)


def test_random_numbers_advance_and_can_be_put_back(cuda: CUDABackend, record: Record) -> None:
    """Each replay draws anew, and from a state put back it draws the same."""
    draw = torch.zeros(16, device=cuda.device)
    graph = record(lambda: draw.uniform_())
    state = cuda.rng_state()
    draws: list[list[float]] = []
    for _ in range(2):
        graph.replay()
        draws.append(draw.tolist())
    cuda.set_rng_state(state)
    graph.replay()
    assert draws[0] != draws[1]
    assert draw.tolist() == draws[0]


def test_a_released_graph_cannot_be_replayed(cuda: CUDABackend, record: Record) -> None:
    """``reset`` may be called twice; a replay after it is a clear error."""
    value = torch.zeros(1, device=cuda.device)
    graph = record(lambda: value.add_(1))
    graph.reset()
    graph.reset()
    with pytest.raises(ReplayError, match="was released"):
        graph.replay()


def test_a_closed_pool_takes_no_capture(cuda: CUDABackend) -> None:
    """``close`` may be called twice; a pool handle is never used again after it."""
    pool = cuda.make_pool()
    pool.close()
    pool.close()
    with pytest.raises(BackendError, match="the pool is closed"):
        cuda.begin_capture(pool)


def test_a_replay_makes_the_pool_busy_until_it_is_done(cuda: CUDABackend, pool: CUDAPool, record: Record) -> None:
    """``is_idle`` follows the last stream, and each replay makes earlier outputs stale."""
    value = torch.zeros(1, device=cuda.device)
    graph = record(lambda: value.add_(1))
    generation = pool.generation
    pool.order_after_last_use()
    torch.cuda._sleep(LONG_WAIT_CYCLES)
    graph.replay()
    idle = pool.is_idle()
    cuda.synchronize()
    assert (idle, pool.is_idle(), pool.generation) == (False, True, generation + 1)


def test_weak_reference_aliases_without_keeping(cuda: CUDABackend) -> None:
    """The alias reads the same memory with the same layout, and does not hold it."""
    owner = torch.arange(1 << 20, device=cuda.device).view(1024, 1024).t()[3:]
    alias = cuda.weak_reference(owner)
    same = torch.equal(alias, owner) and alias.stride() == owner.stride() and alias.data_ptr() == owner.data_ptr()
    held = torch.cuda.memory_allocated(cuda.device)
    del owner
    assert same
    assert torch.cuda.memory_allocated(cuda.device) < held


def test_an_event_orders_two_streams(cuda: CUDABackend) -> None:
    """Work behind a wait sees what the other stream wrote before the mark."""
    source, target = torch.zeros(4, device=cuda.device), torch.zeros(4, device=cuda.device)
    cuda.synchronize()
    writer, reader, event = cuda.make_stream(), cuda.make_stream(), cuda.make_event()
    with cuda.use_stream(writer):
        torch.cuda._sleep(LONG_WAIT_CYCLES)
        source.fill_(3)
        event.record()
    event.wait(reader)
    with cuda.use_stream(reader):
        target.copy_(source)
    reader.synchronize()
    assert target.tolist() == [3.0] * 4
    assert event.query()


def test_a_timer_reads_device_time(cuda: CUDABackend) -> None:
    """A timer says None until the device has come to its end, and milliseconds then."""
    timer = cuda.make_timer()
    timer.start()
    torch.cuda._sleep(LONG_WAIT_CYCLES)
    timer.stop()
    early = timer.elapsed_ms()
    cuda.synchronize()
    late = timer.elapsed_ms()
    assert early is None
    assert late is not None
    assert late > 0
