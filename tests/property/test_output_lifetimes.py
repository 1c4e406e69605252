"""Handles on outputs, over random sequences of calls: right, or an error; never silently somebody else's values."""

import contextlib

import torch
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import CUDAGraphOptions, graphed
from graphdispatch.engines import OutputView
from graphdispatch.errors import StaleOutputError

from ..helpers import AT_ONCE

_SIZES = (1, 2, 4)
_QUICK = CUDAGraphOptions(gc_disable=False)
_ROWS = st.integers(1, 6)  # above 4 a step is eager


@given(
    mode=st.sampled_from(["FULL", "PIECEWISE"]),
    steps=st.lists(st.one_of(_ROWS, st.just("clear")), min_size=4, max_size=16),
)
def test_a_handle_is_right_or_raises(mode: str, steps: list[int | str]) -> None:
    """Whatever is called in between, a kept handle gives its own call's outputs or raises; the latest always gives."""
    step = graphed(
        lambda x: (x * 2, x.t() + 1), dynamic={"x": 0}, sizes=_SIZES, outputs="view", mode=mode, options=_QUICK
    )
    step.prewarm(torch.arange(8.0).view(4, 2))
    hits: list[OutputView] = []
    kept: list[tuple[torch.Tensor, OutputView]] = []
    for number, rows in enumerate(steps):
        if rows == "clear":
            step.clear()
            hits.clear()
            continue
        assert isinstance(rows, int)
        x = torch.full((rows, 2), float(number))
        before = step.stats.hits
        view = step(x)
        assert isinstance(view, OutputView)
        kept.append((x, view))
        hits += [view] * (step.stats.hits - before)
        assert not view.is_stale
        for given_x, handle in kept[-8:]:
            with contextlib.suppress(StaleOutputError):
                double, turned = handle.get()
                assert torch.equal(double, given_x * 2)
                assert torch.equal(turned, given_x.t() + 1)
        assert all(handle.is_stale for handle in hits[:-1])


@given(rows=st.lists(_ROWS, min_size=1, max_size=20), size=st.integers(1, 4))
def test_clones_are_never_touched(rows: list[int], size: int) -> None:
    """Copies stay what they were, though all graphs write their outputs to the same memory."""
    step = graphed(lambda x: x.cumsum(1), dynamic={"x": 0}, sizes=tuple(sorted({size, 4})), options=AT_ONCE)
    kept = [(x, step(x)) for x in (torch.full((n, 3), float(i)) for i, n in enumerate(rows))]
    for x, got in kept:
        assert torch.equal(got, x.cumsum(1))
