"""What the CUDA backend asks of torch and puts back whatever fails, on a stand-in for ``torch.cuda``: runs anywhere."""

import gc
import threading

import pytest
import torch

from graphdispatch import Reason
from graphdispatch.backends import Backend, Graph, Pool
from graphdispatch.errors import BackendError, CaptureError, ReplayError

from ..helpers import Behind, may_capture, run_python
from .scripted_cuda import ScriptedCUDA, cuda_backend

INVALID = "CUDA error: operation failed due to a previous error during capture"
BUSY_GENERATOR = "Offset increment outside graph capture encountered unexpectedly."


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ScriptedCUDA:
    """A fresh stand-in, in the place of ``torch.cuda``."""
    made = ScriptedCUDA()
    made.install(monkeypatch)
    return made


@pytest.fixture
def backend(driver: ScriptedCUDA) -> Backend:
    """The backend of the second device, while the first one is current."""
    return cuda_backend(1)


@pytest.fixture
def pool(backend: Backend) -> Pool:
    """An open pool."""
    return backend.make_pool()


def capture(backend: Backend, pool: Pool) -> Graph:
    """A graph of nothing."""
    with backend.begin_capture(pool) as made:
        pass
    return made.graph


def assert_restored(driver: ScriptedCUDA) -> None:
    """Stream, device, allocator and lock are as if there had been no capture."""
    assert (driver.device, driver.currents) == (0, driver.defaults)
    assert driver.recording == set()
    assert may_capture()


def test_what_torch_does_to_begin_is_hidden_from_modes(driver: ScriptedCUDA, backend: Backend, pool: Pool) -> None:
    """A mode that watches the callable, as the capturer does after a break, is shown none of it."""
    seen: list[object] = []

    def watch() -> Behind:
        return Behind(lambda func, result: (seen.append(func), result)[1])

    with watch(), backend.begin_capture(pool) as made:
        made.pause()
        made.resume()
    with watch(), backend.begin_capture(pool) as made:
        made.abort()
    assert seen == []
    with watch():
        driver.offset.fill_(1)
    assert len(seen) == 1


def test_the_accelerator_of_the_process_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, driver: ScriptedCUDA, backend: Backend, pool: Pool
) -> None:
    """It may be another one, that some package has registered."""
    monkeypatch.setattr(torch, "accelerator", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    capture(backend, pool).replay()
    backend.synchronize()
    assert (type(backend).is_available(), type(backend).default_index()) == (True, 0)
    assert_restored(driver)


def test_a_capture_is_prepared_and_cleaned_up_in_order(driver: ScriptedCUDA, backend: Backend, pool: Pool) -> None:
    """The device is idle and the workspaces are forgotten before; after it they are forgotten again."""
    capture(backend, pool)
    placeholder, rest = driver.log[:2], driver.log[2:]
    assert placeholder == ["begin", "end"]
    assert rest == [
        "synchronize",
        "clear workspaces",
        "stream 1 waits for 0",
        "begin",
        "end",
        "clear workspaces",
        "stream 0 waits for 1",
    ]


def test_the_memory_goes_with_the_last_graph(driver: ScriptedCUDA, backend: Backend, pool: Pool) -> None:
    """Then nothing holds its handle any more, and the next graph gets another."""
    first, second = capture(backend, pool), capture(backend, pool)
    (handle,) = driver.held()
    first.reset()
    first.reset()
    assert driver.held() == {handle: 2}, "the second graph and the placeholder"
    assert "empty cache" not in driver.log
    second.reset()
    assert driver.held() == {}
    assert driver.log[-1] == "empty cache"
    third = capture(backend, pool)
    assert driver.held() == {(0, 2): 2}
    pool.trim()
    third.reset()
    assert driver.held() == {}


def test_the_users_error_wins_over_the_captures(driver: ScriptedCUDA, backend: Backend, pool: Pool) -> None:
    """In a capture that its error also made invalid."""
    mine = ValueError("mine")

    def failing() -> None:
        with backend.begin_capture(pool):
            driver.current.spoilt = RuntimeError(INVALID)
            raise mine

    with pytest.raises(ValueError, match="mine") as caught:
        failing()
    assert caught.value is mine
    assert sum(driver.held().values()) == 1
    assert_restored(driver)


@pytest.mark.parametrize("place", ["begin", "instantiate"])
def test_a_fault_of_the_driver_leaves_no_count(driver: ScriptedCUDA, backend: Backend, pool: Pool, place: str) -> None:
    """Whether the stream refused to begin, or the finished graph found no memory."""
    older = capture(backend, pool)
    (old,) = driver.held()
    driver.faults[place] = [RuntimeError("CUDA error: out of memory")]
    with pytest.raises(CaptureError, match="fewer or smaller") as caught:
        capture(backend, pool)
    assert caught.value.reason is Reason.OUT_OF_MEMORY
    del caught
    gc.collect()
    assert not any("process ends" in line for line in driver.log)
    assert driver.held().pop(old) == 1
    assert sum(driver.held().values()) == 2, "the older graph, and the placeholder of the new handle"
    assert_restored(driver)
    pool.trim()
    older.reset()
    assert driver.held() == {}


def test_a_placeholder_that_fails_is_tried_again(driver: ScriptedCUDA, backend: Backend, pool: Pool) -> None:
    """The first use of a pool may find no memory; the next one begins from nothing."""
    driver.faults["begin"] = [RuntimeError("CUDA error: out of memory")]
    with pytest.raises(CaptureError, match="out of memory"):
        backend.begin_capture(pool)
    assert driver.held() == {}
    assert_restored(driver)
    capture(backend, pool).replay()


def test_a_resume_that_fails_is_contained(driver: ScriptedCUDA, backend: Backend, pool: Pool) -> None:
    """The lock, which a pause gave back, is not kept; the graph before the pause stays good."""
    paused = backend.begin_capture(pool)
    first = paused.pause()
    assert_restored(driver)
    driver.faults["begin"] = [RuntimeError("CUDA error: out of memory")]
    with pytest.raises(CaptureError, match="out of memory"):
        paused.resume()
    assert_restored(driver)
    first.replay()


def test_another_stream_left_current_inside_is_no_trap(driver: ScriptedCUDA, backend: Backend, pool: Pool) -> None:
    """The capture ends on its own stream, and the caller's is put back."""
    with backend.begin_capture(pool) as made:
        driver.set_stream(backend.make_stream())
        driver.set_device(0)
    made.graph.replay()
    assert_restored(driver)


def test_an_empty_graph_is_no_warning(driver: ScriptedCUDA, backend: Backend, pool: Pool) -> None:
    """A callable may begin with a break; warnings are errors here."""
    driver.warns_of_empty_graphs = True
    capture(backend, pool)
    assert_restored(driver)


@pytest.mark.parametrize(("free", "fraction", "is_emptied"), [(1000, 1.0, False), (10, 1.0, True), (1000, 0.5, True)])
def test_cached_memory_is_given_back_when_most_is_cached(
    driver: ScriptedCUDA, backend: Backend, pool: Pool, free: int, fraction: float, is_emptied: bool
) -> None:
    """Whether the device or the limit of this process is what is near; else it would cost time for nothing."""
    driver.free, driver.fraction, driver.reserved, driver.allocated = free, fraction, 900, 100
    capture(backend, pool)
    assert ("empty cache" in driver.log) is is_emptied
    assert driver.log[-3:] == ["end", "clear workspaces", "stream 0 waits for 1"]


def test_a_replay_refused_for_a_capture_elsewhere_is_made_after_it(
    driver: ScriptedCUDA, backend: Backend, pool: Pool
) -> None:
    """See Note [random numbers during a capture]: it waits for the lock, and launches once."""
    graph = capture(backend, pool)
    other = backend.begin_capture(backend.make_pool())
    driver.faults["replay"] = [RuntimeError(BUSY_GENERATOR)]
    thread = threading.Thread(target=graph.replay)
    thread.start()
    thread.join(0.05)
    assert (thread.is_alive(), "replay" in driver.log) == (True, False)
    other.abort()
    thread.join()
    assert driver.log.count("replay") == 1


@pytest.mark.parametrize("texts", [["CUDA error: misaligned address"], [BUSY_GENERATOR, BUSY_GENERATOR]])
def test_a_replay_that_stays_refused_is_an_error(
    driver: ScriptedCUDA, backend: Backend, pool: Pool, texts: list[str]
) -> None:
    """With CUDA's error as its cause."""
    graph = capture(backend, pool)
    driver.faults["replay"] = [RuntimeError(text) for text in texts]
    with pytest.raises(ReplayError, match="refused to replay") as caught:
        graph.replay()
    assert str(caught.value.__cause__) == texts[-1]


def test_a_graph_is_released_only_when_idle(driver: ScriptedCUDA, backend: Backend, pool: Pool) -> None:
    """The replays in flight come to their end first. The last graph gives the memory back at once, since torch gives
    that of a finished pool to nobody else; a pool that is not used costs nothing."""
    graph = capture(backend, pool)
    graph.replay()
    graph.reset()
    assert driver.log[-4:] == ["wait until idle", "reset", "reset", "empty cache"], "the graph, then the placeholder"
    said = len(driver.log)
    pool.trim()
    backend.make_pool().trim()
    assert len(driver.log) == said


def test_only_a_change_of_stream_is_ordered(driver: ScriptedCUDA, backend: Backend, pool: Pool) -> None:
    """The same stream again costs nothing; another one waits once."""
    capture(backend, pool)
    pool.order_after_last_use()
    quiet = len(driver.log)
    driver.currents[1] = driver.new_stream(backend.device)
    for _ in range(2):
        pool.order_after_last_use()
    assert driver.log[quiet:] == [f"stream {driver.currents[1].cuda_stream} waits for 0"]


def test_a_pool_counts_its_segments_alone(driver: ScriptedCUDA, backend: Backend, pool: Pool) -> None:
    """Those of its handles on its device."""
    capture(backend, pool)
    (mine,) = driver.held()
    driver.segments = [
        {"segment_pool_id": mine, "device": 1, "total_size": 7},
        {"segment_pool_id": mine, "device": 0, "total_size": 100},
        {"segment_pool_id": (0, 99), "device": 1, "total_size": 100},
    ]
    assert pool.nbytes == 7


def test_memory_that_the_driver_took_is_the_graphs(driver: ScriptedCUDA, backend: Backend, pool: Pool) -> None:
    """What the device lost during the capture and the allocator does not have; none after the release."""
    with backend.begin_capture(pool) as made:
        driver.free -= 30
        driver.reserved += 10
    assert (made.graph.nbytes, made.graph.driver_nbytes) == (20, 20)
    made.graph.reset()
    assert (made.graph.nbytes, made.graph.driver_nbytes) == (0, 0)


TEXTS = {
    Reason.CAPTURE_UNSAFE: {
        "CUDA error: operation not permitted when stream is capturing": "item",
        "CUDA error: operation failed due to a previous error during capture": "swallowed",
        "cudaStreamCaptureStatusInvalidated INTERNAL ASSERT FAILED. Invalid stream capture status": "swallowed",
        "CUDA error: capturing stream has unjoined work": "side stream",
        "CUDA error: dependency created on uncaptured work in another stream": "let that stream wait",
        "CUDA error: operation would make the legacy stream depend on a capturing blocking stream": "legacy default",
        "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned.": "pin it",
        "Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture": "refuses to be captured",
        "Offset increment outside graph capture encountered unexpectedly.": "generator",
    },
    Reason.OUT_OF_MEMORY: {
        "CUDA error: out of memory": "fewer or smaller",
        "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)": "fewer or smaller",
    },
    Reason.CAPTURE_FAILED: {
        "CUDA error: an illegal memory access was encountered": "restart",
        "the sizes of two tensors differ": "original error",
    },
}


@pytest.mark.parametrize(
    ("text", "reason", "remedy"), [(text, reason, said[text]) for reason, said in TEXTS.items() for text in said]
)
def test_an_error_text_names_the_reason_and_the_remedy(
    backend: Backend, driver: ScriptedCUDA, pool: Pool, text: str, reason: Reason, remedy: str
) -> None:
    """Each kind of failed capture is recognized by what CUDA and torch say."""
    failing = backend.begin_capture(pool)
    driver.current.spoilt = RuntimeError(text)
    with pytest.raises(CaptureError, match=remedy) as caught:
        failing.end()
    assert caught.value.reason is backend.classify_error(RuntimeError(text)) is reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("out of memory of earlier requests"), Reason.CAPTURE_FAILED),  # the user's own
        (CaptureError("during cuda graph capture", Reason.INSIDE_CAPTURE), Reason.INSIDE_CAPTURE),
        (torch.OutOfMemoryError("CUDA out of memory."), Reason.OUT_OF_MEMORY),
    ],
    ids=str,
)
def test_an_error_is_known_by_its_type_before_its_text(error: Exception, reason: Reason) -> None:
    """A reason that an error carries is not guessed again."""
    backend = cuda_backend(0)
    assert backend.classify_error(error) is reason
    assert backend.is_out_of_memory(error) is (reason is Reason.OUT_OF_MEMORY)


def test_the_advice_in_each_error_is_no_lost_device() -> None:
    """Torch adds how to enable device-side assertions to every error of CUDA; an assertion that failed is one."""
    backend, advice = cuda_backend(0), "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    assert not backend.is_lost(torch.AcceleratorError(f"CUDA error: invalid argument\n{advice}"))
    assert backend.is_lost(torch.AcceleratorError(f"CUDA error: device-side assert triggered\n{advice}"))


def test_a_device_without_an_index_is_refused() -> None:
    """One backend object is one GPU, and takes pools of its own."""
    with pytest.raises(BackendError, match="must have an index"):
        cuda_backend(None)
    with pytest.raises(BackendError, match="pool must come from the backend of cuda:1"):
        cuda_backend(1).begin_capture(cuda_backend(0).make_pool())


def test_asking_does_not_touch_cuda() -> None:
    """Importing, making a backend and a pool, and the questions that never raise leave CUDA uninitialised."""
    code = """
import torch
from graphdispatch.backends.cuda import CUDABackend
backend = CUDABackend(torch.device("cuda", 0))
backend.make_pool(), CUDABackend.is_available(), backend.is_capturing()
assert not torch.cuda.is_initialized()
"""
    run_python("-c", code)


def test_a_tensor_on_the_host_is_its_own_weak_reference() -> None:
    """Where no alias can be made, the tensor itself comes back."""
    tensor = torch.ones(2)
    assert cuda_backend(0).weak_reference(tensor) is tensor
