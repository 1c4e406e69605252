"""All inputs of a hit by one kernel, launched by the core on the test device, and its outputs by the graph's last one.
Buffers and answers are those of torch's copies."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from queued_device import DEVICE, copy_kernel, delays, fail_after, held

from graphdispatch import CUDAGraphOptions, Pad, graphed
from graphdispatch.backends import Backend, get_backend
from graphdispatch.backends.accelerator.pool import AcceleratorPool
from graphdispatch.reasons import Reason

from ..copy_kernels import Launch, noting
from ..helpers import HAS_CORE

pytest.importorskip("benchmarks", reason="the benchmarks are not part of the source distribution")

from benchmarks.gpu.copies import wrong_batches

pytestmark = pytest.mark.skipif(not HAS_CORE, reason="the core launches it")
PLAIN = CUDAGraphOptions(verify=False, guard_weights=False, capture_after=1)


@pytest.fixture
def backend() -> Backend:
    """The device's."""
    return get_backend("queued")


@pytest.fixture
def launches(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """The launches of the first kernel."""
    made: list[Launch] = []
    kernel, noted = noting(copy_kernel(), made)
    used_on = AcceleratorPool.used_on

    def used_on_raw(pool: Any, stream: torch.Stream) -> None:
        used_on(pool, stream)
        pool._last_raw = stream.stream_id

    monkeypatch.setattr(AcceleratorPool, "used_on", used_on_raw)
    monkeypatch.setattr(backend, "copy_kernel", kernel)
    yield made
    torch.accelerator.synchronize()
    del noted


def served(fn: Callable[..., Any], **how: Any) -> Any:
    """A callable of one batch ``x``, by graphs of four and eight rows."""
    return graphed(fn, **({"dynamic": {"x": 0}, "sizes": (4, 8), "options": PLAIN} | how))


def batch(rows: int, value: float = 1.0) -> torch.Tensor:
    """A batch of one value."""
    return torch.full((rows, 3), value, device=DEVICE)


@pytest.mark.parametrize("seed", range(24))
def test_random_batches_are_loaded_as_by_torch(backend: Backend, launches: list[Launch], seed: int) -> None:
    """Any dtypes, widths, pad rules, numbers of rows, addresses, gaps and streams."""
    delays(seed, 50 * (seed % 3))
    assert wrong_batches(backend, seed) == 0


def test_random_batches_are_loaded_by_the_kernel(backend: Backend, launches: list[Launch]) -> None:
    """Most of them are what it fits, with several inputs at once."""
    assert sum(wrong_batches(backend, seed) for seed in range(100, 106)) == 0
    assert len(launches) > 12
    assert max(launch.inputs for launch in launches) > 1


@pytest.mark.parametrize(
    ("given", "how"),
    [
        (lambda: batch(8).t().contiguous().t(), {}),
        (lambda: torch.ones(8, 6, device=DEVICE)[:, ::2], {}),
        (lambda: batch(8), {"pad": {"x": Pad.function(lambda padding, real: padding.fill_(7))}}),
    ],
    ids=["another order", "gaps", "a function pads"],
)
def test_torch_copies_what_it_does_not_fit(
    launches: list[Launch], given: Callable[[], torch.Tensor], how: dict[str, Any]
) -> None:
    """And the answers are right."""
    step = served(lambda x: x * 2, **how)
    for _ in range(3):
        x = given()
        assert torch.equal(step(x).cpu(), x.cpu() * 2)
    assert step.stats.hits
    assert launches == []


def test_torch_copies_where_an_input_is_on_the_host(launches: list[Launch]) -> None:
    """The kernel cannot read it."""
    step = graphed(lambda x, scale: x * scale, dynamic={"x": 0}, sizes=(4,), options=PLAIN)
    for value in range(3):
        scale = torch.tensor(float(value))
        assert torch.equal(step(batch(4), scale).cpu(), batch(4).cpu() * value)
    assert launches == []


def test_torch_copies_on_a_thread_of_another_context(launches: list[Launch]) -> None:
    """As on one that has used no device yet, or uses another one."""
    step = served(lambda x: x * 2)
    step(batch(4))
    step(batch(4))
    assert len(launches) == 1
    answers: list[torch.Tensor] = []

    def work() -> None:
        with torch.no_grad():
            answers.append(step(batch(4, 3.0)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (answers[0].cpu() == 6).all()
    assert (step.stats.hits, len(launches)) == (2, 1)


def test_torch_copies_where_the_launch_is_refused(launches: list[Launch]) -> None:
    """Nothing has been copied then, and the call is served."""
    step = served(lambda x: x * 2)
    step(batch(4))
    step(batch(4))
    given = batch(4, 5.0)
    torch.accelerator.synchronize()
    fail_after("launch", 0)
    assert (step(given).cpu() == 10).all()
    assert (step.stats.hits, len(launches)) == (2, 1)


def test_it_is_launched_on_the_callers_stream(launches: list[Launch]) -> None:
    """It waits for what the caller does there before."""
    step, stream = served(lambda x: x * 2), torch.Stream(DEVICE)
    given = batch(4)
    step(given)
    step(given)
    torch.accelerator.synchronize()
    with held(stream), stream:
        given.fill_(9)
        answer = step(given)
    stream.synchronize()
    assert (answer.cpu() == 18).all()
    assert len(launches) == 2


def test_the_graph_puts_its_outputs_where_the_hit_wants_them(launches: list[Launch]) -> None:
    """They are new tensors each time, and as long as the batch."""
    step = served(lambda x: (x * 2, x.sum(1)))
    answers = [step(batch(rows, value)) for rows, value in ((4, 1.0), (4, 2.0), (4, 3.0), (2, 4.0), (2, 5.0))]
    for (double, total), rows, value in zip(answers, (4, 4, 4, 2, 2), (1.0, 2.0, 3.0, 4.0, 5.0), strict=True):
        assert torch.equal(double.cpu(), torch.full((rows, 3), 2 * value))
        assert torch.equal(total.cpu(), torch.full((rows,), 3 * value))
    assert [launch.outputs for launch in launches] == [
        {one.data_ptr(): one.nbytes for one in answer} for answer in answers[1:]
    ]


@pytest.mark.parametrize(
    ("fn", "how"),
    [
        (lambda x: (x * 2).t().contiguous().t(), {}),
        (lambda x: tuple(x * number for number in range(9)), {}),
        (lambda x: {"double": x * 2}, {}),
        (lambda x: x * 2, {"options": CUDAGraphOptions(verify=False, capture_after=1, outputs="static")}),
    ],
    ids=["another order", "too many", "a dict", "nobody gets copies"],
)
def test_torch_clones_other_outputs(launches: list[Launch], fn: Callable[..., Any], how: dict[str, Any]) -> None:
    """And the answers are right."""
    step = served(fn, **how)
    for value in (1.0, 2.0, 3.0):
        given, right = (torch.utils._pytree.tree_leaves(f(batch(4, value))) for f in (step, fn))
        assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(given, right, strict=True))
    assert step.stats.hits == len(launches) == 2
    assert [launch.outputs for launch in launches] == [{}, {}]


def test_a_replay_that_wants_nothing_leaves_earlier_answers_alone(launches: list[Launch]) -> None:
    """What a hit wanted is forgotten behind it."""
    step = served(lambda x: x * 2)
    answers = [step(batch(4, value)) for value in (1.0, 2.0)]
    step.entries[0].inputs.buffers[0].fill_(9)
    step.entries[0].graph.replay()
    assert [float(answer.cpu().sum()) for answer in answers] == [24, 48]


def test_what_a_replay_wanted_that_stopped_is_nobody_elses(launches: list[Launch]) -> None:
    """Eager's answer takes other memory: the graph is replayed again to be compared, and writes to what was noted."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        double = x * 2
        return x.sum(1), double

    step = served(fn, options=CUDAGraphOptions(capture_after=1))
    step.prewarm(batch(4))
    step(batch(4))
    given, hits = batch(4, 3.0), len(launches)
    torch.accelerator.synchronize()
    fail_after("launch", 1)  # the first is the kernel's
    total, double = step(given)
    assert (step.last_decision.reason, len(launches)) == (Reason.VERIFIED_NOW, hits + 1)
    assert (total.cpu() == 9).all()
    assert (double.cpu() == 6).all()
