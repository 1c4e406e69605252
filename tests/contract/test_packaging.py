"""What stands around the package agrees with it: extras and versions."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def loaded(name: str) -> Any:
    """A YAML file as data."""
    return yaml.safe_load((ROOT / name).read_text())


def test_every_served_python_is_tested_built_and_declared() -> None:
    """The matrix, cibuildwheel, the classifiers and ``requires-python`` name the same versions."""
    matrix = loaded(".github/workflows/checks.yml")["jobs"]["tests"]["strategy"]["matrix"]
    declared = [c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)]
    wheels = [f"{name[2]}.{name[3:].rstrip('-*')}" for name in PROJECT["tool"]["cibuildwheel"]["build"]]
    assert matrix["python"] == declared == wheels
    assert PROJECT["project"]["requires-python"] == f">={declared[0]}"


def test_every_served_torch_is_tested() -> None:
    """From the oldest that is declared to the one that the constraints pin."""
    matrix = loaded(".github/workflows/checks.yml")["jobs"]["tests"]["strategy"]["matrix"]
    tried = {*matrix["torch"], *(one["torch"] for one in matrix["include"])}
    (oldest,) = re.findall(r"torch>=([\d.]+)", " ".join(PROJECT["project"]["dependencies"]))
    (pinned,) = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    minor = [int(version.split(".")[1]) for version in (oldest, pinned)]
    assert {version.rpartition(".")[0] for version in tried} == {f"2.{one}" for one in range(minor[0], minor[1] + 1)}


def test_all_has_every_extra_for_users() -> None:
    """But vLLM, which brings an engine, and what is for this repository."""
    extras = PROJECT["project"]["optional-dependencies"]
    (everything,) = re.findall(r"\[(.+)\]", extras["all"][0])
    assert {*everything.split(",")} == extras.keys() - {"all", "vllm", "examples", "test", "docs", "dev"}


def test_the_citation_is_of_this_version() -> None:
    """Its version and licence are the project's."""
    cited = loaded("CITATION.cff")
    assert (cited["version"], cited["license"]) == (PROJECT["project"]["version"], PROJECT["project"]["license"])
