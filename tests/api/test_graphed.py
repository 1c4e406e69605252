"""``gd.graphed()``: its options, the calls that no graph serves and what is said of them, and which kinds stay."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import graphdispatch as gd
from graphdispatch import CUDAGraphOptions, OutputView, Reason
from graphdispatch.engines import EntryState
from graphdispatch.errors import ConfigError, ReplayError

from ..behaviour.front_ends import FRONT_ENDS
from ..helpers import Lazy, assert_same, batch, check_calls, check_rows, make, reason, serve_in_python
from .test_copies import Model


def test_forms_of_a_call_go_with_their_last_signature() -> None:
    """Each that is left leads to kinds that are there, whichever went."""
    step = make(lambda x, y: x * 2, max_signatures=3, capture_after=2)
    for columns in range(1, 40):
        x = torch.ones(4, columns)
        for args, kwargs in ([(x, 1), {}], [(x,), {"y": 1}], [(), {"x": x, "y": 1}])[columns % 3 :]:
            assert torch.equal(step(*args, **kwargs), x * 2)
            assert set(step._route.groups) == set(step._graphs.groups.values())
            assert all(step._route.forms.values()), "none is left without a group"


def test_a_call_that_the_rules_do_not_fit_is_odd_once_one_has_fitted() -> None:
    """In the middle of serving it runs eagerly and says why; the rest is served as before."""
    step = make(lambda x, **more: x * 2 + sum(more.values()), dynamic={"x": 0, "y": 0}, sizes=(4,))
    with pytest.raises(ConfigError, match=r"shape \(\); .* leave it out"):
        step(batch(4), y=torch.tensor(1.0))
    y = torch.ones(4, 1)
    assert [reason(step, batch(4), y=y) for _ in range(2)] == [Reason.CAPTURED_NOW, Reason.VERIFIED_NOW]
    assert reason(step, batch(4), y=torch.tensor(1.0)) is Reason.ARGUMENTS_CHANGED
    assert "dynamic['y'] = 0 is out of range: the tensor has shape ()" in step.explain(batch(4), y=torch.tensor(1.0))
    assert torch.equal(step(x := batch(4), y=torch.tensor(1.0)), x * 2 + 1)
    assert reason(step, batch(4), y=y) is Reason.EXACT


@dataclass
class Batch:
    """What graphs cannot look into."""

    ids: torch.Tensor


def test_an_object_is_named_by_its_type() -> None:
    """As an argument, and as an output that no graph can make, in one line without values, with what opens it."""
    said = make(lambda b: b * 2, dynamic={"b": 0}).explain(batch(4).numpy())
    assert said.endswith("argument 'b' is a numpy.ndarray (torch.from_numpy makes a tensor of it)")
    step = make(lambda b: b.ids * 2, dynamic={})
    assert reason(step, Batch(batch(4))) is Reason.NO_TENSORS
    opened = r"a .*\.Batch \(torch\.utils\._pytree\.register_dataclass\(Batch\) lets graphs see its fields\)"
    said = step.explain(Batch(batch(4)))
    assert re.fullmatch(rf"eager: no argument is a tensor; argument 'b' is {opened}", said)
    step = make(lambda x, b: x * 2)
    assert reason(step, batch(4), Batch(batch(4))) is Reason.UNGUARDED_ARGUMENT
    assert re.search(rf"argument 'b' is {opened}, whose change", step.explain(batch(4), Batch(batch(4))))
    step = make(lambda x: (Batch(x * 2),) * 2)
    assert reason(step, batch(4)) is Reason.OUTPUT_UNSUPPORTED
    said = step.explain(batch(4))
    assert re.search(rf"an output that is no tensor is {opened} in eager and another one in the graph", said)
    assert "tensor(" not in said
    assert "\n" not in said


def test_an_argument_may_have_any_name() -> None:
    """Also that of the first parameter of a method."""
    step = make(lambda self, fn: self + fn, dynamic={"self": 0, "fn": 0})
    for _ in range(4):
        x = batch(4)
        assert torch.equal(step(self=x, fn=x), x + x)
    assert step.stats.hits
    assert "graph" in step.explain(self=x, fn=x)


class Counting(torch.nn.Module):
    """Counts its calls in Python, as long as it shall."""

    counts, calls = True, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.counts
        return x * 2


def tries(step: gd.Graphed[..., Any], calls: int) -> list[int]:
    """The numbers of those of so many calls in which a capture failed; each is answered as eager answers."""
    failed = []
    for number in range(calls):
        before = step.stats.capture_failures
        check_rows(step, 4)
        failed += [number] * (step.stats.capture_failures - before)
    return failed


def test_what_rebinds_its_state_is_not_captured_in_vain_at_each_call() -> None:
    """It is tried at once again, after 16, 64, ... sightings, and captured when it no longer does."""
    model = Counting().eval()
    step = make(model, sizes=(4,), capture_after=1, options=CUDAGraphOptions(max_failures=1))
    assert tries(step, 100) == [0, 1, 17, 81]
    assert step.stats.reasons == {Reason.STATE_REBOUND: 100}
    assert model.calls == 200  # of which eager's answers are half
    model.counts = False
    assert tries(step, 260) == []
    assert step.last_decision.reason is Reason.EXACT
    assert step.stats.captures == 1


def test_what_cannot_be_captured_is_given_up_in_the_end() -> None:
    """It is tried again after 16 and 64 sightings, and not after the third failure in a row."""
    step = make(lambda x: x * 2 if x.sum().item() > -1e9 else x, sizes=(4,), options=CUDAGraphOptions(max_failures=3))
    assert tries(step, 600) == [0, 16, 80]


def test_what_is_made_in_the_first_call_alone_is_captured_at_the_second() -> None:
    """A table that ``forward`` makes when it is first called."""
    step = make(Lazy().eval(), sizes=(4,), capture_after=1)
    expected = [Reason.STATE_REBOUND, Reason.CAPTURED_NOW, Reason.VERIFIED_NOW, Reason.EXACT]
    assert [reason(step, batch(4)) for _ in range(4)] == expected


def test_unguarded_weights_are_captured_anew_after_clear() -> None:
    """With ``guard_weights=False`` the caller says when they move; what is captured then is guarded from then on."""
    layer = torch.nn.Linear(3, 3).eval()
    step = make(layer, dynamic={"input": 0}, sizes=(4,), options=CUDAGraphOptions(guard_weights=False))
    check_rows(step, *[4] * 4)
    layer.weight = torch.nn.Parameter(torch.randn(3, 3), requires_grad=False)
    step.clear()
    assert check_rows(step, *[4] * 4)[-1] is Reason.EXACT


@pytest.mark.parametrize("guards", [True, False])
def test_graphs_of_other_sizes_tell_how_outputs_follow_the_batch(guards: bool) -> None:
    """Guarded or not: so a callable that takes an even number of rows alone need not run on an odd one."""
    options = CUDAGraphOptions(guard_weights=guards, capture_after=1)
    step = make(lambda x: (x.view(-1, 2, 3) * 2).view(x.shape), sizes=(2, 8), options=options)
    assert check_rows(step, 4, 2) == [Reason.CAPTURED_NOW, Reason.CAPTURED_NOW]


def test_explain_tells_what_would_happen() -> None:
    """``explain`` has a line for each stage of a size, and neither runs nor counts anything."""
    step = make(capture_after=2, sizes=(4,))
    lines = []
    for _ in range(4):
        lines.append(step.explain(batch(3)).partition("; gains")[0])
        step(batch(3))
    stages = (Reason.FIRST_SIGHTING, Reason.CAPTURED_NOW, Reason.VERIFIED_NOW)
    assert lines[:3] == [f"eager, 3 rows: {stage.text}" for stage in stages]
    assert lines[3:] == ["FULL graph, 3 -> 4 rows, 25.0 % padding"]
    assert step.stats.calls == 4


def test_prewarm_leaves_no_effect() -> None:
    """It leaves state, generator and arguments as they were, and captures the sizes that are named, or all."""
    total = torch.full((3,), 8.0)
    step = make(lambda x: nn.functional.dropout(x.add_(1), 0.5) + total.mul_(0.5), sizes=(1, 2, 4))
    x = batch(3)
    kept, generator = x.clone(), torch.get_rng_state()
    for sizes in ((2,), (1, 2, 4)):
        step.prewarm(x, sizes=sizes if len(sizes) == 1 else None)
        assert torch.equal(total, torch.full((3,), 8.0))
        assert torch.equal(x, kept)
        assert torch.equal(torch.get_rng_state(), generator)
        assert [entry.size for entry in step.entries] == [*sizes]


def test_outputs_are_those_of_the_options() -> None:
    """Unless they are given; then those are."""
    x = batch(4)
    assert isinstance(make(options=CUDAGraphOptions(outputs="view"))(x), OutputView)
    assert isinstance(make(options=CUDAGraphOptions(verify=False), outputs="view")(x), OutputView)
    assert isinstance(make(options=CUDAGraphOptions(outputs="view"), outputs="view")(x), OutputView)
    assert isinstance(make()(x), torch.Tensor)


def test_attributes_are_set_on_the_callable() -> None:
    """An attribute that only the served callable had would change nothing, so it cannot be set."""
    step = gd.graphed(torch.nn.Dropout(0.5).eval(), dynamic={"input": 0})
    with pytest.raises(AttributeError, match="no attribute 'p'"):
        step.p = 0.1
    assert step.p == 0.5


@pytest.mark.parametrize("dynamic", [{"inputs": 0}, {"inputs[0]": 0, "inputs[1]": 0}], ids=["all", "one by one"])
def test_variadic_arguments_are_named_after_their_parameter(dynamic: dict[str, int]) -> None:
    """``*inputs`` is one name for all of them, and each has its own."""
    step = make(lambda *inputs: inputs[0] + 2 * inputs[1], dynamic=dynamic, sizes=(4,))
    check_calls(step, *((torch.randn(rows, 2), torch.randn(rows, 2)) for rows in (4, 3, 4, 3)))
    assert step.stats.hits == 2


STATIC = CUDAGraphOptions(inputs="static", outputs="static")


@pytest.mark.parametrize(
    ("name", "options"),
    [("graphed", None), ("wrapper", None), ("wrapper", STATIC), ("execute_or_capture", None), ("streams", None)],
)
def test_buffers_are_read_and_written_once_a_call(name: str, options: CUDAGraphOptions | None) -> None:
    """Of a callable without arguments: each call reads what the buffers hold now, writes them once, and is served by a
    graph from the third on."""
    ids, logits, count, layer = torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(1), nn.Linear(3, 3).eval()

    def forward() -> torch.Tensor:
        count.add_(1)
        return logits.copy_(layer(ids) + count) * 2

    front = FRONT_ENDS[name](forward, dynamic={}, sizes=(1,), options=options)
    if front.captures_ahead:
        front.prepare()
    for steps in range(1, 7):
        ids.copy_(torch.randn(4, 3))
        answer = front()
        assert count.item() == steps
        assert torch.equal(logits, layer(ids) + steps)
        assert torch.equal(answer, logits * 2)
    assert front.hits >= 4
    front.close()


def sine(**options: Any) -> Any:
    """A served sine."""
    step = make(lambda x: x.sin(), sizes=(4,), **options)
    check_rows(step, 4, 4, 4)
    assert step.stats.hits == 1
    return step


def test_a_transform_costs_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits in Python look for a transform before they copy, as the core does: the graph serves on after it."""
    serve_in_python(monkeypatch)
    step = sine()
    x = torch.randn(5, 4, 3)
    assert torch.equal(torch.vmap(step)(x), x.sin())
    assert [entry.state for entry in step.entries] == [EntryState.VERIFIED]
    assert step.last_decision.reason is Reason.MODE_ACTIVE


def test_transforms_over_a_served_callable() -> None:
    """``torch.vmap`` over its arguments and over the weights behind it give eager's answers."""
    x = torch.randn(5, 4, 3)
    assert torch.equal(torch.vmap(sine())(x), x.sin())
    model, x = Model(), batch(4)
    for _ in range(3):
        model(x)
    weights = {name: torch.stack([value.detach(), value.detach() * 2]) for name, value in model.named_parameters()}
    both = torch.vmap(lambda given: torch.func.functional_call(model, given, (x,)))(weights)
    assert torch.allclose(both[0], nn.functional.linear(x, model.layer.weight, model.layer.bias))
    assert torch.allclose(both[1], 2 * both[0])


@torch.enable_grad()
def test_a_transform_around_plain_arguments_is_seen() -> None:
    """It may differentiate by weights that it puts into an attached module, in eval mode, too. No graph serves then."""
    step, x = sine(), batch(4)
    assert torch.func.grad(lambda w: (step(x) * w).sum())(torch.tensor(2.0)) == x.sin().sum()
    assert step.last_decision.reason is Reason.MODE_ACTIVE
    with pytest.raises(ReplayError, match="mode, transform or trace"):
        torch.vmap(lambda w: step.entries[0].replay({"x": x}) * w)(torch.ones(2))
    layer = nn.Linear(3, 3).eval()
    weights = {name: one.detach() for name, one in layer.named_parameters()}
    gradient = torch.func.grad(lambda given: torch.func.functional_call(layer, given, (x,)).square().sum())
    expected = gradient(weights)
    gd.attach(layer, dynamic={"input": 0})
    for _ in range(3):
        assert_same(gradient(weights), expected)
        layer(x)


@pytest.mark.parametrize("around", [nullcontext(), torch.device("cpu")], ids=["none", "cpu"])
def test_another_default_device_is_another_call(around: Any) -> None:
    """What the callable makes lies on that device; a graph of the same device serves."""
    step = make(lambda x: (x + 1, torch.ones(2)), sizes=(4,))
    with around:
        check_rows(step, *[4] * 4)
    assert step.stats.hits == 2
    x = batch(4)
    with torch.device("meta"):
        assert step(x)[1].device.type == "meta"
    assert step(x)[1].device.type == "cpu"
    assert step.last_decision.reason.is_graph is (step.entries[0].default_device is None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("step", [sine, lambda: make(lambda x: x.sin(), sizes=(4,))], ids=["served", "fresh"])
def test_a_trace_holds_the_operators(step: Callable[[], Any]) -> None:
    """``torch.jit.trace`` around a served call bakes no answer in; a capture that would begin within it waits."""
    traced_step = step()
    captures = traced_step.stats.captures
    traced = torch.jit.trace(lambda x: traced_step(x) + x, (batch(4),), check_trace=False)
    x = batch(4)
    assert torch.equal(traced(x), x.sin() + x)
    assert traced_step.stats.captures == captures
