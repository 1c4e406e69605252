"""What is not compared with eager: memory that nothing wrote, and rows that the caller said are padding."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import graphdispatch as gd
from graphdispatch import Reason
from graphdispatch.errors import ConfigError

from ..helpers import AT_ONCE
from ..spy import Spy

FULL = gd.CUDAGraphMode.FULL


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_memory_that_nothing_wrote_is_not_compared(dtype: torch.dtype) -> None:
    """Half of an output and half of the state come from ``torch.empty``; what was written is compared, and served."""
    state = torch.zeros(4, 6, dtype=dtype)

    def fn(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), 6, dtype=dtype)
        out[:, :3] = x
        state.copy_(torch.empty(4, 6, dtype=dtype))
        state[:, 1] = 7
        return torch.cat([out, out], 1)

    step = gd.graphed(fn, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    for rows in (4, 4, 4, 3, 3):
        x = torch.randn(rows, 3).mul(9).to(dtype)
        assert torch.equal(step(x)[:, 6:9], x)
        assert state[:, 1].eq(7).all()
        assert step.last_decision is not None
    assert step.last_decision.reason is Reason.PADDED


def test_what_was_written_is_still_compared() -> None:
    """A frozen value beside memory that nothing wrote is found."""

    hidden = Spy([2.0])

    def fn(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), 6)
        out[:, :3] = x * hidden[0]
        return out

    step = gd.graphed(fn, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    step(torch.randn(4, 3))
    hidden[0] = 3.0
    step(torch.randn(4, 3))
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.VERIFICATION_FAILED


class Attention:
    """As an engine's: padding rows of the output hold whatever was there."""

    def __init__(self) -> None:
        self.calls = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.from_numpy(np.random.default_rng().random((len(x) - 3, 3))).float()
        return torch.cat([x[:3] * 2, x[3:] + noise])


@pytest.mark.parametrize("how", ["argument", "context"])
def test_rows_that_the_caller_padded_are_not_compared(how: str) -> None:
    """Told how many rows are real, the wrapper compares those alone; the runnable is not told."""
    wrapper, descriptor = gd.CUDAGraphWrapper(Attention()), gd.BatchDescriptor(8)
    for _ in range(4):
        x = torch.randn(8, 3)
        if how == "argument":
            out = wrapper(x, batch_descriptor=descriptor, cudagraph_runtime_mode=FULL, rows=3)
        else:
            with gd.cudagraph_context(FULL, descriptor, rows=3):
                out = wrapper(x)
        assert torch.equal(out[:3], x[:3] * 2)
    assert wrapper.get_stats().hits > 0


def test_without_rows_all_are_compared() -> None:
    """The same runnable is refused."""
    wrapper, descriptor = gd.CUDAGraphWrapper(Attention()), gd.BatchDescriptor(8)
    for _ in range(4):
        wrapper(torch.randn(8, 3), batch_descriptor=descriptor, cudagraph_runtime_mode=FULL)
    assert wrapper.get_stats().hits == 0


def test_a_parameter_of_the_runnable_is_its_own() -> None:
    """A runnable that has a parameter ``rows`` gets it."""
    wrapper = gd.CUDAGraphWrapper(lambda x, rows: x * rows)
    x = torch.randn(8, 3)
    for _ in range(3):
        out = wrapper(x, rows=3, batch_descriptor=gd.BatchDescriptor(8), cudagraph_runtime_mode=FULL)
        assert torch.equal(out, x * 3)


@pytest.mark.parametrize("rows", [0, 9, True, 1.5])
def test_rows_are_checked(rows: object) -> None:
    """They are some of the descriptor's."""
    wrapper = gd.CUDAGraphWrapper(lambda x: x)
    with pytest.raises(ConfigError, match="rows must be how many of the descriptor's 8 tokens are real"):
        wrapper(torch.randn(8), batch_descriptor=gd.BatchDescriptor(8), cudagraph_runtime_mode=FULL, rows=rows)


def _partly(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(len(x), 6)
    out[:, :2] = x[:, :2]
    return out


def _reused(x: torch.Tensor) -> torch.Tensor:
    first = (x.sin() * 3).cos() * 2
    second = first.exp()
    del first
    out = torch.empty_like(x)
    out[:, :2] = second[:, :2]
    return out


BLANK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "partly written": _partly,
    "reused": _reused,
    "grown": lambda x: x.new_zeros(1, 4).resize_(len(x), 4),
    "permuted": lambda x: torch.empty_permuted(x.shape, (1, 0)),
    "strided": lambda x: torch.empty_strided((len(x), 3), (5, 1)),
    "integers": lambda x: torch.empty(x.shape, dtype=torch.int16),
    "booleans": lambda x: torch.empty(x.shape, dtype=torch.bool),
    "complex": lambda x: torch.empty(x.shape, dtype=torch.complex64),
    "bfloat16": lambda x: x.bfloat16().new_empty(len(x), 3),
}


@pytest.mark.parametrize("name", BLANK)
@pytest.mark.parametrize("toggled", [False, True])
def test_deterministic_torch_fills_new_memory(name: str, toggled: bool) -> None:
    """With deterministic algorithms torch fills new memory; so do the watched run and each replay, bit for bit."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return BLANK[name](x), (x * 2).exp()

    step = gd.graphed(fn, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    try:
        for call in range(10):
            torch.use_deterministic_algorithms(not toggled or call >= 4)
            torch.utils.deterministic.fill_uninitialized_memory = call < 8
            x = torch.randn(3 + call % 2, 4)
            got, want = step(x), fn(x)
            if torch.are_deterministic_algorithms_enabled() and call < 8:
                torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    assert step.stats.hits or (toggled and name in ("grown", "booleans"))  # these are not told apart from values
