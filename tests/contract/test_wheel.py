"""The wheel: what a user installs has the code, its types and the command, and nothing else."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this working tree, built once."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("building the wheel needs hatchling, which is not installed here")
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", str(ROOT)]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-w", str(folder)], check=True)
    (built,) = folder.glob("graphdispatch-*.whl")
    return zipfile.ZipFile(built)


def test_types_are_shipped(wheel: zipfile.ZipFile) -> None:
    """``py.typed`` and the stub of the public names are in it."""
    assert {"graphdispatch/py.typed", "graphdispatch/__init__.pyi"} <= set(wheel.namelist())


def test_the_whole_package_is_shipped(wheel: zipfile.ZipFile) -> None:
    """Every module is in it, and no test."""
    source = ROOT / "src"
    modules = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    shipped = {name for name in wheel.namelist() if name.endswith(".py")}
    assert shipped == modules


def test_the_command_and_the_licence_are_shipped(wheel: zipfile.ZipFile) -> None:
    """The entry point and the licence stand in the metadata."""
    (entry_points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "graphdispatch = graphdispatch.cli.app:main" in wheel.read(entry_points).decode()
    assert any(name.endswith("LICENSE") for name in wheel.namelist())


def test_the_source_is_marked_as_typed() -> None:
    """An editable installation has the marker too."""
    assert (ROOT / "src" / "graphdispatch" / "py.typed").is_file()
