"""The cases of state that a call writes: how it is made, what the call does to it, and what tells how it is."""

import array
import asyncio
import contextvars
import copy
import ctypes
import decimal
import functools
import hashlib
import hmac
import importlib
import io
import mmap
import multiprocessing
import queue
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from graphdispatch import Reason

from .cases import PATCH, WRITES, Box, Made, Slots, Slotted, Write
from .cases_read import Worker, copy_of, function, module, own_class

__all__ = ["WRITES"]

Act = Callable[[Any, Tensor], Any]


def picture(value: Any) -> Any:
    """What an object holds, by value."""
    if isinstance(value, Tensor):
        return value.tolist(), None if value.grad is None else value.grad.tolist(), picture(vars(value))
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {f"{key}": picture(held) for key, held in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [picture(held) for held in value]
    if isinstance(value, (Box, nn.Module)):
        return picture(vars(value))
    if isinstance(value, Slotted):
        return picture(value.k)
    return value if isinstance(value, (str, int, float)) else type(value)


def answer(name: str, **options: Any) -> Callable[..., None]:
    """A case whose call answers with what it does to the state; ``tell``, or an attribute, says how that is."""

    def case(make: Callable[[], Any], act: Act, tell: Callable[[Any], Any] | str = picture) -> None:
        def made() -> Made:
            held = make()
            return Made(
                lambda x: act(held, x), tell=lambda: (attrgetter(tell) if isinstance(tell, str) else tell)(held)
            )

        assert name not in WRITES, name
        WRITES[name] = Write(made, **options)

    return case


def write(name: str, **options: Any) -> Callable[..., None]:
    """A case whose call does something to the state, and doubles its rows."""

    def case(make: Callable[[], Any], act: Act, *tell: Callable[[Any], Any] | str) -> None:
        answer(name, **options)(make, lambda held, x: (act(held, x), x * 2)[1], *tell)

    return case


def written(make: Callable[[], Made]) -> Callable[[], Made]:
    """A case of a callable and what tells its state. It has the name of its function."""
    WRITES[make.__name__] = Write(make)
    return make


def add(value: Any, _: Tensor) -> None:
    """Count in the value."""
    value.value += 1


def count(table: Any, _: Tensor) -> None:
    """Count in the first entry."""
    table[0] = table[0] + 1


def calls(held: Any, _: Any = None) -> None:
    """Count in an attribute."""
    held.calls = getattr(held, "calls", 0) + 1


# Objects, containers and modules.


class Cache:
    """A list of layers that grows, as ``DynamicCache`` does."""

    def __init__(self, *layers: Any) -> None:
        self.layers = list(layers)

    def update(self, k: Tensor) -> Tensor:
        if not self.layers:
            self.layers.append(Box(keys=None))
        layer = self.layers[0]
        layer.keys = k if layer.keys is None else torch.cat([layer.keys, k], 0)
        return layer.keys


class Counting(nn.Module):
    """Counts in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


class Hooked(nn.Module):
    """Its hook keeps features."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.features = inner, {}
        inner.register_forward_hook(lambda module, args, output: self.features.__setitem__("h", output))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


class Marked(np.ndarray):
    """An array of a class of its own, with attributes."""

    k = 2


class Own:
    """Sets attributes under other names."""

    def __init__(self) -> None:
        vars(self).update(_calls=0)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, f"_{name}", value)


def rows_of(cache: Cache) -> list[int]:
    """The number of rows in each layer."""
    return [len(layer.keys) for layer in cache.layers]


def rebound(owner: Any, x: Tensor) -> Tensor:
    """Rebind an entry."""
    owner["k"] = owner["k"] + 1
    return x + owner["k"]


def with_buffer() -> nn.Module:
    """A module with a buffer."""
    net = nn.Module()
    net.register_buffer("b", torch.zeros(3))
    return net


def rebind_buffer(net: Any, x: Tensor) -> Tensor:
    """Give the buffer new memory."""
    net.b = net.b + 1
    return x + net.b


def comes_and_goes(owner: Any, _: Tensor) -> None:
    """An attribute that each call sets or deletes."""
    if hasattr(owner, "calls"):
        del owner.calls
    else:
        owner.calls = 1


answer("cache of objects")(Cache, lambda c, x: x * 0 + len(c.update(x[:1])), rows_of)
answer("python_counter", row=True)(lambda: Counting().eval(), lambda m, x: m(x), lambda m: m.calls)
answer("dict_entry_rebound", row=True)(lambda: {"k": torch.zeros(3)}, rebound)
answer("hook")(lambda: Hooked(nn.ReLU()).eval(), lambda m, x: m(x), lambda m: [*m.features])
answer("buffer_rebound", row=True)(with_buffer, rebind_buffer, lambda m: m.b.tolist())
answer("buffer_resized", reason=Reason.CAPTURE_UNSAFE, row=True)(
    lambda: torch.zeros(0), lambda o, x: o.resize_(x.shape).copy_(x) + 1
)
write("class_changed", row=True)(
    Box, lambda o, _: setattr(o, "__class__", type("Next", (type(o),), {"limit": o.limit + 1})), "limit"
)
write("sparse_tensor_written", reason=Reason.CAPTURE_UNSAFE, row=True)(
    lambda: torch.eye(3).to_sparse(), lambda o, _: o.mul_(0.5), lambda o: o.to_dense().tolist()
)
write("values of a sparse tensor", reason=Reason.CAPTURE_UNSAFE)(
    lambda: torch.eye(3).to_sparse(), lambda o, _: o._values().add_(1), lambda o: o._values().tolist()
)
write("inference_tensor_written", reason=Reason.CAPTURE_UNSAFE, row=True)(
    torch.inference_mode()(lambda: torch.zeros(3)), torch.inference_mode()(lambda o, _: o.add_(1))
)
answer("memory_freed", reason=Reason.CAPTURE_UNSAFE, row=True)(
    lambda: torch.ones(3),
    lambda o, x: (o.untyped_storage().resize_(12), x * o.fill_(3.0), o.untyped_storage().resize_(0))[1],
    "shape",
)
write("python_queue", row=True)(list, lambda o, x: o.append(len(x) > 0))
write("never read")(lambda: Box(c=Box()), lambda o, x: setattr(o.c, "hidden", x[0] * 1))
write("attribute that goes")(lambda: Box(calls=1), comes_and_goes)
write("attribute of a class that comes")(
    lambda: own_class()(), lambda o, _: calls(type(o)), lambda o: getattr(type(o), "calls", 0)
)
write("list in a tuple and under another name")(
    lambda: Box(pair=(one := [0], 1), another=one), lambda o, _: count(o.pair[0], _)
)
write("dict that describes a class", reason=Reason.STATE_UNSEEN)(
    lambda: own_class(__parameters__={0: 0})(), lambda o, x: count(o.__parameters__, x), lambda o: o.__parameters__[0]
)
write("setter of other names")(Own, lambda o, _: setattr(o, "calls", o._calls + 1), vars)
write("slot")(lambda: Slotted(None), lambda o, x: setattr(o, "k", x[0] * 1))
write("slot that comes")(lambda: Slotted(None), comes_and_goes, lambda o: hasattr(o, "calls"))
write("gradient")(lambda: nn.Parameter(torch.ones(3)), lambda o, x: setattr(o, "grad", x[0] * 1))
write("attribute of a tensor")(lambda: torch.ones(3), lambda o, x: setattr(o, "tag", x[0] * 1))
write("data of a tensor")(lambda: torch.ones(3), lambda o, _: setattr(o, "data", o.data + 1))
write("strides of a tensor")(lambda: torch.arange(9.0).view(3, 3), lambda o, _: setattr(o, "data", o.data.T))
write("requires_grad")(lambda: torch.ones(3), lambda o, _: o.requires_grad_(not o.requires_grad), "requires_grad")
write("rebound to another slot")(
    lambda: Box(k=Slots(2.0)), lambda o, _: setattr(o, "k", Slots(o.k.k + 1)), lambda o: o.k.k
)
write("dict")(lambda: {"k": 9}, lambda o, _: o.update(n=len(o), **{f"{len(o)}": 1}))
write("order of a dict")(lambda: OrderedDict(a=1, b=2, c=3), lambda o, _: o.move_to_end(next(iter(o))), list)
write("hooks")(OrderedDict, lambda o, _: (o.update({len(o): 1}), calls(o)), lambda o: (len(o), vars(o)))
write("set")(lambda: {9}, lambda o, _: o.add(len(o)), sorted)
write("deque")(lambda: deque([9]), lambda o, _: o.append(1), list)
write("numpy_writes", row=True)(lambda: np.zeros(3, dtype=np.float32), lambda o, _: o.__iadd__(3.0))
write("entry of an array", reason=Reason.STATE_UNSEEN)(lambda: np.array([0], dtype=object), count)


def namespace(text: str) -> dict[str, Any]:
    """The variables of a text that ran."""
    names = {"__name__": __name__, "__file__": __file__}
    exec(text, names)
    return names


def only_read(array: Any) -> Any:
    """An array that code may not write to."""
    array.flags.writeable = False
    return array


LENGTHS: contextvars.ContextVar[list[int]] = contextvars.ContextVar("LENGTHS")


class Keeps:
    """Keeps a number under a name that stands nowhere."""

    def __init__(self) -> None:
        self.count = 3

    def put(self, value: int) -> None:
        setattr(self, "".join(["co", "unt"]), value)


class OwnDeque(deque[int]):
    """Counts how often somebody calls its own methods."""

    calls = 0

    def extend(self, values: Any) -> None:
        self.calls += 1
        super().extend(values)

    def clear(self) -> None:
        self.calls += 1
        super().clear()


def drain(held: Any, _: Tensor) -> None:
    """Take the work that is there, and leave room for more."""
    todo, held.todo = held.todo, []
    while todo:
        held.done += todo.pop()
    held.todo.append(held.done)


def unlocked(array: Any, _: Tensor) -> None:
    """Write to an array that is meant to be only read."""
    array.flags.writeable = True
    array += 1
    array.flags.writeable = False


write("drained list")(
    lambda: Box(todo=(one := [1, 2]), first=one, done=0), drain, lambda o: (picture(o), o.todo is o.first)
)
write("list in a context variable")(
    lambda: (LENGTHS.set([]), LENGTHS)[1], lambda o, x: o.get().append(len(x)), lambda o: list(o.get())
)
write("attribute of a computed name, by a method")(Keeps, lambda o, x: o.put(o.count + len(x)), lambda o: o.count)
write("deque of a class of its own")(lambda: OwnDeque([9]), lambda o, _: o.append(1), lambda o: (list(o), o.calls))
write("name of a text")(
    lambda: namespace("count = 0"),
    lambda o, _: exec(compile("count = count + 1", "text", "exec"), o),
    lambda o: o["count"],
)
write("array that is only read")(lambda: only_read(np.zeros(3)), unlocked)
write("views of an array before it")(
    lambda: Box(base=(base := np.zeros(3)), rows=np.broadcast_to(base, (2, 3)), last=base[1:]),
    lambda o, _: o.base.__iadd__(1),
)
write("shape of an array whose rows lie apart")(
    lambda: Box(k=np.zeros((4, 1, 3))[::2], calls=0),
    lambda o, _: setattr(o.k, "shape", (2, 3) if o.k.ndim == 3 else (2, 1, 3)),
    lambda o: o.k.shape,
)
write("default factory")(lambda: defaultdict(int), lambda o, _: next_factory(o), lambda o: o.default_factory())
write("partial", reason=Reason.STATE_UNSEEN)(
    lambda: partial(int, 0), lambda o, _: o.__setstate__((int, (o.args[0] + 1,), {}, None)), "args"
)
write("deque by a partial")(
    lambda: (one := deque([9]), partial(one.append, 1)), lambda o, _: o[1](), lambda o: list(o[0])
)
write("hook of a tensor", reason=Reason.STATE_UNSEEN)(
    lambda: nn.Parameter(torch.ones(3)), lambda o, _: o.register_hook(abs), lambda o: len(o._backward_hooks or ())
)
write("name of a function")(
    lambda: copy_of(function), lambda o, _: setattr(o, "__name__", f"{o.__name__}x"), "__name__"
)
write("first attribute of a function")(lambda: copy_of(function), calls, vars)
for name, make, take in (
    ("default", lambda: lambda counts=[0]: counts, lambda fn: fn.__defaults__[0]),
    ("closure", lambda: (lambda counts: lambda: counts)([0]), lambda fn: fn.__closure__[0].cell_contents),
):
    write(f"{name} of a function that does not run")(make, lambda o, _, take=take: count(take(o), _), take)
    write(f"{name} of a function that runs")(make, lambda o, _: count(o(), _), take)


def next_factory(table: Any) -> None:
    """Count in the factory of a dict."""
    number = table.default_factory() + 1
    table.default_factory = lambda: number


@written
def counter_in_a_closure() -> Made:
    """A variable of the function around it."""
    number = 0

    def fn(x: Tensor) -> Tensor:
        nonlocal number
        number += 1
        return x * number

    return Made(fn, tell=lambda: number)


@written
def variable_that_comes_and_goes() -> Made:
    """A variable of the function around it, which is not there at first."""
    number = 3
    del number

    def fn(x: Tensor) -> Tensor:
        nonlocal number
        try:
            del number
        except NameError:
            number = 3  # noqa: F841
        return x * 2

    return Made(fn, tell=lambda: fn.__closure__ == (types.CellType(),))


def module_code(*lines: str) -> Callable[[], Made]:
    """Code over variables of its own module."""

    def made() -> Made:
        names: dict[str, Any] = {"__name__": "written", "newest": 0, "latest": [0]}
        exec(compile("\n    ".join(("def fn(x):", *lines, "return x * 2")), "written.py", "exec"), names)
        return Made(names["fn"], tell=lambda: (names["newest"], names["latest"], names.get("made")))

    return made


def named_module() -> str:
    """The name of a module that nothing holds but the interpreter."""
    made = types.ModuleType("written_module")
    vars(made).update(value=0)
    PATCH.setitem(sys.modules, "written_module", made)
    return made.__name__


def named_by_its_code() -> Made:
    """It comes to a module that the code names."""
    settings = module(__file__=__file__)
    names = {"__name__": __name__, "__file__": __file__, "settings": settings}
    exec("def fn(x):\n    setattr(settings, '_'.join(['a', 'b']), len(x))\n    return x * 2", names)
    return Made(names["fn"], tell=lambda: vars(settings).get("a_b"))


WRITES["variable of a module, by a computed name"] = Write(named_by_its_code, reason=Reason.STATE_UNSEEN)


FINDERS: dict[str, Callable[[str], Any]] = {
    "import_module": lambda name: importlib.import_module(name, None),
    "__import__": lambda name: __import__(name),
    "sys.modules": lambda name: sys.modules[name],
}


def count_in_named(find: Callable[[str], Any]) -> Act:
    """Count there: the code that has the name of the variable begins before the module is found."""

    def act(name: Any, _: Tensor) -> None:
        find(name).value += 1

    return act


for name, find in FINDERS.items():
    write(f"module found by {name}", reason=Reason.STATE_UNSEEN)(
        named_module, count_in_named(find), lambda name: sys.modules[name].value
    )
WRITES["variable of the module that comes"] = Write(module_code("global made", "made = len(x)"))
WRITES["globals()"] = Write(module_code("globals()['newest'] += 1"), reason=Reason.STATE_UNSEEN)


# The process and its libraries.


def turn_type(_: Any, __: Tensor) -> None:
    """Turn the default type."""
    torch.set_default_dtype(torch.float32 if torch.get_default_dtype() is torch.float64 else torch.float64)


def turn_determinism(_: Any, __: Tensor) -> None:
    """Turn determinism on or off, with warnings alone."""
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled(), warn_only=True)


def warns() -> Any:
    """Whether determinism is on, and only warns."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def of_library() -> Any:
    """A module of torch with an attribute that somebody put there."""
    PATCH.setattr(nn, "unusual_count", 0, raising=False)
    return nn


def count_in_library(_: Any, __: Tensor) -> None:
    """Count there."""
    torch.nn.unusual_count += 1


def draw_again(generator: Any, x: Tensor) -> Tensor:
    """Seed it and draw: a replay draws on, and would not seed it again."""
    generator.manual_seed(3)
    return x + torch.rand(3, generator=generator)


write("default type")(lambda: torch.set_default_dtype(torch.float32), turn_type, lambda _: torch.get_default_dtype())
write("determinism")(
    lambda: torch.use_deterministic_algorithms(True, warn_only=True), turn_determinism, lambda _: warns()
)
write("context", reason=Reason.STATE_UNSEEN)(
    contextvars.copy_context, lambda o, _: o.run(VARIABLE.set, o.run(VARIABLE.get) + 1), lambda o: o.run(VARIABLE.get)
)
write("library", in_breaks=False)(of_library, count_in_library, "unusual_count")
answer("generator that the call seeds", is_shared=True)(
    lambda: torch.Generator().manual_seed(1), draw_again, lambda g: g.get_state().tolist()[:99]
)
VARIABLE = contextvars.ContextVar("VARIABLE", default=0)


# What differs from call to call: numbers that are drawn, and iterators.


def drawn(name: str, **options: Any) -> Callable[..., None]:
    """A case that multiplies by a number that is drawn or taken."""

    def case(make: Callable[[], Any], draw: Callable[[Any], float], tell: Callable[[Any], Any]) -> None:
        answer(name, **{"reason": Reason.STATE_UNSEEN} | options)(make, lambda held, x: x * draw(held), tell)

    return case


drawn("python_randomness", is_shared=True, row=True)(
    lambda: random.seed(3), lambda _: random.random(), lambda _: random.getstate()
)
drawn("numpy.random", is_shared=True)(
    lambda: np.random.seed(3), lambda _: np.random.random(), lambda _: repr(np.random.get_state())
)
drawn("own generator of Python")(lambda: random.Random(0), lambda o: o.random(), lambda o: o.getstate())
drawn("generator of the system")(random.SystemRandom, lambda o: 2 if o.random() < 1 else 5, lambda _: 0)
drawn("generator that gives no state")(
    lambda: own_class(random.Random, getstate=None)(0), lambda o: o.random(), random.Random.getstate
)
drawn("lines of a file in memory")(lambda: io.StringIO("2\n3\n" * 99), lambda o: float(next(o)), lambda o: o.tell())
answer("tensor_from_numpy", reason=Reason.STATE_UNSEEN, row=True)(
    lambda: np.random.default_rng(0),
    lambda o, x: x + torch.from_numpy(o.random(3)),
    lambda o: f"{o.bit_generator.state}",
)
ITERATORS: dict[str, Callable[[], Iterator[int]]] = {
    "list iterator": lambda: iter(list(range(1, 400))),
    "same again": lambda: (1 for _ in [0] * 400),
    "generator that has begun": lambda: (lambda line: (next(line), line)[1])(n for n in range(400)),
}
LINE: Any = None
FACTOR = 2


def held_line() -> Iterator[int]:
    """An iterator in a global variable, that begins with one."""
    PATCH.setitem(globals(), "LINE", iter(list(range(1, 400))))
    return LINE


def swallowed() -> int:
    """Take one and hide each error."""
    try:
        return next(LINE)
    except:  # noqa: E722
        return 1


TAKES: dict[str, Callable[[], int]] = {
    "global": lambda: next(LINE),
    "evaluated": lambda: int(eval("next(LINE)")),
    "swallowed error": swallowed,
}
for name, make in ITERATORS.items():
    drawn(f"iterator: {name}")(make, next, next)
for name, take in TAKES.items():
    drawn(f"iterator of a {name}")(held_line, lambda _, take=take: take(), next)


def line_in(place: str) -> Callable[[], Any]:
    """An object that holds an iterator in some place, and the iterator."""

    def make() -> Any:
        line = iter(list(range(1, 400)))
        held = Box(line=line, listed=[line], pair=([line],), within=Box(line=line), name="line")
        held.listed.append(held.listed)
        return Box(**{name: vars(held)[name] for name in ("name", place)}), line

    return make


HOLDERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "an attribute": ("line", lambda o: o.line),
    "an attribute by a constant": ("line", lambda o: getattr(o, "line")),  # noqa: B009
    "an attribute by a computed name": ("line", lambda o: getattr(o, o.name)),
    "an attribute in a table": ("line", lambda o: vars(o)["line"]),
    "an attribute among all": ("line", lambda o: next(one for name, one in vars(o).items() if name == o.name)),
    "an object within": ("within", lambda o: o.within.line),
    "a list": ("listed", lambda o: o.listed[0]),
    "a list in a tuple": ("pair", lambda o: o.pair[0][0]),
}
for name, (place, find) in HOLDERS.items():
    drawn(f"iterator in {name}")(line_in(place), lambda o, find=find: next(find(o[0])), lambda o: next(o[1]))


# Objects whose state Python cannot read.


def foreign(name: str, **options: Any) -> Callable[..., None]:
    """A case of an object of compiled code, which a capture must not use."""
    return write(name, reason=Reason.STATE_UNSEEN, **options)


def toggle(lock: Any, _: Tensor) -> None:
    """Take a lock that is free, or free it."""
    if not lock.acquire(blocking=False):
        lock.release()


foreign("compiled_object_used", row=True)(hashlib.sha256, lambda o, _: o.update(b"x"), lambda o: o.digest())
foreign("keyed hash")(lambda: hmac.new(b"k", b"", "sha256"), lambda o, _: o.update(b"x"), lambda o: o.digest())
foreign("text")(
    lambda: io.TextIOWrapper(io.BytesIO(), write_through=True), lambda o, _: o.write("x"), lambda o: o.tell()
)
foreign("lock_left", is_shared=True, row=True)(lambda: threading.Semaphore(50), lambda o, _: o.acquire(), "_value")
foreign("lock", in_breaks=False, is_shared=True)(threading.Lock, toggle, lambda o: o.locked())
foreign("queue")(queue.SimpleQueue, lambda o, _: o.put(1), lambda o: o.qsize())
foreign("decimal context", is_shared=True)(decimal.Context, lambda o, _: setattr(o, "prec", o.prec + 1), "prec")
foreign("bits of NumPy")(lambda: np.random.PCG64(3), lambda o, _: o.random_raw(), lambda o: f"{o.state}")
foreign("map")(lambda: mmap.mmap(-1, 64), lambda o, _: o.write(b"x"), lambda o: (o[:], o.tell()))
foreign("file in memory")(io.BytesIO, lambda o, _: o.write(b"x"), lambda o: (o.getvalue(), o.tell()))
foreign("ctypes")(ctypes.c_int, add, "value")
foreign("structure of ctypes")(own_class(ctypes.Structure, _fields_=(("calls", ctypes.c_float),)), calls, "calls")
foreign("attribute of a thread", is_shared=True)(Worker, calls, "calls")
foreign("attribute of an array")(lambda: np.zeros(2).view(Marked), calls, vars)
foreign("array of a class of its own")(lambda: np.zeros(2).view(Marked), count, list)
foreign("array of Python")(lambda: array.array("i", [9]), lambda o, _: o.append(1), list)
foreign("bytes")(lambda: bytearray(2), lambda o, _: o.append(1), bytes)
foreign("element of XML")(lambda: ElementTree.Element("a"), lambda o, _: ElementTree.SubElement(o, "b"), len)
write("object that a queue holds, too")(lambda: shared_with(asyncio.Queue()), lambda o, _: calls(o.zero), "zero.calls")


def length_unseen(tensor: Tensor) -> int:
    """Read a size where no mode for functions sees it."""
    with torch._C.DisableTorchFunction():
        return tensor.shape[0]


def add_unseen(tensor: Tensor, _: Tensor) -> None:
    """Count where no mode sees it."""
    with _disable_current_modes():
        tensor += 1


foreign("counts without modes")(partial(torch.zeros, ()), add_unseen, float)


def unseen(name: str, make: Callable[[], Any], get: Callable[[Any], float], **options: Any) -> None:
    """A case whose call multiplies by what it reads of an object that nobody can compare."""
    answer(name, **{"reason": Reason.STATE_UNSEEN} | options)(make, lambda held, x: x * get(held), get)


unseen("event_read", threading.Event, lambda o: 1 + o.is_set(), row=True)
unseen("event_read: shared value", lambda: multiprocessing.Value("i", 2), lambda o: o.value)
unseen("thread_local_read", lambda: type("Local", (threading.local,), {"k": 2.0})(), lambda o: o.k, row=True)
unseen("calls that a cache counts", lambda: functools.cache(abs), lambda o: 2 + (o.cache_info().hits > 99))
unseen("attribute of a condition", threading.Condition, lambda o: getattr(o, "k", 2.0))
unseen("attribute of a thread that is read", Worker, lambda o: o.k)
unseen("entry of an array of Python", lambda: array.array("d", [2.0]), lambda o: o[0])
unseen("object in an array", lambda: np.array([{"k": 2}], dtype=object), lambda o: o[0]["k"])
unseen("weak proxy", lambda: (box := Box(k=2.0), weakref.proxy(box)), lambda o: o[1].k)
unseen("lock given back by name", threading.Lock, lambda o: (o.acquire() and o.release()) or 2)
unseen("attrgetter", lambda: (Box(k=2.0), attrgetter("k")), lambda o: o[1](o[0]))
unseen("globals under another name", lambda: globals, lambda o: o()["FACTOR"])
unseen("methodcaller", lambda: ([2], methodcaller("".join(["p", "op"]), 0)), lambda o: o[1]([*o[0]]))
unseen("evaluated variables", lambda: {"name": "k", "k": 2.0}, lambda o: eval("locals()[name]", dict(o)))
unseen("property of a getter", lambda: own_class(k=property(attrgetter("number")), number=2)(), lambda o: o.k)
unseen("annotations", lambda: own_class(__annotations__={"k": 2}), lambda o: o.__annotations__["k"])
unseen("attribute of an array that is read", lambda: np.zeros(2).view(Marked), lambda o: o.k)
unseen("mask of an array", lambda: np.ma.array([2.0, 8.0], mask=[False, True]), lambda o: float(o.mean()))
unseen("memory view", lambda: memoryview(bytearray([2])), lambda o: o[0])
unseen("text of XML", lambda: ElementTree.fromstring("<a>2</a>"), lambda o: float(o.text))
unseen("size read without torch's functions", lambda: torch.zeros(2), length_unseen)
unseen("subclasses", lambda: own_class(), lambda o: 2 + len(o.__subclasses__()))
unseen("all that an object holds", lambda: Box(k=2.0, event=threading.Event()), lambda o: vars(o)["k"])
unseen("copy of all that an object holds", lambda: Box(k=2.0, event=threading.Event()), lambda o: copy.copy(o).k)
unseen("module of a made-up name", lambda: "torch", lambda name: 2.0 if ".".join([name]) in sys.modules else 5.0)


def shared_with(tasks: Any) -> Any:
    """An object that a queue of tasks knows as well."""
    tasks.shared = Box(calls=0)
    return Box(zero=tasks.shared, tasks=tasks)


# Memory of tensors that the host's code gets hold of.


def host(name: str, act: Callable[[Tensor], Any]) -> None:
    """A case of a tensor that is written without torch."""
    make = partial(torch.zeros, 2)
    write(f"host: {name}", reason=Reason.CAPTURE_UNSAFE)(make, lambda n, _: act(n), lambda n: n.tolist())


def plus(memory: Any) -> None:
    """Count in each entry."""
    memory += 1


def by_address(address: int) -> None:
    """Count at an address."""
    (ctypes.c_float * 2).from_address(address)[1] += 1


def before_torch(tensor: Tensor) -> None:
    """Get the array, count by torch, then count by NumPy."""
    memory = tensor.numpy()
    tensor.add_(1)
    plus(memory)


host("numpy", lambda n: plus(n.numpy()))
host("to_dlpack", lambda n: plus(np.from_dlpack(torch.from_dlpack(torch.utils.dlpack.to_dlpack(n)))))
host("address", lambda n: by_address(n.data_ptr()))
host("before torch", before_torch)
host("storage", lambda n: count(n.untyped_storage(), n))
host("filled storage", lambda n: n.untyped_storage().fill_((int(n.untyped_storage()[0]) + 1) % 100))


# What holds state beside what it is known for.
