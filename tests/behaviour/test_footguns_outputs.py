"""What the callable returns: memory that replays share, objects, the argument itself, state."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Reason, StaleOutputError
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper, cudagraph_context

from ..helpers import assert_same
from .features import needs
from .front_end import Open


@pytest.mark.parametrize(
    ("outputs", "later"),
    [("clone", 0), ("view", 1), ("static", 1)],
    ids=["output_kept", "output_view_read_late", "output_static_kept"],
)
def test_output_kept(settled: Open, outputs: str, later: int) -> None:
    """Outputs are the caller's own copies: a later call changes none of them.

    LIMIT: what ``get()`` of a view gave is overwritten by the next call, of any thread, and only ``get()`` itself can
    notice. So are the tensors that ``outputs="static"`` gives, which are the graph's own.
    """
    step, x = settled(lambda x: x * 2, outputs=outputs), torch.randn(4, 3)
    kept = _value(step(x))
    step(x + 1)
    assert torch.equal(kept, (x + later) * 2)


def test_output_view_kept(settled: Open) -> None:
    """With ``outputs="view"`` a handle that outlived its memory raises when it is read."""
    step, x = settled(lambda x: x * 2, outputs="view"), torch.randn(4, 3)
    kept = step(x)
    assert torch.equal(kept.get(), x * 2)
    step(x)
    with pytest.raises(StaleOutputError, match="stale"):
        kept.get()


def test_output_is_argument(settled: Open) -> None:
    """A callable that returns its argument gives the caller its own tensor, among other outputs as well."""
    step = settled(lambda x: (x, x + 1, x))
    for rows in step.order:
        x = torch.randn(rows, 3)
        kept, more, again = step(x)
        assert kept is again is x
        assert torch.equal(more, x + 1)


def test_output_is_view_of_argument(settled: Open) -> None:
    """A view of the argument comes as a copy; a write to the result does not reach the argument."""
    step = settled(lambda x: x[:, :2])
    x = torch.randn(3, 3)
    expected = x.clone()
    step(x).zero_()
    assert torch.equal(x, expected)


def test_output_is_state(settled: Open) -> None:
    """State that is returned is the state itself, as in eager, and no copy."""
    cache = torch.zeros(3)
    step = settled(lambda x: cache.add_(1))
    assert step(torch.randn(4, 3)).data_ptr() == cache.data_ptr()


@pytest.mark.parametrize(
    "make_outside",
    [lambda: torch.frombuffer(bytearray(12), dtype=torch.float32), torch.get_rng_state],
    ids=["frombuffer", "generator"],
)
def test_output_of_no_operator(opened: Open, make_outside: Callable[[], Tensor]) -> None:
    """An output that work outside of torch's dispatcher has made is new in each call, which runs eagerly."""
    step = opened(lambda x: (x * 2, make_outside()))
    step.prepare(torch.rand(4, 3))
    for _ in range(4):
        got = step(torch.rand(4, 3))[1]
        assert torch.equal(got, make_outside())
        got.add_(1)
    step.check(Reason.OUTPUT_UNSUPPORTED)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
def test_output_is_view_of_state(settled: Open, beside: bool) -> None:
    """A view of state is a new tensor on that memory in each call: what is done to one shows in no other."""
    cache = torch.zeros(4, 3)

    def view(x: Tensor) -> Any:
        cache.add_(1)
        return (x * 2, cache[:2]) if beside else cache[:2]

    step = settled(view)
    seen = []
    for _ in range(3):
        answer = step(torch.ones(4, 3))
        got = answer[1] if beside else answer
        assert got.shape == (2, 3)
        assert torch.equal(got, cache[:2])
        assert got.data_ptr() == cache.data_ptr()
        assert not hasattr(got, "note")
        assert not any(one is got for one in seen)
        got.note = 1
        got.t_()
        seen.append(got)


def test_output_is_container_of_state(settled: Open) -> None:
    """A list of the callable's own that it returns comes as a copy, which holds what the list holds now."""
    factors = [2.0, 3.0]
    step = settled(lambda x: (x * factors[0], factors))
    returned = step(torch.randn(4, 3))[1]
    assert returned == factors
    assert returned is not factors


OUTPUTS = pytest.mark.parametrize("outputs", ["clone", "view", "static"])


def _value(answer: Any) -> Any:
    return answer.get() if hasattr(answer, "get") else answer


@OUTPUTS
def test_output_returned_twice(opened: Open, outputs: str) -> None:
    """A tensor that is returned twice is one tensor in each call."""
    step = opened(lambda x: (y := x * 2, {"again": y, "other": y + 1}), outputs=outputs)
    step.prepare(torch.randn(4, 3))
    for rows in (4, 4, 4, 3, 3, 4):
        x = torch.randn(rows, 3)
        y, more = _value(step(x))
        assert y is more["again"]
        assert_same((y, more["other"]), (x * 2, x * 2 + 1))


@OUTPUTS
def test_output_fed_back(opened: Open, outputs: str) -> None:
    """Outputs are arguments of the next call, also where they are arguments of this one: each answer is eager's, of a
    graph and of a comparison."""
    options = CUDAGraphOptions(verify_every=4, outputs=outputs)
    step = opened(lambda x, before: (x - before, x, before[:, :2]), dynamic={"x": 0, "before": 0}, options=options)
    step.prepare(torch.randn(4, 3), torch.randn(4, 3))
    were_hits = set()
    for rows in (4, 3, 4, 2, 3):
        before = kept = torch.randn(rows, 3)
        for _ in range(6):
            x = torch.randn(rows, 3)
            change, before, cut = _value(step(x, before))
            assert_same((change, cut), (x - kept, kept[:, :2]))
            were_hits.add(step.was_hit())
            kept = x
    assert True in were_hits


@OUTPUTS
def test_output_fed_back_and_written(opened: Open, outputs: str) -> None:
    """The call writes to the output of the call before it, whose memory a replay would take for its answer."""
    step = opened(lambda x: torch.relu_(x) - 0.5, outputs=outputs)
    step.prepare(torch.randn(4, 3))
    for rows in (4, 3, 4, 2, 3):
        x = torch.randn(rows, 3)
        for _ in range(4):
            want = x.relu() - 0.5
            x = _value(step(x))
            assert torch.equal(x, want)


def test_outputs_share_memory(settled: Open) -> None:
    """Outputs that are views of one tensor in eager come as copies: a write to one does not reach the other."""
    step = settled(lambda x: (h := x * 2, h[:, :2]))
    x = torch.randn(4, 3)
    whole, part = step(x)
    part.zero_()
    assert torch.equal(whole, x * 2)


def test_output_constant(settled: Open) -> None:
    """Constants beside tensors come back as they are."""
    step = settled(lambda x: {"out": x * 2, "layers": 3, "name": "a"})
    result = step(torch.ones(3, 3))
    assert (result["layers"], result["name"]) == (3, "a")


@needs("padding")
def test_output_row_count(tried: Open) -> None:
    """The number of rows as a plain number would be that of the graph, so the call stays eager."""
    step = tried(lambda x: (x * 2, x.shape[0]))
    assert step(torch.randn(3, 3))[1] == 3
    step.check(Reason.OUTPUT_UNSUPPORTED)


def test_output_object(tried: Open) -> None:
    """An object that the call makes, and that holds something besides attributes, cannot be given back by a graph; nor
    can a parameter."""
    for made in (lambda x: object(), lambda x: SimpleNamespace(y=x * 3), lambda x: nn.Parameter(x * 3, False)):
        step = tried(lambda x, made=made: (x * 2, made(x)))
        step.check(Reason.OUTPUT_UNSUPPORTED)


def test_output_rows_fixed_by_accident(settled: Open) -> None:
    """An output whose size merely equals the batch is not cut: what follows the batch is found by following rows."""
    step = settled(lambda x: (x * 2, torch.ones(4, 2) * 2))
    assert step(torch.randn(3, 3))[1].shape == (4, 2)


@needs("padding")
def test_output_rows_unknown(tried: Open) -> None:
    """An output with one row more than the batch cannot be cut by a factor."""
    step = tried(lambda x: torch.cat([x, x[:1]]))
    assert step(torch.randn(3, 3)).shape == (4, 3)
    step.check(Reason.OUTPUT_ROWS_UNKNOWN)


def test_output_unwritten(settled: Open) -> None:
    """Columns that nothing wrote hold anything, as eager's do; the written ones are eager's."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), 6)
        out[:, :3] = x * 2
        return out

    step = settled(fn)
    for rows in step.order:
        x = torch.randn(rows, 3)
        assert torch.equal(step(x)[:, :3], x * 2)


def _with_noise(x: torch.Tensor) -> torch.Tensor:
    """Two real rows; what the others give differs in each run, as that of attention over slots of nobody."""
    noise = torch.from_numpy(np.random.default_rng().random((len(x) - 2, 3))).float()
    return torch.cat([x[:2] * 2, x[2:] + noise])


def test_rows_padded_by_caller(tried: Open) -> None:
    """A batch that the caller padded is compared whole, and rows that differ from run to run keep it eager."""
    step = tried(_with_noise)
    x = torch.randn(4, 3)
    assert torch.equal(step(x)[:2], x[:2] * 2)
    step.check(Reason.VERIFICATION_FAILED)


def test_rows_padded_by_caller_instead() -> None:
    """With the number of real rows the wrapper compares these alone; the runnable does not hear it."""
    wrapper = CUDAGraphWrapper(_with_noise)
    for _ in range(4):
        x = torch.randn(4, 3)
        with cudagraph_context(CUDAGraphMode.FULL, BatchDescriptor(4), rows=2):
            out = wrapper(x)
        assert torch.equal(out[:2], x[:2] * 2)
    assert wrapper.get_stats().hits
