"""What tests of all front ends share."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

from graphdispatch import CUDAGraphOptions, Graphed, Reason, copying, graphed
from graphdispatch.backends import Pool, get_backend
from graphdispatch.backends.base import CAPTURE_LOCK
from graphdispatch.backends.tracing import UntracedMode
from graphdispatch.native.bound import CORE, USES_CHANGES, USES_VERSIONS
from graphdispatch.proof.check.licence import Verification
from graphdispatch.runtime.replay import ReplayPlan
from graphdispatch.runtime.server import Server
from graphdispatch.stats import COUNTED_BY_HITS, HitCounts
from graphdispatch.testing import MockCUDAGraph

AT_ONCE = CUDAGraphOptions(capture_after=1)
"""A size is captured when it first comes."""
HAS_CORE = CORE is not None
"""Whether hits are served by the native core here."""


def with_options(settings: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """``settings`` as a front end takes them: those that are options, but ``outputs``, are put into ``options``.

    ``defaults`` are options that hold where ``settings`` say nothing else.
    """
    given = settings.get("options") or CUDAGraphOptions()
    fields = CUDAGraphOptions.model_fields
    chosen = {name: value for name, value in defaults.items() if getattr(given, name) == fields[name].default}
    chosen |= {name: value for name, value in settings.items() if name in fields and name != "outputs"}
    others = {name: value for name, value in settings.items() if name == "outputs" or name not in fields}
    return others | {"options": given.replace(**chosen)}


def assert_same(answer: Any, expected: Any, note: str = "", *, rtol: float = 0, atol: float = 0) -> None:
    """Assert that two answers have the same structure, types and values; ``note`` ends the message.

    They have the same bits, or with ``rtol`` and ``atol`` values that are as near.
    """
    (leaves, form), (others, other_form) = tree_flatten(answer), tree_flatten(expected)
    assert form == other_form, f"{form} instead of {other_form}\n{note}"
    for leaf, other in zip(leaves, others, strict=True):
        close = {"rtol": rtol, "atol": atol, "equal_nan": True}
        torch.testing.assert_close(leaf, other, **close, msg=lambda text: f"{text}\n{note}")


def assert_served(step: Any, *args: Any, **kwargs: Any) -> None:
    """Call ``step``, and its callable on the same inputs: assert that a graph served, with eager's answer."""
    answer = step(*args, **kwargs)
    assert_same(answer, step.unwrap()(*args, **kwargs), step.explain(*args, **kwargs))
    assert step.last_decision.reason.is_graph, step.explain(*args, **kwargs)


def check_rows(step: Any, *shapes: int | tuple[int, ...], width: int = 3, **how: Any) -> list[Reason]:
    """Call ``step`` with a random batch of each shape, or number of rows; else as ``check_calls``."""
    batches = (torch.randn((shape, width) if isinstance(shape, int) else shape) for shape in shapes)
    return check_calls(step, *batches, **how)


def check_calls(step: Any, *batches: Any, fn: Callable[..., Any] | None = None, **near: float) -> list[Reason]:
    """Call ``step`` with each batch, a tuple of arguments or the only one: its answers are its callable's, or ``fn``'s.

    They have the same bits, or are as ``near`` as ``assert_same`` takes it. What a batch holds is not copied. Returns
    the reason of each call.
    """
    reasons = []
    for given in batches:
        args = given if isinstance(given, tuple) else (given,)
        answer = step(*args)
        reasons.append(step.last_decision.reason)
        assert_same(answer, (fn or step.unwrap())(*args), step.explain(*args), **near)
    return reasons


def double(x: torch.Tensor) -> torch.Tensor:
    """The model of most tests."""
    return x * 2


def make(fn: Callable[..., Any] = double, **options: Any) -> Graphed[..., Any]:
    """Sizes two and four, captured at the first sighting, unless ``options`` say otherwise."""
    return graphed(fn, **with_options({"dynamic": {"x": 0}, "sizes": (2, 4)} | options, capture_after=1))


def reason(step: Graphed[..., Any], *args: Any, **kwargs: Any) -> Reason:
    """The reason of one call."""
    step(*args, **kwargs)
    return step.last_decision.reason


def batch(rows: int) -> torch.Tensor:
    """A new batch."""
    return torch.randn(rows, 3)


def hit(rows: int, size: int) -> HitCounts:
    """What a hit of so many rows counts of rows, in a graph of ``size``."""
    counts = dict.fromkeys(COUNTED_BY_HITS, 0)
    return HitCounts(**counts | {"hits": 1, "real_rows": rows, "padding_rows": size - rows})


def catching(fn: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """Goes on where ``fn`` raises."""

    def caught(x: torch.Tensor) -> Any:
        try:
            return fn(x)
        except Exception:
            return x + 0

    return caught


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    """What the jobs return, each on a thread of its own and without gradients; raises what one of them raises."""
    threads = ThreadPoolExecutor(len(jobs))
    try:
        running = [threads.submit(torch.no_grad()(job)) for job in jobs]
        return [one.result(timeout=60) for one in running]
    finally:
        threads.shutdown(wait=False)


def collecting(call: Callable[[], object], finalizer: Callable[[], object]) -> None:
    """Make the call again and again while the collector calls a finalizer, each time at another place of it."""

    class Calls:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            finalizer()

    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    try:
        for allocations in range(1, 60):
            gc.collect()
            Calls()
            gc.set_threshold(allocations)
            for _ in range(3):
                call()
            gc.set_threshold(*usual)
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


def run_python(*arguments: str, **environment: str) -> str:
    """What a new interpreter prints, which must end well."""
    env = os.environ | environment
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def serve_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve hits in Python, as where there is no core."""
    monkeypatch.setattr(Server, "serve", Server.serve_in_python)
    monkeypatch.setattr(ReplayPlan, "run", ReplayPlan.run_in_python)


def recorded(fn: Callable[[], Any], pool: Pool | None = None) -> tuple[Any, Any]:
    """The CPU backend's graph of one call of ``fn``, and what the call returned."""
    backend = get_backend("cpu")
    with backend.begin_capture(pool or backend.make_pool()) as capture:
        out = fn()
    return capture.graph, out


def follows(fn: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> Any:
    """Check that replays of a graph of ``fn`` over new inputs give eager's bits; returns the graph."""
    x = torch.randn(*shape)
    graph, out = recorded(lambda: fn(x))
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert torch.equal(out, fn(x))
    return graph


def scripted(outputs: Any = "graph", **script: Any) -> MockCUDAGraph:
    """A graph that somebody else captured, which may be replayed."""
    made = MockCUDAGraph(outputs, **script)
    made.capture_begin()
    made.capture_end()
    return made


@contextmanager
def compiled_operator(schema: str, fn: Callable[..., Any], key: str = "CPU") -> Iterator[Any]:
    """An operator of ``graphdispatch_compiled`` that is taken for a compiled one; it goes with the block.

    Python cannot compile C++ in a test's time, so its definition names a file of it.
    """
    name = schema.partition("(")[0]
    library = torch._C._dispatch_library("FRAGMENT", "graphdispatch_compiled", "", "operators.cpp", 1)
    library.define(schema, "", ())
    library.impl(name, key, fn, False)
    namespace = torch.ops.graphdispatch_compiled
    yield getattr(namespace, name)
    delattr(namespace, name)
    namespace._dir.remove(name)
    library.reset()


@contextmanager
def collector_off() -> Iterator[None]:
    """Garbage that is there now is collected, and none that comes within the block."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def switching_often(seconds: float) -> Iterator[None]:
    """Threads interleave far more often than they would: each runs for so long at a time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Lazy(torch.nn.Module):
    """Makes a table when it is first called."""

    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.full((3,), 2.0)
        return x * self.table


class Spy(list[Any]):
    """A list that a callable notes things in: it counts as an object of the library, so no guard follows it."""

    __module__ = "graphdispatch.spy"


class Behind(UntracedMode):
    """Each operator within it gives what ``change`` makes of the operator and its result."""

    def __init__(self, change: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.change = change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.change(func, func(*args, **(kwargs or {})))


class Seen:
    """A backend of ``torch.compile`` that generates no code and notes the operators that it is given."""

    def __init__(self) -> None:
        self.operators: list[str] = []

    def __call__(self, module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.operators += [node.name for node in module.graph.nodes if node.op.startswith("call")]
        return module.forward


def shown_of(step: Graphed[..., Any]) -> Verification:
    """What is shown of the first graph of a served callable."""
    licence = step.entries[0].licence
    assert isinstance(licence, Verification)
    return licence


def frames_of(call: Callable[[], Any]) -> list[str]:
    """The functions of Python that a call enters, itself left out."""
    names: list[str] = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [name for name in names if name != call.__name__]


def native_answers(native: Any) -> set[bool]:
    """What a native guard says that skips dicts in each way that may be used, and one that compares every entry."""
    found = set()
    for ways in ((USES_VERSIONS, USES_CHANGES), (False, USES_CHANGES), (USES_VERSIONS, False), (False, False)):
        CORE.skip_dicts(*ways)
        found.add(native.holds())
    CORE.skip_dicts(USES_VERSIONS, USES_CHANGES)
    return found


def are_free(*locks: Any) -> bool:
    """Whether a thread that holds nothing could take each lock."""

    def take(lock: Any) -> bool:
        is_taken = lock.acquire(blocking=False)
        if is_taken:
            lock.release()
        return is_taken

    return all(in_threads(lambda: [take(lock) for lock in locks])[0])


def library_locks() -> list[Any]:
    """Every lock that the library has made and still holds on to."""
    return list(copying._LOCKS)


def may_capture() -> bool:
    """Whether another thread could begin a capture now."""
    return are_free(CAPTURE_LOCK)
