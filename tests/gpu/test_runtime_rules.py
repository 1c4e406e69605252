"""What the CUDA runtime does about capture, replay, events and errors is what a real device printed of it."""

import difflib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

RULES = Path(__file__).parent / "runtime"
GOLDEN = RULES / "golden.txt"


def lines(text: str) -> list[str]:
    """Lines that are no comments."""
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_runtime_keeps_the_rules_of_a_real_device(tmp_path: Path) -> None:
    """Each line that the program prints is one that the device in the golden file's header printed."""
    if not GOLDEN.exists():
        pytest.skip(f"no device has printed {GOLDEN.name} yet")
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    golden = GOLDEN.read_text()
    assert golden.startswith("# ")
    assert "emulated" not in golden.splitlines()[0]
    printed = subprocess.run(
        [str(RULES / "run.sh"), sys.executable, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=True
    )
    assert [*difflib.unified_diff(lines(golden), lines(printed.stdout), "device", "here", lineterm="", n=0)] == []
