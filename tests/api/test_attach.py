"""``attach``: a module is served where it is held, and stays what it is."""

import copy
import inspect
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphdispatch as gd

from ..helpers import AT_ONCE, check_rows

SIZES = (2, 4)


def make_pipeline() -> Any:
    """What holds the module that is served, ``net``."""
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    return nn.Sequential(OrderedDict(net=net, head=nn.Linear(3, 3))).eval().requires_grad_(False)


@pytest.fixture
def pipeline() -> Any:
    """A new one."""
    return make_pipeline()


def attached(pipeline: Any, **settings: Any) -> gd.Graphed[..., Any]:
    """Its net, attached."""
    return gd.attach(pipeline.net, dynamic={"input": 0}, sizes=SIZES, options=AT_ONCE, **settings)


def check(pipeline: Any, *rows: int, dtype: torch.dtype = torch.float32) -> None:
    """The pipeline answers as it would without graphs."""
    for count in rows:
        x = torch.randn(count, 3, dtype=dtype)
        torch.testing.assert_close(pipeline(x), pipeline.head(pipeline.net._call_impl(x)))


def test_what_is_done_to_the_module_counts(pipeline: Any) -> None:
    """Another dtype, other weights in place, a hook, training with gradients."""
    handle = attached(pipeline)
    check(pipeline, 4, 4, 4)
    pipeline.net.load_state_dict(make_pipeline().net.state_dict())
    check(pipeline, 4)
    assert handle.last_decision.reason is gd.Reason.EXACT
    pipeline.to(torch.float64)
    check(pipeline, 4, dtype=torch.float64)
    assert handle.last_decision.reason is gd.Reason.CAPTURED_NOW
    pipeline.net.register_forward_hook(lambda module, args, output: output * 2)
    check(pipeline, 4, dtype=torch.float64)
    assert not handle.last_decision.reason.is_graph
    pipeline.train().requires_grad_(True)
    with torch.enable_grad():
        pipeline(torch.randn(4, 3, dtype=torch.float64)).sum().backward()
    assert pipeline.net[0].weight.grad is not None
    assert handle.last_decision.reason is gd.Reason.NEEDS_GRADIENTS


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_is_not_attached(pipeline: Any, copied: Callable[[Any], Any]) -> None:
    """As a copy of a compiled module is not compiled."""
    handle = attached(pipeline)
    check(pipeline, 4, 4, 4)
    other = copied(pipeline)
    other.net[0].weight.zero_()
    check(other, 4)
    assert handle.stats.calls == 3
    check(pipeline, 4)
    assert handle.stats.calls == 4


def test_a_module_is_served_where_it_is_held_until_detach_undoes_it(pipeline: Any) -> None:
    """Its calls go by graphs; its class, its state dict and its attributes are its own. Then the graphs go, calls run
    as before, and it may be attached again, and prewarmed by an example."""
    names = list(pipeline.state_dict())
    handle = attached(pipeline)
    check(pipeline, 3, 3, 3)
    assert (handle.last_decision.reason, handle.stats.hits) == (gd.Reason.PADDED, 1)
    assert (type(pipeline.net), list(pipeline.state_dict())) == (nn.Sequential, names)
    assert repr(handle).startswith("<Graphed Sequential: 1 graphs")
    assert "FULL graph, 3 -> 4 rows" in handle.explain(torch.randn(3, 3))
    for _ in range(2):
        handle.detach()
    assert (handle.entries, handle.memory_bytes) == ([], 0)
    check(pipeline, 4)
    assert handle.stats.calls == 3
    again = attached(pipeline)
    again.prewarm(torch.randn(4, 3))
    handle.detach()  # which is not what serves it now
    check(pipeline, 4)
    assert (again.captured_sizes, again.stats.hits) == (SIZES, 1)


class Coder(nn.Sequential):
    """A module whose owner calls its methods."""

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """``z`` of (rows, 3)."""
        return self.forward(z) * 2


@pytest.mark.parametrize(("method", "argument"), [("forward", "input"), ("decode", "z")])
def test_a_method_is_served_where_it_is_called(method: str, argument: str) -> None:
    """Called by name; a copy works on its own weights; ``detach`` gives the module its own method back."""
    coder = Coder(nn.Linear(3, 3)).eval().requires_grad_(False)
    plain = getattr(coder, method)
    handle = gd.attach(coder, method=method, dynamic={argument: 0}, sizes=SIZES, options=AT_ONCE)
    for rows in (3, 3, 4, 3):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(getattr(coder, method)(x), plain(x))
        torch.testing.assert_close(coder(x), coder[0](x))
    assert handle.stats.hits >= 2
    for copied in (copy.deepcopy(coder), pickle.loads(pickle.dumps(coder))):
        copied[0].weight.zero_()
        calls = handle.stats.calls
        x = torch.randn(3, 3)
        torch.testing.assert_close(getattr(copied, method)(x), getattr(Coder, method)(copied, x))
        assert handle.stats.calls == calls
    assert list(coder.state_dict()) == ["0.weight", "0.bias"]
    handle.detach()
    handle.detach()
    assert method not in vars(coder)
    assert getattr(coder, method) == plain


def test_a_served_method_is_still_a_method() -> None:
    """It has its signature, so that the module, or a parent, can be served as well; it is not attached twice."""
    coder = Coder(nn.Linear(3, 3)).eval().requires_grad_(False)
    gd.attach(coder, method="forward", dynamic={"input": 0}, sizes=SIZES, options=AT_ONCE)
    assert list(inspect.signature(coder.forward).parameters) == ["input"]
    outer = gd.graphed(coder, dynamic={"input": 0}, sizes=SIZES, options=AT_ONCE)
    assert check_rows(outer, 4, 4, 4, fn=coder[0])[-1] is gd.Reason.EXACT
    for name in ("forward", "training"):
        with pytest.raises(gd.ConfigError, match=f"class that nobody has replaced, got '{name}'"):
            gd.attach(coder, method=name, dynamic={"input": 0})
    with pytest.raises(gd.ConfigError, match=r"made by graphed\(\); call unwrap\(\)"):
        gd.graphed(coder.decode, dynamic={"z": 0}).detach()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_what_cannot_be_attached_is_refused() -> None:
    """With the remedy; the module is as it was."""
    net = nn.Linear(3, 3)
    with pytest.raises(gd.ConfigError, match=r"must be a torch.nn.Module, got .*; graphed\(\) wraps any callable"):
        gd.attach(torch.relu, dynamic={"input": 0})  # type: ignore[arg-type]
    with pytest.raises(gd.ConfigError, match="dynamic"):
        gd.attach(net, dynamic={"x": 0})
    assert net._compiled_call_impl is None
    gd.attach(net, dynamic={"input": 0})
    with pytest.raises(gd.ConfigError, match=r"neither compiled nor attached, got a Linear that is; detach\(\)"):
        gd.attach(net, dynamic={"input": 0})
    with pytest.raises(gd.ConfigError, match="a TopLevelTracedModule does not allow; use graphed"):
        gd.attach(torch.jit.trace(nn.Linear(3, 3), torch.randn(2, 3)), dynamic={"input": 0})
    with pytest.raises(gd.ConfigError, match=r"made by graphed\(\); call unwrap\(\)"):
        gd.graphed(nn.Linear(3, 3), dynamic={"input": 0}).detach()


@pytest.mark.parametrize(
    ("settings", "why"), [({}, "attach(..., method='forward')"), ({"method": "forward"}, "called its forward() yet")]
)
def test_a_module_that_nobody_calls_says_so(settings: dict[str, Any], why: str) -> None:
    """Its handle and its health name what may be why, until the first call."""
    layer = nn.Linear(3, 2).requires_grad_(False)
    step = gd.attach(layer, dynamic={"input": 0}, **settings)
    if not settings:
        layer.forward(torch.ones(2, 3))  # which nothing serves
    assert why in repr(step)
    assert why in str(step.health())
    assert not step.health().is_well
    layer(torch.ones(2, 3))
    assert why not in repr(step)
    assert "1 call" in str(step.health())
