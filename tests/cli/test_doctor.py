"""``graphdispatch doctor``, on a whole installation and on broken ones."""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

BROKEN = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise {error}
sys.meta_path.insert(0, Missing())
from graphdispatch.cli import main
main(["doctor"])
"""


@pytest.fixture(autouse=True)
def _with_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the core were compiled, also where it is not."""
    monkeypatch.setattr("graphdispatch.native.bound.CORE", object())
    monkeypatch.setenv("GRAPHDISPATCH_NATIVE", "0")  # of processes that a test starts


def test_a_whole_installation_is_well(run: Callable[..., Any]) -> None:
    """Each package, device and native part has a line, and the exit code is 0."""
    code, out, _ = run("doctor")
    names = {line.split("  ")[0] for line in out.splitlines()}
    assert {"python", "torch", "extra cli", "compiler", "backends", "cuda", "native core"} <= names
    assert (code, out.splitlines()[-1]) == (0, "all is well")


def test_an_accelerator_is_named(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever has a backend that can be used here, with its devices; then graphs do not run on the CPU."""
    monkeypatch.setattr("graphdispatch.backends.available_backends", lambda: ("cpu", "xpu"))
    monkeypatch.setattr("torch.version.xpu", "20250301", raising=False)
    monkeypatch.setattr("torch.xpu.device_count", lambda: 2)
    monkeypatch.setattr("torch.xpu.get_device_name", lambda index: f"Max {index}")
    lines = [line.split(maxsplit=1) for line in run("doctor").out.splitlines()]
    assert ["xpu", "20250301: Max 0, Max 1"] in lines
    assert "cuda" not in {name for name, *_ in lines}


@pytest.mark.parametrize(
    ("package", "found", "code", "line"),
    [
        ("torch", "2.9.1+cu128", 1, "wrong: torch: pip install --upgrade 'torch>=2.11'"),
        ("numpy", None, 1, "wrong: numpy: pip install --upgrade"),
        ("prometheus-client", None, 0, "not installed; in the folder of the sources: pip install '.[metrics]'"),
        ("graphdispatch-vllm", None, 0, "folder of the sources: pip install . ./plugins/graphdispatch-vllm"),
    ],
)
def test_a_package_that_is_old_or_missing_has_its_remedy(
    package: str, found: str | None, code: int, line: str, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest version that serves is that of the package's own requirements; a missing extra is no fault."""

    def version_of(name: str) -> str:
        if name == package and found is None:
            raise PackageNotFoundError(name)
        return found if name == package and found is not None else version(name)

    monkeypatch.setattr("graphdispatch.cli.doctor.version", version_of)
    outcome = run("doctor")
    assert (outcome.code, line in outcome.out) == (code, True), outcome.out


@pytest.mark.parametrize(("enabled", "code", "remedy"), [(True, 1, "a C++ compiler"), (False, 0, "all is well")])
def test_a_missing_core_is_wrong_unless_it_is_turned_off(
    enabled: bool, code: int, remedy: str, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line says why there is none."""
    monkeypatch.setattr("graphdispatch.native.IS_ENABLED", enabled)
    monkeypatch.setattr("graphdispatch.native.bound.CORE", None)
    monkeypatch.setattr("graphdispatch.native.bound.WHY_NO_CORE", "it was not compiled")
    outcome = run("doctor")
    assert "not in use: it was not compiled; Python serves, more slowly" in outcome.out
    assert (outcome.code, remedy in outcome.out) == (code, True)


@pytest.mark.parametrize(
    ("missing", "error", "code", "line"),
    [
        (("typer", "rich"), "ModuleNotFoundError(name)", 0, "all is well"),
        (("torch",), "OSError('libcudart.so.13: cannot open')", 1, "OSError: libcudart.so.13: cannot open"),
    ],
)
def test_it_needs_neither_typer_nor_a_working_torch(missing: tuple[str, ...], error: str, code: int, line: str) -> None:
    """A package that is there but cannot be imported is shown with its error."""
    script = BROKEN.format(missing=missing, error=error)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, line in done.stdout) == (code, True), done.stdout + done.stderr
