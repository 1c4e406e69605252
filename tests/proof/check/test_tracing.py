"""``torch.compile`` and profilers around served callables: both go on there, and what runs inside is served."""

import cProfile
import sys

import pytest
import torch

import graphdispatch as gd

from ...helpers import HAS_CORE, Seen, check_rows, double, frames_of, make

pytestmark = pytest.mark.usefixtures("fresh_compiler")


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
