"""The cases of one number in each place that Python has for it: it changes between calls, or an equal one takes its
place, or each call counts in it."""

import dataclasses
import functools
import os
import random
import sys
import types
import weakref
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import pydantic
import torch
from torch import nn, ones

from graphdispatch import Reason

from .cases import KEPT, PATCH, READS, WRITES, Box, Slotted
from .cases_read import choice, copy_of, function, kept, module, own_class, read, settings, stub, to
from .cases_written import write

__all__ = ["KEPT", "READS", "WRITES"]

Get = Callable[[Any], Any]
Set = Callable[[Any, Any], Any]


def place(name: str, *, reason: Reason = Reason.STATE_REBOUND, equal: bool = True) -> Callable[..., None]:
    """The cases of a place. ``equal`` says whether a graph serves on where an equal number takes the place of the
    first."""

    def case(make: Callable[[], Any], get: Get, put: Set) -> None:
        read(name)(make, get, lambda held: put(held, 5.0))
        if equal:
            kept(f"{name}: an equal number")(make, get, lambda held: put(held, float("2.0")))
        write(f"{name}: counted", reason=reason)(make, lambda held, _: put(held, get(held) + 1), get)

    return case


K: tuple[Get, Set] = (lambda held: held.k, lambda held, value: setattr(held, "k", value))
"""An attribute of what is held."""
OF_CLASS: tuple[Get, Set] = (lambda held: held.k, lambda held, value: setattr(type(held), "k", value))
KEY: tuple[Get, Set] = (lambda held: held["k"], lambda held, value: held.update(k=value))
FIRST: tuple[Get, Set] = (lambda held: held[0], lambda held, value: held.__setitem__(0, value))


class Private(pydantic.BaseModel):
    """Has a field, and an attribute that is none."""

    number: float = 2.0
    _number: float = pydantic.PrivateAttr(2.0)


class Numbers(dict[str, float]):
    """A dict with an attribute."""

    k = 2.0


@dataclasses.dataclass
class Settings:
    """Settings with a field."""

    k: float = 2.0


Pair = namedtuple("Pair", "first second")
NUMBER, TABLE, BOXES = 2.0, {"k": 2.0}, [Box(k=2.0)]


def of_globals(name: str, value: Any) -> Callable[[], None]:
    """A global variable, as it is at first."""
    return lambda: PATCH.setitem(globals(), name, value())


def set_number(_: Any, value: float) -> None:
    """Rebind the variable."""
    global NUMBER  # noqa: PLW0603
    NUMBER = value


def environment() -> None:
    """A variable of the environment."""
    PATCH.setenv("GD_K", "2.0")


def cell() -> Any:
    """A variable of a function around two others."""
    number = 2.0

    def get() -> float:
        return number

    def put(value: float) -> None:
        nonlocal number
        number = value

    return get, put


def cached(make: Callable[[], Any]) -> Any:
    """What gives the same again."""
    get = functools.cache(make)
    get()
    return get


def of_function(**attributes: Any) -> Any:
    """A function with two defaults, and attributes."""
    made = copy_of(function)
    to(made, **attributes)
    return made


def with_metaclass() -> Any:
    """A class whose metaclass has the number."""
    meta = type("Meta", (type,), {"__module__": __name__, "k": 2.0})
    return meta("Own", (), {"__module__": __name__})


place("attribute")(lambda: Box(k=2.0), *K)
place("attribute of an attribute")(
    lambda: Box(a=Box(b=Box(k=2.0))), lambda h: h.a.b.k, lambda h, v: setattr(h.a.b, "k", v)
)
place("attribute of a class")(lambda: own_class(k=2.0), *K)
place("attribute of an object's class")(lambda: own_class(k=2.0)(), *OF_CLASS)
place("attribute that hides one of the class")(lambda: own_class(k=9.0, __init__=lambda s: to(s, k=2.0))(), *K)
place("attribute of a metaclass")(with_metaclass, *OF_CLASS)
place("attribute of a function")(lambda: of_function(k=2.0), *K)
place("attribute of a number", equal=False)(
    lambda: own_class(int, number=2.0)(1), lambda h: h.number, lambda h, v: setattr(h, "number", v)
)
place("attribute of a dict", equal=False)(lambda: Numbers(), *K)
place("attribute of a tensor")(lambda: with_k(ones(3)), *K)
place("attribute of a layer")(lambda: with_k(nn.Linear(2, 2)), *K)
place("attribute of torch's own modules")(lambda: stub(k=2.0), *K)
place("attribute of a generator", equal=False)(lambda: own_class(random.Random, k=2.0)(1), *K)
place("attribute of torch's generator", equal=False)(lambda: own_class(torch.Generator, k=2.0)(), *K)
place("attribute of a member of an enumeration")(lambda: with_k(choice()), *K)
place("slot")(lambda: Slotted(2.0), *K)
place("field")(Settings, *K)
place("field of pydantic", equal=False)(Private, lambda h: h.number, lambda h, v: setattr(h, "number", v))
place("private attribute of pydantic")(Private, lambda h: h._number, lambda h, v: setattr(h, "_number", v))
place("variable of a module")(lambda: Box(m=module(k=2.0)), lambda h: h.m.k, lambda h, v: setattr(h.m, "k", v))
place("variable around a function")(cell, lambda h: h[0](), lambda h, v: h[1](v))
place("global variable")(of_globals("NUMBER", lambda: 2.0), lambda _: NUMBER, set_number)
place("entry of a global dict")(
    of_globals("TABLE", lambda: {"k": 2.0}), lambda _: TABLE["k"], lambda _, v: TABLE.update(k=v)
)
place("attribute in a global list")(
    of_globals("BOXES", lambda: [Box(k=2.0)]), lambda _: BOXES[0].k, lambda _, v: setattr(BOXES[0], "k", v)
)
place("entry of a list")(lambda: [2.0, 3.0], *FIRST)
place("entry of a list in a list")(lambda: [[2.0]], lambda h: h[0][0], lambda h, v: h[0].__setitem__(0, v))
place("entry of a list in a tuple")(
    lambda: Pair(1, [2.0]), lambda h: h.second[0], lambda h, v: h.second.__setitem__(0, v)
)
place("entry of a dict")(lambda: {"k": 2.0}, *KEY)
place("entry of an ordered dict")(lambda: OrderedDict(k=2.0), *KEY)
place("entry of a dict with a default")(lambda: defaultdict(int, k=2.0), *KEY)
place("entry of a dict of a class of its own")(lambda: Numbers(k=2.0), *KEY)
place("entry of a UserDict")(lambda: UserDict(k=2.0), *KEY)
place("entry of a ChainMap")(lambda: ChainMap({}, {"k": 2.0}), lambda h: h["k"], lambda h, v: h.maps[1].update(k=v))
place("entry of a deque")(lambda: deque([2.0], maxlen=1), lambda h: h[0], lambda h, v: h.append(v))
place("view of a dict")(lambda: (t := {"k": 2.0}, t.values()), lambda h: sum(h[1]), lambda h, v: h[0].update(k=v))
place("proxy of a dict")(
    lambda: (t := {"k": 2.0}, types.MappingProxyType(t)), lambda h: h[1]["k"], lambda h, v: h[0].update(k=v)
)
place("entry of an array")(lambda: np.full(1, 2.0), lambda h: float(h[0]), lambda h, v: h.fill(v))
place("defaults that code reads", equal=False)(
    lambda: of_function(), lambda h: h.__defaults__[0], lambda h, v: setattr(h, "__defaults__", (v,))
)
place("keyword's default in place", equal=False)(
    lambda: of_function(), lambda h: h(1), lambda h, v: h.__kwdefaults__.update(by=v)
)
place("keyword of a partial")(lambda: partial(dict, k=2.0), lambda h: h()["k"], lambda h, v: h.keywords.update(k=v))
place("argument of an exception", equal=False)(
    lambda: ValueError(2.0), lambda h: h.args[0], lambda h, v: setattr(h, "args", (v,))
)
place("object that a cache gives")(
    lambda: cached(lambda: Box(k=2.0)), lambda h: h().k, lambda h, v: setattr(h(), "k", v)
)
place("object behind a weak reference")(
    lambda: (b := Box(k=2.0), weakref.ref(b)), lambda h: h[1]().k, lambda h, v: setattr(h[0], "k", v)
)
place("context variable", equal=False)(lambda: ContextVar("k", default=2.0), lambda h: h.get(), lambda h, v: h.set(v))
place("default of a context variable")(
    lambda: (b := Box(k=2.0), ContextVar("k", default=b))[1], lambda h: h.get().k, lambda h, v: setattr(h.get(), "k", v)
)
place("variable of the environment")(
    environment, lambda _: float(os.environ["GD_K"]), lambda _, v: os.environ.update(GD_K=f"{v}")
)
place("variable of an imported module", equal=False)(
    settings, lambda _: imported().k, lambda h, v: setattr(h.owner, "k", v)
)
place("variable of a module in sys.modules", equal=False)(
    settings, lambda _: sys.modules["users_settings"].k, lambda _, v: setattr(sys.modules["users_settings"], "k", v)
)


def with_k(held: Any) -> Any:
    """An object that was given the number."""
    held.k = 2.0
    return held


def imported() -> Any:
    """A module, by its name."""
    import users_settings

    return users_settings
