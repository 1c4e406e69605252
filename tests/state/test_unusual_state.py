"""Python state in unusual places: what a callable reads there is compared, and what it writes there it writes once."""

import asyncio
import collections
import ctypes
import dataclasses
import enum
import functools
import inspect
import logging
import math
import sys
import types
import weakref
from abc import ABC
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pydantic
import pytest
import torch
from torch import nn

import graphdispatch as gd
from graphdispatch import Reason

from ..python_objects import check_reading

Reading = Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]
"""Makes state: what reads a number from it, which is 2 at first, and what makes it 5."""
Writing = Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]
"""Makes state: what changes it, and what tells how it is."""
READ: dict[str, Reading] = {}
WRITTEN: dict[str, Writing] = {}


def read(make: Reading) -> Reading:
    """A case of state that is read."""
    READ[make.__name__] = make
    return make


def written(make: Writing) -> Writing:
    """A case of state that is written."""
    WRITTEN[make.__name__] = make
    return make


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    relu, forward, root = nn.functional.relu, nn.ReLU.forward, math.sqrt
    settings = torch.get_num_threads(), np.geterr(), sys.getrecursionlimit(), torch.get_float32_matmul_precision()
    with torch.no_grad():
        yield
    nn.functional.relu, nn.ReLU.forward, math.sqrt = relu, forward, root  # type: ignore[method-assign]
    torch.set_num_threads(settings[0])
    np.seterr(**settings[1])
    sys.setrecursionlimit(settings[2])
    torch.set_float32_matmul_precision(settings[3])
    torch.set_default_dtype(torch.float32)


@read
def value_of_an_enumeration() -> Any:
    """A container in it."""

    class Choice(enum.Enum):
        FIRST = {"number": 2}  # noqa: RUF012

    return lambda: Choice.FIRST.value["number"], lambda: Choice.FIRST.value.update(number=5)


@read
def attribute_of_an_enumeration() -> Any:
    """Of a member."""

    class Choice(enum.Enum):
        FIRST = 1

    first: Any = Choice.FIRST
    first.number = 2
    return lambda: first.number, lambda: setattr(first, "number", 5)


@read
def single_dispatch() -> Any:
    """A function for a class is registered later."""

    @functools.singledispatch
    def number(_: Any) -> int:
        return 2

    return lambda: number(1), lambda: number.register(int, lambda _: 5)


@read
def single_dispatch_of_a_method() -> Any:
    """The same for a method."""

    class Counter:
        @functools.singledispatchmethod
        def number(self, _: Any) -> int:
            return 2

    counter = Counter()
    return lambda: counter.number(1), lambda: vars(Counter)["number"].register(int, lambda self, _: 5)


@read
def attribute_of_a_metaclass() -> Any:
    """Its classes have it, too."""

    class Meta(type):
        number = 2

    class Thing(metaclass=Meta):
        pass

    return lambda: Thing.number, lambda: setattr(Meta, "number", 5)


@read
def registered_subclass() -> Any:
    """A class is registered as a subclass later."""

    class Base(ABC):  # noqa: B024
        pass

    class Thing:
        pass

    thing = Thing()
    return lambda: 5 if isinstance(thing, Base) else 2, lambda: Base.register(Thing)


@read
def subclasses() -> Any:
    """A class gets another subclass."""

    class Base:
        pass

    made: list[Any] = []
    return lambda: 5 if Base.__subclasses__() else 2, lambda: made.append(type("Made", (Base,), {}))


@read
def replaced_module() -> Any:
    """A module that the code imports is replaced."""
    first, second = types.ModuleType("unusual_settings"), types.ModuleType("unusual_settings")
    first.number, second.number = 2, 5  # type: ignore[attr-defined]
    sys.modules["unusual_settings"] = first

    def number() -> Any:
        import unusual_settings  # type: ignore[import-not-found]

        return unusual_settings.number

    return number, lambda: sys.modules.update(unusual_settings=second)


@read
def module_as_attribute() -> Any:
    """An object holds a module with settings."""
    module: Any = types.ModuleType("unusual_settings")
    module.number = 2
    holder = types.SimpleNamespace(settings=module)
    return lambda: holder.settings.number, lambda: setattr(module, "number", 5)


@read
def attribute_of_a_function() -> Any:
    """Whether the function runs or not."""

    def held() -> None:
        pass

    there: Any = held
    there.number = 2
    return lambda: there.number, lambda: setattr(there, "number", 5)


@read
def defaults_of_a_function() -> Any:
    """Read by ``inspect``."""

    def held(number: int = 2) -> None:
        pass

    return (
        lambda: inspect.signature(held).parameters["number"].default,
        lambda: setattr(held, "__defaults__", (5,)),
    )


@read
def state_of_a_partial() -> Any:
    """Set as a whole."""
    held = functools.partial(int, "2")
    return lambda: held(), lambda: held.__setstate__((int, ("5",), {}, None))  # type: ignore[attr-defined]


@read
def view_of_a_dict() -> Any:
    """Its values."""
    table = {"number": 2}
    view = table.values()
    return lambda: sum(view), lambda: table.update(number=5)


@read
def proxy_of_a_dict() -> Any:
    """A read-only one."""
    table = {"number": 2}
    proxy = types.MappingProxyType(table)
    return lambda: proxy["number"], lambda: table.update(number=5)


@read
def default_factory() -> Any:
    """Of a dict with defaults."""
    table: Any = collections.defaultdict(lambda: 2)
    return lambda: table.default_factory(), lambda: setattr(table, "default_factory", lambda: 5)


@read
def object_in_an_array() -> Any:
    """An array of NumPy that holds objects."""
    array = np.array([{"number": 2}], dtype=object)
    return lambda: array[0]["number"], lambda: array[0].update(number=5)


@read
def memory_view() -> Any:
    """Of bytes that change."""
    data = bytearray([2])
    view = memoryview(data)
    return lambda: view[0], lambda: data.__setitem__(0, 5)


@read
def pointer() -> Any:
    """What it points to."""
    value = ctypes.c_int(2)
    held = ctypes.pointer(value)
    return lambda: held.contents.value, lambda: setattr(value, "value", 5)


@read
def weak_method() -> Any:
    """A method of an object that only a weak reference reaches."""

    class Thing:
        number = 2

        def read(self) -> int:
            return self.number

    thing = Thing()
    method: Any = weakref.WeakMethod(thing.read)
    return lambda: method()(), lambda thing=thing: setattr(thing, "number", 5)


@read
def level_of_a_logger() -> Any:
    """Read as an attribute."""
    logger = logging.Logger("unusual")
    return lambda: 5 if logger.level else 2, lambda: logger.setLevel(10)


@read
def class_pattern() -> Any:
    """A pattern does not spell the attributes that it reads."""

    @dataclasses.dataclass
    class Point:
        number: int = 2

    point = Point()

    def number() -> int:
        match point:
            case Point(found):
                return found

    return number, lambda: setattr(point, "number", 5)


@read
def annotations() -> Any:
    """And the text of a class."""

    class Thing:
        """2"""

    Thing.__annotations__["number"] = 1

    def change() -> None:
        Thing.__doc__ = "3"
        Thing.__annotations__["number"] = 2

    return lambda: int(Thing.__doc__ or 0) * Thing.__annotations__["number"] - (Thing.__doc__ == "3"), change


@read
def flag_of_a_tensor() -> Any:
    """Whether it requires a gradient."""
    tensor = torch.ones(1)
    return lambda: 5 if tensor.requires_grad else 2, lambda: tensor.requires_grad_(True)


@read
def replaced_function_of_python() -> Any:
    """Of the standard library."""
    return lambda: int(math.sqrt(4)), lambda: setattr(math, "sqrt", lambda _: 5)


@read
def replaced_function_of_torch() -> Any:
    """As packages with faster attention do it."""
    one = torch.ones(())
    return (
        lambda: nn.functional.relu(one) * 2,
        lambda: setattr(nn.functional, "relu", lambda x: x * 2.5),
    )


@read
def replaced_method_of_torch() -> Any:
    """Of a module's class."""
    module, one = nn.ReLU().eval(), torch.ones(())
    return lambda: module(one) * 2, lambda: setattr(nn.ReLU, "forward", lambda self, x: x * 2.5)


@read
def attribute_of_a_number() -> Any:
    """A class that inherits from ``int``."""

    class Named(int):
        number = 2

    named = Named(1)
    return lambda: named.number, lambda: setattr(named, "number", 5)


@read
def operator_of_a_number() -> Any:
    """A class that inherits from ``float`` and multiplies in its own way."""

    class Scaled(float):
        by = 2

        def __mul__(self, other: Any) -> Any:
            return other * self.by

    scaled = Scaled(1)
    return lambda: scaled * 1, lambda: setattr(scaled, "by", 5)


@read
def arguments_of_an_exception() -> Any:
    """One that is kept."""
    error = ValueError(2)
    return lambda: error.args[0], lambda: setattr(error, "args", (5,))


@read
def private_attribute_of_pydantic() -> Any:
    """Which a slot holds."""

    class Model(pydantic.BaseModel):
        _number: int = pydantic.PrivateAttr(2)

    model = Model()
    return lambda: model._number, lambda: setattr(model, "_number", 5)


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "threads": (lambda: torch.get_num_threads(), lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
    "numpy": (lambda: np.geterr()["divide"], lambda: np.seterr(divide="raise")),
    "recursion": (lambda: sys.getrecursionlimit(), lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1)),
    "precision": (lambda: torch.get_float32_matmul_precision(), lambda: torch.set_float32_matmul_precision("high")),
    "type": (lambda: torch.get_default_dtype(), lambda: torch.set_default_dtype(torch.bfloat16)),
}


def setting(name: str) -> Reading:
    """A setting of the process, which code asks for by a function."""
    ask, change = SETTINGS[name]

    def make() -> Any:
        was = ask()
        return lambda: 2 if ask() == was else 5, change

    return make


READ |= {f"setting_{name}": setting(name) for name in SETTINGS}


@written
def attribute_of_a_metaclass_written() -> Any:
    """By way of a class."""

    class Meta(type):
        number = 0

    class Thing(metaclass=Meta):
        pass

    def write() -> None:
        type(Thing).number += 1

    return write, lambda: Meta.number


@written
def member_of_an_enumeration_written() -> Any:
    """Its attribute."""

    class Choice(enum.Enum):
        FIRST = 1

    first: Any = Choice.FIRST
    first.number = 0
    return lambda: setattr(first, "number", first.number + 1), lambda: first.number


@written
def partial_written() -> Any:
    """As a whole."""
    held: Any = functools.partial(int, 0)
    return lambda: held.__setstate__((int, (held.args[0] + 1,), {}, None)), lambda: held.args


@written
def class_in_a_type_expression_written() -> Any:
    """Behind the type of a list's elements."""

    class Thing:
        number = 0

    kind: Any = list[Thing]

    def write() -> None:
        kind.__args__[0].number += 1

    return write, lambda: Thing.number


@written
def hooks_written() -> Any:
    """An entry and an attribute of a dict that was empty."""
    table: Any = collections.OrderedDict()

    def write() -> None:
        table[len(table)] = 1
        table.number = getattr(table, "number", 0) + 1

    return write, lambda: (len(table), table.number)


@written
def factory_written() -> Any:
    """Of a dict with defaults."""
    table: Any = collections.defaultdict(lambda: 0)

    def write() -> None:
        count = table.default_factory() + 1
        table.default_factory = lambda: count

    return write, lambda: table.default_factory()


@written
def array_of_objects_written() -> Any:
    """An entry."""
    array = np.array([0], dtype=object)
    return lambda: array.__setitem__(0, array[0] + 1), lambda: array[0]


@written
def exception_written() -> Any:
    """Its arguments."""
    error = ValueError(0)
    return lambda: setattr(error, "args", (error.args[0] + 1,)), lambda: error.args


@written
def library_written() -> Any:
    """An attribute that somebody put into torch."""
    library: Any = torch
    library.unusual_count = 0

    def write() -> None:
        torch.unusual_count += 1  # type: ignore[attr-defined]

    return write, lambda: library.unusual_count


@written
def text_of_a_function_written() -> Any:
    """Its name, too."""

    def held() -> None:
        """x"""

    def write() -> None:
        held.__doc__ = f"{held.__doc__}x"
        held.__name__ += "x"

    return write, lambda: (held.__doc__, held.__name__)


@written
def settings_written() -> Any:
    """As many as can be put back."""
    torch.set_num_threads(1)
    sys.setrecursionlimit(5000)

    def write() -> None:
        torch.set_num_threads(torch.get_num_threads() % 4 + 1)
        sys.setrecursionlimit(sys.getrecursionlimit() + 1)

    return write, lambda: (torch.get_num_threads(), sys.getrecursionlimit())


@written
def default_type_written() -> Any:
    """Turned in each call."""
    torch.set_default_dtype(torch.float32)

    def write() -> None:
        is_wide = torch.get_default_dtype() is torch.float64
        torch.set_default_dtype(torch.float32 if is_wide else torch.float64)

    return write, torch.get_default_dtype


@written
def context_written() -> Any:
    """A copy of the context that somebody keeps."""
    from contextvars import ContextVar, copy_context

    variable = ContextVar("variable", default=0)
    context = copy_context()
    return lambda: context.run(variable.set, context.run(variable.get) + 1), lambda: context.run(variable.get)


@pytest.mark.parametrize("name", READ)
def test_what_is_read_is_compared(name: str) -> None:
    """A call after a change answers as eager does."""
    check_reading(*READ[name]())


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_written_once(name: str) -> None:
    """After the calls the state is as eager calls leave it, and graphs serve none of them."""
    left = []
    for is_served in (False, True):
        write, read_back = WRITTEN[name]()

        def fn(x: torch.Tensor, write: Callable[[], Any] = write) -> torch.Tensor:
            write()
            return x * 2

        step = gd.graphed(fn, dynamic={"x": 0}, sizes=(4,)) if is_served else fn
        for rows in (3, 4, 3, 3, 2, 4, 3, 3):
            step(torch.rand(rows, 2))
        left.append(read_back())
    assert left[0] == left[1]
    assert step.last_decision.reason in (Reason.STATE_REBOUND, Reason.STATE_UNSEEN)


def test_code_of_the_user_is_not_called() -> None:
    """An exception may have a property in place of the attribute that its compiled class keeps."""

    class OddError(ValueError):
        @property
        def args(self) -> Any:  # type: ignore[override]
            raise AssertionError

    held = OddError(2)
    step = gd.graphed(lambda x: x * (held is not None), dynamic={"x": 0}, sizes=(4,))
    for _ in range(4):
        step(torch.rand(3, 2))
    assert step.stats.hits


def test_determinism_that_only_warns_goes_on_warning() -> None:
    """A setting is put back whole."""
    torch.use_deterministic_algorithms(True, warn_only=True)

    def fn(x: torch.Tensor) -> torch.Tensor:
        is_on = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(not is_on, warn_only=True)
        return x * 2

    try:
        step = gd.graphed(fn, dynamic={"x": 0}, sizes=(4,))
        for _ in range(4):
            step(torch.rand(3, 2))
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        step.prewarm(torch.rand(3, 2))
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_machinery_holds_is_followed_from_elsewhere() -> None:
    """An object that a queue of tasks knows as well is state of the callable all the same."""
    shared = types.SimpleNamespace(number=2)
    tasks: Any = asyncio.Queue()
    tasks.shared = shared
    held = types.SimpleNamespace(zero=shared, tasks=tasks)

    def fn(x: torch.Tensor) -> torch.Tensor:
        held.zero.number += 1
        return x * (held.tasks is not None)

    step = gd.graphed(fn, dynamic={"x": 0}, sizes=(4,))
    for _ in range(6):
        step(torch.rand(3, 2))
    assert shared.number == 8
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.STATE_REBOUND


def test_what_isinstance_caches_is_no_state() -> None:
    """An abstract class remembers the classes that it was asked about, by whomever: graphs go on serving."""

    class Base(ABC):  # noqa: B024
        pass

    class Thing(Base):
        number = 2

    thing = Thing()
    assert not isinstance(2.5, Base)

    def fn(x: torch.Tensor) -> torch.Tensor:
        scale: int = getattr(thing, "number".lower()) if isinstance(thing, Base) else 5  # a name that is not spelled
        return x * scale

    step = gd.graphed(fn, dynamic={"x": 0}, sizes=(4,))
    for _ in range(4):
        step(torch.rand(3, 2))
    for other in (None, 1, "text", [], type("Other", (), {})()):
        assert not isinstance(other, Base)
        step(torch.rand(3, 2))
    assert step.stats.captures == 1
    assert step.stats.hits >= 5
