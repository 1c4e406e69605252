"""How the core is found: compiled from the sources that lie beside it, or left out with a reason."""

import shutil
from pathlib import Path

import pytest

import graphdispatch
from graphdispatch.native import EXTENSION
from graphdispatch.native.build import CompileError, compile_core, compile_extension

from ..helpers import run_python

PACKAGE = Path(graphdispatch.__file__).parent
ASK = "from graphdispatch.native import EXTENSION, WHY_NO_EXTENSION; print(EXTENSION is not None, WHY_NO_EXTENSION)"


def printed(root: Path, **environment: str) -> str:
    """What a new interpreter says of the package below ``root``."""
    return run_python("-c", ASK, **({"GRAPHDISPATCH_NATIVE": "1", "PYTHONPATH": str(root)} | environment))


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The package in a folder of its own, which a test may change."""
    shutil.copytree(PACKAGE, tmp_path / "graphdispatch", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.skipif(EXTENSION is None, reason="the native core is not compiled, or turned off")
def test_a_core_that_is_older_than_its_sources_is_left_out(copied: Path) -> None:
    """Its types may be others than what the Python beside it expects; it keeps the hash of its sources."""
    assert printed(copied).startswith("True")
    source = copied / "graphdispatch/native/core/module.cpp"
    source.write_text(source.read_text() + "// changed\n")
    assert "older than its sources" in printed(copied)


@pytest.mark.skipif(EXTENSION is None, reason="the native core is not compiled, or turned off")
def test_an_installed_core_has_no_sources_beside_it(copied: Path) -> None:
    """As in a wheel: then it is taken as it is."""
    shutil.rmtree(copied / "graphdispatch/native/core")
    assert printed(copied).startswith("True")


def test_a_package_without_a_core_says_so(copied: Path) -> None:
    """As where there was no compiler."""
    for core in (copied / "graphdispatch/native").glob("_core*"):
        core.unlink()
    assert "was not compiled" in printed(copied)


def test_the_environment_turns_the_core_off(copied: Path) -> None:
    """Whether there is one or not."""
    assert "GRAPHDISPATCH_NATIVE=0" in printed(copied, GRAPHDISPATCH_NATIVE="0")


def test_an_empty_name_of_a_compiler_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``CXX=`` stands for the default."""
    monkeypatch.setenv("CXX", "")
    with pytest.raises(CompileError, match=r"^c\+\+ "):
        compile_extension([tmp_path / "nowhere.cpp"], tmp_path / "none.so")


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is written."""
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(CompileError, match="/nowhere/c\\+\\+ cannot be run"):
        compile_core()


UNDER_A_DEFAULT = """
import torch
torch.set_default_device("meta")
from graphdispatch.native.bound import CORE, EXTENSION, WHY_NO_CORE
assert CORE is EXTENSION, WHY_NO_CORE
assert torch.zeros(2).is_meta
"""


def test_a_default_device_is_not_used_at_the_import() -> None:
    """The core's self-test makes its tensors on the CPU, whatever device the importing thread makes them on."""
    run_python("-c", UNDER_A_DEFAULT)
