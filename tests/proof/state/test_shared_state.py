"""Two served callables over the same state, on two threads: no write is lost while one of them is captured."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import graphdispatch as gd
from graphdispatch.backends.tracing import UntracedMode
from graphdispatch.runtime.windows import WINDOWS

from ...behaviour.cases import Box
from ...helpers import AT_ONCE, check_rows, make, reason


class Gate(UntracedMode):
    """Stops the calling thread at its ``stops_at``-th multiplication, until it is opened."""

    def __init__(self, stops_at: int) -> None:
        super().__init__()
        self.stops_in = stops_at
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul.Tensor:
            self.stops_in -= 1
            if self.stops_in == 0:
                self.inside.set()
                assert self.go_on.wait(20)
        return func(*args, **(kwargs or {}))


def ungraphed(fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A callable whose calls all run eagerly."""
    return gd.graphed(fn, dynamic={"x": 0}, mode="NONE")


def counts(count: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """``fn`` behind a write to ``count``."""
    return lambda x: (count.add_(1), fn(x))[1]


@contextmanager
def behind(gate: Gate, step: Any, x: torch.Tensor) -> Iterator[None]:
    """Within the block another thread stands in the gate, in the middle of a call; at its end it goes on to its own."""
    thread = started(lambda x: _through(gate, step, x), x)
    try:
        assert gate.inside.wait(20)
        yield
    finally:
        gate.go_on.set()
        thread.join(60)


def _through(gate: Gate, step: Any, x: torch.Tensor) -> None:
    with gate:
        step(x)


def started(step: Any, x: torch.Tensor) -> threading.Thread:
    """A thread that makes one call."""
    thread = threading.Thread(target=torch.no_grad()(lambda: step(x)))
    thread.start()
    return thread


@pytest.mark.parametrize("other_is", ["eager", "hit", "entry"])
@pytest.mark.parametrize("run", [1, 2, 3])
def test_no_write_is_lost_while_another_thread_captures(other_is: str, run: int) -> None:
    """``first`` stops in the middle of its capture while ``second`` counts in the same tensor."""
    count, gate, x = torch.zeros(1), Gate(run), torch.ones(4, 3)
    first, second = make(counts(count, lambda x: x * 2)), make(counts(count, lambda x: x - 3))
    if other_is != "eager":
        for number in range(4):
            second(x + number)
        assert second.stats.hits
    with behind(gate, first, x):
        replay = lambda x: second.entries[0].replay({"x": x})  # noqa: E731
        other = started(replay if other_is == "entry" else second, torch.ones(9, 3) if other_is == "eager" else x)
        other.join(0.2)  # it waits for the capture, or it is done and its write must stay
    other.join(60)
    assert count.item() == (2 if other_is == "eager" else 6)


def test_a_capture_waits_for_a_run_under_way() -> None:
    """One callable runs eagerly, and stops before it writes: the capture of the other begins when it has ended."""
    count, gate, x = torch.zeros(1), Gate(1), torch.ones(4, 3)

    def decode(x: torch.Tensor) -> torch.Tensor:
        kept = count.clone()
        y = x * 3
        count.copy_(kept + 1)
        return y

    with behind(gate, ungraphed(decode), x):
        capture = started(make(counts(count, lambda x: x * 2)), x)
        capture.join(0.2)
        assert capture.is_alive()
    capture.join(60)
    assert count.item() == 2


def test_a_capture_that_would_wait_for_ever_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that itself waits for the capture's thread ends the wait: the call runs eagerly, with a reason."""
    monkeypatch.setattr("graphdispatch.runtime.windows._CAPTURE_WAITS_S", 0.2)
    count, gate, x = torch.zeros(1), Gate(1), torch.ones(4, 3)
    first = make(counts(count, lambda x: x * 2))
    with behind(gate, ungraphed(counts(count, lambda x: x * 3)), x):
        assert torch.equal(first(x), x * 2)
        assert first.last_decision.reason is gd.Reason.STATE_SHARED
    assert count.item() == 2


@pytest.mark.parametrize("captured", ["outer", "inner"])
@pytest.mark.parametrize("options", [gd.CUDAGraphOptions(), AT_ONCE])
def test_a_call_within_a_call_does_not_wait_for_who_waits_for_it(
    captured: str, options: gd.CUDAGraphOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture waits for the run of another thread, which calls a served callable of the same state before it ends."""
    monkeypatch.setattr("graphdispatch.runtime.windows._CAPTURE_WAITS_S", 10.0)
    count, gate, x = torch.zeros(1), Gate(1), torch.ones(4, 3)
    inner = gd.graphed(counts(count, lambda x: x + 1), dynamic={"x": 0}, options=options)
    first = make(lambda x: inner(x) * 2) if captured == "outer" else inner
    found: list[gd.Reason] = []
    with behind(gate, ungraphed(lambda x: inner(x * 3)), x):
        began = time.monotonic()
        capture = started(lambda x: found.append(reason(first, x)), x)
        while not WINDOWS.open and capture.is_alive():
            time.sleep(0.001)
    capture.join(60)
    assert time.monotonic() - began < 9
    assert found != [gd.Reason.STATE_SHARED]
    assert count.item() == 2


def test_what_another_thread_changes_meanwhile_stays() -> None:
    """A capture that fails half-way puts back what the callable's code changes, and nothing that only others change."""
    engine = Box(queue=[], queues=([],), busy=False)

    def fn(x: torch.Tensor) -> torch.Tensor:
        engine.busy = True
        y = x * 2 if len(x) < 4 else x * 2 + x.sum().item()
        engine.busy = False
        return y

    step = make(fn)
    with behind(Gate(2), step, torch.randn(3, 3)):  # in the run with padding
        assert engine.busy
        engine.queue.append(1)
        engine.queues[0].append(1)
        vars(engine)["added"] = 1
    assert not step.stats.captures, step.stats.reasons
    assert vars(engine) == {"queue": [1], "queues": ([1],), "busy": False, "added": 1}


class Model(nn.Module):
    """Reads a weight, a number, an entry and a variable, and writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.table = nn.Linear(3, 3), 2.0, {"shift": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.scale) + self.table["shift"] + SHIFT


SHIFT = 0.0


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("is_attached", [False, True])
def test_what_another_thread_changes_of_what_a_call_reads_stays(
    is_ahead: bool, is_attached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, numbers, entries, hooks and variables, in the first run of a capture and in a later one. A part that is
    attached, and that nobody called before, is a part of the run like any other."""
    for run in (1, 2):
        monkeypatch.setitem(globals(), "SHIFT", 0.0)
        model, other = Model().eval(), nn.Linear(3, 3)
        if is_attached:
            gd.attach(model.layer, dynamic={"input": 0})
        step = make(model)
        with behind(Gate(run), step.prewarm if is_ahead else step, torch.randn(4, 3)):
            model.layer, model.scale, model.table["shift"] = other, 5.0, 7.0
            handle = model.register_forward_hook(lambda *_: None)
            monkeypatch.setitem(globals(), "SHIFT", 3.0)
        assert (model.layer, model.scale, model.table, SHIFT) == (other, 5.0, {"shift": 7.0}, 3.0)
        assert handle.id in model._forward_hooks
        check_rows(step, 4, 4, 4, 4)


class Monitor(threading.Thread):
    """A thread that notes when it woke, as progress bars have one."""

    woken = 0

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()

    def run(self) -> None:
        self.stop.wait(20)


@pytest.mark.parametrize("by_name", [True, False])
def test_what_a_thread_notes_of_itself_is_no_change_by_the_call(by_name: bool) -> None:
    """It stays, and the call is captured. Code that reads attributes by computed names may read those of the thread."""
    observed = Box(monitor=Monitor(), name="scale", scale=2.0)
    literal, computed = lambda x: x * observed.scale, lambda x: x * getattr(observed, observed.name)
    step = make(literal if by_name else computed)
    observed.monitor.start()
    with behind(Gate(1), step, torch.randn(4, 3)):
        observed.monitor.woken = 5
    observed.monitor.stop.set()
    assert (step.stats.captures, step.stats.reasons[gd.Reason.STATE_UNSEEN]) == (by_name, not by_name)
    assert observed.monitor.woken == 5
