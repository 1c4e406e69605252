"""``torch.compile`` within a served callable, whose graphs are captured anew when what it reads changes, and around
one, where it and profilers go on."""

import cProfile
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphdispatch as gd

from ...helpers import HAS_CORE, Seen, check_calls, check_rows, double, frames_of, make

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_compiler")]

SCALE = 2.0


CONFIG = SimpleNamespace()


@pytest.fixture(autouse=True)
def _values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    monkeypatch.setitem(globals(), "CONFIG", SimpleNamespace(scale=2.0, rows=[2.0], factors={"one": 2.0}))


def by_global(x: Tensor) -> Tensor:
    """A helper, which the compiler puts inline."""
    return x * SCALE


def by_attribute(x: Tensor) -> Tensor:
    """Another one."""
    for factor in CONFIG.factors.values():
        x = x * factor
    return x * CONFIG.scale * CONFIG.rows[0]


class Model(nn.Module):
    """It calls helpers."""

    def forward(self, x: Tensor) -> Tensor:
        return by_global(x) + by_attribute(x)


def broken(x: Tensor) -> Tensor:
    """Compiled in two pieces."""
    y = x * 2
    torch._dynamo.graph_break()
    return by_global(by_attribute(y))


def inside(part: Any) -> Callable[[Tensor], Tensor]:
    """A callable that calls a compiled one."""
    return lambda x: part(x) + 1


def times(number: Callable[[], float]) -> Callable[[Tensor], Tensor]:
    """A callable that multiplies by what a compiled one gives."""
    return lambda x: x * number()


def check_change(fn: Any, change: Callable[[], object]) -> None:
    """Graphs serve, something changes, and the next answer is eager's."""
    step = make(fn, sizes=(4,))
    check_rows(step, *[4] * 5)
    assert step.stats.hits
    change()
    check_rows(step, 4)


def compiled_in_place(backend: str) -> nn.Module:
    """A module whose calls are compiled."""
    model = Model()
    model.compile(backend=backend)
    return model


MADE: dict[str, Callable[[str], Any]] = {
    "function": lambda b: torch.compile(lambda x: by_global(x) + by_attribute(x), backend=b),
    "function inside": lambda b: inside(torch.compile(lambda x: by_global(x) + by_attribute(x), backend=b)),
    "module": lambda b: torch.compile(Model(), backend=b),
    "module in place": compiled_in_place,
    "library's module": lambda b: inside(torch.compile(nn.Sequential(Model()), backend=b)),
    "pieces": lambda b: torch.compile(broken, backend=b),
    "no graph": lambda b: times(torch.compile(lambda: SCALE * CONFIG.scale, backend=b)),
}
CHANGES: dict[str, Callable[[], Any]] = {
    "global": lambda: globals().update(SCALE=3.0),
    "attribute of a global": lambda: setattr(CONFIG, "scale", 3.0),
    "entry of a dict": lambda: CONFIG.factors.update(other=3.0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", MADE)
def test_what_compiled_code_reads_is_compared(name: str, change: str) -> None:
    """Graphs serve, a value changes that the compiler has read, and the next answer is eager's."""
    check_change(MADE[name]("eager"), CHANGES[change])


@pytest.mark.parametrize(("model", "name"), [(nn.Linear(3, 3), "input"), (Model(), "x")], ids=["torch's", "own"])
def test_a_variable_named_as_a_local_one_may_change(
    model: nn.Module, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that keeps its batch under the name of the module's parameter."""
    step = make(torch.compile(model, backend="eager"), dynamic={name: 0}, sizes=(4,))
    for _ in range(6):
        x = torch.randn(4, 3)
        monkeypatch.setitem(globals(), "x", x)
        monkeypatch.setitem(globals(), "input", x)
        step(x)
    assert step.stats.hits


def test_variables_of_functions_of_no_module() -> None:
    """Functions that ``exec`` made have variables of their own."""
    variables: dict[str, Any] = {"SCALE": 2.0}
    exec("def scaled(x): return x * SCALE", variables)
    fn = torch.compile(inside(variables["scaled"]), backend="eager")
    check_change(fn, lambda: variables.update(SCALE=3.0))


def asks(x: Tensor, y: Tensor) -> Tensor:
    """A helper that tells tensors apart by more than their form."""
    return x * 7 if x is y or x.requires_grad else x + y


@pytest.mark.parametrize("by", ["identity", "requires_grad"])
def test_functions_put_inline_distinguish_arguments(by: str) -> None:
    """Which tensors are one, and which require a gradient."""
    step = make(torch.compile(lambda x, y: asks(x, y) + 1, backend="eager"), dynamic={"x": 0, "y": 0}, sizes=(4,))
    check_calls(step, *((torch.randn(4, 3), torch.randn(4, 3)) for _ in range(5)))
    assert step.stats.hits
    x = torch.randn(4, 3, requires_grad=by == "requires_grad")
    check_calls(step, (x, x if by == "identity" else torch.randn(4, 3)))


def in_a_thread(x: Tensor) -> Tensor:
    """Code on a thread of its own."""
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(by_global(x)))
    thread.start()
    thread.join()
    return x + 1


def under_a_profiler(x: Tensor) -> Tensor:
    """Code under a profiler of its own."""
    before = sys.getprofile()
    sys.setprofile(None)
    y = by_global(x)
    sys.setprofile(before)
    return y


UNHEARD = [in_a_thread, under_a_profiler] if sys.version_info < (3, 12) else [in_a_thread]
"""Later versions of Python hear of calls under another profiler, too."""


@pytest.mark.parametrize("fn", UNHEARD)
def test_code_that_nobody_hears_of_is_refused(fn: Any) -> None:
    """Code on a thread that the call starts, and under a profiler that takes the place of what listens."""
    step = make(fn, sizes=(4,))
    check_rows(step, *[4] * 4)
    assert not step.stats.hits
    assert step.last_decision.reason is gd.Reason.STATE_UNSEEN


def test_a_thread_that_prewarm_does_not_start_leaves_nothing() -> None:
    """Python lists no thread that never lived."""
    before = threading.enumerate()
    served = gd.graphed(in_a_thread, dynamic={"x": 0}, sizes=[4])
    report = served.prewarm(torch.randn(4, 3))
    assert list(report.reasons.values()) == [gd.Reason.STATE_UNSEEN]
    assert [thread for thread in threading.enumerate() if thread.name != "graphdispatch-tape"] == before


def test_a_prewarm_may_be_the_first_to_compile() -> None:
    """The compiler marks functions of its own that it meets for the first time: no graph is refused for that."""
    vars(torch._dynamo.utils.record_pregraph_bytecode_exit).pop("__dynamo_disable", None)
    step = make(
        torch.compile(nn.Linear(3, 3).eval(), backend="eager", dynamic=True), dynamic={"input": 0}, sizes=(2, 4)
    )
    step.prewarm(torch.randn(3, 3))
    assert step.captured_sizes == (2, 4)


def served() -> gd.Graphed[..., torch.Tensor]:
    """A callable without graphs yet."""
    return make(sizes=(4,))


def test_a_cold_callable_captures_under_the_compiler() -> None:
    """Its watched runs and captures see the callable itself, and each call is right."""
    step, seen = served(), Seen()
    compiled = torch.compile(lambda x: step(x - 1) - 1, backend=seen)
    alone = torch.compile(step, backend=seen)  # leaves nothing to compile
    for rows in (3, 4, 3, 3):
        x = torch.randn(rows, 3)
        assert torch.equal(compiled(x), double(x - 1) - 1)
        assert torch.equal(alone(x), double(x))
    assert (step.stats.hits, step.stats.captures) == (6, 1)
    assert {name.partition("_")[0] for name in seen.operators} == {"sub"}


def test_a_whole_graph_is_refused_by_the_compiler() -> None:
    """With ``fullgraph=True`` there can be no break, and the compiler's message names this library. Torch then goes on
    asking at each frame for a compiler, where none is at work: a later hit stays in the core."""
    step, x = served(), torch.randn(4, 3)
    check_rows(step, 4, 4, 4)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graphdispatch"):
        torch.compile(lambda x: step(x) + 1, backend=Seen(), fullgraph=True)(x)
    hits, frames = step.stats.hits, frames_of(lambda: step(x))
    assert step.stats.hits == hits + 1
    assert not HAS_CORE or "__call__" not in frames


def test_a_compiled_callable_inside_stays_compiled() -> None:
    """What the served callable compiled itself runs as it was compiled, below a compiled caller too."""
    inner, outer = Seen(), Seen()
    part = torch.compile(double, backend=inner)
    step = gd.graphed(lambda x: part(x), dynamic={"x": 0}, sizes=(4,), mode="NONE")
    compiled = torch.compile(lambda x: step(x) - 1, backend=outer)
    for rows in (3, 4):
        x = torch.randn(rows, 3)
        assert torch.equal(compiled(x), double(x) - 1)
    assert "mul" in inner.operators
    assert "mul" not in outer.operators


def test_a_profiler_in_compiled_code_goes_on() -> None:
    """``cProfile`` cannot be set anew from Python, so nothing takes it away during a call."""
    step, profile = served(), cProfile.Profile()
    check_rows(step, 4, 4, 4)
    with profile:
        check_rows(step, 4, 4, 4)
        sys.intern("still profiled")
    assert step.stats.hits == 4
    assert any("intern" in str(entry.code) for entry in profile.getstats())
