"""What of the contract of ``backends/base.py`` only a GPU can break; the rest is tests/backends/test_conformance.py.

And its autocast.
"""

import contextlib
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

import graphdispatch as gd
from graphdispatch import Reason
from graphdispatch.backends import Backend, Graph, Pool, Stopwatch
from graphdispatch.errors import CaptureError

from ..helpers import AT_ONCE

pytestmark = pytest.mark.gpu

Record = Callable[[Callable[[], object]], Graph]
LONG_WAIT_CYCLES = 200_000_000
"""Clock cycles for which a stream is held busy, so that work behind it cannot have run by chance."""


def test_replay_on_another_stream_is_ordered(cuda: Backend, pool: Pool, record: Record) -> None:
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


def test_failing_again_and_again_does_not_pile_up_memory(cuda: Backend, pool: Pool) -> None:
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


def test_a_swallowed_error_is_reported_at_the_end(cuda: Backend, pool: Pool) -> None:
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


def test_pool_counts_its_bytes_and_gives_them_back(cuda: Backend) -> None:
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
    pool.trim()
    assert pool.nbytes >= size  # while a graph is there
    capture.graph.reset()
    torch.cuda.empty_cache()
    assert pool.nbytes == 0
    assert torch.cuda.memory_reserved(cuda.device) <= before[1]


def test_counting_the_bytes_of_a_pool_drops_no_reference(cuda: Backend) -> None:
    """To its handle's numbers, which Python frees where they are not small: see Note [the segments of all pools]."""
    while torch.cuda.graph_pool_handle()[1] < 300:
        pass
    pool = cuda.make_pool()
    with cuda.begin_capture(pool) as capture:
        torch.zeros(8, device=cuda.device)
    number = max(pool._handles[-1])
    held = sys.getrefcount(number)
    assert (number > 256, pool.nbytes > 0, sys.getrefcount(number)) == (True, True, held)
    capture.graph.reset()
    pool.trim()


def test_graphs_of_one_pool_share_memory(cuda: Backend, pool: Pool, record: Record) -> None:
    """A second graph of the same size needs no more memory, for it is captured on the same stream."""
    total = torch.zeros(1, device=cuda.device)

    def work() -> None:
        total.copy_(torch.ones(8 << 20, device=cuda.device).sum())

    record(work)
    first = pool.nbytes
    record(work)
    assert (first > 0, pool.nbytes) == (True, first)


def test_a_stopwatch_reads_device_time(cuda: Backend) -> None:
    """It tells nothing, and times no more, until the device has come to the end; milliseconds then."""
    watch, times = Stopwatch(most=1), list[float]()
    marks = watch.start(cuda)
    torch.cuda._sleep(LONG_WAIT_CYCLES)
    watch.stop(marks, times.append)
    early = (times.copy(), watch.start(cuda))
    cuda.synchronize()
    watch.collect()
    assert early == ([], None)
    assert times[0] > 0


def test_weights_are_cast_by_the_graph(cuda: Backend) -> None:
    """Under autocast: no copy of a weight is taken from the region, none is left to it, and weights may be written."""
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)).to(cuda.device).eval()
    decode = gd.graphed(model, dynamic={"input": 0}, sizes=(8,), options=AT_ONCE)
    batches = [torch.randn(8, 32, device=cuda.device) for _ in range(4)]
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            model(batches[0])  # from here on the region has copies of the weights
            for batch in batches:
                torch.testing.assert_close(decode(input=batch), model(batch))
        next(model.parameters()).mul_(2)
    assert decode.stats.hits >= 5, decode.stats.reasons  # one batch more is compared where it runs other code
