"""How the CPU tape's extension is made and kept: compiled once, by one process, and never in anybody's way."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graphdispatch.backends.cpu import backend as backend_module
from graphdispatch.native import tape
from graphdispatch.native.tape import TapeExtension, cache_folder, fingerprint, torch_flags

from ..helpers import recorded, run_python

pytestmark = pytest.mark.skipif(not tape.TAPE.wait(), reason=repr(tape.TAPE))

FIND_OUTPUT = 'while [ "$1" != -o ]; do shift; done\n'
EXIT = """
import os, sys
from graphdispatch.native.tape import TAPE
TAPE.start()
while not os.path.exists(sys.argv[1]):
    pass
print(TAPE)
"""


class Compiler:
    """Stands in for ``c++``: notes each run, and does what its shell lines say; by default it gives the real binary."""

    def __init__(self, folder: Path, made: Path) -> None:
        self.made = made
        self.path = folder / "compiler"
        self.runs = folder / "runs"
        self.gate = folder / "gate"
        self.copy = f'{FIND_OUTPUT}cp "{made}" "$2"\n'
        self.write(self.copy)

    def write(self, lines: str) -> None:
        """Do this from now on."""
        self.path.write_text(f'#!/bin/sh\necho $$ >> "{self.runs}"\n{lines}')
        self.path.chmod(0o700)

    def block(self) -> None:
        """Wait from now on until the gate is opened."""
        os.mkfifo(self.gate)
        self.write(f'read line < "{self.gate}"\n{self.copy}')

    def open_gate(self) -> None:
        """Let the run that waits go on."""
        self.gate.write_text("go\n")

    @property
    def count(self) -> int:
        """How often it ran."""
        return self.runs.read_text().count("\n") if self.runs.exists() else 0


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """The compiler of an empty cache."""
    made = tmp_path / "made.so"
    made.write_bytes((cache_folder() / f"tape-{fingerprint(torch_flags())}.so").read_bytes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiler = Compiler(tmp_path, made)
    monkeypatch.setenv("CXX", str(compiler.path))
    return compiler


def kept() -> Path:
    """The one file of the cache."""
    (path,) = cache_folder().glob("*.so")
    return path


def why_not() -> str:
    """Why a new process would have no tape."""
    extension = TapeExtension()
    assert not extension.wait(300)
    assert extension.why_not in repr(extension)
    return extension.why_not


def test_it_is_compiled_once(compiler: Compiler) -> None:
    """The next process finds it in the cache, alone; and the self-test draws no random numbers."""
    state = torch.get_rng_state()
    assert TapeExtension().wait(300)
    assert torch.equal(torch.get_rng_state(), state)
    assert TapeExtension().wait(300)
    assert compiler.count == 1
    assert sorted(path.suffix or path.name for path in cache_folder().iterdir()) == [".so", "lock"]


def test_a_broken_file_is_made_anew(compiler: Compiler) -> None:
    """One that the loader refuses."""
    path = cache_folder() / f"tape-{fingerprint(torch_flags())}.so"
    path.write_bytes(b"\x7fELF")
    printed = run_python("-c", "from graphdispatch.native.tape import TAPE; print(TAPE.wait(300))")
    assert (printed.strip(), compiler.count) == ("True", 1)
    assert kept().read_bytes() == compiler.made.read_bytes()


FAULTS: dict[str, tuple[Callable[[Compiler], Any], str]] = {
    "a folder that others may write": (lambda _: cache_folder().chmod(0o777), "may enter; set XDG_CACHE_HOME"),
    "a folder that others may enter": (lambda _: cache_folder().chmod(0o711), "may enter; set XDG_CACHE_HOME"),
    "no place": (lambda one: os.environ.update(XDG_CACHE_HOME=str(one.path)), "there is no place to keep it"),
    "no compiler": (lambda compiler: compiler.path.unlink(), "compiler cannot be run"),
    "a compiler that fails": (lambda compiler: compiler.write("echo no such header >&2; exit 1\n"), "no such header"),
    "no binary": (lambda compiler: compiler.write(f'{FIND_OUTPUT}echo nonsense > "$2"\n'), "ImportError: "),
    "a failed self-test": (lambda _: None, "its self-test failed: tensor 3 differs"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_without_a_tape_there_is_a_reason(compiler: Compiler, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It says what to do, or has the words of the compiler or the loader; nothing is left in the cache."""
    spoil, message = FAULTS[name]
    if name == "a failed self-test":
        monkeypatch.setattr(tape, "find_fault", lambda _: "tensor 3 differs")
    spoil(compiler)
    assert message in why_not()


def test_several_at_once(compiler: Compiler) -> None:
    """One compiles, and the others wait for its file."""
    extensions = [TapeExtension() for _ in range(4)]
    for extension in extensions:
        extension.start()
    assert all(extension.wait(300) for extension in extensions)
    assert compiler.count == 1
    assert kept().read_bytes() == compiler.made.read_bytes()


def test_what_an_ended_compiler_left_is_removed(compiler: Compiler) -> None:
    """Its folder; and its lock is free, since the system gives it back."""
    left = cache_folder() / "tmp_left"
    left.mkdir()
    (left / "half.so").write_text("half")
    assert TapeExtension().wait(300)
    assert not left.exists()


def test_what_failed_is_kept(compiler: Compiler) -> None:
    """The compiler's words stay in a log, which the reason names, until it succeeds."""
    compiler.write("echo no such header >&2; exit 1\n")
    (reason, (log,)) = why_not(), cache_folder().glob("*.log")
    assert str(log) in reason
    assert "no such header" in log.read_text()
    compiler.write(compiler.copy)
    assert TapeExtension().wait(300)
    assert not log.exists()


def test_python_serves_until_it_is_ready(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph replays by Python's loop while the compiler runs, and by the tape from the next replay on; ``explain``
    says which."""
    compiler.block()
    extension = TapeExtension()
    monkeypatch.setattr(backend_module, "TAPE", extension)
    x = torch.randn(3)
    graph, out = recorded(lambda: x * 2)
    assert extension._thread is not None
    while compiler.count == 0:
        extension._thread.join(0.01)
    assert "Python replays it" in graph.describe()
    for is_ready in (False, True):
        if is_ready:
            compiler.open_gate()
            assert extension.wait(300)
        x.normal_()
        graph.replay()
        assert torch.equal(out, x * 2)
        assert (graph.tape is not None) == is_ready
    assert not graph.describe()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_meanwhile(compiler: Compiler) -> None:
    """The child makes its own when it needs one."""
    free = shutil.copy(compiler.path, compiler.path.with_name("another"))
    compiler.block()
    extension = TapeExtension()
    extension.start()
    while compiler.count == 0:
        extension._thread.join(0.01)
    pid = os.fork()
    if pid == 0:
        os.environ["CXX"] = str(free)
        os._exit(0 if extension._thread is None and extension.wait(300) else 1)
    compiler.open_gate()
    assert extension.wait(300)
    assert os.waitpid(pid, 0)[1] == 0
    assert compiler.count == 2


def test_an_exit_meanwhile(compiler: Compiler) -> None:
    """The interpreter ends without a word, and its compiler goes on: the next process finds the file."""
    compiler.block()
    command = [sys.executable, "-W", "error", "-c", EXIT, str(compiler.runs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "it is being compiled" in done.stdout
    compiler.open_gate()
    assert TapeExtension().wait(300)
    assert compiler.count == 1


def test_it_can_be_turned_off() -> None:
    """``GRAPHDISPATCH_NATIVE=0`` starts no thread, and says so."""
    code = "import threading; from graphdispatch.native.tape import TAPE as tape"
    code += "; print(tape.wait(), tape, threading.active_count())"
    printed = run_python("-c", code, GRAPHDISPATCH_NATIVE="0").strip()
    assert printed == "False <CPU tape: Python's loop, since GRAPHDISPATCH_NATIVE=0 turns it off> 1"
