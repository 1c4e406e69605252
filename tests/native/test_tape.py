"""The native tape of CPU graphs: what it does, it does as Python's loop does; and how its extension is made and kept.

That it gives the same bits is a claim of ``tests/backends/test_replays.py``.
"""

import math
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from graphdispatch import ReplayError
from graphdispatch.backends.cpu import backend as backend_module
from graphdispatch.backends.cpu.backend import CPUGraph, CPUPool, loop
from graphdispatch.backends.cpu.program import Step, run_and_copy
from graphdispatch.backends.operators import bits_equal
from graphdispatch.native import tape
from graphdispatch.native.tape import TapeExtension, cache_folder, fingerprint, torch_flags

from ..backends.test_replays import NUMBERS, values
from ..helpers import Behind, collector_off, in_threads, recorded, run_python

pytestmark = pytest.mark.skipif(not tape.TAPE.wait(), reason=repr(tape.TAPE))

aten = torch.ops.aten


def steps_of(graph: CPUGraph) -> Sequence[Step]:
    """What the graph replays, by a tape."""
    assert graph.tape is not None
    assert graph.steps is not None
    return graph.steps


def message(call: Callable[[], object]) -> tuple[type, str, list[str]]:
    """The type, the text and the notes of the error that the call raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  # its type is what is compared
        call()
    return caught.type, str(caught.value), caught.value.__notes__


TABLE = torch.arange(12.0).view(4, 3)
FAILING: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor, int]] = {
    "an index out of range": (lambda x: TABLE.index_select(0, x) * 2, torch.zeros(2, dtype=torch.int64), 9),
    "a division by zero": (lambda x: (8 // x) + 1, torch.ones(2, dtype=torch.int64), 0),
    "an assertion": (lambda x: torch._assert_async((x > 0).all(), "all of x are positive"), torch.ones(2), 0),
}
"""A callable, an argument that it takes, and a value of which its replay fails."""


@pytest.mark.parametrize("name", FAILING)
def test_errors_are_the_same(name: str) -> None:
    """The type, the text, and the note that names the operator; and the graph replays again afterwards."""
    fn, good, bad = FAILING[name]
    x = good.clone()
    graph, _ = recorded(lambda: fn(x))
    steps = steps_of(graph)
    graph.replay()
    x.fill_(bad)
    python = message(partial(loop, steps))
    assert message(graph.replay) == python
    assert "aten." in python[2][0]


def test_other_shapes_are_refused() -> None:
    """Results that have another shape than their places are a ``ReplayError``, with the text of Python's loop."""
    x = torch.randn(2, 3)
    place, call = torch.zeros(2), ((x,), {})
    step = Step(partial(run_and_copy, aten.relu.default, *call, (place,)), aten.relu.default, call, (place,))
    graph, steps = CPUGraph(CPUPool(), [step]), [step]
    kind, text, _ = message(partial(loop, steps))
    with pytest.raises(ReplayError, match=r"shapes \[\(2, 3\)\] where the graph holds \[\(2,\)\]") as caught:
        graph.replay()
    assert (kind, text) == (ReplayError, str(caught.value))


def test_warnings_become_python_s() -> None:
    """A warning of an operator is raised where Python's filters say so, before the next operator runs."""
    x, out, marks = torch.randn(3), torch.zeros(1, 3), torch.zeros(2)
    steps = [
        Step(print, aten.add.out, ((x, x), {"out": out}), None),
        Step(print, aten.fill_.Scalar, ((marks, 1.0), {}), None),
    ]
    graph = CPUGraph(CPUPool(), steps)
    with pytest.raises(UserWarning, match="resized"):
        graph.replay()
    assert marks.tolist() == [0, 0]


class Functions(TorchFunctionMode):
    def __init__(self, note: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.note(func, func(*args, **(kwargs or {})))


@contextmanager
def profiled(note: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Note what the profiler tells of the block."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        yield
    for event in profiler.events():
        note(event.name, None)


@pytest.mark.parametrize("watch", [Behind, Functions, profiled])
def test_others_see_what_they_see_of_python(watch: Callable[[Any], Any]) -> None:
    """Modes of torch, under which a replay is Python's, and the profiler: as often, under the same names."""
    x = torch.randn(2, 3)
    graph, _ = recorded(lambda: (x @ x.t()).relu())
    seen = []
    for run in (partial(loop, steps_of(graph)), graph.replay):
        names: list[str] = []
        with watch(lambda func, result, names=names: (names.append(str(func)), result)[1]):
            run()
        seen.append([name for name in names if "aten" in name or watch is Functions])
    assert seen[0] == seen[1] != []


def test_autocast_changes_nothing() -> None:
    """A replay under autocast gives the bits of Python's loop under autocast."""
    x, w = torch.randn(2, 3), torch.randn(3, 3)
    graph, out = recorded(lambda: (x @ w).softmax(0))
    steps = steps_of(graph)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loop(steps)
        expected = out.clone()
        out.zero_()
        graph.replay()
    assert bits_equal(out, expected)


def test_the_gil_is_released() -> None:
    """Two replays run at once: each waits within its replay for the other, through a call of Python's."""
    barrier = threading.Barrier(2, timeout=30)
    graphs = [
        CPUGraph(CPUPool(), [Step(barrier.wait, "wait"), Step(print, aten.fill_.Scalar, ((marks, 1.0), {}))])
        for marks in torch.zeros(2, 1)
    ]
    in_threads(*(graph.replay for graph in graphs))
    assert not barrier.broken


def test_reset_frees_everything() -> None:
    """After ``reset`` nothing holds what the graph used, without a run of the collector."""
    x = [torch.randn(2, 3)]
    graph = recorded(lambda: (x[0].exp() + 1).sort(0))[0]
    graph.replay()
    steps = steps_of(graph)
    arena = graph.arena
    storages = [StorageWeakRef(t.untyped_storage()) for t in (x[0], arena) if t is not None]
    held = [weakref.ref(step.run) for step in steps]
    with collector_off():
        graph.reset()
        x[0] = steps = arena = None
        assert [ref() for ref in held] == [None] * len(held)
        assert all(storage.expired() for storage in storages)


EXTREMES = (0, 1, -3, 1e-5, -0.0, 2.5, 1e300, -1e300, 1e-310, math.inf, math.nan, 2**24 + 1, 2**62 + 1, True)


def calculated(x: torch.Tensor, scalar: torch.Tensor, number: float) -> tuple[torch.Tensor, ...]:
    """Tensors and a number, into new tensors and in place."""
    changed = x.clone()
    if x.dtype.is_floating_point:
        changed.mul_(number).add_(number, alpha=2)
        for in_place in (aten.mul_, aten.add_, aten.sub_, aten.div_):  # as C++ calls them, with a number
            in_place.Scalar(changed, number)
    less = () if x.dtype is torch.bool else (x - number, torch.sub(x, number, alpha=3))
    return (x * number, x + number, x / number, scalar * number, aten.add.Scalar(x, number, 3), changed, *less)


def compared(x: torch.Tensor, scalar: torch.Tensor, number: float) -> tuple[torch.Tensor, ...]:
    """Also where the number is one that the dtype only has neighbours of, or none at all."""
    near = torch.tensor(number, dtype=torch.float64).clamp(-100, 100).to(x.dtype)
    compare = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)
    return tuple(one(given, number) for one in compare for given in (x, scalar, near))


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("number", EXTREMES, ids=str)
@pytest.mark.parametrize("fn", [calculated, compared])
def test_a_number_becomes_a_tensor_with_the_same_bits(
    dtype: torch.dtype, number: float, fn: Callable[..., tuple[torch.Tensor, ...]]
) -> None:
    """Whatever the number and the dtype: before the first replay, and not at each."""
    x, scalar = values(dtype, 3, 40), values(dtype)[1, 1].clone()
    try:
        graph, kept = recorded(lambda: fn(x, scalar, number))
    except RuntimeError:  # torch has no such operation
        pytest.skip("an overflow in eager, too")
    for tensor in (x, scalar):
        tensor.copy_(tensor.flip(0) if tensor.dim() else x[1, 1])
    graph.replay()
    assert all(map(bits_equal, kept, fn(x, scalar, number)))


# How the CPU tape's extension is made and kept: compiled once, by one process, and never in anybody's way.


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
