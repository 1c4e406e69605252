"""``graphdispatch doctor``: on a whole installation, and on broken ones."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, metadata
from typing import Any

import pytest

from graphdispatch.cli import doctor as module
from graphdispatch.cli.app import main


def test_a_whole_installation_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    """Every package, backend and native part has its line, and the exit code is 0."""
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    named = {line.split("  ")[0] for line in lines}
    assert {"graphdispatch", "python", "torch", "numpy", "pydantic", "backends", "cuda"} <= named
    assert {"native core", "cpu tape"} <= named
    assert lines[-1] == "all is well"


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Let some packages have another version, or be missing."""

    def told(package: str) -> Any:
        if package not in versions:
            return metadata(package)
        if versions[package] is None:
            raise PackageNotFoundError(package)
        return {"Version": versions[package]}

    monkeypatch.setattr(module, "metadata", told)


def test_an_old_torch_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The oldest version that is served is the one of the package's own requirements."""
    installed(monkeypatch, torch="2.9.1+cu128")
    assert main(["doctor"]) == 1
    assert "wrong: torch: 2.11 is the oldest that is served; pip install --upgrade 'torch>=2.11'" in (
        capsys.readouterr().out
    )


def test_an_extra_that_is_missing_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its line says how to get it."""
    installed(monkeypatch, tqdm=None)
    assert main(["doctor"]) == 0
    assert "not installed: pip install 'graphdispatch[progress]'" in capsys.readouterr().out


BROKEN = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise {error}
sys.meta_path.insert(0, Missing())
from graphdispatch.cli.app import main
sys.exit(main(["doctor"]))
"""


@pytest.mark.parametrize(
    ("missing", "error", "code", "line"),
    [
        (("typer", "rich"), "ModuleNotFoundError(name)", 0, "all is well"),
        (("torch",), "OSError('libcudart.so.13: cannot open')", 1, "OSError: libcudart.so.13: cannot open"),
    ],
)
def test_it_needs_neither_typer_nor_a_working_torch(missing: tuple[str, ...], error: str, code: int, line: str) -> None:
    """A package that is there but cannot be imported is told with its error."""
    script = BROKEN.format(missing=missing, error=error)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (run.returncode, line in run.stdout) == (code, True), run.stdout + run.stderr
