"""Random compositions of operators: what a run proves of them is true in numbers.

The real rows of a padded batch are those of the batch alone. A composition consists of the steps of ``STEPS`` that work
on a batch of seven rows, each on values of the steps before.
"""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from .runs import Batch, by_rows, judge

F = torch.nn.functional
D, OWN, MOST = 4, 7, 32
_GENERATOR = torch.Generator().manual_seed(0)
W, V, TABLE = (torch.randn(*shape, generator=_GENERATOR) for shape in ((D, D), (D,), (64, D)))
FIXED = torch.tensor([2, 0, 1])
CONSTANTS = (W, V, TABLE, TABLE[:OWN], torch.ones(1, 1))

Step = Callable[[Random, Tensor, Tensor, Any], Tensor]
"""Of random choices, two values and the number of rows another value."""


def _floats(value: Tensor) -> Tensor:
    return value if value.is_floating_point() else value.float() * 0.1


def _places(value: Tensor, size: int) -> Tensor:
    return (value.abs() * 3).long() % size


def _dim(r: Random, value: Tensor) -> int:
    return r.randrange(-value.dim(), value.dim())


def _pointwise(r: Random, a: Tensor, b: Tensor, n: Any) -> Tensor:
    a, b = _floats(a), _floats(b)
    forms = (
        torch.tanh,
        torch.relu,
        lambda t: t * 2,
        lambda t: t + b,
        lambda t: t * b,
        lambda t: torch.where(b > 0, t, b),
    )
    return r.choice(forms)(a)


def _along(r: Random, a: Tensor, b: Tensor, n: Any) -> Tensor:
    d = _dim(r, a)
    forms: tuple[Callable[[Tensor], Tensor], ...] = (
        *(lambda t: t.sum(d), lambda t: t.mean(d, keepdim=True), lambda t: t.amax(d), lambda t: t.softmax(d)),
        *(lambda t: t.cumsum(d), lambda t: t.flip(d), lambda t: t.roll(1, d), lambda t: t.sort(d).values),
        *(lambda t: t.argsort(d), lambda t: t.argmax(d), lambda t: F.normalize(t, dim=d), lambda t: t.std(d)),
        *(
            lambda t: t.topk(1, d).indices,
            lambda t: t.logcumsumexp(d),
            lambda t: t.unbind(d)[0],
            lambda t: t.diff(dim=d),
        ),
    )
    return r.choice(forms)(_floats(a))


def _product(r: Random, a: Tensor, b: Tensor, n: Any) -> Tensor:
    a, b = _floats(a), _floats(b)
    forms = (
        "ab,bc->ac",
        "ab,cb->ac",
        "ab,ab->a",
        "ab,ac->bc",
        "ab,ac->abc",
        "abc,acd->abd",
        "abc,cd->abd",
        "abc,adc->abd",
    )
    return r.choice((lambda: a @ b, lambda: a @ W, lambda: a @ b.mT, lambda: torch.einsum(r.choice(forms), a, b)))()


def _view(r: Random, a: Tensor, b: Tensor, n: Any) -> Tensor:
    shapes = ((n, -1), (-1, n), (-1,), (-1, D), (n * 2, -1), (2, -1), (n, -1, 2), (-1, n, 2), (2, n, -1), (1, n, -1))
    order = r.sample(range(a.dim()), a.dim())
    forms: tuple[Callable[[], Tensor], ...] = (
        *(lambda: a.reshape(r.choice(shapes)), lambda: a.permute(order), lambda: a.unsqueeze(r.randrange(a.dim() + 1))),
        *(lambda: a.flatten(0, 1), lambda: a.squeeze(_dim(r, a)), lambda: a.transpose(0, -1).contiguous()),
        *(lambda: a.expand(n, *a.shape[1:]), lambda: a.expand(n, *a.shape), lambda: a.unflatten(0, (n, -1))),
        lambda: a.unfold(_dim(r, a), 2, 1),
    )
    return r.choice(forms)()


def _joined(r: Random, a: Tensor, b: Tensor, n: Any) -> Tensor:
    a, b, d = _floats(a), _floats(b), _dim(r, a)
    forms: tuple[Callable[[], Tensor], ...] = (
        *(
            lambda: torch.cat([a, b], d),
            lambda: torch.stack([a, b], r.randrange(a.dim() + 1)),
            lambda: torch.cat([a, a], d),
        ),
        *(lambda: a.repeat(2, *[1] * (a.dim() - 1)), lambda: a.repeat_interleave(2, d), lambda: a.tile(1, 2)),
    )
    return r.choice(forms)()


def _part(r: Random, a: Tensor, b: Tensor, n: Any) -> Tensor:
    d = _dim(r, a)
    place: list[Any] = [slice(None)] * a.dim()
    end = r.choice((1, 2, n, n - 1, -1, n // 2, a.shape[d] // 2))
    place[d] = r.choice((slice(None, end), slice(end, None), slice(None, None, 2), 0, -1))
    parts = a.chunk(2, d) if r.random() < 0.5 else a.split(n, d)
    return r.choice((lambda: a[tuple(place)], lambda: parts[0], lambda: torch.cat(parts[::-1], d)))()


def _made(r: Random, a: Tensor, b: Tensor, n: Any) -> Tensor:
    forms: tuple[Callable[[], Tensor], ...] = (
        *(lambda: torch.arange(n), lambda: torch.arange(2 * n), lambda: torch.arange(n * D).view(n, D)),
        *(
            lambda: torch.ones(n),
            lambda: torch.full((n, 2), 0.5),
            lambda: torch.ones(n, n),
            lambda: a.new_zeros(a.shape),
        ),
        *(lambda: torch.arange(n).repeat_interleave(2), lambda: torch.arange(n).repeat(2), lambda: torch.ones_like(a)),
    )
    return r.choice(forms)()


def _picked(r: Random, a: Tensor, b: Tensor, n: Any) -> Tensor:
    d = _dim(r, a)
    places = _places(b, a.shape[d])
    forms: tuple[Callable[[], Tensor], ...] = (
        *(lambda: a[_places(b, a.shape[0])], lambda: a[b], lambda: a[torch.arange(n), _places(b, a.shape[1])]),
        *(lambda: a[:, FIXED % a.shape[1]], lambda: TABLE[_places(b, 64)], lambda: a.gather(d, places)),
        *(lambda: torch.take_along_dim(a, places, d), lambda: a.index_select(d, places.flatten())),
        *(lambda: a.index_select(d, torch.arange(n)), lambda: F.embedding(_places(b, 64), TABLE)),
        *(
            lambda: torch.searchsorted(V.sort().values, _floats(a)),
            lambda: torch.bucketize(_floats(a), V.sort().values),
        ),
    )
    return r.choice(forms)()


def _written(r: Random, a: Tensor, b: Tensor, n: Any) -> Tensor:
    y, b = _floats(a) * 1, _floats(b)
    d = _dim(r, y)
    views = (
        lambda: y[:, 0],
        lambda: y.view(-1),
        lambda: y.t(),
        lambda: y[..., 0],
        lambda: y.narrow(0, 0, n),
        lambda: y[0],
    )
    places = (
        _places(b, y.shape[0]),
        torch.arange(n),
        slice(None, n),
        slice(None, None, 2),
        -1,
        (slice(None), 0),
        b > 0,
    )
    forms: tuple[Callable[[], Any], ...] = (
        *(lambda: r.choice(views)().mul_(2), lambda: r.choice(views)().copy_(b), lambda: r.choice(views)().zero_()),
        *(
            lambda: y.__setitem__(r.choice(places), r.choice((1.0, b, V))),
            lambda: y.scatter_(d, _places(b, y.shape[d]), 1.0),
        ),
        *(lambda: y.scatter_add_(d, _places(b, y.shape[d]), b), lambda: y.index_add_(0, _places(b, y.shape[0]), b)),
        lambda: y.index_copy_(0, torch.arange(n), b),
    )
    r.choice(forms)()
    return y


def _layer(r: Random, a: Tensor, b: Tensor, n: Any) -> Tensor:
    a, b = _floats(a), _floats(b)
    forms: tuple[Callable[[], Tensor], ...] = (
        *(lambda: F.layer_norm(a, a.shape[-1:]), lambda: F.layer_norm(a, a.shape), lambda: F.group_norm(a, 2)),
        *(lambda: F.batch_norm(a, None, None, training=True), lambda: F.scaled_dot_product_attention(a, b, b)),
        *(lambda: F.scaled_dot_product_attention(a[None], b[None], b[None])[0], lambda: F.avg_pool1d(a, 2)),
        *(lambda: F.conv1d(a, torch.ones(2, a.shape[1], 1)), lambda: F.pad(a, (0, 0, 1, 0)), lambda: F.glu(a)),
    )
    return r.choice(forms)()


def _sorted(r: Random, a: Tensor, b: Tensor, n: Any) -> Tensor:
    order, choice = _floats(a).flatten(1).sum(1).argsort(), _floats(a).argmax(-1)
    counts = torch.histc(choice.float(), D, 0, D - 1)
    forms: tuple[Callable[[], Tensor], ...] = (
        *(lambda: order, lambda: order.argsort(), lambda: a[order], lambda: (a[order] * 2)[order.argsort()]),
        *(
            lambda: (_floats(a)[order] + _floats(b))[order.argsort()],
            lambda: torch.zeros_like(a).index_copy(0, order, a),
        ),
        *(lambda: torch.empty_like(order).index_put((order,), torch.arange(n)), lambda: b[order], lambda: choice),
        *(lambda: counts, lambda: counts.cumsum(0), lambda: W[choice], lambda: choice.sort(0).values),
        lambda: (choice[..., None] == torch.arange(D)).float(),
    )
    return r.choice(forms)()


STEPS: tuple[Step, ...] = (
    *(_pointwise, _along, _product, _view, _joined, _part, _made, _picked, _written, _layer, _sorted),
    *(_pointwise, _view, _picked),
)


class _Plan(NamedTuple):
    """One step: what it does, which values it takes, and the seed of its choices."""

    step: Step
    first: float
    second: float
    constant: int | None
    seed: int

    def value(self, values: list[Tensor], rows: Any) -> Tensor:
        """The next value; late values are taken more often."""
        late = values[int(len(values) * (1 - self.first**2) * 0.999)]
        other = values[int(len(values) * self.second)] if self.constant is None else CONSTANTS[self.constant]
        made = self.step(Random(self.seed), late, other, rows)
        return made if 0 < made.dim() <= 4 else values[-1]


class Composition:
    """A program of a seed. It returns the last value, the one before it, and one in the middle."""

    def __init__(self, seed: int) -> None:
        r = Random(seed)
        self._plans: list[_Plan] = []
        values = list(batch(OWN))
        for _ in range(3 + seed % 9):
            constant = r.randrange(len(CONSTANTS)) if r.random() < 0.15 else None
            plan = _Plan(r.choice(STEPS), r.random(), r.random(), constant, r.randrange(1 << 30))
            try:
                values.append(plan.value(values, OWN))
            except Exception:  # torch's own: the values do not fit
                continue
            self._plans.append(plan)

    def __call__(self, x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        values = [x, i]
        for plan in self._plans:
            values.append(plan.value(values, x.shape[0]))
        return values[-1], values[-2], values[len(values) // 2]


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of numbers, and an integer for each."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, D, generator=generator), torch.randint(0, 5, (rows,), generator=generator)


def _make(rows: int) -> Batch:
    return by_rows(*batch(rows))


def wrong(seed: int) -> str:
    """What a run of this program proves that is not true in numbers; ``"refused"`` if it proves nothing; else empty."""
    program = Composition(seed)
    try:
        verdict = judge(program, _make, (OWN,), (range(1, MOST + 1),))
    except Exception:  # of torch, for sizes that Python computes with
        return "refused"
    if not verdict.independent or None in verdict.outputs:
        return "refused"
    spoken_for = [rows for rows in (9, 6, 12, 4) if (rows,) in verdict.space]
    for rows in spoken_for:
        x, i = batch(rows, rows)
        first = _changed(x, slice(1), -50.0), _changed(i, slice(1), 2)
        if text := _differs(program, first, (x, i), verdict.outputs, (rows, 1, rows)):
            return f"{text} where the first of {rows} rows changes, seed {seed}"
        for real in (one for one in (rows - 1, rows // 2, 2) if (one,) in verdict.space):
            for scale in (0.0, -50.0):
                padded = _changed(x, slice(real, None), scale), _changed(i, slice(real, None), int(scale and 2))
                if text := _differs(program, padded, (x[:real], i[:real]), verdict.outputs, (rows, 0, real)):
                    return f"{text} for {real} rows padded to {rows}, seed {seed}"
    return "" if spoken_for else "refused"


def _changed(values: Tensor, part: slice, by: float) -> Tensor:
    """A copy with other numbers in some rows."""
    copy = values.clone()
    copy[part] = copy[part] * by if copy.is_floating_point() else (copy[part] + int(by)) % 5 * int(by != 0)
    return copy


def _differs(program: Composition, mine: Any, theirs: Any, outputs: Any, part: tuple[int, int, int]) -> str:
    """Where the outputs for two batches differ in the rows from ``start`` to ``end`` of ``rows``; the second batch may
    have no more than these. Nothing if these numbers name a place beyond a table."""
    rows, start, end = part
    try:
        got, want = (program(*(one.clone() for one in values)) for values in (mine, theirs))
    except (IndexError, RuntimeError):
        return ""
    for number, (one, other, dims) in enumerate(zip(got, want, outputs, strict=True)):
        for dim in (dim for dim, axes in enumerate(dims) if axes):
            factor = one.shape[dim] // rows
            one = one.narrow(dim, start * factor, (end - start) * factor)
            other = other.narrow(dim, start * factor, other.shape[dim] - start * factor)
        if one.shape != other.shape or not torch.allclose(one.double(), other.double(), 1e-3, 1e-3, equal_nan=True):
            return f"output {number} differs"
    return ""


@pytest.mark.filterwarnings("ignore")
@given(first=st.integers(0, 1 << 40))
def test_what_is_proven_of_a_composition_is_true(first: int) -> None:
    """Real rows of a padded batch are those of the batch alone, whatever padding holds."""
    assert [text for text in map(wrong, range(first, first + 10)) if text not in ("", "refused")] == []
