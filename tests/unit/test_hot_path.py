"""What a hit costs in calls, locks and memory, counted rather than timed."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import graphdispatch
from graphdispatch import BatchDescriptor, CUDAGraphMode, CUDAGraphWrapper, Graphed, graphed

MOST_CALLS = 10
DEEPEST = 4
SIZE = 4
_PACKAGE = str(Path(graphdispatch.__file__).parent)


def settled_graphed() -> tuple[Graphed[..., Any], Callable[[], Any]]:
    """A graphed module, and a padded call of it that is a hit."""
    step = graphed(torch.nn.Linear(3, 3).eval(), dynamic={"input": 0}, sizes=(SIZE,), capture_after=1)
    x = torch.randn(SIZE - 1, 3)
    with torch.no_grad():
        for rows in (SIZE - 1, SIZE, SIZE - 1):
            step(torch.randn(rows, 3))
    return step, torch.no_grad()(lambda: step(x))


def settled_wrapper() -> tuple[CUDAGraphWrapper, Callable[[], Any]]:
    """A wrapped module, and a call of it that is a hit."""
    wrapper = CUDAGraphWrapper(torch.nn.Linear(3, 3).eval())
    descriptor = BatchDescriptor(SIZE)

    @torch.no_grad()
    def call() -> Any:
        x = torch.randn(SIZE, 3)
        return wrapper(x, batch_descriptor=descriptor, cudagraph_runtime_mode=CUDAGraphMode.FULL)

    for _ in range(3):
        call()
    return wrapper, call


def own_calls(call: Callable[[], Any]) -> list[tuple[int, str]]:
    """The functions of the package that ``call`` runs, in order, each with its depth among them."""
    seen: list[tuple[int, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        # Comprehensions have frames of their own in some versions of Python and not in others.
        if event == "call" and is_own(frame) and not frame.f_code.co_name.startswith("<"):
            depth, outer = 0, frame.f_back
            while outer is not None:
                depth += is_own(outer)
                outer = outer.f_back
            seen.append((depth, frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def is_own(frame: FrameType) -> bool:
    """Whether a frame runs a function of the package."""
    return frame.f_code.co_filename.startswith(_PACKAGE)


class CountedLock:
    """A reentrant lock that notes itself in a list whenever it is taken."""

    def __init__(self, taken: list["CountedLock"]) -> None:
        self._lock = threading._RLock()  # type: ignore[attr-defined]
        self._taken = taken

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._taken.append(self)
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[CountedLock]:
    """The locks that were taken, of all that are made in the test."""
    noted: list[CountedLock] = []
    for name in ("Lock", "RLock"):
        monkeypatch.setattr(threading, name, lambda: CountedLock(noted))
    return noted


class Operators(TorchDispatchMode):
    """Notes the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [settled_graphed, settled_wrapper])
def test_a_hit_is_shallow(make: Callable[[], tuple[Any, Callable[[], Any]]]) -> None:
    """Below the call itself, a hit is at most four functions of the package deep."""
    _, call = make()
    assert max(depth for depth, _ in own_calls(call)) <= DEEPEST


@pytest.mark.parametrize("make", [settled_graphed, settled_wrapper])
def test_a_hit_makes_few_calls(make: Callable[[], tuple[Any, Callable[[], Any]]]) -> None:
    """Below the call itself, a hit runs at most ten functions of the package."""
    _, call = make()
    below = [name for depth, name in own_calls(call) if depth]
    assert len(below) <= MOST_CALLS, below


def test_a_hit_takes_one_lock(taken: list[CountedLock]) -> None:
    """A graphed hit takes the pool's lock, once, and no other."""
    step, call = settled_graphed()
    hits = step.stats.hits
    taken.clear()
    call()
    assert taken == [step.entries[0].pool.lock]
    assert step.stats.hits == hits + 1


def test_a_wrapper_hit_takes_one_lock(taken: list[CountedLock]) -> None:
    """A wrapper's hit takes the pool's lock, once, and no other."""
    wrapper, call = settled_wrapper()
    entry = wrapper.get_entry(BatchDescriptor(SIZE))
    assert entry is not None
    taken.clear()
    call()
    assert taken == [entry.pool.lock]


def test_a_hit_goes_on_while_another_thread_captures() -> None:
    """The lock under which graphs are made can be held elsewhere without holding up a hit."""
    step, call = settled_graphed()
    served = threading.Event()

    def serve() -> None:
        call()
        served.set()

    with step._graphs.lock:
        threading.Thread(target=serve, daemon=True).start()
        assert served.wait(60)


def test_a_hit_makes_no_buffers() -> None:
    """A hit copies into the buffers that are there, and makes no memory but the output's copy."""
    step, call = settled_graphed()
    addresses, held = step.entries[0].input_addresses, step.memory_bytes
    with Operators() as operators:
        call()
    assert operators.names.count("aten::clone") == 1
    assert not [name for name in operators.names if "empty" in name or "zeros" in name or "full" in name]
    assert (step.entries[0].input_addresses, step.memory_bytes) == (addresses, held)
