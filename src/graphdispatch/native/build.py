"""Compiles C++ sources to extension modules of Python.

It imports neither torch nor graphdispatch, so that the build hook of the package can load this file alone. As a script
it compiles the core in place, unless that was made of its sources as they are; its arguments are more flags for the
compiler. As ``build.py --shared TARGET FLAGS ...`` it compiles the CPU tape (see Note [the tape's cache] in
``native/tape.py``).
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_HERE = Path(__file__).parent
CORE_SOURCES = _HERE / "core"
"""The folder of the core's sources, which a wheel does not have."""
_COPIES = _HERE.parent / "backends" / "copies.cu"
"""What the core shares with a kernel of CUDA."""
TAPE_SOURCES = _HERE / "tape"
_CORE = _HERE / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"


class CompileError(Exception):
    """An extension could not be compiled; the text is the compiler's, or says that there is none."""


def compile_extension(sources: Sequence[Path], target: Path, flags: Sequence[str] = ()) -> None:
    """Compile ``sources`` to the extension module ``target`` with the compiler that CXX names, else with ``c++``.

    ``flags`` come last. The target appears whole or not at all. Raises ``CompileError``.
    """
    if sys.platform == "win32":
        raise CompileError("the native parts are not made for Windows")
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").exists():
        raise CompileError(f"there is no Python.h in {include}; install Python's headers")
    command = [*shlex.split(os.environ.get("CXX") or "c++"), "-O2", "-std=c++17", "-fPIC", "-shared"]
    command += ["-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-cast-function-type", f"-I{include}"]
    if sys.platform == "darwin":
        command += ["-undefined", "dynamic_lookup"]
    folder = tempfile.mkdtemp(dir=target.parent)  # a ``TemporaryDirectory`` would end with a child forked meanwhile
    made = Path(folder) / target.name
    command += [*map(str, sources), "-o", str(made), *flags, *(["-ldl"] if sys.platform == "linux" else [])]
    try:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise CompileError(f"{command[0]} cannot be run: {error.strerror or error}") from error
        if done.returncode:
            raise CompileError(f"{command[0]} failed: {done.stderr.strip()}")
        made.replace(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compile_core(flags: Sequence[str] = ()) -> Path:
    """Compile the core beside this file, and return its path. Raises ``CompileError``."""
    compile_extension(sorted(CORE_SOURCES.glob("*.cpp")), _CORE, [f'-DGD_SOURCES="{fingerprint()}"', *flags])
    return _CORE


def fingerprint() -> str:
    """What the core's sources are, as a hash: the extension keeps that of the sources it was compiled from."""
    files = sorted(path for path in CORE_SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
    content = b"\0".join(part for path in (*files, _COPIES) for part in (path.name.encode(), path.read_bytes()))
    return hashlib.sha256(content).hexdigest()[:16]


def _is_fresh() -> bool:
    return _CORE.exists() and fingerprint().encode() in _CORE.read_bytes()


def compile_shared(target: Path, flags: Sequence[str]) -> None:
    """Compile the CPU tape to ``target``, in a folder that several processes share, unless it is there by then. One of
    them compiles, at a low priority, and the others wait. Raises ``CompileError``, and leaves its text beside the
    target."""
    log = target.with_suffix(".log")
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which the system releases if the process ends
        if target.exists():
            return
        os.nice(5)
        for left in target.parent.glob(f"{tempfile.gettempprefix()}*"):  # by a compiler that was ended
            shutil.rmtree(left, ignore_errors=True)
        try:
            compile_extension(sorted(TAPE_SOURCES.glob("*.cpp")), target, flags)
        except CompileError as problem:
            log.write_text(f"{problem}\n")
            raise
        log.unlink(missing_ok=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--shared"]:
        try:
            compile_shared(Path(sys.argv[2]), sys.argv[3:])
        except CompileError:
            sys.exit(1)
    elif sys.argv[1:] or not _is_fresh():
        try:
            compile_core(sys.argv[1:])
        except CompileError as problem:
            print(f"graphdispatch runs without its native core: {problem}", file=sys.stderr)
