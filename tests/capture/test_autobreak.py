"""Automatic breaks: a module in which a capture fails runs eagerly, and the rest is captured around it."""

import pytest
import torch
from torch import nn

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Graphed, Reason, graphed
from graphdispatch.capture.piecewise import PiecewiseGraph


class HostReader(nn.Module):
    """Reads a value of its input back to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2.0 if float(x.abs().max()) >= 0 else 3.0)


class Model(nn.Module):
    """Two host readers between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.one, self.two = HostReader(), HostReader()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.two(torch.relu(self.one(self.first(x)))))


def automatic(model: nn.Module, **options: object) -> Graphed[..., torch.Tensor]:
    """The model served with automatic breaks, captured at first sight."""
    return graphed(
        model,
        dynamic={"x": 0},
        max_size=8,
        options=CUDAGraphOptions(breaks="auto", **options, capture_after=1),  # type: ignore[arg-type]
    )


def test_failing_modules_become_breaks() -> None:
    """Both host readers run eagerly, everything else is captured, and the answers are eager's."""
    model = Model().eval().requires_grad_(False)
    serve = automatic(model)
    for rows in (3, 4, 3, 8, 7, 7):
        x = torch.randn(rows, 4)
        assert torch.allclose(serve(x), model(x), atol=1e-5)
    assert serve.last_decision is not None
    assert serve.last_decision.mode is CUDAGraphMode.PIECEWISE
    assert {type(m) for m in serve.automatic_breaks} == {HostReader}
    assert all(isinstance(e.graph, PiecewiseGraph) and len(e.graph.breaks) == 2 for e in serve.entries)


def test_the_report_names_the_line() -> None:
    """Each automatic break tells the operator and the source line that cost the full graph."""
    serve = automatic(Model().eval())
    serve(torch.randn(2, 4))
    for why in serve.automatic_breaks.values():
        assert "_local_scalar_dense" in why
        assert "test_autobreak.py" in why
        assert "float(x.abs().max())" in why


def test_the_model_is_left_as_it_was() -> None:
    """The marks are there during captures only."""
    model = Model().eval().requires_grad_(False)
    automatic(model)(torch.randn(2, 4))
    assert "forward" not in vars(model.one)


def test_a_model_that_fails_itself_stays_eager() -> None:
    """Where the served module itself fails there is nothing to break around."""
    serve = automatic(HostReader().eval())
    x = torch.randn(2, 4)
    assert torch.equal(serve(x), serve.unwrap()(x))
    assert serve.last_decision is not None
    assert serve.last_decision.reason is Reason.CAPTURE_UNSAFE
    assert not serve.automatic_breaks


def test_breaks_are_bounded() -> None:
    """With ``max_breaks=1`` a model that needs two stays eager, with its reason."""
    serve = automatic(Model().eval(), max_breaks=1)
    serve(torch.randn(2, 4))
    assert len(serve.automatic_breaks) == 1
    assert serve.last_decision is not None
    assert serve.last_decision.reason is Reason.CAPTURE_UNSAFE


@pytest.mark.parametrize("breaks", ["none", 3])
def test_the_option_is_checked(breaks: object) -> None:
    """``breaks`` is "marked" or "auto"."""
    with pytest.raises(ValueError, match="breaks must be"):
        CUDAGraphOptions(breaks=breaks)  # type: ignore[arg-type]


class _Reader(nn.Module):
    """Reads a value back and holds almost all of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layers, after a read."""
        return self.layers(x) if x.sum().item() < 1e9 else x


def test_no_break_at_almost_all_of_the_work() -> None:
    """A module that holds almost all of the served one does not run eagerly in pieces: the call stays eager, with the
    reason."""
    model = nn.Sequential(_Reader(), nn.Linear(4, 2)).eval()
    served = graphed(model, dynamic={"input": 0}, sizes=[4], options=CUDAGraphOptions(breaks="auto"))
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(4, 4)
            assert torch.equal(served(x), model(x))
    assert not served.stats.hits
    assert served.stats.reasons[Reason.CAPTURE_UNSAFE]


class _Mixed(nn.Module):
    """A read inside a part with some of the layers, and further layers around it."""

    def __init__(self, inside: int, around: int) -> None:
        super().__init__()
        self.reader = _Reader()
        self.reader.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(inside)))
        self.around = nn.Sequential(*(nn.Linear(4, 4) for _ in range(around)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The read, and what follows."""
        return self.around(self.reader(x))


@torch.no_grad()
def test_the_share_of_the_breaks_is_told_and_bounded() -> None:
    """What counts is how much of the work runs eagerly, and not how many modules there are."""
    x = torch.randn(4, 4)
    served = automatic(_Mixed(1, 9).eval())
    for _ in range(3):
        served(torch.randn(4, 4))
    assert "(18 % of the operators, " in served.explain(x)
    for share, is_served in ((0.2, True), (0.15, False)):
        served = automatic(_Mixed(1, 9).eval(), max_eager_share=share)
        for _ in range(3):
            served(torch.randn(4, 4))
        assert bool(served.entries) is is_served
    assert "breaks would run 18 % of the operators, and max_eager_share allows 15 %" in served.explain(x)
    assert "x.sum().item()" in served.explain(x)
