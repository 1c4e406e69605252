"""Code that runs for some numbers of rows, or some lengths, alone: what it reads and writes counts like all else.

Its outputs are what the other branch gives, at first, so that no comparison of outputs can show it.
"""

import copy
import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphdispatch import Dim, eager_break, graphed

from ..behaviour.cases import Box
from ..helpers import AT_ONCE, check_calls

LENGTHS = (16, 16, 16, 8, 5, 9, 13, 7, 14, 15, 3)


class Model(nn.Module):
    """A layer, and ``branch`` for batches of which ``is_meant`` says so."""

    def __init__(self, branch: Callable[["Model", Tensor], Tensor], is_meant: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("extra", torch.zeros(4))
        self.register_buffer("other", torch.zeros(4))
        self.config, self.seen, self.calls = Box(factor=1.0), list[int](), 0
        self.random, self.sums = random.Random(0), hashlib.sha256()
        self.branch, self.is_meant = branch, is_meant

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.branch(self, y) if self.is_meant(x) else y

    def scaled(self, y: Tensor) -> Tensor:
        """A method that runs in the branch alone."""
        return y * self.config.factor

    def checked(self, y: Tensor) -> Tensor:
        """As ``scaled``, but with the same operators as outside of the branch."""
        return y if self.config.factor == 1.0 else y * self.config.factor


def count(model: Model, y: Tensor) -> Tensor:
    """Rebinds a number."""
    model.calls += 1
    return y


def append(model: Model, y: Tensor) -> Tensor:
    """Appends to a list."""
    model.seen.append(len(y))
    return y


def write(model: Model, y: Tensor) -> Tensor:
    """Writes a buffer in place."""
    model.extra += 1  # type: ignore[operator]
    return y


def write_data(model: Model, y: Tensor) -> Tensor:
    """The same, where no version of the tensor counts it."""
    model.extra.data.add_(1)  # type: ignore[operator, union-attr]
    return y


def swap(model: Model, y: Tensor) -> Tensor:
    """Writes one of two buffers, and lets the other one be next."""
    model.extra.add_(1)  # type: ignore[operator]
    model.extra, model.other = model.other, model.extra
    return y + model.extra * 0


def draw(model: Model, y: Tensor) -> Tensor:
    """Draws numbers, and uses none."""
    return y + torch.rand_like(y) * 0


def draw_python(model: Model, y: Tensor) -> Tensor:
    """Draws from a generator of Python's."""
    model.random.random()
    return y


def hash_more(model: Model, y: Tensor) -> Tensor:
    """Has an effect in an object of compiled code."""
    model.sums.update(b"1")
    return y


BRANCHES = [Model.scaled, Model.checked, count, append, write, write_data, swap, draw, draw_python, hash_more]


def state_of(model: Model) -> Any:
    """All that the branches change."""
    buffers = model.extra.tolist(), model.other.tolist()  # type: ignore[operator]
    return model.calls, model.seen, buffers, model.random.getstate(), model.sums.digest()


def check_alike(models: list[Model], served: Callable[[Tensor], Tensor], x: Tensor, seed: int) -> None:
    """One call of the first model and one of the served second: the same answer or error, draws and state."""
    answers: list[Any] = []
    for step in (models[0], served):
        torch.manual_seed(seed)
        try:
            answers.append((step(x), torch.rand(1).item()))
        except ValueError as error:
            answers.append((torch.zeros(1), str(error)))
    assert torch.allclose(answers[0][0], answers[1][0], atol=1e-6), seed
    assert answers[0][1] == answers[1][1], seed
    assert state_of(models[0]) == state_of(models[1]), seed


def check_branch(
    branch: Callable[[Model, Tensor], Tensor],
    is_meant: Callable[[Tensor], bool],
    shapes: Sequence[tuple[int, ...]],
    changed_at: int,
    prewarms: tuple[int, ...] | None = None,
    **how: Any,
) -> None:
    """Calls of these shapes are as eager's; what the branch reads changes before the call ``changed_at``.

    ``prewarms`` is the shape of an example from which graphs are captured ahead.
    """
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model(branch, is_meant).eval())
    served = graphed(models[1], **how)
    if prewarms is not None:
        served.prewarm(torch.zeros(prewarms))
    generator = torch.Generator().manual_seed(1)
    for number, shape in enumerate(shapes):
        x = torch.randn(shape, generator=generator)
        if number == changed_at:
            for model in models:
                model.config.factor = 2.0
                model.extra.add_(0.5)  # type: ignore[operator]
        check_alike(models, served, x, number)


class Held:
    """What the conditions of ``WITHIN`` change."""

    def __init__(self) -> None:
        self.python, self.numpy = random.Random(0), np.random.default_rng(0)
        self.generator = torch.Generator().manual_seed(0)
        self.queue, self.array = deque([1.0, 2.0]), np.ones(2)
        self.mean, self.square = torch.zeros(4), torch.arange(4.0).view(2, 2)
        self.kind = type("Kind", (), {"table": torch.zeros(2)})

    def state(self) -> str:
        """All of it, as a text."""
        drawn = self.python.getstate(), self.numpy.bit_generator.state, self.generator.get_state().tolist()
        return f"{drawn} {self.queue} {self.array} {self.mean} {self.square} {self.kind.table}"  # type: ignore[attr-defined]


WITHIN: dict[str, Callable[[Held, Tensor], object]] = {
    "python": lambda held, x: held.python.random() if len(x) == 2 else x,
    "numpy": lambda held, x: held.numpy.random() if len(x) == 2 else x,
    "torch": lambda held, x: torch.rand(1, generator=held.generator) if len(x) == 2 else x,
    "deque": lambda held, x: held.queue.rotate(1) if len(x) == 2 else x,
    "array": lambda held, x: np.negative(held.array, out=held.array) if len(x) == 2 else x,
    "statistics": lambda held, x: (
        torch.batch_norm(x, None, None, held.mean, torch.ones(4), True, 0.1, 1e-5, False) if len(x) == 2 else x
    ),
    "class": lambda held, x: held.kind.table.add_(1) if len(x) == 2 else x,  # type: ignore[attr-defined]
    "view": lambda held, x: held.square.t_() if len(x) == 2 else x,
    "attribute": lambda held, x: setattr(x, "seen", True) if len(x) == 2 else x,
}


@pytest.mark.parametrize("name", WITHIN)
def test_a_condition_within_known_code(name: str) -> None:
    """No new code runs for two rows, and no name tells that state changes."""
    two = [Held(), Held()]
    steps = [lambda x, held=held: (WITHIN[name](held, x), x * 2)[1] for held in two]
    served = graphed(steps[1], dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    for rows in (4, 4, 4, 3, 2, 2, 2, 4, 4):
        batches = torch.ones(rows, 4), torch.ones(rows, 4)
        answers = [step(x) for step, x in zip((steps[0], served), batches, strict=True)]
        assert torch.equal(*answers)
        assert two[0].state() == two[1].state()
        assert vars(batches[0]) == vars(batches[1])


class Where(NamedTuple):
    """Which batches take the branch, along which dimension; the sizes of graphs; captured ahead or not."""

    is_meant: Callable[[int], bool]
    sizes: list[int]
    dim: int = 0
    prewarms: bool = False


WHERE = {
    "five rows": Where(lambda n: n == 5, [16]),
    "full batches": Where(lambda n: n == 16, [16]),
    "a length": Where(lambda n: n == 9, [16], dim=1),
    "the longest but one": Where(lambda n: n == 15, [16], dim=1),
    "few rows, ahead": Where(lambda n: n <= 6, [8, 16], prewarms=True),
    "many rows of several sizes": Where(lambda n: n > 6, [4, 8, 16]),
    "odd numbers of rows, ahead": Where(lambda n: n % 2 == 1, [7, 14], prewarms=True),
}


@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
@pytest.mark.parametrize("branch", BRANCHES, ids=lambda branch: branch.__name__)
def test_a_branch_of_some_sizes(branch: Callable[[Model, Tensor], Tensor], where: Where) -> None:
    """Outputs, state and random numbers are eager's, also after what the branch reads was changed."""
    rules: dict[int, Any] = {0: "batch", 1: Dim("seq", sizes=where.sizes)} if where.dim else {0: "batch"}
    shapes = [(3, n, 4) if where.dim else (n, 3, 4) for n in LENGTHS * 4]
    how = {"dynamic": {"x": rules}, "sizes": [4] if where.dim else where.sizes}
    prewarms = (max(where.sizes), 3, 4) if where.prewarms else None
    check_branch(branch, lambda x: where.is_meant(x.shape[where.dim]), shapes, len(LENGTHS) * 2, prewarms, **how)


def test_batches_beside_a_branch_are_served() -> None:
    """Those for which nothing stands against it."""
    model = Model(append, lambda x: len(x) > 6)
    served = graphed(model, dynamic={"x": 0}, sizes=(4, 8), options=AT_ONCE)
    check_calls(served, *(torch.randn(rows, 4) for rows in (4, 4, 4, 3, 3, 4, 3)))
    assert served.stats.hits >= 3


RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "shorter than the batch": lambda rows, length: length < rows,
    "much longer": lambda rows, length: length > 2 * rows,
    "as long": lambda rows, length: length == rows,
    "small": lambda rows, length: rows + length < 5,
    "large": lambda rows, length: rows * length > 25,
}


@pytest.mark.parametrize("prewarms", [False, True])
@pytest.mark.parametrize("first", [(1, 7), (3, 5), (4, 8)], ids=str)
@pytest.mark.parametrize("relation", RELATIONS.values(), ids=RELATIONS)
def test_a_branch_on_rows_and_length(
    relation: Callable[[int, int], bool], first: tuple[int, int], prewarms: bool
) -> None:
    """Whichever calls come first, no answer is that of the other branch."""

    def fn(x: Tensor) -> Tensor:
        return x * 3 if relation(*x.shape[:2]) else x * 2

    served = graphed(fn, dynamic={"x": {0: "batch", 1: Dim("seq", sizes=[8])}}, sizes=[4], options=AT_ONCE)
    if prewarms:
        served.prewarm(torch.randn(*first, 3))
    chance = random.Random(0)
    shapes = [first] * 3 + [(chance.randint(1, 4), chance.randint(1, 8)) for _ in range(60)]
    check_calls(served, *(torch.randn(*shape, 3) for shape in shapes))


def refuse(model: Model, y: Tensor) -> Tensor:
    """Raises."""
    raise ValueError(f"too few: {y.shape}")


SHAPES = ((3, 7), (3, 6), (4, 8), (2, 5), (3, 5), (2, 3), (1, 2), (3, 2), (1, 3), (1, 1), (2, 4), (1, 6), (1, 7))


@pytest.mark.parametrize("branch", [*BRANCHES, refuse], ids=lambda branch: branch.__name__)
def test_a_branch_below_some_product(branch: Callable[[Model, Tensor], Tensor]) -> None:
    """No extent alone tells of it, and the smallest batch of all may be one that cannot be compared beforehand."""
    how = {"dynamic": {"x": {0: "batch", 1: Dim("seq", sizes=[8])}}, "sizes": [4], "options": AT_ONCE}
    shapes = [(*shape, 4) for shape in SHAPES * 3]
    check_branch(branch, lambda x: x.shape[0] * x.shape[1] <= 6, shapes, len(SHAPES), **how)


class Experts(nn.Module):
    """Each batch uses the weight that its first number chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(4, 4) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[int(x[0, 0].abs() * 4) % 6]


TABLE = torch.randn(8, 4)


@pytest.mark.parametrize(
    "chosen",
    [
        lambda n: TABLE[: min(n, 4)],
        lambda n: TABLE[: 1 if n == 1 else 4],
        lambda n: torch.ones(1 if n == 1 else 4, 4),
        lambda n: TABLE[torch.arange(1 if n == 1 else 4)],
        lambda n: TABLE[:1].repeat(2 if n == 1 else 8, 1),
    ],
    ids=["smaller", "slice", "ones", "places", "copies"],
)
def test_a_single_row_of_other_sizes_is_none_of_several(chosen: Callable[[int], Tensor]) -> None:
    """A size of one may be a size that follows the rows, or another one: that it is a multiple says nothing."""
    step = graphed(lambda x: x * chosen(x.shape[0]).sum(0), dynamic={"x": 0}, sizes=[4, 8], options=AT_ONCE)
    check_calls(step, *(torch.zeros(rows, 4) for rows in (5, 3, 8, 1, 7, 2, 6, 4)))
    check_calls(step, *(torch.randn(rows, 4) for rows in (5, 3, 8, 1, 4, 2, 1)), rtol=1e-4, atol=1e-5)


def test_memory_that_a_break_chooses_is_no_branch() -> None:
    """What runs in a break may use other memory for each batch."""
    model = nn.Sequential(nn.Linear(4, 4), Experts(), nn.Linear(4, 4)).eval()
    plain = copy.deepcopy(model)
    eager_break(model[1])
    served = graphed(model, dynamic={"input": 0}, sizes=[4], mode="PIECEWISE")
    check_calls(served, *(torch.randn(4, 4) for _ in range(24)), fn=plain, rtol=1e-5, atol=1e-6)
    assert served.stats.hits > 12


COUNTED = torch.zeros(1)
CALLS = 0


class Counting(nn.Module):
    """Counts batches of five rows in variables of its module."""

    def forward(self, x: Tensor) -> Tensor:
        global CALLS  # noqa: PLW0603 (what it tests)
        if x.shape[0] == 5:
            COUNTED.add_(1)
            CALLS += 1
        return x * 2


def test_a_branch_that_writes_variables_of_its_module() -> None:
    """A tensor and a number count each such call once."""
    served = graphed(Counting().eval(), dynamic={"x": 0}, sizes=[8])
    before = CALLS - COUNTED.item()
    for rows in (8, 8, 8, 7, 7, 5, 5, 5, 5):
        served(torch.randn(rows, 3))
    assert CALLS - COUNTED.item() == before
    assert COUNTED.item() == 4
