"""Models that ``torch.compile`` compiled with inductor: a graph holds their compiled kernels as one call."""

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from graphdispatch import Reason, graphed
from graphdispatch.backends import get_backend

from ..helpers import AT_ONCE, follows

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("fresh_compiler"),
]


class Counting(nn.Module):
    """A model that compiled code has to write the state of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return torch.nn.functional.gelu(self.linear(x) * 2 + 1).softmax(-1) + self.count


def test_compiled_model_is_served() -> None:
    """A model compiled as one piece is captured, padded and replayed; what it writes is written once for each call."""
    model = Counting().eval()
    plain = copy.deepcopy(model)
    served = graphed(torch.compile(model, fullgraph=True, dynamic=True), dynamic={"x": 0}, sizes=[4], options=AT_ONCE)
    for rows in (4, 4, 3, 3, 4, 3):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(served(x=x), plain(x))
    assert int(model.count) == 6
    assert served.stats.hits == 3
    assert Reason.CAPTURE_UNSAFE not in served.stats.reasons


def test_a_prewarm_may_be_what_compiles() -> None:
    """Notes that torch's compiler leaves on parameters are no state of the model."""
    served = graphed(torch.compile(nn.Linear(3, 3), dynamic=True), dynamic={"input": 0}, sizes=[4])
    assert not served.prewarm(torch.randn(3, 3)).left_out


class Scaled(nn.Module):
    """A model with a number that compiled code gets as an argument, and that its guards compare."""

    scale = 1.5

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale + (1 if self.scale < 2 else 0)
        return torch.nn.functional.layer_norm(y, (3,))


def test_a_capture_compiles_nothing_again() -> None:
    """What a call was compiled to is what all runs of a capture use: their guards hold, and are no work of the call."""
    counters.clear()
    model = Scaled()
    served = graphed(torch.compile(model, dynamic=True), dynamic={"x": 0}, sizes=[4])
    for model.scale in (1.5, 1.5, 1.75, 1.75):
        for rows in (4, 3, 4, 3):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(served(x=x), model(x))
    assert counters["stats"]["unique_graphs"] == 1
    assert served.stats.hits == 10


def test_compiled_code_is_one_call_of_a_graph() -> None:
    """The recording has the call of the compiled graph, none of the operators that it was made of, and its bits."""
    compiled = torch.compile(lambda x: (x * 2).sin().sum(1, keepdim=True) + x, fullgraph=True)
    compiled(torch.randn(4, 3))
    assert len(follows(compiled, 4, 3).steps) == 1


def test_watching_does_not_end_compilation() -> None:
    """A function that was compiled for nothing but a watched run stays compiled afterwards."""
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        calls.append(1)
        return graph.forward

    compiled = torch.compile(lambda x: x * 2 + 1, backend=backend, fullgraph=True)
    capture = get_backend("cpu").begin_capture(get_backend("cpu").make_pool())
    compiled(torch.randn(4))
    capture.abort()
    assert calls == [1]
    compiled(torch.randn(4))
    assert calls == [1]


def test_python_inside_compiled_code_is_refused() -> None:
    """An operator in Python that compiled code calls would run again where CUDA freezes it: the call stays eager."""
    scale = [2.0]

    @torch.library.custom_op("graphdispatch_in_compiled::scaled", mutates_args=())
    def scaled(x: Tensor) -> Tensor:
        return x * scale[0]

    scaled.register_fake(torch.empty_like)
    served = graphed(torch.compile(lambda x: scaled(x + 1) + 1), dynamic={"x": 0}, sizes=[4], options=AT_ONCE)
    x = torch.randn(4, 3)
    for scale[0] in (2.0, 3.0, 4.0):
        assert torch.equal(served(x), (x + 1) * scale[0] + 1)
    assert served.stats.hits == 0
    assert "graphdispatch_in_compiled::scaled" in served.last_decision.detail
