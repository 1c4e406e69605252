"""Custom operators: Python inside them is frozen, as CUDA freezes it; an operator in C++ is one call of a graph."""

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Dim, Graphed, Reason, eager_break, graphed
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper
from graphdispatch.proof.watch.effects import EffectRecorder

from ...helpers import AT_ONCE, assert_same, check_rows, compiled_operator, follows, recorded, run_python


def serve(fn: Callable[..., Any], mode: str = "FULL") -> Graphed[..., Any]:
    """A served callable of one size, captured when it first comes."""
    return graphed(fn, dynamic={}, mode=mode, options=AT_ONCE)


def check_served(step: Graphed[..., Any], *shape: int) -> None:
    """Five calls with the answers of eager, the last two from a graph at least."""
    check_rows(step, *[shape] * 5)
    assert step.stats.hits >= 2


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """A namespace of operators that goes with the test."""
    with torch.library._scoped_library("graphdispatch_custom", "FRAGMENT") as scoped:
        yield scoped
    del scoped
    gc.collect()  # torch takes the operator's name away once more when the library is collected


def define(library: torch.library.Library, schema: str, fn: Callable[..., Any], key: str) -> Any:
    """An operator with one kernel in Python."""
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, fn, key)
    return getattr(torch.ops.graphdispatch_custom, name)


def write_rows(cache: Tensor, x: Tensor, slot: Tensor) -> None:
    """Writes rows of a cache where no mode sees it."""
    cache.numpy()[slot.numpy()] = x.numpy()


def test_operator_without_a_dispatch_key_is_one_call() -> None:
    """A C++ operator that was registered as ``m.def(schema, &fn)`` is recorded whole; torch has one."""
    assert len(follows(lambda x: torch.ops._test.leaky_relu(x, 0.5) + 1, 4, 3).steps) == 2


@pytest.fixture(params=[torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def both_modes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Composite operators take another way in each."""
    with request.param():
        yield


@pytest.mark.usefixtures("both_modes")
@pytest.mark.parametrize("key", ["CompositeImplicitAutograd", "CompositeExplicitAutograd", "CPU"])
def test_opaque_operator_writes_at_each_replay(key: str) -> None:
    """An opaque operator that writes a cache runs in every replay, and its schema says what a capture must undo."""
    caches = torch.zeros(64, 3), torch.zeros(64, 3)

    with compiled_operator("rows(Tensor(a!) cache, Tensor x, Tensor slot) -> ()", write_rows, key) as write:

        def step(cache: Tensor, x: Tensor, slot: Tensor) -> Tensor:
            write(cache, x * 2, slot)
            return cache.index_select(0, slot) + cache.sum(0)

        steps = serve(lambda x, slot: step(caches[0], x, slot))
        for index in range(5):
            x, slot = torch.randn(4, 3), torch.arange(4) + 4 * index
            assert torch.equal(steps(x, slot), step(caches[1], x, slot))
            assert torch.equal(*caches)
        assert steps.stats.hits == 3


def draw(x: Tensor) -> Tensor:
    """Draws where no mode sees it."""
    return x + torch.from_numpy(torch.rand(3).numpy().copy())


def test_operator_that_draws_unseen_leaves_the_callers_numbers() -> None:
    """A C++ operator may draw from torch's generator and say so nowhere; a capture draws the numbers of one run."""
    with compiled_operator("unseen_noise(Tensor x) -> Tensor", draw) as noise:
        batches = [torch.randn(rows, 3) for rows in (4, 4, 3, 4, 2, 4)]
        found = []
        for step in (lambda x: noise(x) * 2, graphed(lambda x: noise(x) * 2, dynamic={"x": 0}, sizes=[4])):
            torch.manual_seed(0)
            found.append([(step(x), torch.rand(2)) for x in batches])
        assert_same(*found)


def test_the_users_word_is_of_rows_alone() -> None:
    """Elements along a length may mix in an operator without a rule; replays with other padding show that they do."""
    options = CUDAGraphOptions(rows="independent", capture_after=1)
    with compiled_operator("total(Tensor x) -> Tensor", lambda x: x.sum(1)) as total:
        step = graphed(
            lambda x: total(x) * 2, dynamic={"x": {0: Dim("batch", [4]), 1: Dim("seq", [8])}}, options=options
        )
        for length in (8, 8, 5, 5):
            step(torch.randn(4, length))
    assert "real rows depend on padding along 'seq'" in step.last_decision.detail


def test_gradients_pass_an_operator_that_was_revealed() -> None:
    """An operator that is made of others keeps its gradients when modes were made to see it."""
    schema, key = "double_sine(Tensor x) -> Tensor", "CompositeImplicitAutograd"
    with compiled_operator(schema, lambda x: (x * 2).sin(), key) as op, torch.enable_grad():
        recorded(lambda: torch.zeros(3))
        x = torch.zeros(3, requires_grad=True)
        op(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def _with_kernel(fn: Callable[[Tensor], Tensor]) -> Any:
    op = torch.library.custom_op("graphdispatch_custom::b", pytest.fail, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_kernel("cpu")(fn)
    return op


PYTHON = {
    "custom_op": lambda fn: torch.library.custom_op("graphdispatch_custom::a", fn, mutates_args=()),
    "register_kernel": _with_kernel,
    "triton_op": lambda fn: torch.library.triton_op("graphdispatch_custom::c", fn, mutates_args=()),
}


@pytest.mark.usefixtures("both_modes")
@pytest.mark.parametrize("kind", [*PYTHON, "CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd"])
def test_python_of_an_operator_is_frozen(library: torch.library.Library, kind: str) -> None:
    """However it is registered, a Python operator is looked into: replays run its operators and none of its Python."""
    runs: list[int] = []

    def body(x: Tensor) -> Tensor:
        runs.append(1)
        return torch.nn.functional.silu(x.t().reshape(-1)) * 2

    op = PYTHON[kind](body) if kind in PYTHON else define(library, "d(Tensor x) -> Tensor", body, kind)
    x = torch.randn(4, 3)
    graph, out = recorded(lambda: op(x) + 1)
    before = len(runs)
    x.normal_()
    graph.replay()
    assert len(runs) == before
    assert torch.equal(out, op(x) + 1)


_FLEX = """
import torch
from torch.nn.attention.flex_attention import flex_attention
from graphdispatch import CUDAGraphOptions, graphed
torch.set_grad_enabled(False)
step = graphed(lambda x: flex_attention(x, x, x), dynamic={}, options=CUDAGraphOptions(capture_share=None))
step._server.graphs.judges_gain = False  # by this process's clock
batches = [torch.full((1, 1, 4, 8), 1.0 + one) for one in range(5)]
assert all([torch.equal(step(x), flex_attention(x, x, x)) for x in batches])
print(step.stats.hits)
"""


def test_flex_attention_runs_its_parts() -> None:
    """``flex_attention`` without a compiler is Python that runs operators, and is served. A guard of torch's compiler
    runs with it, and imports modules."""
    assert int(run_python("-W", "ignore", "-c", _FLEX)) >= 2


def numpy_sine(x: Tensor) -> Tensor:
    """What a graph cannot hold."""
    return torch.from_numpy(np.sin(x.numpy()))


_address_of = torch.Tensor.data_ptr
"""Kept before anyone listens, so that no guard of host reads sees it."""


def _array(tensor: Tensor) -> Any:
    buffer = (np.ctypeslib.ctypes.c_float * tensor.numel()).from_address(_address_of(tensor))
    return np.frombuffer(buffer, dtype=np.float32).reshape(tensor.shape)


def address_sine(x: Tensor) -> Tensor:
    """The same, with nothing that a guard of host reads would see."""
    out = torch.empty_like(x)
    np.sin(_array(x), out=_array(out))
    return out


@pytest.mark.usefixtures("both_modes")
@pytest.mark.parametrize("body", [numpy_sine, address_sine])
def test_python_that_leaves_torch_is_refused_by_name(library: torch.library.Library, body: Any) -> None:
    """An operator whose Python computes with numpy would be frozen; the refusal names it and says to break there."""
    op = define(library, "sine(Tensor x) -> Tensor", body, "CPU")
    steps = serve(lambda x: op(x * 2) + 1)
    check_rows(steps, 4, 4, 4)
    assert steps.stats.hits == 0
    assert "eager_break('graphdispatch_custom::sine')" in steps.last_decision.detail


def test_python_that_leaves_torch_may_break(library: torch.library.Library) -> None:
    """As a break, by its tag, such an operator runs anew between two graphs; a FULL capture refuses the tag."""
    library.define("sine(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
    library.impl("sine", numpy_sine, "CPU")

    def step(x: Tensor) -> Tensor:
        return torch.ops.graphdispatch_custom.sine(x * 2) + 1

    check_served(serve(step, "PIECEWISE"), 4, 3)
    refused = serve(step)
    refused(torch.randn(4, 3))
    assert "tagged cudagraph_unsafe" in refused.last_decision.detail


def test_ranks_in_step_have_breaks(library: torch.library.Library) -> None:
    """What reads on the host in a break is served where ranks agree, too. Elsewhere the eager run shows it, so that no
    rank stops within a run of all."""
    library.define("sine(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
    library.impl("sine", numpy_sine, "CPU")
    aside = eager_break(lambda x: x * float(x.sum()))
    stages: list[int] = []

    def agree(numbers: Sequence[int]) -> Sequence[int]:
        stages.append(numbers[0])
        return numbers

    def serve_in_step(fn: Callable[..., Any]) -> Reason:
        wrapper = CUDAGraphWrapper(fn, CUDAGraphMode.PIECEWISE, agree=agree)
        for _ in range(3):
            x = torch.randn(4, 3)
            got = wrapper(x, batch_descriptor=BatchDescriptor(4), cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE)
            assert torch.equal(got, fn(x))
        decision = wrapper._server.decision
        assert decision is not None
        return decision.reason

    assert serve_in_step(lambda x: aside(torch.ops.graphdispatch_custom.sine(x * 2)) + 1) is Reason.EXACT
    stages.clear()
    assert serve_in_step(lambda x: x * x.sum().item()) is Reason.CAPTURE_UNSAFE
    assert len(stages) == 3 + 1  # before each call, and behind the only run of the first one


def test_unseen_write_happens_once(library: torch.library.Library) -> None:
    """Python that writes a marked argument with numpy is refused, and what was written is as after one execution."""

    def count(total: Tensor) -> None:
        _array(total)[...] += 1

    op = define(library, "count(Tensor(a!) total) -> ()", count, "CPU")
    total = torch.zeros(3)

    def step(x: Tensor) -> Tensor:
        op(total)
        return x + total

    steps = serve(step)
    for calls in range(1, 5):
        assert torch.equal(steps(torch.zeros(4, 3)), torch.full((4, 3), float(calls)))
    assert steps.stats.hits == 0
    assert "writes to an argument" in steps.last_decision.detail


def test_a_marked_write_counts_though_nobody_sees_it(library: torch.library.Library) -> None:
    """Python may launch a kernel that writes past torch's dispatcher: a run alike has to be watched."""
    op, total = define(library, "count(Tensor(a!) total) -> ()", lambda total: None, "CPU"), torch.zeros(3)
    with EffectRecorder(2**20).watching() as effects:
        op(total)
    assert effects.may_leave_effects


def test_break_inside_an_operator(library: torch.library.Library) -> None:
    """The Python of an operator may call a function that is marked as a break."""
    aside = eager_break(lambda x: x * float(x.sum()))
    op = define(library, "outer(Tensor x) -> Tensor", lambda x: aside(x + 1) * 2, "CPU")
    check_served(serve(lambda x: op(x * 2) + 1, "PIECEWISE"), 4, 3)
