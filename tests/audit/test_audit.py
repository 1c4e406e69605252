"""``audit``: what graphs would do with a callable, without a trace of the audit."""

import json
import random
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import graphdispatch as gd
from graphdispatch.backends.cpu.backend import CPUGraph

from ..helpers import Lazy

X = torch.arange(12.0).view(4, 3)


class Doubled(nn.Module):
    """Rows are independent; the state is a counter in place and a buffer that is only read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(2.0))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, plus: float = 0.0) -> torch.Tensor:
        """Doubles, and counts."""
        self.calls += 1
        return x * self.factor + plus

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        """Another method."""
        return x * self.factor


class Checked(nn.Module):
    """Keeps scores within bounds."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        """Reads the largest score back to the host, and selects by a mask."""
        largest = scores.abs().max().item()
        negative = scores[scores < 0]
        bound = 1e4 if largest > 1e4 and len(negative) else largest
        return scores.clamp(-bound, bound)


def texts(found: Any) -> list[str]:
    """What was found, in a few words each."""
    return [one.what for one in found]


CALLABLES: dict[str, Callable[..., Any]] = {
    "module": Doubled(),
    "method": Doubled().twice,
    "function": lambda x: x * 2,
    "partial": partial(Doubled(), plus=1.0),
    "graphed": gd.graphed(Doubled(), dynamic={"x": 0}),
    "builtin": torch.relu,
}


@pytest.mark.parametrize("kind", CALLABLES)
def test_any_callable(kind: str) -> None:
    """It is captured at the powers of two up to the example's rows, and rows are found independent."""
    found = gd.audit(CALLABLES[kind], (X,))
    assert found.capturable
    assert found.sizes == (1, 2, 4)
    assert found.independence.verdict == "independent"
    assert found.failures == found.forbidden == found.rebinds == ()
    assert found.breaks is None


def test_arguments_by_position_and_by_name() -> None:
    """One tensor, a tuple, a mapping and keyword arguments mean the same; a constant is named."""
    model = Doubled()
    given = [gd.audit(model, X, {"plus": 1.5}), gd.audit(model, (X, 1.5)), gd.audit(model, {"x": X, "plus": 1.5})]
    assert given[0] == given[1] == given[2]
    assert texts(given[0].frozen) == ["argument plus = 1.5"]


def test_rules_are_those_of_graphed() -> None:
    """Batch dimensions, pad rules, nests, static tensors, sizes and modes."""

    def fn(batch: dict[str, torch.Tensor], table: torch.Tensor) -> torch.Tensor:
        return (1 / batch["x"] + table).t()

    args = {"x": X.t() + 1}, torch.ones(3, 1)
    rules: dict[str, Any] = {"dynamic": {"batch['x']": 1}, "pad": {"batch['x']": 1.0}, "static": "table"}
    found = gd.audit(fn, args, sizes=[3, 5], **rules)
    assert found.capturable
    assert found.sizes == (3, 5)
    for dynamic, message in (
        ({"y": 0}, "dynamic names 'y'"),
        ({"batch['x']": 2}, "out of range"),
        (0, "must map"),
    ):
        with pytest.raises(gd.ConfigError, match=message):
            gd.audit(fn, args, dynamic=dynamic)
    with pytest.raises(gd.ConfigError, match="args must be a tuple"):
        gd.audit(fn, 3)


def test_batch_dimensions_are_guessed() -> None:
    """Dimension 0 of the first tensor, and of those that are as long; others are copied whole."""
    found = gd.audit(lambda x, y, table: x + y + table.sum(), (X, X, torch.ones(2, 3)))
    assert found.dynamic == {"x": 0, "y": 0}
    assert found.capturable


def test_a_call_without_arguments() -> None:
    """All that it reads and writes is state, which is named by its shape and left as it was."""
    given, answer = X.clone(), torch.zeros(4, 3)

    def step() -> torch.Tensor:
        return answer.copy_(given * 2)

    found = gd.audit(step)
    assert found.capturable
    assert [one.name for one in found.writes] == ["a tensor of shape (4, 3)"]
    assert "step on cpu\ncapturable: one FULL graph\n" in str(found)
    assert answer.sum().item() == 0


def test_everything_that_cuda_forbids_is_listed() -> None:
    """All of it in one run, with line, module and number of times: host reads past the dispatcher, too."""

    class Reader(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                scale = x.sum().item()
            scale += x.numpy().mean() + np.asarray(x).sum() + sum(x.flatten().tolist())
            scale += x.data_ptr() * 0 + torch.utils.dlpack.from_dlpack(x.detach()).sum() * 0
            picked = x[x > 3].sum() + x.nonzero().sum() + torch.unique(x).sum()
            return x * scale + picked + x.cpu().sum() + x.to("cpu").sum() + x.to("cpu:0").sum()

    model = nn.Sequential(nn.Identity(), Reader())
    found = gd.audit(model, X)
    assert not found.capturable
    kinds = ["_local_scalar_dense", "numpy", "__array__", "tolist", "data_ptr", "dlpack", "index", "nonzero", "unique"]
    names = " ".join(texts(found.forbidden))
    assert [kind for kind in [*kinds, "Tensor.cpu", "Tensor.to"] if kind not in names] == []
    assert [one.times for one in found.forbidden if one.what == "Tensor.to"] == [2]
    item = found.forbidden[0]
    assert (item.times, item.module, item.where.split(": ")[1]) == (2, "1", "scale = x.sum().item()")
    assert found.breaks.modules == ("1",)


def test_a_break_at_the_least_set_of_modules() -> None:
    """The innermost modules that cannot be captured, and what then lies in graphs."""

    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (1 if x.max().item() > -9 else 2)

    inner = nn.Sequential(nn.ReLU(), Reads())
    model = nn.Sequential(nn.Linear(3, 3), inner, nn.ReLU(), nn.Tanh(), Reads(), nn.Tanh())
    found = gd.audit(model, X)
    assert found.breaks.modules == ("1.1", "4")
    assert found.breaks.share == pytest.approx(1 - 6 / 11)
    assert found.independence.verdict == "unknown"
    assert found.independence.text.startswith("item() takes data to the host, test_audit.py:")
    assert "45.5 % of the operators then lie in graphs: mark these by eager_break, and use mode PIECEWISE" in str(found)
    for module in (inner[1], model[4]):
        gd.eager_break(module)
    found = gd.audit(model, X, mode="PIECEWISE")
    assert (found.capturable, found.independence.verdict) == (True, "unknown")  # the breaks read what nobody follows


def test_marked_breaks_may_do_what_they_like() -> None:
    """In PIECEWISE mode, what a marked part does is neither forbidden nor in a graph; in FULL mode it is both."""
    middle = gd.eager_break(lambda x: x * x.sum().item())

    def fn(x: torch.Tensor) -> torch.Tensor:
        return middle(x + 1) + 1

    full, pieces = gd.audit(fn, X), gd.audit(fn, X, mode="PIECEWISE", sizes=[4])
    assert (full.capturable, len(full.forbidden)) == (False, 1)
    assert pieces.forbidden == ()
    assert full.breaks.modules == ()
    assert "breaks: in no module" in str(full)


def test_state_is_named() -> None:
    """Weights read, buffers written and how much of them, arguments written."""

    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("cache", torch.zeros(10, 3))

        def forward(self, x: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            self.cache[slots] = self.layer(x)
            out.copy_(x)
            return self.cache[slots] + 1

    rows = torch.arange(4)
    found = gd.audit(Cache(), (X, rows, torch.empty(4, 3)), pad={"slots": 9})
    assert [(one.name, one.nbytes) for one in found.reads] == [("parameters", 48), ("buffers", 120)]
    writes = [(one.name, one.touched, one.nbytes) for one in found.writes]
    assert writes == [("Cache.cache", 48, 120), ("argument out", 48, 48)]


def test_rebound_state_is_found_and_frozen_values_are_shown() -> None:
    """A counter in Python, with the value that a graph would keep, and random numbers of Python."""

    class Counts(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * self.calls + random.random()

    model = Counts()
    found = gd.audit(model, X)
    assert not found.capturable
    assert len(found.rebinds) >= 1
    assert any("gets 2 in one call and 3 in the next" in one.why for one in found.frozen)
    assert any("random" in one.what for one in found.frozen)
    assert model.calls == 0
    assert "calls" not in vars(model)


def test_literals_and_paths_are_frozen() -> None:
    """A tensor of Python values, and a branch that two equal calls take differently."""
    turns = [0]

    def fn(x: torch.Tensor) -> torch.Tensor:
        turns[0] += 1
        return x + torch.tensor([1.0, 2.0, 3.0]) if turns[0] % 2 else x.relu() + 1

    found = gd.audit(fn, X)
    assert any("the path through the code" in one.what for one in found.frozen)
    assert turns == [0]
    found = gd.audit(lambda x: x + torch.tensor([1.0, 2.0, 3.0]), X)
    assert texts(found.frozen) == ["a tensor made from Python values"]


def test_custom_operators_in_python_are_frozen_and_looked_into() -> None:
    """A graph keeps what one launched; what CUDA forbids is found inside, too."""

    @torch.library.custom_op("audited::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * x.max().item() * float(x.numpy()[0, 0] > -1)

    @torch.library.custom_op("audited::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    found = gd.audit(lambda x: scaled(x), X)
    assert texts(found.forbidden) == ["aten._local_scalar_dense.default", "Tensor.numpy"]
    found = gd.audit(lambda x: doubled(x), X)
    assert texts(found.frozen) == ["audited.doubled.default"]
    assert found.capturable


def test_operators_that_take_functions_are_listed() -> None:
    """What they run is not seen, and the audit goes on."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        done = torch.ops.higher_order.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
        return done[0] if isinstance(done, (tuple, list)) else done + x.max().item()

    assert len(gd.audit(fn, X).forbidden) >= 1


def test_no_batch_dimension_and_one_row() -> None:
    """Nothing to pad is said so; one row is tried with another."""
    assert gd.audit(lambda x: x + 1, X, dynamic={}).independence.verdict == "no batch dimension"
    assert gd.audit(lambda x: x + 1, X[:1]).sizes == (1, 2)


def test_nothing_is_left_behind() -> None:
    """Weights, buffers, arguments, attributes, containers, random generators and marks are as before."""

    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.seen = nn.Dropout(0.5), [1]
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: torch.Tensor, log: dict[str, Any]) -> torch.Tensor:
            self.steps += 1
            self.table = x.shape
            self.seen.append(2)
            log["latest"] = x
            x.mul_(2)
            return self.drop(x) * np.random.rand() * random.random() * x.sum().item()

    model, log, x = Leaves(), {"first": X}, X.clone()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    before = set(vars(model)), set(vars(model.drop))
    gd.audit(model, (x, log))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]  # type: ignore[union-attr]
    assert (set(vars(model)), set(vars(model.drop))) == before
    assert (model.steps.item(), model.seen, list(log)) == (0, [1], ["first"])
    assert torch.equal(x, X)


def test_a_table_that_the_first_call_makes_is_no_hindrance() -> None:
    """Graphs are captured as behind that call; the table is gone when the audit ends."""
    model = Lazy()
    assert gd.audit(model, X).capturable
    assert model.table is None


def test_an_error_of_the_call_passes_through() -> None:
    """Nothing can be said of a call that fails; what it did before is undone."""
    done = torch.zeros(())

    def fn(x: torch.Tensor) -> torch.Tensor:
        done.add_(1)
        raise LookupError("no such row")

    with pytest.raises(LookupError, match="no such row"):
        gd.audit(fn, X)
    assert done.item() == 0


STATE = torch.zeros(1024)
FAILURES: dict[str, tuple[Callable[..., Any], Any, dict[str, Any], str]] = {
    "rows": (lambda x: x.view(2, 2, 3).sum((0, 1)), X, {}, "raises RuntimeError for the example cut to this size"),
    "argument": (lambda x, config: x, (X, object()), {}, "argument 'config'"),
    "state": (lambda x: x + STATE.add_(1)[0], X, {"state_limit_bytes": 1024}, "state_limit_bytes"),
    "budget": (lambda x: x * torch.arange(3.0 * len(x)).view(-1, 3), X, {"memory_budget_bytes": 200}, "raise max_cach"),
}
"""By what is at fault: a callable, its arguments and options, and what is said."""


@pytest.mark.parametrize("name", FAILURES)
def test_what_cannot_be_captured_is_part_of_the_result(name: str) -> None:
    """The call itself went well: an error at other rows, an argument that no graph can take, and state that is too much
    to save, before which the run stops. The largest graph has room in a budget, and the next one has none."""
    fn, args, options, message = FAILURES[name]
    found = gd.audit(fn, args, options=gd.CUDAGraphOptions(**options))
    assert (found.capturable, found.sizes) == (False, (4,) if name in ("budget", "rows") else ())
    assert message in found.failures[0]
    assert not STATE.any()


def test_the_text_and_the_plain_data() -> None:
    """The report has each finding under the user's line, and JSON holds the same; the ``repr`` is one line."""
    found = gd.audit(nn.Sequential(OrderedDict(first=nn.Linear(8, 8), check=Checked())), torch.randn(4, 8))
    lines = str(found).splitlines()
    where = found.forbidden[0].where.rpartition("tests")[2]
    assert f"  tests{where}" in lines
    assert any(one.startswith("    aten._local_scalar_dense.default in check reads a value back") for one in lines)
    assert [one for one in lines if one.startswith(("breaks", "reads"))] == ["breaks: check", "reads:"]
    assert json.loads(json.dumps(found.to_dict()))["forbidden"][0]["module"] == "check"
    assert repr(found) == "<Audit Sequential: NOT capturable, 7 operators, 2 that CUDA forbids>"


def _centred(x: torch.Tensor) -> torch.Tensor:
    y = x - x.mean(0)
    return y * y.abs().max().item()


def _inverse(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.qr(x[:, None] * torch.eye(3))[1]


@pytest.mark.parametrize(
    ("fn", "verdict", "text"),
    [
        (torch.nn.Linear(3, 3), "independent", "$"),
        (_centred, "dependent", r"rows mix in aten::mean, test_audit.py:\d+"),
        (
            _inverse,
            "unknown",
            r"no rule for aten::linalg_qr, called at test_audit.py:\d+; give row_rule\('aten::linalg_qr'",
        ),
    ],
)
@pytest.mark.parametrize("rows", [3, 4])
def test_rows_are_followed_without_a_graph_that_pads(fn: Any, verdict: str, text: str, rows: int) -> None:
    """Where no graph is captured, or each number of rows has a size: operator and line are named, with the remedy."""
    found = gd.audit(fn, torch.randn(rows, 3)).independence
    assert found.verdict == verdict
    assert re.match(text, found.text), found.text


def test_a_call_that_takes_no_other_rows_is_untested() -> None:
    """It says what the call raises for a few rows."""
    found = gd.audit(lambda x: x + torch.ones(3, 3) * x.sum().item(), torch.randn(3, 3)).independence
    assert found.verdict == "untested"
    assert "for a few rows the call raises RuntimeError" in found.text


def test_what_the_driver_holds_of_graphs_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is all that a graph holds for itself."""
    for name in ("nbytes", "driver_nbytes"):
        monkeypatch.setattr(CPUGraph, name, property(lambda graph: 20))
    found = gd.audit(Doubled().twice, (X,))
    assert found.memory["graphs"] == 20 * len(found.sizes) > 0


def test_an_independent_model_has_one_line_for_its_rows() -> None:
    """There is nothing to say besides."""
    lines = str(gd.audit(torch.nn.ReLU(), X)).splitlines()
    assert lines[lines.index("rows: independent") + 1].startswith("memory: ")
