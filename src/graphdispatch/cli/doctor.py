"""``graphdispatch doctor``: what is installed, what serves here, what is wrong. It needs neither torch nor typer."""

import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import chain
from typing import NamedTuple

_UNLISTED = ("all", "test", "dev", "docs")
_WIDTH = len("extra transformers")


class _Finding(NamedTuple):
    """One line of the report; ``remedy`` is what to do if it is wrong."""

    name: str
    found: str
    remedy: str = ""


def doctor() -> int:
    """Say what is installed, what serves on this machine, and what is wrong. Exits with 1 if something is."""
    wrong: list[str] = []
    for name, found, remedy in chain(_packages(), _parts()):  # some take seconds, so that each is shown at once
        print(f"{name:{_WIDTH}}  {found}", flush=True)
        wrong += [f"wrong: {name}: {remedy}"] * bool(remedy)
    print("\n".join(wrong or ["all is well"]))
    return 1 if wrong else 0


def _packages() -> Iterator[_Finding]:
    """Python, what this package requires, and its extras."""
    yield _Finding("graphdispatch", version("graphdispatch"))
    yield _Finding("python", f"{platform.python_version()} on {platform.platform()}")
    extras: dict[str, list[str]] = {}
    for requirement in requires("graphdispatch") or ():
        name = re.split(r"[^\w.-]", requirement)[0]
        least, extra = re.search(r">=([\d.]+)", requirement), re.search(r"extra == ['\"](\w+)", requirement)
        if extra is None:
            yield _required(name, least[1] if least else "")
        elif name != "graphdispatch" and extra[1] not in _UNLISTED:
            extras.setdefault(extra[1], []).append(name)
    for title, names in extras.items():
        versions = ", ".join(f"{name} {_version(name)}" for name in names)
        missing = f"not installed; in the folder of the sources: {_installed_by(title, names)}"
        yield _Finding(f"extra {title}", versions if all(map(_version, names)) else missing)


def _installed_by(extra: str, names: list[str]) -> str:
    """The command that installs an extra from a copy of the sources, where its plug-in lies in a folder of its own."""
    plugins = [f"./plugins/{name}" for name in names if name.startswith("graphdispatch-")]
    return f"pip install {' '.join(['.', *plugins]) if plugins else repr(f'.[{extra}]')}"


def _required(name: str, least: str) -> _Finding:
    found = _version(name)
    is_old = not found or _numbers(found) < _numbers(least)
    wanted = f"{name}>={least}" if least else name
    return _Finding(name, found or "not installed", f"pip install --upgrade '{wanted}'" if is_old else "")


def _version(package: str) -> str:
    """Empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release.partition("+")[0])[:3]]


def _parts() -> Iterator[_Finding]:
    """Devices, backends, the native parts and the compiler that makes them."""
    compiler = shlex.split(os.environ.get("CXX") or "c++")[0]
    yield _Finding("compiler", shutil.which(compiler) or f"{compiler} is not found, so graphs on the CPU run in Python")
    try:
        import torch

        from ..backends import available_backends
        from ..native import IS_ENABLED
        from ..native.bound import CORE, WHY_NO_CORE
        from ..native.tape import TAPE
    except Exception as error:  # a broken installation raises anything
        text = " ".join(f"{type(error).__name__}: {error}".split())
        yield _Finding("backends", f"cannot be loaded: {text}", "repair or reinstall what the error names")
        return
    backends = available_backends()
    yield _Finding("backends", ", ".join(backends))
    accelerators = [name for name in backends if name != "cpu" and hasattr(torch, name)]
    for name in accelerators:
        module = torch.get_device_module(name)
        name_of = getattr(module, "get_device_name", f"{name}:{{}}".format)
        names = ", ".join(name_of(index) for index in range(module.device_count()))
        yield _Finding(name, f"{getattr(torch.version, name, None) or 'version unknown'}: {names}")
    if not accelerators:
        built = f"for CUDA {torch.version.cuda} and sees no GPU" if torch.version.cuda else "without CUDA"
        yield _Finding("cuda", f"torch is built {built}; graphs run on the CPU")
    if CORE is not None:
        yield _Finding("native core", "compiled, in use")
    else:
        remedy = "install a C++ compiler and Python's headers, then reinstall graphdispatch" if IS_ENABLED else ""
        yield _Finding("native core", f"not in use: {WHY_NO_CORE}; Python serves, more slowly", remedy)
    if not TAPE.is_settled and sys.stdout.isatty():
        print("compiling the loop that replays graphs on the CPU ...", end="\r", flush=True)
    TAPE.wait()
    yield _Finding("graphs on the CPU", "compiled" if TAPE.module is not None else f"run in Python: {TAPE.why_not}")
