"""State that machinery, libraries and arrays hide: what a callable reads there is compared, what it writes is written
once."""

import argparse
import asyncio
import importlib
import logging
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import graphdispatch as gd
from graphdispatch import Reason
from graphdispatch.state.walk import StateWalk

from ..python_objects import check_reading

Reading = Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]
"""Makes state: what reads a number from it, which is 2 at first, and what makes it 5."""
READ: dict[str, Reading] = {}


def read(make: Reading) -> Reading:
    """A case of state that is read."""
    READ[make.__name__] = make
    return make


class Worker(threading.Thread):
    """A thread with state of its own."""

    kind = 2

    def __init__(self) -> None:
        super().__init__(target=lambda: None)
        self.scale = 2
        self.net = nn.Linear(2, 2, bias=False)
        self.count = torch.zeros(1)
        self.calls = 0


class Jobs(asyncio.Queue[int]):
    """A queue with state of its own."""

    scale = 2


@pytest.fixture(autouse=True)
def _inference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    for name in ("HOME", "HIDDEN"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setitem(sys.modules, "hidden_settings", None)  # type: ignore[arg-type]
    patched = (torch.Tensor, "square"), (torch.Tensor, "__matmul__"), (torch.Tensor, "number_of_all")
    patched += (nn.Linear, "number_of_all"), (nn.Module, "dump_patches")  # type: ignore[assignment]
    before = [(kind, name, vars(kind).get(name)) for kind, name in patched]
    with torch.no_grad():
        yield
    for kind, name, held in before:
        if held is not None:
            setattr(kind, name, held)
        elif name in vars(kind):
            delattr(kind, name)


@read
def attribute_of_a_thread() -> Any:
    """Of a class of the user."""
    worker = Worker()
    return lambda: worker.scale, lambda: setattr(worker, "scale", 5)


@read
def attribute_of_a_class_of_threads() -> Any:
    """The class's own."""
    worker = Worker()
    return lambda: worker.kind, lambda: setattr(worker, "kind", 5)


@read
def attribute_given_to_a_thread() -> Any:
    """One of Python's own class."""
    thread: Any = threading.Thread()
    thread.config = types.SimpleNamespace(scale=2)
    return lambda: thread.config.scale, lambda: setattr(thread.config, "scale", 5)


@read
def attribute_given_to_an_event() -> Any:
    """An object of machinery holds what the user gave it."""
    event: Any = threading.Event()
    event.config = {"scale": 2}
    return lambda: event.config["scale"], lambda: event.config.update(scale=5)


@read
def attribute_asked_of_a_condition() -> Any:
    """It is not there at first."""
    condition: Any = threading.Condition()
    return lambda: getattr(condition, "scale", 2), lambda: setattr(condition, "scale", 5)


@read
def attribute_of_a_queue() -> Any:
    """Of a subclass, and its class's."""
    jobs = Jobs()
    return lambda: jobs.scale, lambda: setattr(Jobs, "scale", 5) if Jobs.scale == 2 else None


@read
def extra_of_a_logger() -> Any:
    """An adapter adds it to each line of a log."""
    adapter = logging.LoggerAdapter(logging.getLogger("hidden"), {"scale": 2})
    return lambda: adapter.extra["scale"], lambda: adapter.extra.update(scale=5)  # type: ignore[index,union-attr]


@read
def handlers_of_a_logger() -> Any:
    """The list of them."""
    logger = logging.getLogger("hidden.handlers")
    logger.handlers[:] = [logging.NullHandler()] * 2
    return lambda: len(logger.handlers), lambda: logger.handlers.extend([logging.NullHandler()] * 3)


@read
def subset_of_data() -> Any:
    """The indices of a data set."""
    data = torch.utils.data.Subset([2, 5], [0])  # type: ignore[arg-type]
    return lambda: data[0], lambda: setattr(data, "indices", [1])


@read
def scale_of_gradients() -> Any:
    """A scaler's."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    return scaler.get_scale, lambda: scaler.load_state_dict({**scaler.state_dict(), "scale": 5.0})


@read
def module_of_torch() -> Any:
    """A module of a package of torch that is not ``torch.nn``."""
    stub: Any = torch.ao.nn.quantized.FloatFunctional()
    stub.scale = 2
    return lambda: stub.scale, lambda: setattr(stub, "scale", 5)


class Marked(np.ndarray[Any, Any]):
    """An array with attributes."""

    scale = 2


@read
def shape_of_an_array() -> Any:
    """Set in place."""
    held = np.zeros((2, 5))
    return lambda: len(held), lambda: setattr(held, "shape", (5, 2))


@read
def type_of_an_array() -> Any:
    """Set in place, over the same bytes."""
    held = np.array([2], dtype=np.float32)
    bits = np.array([5], dtype=np.int32)
    bits.dtype = np.float32  # type: ignore[misc]

    def change() -> None:
        held[:] = bits
        held.dtype = np.int32  # type: ignore[misc]

    return lambda: int(held[0]), change


@read
def sign_of_an_array() -> Any:
    """A type of another sign reads the same bytes otherwise."""
    held = np.array([-1], dtype=np.int8)
    return lambda: 2 if held[0] < 0 else 5, lambda: setattr(held, "dtype", np.uint8)


@read
def flag_of_an_array() -> Any:
    """Whether it can be written to."""
    held = np.zeros(2)
    return lambda: 2 if held.flags.writeable else 5, lambda: setattr(held.flags, "writeable", False)


@read
def attribute_of_an_array() -> Any:
    """Of a subclass."""
    held = np.zeros(2).view(Marked)
    return lambda: held.scale, lambda: setattr(held, "scale", 5)


@read
def mask_of_an_array() -> Any:
    """It hides entries."""
    held = np.ma.array([2.0, 8.0], mask=[False, True])  # type: ignore[no-untyped-call]
    return lambda: float(held.mean()), lambda: setattr(held, "mask", [False, False])


@read
def masked_entry() -> Any:
    """What the mask hides is there all the same."""
    held = np.ma.array([2.0, 8.0], mask=[True, False])  # type: ignore[no-untyped-call]
    return lambda: float(held.data[0]), lambda: held.data.__setitem__(0, 5.0)


class Seeded(torch.Generator):
    """A random generator with attributes."""

    scale = 2


@read
def attribute_of_a_generator() -> Any:
    """Of a class of torch's in which nothing else is looked for."""
    held = Seeded()
    return lambda: held.scale, lambda: setattr(held, "scale", 5)


@read
def state_of_a_generator() -> Any:
    """Of Python's, which the code reads and does not change."""
    held = random.Random(3)
    before = held.getstate()
    return lambda: 2 if held.getstate() == before else 5, held.random


@read
def state_of_numpys_generator() -> Any:
    """The same of NumPy's."""
    held = np.random.default_rng(3)
    before = held.bit_generator.state
    return lambda: 2 if held.bit_generator.state == before else 5, held.random


@read
def method_of_a_tensor() -> Any:
    """One of the compiled class's is replaced."""
    held = torch.tensor(2)
    return lambda: held.square() / 2, lambda: setattr(torch.Tensor, "square", lambda _: torch.tensor(10))


@read
def operator_of_a_tensor() -> Any:
    """No code spells it."""
    held = torch.tensor([1.0, 1.0])
    return lambda: held @ held, lambda: setattr(torch.Tensor, "__matmul__", lambda *_: torch.tensor(5.0))


@read
def attribute_of_all_tensors() -> Any:
    """It is not there at first."""
    held = torch.tensor([1.0, 1.0])
    return lambda: getattr(held, "number_of_all", 2), lambda: setattr(torch.Tensor, "number_of_all", 5)


@read
def attribute_of_a_class_of_torch() -> Any:
    """It is not there at first."""
    layer = nn.Linear(2, 2)
    return lambda: getattr(layer, "number_of_all", 2), lambda: setattr(nn.Linear, "number_of_all", 5)


@read
def default_of_a_class_of_torch() -> Any:
    """Data of a class that the code spells."""
    layer: Any = nn.Linear(2, 2)
    return lambda: 2 if layer.dump_patches is False else 5, lambda: setattr(nn.Module, "dump_patches", True)


def _settings() -> Any:
    module: Any = types.ModuleType("hidden_settings")
    module.scale = 2
    module.config = {"scale": 2}
    sys.modules[module.__name__] = module
    return module, "settings"


@read
def module_of_a_computed_name() -> Any:
    """``importlib`` finds it."""
    module, name = _settings()
    return lambda: importlib.import_module(f"hidden_{name}").scale, lambda: setattr(module, "scale", 5)


@read
def module_of_a_computed_name_elsewhere() -> Any:
    """Another function reads its attribute."""
    module, name = _settings()

    def find() -> Any:
        return importlib.import_module(f"hidden_{name}")

    return lambda: find().config["scale"], lambda: module.config.update(scale=5)


@read
def module_by_the_builtin() -> Any:
    """The same by ``__import__``."""
    module, name = _settings()
    return lambda: __import__(f"hidden_{name}").scale, lambda: setattr(module, "scale", 5)


@read
def module_in_the_table() -> Any:
    """The same by the table of all modules."""
    module, name = _settings()
    return lambda: sys.modules[f"hidden_{name}"].scale, lambda: setattr(module, "scale", 5)


def _put_last(table: Any) -> None:
    """Delete the first entry and set it again."""
    name = next(iter(table))
    table[name] = table.pop(name)


class Ordered:
    """It goes through its own attributes."""

    def __init__(self) -> None:
        self.first, self.second = 2, 5

    def number(self) -> int:
        """The first attribute."""
        return next(value for value in vars(self).values())


@read
def order_of_attributes() -> Any:
    """Read by another."""
    held = Ordered()
    return lambda: next(iter(vars(held).values())), lambda: _put_last(vars(held))


@read
def order_of_own_attributes() -> Any:
    """Read by the object itself."""
    held = Ordered()
    return held.number, lambda: _put_last(vars(held))


@read
def order_of_items() -> Any:
    """By ``__dict__``."""
    held = Ordered()
    return lambda: [value for _, value in held.__dict__.items()][0], lambda: _put_last(vars(held))  # noqa: RUF015


@read
def order_of_variables() -> Any:
    """Of a module."""
    names: dict[str, Any] = {"one": 2, "other": 5}
    code = "def number():\n    return [v for k, v in globals().items() if type(v) is int][0]"
    exec(compile(code, "hidden.py", "exec"), names)
    return names["number"], lambda: names.update(one=names.pop("one"))


@read
def new_variable() -> Any:
    """Of a module that the code goes through."""
    names: dict[str, Any] = {"one": 1, "other": 1}
    code = "def number():\n    return sum(type(value) is int for value in list(globals().values()))"
    exec(compile(code, "hidden.py", "exec"), names)
    return names["number"], lambda: names.update(two=1, three=1, four=1)


@read
def equal_arguments() -> Any:
    """Namespaces of ``argparse`` are compared whole."""
    one, other = argparse.Namespace(level=1), argparse.Namespace(level=1)
    return lambda: 2 if one == other else 5, lambda: setattr(one, "level", 3)


@read
def printed_arguments() -> Any:
    """And printed whole."""
    held = argparse.Namespace(level=1)
    return lambda: 2 if len(f"{held}") == len("Namespace(level=1)") else 5, lambda: setattr(held, "level", 10)


@read
def expanded_variable() -> Any:
    """A variable of the environment in a path."""
    os.environ["HIDDEN"] = "2"
    return lambda: int(os.path.expandvars("$HIDDEN")), lambda: os.environ.update(HIDDEN="5")


@read
def home() -> Any:
    """Where a library looks in the environment."""
    os.environ["HOME"] = "/2"
    return lambda: int(os.path.expanduser("~")[1:]), lambda: os.environ.update(HOME="/5")


@pytest.mark.parametrize("name", READ)
def test_what_is_read_is_compared(name: str) -> None:
    """A call after a change answers as eager does."""
    check_reading(*READ[name]())


def _counting_thread() -> Any:
    worker = Worker()

    def write() -> None:
        worker.calls += 1

    return write, lambda: worker.calls


def _rebound_in_a_thread() -> Any:
    worker = Worker()

    def write() -> None:
        worker.count = worker.count + 1

    return write, lambda: float(worker.count)


def _attribute_of_an_event() -> Any:
    event: Any = threading.Event()
    event.calls = 0

    def write() -> None:
        event.calls += 1

    return write, lambda: event.calls


def _extra_of_a_logger() -> Any:
    adapter: Any = logging.LoggerAdapter(logging.getLogger("hidden"), {"calls": 0})

    def write() -> None:
        adapter.extra["calls"] += 1

    return write, lambda: adapter.extra["calls"]


def _shape_of_an_array() -> Any:
    held = np.zeros((1, 256))

    def write() -> None:
        held.shape = (2 * held.shape[0], -1)

    return write, lambda: int(np.log2(held.shape[0]))


def _attribute_of_an_array() -> Any:
    held: Any = np.zeros(2).view(Marked)
    held.calls = 0

    def write() -> None:
        held.calls += 1

    return write, lambda: held.calls


WRITTEN = [
    _shape_of_an_array,
    _counting_thread,
    _rebound_in_a_thread,
    _attribute_of_an_event,
    _extra_of_a_logger,
    _attribute_of_an_array,
]


@pytest.mark.parametrize("make", WRITTEN)
def test_what_is_written_is_written_once(make: Callable[[], Any]) -> None:
    """After the calls the state is as eager calls leave it, and graphs serve none of them."""
    write, tell = make()

    def fn(x: torch.Tensor) -> torch.Tensor:
        write()
        return x * 2

    step = gd.graphed(fn, dynamic={"x": 0}, sizes=(4,))
    for _ in range(8):
        step(torch.rand(3, 2))
    assert tell() == 8
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.STATE_REBOUND


def test_a_thread_that_starts_and_ends_is_served() -> None:
    """Its own attributes change then, and stay as they are."""
    worker = Worker()
    step = gd.graphed(lambda x: worker.net(x) * worker.scale, dynamic={"x": 0}, sizes=(4,))
    x = torch.rand(3, 2)
    for turn in range(12):
        assert torch.allclose(step(x), worker.net(x) * worker.scale)
        if turn == 3:
            hits = step.stats.hits
            assert hits
            worker.start()
            worker.join()
    assert step.stats.hits > hits
    assert worker.ident is not None
    assert not worker.is_alive()


def test_a_mapped_array_is_served(tmp_path: Path) -> None:
    """An array over a file is compared by its bytes, and its file is not read whole."""
    held = np.memmap(tmp_path / "numbers", dtype=np.float32, mode="w+", shape=(1 << 19,))[:4]
    step = gd.graphed(lambda x: x + float(held[1:].sum()), dynamic={"x": 0}, sizes=(4,))
    x = torch.rand(3, 2)
    for _ in range(4):
        step(x)
    assert step.stats.hits
    held[1] = 5
    assert torch.equal(step(x), x + 5)


def test_order_counts_only_where_code_goes_through_attributes() -> None:
    """Code that reads attributes by name has its graphs whatever their order is."""
    held, name = Ordered(), "first"
    step = gd.graphed(lambda x: x * getattr(held, name) * held.second, dynamic={"x": 0}, sizes=(4,))
    x = torch.rand(3, 2)
    for turn in range(8):
        assert torch.equal(step(x), x * 10)
        if turn == 3:
            captures = step.stats.captures
            _put_last(vars(held))
    assert step.stats.captures == captures == 1


def test_a_thread_writes_its_own_attributes() -> None:
    """What the code does not spell, the thread has changed, and no capture fails for it."""
    worker: Any = Worker()
    worker.given = 1
    walk = StateWalk([worker])
    worker.calls += 1
    assert walk.change({"scale"}) is None
    assert walk.change({"scale", "calls"}) == walk.change() == "list[0].calls was rebound"
    worker.calls, worker.given = 0, 2
    assert walk.change({"scale"}) == "list[0].given was rebound"  # by somebody, perhaps by the call
