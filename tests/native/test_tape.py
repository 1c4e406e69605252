"""The native tape of CPU graphs: what it does, it does as Python's loop does."""

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from graphdispatch import ReplayError
from graphdispatch.backends import get_backend
from graphdispatch.backends.cpu.graph import CPUGraph, Program, Step, loop, run_and_copy
from graphdispatch.backends.operators import bits_equal, tensors_in
from graphdispatch.native import tape

from ..helpers import Behind, collector_off, in_threads, recorded

pytestmark = pytest.mark.skipif(not tape.TAPE.wait(), reason=repr(tape.TAPE))

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NUMBERS = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Numbers of a dtype, some of them negative and none of them zero."""
    return (torch.randn(*shape) * 3 + 0.25).to(dtype)


Case = tuple[Callable[[torch.Tensor], Any], tuple[torch.dtype, ...]]
CASES: dict[str, Case] = {
    "numbers": (lambda x: (x * 2 + 1, 3 - x, x / 2, x**2), NUMBERS[:-2]),
    "complex numbers": (
        lambda x: (x * (1 + 2j), x.abs(), x.conj() + x, x.real * 2),
        (torch.complex64, torch.complex128),
    ),
    "comparisons": (lambda x: (x > 0.5, torch.where(x > 0, x, x + x), x.eq(x.flip(0))), NUMBERS[:-2]),
    "lists": (lambda x: (torch.cat([x, x + 1], 1), torch.stack([x, x * 2])), NUMBERS),
    "indices": (lambda x: (x[:, [2, 0]] + x[:, :2], x[torch.tensor([1, 0]), torch.tensor([2, 1])] * 2), NUMBERS),
    "reductions": (lambda x: (x.sum(1), x.amax(0), x.max(1), x.mean(-1, keepdim=True)), FLOATS),
    "integer reductions": (lambda x: (x.sum(), x.sum(0, dtype=torch.float32), x.argmax(1)), NUMBERS[4:7]),
    "products": (lambda x: (x @ x.t(), torch.addmm(x @ x.t(), x, x.t(), beta=2)), FLOATS[:3]),
    "sorts": (lambda x: (x.sort(1), x.topk(2, 1), x.cumsum(0)), FLOATS),
    "casts": (lambda x: (x.to(torch.float64), x.to(torch.int32) + 1, x.bool()), NUMBERS[:-1]),
    "made anew": (lambda x: (torch.arange(3) + x, torch.full((2,), 7.5) * x.sum(), x.new_zeros(3) + x), FLOATS),
    "softmax": (lambda x: (x.softmax(1), x.log_softmax(0), nn.functional.gelu(x, approximate="tanh")), FLOATS),
    "norms": (lambda x: (nn.functional.layer_norm(x, (3,)), x.norm(dim=1)), FLOATS[:2]),
    "convolution": (lambda x: nn.functional.conv1d(x[None], x[:, :, None][:, :2].contiguous()), FLOATS[:2]),
    "views": (lambda x: (x.t().contiguous() + 1, x.expand(2, 2, 3).clone(), x[1:, ::2] * 2), NUMBERS[:-2]),
    "formats": (lambda x: x.reshape(1, 1, 2, 3).contiguous(memory_format=torch.channels_last) * 2, FLOATS),
    "in place": (lambda x: x.clone().mul_(2).add_(x, alpha=3).clamp_(min=-1).masked_fill_(x > 1, 5), FLOATS),
    "indexed writes": (lambda x: x.clone().index_put_((torch.tensor([1]),), x[0]).index_fill_(1, ROW, 2), NUMBERS),
    "literals": (lambda x: x + torch.tensor([1.5, 2.5, 3.5]).mul_(x.sum()), FLOATS),
    "draws": (lambda x: (torch.rand_like(x), nn.functional.dropout(x, 0.5), x.clone().normal_()), FLOATS),
    "a generator": (lambda x: x + torch.rand(3, generator=GENERATOR), FLOATS[:1]),
}
ROW = torch.tensor([0])
GENERATOR = torch.Generator()


def program_of(graph: CPUGraph) -> Program:
    """What the graph replays, by a tape."""
    assert graph.program.tape is not None
    return graph.program


def both(fn: Callable[[torch.Tensor], Any], x: torch.Tensor) -> None:
    """Replay a graph of ``fn`` over new values by each loop, from the same state: all bits are equal."""
    graph, out = recorded(lambda: fn(x))
    program = program_of(graph)
    seen = []
    for run in (partial(loop, program.steps), graph.replay):
        kept = []
        torch.manual_seed(3)
        GENERATOR.manual_seed(3)
        for shift in range(2):
            x.copy_(values(x.dtype, 2, 3) + shift)
            run()
            kept.append([t.clone() for t in tensors_in(out)])
        seen.append((kept, torch.get_rng_state()))
    (python, python_state), (native, native_state) = seen
    for expected, got in zip(python, native, strict=True):
        assert got
        assert all(map(bits_equal, expected, got))
    assert torch.equal(python_state, native_state)


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, (_, of) in CASES.items() for dtype in of], ids=str)
def test_bits(name: str, dtype: torch.dtype) -> None:
    """The tape gives the bits of Python's loop, and draws as it does."""
    both(CASES[name][0], values(dtype, 2, 3))


def test_it_takes_common_operators() -> None:
    """None of a usual program is left to Python."""
    x = torch.randn(2, 3)
    graph, _ = recorded(
        lambda: [fn(x) for name, (fn, _) in CASES.items() if name not in ("a generator", "complex numbers")]
    )
    made = tape.TAPE.module.Tape(print, print)
    for one in program_of(graph).steps:
        schema = one.func._schema
        assert made.add(print, schema.name, schema.overload_name, *one.operands, one.outs), schema


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
    program = program_of(graph)
    graph.replay()
    x.fill_(bad)
    python = message(partial(loop, program.steps))
    assert message(graph.replay) == python
    assert "aten." in python[2][0]


def test_other_shapes_are_refused() -> None:
    """Results that have another shape than their places are a ``ReplayError``, with the text of Python's loop."""
    x = torch.randn(2, 3)
    place, call = torch.zeros(2), ((x,), {})
    step = Step(partial(run_and_copy, aten.relu.default, *call, (place,)), aten.relu.default, call, (place,))
    program = Program([step])
    kind, text, _ = message(partial(loop, program.steps))
    with pytest.raises(ReplayError, match=r"shapes \[\(2, 3\)\] where the graph holds \[\(2,\)\]") as caught:
        program.run()
    assert (kind, text) == (ReplayError, str(caught.value))


def test_warnings_become_python_s() -> None:
    """A warning of an operator is raised where Python's filters say so, before the next operator runs."""
    x, out, marks = torch.randn(3), torch.zeros(1, 3), torch.zeros(2)
    steps = [
        Step(print, aten.add.out, ((x, x), {"out": out}), None),
        Step(print, aten.fill_.Scalar, ((marks, 1.0), {}), None),
    ]
    program = Program(steps)
    with pytest.raises(UserWarning, match="resized"):
        program.run()
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
    for run in (partial(loop, program_of(graph).steps), graph.replay):
        names: list[str] = []
        with watch(lambda func, result, names=names: (names.append(str(func)), result)[1]):
            run()
        seen.append([name for name in names if "aten" in name or watch is Functions])
    assert seen[0] == seen[1] != []


def test_autocast_changes_nothing() -> None:
    """A replay under autocast gives the bits of Python's loop under autocast."""
    x, w = torch.randn(2, 3), torch.randn(3, 3)
    graph, out = recorded(lambda: (x @ w).softmax(0))
    program = program_of(graph)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loop(program.steps)
        expected = out.clone()
        out.zero_()
        graph.replay()
    assert bits_equal(out, expected)


def test_the_gil_is_released() -> None:
    """Two replays run at once: each waits within its replay for the other, through a call of Python's."""
    barrier = threading.Barrier(2, timeout=30)
    programs = [
        Program([Step(barrier.wait, "wait"), Step(print, aten.fill_.Scalar, ((torch.zeros(1), 1.0), {}))]) for _ in "ab"
    ]
    in_threads(*(program.run for program in programs))
    assert not barrier.broken


def test_a_stream_replays_natively() -> None:
    """Work on a stream's thread is the tape's too, and its errors come to who waits."""
    backend = get_backend("cpu")
    index, table = torch.zeros(2, dtype=torch.int64), torch.randn(4, 3)
    graph, out = recorded(lambda: table.index_select(0, index))
    stream = backend.make_stream()
    with backend.use_stream(stream):
        index.fill_(2)
        graph.replay()
        assert bits_equal(out, table[[2, 2]])
        index.fill_(7)
        with pytest.raises(IndexError, match="out of range") as caught:
            graph.replay()
    assert "index_select" in caught.value.__notes__[0]


def test_reset_frees_everything() -> None:
    """After ``reset`` nothing holds what the graph used, without a run of the collector."""
    x = [torch.randn(2, 3)]
    graph = recorded(lambda: (x[0].exp() + 1).sort(0))[0]
    graph.replay()
    program = program_of(graph)
    arena = graph.arena
    storages = [StorageWeakRef(t.untyped_storage()) for t in (x[0], arena) if t is not None]
    held = [weakref.ref(program), weakref.ref(program.steps[0].run)]
    with collector_off():
        graph.reset()
        x[0] = program = arena = None
        assert [ref() for ref in held] == [None, None]
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
    x, scalar = values(dtype, 3, 40), values(dtype, 1)[0]
    try:
        graph, kept = recorded(lambda: fn(x, scalar, number))
    except RuntimeError:  # torch has no such operation
        pytest.skip("an overflow in eager, too")
    for tensor in (x, scalar):
        tensor.copy_(tensor.flip(0) if tensor.dim() else x[1, 1])
    graph.replay()
    assert all(map(bits_equal, kept, fn(x, scalar, number)))


def test_a_kernel_that_is_registered_later_is_seen() -> None:
    """The dispatcher looks the kernel up at each replay."""
    x = torch.randn(4)
    graph, kept = recorded(lambda: x.exp().erf().exp())
    seen: list[str] = []

    def mine(given: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        seen.append("mine")
        return out.fill_(0.5)

    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings(action="ignore"):
            library.impl("erf.out", mine, "CPU")
        graph.replay()
    finally:
        library._destroy()
    assert seen == ["mine"]
    assert bits_equal(kept, torch.full((4,), 0.5).exp())
    graph.replay()
    assert bits_equal(kept, x.exp().erf().exp())
