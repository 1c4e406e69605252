"""What the caller passes: other forms of a call, shapes, layouts, constants, objects, shared memory."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphOptions, Reason

from .features import needs
from .front_end import Open


def weighted(x: torch.Tensor, w: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Not symmetric in its arguments, so that a mix-up shows."""
    return x * scale - w


def pair(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of equal shape."""
    return torch.randn(rows, 3), torch.randn(rows, 3)


BOTH = {"x": 0, "w": 0}


def test_keyword_order(settled: Open) -> None:
    """Keywords are matched by name, in whatever order they are written, and beside positions."""
    step = settled(weighted, pair, dynamic=BOTH)
    for x, w in map(pair, (4, 3, 4, 3)):
        for answer in (step(w=w, x=x), step(x=x, w=w), step(x, w=w)):
            assert torch.equal(answer, weighted(x, w))


@needs("constants")
def test_default_argument(settled: Open) -> None:
    """A default that is left out, and then given another value, selects another graph."""
    step = settled(weighted, pair, dynamic=BOTH)
    step.check_calls(*((*pair(4), *scale) for scale in ((1.0,), (3.0,), (1.0,), (3.0,), ())))


@needs("constants")
@pytest.mark.parametrize("values", [(2, 3), (2, 2.0), (1, True), (0.0, -0.0), ("a", "b"), (None, 1), (0j, -0j)])
def test_constant_argument(settled: Open, values: tuple[Any, Any]) -> None:
    """A constant is compared with its type and, for floats, its bits."""

    def fn(x: torch.Tensor, k: Any) -> torch.Tensor:
        return x * torch.tensor(float(hash((type(k).__name__, repr(k))) % 1000))

    first, second = values
    step = settled(fn, lambda rows: (torch.randn(rows, 3), first))
    x = torch.randn(4, 3)
    step.check_calls((x, second), (x, first))
    step.check(Reason.EXACT)


@needs("constants")
def test_constant_in_container(settled: Open) -> None:
    """Constants within dicts, lists and tuples are compared like top-level ones."""
    step = settled(lambda x, config: x * config["scale"][0], lambda rows: (torch.randn(rows, 3), {"scale": [2.0]}))
    step.check_calls((torch.randn(4, 3), {"scale": [5.0]}))


@needs("constants")
def test_object_argument(tried: Open) -> None:
    """An object whose change cannot be seen keeps the call eager."""
    config = SimpleNamespace(scale=2.0)
    step = tried(lambda x, config: x * config.scale, lambda rows: (torch.randn(rows, 3), config))
    config.scale = 5.0
    step.check_calls((torch.randn(4, 3), config))
    step.check(Reason.UNGUARDED_ARGUMENT)


def test_shape_changed(settled: Open) -> None:
    """Another trailing shape never meets the old graph."""
    step = settled(lambda x: x * 2)
    step.check_calls(torch.randn(4, 5))
    step.check(Reason.CAPTURED_NOW)


def test_dtype_changed(settled: Open) -> None:
    """Another dtype is not cast into the old buffers."""
    x = torch.randn(4, 3, dtype=torch.float64)
    settled(lambda x: x * 2).check_calls(x, x)


def test_one_row_into_many(settled: Open) -> None:
    """One row is one row: it is not broadcast over the four of the graph."""
    settled(lambda x: x * 2).check_calls(1)


def test_rows_disagree(settled: Open) -> None:
    """One row beside four is what eager makes of it."""
    step = settled(weighted, pair, dynamic=BOTH)
    step.check_calls((torch.randn(4, 3), torch.randn(1, 3)))
    step.check(Reason.ROWS_DISAGREE)


def test_size_one_dimension(settled: Open) -> None:
    """A column is not broadcast into a buffer of three."""
    settled(weighted, pair, dynamic=BOTH).check_calls((torch.randn(4, 3), torch.randn(4, 1)))


@pytest.mark.parametrize(
    "layout",
    [lambda x: x.t().contiguous().t(), lambda x: x.repeat(1, 2)[:, ::2], lambda x: x[:1].expand(4, 3)],
    ids=["transposed", "strided", "expanded"],
)
def test_layout_changed(settled: Open, layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Transposed, strided and expanded inputs give what eager gives, whether a graph serves them or not."""
    settled(lambda x: x * 2 + x.cumsum(1)).check_calls(*(layout(torch.randn(4, 3)) for _ in range(3)))


def test_argument_written(opened: Open) -> None:
    """A write to an argument reaches the caller's own tensor, on the real rows and once, with comparisons in between; a
    capture ahead leaves its example alone."""
    step = opened(lambda x: x.add_(1) * 2, options=CUDAGraphOptions(verify_every=2))
    for rows in (3, 4):
        x = torch.zeros(rows, 3)
        step.prepare(x)
        assert not x.any()
    served = set()
    for rows in (3, 4, 3, 4, 3, 4, 4, 3, 4, 3, 3, 3):
        x = torch.randn(rows, 3)
        expected = x + 1
        assert torch.equal(step(x), expected * 2)
        assert torch.equal(x, expected)
        served |= {rows} if step.was_hit() else set()
    assert served == {3, 4}


def test_arguments_share_memory(settled: Open) -> None:
    """Copies of two views of one memory would drift apart, so such a call runs eagerly if it writes."""
    step = settled(lambda x, w: (x.add_(1), w * 2)[1], pair, dynamic=BOTH)
    x = torch.randn(4, 3)
    expected = (x + 1) * 2
    assert torch.equal(step(x, x), expected)
    step.check(Reason.ALIASED_ARGUMENTS)


def test_argument_is_state(settled: Open) -> None:
    """An argument that is a view of state which the call writes is not copied."""
    cache, x = torch.zeros(8, 3), torch.randn(4, 3)
    step = settled(lambda x, row: (cache[0].add_(1), x + row)[1], lambda rows: (torch.randn(rows, 3), torch.randn(3)))
    assert torch.equal(step(x, cache[0]), x + float(step.calls))
    step.check(Reason.ALIASED_ARGUMENTS)


@needs("static_inputs")
def test_static_input_moved(opened: Open) -> None:
    """With static inputs, a tensor at another address than the captured one is not served by the graph."""
    step = opened(lambda x: x * 2, options=CUDAGraphOptions(inputs="static"))
    x, moved = torch.randn(4, 3), torch.randn(4, 3)
    step.prepare(x)
    step.check_calls(x, x, x)
    assert step.was_hit()
    step.check_calls(moved)
    step.check(Reason.ARGUMENTS_CHANGED)
    step.check_calls(x)


@needs("constants")
def test_argument_container_changed(tried: Open) -> None:
    """What the callable puts into a dict or list that it was given is there after each call, captures included."""

    def fn(batch: dict[str, torch.Tensor], log: list[torch.Tensor]) -> torch.Tensor:
        batch["y"] = batch["x"] * 3
        log.append(batch["x"])
        return batch.pop("z") * 2

    given: list[dict[str, torch.Tensor]] = []

    def batch(rows: int) -> tuple[Any, ...]:
        x = torch.randn(rows, 3)
        given.append({"x": x, "z": x + 1})
        return given[-1], []

    step = tried(fn, batch, dynamic={"batch": 0})
    step.check(Reason.STATE_REBOUND)
    for values in given[-step.calls :]:  # any before were examples, whose captures leave nothing
        assert list(values) == ["x", "y"]
        assert torch.equal(values["y"], values["x"] * 3)


@needs("constants")
def test_argument_container_changed_instead(settled: Open) -> None:
    """A tensor within a container may be written in place."""

    def fn(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["y"].copy_(batch["x"] * 3)
        return batch["x"] * 2

    step = settled(fn, lambda rows: ({"x": torch.randn(rows, 3), "y": torch.randn(rows, 3)},), dynamic={"batch": 0})
    x, y = torch.randn(4, 3), torch.zeros(4, 3)
    assert torch.equal(step({"x": x, "y": y}), x * 2)
    assert torch.equal(y, x * 3)
