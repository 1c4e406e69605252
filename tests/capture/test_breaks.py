"""Marks: what ``eager_break`` accepts, what a mark does outside of a capture, and where it breaks within one."""

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphMode, eager_break, remove_eager_break
from graphdispatch.backends import get_backend
from graphdispatch.call import marks
from graphdispatch.call.breaks import is_marked
from graphdispatch.call.marks import ACTIVE, BREAKS
from graphdispatch.capture.piecewise import PiecewiseGraph
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper
from graphdispatch.errors import CaptureError, ConfigError

from ..spy import Spy

ONE = BatchDescriptor(1)
X = torch.tensor([1.0, -2.0, 3.0])


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    """Breaks are for inference."""
    with torch.no_grad():
        yield


def captured(fn: Callable[..., Any], *args: Any, mode: CUDAGraphMode = CUDAGraphMode.PIECEWISE) -> Any:
    """The graph of one call."""
    wrapper = CUDAGraphWrapper(fn, mode)
    wrapper(*args, batch_descriptor=ONE, cudagraph_runtime_mode=mode)
    entry = wrapper.get_entry(ONE)
    assert entry is not None, wrapper.get_stats().reasons
    return entry.graph


def names(fn: Callable[..., Any], *args: Any) -> list[str]:
    """The breaks of one PIECEWISE capture, in order."""
    graph = captured(fn, *args)
    assert isinstance(graph, PiecewiseGraph)
    return [part.name for part in graph.breaks]


@eager_break
def double(x: Tensor) -> Tensor:
    """A marked function."""
    return x * 2


class Net(nn.Module):
    """A module whose part may be marked."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Work before and after the part."""
        return self.part(x + 1) * 2  # type: ignore[no-any-return]


@pytest.fixture
def net() -> Net:
    """Without gradients."""
    return Net().requires_grad_(False)


def test_a_marked_function_is_itself_outside_of_a_capture() -> None:
    """It is called with its arguments, keeps its name, and may be marked twice."""
    assert torch.equal(double(X), X * 2)
    assert double.__name__ == "double"
    assert eager_break(double) is double


def test_a_marked_module_is_itself_outside_of_a_capture(net: Net) -> None:
    """It returns what it did, is the same object, and may be marked twice."""
    expected = net(X)
    assert eager_break(net.part) is net.part
    eager_break(net.part)
    assert torch.equal(net(X), expected)


def test_a_mark_costs_a_full_capture_nothing() -> None:
    """In a FULL capture the marked part is in the graph."""
    graph = captured(lambda x: double(x + 1) + 1, X, mode=CUDAGraphMode.FULL)
    assert not isinstance(graph, PiecewiseGraph)


def test_a_function_breaks(net: Net) -> None:
    """Each call of a marked function is a break, under its name."""
    assert names(lambda x: double(double(x + 1) + 1), X) == ["double", "double"]


def test_a_method_breaks() -> None:
    """A method may be marked in its class; each object has its own."""

    class Scale:
        def __init__(self, by: float) -> None:
            self.by = by

        @eager_break
        def __call__(self, x: Tensor) -> Tensor:
            return x * self.by

    two, three = Scale(2.0), Scale(3.0)
    assert len(names(lambda x: three(two(x)), X)) == 2
    assert torch.equal(three(two(X)), X * 6)


def test_a_module_breaks_that_was_marked_from_outside(net: Net) -> None:
    """Its source need not know, and it may be marked after the wrapper was made."""
    wrapper = CUDAGraphWrapper(net, CUDAGraphMode.PIECEWISE)
    eager_break(net.part)
    wrapper(X, batch_descriptor=ONE, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE)
    entry = wrapper.get_entry(ONE)
    assert entry is not None
    assert [part.name for part in entry.graph.breaks] == ["Linear"]  # type: ignore[attr-defined]


def test_hooks_of_a_marked_module_run_once(net: Net) -> None:
    """The mark is on ``forward``, within the hooks."""
    calls: list[int] = []
    net.part.register_forward_hook(lambda *_: calls.append(1))
    eager_break(net.part)
    net(X)
    assert len(calls) == 1


def test_a_mark_is_taken_back(net: Net) -> None:
    """Then the module is part of one graph again."""
    eager_break(net.part)
    remove_eager_break(net.part)
    assert not is_marked(net.part)
    assert names(net, X) == []


def test_a_forward_that_hung_on_the_module_comes_back(net: Net) -> None:
    """A module whose ``forward`` was replaced, as libraries do, has the replacement again."""
    net.part.forward = own = lambda x: x - 1  # type: ignore[method-assign]
    eager_break(net.part)
    assert torch.equal(net(X), X * 2)
    remove_eager_break(net.part)
    assert net.part.forward is own


def test_a_deep_copy_of_a_marked_module_is_a_module_of_its_own(net: Net) -> None:
    """The copy is marked too and runs on its own weights."""
    eager_break(net.part)
    twin = copy.deepcopy(net)
    twin.part.weight.zero_()
    twin.part.bias.fill_(5.0)
    assert torch.equal(twin(X), torch.full((3,), 10.0))
    assert names(twin, X) == ["Linear"]


def test_an_operator_breaks_by_name() -> None:
    """In all its overloads, until the name is taken back."""
    eager_break("aten::cumsum", "aten::sin")
    try:
        assert names(lambda x: x.sin().cumsum(0) + 1, X) == ["aten.sin.default", "aten.cumsum.default"]
    finally:
        remove_eager_break("aten::cumsum", "aten::sin")
    assert names(lambda x: x.sin().cumsum(0) + 1, X) == []


def test_an_operator_that_no_graph_can_hold_may_break() -> None:
    """``nonzero`` is refused in a capture, and served as a break while its shape stays."""
    wrapper = CUDAGraphWrapper(lambda x: (x * 2).nonzero().flatten() + 1, CUDAGraphMode.PIECEWISE)
    eager_break("aten::nonzero")
    try:
        for values in ([1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 1, 1]):
            x = torch.tensor(values)
            got = wrapper(x, batch_descriptor=ONE, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE)
            assert torch.equal(got, x.nonzero().flatten() + 1)
    finally:
        remove_eager_break("aten::nonzero")
    assert wrapper.get_stats().hits == 2


def test_an_operator_tagged_unsafe_breaks_by_itself() -> None:
    """``torch.Tag.cudagraph_unsafe`` on a custom operator needs no mark."""
    with torch.library._scoped_library("graphdispatch_test", "FRAGMENT") as library:
        library.define("unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
        library.impl("unsafe", lambda x: x + float(x.sum()), "CPU")
        broken = names(lambda x: torch.ops.graphdispatch_test.unsafe(x * 2) + 1, X)
        assert broken == ["graphdispatch_test.unsafe.default"]


def test_the_compiler_traces_through_a_mark() -> None:
    """A marked function costs ``torch.compile`` no graph break."""
    compiled = torch.compile(lambda x: double(x + 1) + 1, fullgraph=True, backend="eager")
    assert torch.equal(compiled(X), (X + 1) * 2 + 1)


def test_nobody_captures_outside_of_a_capture() -> None:
    """There is an active capture within one, and none before and after."""
    seen = Spy()

    def look(x: Tensor) -> Tensor:
        seen.append(marks.ACTIVE.get() is None)  # by the library's module, which no guard looks into
        return x + 1

    captured(look, X)
    assert set(seen) == {True, False}
    assert ACTIVE.get() is None


def test_another_thread_does_not_break() -> None:
    """While one thread captures, a marked function on another thread is itself, and sees no capture."""
    seen = Spy()

    def elsewhere() -> None:
        with torch.no_grad():
            seen.append((marks.ACTIVE.get(), double(X)))

    @eager_break
    def start_thread(x: Tensor) -> Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return x * 2

    assert len(names(lambda x: start_thread(x) + 1, X)) == 1
    assert len(seen) > 1
    assert all(active is None and torch.equal(result, X * 2) for active, result in seen)


def test_a_nested_mark_runs_inline() -> None:
    """A marked part within a marked part belongs to the outer break."""

    @eager_break
    def outer(x: Tensor) -> Tensor:
        return double(x) + double(x)

    assert names(lambda x: outer(x + 1) + 1, X) == [outer.__qualname__]


def test_an_operator_within_a_break_does_not_break_again() -> None:
    """An operator broken by name runs inline in a marked part."""
    eager_break("aten::sin")
    try:
        fn = eager_break(lambda x: x.sin())
        assert len(names(lambda x: fn(x + 1) + 1, X)) == 1
    finally:
        remove_eager_break("aten::sin")


def test_a_capture_within_a_capture_is_refused() -> None:
    """There is one capture on a thread."""
    backend = get_backend("cpu")
    pool = backend.make_pool()
    with backend.begin_capture(pool), pytest.raises(CaptureError, match="under way"):
        backend.begin_capture(pool)
    assert not backend.is_capturing()


@pytest.mark.parametrize("name", ["nonzero", "aten::no_such_thing", "::", "nowhere::nothing"])
def test_an_unknown_operator_is_an_error(name: str) -> None:
    """The error names it and the spelling, and nothing is added."""
    with pytest.raises(ConfigError, match="is unknown to torch; write 'namespace::name'"):
        eager_break("aten::sin", name)
    assert "aten::sin" not in BREAKS


@pytest.mark.parametrize("target", [3, None, torch.ones(1)])
def test_what_cannot_be_marked_is_an_error(target: Any) -> None:
    """Only functions, modules and names of operators can."""
    with pytest.raises(ConfigError, match="takes a function, a module or names of operators, got"):
        eager_break(target)


def test_two_functions_at_once_are_an_error() -> None:
    """Only names of operators may be several."""
    with pytest.raises(ConfigError, match="takes one function or module"):
        eager_break(double, double)  # type: ignore[call-overload]


def test_what_has_no_mark_cannot_lose_it(net: Net) -> None:
    """A module that is not marked is named in the error."""
    with pytest.raises(ConfigError, match=r"takes marked modules .* got Linear"):
        remove_eager_break(net.part)
