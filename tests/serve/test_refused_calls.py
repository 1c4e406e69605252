"""A call that no graph can serve runs eagerly at once, for as long as its refusal stands and no longer."""

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import graphdispatch
from graphdispatch import CUDAGraphOptions, Dim, Graphed, Reason, graphed
from graphdispatch.memory.windows import WINDOWS
from graphdispatch.native.bound import ASKED
from graphdispatch.serve.refused import RefusedCalls

from ..helpers import AT_ONCE

_PACKAGE = str(Path(graphdispatch.__file__).parent)
ROWS = 4


class Opaque:
    """An object that nobody can compare."""

    def __init__(self) -> None:
        self.held: Any = 1


def first(x: Any, more: Any = None) -> Any:
    """The first argument."""
    return x


def unsafe(x: torch.Tensor) -> torch.Tensor:
    """It reads a value on the host."""
    return x * 2 if x.sum().item() > -1e9 else x


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Reason]] = {
    "an object": (first, (torch.ones(ROWS, 3), Opaque()), Reason.UNGUARDED_ARGUMENT),
    "an object in a nest": (first, (torch.ones(ROWS, 3), {"a": [1, Opaque()]}), Reason.UNGUARDED_ARGUMENT),
    "a sparse tensor": (first, (torch.ones(ROWS, 3).to_sparse(),), Reason.TENSOR_SUBCLASS),
    "a lazy conjugate": (first, (torch.ones(ROWS, 3, dtype=torch.complex64).conj(),), Reason.TENSOR_SUBCLASS),
    "two devices": (first, (torch.ones(ROWS, 3), torch.ones(ROWS, device="meta")), Reason.DEVICES_DISAGREE),
    "no tensor": (first, (3,), Reason.NO_TENSORS),
    "too many rows": (first, (torch.ones(ROWS + 1, 3),), Reason.ABOVE_LARGEST_SIZE),
    "no rows": (first, (torch.ones(0, 3),), Reason.NO_ROWS),
    "a read on the host": (unsafe, (torch.ones(ROWS, 3),), Reason.CAPTURE_UNSAFE),
}


def serve(fn: Callable[..., Any]) -> Graphed[..., Any]:
    """A graphed callable whose first argument has the batch."""
    options = CUDAGraphOptions(max_failures=1)
    return graphed(fn, dynamic={"x": 0}, sizes=(ROWS,), options=options.replace(capture_after=1))


def frames_of(call: Callable[[], Any]) -> list[str]:
    """The functions of the package that a call runs."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("gradients", [False, True])
def test_a_refused_call_is_remembered(name: str, gradients: bool) -> None:
    """It runs few functions, with gradients on some more; it is counted, and says why, each time."""
    fn, args, reason = CALLS[name]
    step = serve(fn)
    with torch.set_grad_enabled(gradients):
        for _ in range(5):
            step(*args)
        counted = step.stats.reasons[reason]
        frames = frames_of(lambda: step(*args))
        assert step.last_decision is not None
        assert step.last_decision.reason is reason
        assert step.stats.reasons[reason] == counted + 1
        assert (step.stats.misses, step.stats.captures) == (6, 0)
        assert step.explain(*args) == step.last_decision.explain()
    assert len(frames) <= (50 if gradients else 19), frames


@pytest.mark.parametrize("name", CALLS)
def test_python_serves_a_refused_call_alike(name: str) -> None:
    """The reference of the native core hands it to the same function."""
    fn, args, reason = CALLS[name]
    step = serve(fn)
    with torch.no_grad():
        for _ in range(5):
            step._server.serve_in_python(step._decode, args, {})
        frames = frames_of(lambda: step._server.serve_in_python(step._decode, args, {}))
    assert step.last_decision is not None
    assert step.last_decision.reason is reason
    assert "choose" not in frames


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_seen_in_a_refused_call(name: str) -> None:
    """A call that comes to need gradients gets them."""
    fn, args, _ = CALLS[name]
    step = serve(fn)
    for _ in range(3):
        step(*args)
    if not isinstance(args[0], torch.Tensor):
        pytest.skip("nothing to differentiate")
    leaf = args[0].clone().requires_grad_()
    assert step(leaf, *args[1:]).requires_grad
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.NEEDS_GRADIENTS
    step(*args)
    assert not step(*args).requires_grad


def test_a_gradient_in_an_object_is_seen() -> None:
    """An object of a refused call may hold a tensor at any time."""
    step, odd = serve(first), Opaque()
    x = torch.ones(ROWS, 3)
    for _ in range(3):
        step(x, odd)
    assert step.last_decision is not None
    if CORE is not None and "lazy views" not in ASKED:
        assert "step" not in frames_of(lambda: step(x, odd)), "the core knows why it is refused"
    odd.held = torch.ones(3, requires_grad=True)
    step(x, odd)
    assert step.last_decision.reason is Reason.NEEDS_GRADIENTS


@torch.no_grad()
def test_a_class_that_torch_comes_to_know_is_served() -> None:
    """Registering the class of an argument ends its refusal."""

    class Late:
        def __init__(self, held: torch.Tensor) -> None:
            self.held = held

    step, x, held = serve(lambda x, late: x + late.held), torch.ones(ROWS, 3), torch.ones(3)
    for _ in range(3):
        step(x, Late(held))
    pytree.register_pytree_node(Late, lambda late: ([late.held], None), lambda held, _: Late(*held))
    for factor in range(1, 5):
        assert torch.equal(step(x, Late(held * factor)), x + factor)
    assert step.stats.hits > 0


class Switched(torch.nn.Module):
    """It reads a value on the host while ``is_unsafe``."""

    is_unsafe = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice the input."""
        return unsafe(x) if self.is_unsafe else x * 2


@torch.no_grad()
def test_invalidate_ends_a_refusal() -> None:
    """A size that was given up is captured at the next call."""
    model = Switched().eval()
    step = serve(model)
    for _ in range(4):
        step(torch.ones(ROWS, 3))
    model.is_unsafe = False
    step(torch.ones(ROWS, 3))
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.CAPTURE_UNSAFE
    step.invalidate()
    for factor in range(4):
        step(torch.full((ROWS, 3), float(factor)))
    assert step.stats.hits > 0


@torch.no_grad()
def test_a_state_that_comes_back_is_served() -> None:
    """A size whose capture failed in one state still serves in the other."""
    model = Switched().eval()
    step = serve(model)
    model.is_unsafe = False
    for factor in range(3):
        step(torch.full((ROWS, 3), float(factor)))
    model.is_unsafe = True
    for _ in range(4):
        step(torch.ones(ROWS, 3))
    model.is_unsafe, hits = False, step.stats.hits
    for _ in range(2):
        step(torch.ones(ROWS, 3))
    assert step.stats.hits == hits + 2


class Weighted(torch.nn.Linear):
    """A layer that takes something else, too."""

    def forward(self, x: torch.Tensor, more: Any = None) -> torch.Tensor:
        """The layer's output."""
        return super().forward(x)


@torch.no_grad()
@pytest.mark.parametrize("args", [(torch.ones(ROWS + 1, 3),), (torch.ones(ROWS, 3), Opaque())], ids=["rows", "look"])
def test_weights_that_moved_are_released_in_a_refused_call(args: tuple[Any, ...]) -> None:
    """One in 256 calls that no graph serves lets go of graphs that can serve no more."""
    model = Weighted(3, 3).eval()
    step = serve(model)
    for _ in range(3):
        step(torch.randn(ROWS, 3))
        step(*args)
    assert len(step.entries) == 1
    model.weight = torch.nn.Parameter(torch.zeros(3, 3))
    for _ in range(256):
        assert torch.equal(step(*args), model(*args))
    assert not step.entries


@torch.no_grad()
def test_larger_sizes_end_a_refusal() -> None:
    """``use_sizes`` decides anew for every number of rows."""
    step = serve(lambda x: x * 2)
    for _ in range(3):
        step(torch.ones(2 * ROWS, 3))
    step.use_sizes((ROWS, 2 * ROWS))
    for factor in range(4):
        step(torch.full((2 * ROWS, 3), float(factor)))
    assert step.stats.hits > 0


@torch.no_grad()
@pytest.mark.parametrize("name", CALLS)
def test_sleep_is_the_reason_while_it_lasts(name: str) -> None:
    """A refused call during sleep is asleep, and refused again afterwards."""
    fn, args, reason = CALLS[name]
    step = serve(fn)
    for _ in range(3):
        step(*args)
    step.sleep()
    step(*args)
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.ASLEEP
    step.wake()
    for _ in range(2):
        step(*args)
    assert step.last_decision.reason is reason


@torch.no_grad()
def test_a_backend_is_looked_for_each_time() -> None:
    """A call on a device without a backend may be served once there is one, so it is not remembered."""
    step = serve(first)
    for _ in range(2):
        step(torch.ones(ROWS, 3, device="meta"))
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.DEVICE_UNSUPPORTED
    assert step._decode.refused is None


@torch.no_grad()
def test_an_error_of_a_refused_call_passes_through() -> None:
    """It is counted as any refused call, and the run has ended for captures of other threads."""
    has_failed = threading.Event()

    def fails(x: torch.Tensor) -> torch.Tensor:
        if has_failed.is_set():
            raise LookupError("gone")
        return unsafe(x)

    step = serve(fails)
    for _ in range(4):
        step(torch.ones(ROWS, 3))
    has_failed.set()
    for _ in range(3):
        with pytest.raises(LookupError, match="gone"):
            step(torch.ones(ROWS, 3))
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.CAPTURE_UNSAFE
    assert step.stats.reasons[Reason.CAPTURE_UNSAFE] == 7
    assert (step.stats.misses, step.stats.calls, step.stats.rows) == (7, 7, {ROWS: 7})
    assert not WINDOWS._runs


@torch.no_grad()
def test_a_refused_call_within_another_is_told_apart() -> None:
    """After the outer call its own decision is the latest."""
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = []

    def outer(x: torch.Tensor) -> torch.Tensor:
        if len(x) == ROWS and calls:
            calls[0](torch.ones(ROWS + 1, 3))
        return unsafe(x)

    step = serve(outer)
    for _ in range(4):
        step(torch.ones(ROWS, 3))
        step(torch.ones(ROWS + 1, 3))
    calls.append(step)
    for _ in range(3):
        step(torch.ones(ROWS, 3))
    assert step.last_decision is not None
    assert (step.last_decision.rows, step.last_decision.reason) == (ROWS, Reason.CAPTURE_UNSAFE)


@torch.no_grad()
@pytest.mark.parametrize("odd", [(), (Opaque(),)], ids=["rows", "look"])
def test_refused_calls_of_threads_are_all_counted(odd: tuple[Any, ...]) -> None:
    """None is lost, be it served by the core or by Python."""
    step = serve(lambda x, more=None: unsafe(x))
    for _ in range(4):
        step(torch.ones(ROWS, 3))

    def work() -> None:
        with torch.no_grad():
            for number in range(500):
                step(*((torch.ones(ROWS, 3),) if number % 2 == 0 else (torch.ones(ROWS + 1, 3), *odd)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (step.stats.misses, step.stats.fallbacks) == (2004, 2004)
    assert step.stats.rows == {ROWS: 1004} | ({} if odd else {ROWS + 1: 1000})
    assert not WINDOWS._runs


def test_a_call_waits_for_the_lock_of_the_statistics() -> None:
    """Whoever holds it may be about to write back a figure that the call would change."""
    step, args = serve(unsafe), (torch.ones(ROWS, 3),)

    def call() -> None:
        with torch.no_grad():
            step(*args)

    for _ in range(4):
        call()
    thread = threading.Thread(target=call)
    with step.stats._lock:
        thread.start()
        thread.join(0.05)
        assert step.stats.misses == 4
    thread.join()
    assert step.stats.misses == 5


@torch.no_grad()
def test_a_refused_call_needs_no_lock_of_the_server() -> None:
    """It runs while another thread captures something else."""
    step, args = serve(unsafe), (torch.ones(ROWS, 3),)
    for _ in range(4):
        step(*args)
    done: list[Any] = []
    with step._server.lock:
        thread = threading.Thread(target=lambda: done.append(torch.no_grad()(step)(*args)))
        thread.start()
        thread.join()
    assert len(done) == 1
    assert step.stats.misses == 5


@torch.no_grad()
def test_a_refused_batch_and_length_is_counted_by_its_cells() -> None:
    """As every other call with two dynamic dimensions is."""
    step = graphed(unsafe, dynamic={"x": {0: "batch", 1: Dim("seq", [8])}}, sizes=[2], options=AT_ONCE, pad={"x": 0})
    for _ in range(10):
        step(torch.ones(2, 5))
    assert step.stats.rows == {10: 10}
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.CAPTURE_UNSAFE


@torch.no_grad()
def test_a_refusal_is_told_again_after_a_reset(caplog: pytest.LogCaptureFixture) -> None:
    """The first refused call after the statistics were reset is a line of the log, as the first of all was."""
    step = serve(unsafe)
    for _ in range(4):
        step(torch.ones(ROWS, 3))
    with caplog.at_level(logging.INFO, "graphdispatch"):
        caplog.clear()
        step(torch.ones(ROWS, 3))
        assert not caplog.records
        step.stats.reset()
        step(torch.ones(ROWS, 3))
        step(torch.ones(ROWS, 3))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "eager callable=unsafe reason=capture_unsafe rows=4"
    ]
    assert step.stats.misses == 2


@torch.no_grad()
def test_so_many_looks_are_remembered() -> None:
    """Refused calls of ever other shapes take no more and more memory."""
    step, odd = serve(first), Opaque()
    for width in range(1, 1100):
        step(torch.ones(ROWS, width), odd)
    assert isinstance(step._decode.refused, RefusedCalls)
    assert len(step._decode.refused) == 1024
    assert len(step._decode.refused.at_once) <= 1024


@torch.no_grad()
@pytest.mark.skipif(CORE is None, reason="the core serves no call")
@pytest.mark.parametrize("name", ["an object", "an object in a nest", "too many rows", "a read on the host"])
def test_a_refused_call_in_the_core_runs_nothing_of_the_package(name: str) -> None:
    """The core knows the call by its look, or by its rows."""
    if name.startswith("an object") and "lazy views" in ASKED:
        pytest.skip("the core cannot tell how a tensor looks in this torch")
    fn, args, reason = CALLS[name]
    step = serve(fn)
    for _ in range(5):
        step(*args)
    assert frames_of(lambda: step(*args)) == []
    assert step.last_decision is not None
    assert step.last_decision.reason is reason


X = torch.ones(ROWS, 3)
LOOKS: dict[str, tuple[Any, ...]] = {
    "no object": (X, {"a": [1, 2]}),
    "an object elsewhere": (X, {"a": [Opaque(), 1]}),
    "another key": (X, {"b": [1, Opaque()]}),
    "another nest": (X, {"a": (1, Opaque())}),
    "more in a nest": (X, {"a": [1, Opaque(), 2]}),
    "a nest in a nest": (X, {"a": [1, [Opaque()]]}),
    "one argument": (X,),
    "other rows": (torch.ones(2, 3), {"a": [1, Opaque()]}),
    "too many rows": (torch.ones(ROWS + 1, 3), {"a": [1, Opaque()]}),
    "a row": (torch.ones(3), {"a": [1, Opaque()]}),
    "no tensor": (3, {"a": [1, Opaque()]}),
    "a parameter": (torch.nn.Parameter(X, requires_grad=False), {"a": [1, Opaque()]}),
    "a sparse tensor": (X.to_sparse(), {"a": [1, Opaque()]}),
    "a lazy conjugate": (X.to(torch.complex64).conj(), {"a": [1, Opaque()]}),
    "another device": (torch.ones(ROWS, 3, device="meta"), {"a": [1, Opaque()]}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", LOOKS)
def test_calls_of_other_looks_are_told_apart(name: str) -> None:
    """What is known of one look says nothing of another."""
    refused = (X, {"a": [1, Opaque()]})
    reasons = []
    for before in (0, 5):
        step = serve(first)
        for _ in range(before):
            step(*refused)
        for _ in range(3):
            step(*LOOKS[name])
        assert step.last_decision is not None
        reasons.append(step.last_decision.reason)
    assert reasons[0] is reasons[1]


class _Seen(TorchFunctionMode):
    """Sees all functions of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_look_tells_nothing_of_the_thread() -> None:
    """Within somebody's mode the reason is the mode; after ``clear`` the call is looked at again."""
    fn, args, reason = CALLS["an object"]
    step = serve(fn)
    for _ in range(5):
        step(*args)
    with _Seen():
        step(*args)
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.MODE_ACTIVE
    step(*args)
    assert step.last_decision.reason is reason
    step.clear()
    assert step._decode.refused is None
