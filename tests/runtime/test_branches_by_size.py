"""Code that runs for some numbers of rows, or some lengths, alone: what it reads and writes counts like all else.

Its outputs are what the other branch gives, at first, so that no comparison of outputs can show it: by what it does
besides, or as it reads other memory or other numbers with the same bits for now. Later somebody writes one of the two.
"""

import copy
import random
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphdispatch import Dim, Reason, eager_break, graphed

from ..behaviour.cases import Box
from ..helpers import AT_ONCE, assert_same, check_calls, make

LENGTHS = (16, 16, 16, 8, 5, 9, 13, 7, 14, 15, 3)


class Model(nn.Module):
    """A layer, and ``branch`` for batches of which ``is_meant`` says so."""

    def __init__(self, branch: Callable[["Model", Tensor], Tensor], is_meant: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("extra", torch.zeros(4))
        self.config, self.calls = Box(factor=1.0), 0
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


def write(model: Model, y: Tensor) -> Tensor:
    """Writes a buffer in place."""
    model.extra += 1  # type: ignore[operator]
    return y


def write_data(model: Model, y: Tensor) -> Tensor:
    """The same, where no version of the tensor counts it."""
    model.extra.data.add_(1)
    return y


def draw(model: Model, y: Tensor) -> Tensor:
    """Draws numbers, and uses none."""
    return y + torch.rand_like(y) * 0


BRANCHES = [Model.scaled, Model.checked, count, write, write_data, draw]


def state_of(model: Model) -> Any:
    """All that the branches change."""
    return model.calls, model.extra.tolist()  # type: ignore[operator]


def check_alike(models: list[Model], served: Callable[[Tensor], Tensor], x: Tensor, seed: int) -> None:
    """One call of the first model and one of the served second: the same answer, draws and state."""
    answers = []
    for step in (models[0], served):
        torch.manual_seed(seed)
        answers.append((step(x), torch.rand(1).item()))
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


RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "shorter than the batch": lambda rows, length: length < rows,
    "much longer": lambda rows, length: length > 2 * rows,
    "as long": lambda rows, length: length == rows,
    "small": lambda rows, length: rows + length < 5,
    "large": lambda rows, length: rows * length > 25,
    "a product of six": lambda rows, length: rows * length <= 6,
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


ROWS = (5, 8, 7, 1, 6, 3, 8, 4, 2)


class Pairs(nn.Module):
    """Pairs of equal weights; ``read`` says which ones a batch reads."""

    def __init__(self, read: Callable[["Pairs", Tensor, bool], Tensor], most: int) -> None:
        super().__init__()
        weight = torch.randn(4, 4)
        self.one, self.other = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
        self.both = nn.Parameter(torch.stack((weight, weight)))
        self.halves = [self.both.detach()[0], self.both.detach()[1]]
        self.table, self.read, self.most = nn.Parameter(torch.ones(32, 4)), read, most

    def forward(self, x: Tensor) -> Tensor:
        """Rows in, rows out."""
        return self.read(self, x, x.shape[0] > self.most)


READS: dict[str, Callable[[Pairs, Tensor, bool], Tensor]] = {
    "another weight": lambda m, x, is_large: x @ (m.other if is_large else m.one),
    "a weight by its detached view": lambda m, x, is_large: x @ (m.other if is_large else m.one).detach(),
    "another copy": lambda m, x, is_large: x @ (m.other if is_large else m.one).clone(),
    "a view made before": lambda m, x, is_large: x @ m.halves[int(is_large)],
    "a part of a weight": lambda m, x, is_large: x @ m.both[int(is_large)],
    "a slice of a weight": lambda m, x, is_large: x @ m.both.view(8, 4)[4 if is_large else 0 :][:4],
    "one of several results": lambda m, x, is_large: x @ m.both.unbind()[int(is_large)],
    "weights in another order": lambda m, x, is_large: (
        torch.cat((x, x * 2), 1) @ torch.cat((m.other, m.one) if is_large else (m.one, m.other))
    ),
    "results in another order": lambda m, x, is_large: _difference(x @ m.one, x @ m.other, is_large),
    "another row of a table": lambda m, x, is_large: x + nn.functional.embedding(torch.tensor(int(is_large)), m.table),
    "rows from another one on": lambda m, x, is_large: (
        x + nn.functional.embedding(torch.arange(int(is_large), x.shape[0] + is_large), m.table)
    ),
    "a slice that follows the rows": lambda m, x, is_large: x + m.table[x.shape[0] :][:1],
    "as many as there are rows, from there on": lambda m, x, is_large: x + m.table[x.shape[0] : 2 * x.shape[0]],
    "another operator": lambda m, x, is_large: x.sin() if is_large else x.tan(),
    "another number as a tensor": lambda m, x, is_large: x * torch.tensor(3.0 if is_large else 2.0),
    "another number as an array": lambda m, x, is_large: x * torch.from_numpy(np.float32([3.0 if is_large else 2.0])),
    "a number of another type": lambda m, x, is_large: x * (3 if is_large else 2.0),
    "a tensor of many other numbers": lambda m, x, is_large: x * torch.tensor([3.0 if is_large else 2.0] * 100)[:4],
    "other columns": lambda m, x, is_large: x[:, 2:] if is_large else x[:, :2],
    "columns that were written": lambda m, x, is_large: _scaled(x, slice(2, 4) if is_large else slice(0, 2)),
    "a copy, written where others read": lambda m, x, is_large: _added(x @ m.one, m.table[0], is_large),
}


def _difference(one: Tensor, other: Tensor, is_large: bool) -> Tensor:
    return other - one if is_large else one - other


def _scaled(x: Tensor, columns: slice) -> Tensor:
    y = x.clone()
    y[:, columns].mul_(3)
    return y


def _added(y: Tensor, more: Tensor, is_large: bool) -> Tensor:
    made = y.clone() if is_large else y.view(y.shape)
    y.add_(more - 1)
    return made * 2


@pytest.mark.parametrize("most", [1, 6])
@pytest.mark.parametrize("sizes", [(8,), (2, 8)], ids=str)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_each_batch_reads_its_own_tensors(
    read: Callable[[Pairs, Tensor, bool], Tensor], sizes: tuple[int, ...], most: int
) -> None:
    """While both hold the same, and when each was written; batches of zeros tell nothing of columns."""
    model = Pairs(read, most).eval()
    step = make(model, sizes=sizes)
    for write in (None, model.other, model.one, model.both, model.table):
        if write is not None:
            write.data.copy_(torch.randn_like(write))
        for rows in ROWS * 2:
            x = torch.zeros(rows, 4) if write is None else torch.randn(rows, 4)
            assert_same(step(x), model(x), step.explain(x), rtol=1e-4, atol=1e-4)


def test_a_single_row_is_padded_where_torch_makes_a_view_for_it() -> None:
    """Where there is one row, ``reshape`` copies nothing; that is no other path."""
    model = nn.Linear(4, 4)
    step = make(lambda x: model(x.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4).clone().view(-1, 4)), sizes=(8,))
    for rows in (8, 8, 5, 1, 1, 1):
        step(torch.randn(rows, 4))
    assert step.last_decision.reason is Reason.PADDED, step.last_decision


def test_a_number_that_is_compared_by_identity_is_seen_in_the_code() -> None:
    """No number made of sizes is the plain number itself, so that the run would see no branch."""
    weights: dict[bool, Tensor] = {True: torch.ones(4), False: torch.ones(4)}
    names: dict[str, Callable[[Tensor], Tensor]] = {}
    code = "def first(x): return x * weights[x.shape[0] is 3]\ndef second(x): return x * weights[3 is len(x)]"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        exec(compile(code, "by_identity.py", "exec"), {"weights": weights}, names)
    for line, fn in enumerate(names.values(), 1):
        step = make(fn, sizes=(8,))
        for rows in (8, 8, 5, 3, 5):
            assert_same(step(torch.ones(rows, 4)), fn(torch.ones(rows, 4)))
        assert f"by identity (is), by_identity.py:{line}" in step.explain(torch.ones(5, 4))


@pytest.mark.parametrize(
    "is_plain",
    [
        lambda n: type(n) is int,
        lambda n: type(n) in (int, float),
        lambda n: type(n) == int,  # noqa: E721
        lambda n: not isinstance(n, torch.SymInt),
        lambda n: not isinstance(n, torch.types.py_sym_types),
    ],
    ids=["is", "in", "equal", "no symbol", "none of them"],
)
def test_code_that_asks_for_the_type_of_a_size_is_not_padded(is_plain: Callable[[Any], bool]) -> None:
    """In the run of all batches a size is of another type, so that the run would not come to the branch."""

    def fn(x: Tensor) -> Tensor:
        n = x.shape[0]
        return x + 1 if is_plain(n) and n == 3 else x * 2

    step = make(fn, sizes=(8,))
    for rows in (8, 8, 5, 3, 5, 3):
        x = torch.randn(rows, 4)
        assert_same(step(x), fn(x))
    assert "may ask for the type of a number, test_branches_by_size.py" in step.explain(torch.ones(5, 4))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_view_changed_in_place_is_the_same_tensor(kind: type[nn.Module]) -> None:
    """Recurrent networks turn their result (``transpose_``), for which other lengths of rows stand in memory."""
    cells = kind(8, 8, batch_first=True).eval()
    step = graphed(lambda x: cells(x)[0][:, -1], dynamic={"x": 0}, sizes=(4, 16))
    step.prewarm(torch.randn(16, 3, 8))
    for rows in (16, 4, 5, 13, 3, 2):
        x = torch.randn(rows, 3, 8)
        torch.testing.assert_close(step(x), cells(x)[0][:, -1])
    assert step.stats.hits == 6
