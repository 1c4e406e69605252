"""The cases of state that code reads under names that it computes, by whatever function and whoever holds that."""

import ast
import builtins
import copy
import dataclasses
import functools
import inspect
import io
import json
import logging
import pickle
import string
from collections.abc import Callable
from functools import partial, partialmethod
from operator import methodcaller
from typing import Any

from torch.utils import _pytree

from .cases import KEPT, READS, WRITES, Box
from .cases_read import Apart, kept, put, read, to
from .cases_written import unseen

__all__ = ["KEPT", "READS", "WRITES"]

KEY, TEMPLATE = "".join(["sca", "le"]), "".join(["{0.sca", "le}"])


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
    "in a logger": lambda held: (lambda box: lambda: box.get(held, KEY))(logger_with(getattr)),
    "in a local name": lambda held: lambda: two_at_once(held),
    "by its name": lambda held: lambda: getattr(builtins, "getattr")(held, KEY),  # noqa: B009
    "reduced": lambda held: lambda: functools.reduce(getattr, [KEY], held),
    "its table by a constant": lambda held: lambda: getattr(held, "__dict__")[KEY],  # noqa: B009
    "its method by a constant": lambda held: lambda: getattr(held, "__getattribute__")(KEY),  # noqa: B009
    "reduced by a constant": lambda held: lambda: methodcaller("__reduce_ex__", 2)(held)[2][KEY],
    "a template": lambda held: lambda: float(TEMPLATE.format(held)),
    "a formatter": lambda held: lambda: float(string.Formatter().format(TEMPLATE, held)),
    "statically": lambda held: lambda: inspect.getattr_static(held, KEY),
    "copied": lambda held: lambda: vars(copy.copy(held))[KEY],
    "an encoder": lambda held: lambda: json.loads(json.dumps(held, default=vars))[KEY],
}
UNSEEN: dict[str, Callable[[Any], Get]] = {
    "in a default": lambda held: partial(with_default, held),
    "vars": lambda held: (lambda box: lambda: box.get(held)[KEY])(Box(get=vars)),
    "object's": lambda held: partial(object.__getattribute__, held, KEY),
    "the object's": lambda held: partial(held.__getattribute__, KEY),
    "its state": lambda held: (lambda get: lambda: get()[KEY])(held.__getstate__),
    "a kept template": lambda held: (lambda fill: lambda: float(next(map(fill, [held]))))("{0.scale}".format),
    "a pickle": lambda held: lambda: pickled(held),
}
"""Where a compiled function that reads attributes has another name than its own, or none."""
OWN: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "a slot's descriptor": (lambda: Slot(2.0), lambda held: vars(Slot)[KEY].__get__(held)),
    "a slot under another name": (lambda: Aliased(2.0), lambda held: held.alias),
    "leaves": (Data, lambda held: _pytree.tree_leaves(held)[0]),
    "fields": (Data, lambda held: next(iter(dataclasses.asdict(held).values()))),
    "a visitor": (lambda: Visitor(2.0), lambda held: held.visit(ast.Pass())),
}
OWN_UNSEEN: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "a table under another name": (lambda: Tabled(scale=2.0), lambda held: held.table[KEY]),
    "a method of a partial": (lambda: Tabled(scale=2.0), lambda held: held.get(KEY)),
}


def logger_with(get: Any) -> logging.Logger:
    """A logger, of which nobody looks at the attributes."""
    logger = logging.Logger("accessors")
    logger.get = get  # type: ignore[attr-defined]
    return logger


class Plain(Box):
    """Has accessors of its own."""

    __reduce__ = object.__reduce__
    __setattr__ = object.__setattr__


kept("attribute beside names that stand in the code")(
    lambda: Plain(scale=2.0, other=1.0),
    lambda h: getattr(h, "scale") * hasattr(h, "scale"),  # noqa: B009
    put(other=5.0),
)
for name, reach in HELD.items():
    read(f"computed name, {name}")(
        lambda reach=reach: Apart(held := Box(scale=2.0), reach(held)), lambda get: get(), put("owner", scale=5.25)
    )
for name, reach in UNSEEN.items():
    unseen(f"computed name, {name}", lambda reach=reach: (held := Box(scale=2.0), reach(held)), lambda o: o[1]())
for name, (make, get) in OWN.items():
    read(f"computed name of {name}")(make, get, lambda held: to(held, scale=5.25))
for name, (make, get) in OWN_UNSEEN.items():
    unseen(f"computed name of {name}", make, get)
