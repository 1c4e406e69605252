"""Marks: what ``eager_break`` accepts, what a mark does outside of a capture, and where it breaks within one."""

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphMode, Reason, eager_break, graphed, remove_eager_break
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper
from graphdispatch.errors import ConfigError
from graphdispatch.native.tape import TAPE

from ...behaviour.test_python_state import says_capturing
from ...helpers import Spy, check_rows, in_threads, make

ONE = BatchDescriptor(1)
X = torch.tensor([1.0, -2.0, 3.0])


def captured(fn: Callable[..., Any], *args: Any, mode: CUDAGraphMode = CUDAGraphMode.PIECEWISE) -> Any:
    """The graph of one call."""
    wrapper = CUDAGraphWrapper(fn, mode)
    wrapper(*args, batch_descriptor=ONE, cudagraph_runtime_mode=mode)
    entry = wrapper.get_entry(ONE)
    assert entry is not None, wrapper.get_stats().reasons
    return entry.graph


def names(fn: Callable[..., Any], *args: Any) -> list[str]:
    """The breaks of one PIECEWISE capture, in order."""
    return [part.name for part in captured(fn, *args).breaks]


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


def test_a_marked_module_is_itself_outside_of_a_capture(net: Net) -> None:
    """It returns what it did, is the same object, and may be marked twice; the mark is within its hooks."""
    expected, calls = net(X), list[int]()
    net.part.register_forward_hook(lambda *_: calls.append(1))
    assert eager_break(net.part) is net.part
    eager_break(net.part)
    assert torch.equal(net(X), expected)
    assert len(calls) == 1


def test_a_mark_costs_a_full_capture_nothing() -> None:
    """In a FULL capture the marked part is in the graph."""
    assert not hasattr(captured(lambda x: double(x + 1) + 1, X, mode=CUDAGraphMode.FULL), "breaks")


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


def test_a_deep_copy_of_a_marked_module_is_a_module_of_its_own(net: Net) -> None:
    """The copy is marked too and runs on its own weights."""
    eager_break(net.part)
    twin = copy.deepcopy(net)
    twin.part.weight.zero_()
    twin.part.bias.fill_(5.0)
    assert torch.equal(twin(X), torch.full((3,), 10.0))
    assert names(twin, X) == ["Linear"]


def test_an_operator_breaks_by_name() -> None:
    """In all its overloads, until the name is taken back. What it gives may be an output, which the caller owns."""
    eager_break("aten::cumsum", "aten::sin")
    try:
        step, x = make(lambda x: x.sin().cumsum(1), mode="PIECEWISE"), torch.randn(4, 4, 3)
        for got, want in zip([step(one) for one in x], x.sin().cumsum(2), strict=True):
            assert torch.equal(got, want)
        assert step.last_decision.reason is Reason.EXACT
        assert names(lambda x: x.sin().cumsum(0) + 1, X) == ["aten.sin.default", "aten.cumsum.default"]
    finally:
        remove_eager_break("aten::cumsum", "aten::sin")
    assert names(lambda x: x.sin().cumsum(0) + 1, X) == []


def test_an_operator_breaks_in_the_first_graph_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that the library starts then is none of the callable's."""
    monkeypatch.setattr(TAPE, "_thread", None)
    eager_break("aten::sin")
    try:
        step = make(lambda x: x.sin() + 1, sizes=(4,), mode="PIECEWISE")
        step.prewarm(torch.randn(4, 3))
        assert check_rows(step, 4) == [Reason.EXACT]
    finally:
        remove_eager_break("aten::sin")


def test_what_the_code_does_while_somebody_captures_counts() -> None:
    """In a prewarm the eager run does something else, so that it is no warm-up, and shows nothing of the rows."""
    step = make(lambda x: double(x * 2 + (x.mean(0) * 0 if says_capturing() else 0)), sizes=(4,), mode="PIECEWISE")
    step.prewarm(torch.randn(4, 3))
    assert check_rows(step, 3) == [Reason.ROWS_MIX]


def test_the_compiler_traces_through_a_mark() -> None:
    """A marked function costs ``torch.compile`` no graph break."""
    compiled = torch.compile(lambda x: double(x + 1) + 1, fullgraph=True, backend="eager")
    assert torch.equal(compiled(X), (X + 1) * 2 + 1)


def test_another_thread_does_not_break() -> None:
    """While one thread captures, a marked function on another thread is itself."""
    seen = Spy()

    @eager_break
    def start_thread(x: Tensor) -> Tensor:
        seen.extend(in_threads(lambda: double(X)))
        return x * 2

    assert len(names(lambda x: start_thread(x) + 1, X)) == 1
    assert len(seen) > 1
    assert all(torch.equal(result, X * 2) for result in seen)


@pytest.mark.parametrize("inner", [double, torch.sin])
def test_a_mark_within_a_break_runs_inline(inner: Callable[[Tensor], Tensor]) -> None:
    """A marked function, or an operator broken by name, belongs to the break around it."""
    outer = eager_break(lambda x: inner(x) + inner(x))
    eager_break("aten::sin")
    try:
        assert len(names(lambda x: outer(x + 1) + 1, X)) == 1
    finally:
        remove_eager_break("aten::sin")


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: eager_break("aten::sin", "nonzero"), "is unknown to torch; write 'namespace::name'"),
    (lambda: eager_break("aten::sin", "aten::no_such_thing"), "is unknown to torch"),
    (lambda: eager_break("aten::sin", "::"), "is unknown to torch"),
    (lambda: eager_break(3), "takes a function, a module or names of operators, got"),  # type: ignore[call-overload]
    (lambda: eager_break(X), "takes a function, a module or names of operators, got"),  # type: ignore[call-overload]
    (lambda: eager_break(double, double), "takes one function, one module with names"),  # type: ignore[call-overload]
    (lambda: eager_break(nn.Linear(3, 3), "no_such_method"), "names of methods of the module, got 'no_such"),
    (lambda: eager_break(nn.Linear(3, 3), "half", "no_such_method"), "methods of the module, got 'no_such"),
    (lambda: eager_break(nn.Sequential(nn.ReLU()), "0"), "names of methods of the module, got '0'"),
    (lambda: remove_eager_break(nn.Linear(3, 3)), "takes marked modules .* got Linear"),
]


@pytest.mark.parametrize(("mark", "message"), WRONG)
def test_what_cannot_be_marked_is_an_error(mark: Callable[[], Any], message: str) -> None:
    """The error names it and what would be right, and nothing was marked."""
    with pytest.raises(ConfigError, match=message):
        mark()
    assert names(lambda x: x.sin() + 1, X) == []


class Finder(nn.Module):
    """A model that reads a value back in one method, and computes in another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def find(this, x: torch.Tensor) -> torch.Tensor:  # noqa: N805 (what it calls itself does not matter)
        """Where values lie above their least, which it reads back."""
        return x > float(x.min())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` of (rows, 4)."""
        hidden = self.first(input)
        return self.last(torch.where(self.find(hidden), hidden, 0.0))


@pytest.mark.parametrize(
    ("model", "place"),
    [(Finder(), "model, 'find'"), (nn.Sequential(Finder(), nn.ReLU()), "model.get_submodule('0'), 'find'")],
)
def test_a_method_breaks_instead_of_its_module(model: nn.Module, place: str) -> None:
    """The refusal names the method; marked by that name, all but the method is in graphs."""
    model.eval().requires_grad_(False)
    assert f"eager_break({place}) with mode='PIECEWISE'" in _explain(model, input=torch.randn(4, 4))
    finder = model if isinstance(model, Finder) else model[0]
    assert eager_break(finder, "find") is finder
    serve = make(model, dynamic={"input": 0}, sizes=(4,), mode="PIECEWISE")
    check_rows(serve, *[4] * 4, width=4)
    assert serve.last_decision.reason is Reason.EXACT
    (entry,) = serve.entries
    assert [part.name for part in entry.graph.breaks] == ["Finder.find"]  # type: ignore[attr-defined]
    remove_eager_break(finder)
    assert "find" not in vars(finder)


class Static(nn.Linear):
    """Has methods of each kind."""

    @staticmethod
    def fixed(x: torch.Tensor) -> torch.Tensor:
        """One more."""
        return x + 1

    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        """Two more."""
        return x + 2


def test_marks_of_methods_leave_nothing_behind() -> None:
    """Whatever kind of method it was, or hung on the module itself."""
    model = Static(4, 4)
    model.own = own = lambda x: x + 3  # type: ignore[assignment]
    eager_break(model, "fixed", "of_class", "own")
    for name, more in (("fixed", 1), ("of_class", 2), ("own", 3)):
        assert torch.equal(getattr(model, name)(X), X + more)
    remove_eager_break(model)
    assert vars(model)["own"] is own
    assert {"fixed", "of_class"}.isdisjoint(vars(model))


def test_a_deep_copy_gets_a_method_of_its_own_back() -> None:
    """One that hung on the module itself is the copy's, and works on its weights."""
    model = nn.Linear(2, 2, bias=False)
    model.half = MethodType(lambda self, x: self(x) / 2, model)  # type: ignore[assignment]
    twin = copy.deepcopy(eager_break(model, "half"))
    twin.weight.detach().zero_()
    remove_eager_break(twin)
    assert not twin.half(torch.ones(1, 2)).any()  # type: ignore[operator]


class _Reading(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() < 1e9 else x


def _explain(model: Callable[..., Any], mode: str = "FULL", **arguments: torch.Tensor) -> str:
    served = graphed(model, dynamic=dict.fromkeys(arguments, 0), sizes=[4], mode=mode)
    for _ in range(3):
        served(**arguments)
    return served.explain(**arguments)


def test_the_nearest_module_to_break_at_is_named() -> None:
    """Under its name in the served model, or in its class where a function calls the model; one in pieces needs no
    other mode. Around a read of the served module itself there is none."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), _Reading())).eval(), torch.randn(4, 4)
    assert "eager_break(model.get_submodule('1.1')) with mode='PIECEWISE'" in _explain(model, input=x)
    assert "eager_break(Sequential.get_submodule('1.1')) with" in _explain(lambda x: torch.relu(model(x)), x=x)
    text = _explain(model, mode="PIECEWISE", input=x)
    assert "eager_break(model.get_submodule('1.1'))" in text
    assert "with mode" not in text
    assert "eager_break(" not in _explain(_Reading().eval(), x=x)


class _Anchors(nn.Module):
    cell_anchors: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cell_anchors = [x * 1]
        return x


class _Method:
    last: torch.Tensor | None = None

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * 1
        return x


def test_what_is_rebound_is_named_as_it_is_spelled() -> None:
    """Modules within modules are attributes, or entries of a list; a method's object is its class."""
    nested = nn.Sequential(nn.Identity(), nn.Sequential(_Anchors())).eval()
    step = _Method().run
    for fn, name, what in (
        (_Anchors().eval(), "x", "_Anchors.cell_anchors was rebound"),
        (nested, "input", "Sequential.1.0.cell_anchors was rebound"),
        (step, "x", "_Method.last was rebound"),
        (lambda x: nested(x), "x", ".1.0.cell_anchors was rebound"),
    ):
        assert what in _explain(fn, **{name: torch.randn(4, 4)})
