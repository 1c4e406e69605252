"""The plain capturer: one warm-up and one recording, and nothing compared. What it still owes its user."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphOptions, Dim, Graphed, Reason, graphed
from graphdispatch.api.lifecycle import capturer_for
from graphdispatch.errors import ConfigError
from graphdispatch.modes import CUDAGraphMode
from graphdispatch.proof.check.pipeline import ProvingCapturer
from graphdispatch.record import PlainCapturer, Reached
from graphdispatch.runtime.cache import make_cache
from graphdispatch.runtime.decide import SizeTable
from graphdispatch.runtime.group import Route
from graphdispatch.runtime.rules import ArgumentRules
from graphdispatch.runtime.server import Server
from graphdispatch.sizes import ROWS

from ..helpers import assert_same, check_rows

PLAIN = CUDAGraphOptions(verify=False, guard_weights=False, capture_after=1)


def plain(fn: Any, **how: Any) -> Graphed[..., Any]:
    """A callable served by plain captures of two sizes."""
    return graphed(fn, **({"dynamic": {"x": 0}, "sizes": (2, 4), "options": PLAIN} | how))


def test_it_serves_where_every_check_is_off() -> None:
    """And only there: breaks, and each kind of check, are the proof's."""
    assert isinstance(capturer_for(PLAIN), PlainCapturer)
    others = [PLAIN.model_copy(update=one) for one in ({"verify": True}, {"guard_weights": True}, {"verify_every": 2})]
    assert all(isinstance(capturer_for(one), ProvingCapturer) for one in others)
    assert isinstance(capturer_for(PLAIN, CUDAGraphMode.PIECEWISE), ProvingCapturer)


def test_padded_batches_are_cut() -> None:
    """Outputs with as many rows as the graph give the real ones; others are returned whole."""
    scale = torch.tensor([1.0, 2.0, 3.0])
    step = plain(lambda x: (x * scale, [x.sum(1), scale.max()]))
    for rows in (3, 3, 4, 1, 3, 2):
        x = torch.randn(rows, 3)
        assert_same(step(x), (x * scale, [x.sum(1), scale.max()]))
    assert (step.stats.captures, step.stats.hits, step.stats.verifications) == (2, 4, 0)


def test_padding_that_the_capture_wrote_is_put_anew() -> None:
    """A call that writes its argument writes to padding rows, too: they must not name a real slot at the next call.
    Each call writes once."""
    store = torch.zeros(10)

    def fn(slots: Tensor, x: Tensor) -> Tensor:
        store.index_add_(0, slots, x)
        return slots.add_(1) * 1

    step = plain(fn, dynamic={"slots": 0, "x": 0}, sizes=(4,), pad={"slots": 8, "x": 1.0})
    for _ in range(3):
        step(torch.tensor([0, 1, 2]), torch.ones(3))
    assert step.stats.hits == 2
    assert_same(store[:8], torch.tensor([3.0, 3, 3, 0, 0, 0, 0, 0]))
    assert store[9] == 0


def test_weights_are_cast_in_each_replay() -> None:
    """Autocast keeps casts of weights until its block ends; a graph does not read one of them."""
    model = nn.Linear(8, 8).eval()
    step, x = plain(model, dynamic={"input": 0}, sizes=(4,)), torch.randn(4, 8)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(model(x), step(x))
        model.weight.mul_(2)
    assert step.stats.hits == 2


def test_an_argument_that_is_returned_may_be_given_back() -> None:
    """As another argument, with the graph's own memory: it is read before the next batch is there."""
    options = PLAIN.model_copy(update={"outputs": "static"})
    step = plain(lambda x, y: (x + y, x), dynamic={"x": 0, "y": 0}, options=options)
    given = torch.ones(4, 1)
    for value, total in ((1.0, 2.0), (5.0, 6.0), (7.0, 12.0)):
        found, given = step(torch.full((4, 1), value), given)
        assert_same(found, torch.full((4, 1), total))


@pytest.mark.parametrize("options", [{}, {"outputs": "static"}, {"warmup_iterations": 3}], ids=str)
def test_an_argument_that_is_written_is_copied_back(options: dict[str, Any]) -> None:
    """At the capture, before which each warm-up begins with the batch, and at each hit, padded or not: memory of the
    caller has what eager leaves there."""

    def fn(x: Tensor) -> Tensor:
        return x.add_(1) * 2

    step = plain(fn, options=PLAIN.model_copy(update=options))
    for rows in (4, 4, 3, 3):
        x = torch.randn(rows, 3)
        twin = x.clone()
        assert_same((step(x), x), (fn(twin), twin))
    assert step.stats.hits == 3


REFUSED: dict[str, tuple[Callable[[Tensor], Any], Reason]] = {
    "a read on the host": (lambda x: x * x.sum().item(), Reason.CAPTURE_UNSAFE),
    "an object that no pytree knows": (lambda x: SimpleNamespace(value=x * 2), Reason.OUTPUT_UNSUPPORTED),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_can_hold_is_refused(name: str) -> None:
    """A replay would give the caller what the capture read or made. The call is eager's, and there is no graph."""
    fn, reason = REFUSED[name]
    step = plain(fn)
    for _ in range(2):
        x = torch.randn(4, 3)
        assert_same(*(getattr(answer, "value", answer) for answer in (step(x), fn(x))))
    assert (step.entries, step.stats.capture_failures) == ([], 1)
    assert step.last_decision.reason is reason


def test_a_tensor_of_the_model_is_returned_itself() -> None:
    """As by eager, which gives the caller the buffer and no copy."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(5))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, self.cache

    model = Holder().eval()
    step = plain(model)
    assert all(step(torch.randn(4, 3))[1].data_ptr() == model.cache.data_ptr() for _ in range(3))


def test_an_error_of_the_callable_is_its_own() -> None:
    """It passes through, and the next call may capture."""

    def fn(x: Tensor) -> Tensor:
        if not is_ready:
            raise LookupError("not yet")
        return x * 2

    is_ready = False
    step = plain(fn)
    with pytest.raises(LookupError, match="not yet"):
        step(torch.randn(4, 3))
    is_ready = True
    for _ in range(20):
        step(torch.randn(4, 3))
    assert step.stats.hits


def test_lengths_are_refused() -> None:
    """Which elements of an output follow a length, one run does not tell."""
    step = plain(lambda x: x * 2, dynamic={"x": {0: "batch", 1: Dim("seq", [8])}}, sizes=(4,))
    step(torch.randn(4, 5))
    assert "no lengths besides rows" in step.explain(torch.randn(4, 5)) or step.stats.hits == 0
    assert step.entries == []


def test_after_a_failed_replay_another_graph_is_made() -> None:
    """Nobody knows what it had done, and nobody compares: it is released. Later calls make the next one."""
    step = plain(lambda x: x * 2)
    x = torch.randn(4, 3)
    step(x), step(x)
    (entry,) = step.entries
    entry.failed()
    for _ in range(2):
        assert_same(step(x), x * 2)
        assert step.last_decision.reason is Reason.REPLAY_FAILED
        assert (entry.is_released, step.entries) == (True, [])
    while step.last_decision.reason is Reason.REPLAY_FAILED:
        step(x)
    assert_same(step(x), x * 2)
    assert step.last_decision.reason is Reason.EXACT


def test_padding_stays_zero() -> None:
    """A call that raises where it is captured stays eager: copies of the last row could write to its slot twice."""

    def fn(x: Tensor) -> Tensor:
        if len(x) == 4:
            raise RuntimeError("of four rows")
        return x * 2

    step = plain(fn, sizes=(4,))
    check_rows(step, 3, 3, 3, fn=lambda x: x * 2)
    assert step.stats.hits == 0
    assert not any(pad.follows_data for spec in step._route.groups[0].inputs.specs for pad in spec.pads)


def test_a_comparison_is_refused() -> None:
    """The plain capturer compares nothing, so what asks for that is a mistake."""
    options = PLAIN.model_copy(update={"verify_every": 5})
    server = Server(nn.Linear(3, 3), options, make_cache(options, 1, capture_after=1), PlainCapturer())
    route = Route("step", SizeTable((4,), CUDAGraphMode.FULL), ArgumentRules({"input": {0: ROWS}}, {}, frozenset()))
    with pytest.raises(ConfigError, match="verify_every"):
        server.serve(route, (torch.randn(4, 3),), {})


def test_where_gradients_may_be_needed_it_runs_eagerly() -> None:
    """A module in training whose weights want gradients, and a function of which nobody sees what it reaches."""
    model = nn.Linear(3, 3)
    assert Reached(model).trainable
    assert not Reached(model.eval()).trainable
    assert Reached(lambda x: model(x)).trainable
    step = plain(nn.Linear(3, 3), dynamic={"input": 0})
    with torch.enable_grad():
        for _ in range(3):
            step(torch.randn(4, 3)).sum().backward()
    assert step.stats.hits == 0
