"""The CPU tape's extension: compiled against the installed torch at its first use, in the background, and kept.

``TAPE`` is the one of this process. Until it is ready, and where it cannot be, a graph's Python loop serves.

Note [the tape's cache]
    The file is in ``graphdispatch`` of the user's cache folder (``XDG_CACHE_HOME``, else ``~/.cache``). Its name has,
    as a hash, the versions of torch and Python, the sources and the compiler's command. A file that cannot be loaded is
    made anew. A folder that another user owns or may enter is not used, so that nobody else can write to the file.

    It is made by a process of its own (``build.py --shared``), in a session of its own and at a low priority. That goes
    on when the process that began it ends, so that short ones leave the file to the next. A lock in the folder lets one
    of them compile at a time; who waited finds the file. What fails leaves the words of the compiler in a ``.log``.
"""

import atexit
import hashlib
import logging
import os
import shlex
import stat
import subprocess
import sys
import sysconfig
import threading
from functools import partial
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload

from ..copying import NO_FORK, make_lock, renew_in_child
from . import IS_ENABLED, build
from .build import TAPE_SOURCES, CompileError

_log = logging.getLogger(__name__)
_LOOKS_EACH = 0.1
"""Seconds between two looks whether the compiler is done."""
_NAME = "graphdispatch.native._tape"
_Step: TypeAlias = "tuple[OpOverload, tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, ...] | None]"


class TapeExtension:
    """Makes the extension once, in a daemon thread, and says what is in use. Any thread may call any method."""

    def __init__(self) -> None:
        self.module: ModuleType | None = None
        """The extension, from the moment on that it is tested; else None."""
        self.why_not = "no graph needed it yet" if IS_ENABLED else "GRAPHDISPATCH_NATIVE=0 turns it off"
        """Why there is no extension, or none yet; empty if there is one."""
        self._lock = make_lock()
        self._begin()
        renew_in_child(self)

    def _begin(self) -> None:
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self.is_compiling = self._is_done = False

    def start(self) -> None:
        """Begin to make the extension, unless that was begun before. Returns at once."""
        if self._thread is not None or not IS_ENABLED:
            return
        with self._lock:
            if self._thread is None:
                self.why_not = "it is being compiled"
                self._thread = threading.Thread(target=self._make, name="graphdispatch-tape", daemon=True)
                self._thread.start()
                atexit.register(self._stop)

    @property
    def is_settled(self) -> bool:
        """Whether graphs run as they will for the rest of the process: natively, or not at all."""
        return self._is_done or not IS_ENABLED

    def wait(self, timeout: float | None = None) -> bool:
        """Make the extension and wait for it, at most ``timeout`` seconds; whether it can be used."""
        self.start()
        if self._thread is not None:
            self._thread.join(timeout)
        return self.module is not None

    def after_fork(self) -> None:
        """Forget a thread that the child does not have; the next graph begins anew. Its compiler is the parent's."""
        if not self._is_done:
            self._begin()

    def __repr__(self) -> str:
        return "<CPU tape: native>" if self.module is not None else f"<CPU tape: Python's loop, since {self.why_not}>"

    def _stop(self) -> None:
        """At exit: wait for the thread, so that it never runs in a dying interpreter. Its compiler goes on."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _make(self) -> None:
        try:
            self.module = self._load_or_compile()
            self.why_not = ""
        except Exception as error:  # whatever it is, Python's loop serves
            self.why_not = str(error) if isinstance(error, CompileError) else f"{type(error).__name__}: {error}"
        self._is_done = True
        _log.debug("%r", self)

    def _load_or_compile(self) -> ModuleType:
        if sys.platform == "win32":
            raise CompileError("the native parts are not made for Windows")
        flags = torch_flags()
        target = cache_folder() / f"tape-{fingerprint(flags)}.so"
        if target.exists():
            try:
                return load(target)
            except ImportError:
                target.unlink(missing_ok=True)
        self.is_compiling = True
        try:
            self._compile(target, flags)
        finally:
            self.is_compiling = False
        return load(target)

    def _compile(self, target: Path, flags: list[str]) -> None:
        """Have another process make the file, and wait until it is there, or this process ends."""
        if "python" not in Path(sys.executable or "").name.lower():
            raise CompileError(
                f"{sys.executable!r} is no Python that can compile it; run python -m graphdispatch.native"
            )
        command = [sys.executable, "-E", "-S", build.__file__, "--shared", str(target), *flags]
        null = subprocess.DEVNULL
        with NO_FORK:
            compiler = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
        while compiler.poll() is None:
            if self._stopping.wait(_LOOKS_EACH):
                compiler.returncode = 0  # nobody waits for it, and Popen must not warn of that
                raise CompileError("the process ended while it was being compiled")
        if compiler.returncode:
            log = target.with_suffix(".log")
            reason = log.read_text().strip() if log.exists() else f"{command[0]} ended with {compiler.returncode}"
            raise CompileError(f"{reason} (kept in {log})" if log.exists() else reason)


def torch_flags() -> list[str]:
    """What the compiler needs of the installed torch: headers, libraries and the ABI."""
    home = Path(torch.__file__).parent
    flags = ["-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", "-isystem"]
    return [*flags, str(home / "include"), f"-L{home / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]


def fingerprint(flags: list[str]) -> str:
    """What differs between binaries that must not serve each other's process."""
    parts = [torch.__version__, str(torch.version.git_version), sys.version, os.environ.get("CXX") or "c++"]
    parts += [str(sysconfig.get_config_var("EXT_SUFFIX")), shlex.join(flags)]
    content = [p.read_bytes() for p in (*sorted(TAPE_SOURCES.iterdir()), Path(build.__file__))]
    return hashlib.sha256(b"\0".join([*map(str.encode, parts), *content])).hexdigest()[:32]


def cache_folder() -> Path:
    """The folder of the user's own where the extension is kept; made if there is none. Raises ``CompileError``."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(given) if os.path.isabs(given) else Path("~/.cache").expanduser()) / "graphdispatch"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CompileError(f"there is no place to keep it: {error}; set XDG_CACHE_HOME") from error
    found = folder.stat()
    if not folder.is_dir() or found.st_uid != os.geteuid() or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise CompileError(f"{folder} is not a folder that this user alone may enter; set XDG_CACHE_HOME")
    return folder


def load(path: Path) -> ModuleType:
    """The extension that the file holds.

    Raises ``ImportError`` if it cannot be loaded, and ``CompileError`` if it does not do what Python does.
    """
    loader = ExtensionFileLoader(_NAME, str(path))
    module = module_from_spec(ModuleSpec(_NAME, loader, origin=str(path)))
    loader.exec_module(module)
    if fault := find_fault(module):
        raise CompileError(f"its self-test failed: {fault}")
    return module


def find_fault(module: ModuleType) -> str:
    """What the tape of this extension does otherwise than Python; empty if nothing. Draws no random numbers."""
    called: list[str] = []
    aten, tape = torch.ops.aten, module.Tape(_nothing, _nothing)
    with torch.inference_mode(False), torch.no_grad():
        x = torch.arange(6, dtype=torch.float32).reshape(2, 3)
        total, wide, double = (
            torch.zeros_like(x),
            torch.zeros_like(x).repeat(1, 2),
            torch.zeros(2, 6, dtype=torch.double),
        )
        steps: list[_Step] = [
            (aten.add.out, (x, x), {"alpha": 3, "out": total}, None),
            (aten.cat.out, ([x, total], 1), {"out": wide}, None),
            (aten._to_copy.default, (wide,), {"dtype": torch.float64}, (double,)),
        ]
        for func, *operands in steps:
            if not tape.add(_nothing, func._schema.name, func._schema.overload_name, *operands):
                return f"it does not take {func}"
        tape.add_call(partial(called.append, "called"))
        for _ in range(2):
            tape.replay()
        if called != ["called"] * 2:
            return "a Python call did not run"
        return "" if torch.equal(double, torch.cat([x, 4 * x], 1).double()) else "it computes other numbers"


def _nothing(*_: Any) -> None:
    """What the tape calls where it leaves something to Python."""


TAPE = TapeExtension()
"""The extension of this process: there is one, as there is one torch."""
