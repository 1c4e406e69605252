"""``torch.compile`` around served callables: it breaks its graph there, and what runs inside runs uncompiled."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import graphdispatch as gd


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


class Seen:
    """A backend that generates no code and counts what it is given."""

    def __init__(self) -> None:
        self.operators: list[str] = []

    def __call__(self, module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.operators += [node.name for node in module.graph.nodes if node.op.startswith("call")]
        return module.forward


def fn(x: torch.Tensor) -> torch.Tensor:
    """Twice."""
    return x * 2


def served(**options: Any) -> gd.Graphed[..., torch.Tensor]:
    """A callable without graphs yet."""
    return gd.graphed(fn, dynamic={"x": 0}, sizes=(4,), capture_after=1, **options)


def test_a_cold_callable_captures_under_the_compiler() -> None:
    """Its watched runs and captures see the callable itself, and each call is right."""
    step, seen = served(), Seen()
    compiled = torch.compile(lambda x: step(x - 1) - 1, backend=seen)
    for rows in (3, 4, 3, 3):
        x = torch.randn(rows, 3)
        assert torch.equal(compiled(x), fn(x - 1) - 1)
    assert (step.stats.hits, step.stats.captures) == (2, 1)
    assert {name.partition("_")[0] for name in seen.operators} == {"sub"}


def test_the_callable_itself_compiled() -> None:
    """``torch.compile(step)`` is ``step``: nothing is left to compile."""
    step, seen = served(), Seen()
    compiled = torch.compile(step, backend=seen)
    for rows in (3, 4, 3):
        x = torch.randn(rows, 3)
        assert torch.equal(compiled(x), fn(x))
    assert step.stats.hits == 1
    assert seen.operators == []


def test_a_module_whose_forward_is_served() -> None:
    """A module that calls a served part is compiled around it."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = served()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x - 1) - 1

    model, seen = Model(), Seen()
    compiled = torch.compile(model, backend=seen)
    for rows in (3, 4, 3):
        x = torch.randn(rows, 3)
        assert torch.equal(compiled(x), fn(x - 1) - 1)
    assert model.part.stats.hits == 1
    assert {name.partition("_")[0] for name in seen.operators} == {"sub"}


def test_a_whole_graph_is_refused_by_the_compiler() -> None:
    """With ``fullgraph=True`` there can be no break, and the compiler's message names this library."""
    step = served()
    compiled = torch.compile(lambda x: step(x) + 1, backend=Seen(), fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graphdispatch"):
        compiled(torch.randn(3, 3))


def test_a_compiled_callable_inside_stays_compiled() -> None:
    """What the served callable compiled itself runs as it was compiled, below a compiled caller too."""
    inner, outer = Seen(), Seen()
    part = torch.compile(fn, backend=inner)
    step = gd.graphed(lambda x: part(x), dynamic={"x": 0}, sizes=(4,), mode="NONE")
    compiled = torch.compile(lambda x: step(x) - 1, backend=outer)
    for rows in (3, 4):
        x = torch.randn(rows, 3)
        assert torch.equal(compiled(x), fn(x) - 1)
    assert "mul" in inner.operators
    assert "mul" not in outer.operators
