"""The verdict of a GPU run, over plain data: which bars a run reaches, how parts end, the table and the exit code."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("benchmarks", reason="the benchmarks are not part of the source distribution")

from benchmarks.gpu.bars import BARS, Bar, Outcome, Row, judge

ROOT = Path(__file__).resolve().parents[2]
MISSED, REACHED, NOT_MEASURED = Outcome.MISSED, Outcome.REACHED, Outcome.NOT_MEASURED


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script behind ``make gpu-all``."""
    spec = importlib.util.spec_from_file_location("gpu_all", ROOT / "make" / "gpu_all.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("least", "most", "value", "reached"),
    [
        (0.75, None, 0.75, True),
        (0.75, None, 0.7499, False),
        (None, 14.0, 14.0, True),
        (None, 14.0, 14.01, False),
        (None, None, 0.0, True),
        (0.75, None, float("nan"), False),
        (None, 14.0, float("nan"), False),
        (None, None, float("nan"), False),
    ],
)
def test_a_bar_is_reached_within_its_limits(
    least: float | None, most: float | None, value: float, reached: bool
) -> None:
    """The limit itself reaches it; what is not a number does not, even without a limit."""
    assert Bar("*", "*", "figure", least, most).is_reached_by(value) is reached


@pytest.mark.parametrize("section", BARS)
def test_what_is_not_measured_is_not_reached(section: str) -> None:
    """Each section has bars, and without a row none is reached."""
    found = judge(section, [])
    assert len(found) == len(BARS[section]) > 0
    assert {verdict.outcome for verdict in found} == {NOT_MEASURED}
    assert all(str(verdict).startswith("bar not measured: ") for verdict in found)


def test_a_side_that_raises_is_a_miss() -> None:
    """Even a side without a bar of its own."""
    row = Row("4 inputs, 300 parameters", "eager", {"error": "RuntimeError: out of memory"})
    (verdict,) = (v for v in judge("overhead", [row]) if v.outcome is MISSED)
    assert str(verdict) == "bar missed: 4 inputs, 300 parameters, eager: no error: RuntimeError: out of memory"


REACHED_LINE, MISSED_LINE = "bar reached: a: 1", "bar missed: b: 0"
UNMEASURED_LINE = "bar not measured: c: no row"


@pytest.mark.parametrize(
    ("name", "code", "lines", "result"),
    [
        ("decode", 0, [REACHED_LINE], "passed"),
        ("decode", 3, [REACHED_LINE, MISSED_LINE], "bars missed"),
        ("decode", 0, [REACHED_LINE, MISSED_LINE], "bars missed"),
        ("decode", 0, [REACHED_LINE, UNMEASURED_LINE], "bars missed"),
        ("decode", 1, [REACHED_LINE], "failed with 1"),
        ("decode", 0, [], "failed with 0, without a word on its bars"),
        ("decode", -11, ["Segmentation fault"], "failed with -11, without a word on its bars"),
        ("decode", None, [REACHED_LINE], "cut off"),
        ("tests", 0, ["40 passed", "bar missed: what a test prints"], "passed"),
        ("tests", 1, ["1 failed"], "failed with 1"),
        ("tests", None, [], "cut off"),
    ],
)
def test_how_a_part_ends(script: ModuleType, name: str, code: int | None, lines: list[str], result: str) -> None:
    """It passes only with exit code 0 and, if it has bars, with all of them reached; the whole has that exit code."""
    ended = script.ended_with(name, code, 2.0, lines)
    assert script.result(ended) == result
    assert script.passed(ended) is (result == "passed")
    good = script.ended_with("tests", 0, 1.0, ["3 passed"])
    assert script.exit_code([good, ended]) == (0 if result == "passed" else 1)
    assert result in script.table([ended])


def test_a_part_that_takes_too_long_is_ended_with_its_processes(script: ModuleType, tmp_path: Path) -> None:
    """A fifo that the process it has started holds open comes to its end, so that one is gone, too."""
    os.mkfifo(fifo := tmp_path / "fifo")
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    command = ["sh", "-c", f"(echo here; exec sleep 600) > '{fifo}' & wait"]
    with (tmp_path / "log").open("wb") as log:
        assert script.within(command, 1, dict(os.environ), log.fileno()) is None
        assert script.within(["sh", "-c", "exit 7"], 60, dict(os.environ), log.fileno()) == 7
    os.set_blocking(reader, True)
    assert os.read(reader, 5) == b"here\n"
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_whole_run_fails_where_a_part_does(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The summary names each part and its bars, a crash and a missed bar among them; parts are chosen by name."""
    printed = "print('bar reached: a: 1'); print('bar missed: b: 0'); raise SystemExit(3)"
    parts = {
        "decode": script.Part(60, (sys.executable, "-c", printed), has_bars=True),
        "tests": script.Part(60, (sys.executable, "-c", "import os; os.abort()")),
        "rules": script.Part(60, (sys.executable, "-c", "print('12 rules')")),
    }
    monkeypatch.setattr(script, "PARTS", parts)
    codes = {}
    for chosen in (["decode", "tests", "rules"], ["rules"]):
        monkeypatch.setattr(sys, "argv", ["gpu_all.py", "--out", str(tmp_path / chosen[0]), "--parts", *chosen])
        with pytest.raises(SystemExit) as stop:
            script.main()
        codes[chosen[0]] = stop.value.code
    assert codes == {"decode": 1, "rules": 0}
    assert script.exit_code([]) == 1
    summary = (tmp_path / "decode" / "summary.txt").read_text()
    for text in ("decode: bars missed", "  bar missed: b: 0", "tests: failed with -6", "rules: passed", "1 of 2 |"):
        assert text in summary
    assert "2 of 3 parts did not pass." in summary
