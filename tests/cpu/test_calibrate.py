"""``calibrate``: real measurements of eager steps, replays, captures and bytes, as a cost model."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, eager_break
from graphdispatch.calibration.calibrate import calibrate
from graphdispatch.cli.app import main
from graphdispatch.cli.calibrate import _warn_of_noise
from graphdispatch.errors import CaptureError, ConfigError
from graphdispatch.plan import CostModel
from graphdispatch.plan.cost import Curve

from ..spy import Spy

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
EXAMPLE = {"x": torch.arange(12.0).view(4, 3)}


class Timed:
    """A callable whose Python takes a millisecond for each row by a clock of its own; a replay runs none of it."""

    def __init__(self) -> None:
        self.clock = Spy([0.0])  # no guard takes its content for state

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.clock[0] += x.shape[0] / 1e3
        return x * 2


def test_steps_are_timed_eagerly_and_by_graphs() -> None:
    """Eager steps take what the callable takes; graphs are replays, which take nothing of its Python."""
    fn = Timed()
    cost = calibrate(fn, EXAMPLE, repeats=5, clock=lambda: fn.clock[0]).cost
    assert cost.eager_ms.sizes == (1, 2, 4)
    assert cost.eager_ms.values == pytest.approx((1.0, 2.0, 4.0))
    assert cost.graphs(FULL).step_ms.values == (0.0, 0.0, 0.0)
    assert cost.source == "measured"


def test_a_median_has_the_error_of_its_quartiles() -> None:
    """Times of 1 to 5 ms have the median 3, and 0.929 times the quartiles' distance over the root of 5 as error."""
    ticks = iter(range(10_000))

    def clock() -> float:
        tick = next(ticks)
        # Calls take turns, eager and graph: the pair of reads number n of a mode lies n % 5 + 1 ms apart.
        return tick // 2 * 1.0 + (tick % 2) * (tick // 4 % 5 + 1) / 1e3

    cost = calibrate(lambda x: x + 1, EXAMPLE, sizes=[4], repeats=5, clock=clock).cost
    assert cost.eager_ms.values == pytest.approx((3.0,))
    assert cost.eager_ms.errors == pytest.approx((1.2533 / 1.349 * 2 / 5**0.5,))


def test_captures_and_bytes_are_measured() -> None:
    """Every capture took time; the pool grows with the size, and what the model adds up is what is really held."""
    layer = torch.nn.Linear(3, 256).requires_grad_(False)
    found = calibrate(lambda x: layer(x).relu(), EXAMPLE, sizes=[1, 8, 64], repeats=5)
    costs = found.cost.graphs(FULL)
    assert min(costs.capture_ms.values) > 0
    assert costs.pool_bytes.values[0] >= 256 * 4
    assert costs.pool_bytes.values[2] > 4 * costs.pool_bytes.values[1]
    assert found.held_bytes[FULL] == pytest.approx(found.expected_bytes(FULL), rel=0.05)


def test_a_mode_with_both_kinds_measures_both() -> None:
    """FULL_AND_PIECEWISE has costs of full graphs and of pieces, and the break ran in the latter alone."""
    runs = Spy()

    @eager_break
    def middle(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x + 1

    def fn(x: torch.Tensor) -> torch.Tensor:
        return middle(x * 2) * 3

    cost = calibrate(fn, EXAMPLE, sizes=[2], mode="FULL_AND_PIECEWISE", repeats=5).cost
    assert cost.full is not None
    assert cost.piecewise is not None
    few = len(runs)
    calibrate(fn, EXAMPLE, sizes=[2], mode="FULL_AND_PIECEWISE", repeats=25)
    assert len(runs) - few == few + 20 * 2  # twenty rounds more, each once eagerly and once between pieces


def test_rows_are_repeated_wherever_they_are() -> None:
    """In nests and in other dimensions; what has no batch dimension stays whole."""
    seen = Spy()

    def fn(batch: dict[str, torch.Tensor], table: torch.Tensor) -> torch.Tensor:
        seen.append((batch["ids"].shape[1], table.shape[0]))
        return batch["ids"].sum(0) + table.sum()

    example = {"batch": {"ids": torch.ones(2, 3)}, "table": torch.ones(5)}
    calibrate(fn, example, sizes=[1, 7], dynamic={"batch['ids']": 1}, repeats=5)
    assert {rows for rows, _ in seen} >= {1, 7}
    assert {whole for _, whole in seen} == {5}


def test_what_cannot_be_captured_is_not_measured() -> None:
    """The error says which size and why."""
    with pytest.raises(CaptureError, match=r"no FULL graph of 4 rows, so no measurement: .*item"):
        calibrate(lambda x: x * x.sum().item(), EXAMPLE, repeats=5)


def test_what_is_not_served_is_not_measured() -> None:
    """A call that runs eagerly for another reason than its capture would give eager's time as the graph's."""
    with pytest.raises(CaptureError, match="no graph serves 1 rows, so no measurement: eager"):
        calibrate(lambda x: x * 2, EXAMPLE, repeats=5, options=CUDAGraphOptions(verify_every=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 4}, "repeats must be an integer >= 5, got 4"),
        ({"mode": "NONE"}, "mode must have graphs to measure"),
        ({"example": {"x": 3}}, "example must hold a tensor with rows"),
        ({"example": {"x": torch.ones(0, 3)}}, "example must hold a tensor with rows"),
        ({"dynamic": {"y": 0}}, "example must hold a tensor with rows"),
        ({"sizes": [0, 4]}, "sizes"),
    ],
)
def test_a_bad_argument_is_named(changes: dict[str, Any], message: str) -> None:
    """Before anything is captured."""
    arguments: dict[str, Any] = {"example": EXAMPLE} | changes
    with pytest.raises(ConfigError, match=message):
        calibrate(lambda x: x, **arguments)


MODULE = """
import torch

def build():
    layer = torch.nn.Linear(3, 3).requires_grad_(False)
    return layer, {"input": torch.ones(4, 3)}

def with_options():
    return lambda ids, mask: ids * mask, {"ids": torch.ones(4), "mask": torch.ones(1)}, {"dynamic": {"ids": 0}}

def wrong():
    return torch.nn.Linear(3, 3)

def no_names():
    return torch.nn.Linear(3, 3), torch.ones(4, 3)

def needs(x):
    return x

def unknown_option():
    return *build(), {"bogus": 1}

def raises():
    raise ValueError("no weights\\nhere")

def misfit():
    return torch.nn.Linear(3, 3), {"input": torch.ones(4, 5)}

NUMBER = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module in the working directory, which a console script does not have on its path."""
    (tmp_path / "users_model.py").write_text(MODULE)
    (tmp_path / "broken_model.py").write_text("import nothing_of_that_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "users_model", raising=False)
    return "users_model"


@pytest.mark.parametrize("name", ["build", "with_options"])
def test_the_command_writes_the_costs(
    name: str, module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured, in a table and in a file that ``CostModel.load`` reads."""
    output = tmp_path / "cost.json"
    assert main(["calibrate", f"{module}:{name}", "--sizes", "4,1", "--repeats", "5", "--output", str(output)]) == 0
    cost = CostModel.load(output)
    assert (cost.source, cost.eager_ms.sizes) == ("measured", (1, 4))
    printed = capsys.readouterr().out
    assert "FULL graphs on cpu: medians of 5 steps" in printed
    assert "All FULL graphs together hold" in printed


def test_the_demo_s_decoder_is_measured_in_both_modes(tmp_path: Path) -> None:
    """The built-in model needs no module; its attention is a break of the pieces."""
    output = tmp_path / "cost.json"
    arguments = ["demo", "--sizes", "2", "--repeats", "5", "--mode", "full_and_piecewise", "--output", str(output)]
    assert main(["calibrate", *arguments]) == 0
    cost = CostModel.load(output)
    assert cost.full is not None
    assert cost.piecewise is not None


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("build", "MODEL must be module:function, or demo, got 'build'"),
        ("no_such_module_here:build", "there is no module no_such_module_here"),
        ("users_model:nothing", "users_model has no function nothing"),
        ("users_model:NUMBER", "users_model has no function NUMBER"),
        ("users_model.py:build", "must name a module, not its file: users_model:build"),
        ("users_model:needs", "must be a function without parameters that returns the model, got needs"),
        ("users_model:wrong", "must return (callable, keyword arguments of a call)"),
        ("users_model:no_names", "both as dicts, got (Linear, Tensor)"),
        ("users_model:unknown_option", "options must be of graphed"),
        ("users_model:raises", "MODEL 'users_model:raises': raises() raised ValueError: no weights here"),
        ("users_model:misfit", "MODEL 'users_model:misfit': measuring it raised RuntimeError: "),
    ],
)
def test_a_bad_model_is_one_line(model: str, named: str, module: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the model and what was expected of it."""
    assert main(["calibrate", model]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_an_error_of_the_user_s_module_passes_through(module: str) -> None:
    """A module that is there and fails to import is not called missing."""
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        main(["calibrate", "broken_model:build"])


def test_a_noisy_measurement_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """A step time that is uncertain by more than a tenth is followed by what to do about it."""
    _warn_of_noise([Curve.of({1: (1.0, 0.05)}), Curve.of({1: (2.0, 0.5)})], Console())
    assert "uncertain by up to 25 %" in capsys.readouterr().out
    _warn_of_noise([Curve.of({1: (1.0, 0.05)})], Console())
    assert capsys.readouterr().out == ""
