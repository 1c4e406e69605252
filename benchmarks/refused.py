"""What a call costs that no graph ever serves, beside the callable itself: models refused for different reasons."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.real_models.families import build_cases
from torch import Tensor, nn

from graphdispatch import Graphed, graphed

from .timing import Effort, Row, row

__all__ = ["TITLE", "rows"]

TITLE = "graphed() call that no graph serves over the callable itself"
_SIZE = 4
_ENOUGH = 400  # calls after which each of these refusals stands

# Families of transformers, tiny and with random weights, that read on the host or change their own state.
_FAMILIES = (
    ("encoder", "flaubert", "plain"),
    ("encoder", "longformer", "plain"),
    ("encoder", "xlm", "plain"),
    ("encoder", "xmod", "mask"),
    ("decoder", "jetmoe", "no cache"),
    ("decoder", "recurrent_gemma", "default"),
    ("decoder", "recurrent_gemma", "no cache"),
    ("seq2seq", "fsmt", "no cache"),
    ("seq2seq", "led", "default"),
    ("seq2seq", "led", "no cache"),
)


class _Net(nn.Module):
    """Linear layers; it reads a value back to the host if it is told so."""

    def __init__(self, width: int, layers: int, *, reads: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.reads = reads

    def forward(self, x: Tensor, other: object = None) -> Tensor:
        """[rows, width] -> the same."""
        return self.layers(x) if not self.reads or x.sum().item() < 1e30 else x


class _Opaque:
    """An object that nobody can compare."""


def rows(effort: Effort) -> list[Row]:
    """Small models, then ten calls of families of transformers."""
    found = []
    for name, step, call in _cases():
        case = f"{name}, {_reason(step, call)}"
        found.append(row(case, lambda step=step, call=call: call(step), _eager(step, call), effort.turns))  # type: ignore[misc]
    return found


def _eager(step: Graphed[..., Any], call: Callable[[Any], Any]) -> Callable[[], Any]:
    fn = step.unwrap()
    return lambda: call(fn)


def _reason(step: Graphed[..., Any], call: Callable[[Any], Any]) -> str:
    """Why the calls are refused, once that stands."""
    for _ in range(_ENOUGH):
        call(step)
    decision = step.last_decision
    assert decision is not None
    assert not decision.mode.has_graphs()
    return str(decision.reason)


def _cases() -> Iterator[tuple[str, Graphed[..., Any], Callable[[Any], Any]]]:
    """A name, the served model, and what calls it or the model itself."""
    small, large = torch.randn(_SIZE, 16), torch.randn(_SIZE, 512)
    reader, wide = _Net(16, 2, reads=True).eval(), _Net(512, 12, reads=True).eval()
    yield "2 layers", graphed(reader, dynamic={"x": 0}, sizes=[_SIZE]), lambda fn: fn(small)
    yield "12 wide layers", graphed(wide, dynamic={"x": 0}, sizes=[_SIZE]), lambda fn: fn(large)
    plain, odd, many = _Net(16, 2, reads=False).eval(), _Opaque(), torch.randn(2 * _SIZE, 16)
    yield "2 layers", graphed(plain, dynamic={"x": 0}, sizes=[_SIZE]), lambda fn: fn(small, odd)
    yield "2 layers", graphed(plain, dynamic={"x": 0}, sizes=[_SIZE]), lambda fn: fn(many)
    pixels = torch.randn(1024, 1024)
    yield "1 ReLU of 4 MB", graphed(nn.ReLU(), dynamic={"input": 0}, sizes=[1024]), lambda fn: fn(pixels)
    for kind, family, style in _FAMILIES:
        case = next(case for case in build_cases(kind, family) if case.style == style)
        given = case.arguments(_SIZE, torch.Generator().manual_seed(0))
        step = graphed(case.model, dynamic=case.dynamic, sizes=[_SIZE])
        yield f"{family} ({style})", step, lambda fn, given=given: fn(**given)  # type: ignore[misc]
