"""``StaticInputs``: what the buffers hold after any sequence of batches."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import Pad
from graphdispatch.call.rules import as_pad
from graphdispatch.call.signature import InputSpec
from graphdispatch.memory.inputs import StaticInputs
from graphdispatch.sizes import ROWS

CPU = torch.device("cpu")
CAPACITY = 6


def spec(dim: int | None, pad: Pad, *, position: int = 0, order: tuple[int, ...] = (0, 1)) -> InputSpec:
    """A float argument of two dimensions, one of them the batch and the other of extent three."""
    shape = (3, 3) if dim is None else tuple(0 if d == dim else 3 for d in range(2))
    spans = () if dim is None else ((dim, ROWS),)
    return InputSpec(f"x{position}", position, shape, order, torch.float32, CPU, spans, (pad,) * len(spans))


# A rule, and what it puts into one padding row, given the real rows (None: anything).
Model = Callable[[torch.Tensor], torch.Tensor | None]
RULES: dict[str, tuple[Pad, Model]] = {
    "zero": (Pad.zero(), lambda real: torch.zeros(3)),
    "value": (Pad.value(7), lambda real: torch.full((3,), 7.0)),
    "repeat_last": (Pad.repeat_last(), lambda real: real[-1]),
    "function": (Pad.function(lambda p, real: p.fill_(real.sum())), lambda real: torch.full((3,), float(real.sum()))),
    "leave": (Pad.leave(), lambda real: None),
}
BATCH = st.integers(1, CAPACITY).flatmap(lambda size: st.tuples(st.integers(1, size), st.just(size)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dim", [0, 1])
@given(batches=st.lists(BATCH, min_size=1, max_size=12), soiled=st.sets(st.integers(0, 11)))
def test_buffers_after_any_sequence(rule: str, dim: int, batches: Sequence[tuple[int, int]], soiled: set[int]) -> None:
    """After each batch of any sequence the buffers hold its rows, then padding by the rule, whatever was before."""
    pad, model = RULES[rule]
    inputs = StaticInputs([spec(dim, pad)], CAPACITY)
    generator = torch.Generator().manual_seed(0)
    for step, (rows, size) in enumerate(batches):
        if step in soiled:
            inputs.views(CAPACITY)[0].fill_(-1.0)
            inputs.mark_dirty()
        real = torch.randn(rows, 3, generator=generator)
        inputs.load([real.movedim(0, dim)], rows, size)
        view, expected = inputs.views(size)[0].movedim(dim, 0), model(real)
        assert view.shape[0] == size
        assert torch.equal(view[:rows], real)
        if expected is not None:
            torch.testing.assert_close(view[rows:], expected.expand(size - rows, 3))


def test_where_buffers_lie() -> None:
    """Every size is a view of one buffer, in the memory order of the argument; one without a batch is copied whole."""
    inputs = StaticInputs([spec(0, Pad.zero()), spec(None, Pad.zero(), position=1)], CAPACITY)
    assert len({inputs.views(size)[0].data_ptr() for size in (1, 3, CAPACITY)}) == 1
    assert inputs.nbytes == CAPACITY * 3 * 4 + 3 * 3 * 4
    value = torch.randn(3, 3)
    inputs.load([torch.ones(2, 3), value], 2, 4)
    assert torch.equal(inputs.views(4)[1], value)
    view = StaticInputs([spec(0, Pad.zero(), order=(1, 0))], CAPACITY).views(4)[0]
    assert (view.shape, view.stride()) == ((4, 3), (1, 4))


@pytest.mark.parametrize("rule", [Pad.zero(), "zero", 0, 0.0, False])
def test_zero_in_any_spelling(rule: Any) -> None:
    """A rule may be given as a ``Pad``, by name, or as a number."""
    padding = torch.ones(2, 3)
    as_pad("x", rule).filler(padding, torch.ones(1, 3), 0)()
    assert not bool(padding.any())
