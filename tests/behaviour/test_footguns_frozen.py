"""Python that a graph cannot see: numbers, counters, hooks, global variables."""

import ctypes
import decimal
import enum
import gc
import hashlib
import multiprocessing
import os
import random
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphdispatch import Reason, graphed

from .features import needs
from .front_end import FrontEnd

Settle = Callable[..., FrontEnd]
OFFSET = torch.ones(3)
FACTOR = 2.0


def _reads_offset(x: torch.Tensor) -> torch.Tensor:
    return x + OFFSET


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.calls = 0
        self.shift = torch.ones(3)
        self.register_buffer("scale_buffer", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


def test_module_number_changed(settled: Settle) -> None:
    """A number that hangs on a module is guarded: changing it has the graph captured anew."""
    model = Scaled().eval()
    step = settled(model)
    x = torch.randn(4, 3)
    model.scale = 5.0
    assert torch.equal(step(x), model(x))
    step.check(Reason.CAPTURED_NOW)


def test_module_number_changed_instead(settled: Settle) -> None:
    """A number in a buffer, written in place, is read by every replay, without a new capture."""

    class Buffered(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale_buffer * self.scale

    model = Buffered().eval()
    step = settled(model)
    x = torch.randn(4, 3)
    model.scale_buffer.fill_(5.0)
    assert torch.equal(step(x), model(x))
    step.check(Reason.EXACT)


def test_helper_global_changed(settled: Settle) -> None:
    """A global that only an inner function reads is followed, too."""
    globals()["OFFSET"] = torch.ones(3)
    step = settled(lambda x: _reads_offset(x) * 1.0)
    globals()["OFFSET"] = torch.full((3,), 9.0)
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x + 9.0)


class Shifted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _reads_offset(x) * 1.0


def test_helper_of_module_changed(settled: Settle) -> None:
    """A global that only a helper of ``forward`` reads is followed, too."""
    globals()["OFFSET"] = torch.ones(3)
    step = settled(Shifted().eval())
    globals()["OFFSET"] = torch.full((3,), 9.0)
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x + 9.0)


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(scale=2.0, inner=SimpleNamespace(shift=1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.config.scale + self.config.inner.shift


def test_module_config_changed(settled: Settle) -> None:
    """What ``forward`` reads of a plain object on the module is compared."""
    model = Configured().eval()
    step = settled(model)
    model.config.scale = 5.0
    model.config.inner.shift = 3.0
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x * 5.0 + 3.0)


class Adapted(nn.Module):
    gain = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.scaling = {"a": 1.0, "b": 3.0}
        self.active = ["a"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.active:
            x = x * self.scaling[name]
        return x * self.gain


def test_module_container_changed(settled: Settle) -> None:
    """An entry of a dict or list on the module is compared, and so is another dict or list in its place."""
    model = Adapted().eval()
    step = settled(model)
    model.scaling["a"] = 4.0
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x * 8.0)
    model.active = ["b"]
    assert torch.equal(step(x), x * 6.0)


def test_class_attribute_changed(settled: Settle, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``forward`` reads of the module's class is compared."""
    step = settled(Adapted().eval())
    monkeypatch.setattr(Adapted, "gain", 5.0)
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x * 5.0)


def test_number_type_changed(settled: Settle) -> None:
    """A number of a module that equals the old one and is of another type is another one."""
    model = Scaled().eval()
    step = settled(model, lambda rows: (torch.arange(rows * 3).view(rows, 3),))
    model.scale = 2  # type: ignore[assignment]
    x = torch.arange(12).view(4, 3)
    assert step(x).dtype is model(x).dtype


def test_code_replaced(settled: Settle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of a class or function that ran is compared."""
    step = settled(Adapted().eval())
    monkeypatch.setattr(Adapted, "forward", lambda self, x: x * 9.0)
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x * 9.0)


def test_scripted_attribute_changed(settled: Settle) -> None:
    """LIMIT: a scripted module keeps its attributes where no guard looks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.script(Scalar().eval())
    step = settled(model)
    model.scale = 5.0
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x * 2.0)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_ambient_value_changed(settled: Settle, tmp_path: Path) -> None:
    """LIMIT: what Python reads from a file or a clock is that of the capture."""
    file = tmp_path / "scale"
    file.write_text("2.0")
    step = settled(lambda x: x * float(file.read_text()))
    file.write_text("5.0")
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x * 2.0)


def test_environment_changed(settled: Settle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment variables are compared, where the callable reads any."""
    monkeypatch.setenv("SCALE", "2.0")
    step = settled(lambda x: x * float(os.environ["SCALE"]))
    monkeypatch.setenv("SCALE", "5.0")
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x * 5.0)


def test_operator_context_changed(settled: Settle) -> None:
    """What the Python of a custom operator reads besides its arguments is frozen, as on CUDA, and compared."""
    context = SimpleNamespace(scale=2.0)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return x * context.scale

    with torch.library._scoped_library("graphdispatch_footguns", "FRAGMENT") as library:
        library.define("attend(Tensor x) -> Tensor")
        library.impl("attend", attend, "CPU")
        step = settled(lambda x: torch.ops.graphdispatch_footguns.attend(x))
        context.scale = 5.0
        x = torch.randn(4, 3)
        assert torch.equal(step(x), x * 5.0)


def test_array_changed(settled: Settle) -> None:
    """The values of a numpy array that the callable reaches are compared."""
    array = np.full(1, 2.0)
    step = settled(lambda x: x * float(array[0]))
    array[0] = 5.0
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x * 5.0)


def test_settings_module_changed(settled: Settle, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is what a callable reads of a module of settings that it imports."""
    settings = ModuleType("settings")
    settings.FACTOR = 2.0  # type: ignore[attr-defined]
    monkeypatch.setitem(globals(), "SETTINGS", settings)
    step = settled(lambda x: x * SETTINGS.FACTOR)  # type: ignore[name-defined]  # noqa: F821
    settings.FACTOR = 5.0  # type: ignore[attr-defined]
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x * 5.0)


def test_hook_added(settled: Settle) -> None:
    """A hook that is registered after the capture runs, and no longer once it is removed."""
    model = nn.Linear(3, 3).eval()
    step = settled(model, dynamic={"input": 0})
    x = torch.randn(4, 3)
    before = model(x)
    with model.register_forward_hook(lambda module, args, output: output * 0):
        assert torch.equal(step(x), before * 0)
        step.renew(x)
        for _ in range(4):
            step(torch.randn(4, 3))
        assert step.was_hit()
    assert torch.equal(step(x), before)


@needs("static_objects", "constants")
def test_static_object_changed(settled: Settle) -> None:
    """What the callable reads of an object in ``static=`` is compared, too."""
    config = SimpleNamespace(scale=2.0)
    step = settled(lambda x, config: x * config.scale, lambda rows: (torch.randn(rows, 3), config), static=("config",))
    config.scale = 5.0
    x = torch.randn(4, 3)
    assert torch.equal(step(x, config), x * 5.0)


def test_python_side_effect(settled: Settle) -> None:
    """LIMIT: what Python sends out of the process happens at each run of Python, and never in a replay."""
    reading, writing = os.pipe()

    def fn(x: torch.Tensor) -> torch.Tensor:
        os.write(writing, b"x")
        return x * 2

    try:
        step = settled(fn)
        assert len(os.read(reading, 100)) > 2
        step(torch.randn(4, 3))
        os.write(writing, b"end")
        assert os.read(reading, 100) == b"end"
    finally:
        os.close(reading)
        os.close(writing)


def test_compiled_object_used(tried: Settle) -> None:
    """Nobody can compare what a compiled object holds, or put it back, so the call stays eager and uses it once."""
    digest, eager = hashlib.sha256(), hashlib.sha256()

    def fn(x: torch.Tensor) -> torch.Tensor:
        digest.update(b"x")
        return x * 2

    step = tried(fn)
    step.check(Reason.STATE_UNSEEN)
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x * 2)
    eager.update(b"x" * step.calls)
    assert digest.digest() == eager.digest()


def test_compiled_object_used_instead(settled: Settle) -> None:
    """Used outside of the callable, it is no part of the graph."""
    digest = hashlib.sha256()
    batch = lambda rows: (torch.randn(rows, 3), torch.full((rows, 1), 2.0))  # noqa: E731
    step = settled(lambda x, scale: x * scale, batch, dynamic={"x": 0, "scale": 0})
    digest.update(b"x")
    x = torch.randn(4, 3)
    assert torch.equal(step(x, torch.full((4, 1), float(digest.digest()[0]))), x * digest.digest()[0])


def test_lock_left(tried: Settle) -> None:
    """A semaphore that the call takes and keeps is taken once by each call."""
    semaphore = threading.Semaphore(1000)

    def fn(x: torch.Tensor) -> torch.Tensor:
        semaphore.acquire()
        return x * 2

    step = tried(fn)
    step.check(Reason.STATE_UNSEEN)
    before = semaphore._value
    step(torch.randn(4, 3))
    assert semaphore._value == before - 1


def test_lock_left_instead(settled: Settle) -> None:
    """A lock that the call gives back is no state."""
    lock = threading.Lock()

    def fn(x: torch.Tensor) -> torch.Tensor:
        with lock:
            return x * 2

    step = settled(fn)
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x * 2)
    step.check(Reason.EXACT)


def test_library_replaced(settled: Settle, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the code names of a library's module is compared, and so are the methods of torch's modules that ran."""
    model = nn.Tanh().eval()
    step = settled(lambda x: model(x) + torch.nn.functional.relu(x))
    x = torch.randn(4, 3)
    monkeypatch.setattr(torch.nn.functional, "relu", lambda x: x * 5)
    assert torch.equal(step(x), torch.tanh(x) + x * 5)
    monkeypatch.setattr(nn.Tanh, "forward", lambda self, x: x * 7)
    assert torch.equal(step(x), x * 7 + x * 5)


def test_enumeration_changed(settled: Settle) -> None:
    """Members of enumerations are objects like others."""

    class Choice(enum.Enum):
        FIRST = {"scale": 2.0}  # noqa: RUF012

    step = settled(lambda x: x * Choice.FIRST.value["scale"])
    Choice.FIRST.value["scale"] = 5.0
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x * 5.0)


def test_unused_tensor_resized(settled: Settle) -> None:
    """The extent of a tensor that no operator reads is compared, too: it is captured anew."""
    shape = torch.zeros(2)
    step = settled(lambda x: x * shape.numel())
    shape.resize_(5)
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x * 5)
    step.check(Reason.CAPTURED_NOW)


def test_event_read(settled: Settle) -> None:
    """An event, a value that processes share, and a decimal context are compared where the code reads them."""
    event, shared, context = threading.Event(), multiprocessing.Value("i", 1), decimal.Context(prec=5)
    step = settled(lambda x: x * (1 + event.is_set()) * shared.value * context.prec)
    x = torch.randn(4, 3)
    event.set()
    assert torch.equal(step(x), x * 2 * 1 * 5)
    shared.value = 3
    assert torch.equal(step(x), x * 2 * 3 * 5)
    context.prec = 7
    assert torch.equal(step(x), x * 2 * 3 * 7)


def test_thread_local_read(settled: Settle) -> None:
    """Each thread gets what its own value gives."""

    class Local(threading.local):
        scale = 2.0

    local = Local()
    step = settled(lambda x: x * local.scale)
    x, other = torch.randn(4, 3), []

    def call() -> None:
        local.scale = 5.0
        with torch.no_grad():
            other.append(step(x))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert torch.equal(other[0], x * 5.0)
    assert torch.equal(step(x), x * 2.0)


def test_python_queue(tried: Settle) -> None:
    """A queue, list or log that the callable adds to is state that it changes: each call adds once."""
    kept: list[int] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        kept.append(len(x))
        return x * 2

    step = tried(fn)
    step.check(Reason.STATE_REBOUND)
    assert len(kept) == step.calls


def test_numpy_writes(tried: Settle) -> None:
    """What numpy writes to an array that the callable reaches is a change of its state."""
    memory = np.zeros(3, dtype=np.float32)
    tensor = torch.from_numpy(memory)

    def fn(x: torch.Tensor) -> torch.Tensor:
        memory[:] += 3.0
        return x + tensor

    step = tried(fn)
    step.check(Reason.STATE_REBOUND)
    assert memory.tolist() == [3.0 * step.calls] * 3


def test_numpy_writes_unseen(settled: Settle) -> None:
    """LIMIT: what code outside of torch writes to memory that only a tensor shows is not replayed."""
    tensor = torch.full((3,), 3.0)
    address = tensor.data_ptr()

    def fn(x: torch.Tensor) -> torch.Tensor:
        ctypes.memset(address, 0, 12)
        return x + tensor

    step = settled(fn)
    tensor.fill_(7.0)
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x + 7.0)
    assert torch.equal(fn(x), x)


def test_default_dtype_changed(settled: Settle) -> None:
    """The default dtype, the default device and ``use_deterministic_algorithms`` are compared."""
    step = settled(lambda x: x + torch.zeros(3))
    x = torch.randn(4, 3)
    torch.set_default_dtype(torch.float64)
    try:
        assert step(x).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_closure_number_changed(settled: Settle) -> None:
    """A number that the callable itself captured is compared on each call: a new value makes a new graph."""
    scale = 2.0

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    step = settled(fn)
    scale = 5.0
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x * 5.0)
    step.check(Reason.CAPTURED_NOW)


def test_global_number_changed(settled: Settle) -> None:
    """So is a global number that the callable itself reads."""
    globals()["FACTOR"] = 2.0
    step = settled(lambda x: x * FACTOR)
    globals()["FACTOR"] = 5.0
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x * 5.0)


def test_global_tensor_rebound(settled: Settle) -> None:
    """A global tensor that the callable itself reads is followed to its new memory."""
    globals()["OFFSET"] = torch.ones(3)
    step = settled(lambda x: x + OFFSET)
    globals()["OFFSET"] = torch.full((3,), 9.0)
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x + 9.0)


def test_loose_tensor_replaced(settled: Settle) -> None:
    """A tensor that is a plain attribute of a module is compared like a buffer."""
    model = Scaled().eval()
    step = settled(model)
    model.shift = torch.full((3,), 9.0)
    x = torch.randn(4, 3)
    assert torch.equal(step(x), model(x))


def test_python_counter(tried: Settle) -> None:
    """A callable that counts in Python is refused after one run, so that each call counts once."""

    class Counting(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + self.calls

    model = Counting().eval()
    step = tried(model)
    step.check(Reason.STATE_REBOUND)
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x + step.calls)
    assert model.calls == step.calls


def test_python_counter_instead(settled: Settle) -> None:
    """A counter in a tensor, written in place, counts each call once, replayed or not."""
    count = torch.zeros((), dtype=torch.int64)

    def fn(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x + count

    step = settled(fn)
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x + step.calls)
    assert int(count) == step.calls


def test_dict_entry_rebound(tried: Settle) -> None:
    """State that is rebound in a dict or list of the model is refused after one run."""
    state = {"k": torch.zeros(3)}

    def fn(x: torch.Tensor) -> torch.Tensor:
        state["k"] = state["k"] + 1
        return x + state["k"]

    step = tried(fn)
    step.check(Reason.STATE_REBOUND)
    assert torch.equal(state["k"], torch.full((3,), float(step.calls)))


def test_python_randomness(tried: Settle) -> None:
    """A number that Python or NumPy draws is another one at each call, and no graph may keep it."""
    step = tried(lambda x: x * random.random())
    step.check(Reason.STATE_UNSEEN)


def test_tensor_from_numpy(tried: Settle) -> None:
    """A tensor that numpy made within the call from numbers that it drew would be frozen."""
    generator = np.random.default_rng(0)
    step = tried(lambda x: x + torch.from_numpy(generator.random(3)))
    step.check(Reason.STATE_UNSEEN)


def test_tensor_literal_changed_inside(settled: Settle) -> None:
    """``torch.tensor(...)`` within the call has its own value in each replay, even if it is then written in place."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        constant = torch.tensor([1.0, 2.0, 3.0])
        constant += 1
        return x + constant

    step = settled(fn)
    x = torch.randn(4, 3)
    assert torch.equal(step(x), fn(x))
    assert torch.equal(step(x), fn(x))


class Engine:
    """A plain object that holds the model, as engines do."""

    def __init__(self) -> None:
        self.layers = [nn.Linear(3, 3).eval()]
        self.cache = {"bias": torch.ones(3)}
        self.scale = 2.0

    @torch.no_grad()
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) * self.scale + self.cache["bias"]


@pytest.mark.parametrize("reach", [lambda e: e.step, lambda e: lambda x: e.step(x)], ids=["method", "closure"])
@pytest.mark.parametrize(
    "change",
    [
        lambda e: setattr(e, "scale", 5.0),
        lambda e: setattr(e, "layers", [nn.Linear(3, 3).eval()]),
        lambda e: setattr(e.layers[0].weight, "data", torch.ones(3, 3)),
    ],
    ids=["number", "model", "weight"],
)
def test_object_attribute_changed(settled: Settle, reach: Callable[[Engine], Any], change: Any) -> None:
    """What the callable reads of a plain object, and the model that it finds there, are compared on each call."""
    engine = Engine()
    step = settled(reach(engine))
    change(engine)
    x = torch.randn(4, 3)
    assert torch.equal(step(x), engine.step(x))
    step.check(Reason.CAPTURED_NOW)


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.layers.__setitem__(0, nn.Linear(3, 3).eval()),
        lambda e: e.cache.__setitem__("bias", torch.zeros(3)),
    ],
    ids=["list", "dict"],
)
def test_container_entry_changed(settled: Settle, change: Callable[[Engine], None]) -> None:
    """Entries of lists and dicts that the callable reads are compared by identity."""
    engine = Engine()
    step = settled(engine.step)
    change(engine)
    x = torch.randn(4, 3)
    assert torch.equal(step(x), engine.step(x))
    step.check(Reason.CAPTURED_NOW)


def test_container_entry_changed_instead(settled: Settle) -> None:
    """A tensor there that is written in place is read by every replay."""
    engine = Engine()
    step = settled(engine.step)
    engine.cache["bias"].fill_(7.0)
    x = torch.randn(4, 3)
    assert torch.equal(step(x), engine.step(x))
    step.check(Reason.EXACT)


def _noisy(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        return x + torch.rand(3)


def test_generator_put_back(tried: Settle) -> None:
    """A model that draws and puts the generator back gives the same noise each time; a replay would move on."""
    step = tried(_noisy)
    step.check(Reason.VERIFICATION_FAILED)
    before = torch.get_rng_state()
    x = torch.randn(4, 3, generator=torch.Generator())
    assert torch.equal(step(x), step(x))
    assert torch.equal(torch.get_rng_state(), before)


def test_generator_put_back_instead(settled: Settle) -> None:
    """A generator of the model's own moves on by each call, and leaves the default one alone."""
    ours, theirs = (torch.Generator().manual_seed(1) for _ in range(2))
    step = settled(lambda x: x * 0 + torch.rand(3, generator=ours))
    for _ in range(step.calls):
        torch.rand(3, generator=theirs)
    assert torch.equal(step(torch.randn(4, 3)), torch.rand(3, generator=theirs).expand(4, 3))


class Owner:
    """Lives as long as somebody holds it."""

    scale = 2.0


def test_weakly_held_object(settled: Settle) -> None:
    """LIMIT: a graph holds what its callable reads, so that an object which only weak references hold lives on."""
    owner = Owner()
    reference = weakref.ref(owner)
    step = settled(lambda x: x * (0.0 if reference() is None else 2.0))
    del owner
    gc.collect()
    assert reference() is not None
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x * 2.0)


def test_weakly_held_object_instead() -> None:
    """``invalidate()`` lets it go, and later calls see that it has gone."""
    owner = Owner()
    reference = weakref.ref(owner)
    step = graphed(lambda x: x * (0.0 if reference() is None else 2.0), dynamic={"x": 0}, sizes=(4,))
    for _ in range(4):
        step(torch.randn(4, 3))
    assert step.stats.hits
    del owner
    step.invalidate("the owner goes")
    gc.collect()
    for _ in range(4):
        assert not step(torch.randn(4, 3)).any()
