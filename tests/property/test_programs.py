"""Random programs of operators, recorded by the CPU backend: replays over new inputs leave eager's bits."""

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphdispatch.backends import get_backend

from ..helpers import assert_same

ROWS, COLUMNS = 4, 6
_Step = tuple[str, int, int]  # operator, and the two values (by number) that it works on


def complexes(a: Tensor) -> Tensor:
    """Pairs of numbers as complex ones."""
    return torch.view_as_complex(a.reshape(-1, 2).contiguous())


PURE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a * 0.5 + b * 0.5,
    "where": lambda a, b: torch.where(a > b, a, b * 0.5),
    "product": lambda a, b: torch.tanh(a @ b.t() @ b),
    "concatenate": lambda a, b: torch.cat([a[:, 3:], b[:, :3]], 1),
    "sort": lambda a, b: a.sort(dim=1).values,
    "largest": lambda a, b: a.topk(2, dim=1).values.repeat(1, 3),
    "norm": lambda a, b: torch.nn.functional.layer_norm(a, (COLUMNS,)),
    "stacked": lambda a, b: torch.stack([a, b]).mean(0),
    "gather": lambda a, b: a.gather(1, b.argsort(1)),
    "counted": lambda a, b: a.cumsum(1) * 0.125,
    "converted": lambda a, b: (a.double() + b).float() * 0.5,
    "split": lambda a, b: torch.cat([part * (i + 1) * 0.25 for i, part in enumerate(a.split(1, dim=1))], 1),
    "attention": lambda a, b: torch.nn.functional.scaled_dot_product_attention(a[None], b[None], a[None])[0],
    "embedded": lambda a, b: torch.nn.functional.embedding(a[:, :4].argmax(1), b),
    "copied": lambda a, b: a.t().reshape(ROWS, COLUMNS) * 0.5,
    "complex": lambda a, b: torch.view_as_real(complexes(a).conj() * 0.5j).reshape(ROWS, COLUMNS),
    "negative": lambda a, b: (complexes(a).conj().imag + 1).repeat(2).view(ROWS, COLUMNS),
    "written_literal": lambda a, b: a + torch.tensor([1.0]).add_(b.sum() * 0.125),
    "literal": lambda a, b: a * 0.5 + torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0, 0.25]),
}
VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reversed_twice": lambda a, b: a.t()[:, :].t(),
    "reshaped": lambda a, b: a.reshape(-1).view(ROWS, COLUMNS) if a.is_contiguous() else a.reshape(ROWS, COLUMNS),
    "expanded": lambda a, b: a[:1].expand(ROWS, -1),
    "detached": lambda a, b: a.detach(),
}


WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "written": lambda a, b: a.mul_(0.5).add_(b.clone(), alpha=0.25),
    "row_written": lambda a, b: (a[1].copy_(b[2]), a)[1],
    "columns_written": lambda a, b: (a[:, ::2].mul_(0.5), a)[1],
    "index_written": lambda a, b: a.index_copy_(0, torch.tensor([0, 2]), b[1:3].clone() * 0.5),
    "relu_written": lambda a, b: a.relu_(),
}
ALL = PURE | VIEWS | WRITES


def run(steps: list[_Step], inputs: list[Tensor]) -> list[Tensor]:
    """All values of a program; a step that writes does so to a value that is not spread over itself."""
    values = list(inputs)
    for name, first, second in steps:
        a, b = values[first % len(values)], values[second % len(values)]
        if name in WRITES and 0 in a.stride():
            a = a.clone()
        values.append(ALL[name](a, b))
    return values


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(sorted(ALL)), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=16
    ),
    held=st.frozensets(st.integers(0, 17), min_size=1, max_size=4),
)
def test_replays_are_eagers(steps: list[_Step], held: frozenset[int]) -> None:
    """Whatever is held of a program, and the inputs that it writes, are eager's after each replay."""
    backend = get_backend("cpu")
    generator = torch.Generator().manual_seed(len(steps))
    inputs = [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(2)]
    with backend.begin_capture(backend.make_pool()) as capture:
        values = run(steps, inputs)
        numbers = sorted({n % len(values) for n in held})
        outputs = [values[n] for n in numbers]
        del values
    for _ in range(3):
        fresh = [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(2)]
        for buffer, new in zip(inputs, fresh, strict=True):
            buffer.copy_(new)
        capture.graph.replay()
        wanted = run(steps, fresh)
        assert_same([outputs, inputs], [[wanted[number] for number in numbers], fresh])
