"""The wheel: what a user installs has the code, its types and the command, and nothing else."""

import importlib.util
import pkgutil
import subprocess
import sys
import tomllib
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
    """Every module is in it with all that it reads (a page's template, the tape's sources), and no test."""
    source, built = ROOT / "src" / "graphdispatch", (".pyc", ".so")
    files = [path for path in source.rglob("*") if path.is_file() and path.suffix not in built]
    core = source / "native" / "core"  # compiled at the build
    sources = {str(path.relative_to(ROOT / "src")) for path in files if core not in path.parents}
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name and not name.endswith(".so")}
    assert shipped == sources


def test_the_command_and_the_licence_are_shipped(wheel: zipfile.ZipFile) -> None:
    """The entry points and the licence stand in the metadata, and the command is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (entry_points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    entries = wheel.read(entry_points).decode()
    for points in (project["scripts"], *project["entry-points"].values()):
        assert all(f"{name} = {target}\n" in entries for name, target in points.items())
    (command,) = project["scripts"].values()
    assert callable(pkgutil.resolve_name(command))
    assert any(name.endswith("LICENSE") for name in wheel.namelist())
