"""Whether graphs serve, said once in the log and by ``health``."""

import pytest
import torch

from graphdispatch import CUDAGraphOptions, Graphed, Reason, graphed
from graphdispatch.engines import CUDAGraphWrapper, Health


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings so far."""
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def step_with(**options: object) -> Graphed[..., torch.Tensor]:
    """One that serves up to 4 rows."""
    return graphed(lambda x: x * 2, dynamic={"x": 0}, sizes=(4,), options=CUDAGraphOptions(**options))


def test_graphs_that_never_engaged_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """After the thousandth call at the latest, with the reason and its remedy."""
    step = step_with()
    for _ in range(500):
        step(torch.zeros(5, 2))
    assert not lines(caplog)
    for _ in range(1000):
        step(torch.zeros(5, 2))
    (line,) = lines(caplog)
    assert "graphs serve 0.0 % of 501 calls; above_largest_size, 501 times" in line
    assert Reason.ABOVE_LARGEST_SIZE.text in line
    assert not step.health().is_well
    assert step.health().causes == ((Reason.ABOVE_LARGEST_SIZE, 1500),)


def test_nothing_is_logged_where_graphs_serve(caplog: pytest.LogCaptureFixture) -> None:
    """Not even if half of the calls behind the first thousand run eagerly."""
    step = step_with()
    for rows in [*[4] * 1000, *[5, 4] * 1000]:
        step(torch.randn(rows, 2))
    assert not lines(caplog)
    health = step.health()
    assert health.is_well
    assert (health.calls, health.captures, health.lost) == (3000, 1, 0)
    assert "graphs serve 66.6 % of 3,000 calls; above_largest_size, 1,000 times" in str(health)


def test_graphs_that_do_not_stay_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """After 32 captures, of which half are gone."""
    layer = torch.nn.Linear(2, 2).eval().requires_grad_(False)
    step = graphed(layer, dynamic={"input": 0}, sizes=(4,), options=CUDAGraphOptions(capture_after=1))
    for turn in range(80):
        if turn % 2 == 0:
            layer.weight = torch.nn.Parameter(torch.randn(2, 2), requires_grad=False)
        step(torch.randn(4, 2))
    (line,) = lines(caplog)
    assert "of 32 graphs are gone" in line
    assert not step.health().is_well


def test_every_front_end_with_counters_tells() -> None:
    """Before the first call nothing is served, and nothing is lost."""
    health = CUDAGraphWrapper(torch.relu).health()
    assert health == Health(0, 0.0, 0, 0, ())
    assert str(health) == "no call came yet"


def test_what_no_graph_can_hold_is_said_with_its_line() -> None:
    """As ``explain`` says it, where failures are the cause."""
    step = graphed(lambda x: x * x.sum().item(), dynamic={"x": 0}, options=CUDAGraphOptions(capture_after=1))
    step(torch.ones(4, 2))
    (detail,) = step.health().details
    assert detail in str(step.health())
    assert "test_health.py" in detail
    assert ".item()" in detail


def test_an_array_is_named_beside_the_models_own_error() -> None:
    """The error is the model's, unchanged; a note of it says which argument is no tensor, and what makes one of it."""
    step = graphed(torch.nn.Linear(2, 2).eval(), dynamic={"input": 0}, sizes=(4,))
    array = torch.zeros(4, 2).numpy()
    with pytest.raises(TypeError) as caught:
        step(array)
    (note,) = caught.value.__notes__
    assert note == (
        "graphdispatch: no argument is a tensor; argument 'input' is a numpy.ndarray (torch.from_numpy makes a tensor "
        "of it)"
    )
    assert step(torch.from_numpy(array)).shape == (4, 2)
