"""The native tape of CPU graphs: what it does, it does as Python's loop does.

That it gives the same bits is a claim of ``tests/backends/test_replays.py``.
"""

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from graphdispatch import ReplayError
from graphdispatch.backends.cpu.backend import CPUGraph, CPUPool, loop
from graphdispatch.backends.cpu.program import Step, run_and_copy
from graphdispatch.backends.operators import bits_equal
from graphdispatch.native import tape

from ..backends.test_replays import NUMBERS, values
from ..helpers import Behind, collector_off, in_threads, recorded

pytestmark = pytest.mark.skipif(not tape.TAPE.wait(), reason=repr(tape.TAPE))

aten = torch.ops.aten


def steps_of(graph: CPUGraph) -> Sequence[Step]:
    """What the graph replays, by a tape."""
    assert graph.tape is not None
    assert graph.steps is not None
    return graph.steps


def message(call: Callable[[], object]) -> tuple[type, str, list[str]]:
    """The type, the text and the notes of the error that the call raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  # its type is what is compared
        call()
    return caught.type, str(caught.value), caught.value.__notes__


TABLE = torch.arange(12.0).view(4, 3)
FAILING: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor, int]] = {
    "an index out of range": (lambda x: TABLE.index_select(0, x) * 2, torch.zeros(2, dtype=torch.int64), 9),
    "a division by zero": (lambda x: (8 // x) + 1, torch.ones(2, dtype=torch.int64), 0),
    "an assertion": (lambda x: torch._assert_async((x > 0).all(), "all of x are positive"), torch.ones(2), 0),
}
"""A callable, an argument that it takes, and a value of which its replay fails."""


@pytest.mark.parametrize("name", FAILING)
def test_errors_are_the_same(name: str) -> None:
    """The type, the text, and the note that names the operator; and the graph replays again afterwards."""
    fn, good, bad = FAILING[name]
    x = good.clone()
    graph, _ = recorded(lambda: fn(x))
    steps = steps_of(graph)
    graph.replay()
    x.fill_(bad)
    python = message(partial(loop, steps))
    assert message(graph.replay) == python
    assert "aten." in python[2][0]


def test_other_shapes_are_refused() -> None:
    """Results that have another shape than their places are a ``ReplayError``, with the text of Python's loop."""
    x = torch.randn(2, 3)
    place, call = torch.zeros(2), ((x,), {})
    step = Step(partial(run_and_copy, aten.relu.default, *call, (place,)), aten.relu.default, call, (place,))
    graph, steps = CPUGraph(CPUPool(), [step]), [step]
    kind, text, _ = message(partial(loop, steps))
    with pytest.raises(ReplayError, match=r"shapes \[\(2, 3\)\] where the graph holds \[\(2,\)\]") as caught:
        graph.replay()
    assert (kind, text) == (ReplayError, str(caught.value))


def test_warnings_become_python_s() -> None:
    """A warning of an operator is raised where Python's filters say so, before the next operator runs."""
    x, out, marks = torch.randn(3), torch.zeros(1, 3), torch.zeros(2)
    steps = [
        Step(print, aten.add.out, ((x, x), {"out": out}), None),
        Step(print, aten.fill_.Scalar, ((marks, 1.0), {}), None),
    ]
    graph = CPUGraph(CPUPool(), steps)
    with pytest.raises(UserWarning, match="resized"):
        graph.replay()
    assert marks.tolist() == [0, 0]


class Functions(TorchFunctionMode):
    def __init__(self, note: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.note(func, func(*args, **(kwargs or {})))


@contextmanager
def profiled(note: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Note what the profiler tells of the block."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        yield
    for event in profiler.events():
        note(event.name, None)


@pytest.mark.parametrize("watch", [Behind, Functions, profiled])
def test_others_see_what_they_see_of_python(watch: Callable[[Any], Any]) -> None:
    """Modes of torch, under which a replay is Python's, and the profiler: as often, under the same names."""
    x = torch.randn(2, 3)
    graph, _ = recorded(lambda: (x @ x.t()).relu())
    seen = []
    for run in (partial(loop, steps_of(graph)), graph.replay):
        names: list[str] = []
        with watch(lambda func, result, names=names: (names.append(str(func)), result)[1]):
            run()
        seen.append([name for name in names if "aten" in name or watch is Functions])
    assert seen[0] == seen[1] != []


def test_autocast_changes_nothing() -> None:
    """A replay under autocast gives the bits of Python's loop under autocast."""
    x, w = torch.randn(2, 3), torch.randn(3, 3)
    graph, out = recorded(lambda: (x @ w).softmax(0))
    steps = steps_of(graph)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loop(steps)
        expected = out.clone()
        out.zero_()
        graph.replay()
    assert bits_equal(out, expected)


def test_the_gil_is_released() -> None:
    """Two replays run at once: each waits within its replay for the other, through a call of Python's."""
    barrier = threading.Barrier(2, timeout=30)
    graphs = [
        CPUGraph(CPUPool(), [Step(barrier.wait, "wait"), Step(print, aten.fill_.Scalar, ((marks, 1.0), {}))])
        for marks in torch.zeros(2, 1)
    ]
    in_threads(*(graph.replay for graph in graphs))
    assert not barrier.broken


def test_reset_frees_everything() -> None:
    """After ``reset`` nothing holds what the graph used, without a run of the collector."""
    x = [torch.randn(2, 3)]
    graph = recorded(lambda: (x[0].exp() + 1).sort(0))[0]
    graph.replay()
    steps = steps_of(graph)
    arena = graph.arena
    storages = [StorageWeakRef(t.untyped_storage()) for t in (x[0], arena) if t is not None]
    held = [weakref.ref(step.run) for step in steps]
    with collector_off():
        graph.reset()
        x[0] = steps = arena = None
        assert [ref() for ref in held] == [None] * len(held)
        assert all(storage.expired() for storage in storages)


EXTREMES = (0, 1, -3, 1e-5, -0.0, 2.5, 1e300, -1e300, 1e-310, math.inf, math.nan, 2**24 + 1, 2**62 + 1, True)


def calculated(x: torch.Tensor, scalar: torch.Tensor, number: float) -> tuple[torch.Tensor, ...]:
    """Tensors and a number, into new tensors and in place."""
    changed = x.clone()
    if x.dtype.is_floating_point:
        changed.mul_(number).add_(number, alpha=2)
        for in_place in (aten.mul_, aten.add_, aten.sub_, aten.div_):  # as C++ calls them, with a number
            in_place.Scalar(changed, number)
    less = () if x.dtype is torch.bool else (x - number, torch.sub(x, number, alpha=3))
    return (x * number, x + number, x / number, scalar * number, aten.add.Scalar(x, number, 3), changed, *less)


def compared(x: torch.Tensor, scalar: torch.Tensor, number: float) -> tuple[torch.Tensor, ...]:
    """Also where the number is one that the dtype only has neighbours of, or none at all."""
    near = torch.tensor(number, dtype=torch.float64).clamp(-100, 100).to(x.dtype)
    compare = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)
    return tuple(one(given, number) for one in compare for given in (x, scalar, near))


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("number", EXTREMES, ids=str)
@pytest.mark.parametrize("fn", [calculated, compared])
def test_a_number_becomes_a_tensor_with_the_same_bits(
    dtype: torch.dtype, number: float, fn: Callable[..., tuple[torch.Tensor, ...]]
) -> None:
    """Whatever the number and the dtype: before the first replay, and not at each."""
    x, scalar = values(dtype, 3, 40), values(dtype)[1, 1].clone()
    try:
        graph, kept = recorded(lambda: fn(x, scalar, number))
    except RuntimeError:  # torch has no such operation
        pytest.skip("an overflow in eager, too")
    for tensor in (x, scalar):
        tensor.copy_(tensor.flip(0) if tensor.dim() else x[1, 1])
    graph.replay()
    assert all(map(bits_equal, kept, fn(x, scalar, number)))
