"""Attributes that code reads under names that it computes, by whatever function and whoever holds that."""

import ast
import builtins
import copy
import dataclasses
import functools
import inspect
import io
import json
import logging
import operator
import pickle
import string
import types
from collections.abc import Callable
from functools import partial, partialmethod
from operator import attrgetter, methodcaller
from typing import Any

import pytest
import torch
from tests.helpers import batch, check_rows, make
from torch.utils import _pytree

from graphdispatch import Reason

KEY, TEMPLATE = "".join(["sca", "le"]), "".join(["{0.sca", "le}"])


class Box:
    """Whatever attributes it is given."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slot:
    """One number, in a slot."""

    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Aliased(Slot):
    """Has the slot under another name, too."""

    alias = vars(Slot)[KEY]


class Tabled(Box):
    """Has its table under another name."""

    table = vars(Box)["__dict__"]
    get = partialmethod(getattr)
    found = getattr


@dataclasses.dataclass
class Data:
    """A field whose name stands in its class alone."""

    scale: float = 2.0


_pytree.register_dataclass(Data)


class Visitor(ast.NodeVisitor):
    """Has a method for each kind of node, under names that ``ast`` makes up."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __setattr__(self, name: str, value: float) -> None:
        vars(self)["visit_Pass"] = lambda _: value


def two_at_once(held: Any) -> float:
    """A local name for a builtin, used for a name that stands in the code and for one that does not."""
    get = getattr
    return float(get(held, "other", 1.0) * get(held, KEY))


def pickled(held: Any) -> float:
    """The sum of the bytes of a pickle."""
    file = io.BytesIO()
    pickle.Pickler(file).dump(held)
    return float(sum(file.getvalue()))


def with_default(held: Any, get: Any = getattr) -> float:
    """A default."""
    return float(get(held, KEY))


Get = Callable[[], float]
HELD: dict[str, Callable[[Any], Get]] = {
    "in a default": lambda held: partial(with_default, held),
    "in a closure": lambda held: (lambda get: lambda: get(held, KEY))(getattr),
    "in an attribute": lambda held: (lambda box: lambda: box.get(held, KEY))(Box(get=getattr)),
    "in an attribute beside the builtin": lambda held: (
        lambda box: lambda: getattr(held, "other", 1.0) * box.get(held, KEY)
    )(Box(get=getattr)),
    "in a container": lambda held: (lambda table: lambda: table["get"](held, KEY))({"get": getattr}),
    "in a logger": lambda held: (lambda box: lambda: box.get(held, KEY))(logger_with(getattr)),
    "in a local name": lambda held: lambda: two_at_once(held),
    "in a partial": lambda held: partial(partial(getattr, held), KEY),
    "in a method": lambda held: partial(types.MethodType(getattr, held), KEY),
    "its own method": lambda held: partial(getattr.__call__, held, KEY),
    "of the module": lambda held: lambda: builtins.getattr(held, KEY),
    "by its name": lambda held: lambda: getattr(builtins, "getattr")(held, KEY),  # noqa: B009
    "mapped": lambda held: lambda: next(map(getattr, [held], [KEY])),
    "reduced": lambda held: lambda: functools.reduce(getattr, [KEY], held),
    "vars": lambda held: (lambda box: lambda: box.get(held)[KEY])(Box(get=vars)),
    "hasattr": lambda held: (lambda box: lambda: 2.0 if box.has(held, KEY) and held.scale < 3 else 5.0)(
        Box(has=hasattr)
    ),
    "object's": lambda held: partial(object.__getattribute__, held, KEY),
    "the object's": lambda held: partial(held.__getattribute__, KEY),
    "its state": lambda held: (lambda get: lambda: get()[KEY])(held.__getstate__),
    "its table by a constant": lambda held: lambda: getattr(held, "__dict__")[KEY],  # noqa: B009
    "its method by a constant": lambda held: lambda: getattr(held, "__getattribute__")(KEY),  # noqa: B009
    "reduced by a constant": lambda held: lambda: methodcaller("__reduce_ex__", 2)(held)[2][KEY],
    "three attributes": lambda held: lambda: operator.attrgetter("__class__", "__doc__", KEY)(held)[2],
    "a template": lambda held: lambda: float(TEMPLATE.format(held)),
    "a mapped template": lambda held: lambda: float(next(map("{0.scale}".format, [held]))),
    "a kept template": lambda held: (lambda fill: lambda: float(next(map(fill, [held]))))("{0.scale}".format),
    "a formatter": lambda held: lambda: float(string.Formatter().format(TEMPLATE, held)),
    "statically": lambda held: lambda: inspect.getattr_static(held, KEY),
    "copied": lambda held: lambda: vars(copy.copy(held))[KEY],
    "a pickle": lambda held: lambda: pickled(held),
    "a mapped pickle": lambda held: lambda: float(sum(next(map(pickle.dumps, [held])))),
    "an encoder": lambda held: lambda: json.loads(json.dumps(held, default=vars))[KEY],
}
OWN: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "a slot's descriptor": (lambda: Slot(2.0), lambda held: vars(Slot)[KEY].__get__(held)),
    "a slot under another name": (lambda: Aliased(2.0), lambda held: held.alias),
    "a table under another name": (lambda: Tabled(scale=2.0), lambda held: held.table[KEY]),
    "a method of a partial": (lambda: Tabled(scale=2.0), lambda held: held.get(KEY)),
    "an attribute of a class": (lambda: Tabled(scale=2.0), lambda held: held.found(held, KEY)),
    "leaves": (Data, lambda held: _pytree.tree_leaves(held)[0]),
    "fields": (Data, lambda held: next(iter(dataclasses.asdict(held).values()))),
    "a visitor": (lambda: Visitor(2.0), lambda held: held.visit(ast.Pass())),
}


def logger_with(get: Any) -> logging.Logger:
    """A logger, of which nobody looks at the attributes."""
    logger = logging.Logger("accessors")
    logger.get = get  # type: ignore[attr-defined]
    return logger


def check(fn: Any, change: Callable[[], object]) -> None:
    """Graphs serve, and the next answer after the change is eager's, and another one."""
    step, x = make(fn), batch(4)
    assert check_rows(step, *[4] * 5)[-1].is_graph, step.explain(x)
    before = fn(x)
    change()
    assert not torch.equal(fn(x), before)
    check_rows(step, 4, 4, 3)


@pytest.mark.parametrize("name", HELD)
def test_a_computed_name_is_compared(name: str) -> None:
    """Whatever finds it."""
    held = Box(scale=2.0)
    get = HELD[name](held)
    check(lambda x: x * get(), lambda: setattr(held, "scale", 5.25))


@pytest.mark.parametrize("name", OWN)
def test_a_computed_name_of_an_object_of_its_own_is_compared(name: str) -> None:
    """One of a class that has ways of its own."""
    make_held, get = OWN[name]
    held = make_held()
    check(lambda x: x * get(held), lambda: setattr(held, "scale", 5.25))


class Steps:
    """A method that is replaced."""

    def go(self) -> float:
        return 2.0


KINDS: dict[str, Any] = {
    "methodcaller": lambda: methodcaller("".join(["g", "o"])),
    "attrgetter": lambda: (lambda get: lambda held: get(held)())(attrgetter("".join(["g", "o"]))),
    "globals": lambda: (lambda find: lambda held: find()[KEY])(globals),
    "locals": lambda: (lambda run: lambda held: eval("locals()[KEY]", run))({"KEY": KEY, KEY: 2.0}),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_may_find_anything_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that keeps the names, and what gives variables by names."""
    monkeypatch.setitem(globals(), KEY, 2.0)
    find, held = KINDS[name](), Steps()
    step = make(lambda x: x * find(held))
    assert check_rows(step, *[4] * 4)[-1] is Reason.STATE_UNSEEN


def test_names_that_stand_in_the_code_are_compared_alone() -> None:
    """Builtins under their own names, with constants, and accessors of classes: other attributes end no graph."""

    class Plain(Box):
        __reduce__ = object.__reduce__
        __setattr__ = object.__setattr__

    held = Plain(scale=2.0, other=1.0)

    def fn(x: torch.Tensor) -> torch.Tensor:
        has = hasattr(held, "scale") and attrgetter("scale", "scale")(held)
        return x * getattr(held, "scale") * (f"{has}" != "")  # noqa: B009

    step = make(fn)
    assert check_rows(step, *[4] * 5)[-1].is_graph
    for other in range(3):
        held.other = other
        assert check_rows(step, 4)[-1].is_graph


def test_variables_that_a_computed_name_makes_are_taken_back() -> None:
    """A capture ahead leaves the module as it was, also where it had no such variable."""
    module = types.ModuleType("user_settings")
    module.__file__ = __file__
    fn = types.FunctionType(sets_new.__code__, {"settings": module, "KEY": KEY, "__name__": __name__, **ENTRIES})
    make(fn).prewarm(batch(4))
    assert not hasattr(module, KEY)
    check_rows(make(fn), *[4] * 3)
    assert getattr(module, KEY) == 4


def sets_new(x: torch.Tensor) -> torch.Tensor:
    """Runs in a namespace of its own."""
    setattr(settings, KEY, len(x))  # type: ignore[name-defined]  # noqa: F821
    return x * 2


ENTRIES = {"__builtins__": builtins, "__file__": __file__}


def test_an_import_within_the_call_reads_no_whole_objects() -> None:
    """The names that it takes stand in the code."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        from json import decoder  # as models import what is optional

        return x * (2 if decoder else 3)

    step = make(fn, dynamic={"x": 0}, sizes=(4,))
    for _ in range(3):
        step(torch.ones(4, 3))
    assert not step.entries[0].guard.notes.reads_whole


def test_a_function_wrapped_within_the_call_reads_no_whole_objects() -> None:
    """What it takes over from the other function is named by whoever uses it."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        @functools.wraps(FACTOR.scale)
        def scale(given: torch.Tensor) -> torch.Tensor:
            return FACTOR.scale(given) * scale.by

        return scale(x)

    step = make(fn, dynamic={"x": 0}, sizes=(4,))
    for _ in range(3):
        step(torch.ones(4, 3))
    assert not step.entries[0].guard.notes.reads_whole
    FACTOR.scale.by = 3.0
    assert step(torch.ones(4, 3)).tolist() == fn(torch.ones(4, 3)).tolist()
    FACTOR.scale.by = 2.0


class Factor:
    """Something with a function that carries a number."""

    @staticmethod
    def scale(given: torch.Tensor) -> torch.Tensor:
        return given + 1


FACTOR = Factor()
Factor.scale.by = 2.0  # type: ignore[attr-defined]
