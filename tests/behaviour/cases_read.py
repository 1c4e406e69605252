"""The cases of state that a call reads: how it is made, how the call reads it, and a change that eager would notice."""

import argparse
import asyncio
import builtins
import dataclasses
import decimal
import enum
import functools
import io
import logging
import math
import os
import random
import sys
import threading
import types
import warnings
from abc import ABC
from collections import OrderedDict, defaultdict
from collections.abc import Callable, MutableMapping
from functools import partial
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn, ones, zeros

import graphdispatch as gd

from .cases import KEPT, PATCH, READS, Box, Fn, Made, Read, Slotted
from .ways import PIECEWISE, WAYS

__all__ = ["KEPT", "READS"]

Change = Callable[[Any], Any]
T = TypeVar("T")


def which(held: Any) -> float:
    """Tells whether two attributes are one object."""
    return 2.0 if held.a is held.b else 5.0


class Pair(Generic[T]):
    """A generic class."""

    def __init__(self, k: T) -> None:
        self.k = k


class Apart(NamedTuple):
    """State that a call sees only by way of something else; the change has both."""

    owner: Any
    seen: Any


def run(name: str, table: dict[str, Read] = READS, **more: Any) -> Callable[..., None]:
    """A case whose call does something with the state."""

    def case(make: Callable[[], Any], use: Callable[[Any, Tensor], Any], change: Change) -> None:
        def made() -> Made:
            held = make()
            seen = held.seen if isinstance(held, Apart) else held
            return Made(lambda x: use(seen, x), lambda: change(held))

        assert name not in table, name
        table[name] = Read(made, **more)

    return case


def read(name: str, **more: Any) -> Callable[..., None]:
    """A case whose call multiplies by what it gets of the state."""
    return lambda make, get, change: run(name, **more)(make, lambda held, x: x * get(held), change)


def kept(name: str, **more: Any) -> Callable[..., None]:
    """A case of a change that must end no graph."""
    return read(name, table=KEPT, **more)


def to(held: Any, **attributes: Any) -> None:
    """Set attributes."""
    for name, value in attributes.items():
        setattr(held, name, value)


def put(path: str = "", **attributes: Any) -> Change:
    """Set attributes of what is held, or of what lies at a path in it."""
    return lambda held: to(attrgetter(path)(held) if path else held, **attributes)


def enter(key: Any, value: Any) -> Change:
    """Set an entry of what is held."""
    return lambda held: held.__setitem__(key, value)


def own_class(*bases: type, **members: Any) -> Any:
    """A class of its own."""
    return type("Own", bases, {"__module__": __name__, **members})


def patch(owner: Any, name: str, value: Any) -> Change:
    """Set a variable or an attribute of what all share, for a while."""
    how = PATCH.setitem if isinstance(owner, MutableMapping) else partial(PATCH.setattr, raising=False)
    return lambda _: how(owner, name, value)


# How a callable reaches its state.


def weight(how: str, change: Change) -> Callable[[], Made]:
    """A weight, beside a tensor that nothing reads, in an object that a callable reaches in one of these ways."""

    def made() -> Made:
        holder = Box(weight=torch.rand(3), last=ones(3))
        return Made(WAYS[how](lambda x: x * holder.weight), lambda: change(holder))

    return made


for how in WAYS:
    options = {"mode": "PIECEWISE"} if how in PIECEWISE else {}
    READS[f"reached by {how}"] = Read(weight(how, put(weight=zeros(3))), options=options)
    KEPT[f"beside what is reached by {how}"] = Read(weight(how, put(last=zeros(3))), options=options)


# Modules.


class Net(nn.Module):
    """Layers, a buffer, a tensor that is neither, and what else may hang on a module."""

    gain = 2.0
    slope = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0))
        self.register_buffer("offset", zeros(3))
        self.loose = ones(3)
        self.caches = [ones(3)]
        self.unregistered = [nn.Linear(3, 3).requires_grad_(False)]
        self.heads = (nn.Linear(3, 3),)
        self.activation: Callable[..., Any] = torch.relu
        self.config = types.SimpleNamespace(scale=2.0, unread=1.0, deep=types.SimpleNamespace(shift=ones(3)))
        self.table = {"a": 1.0, "b": 3.0}
        self.active = ["a"]
        self._power = 2

    @staticmethod
    def raised(x: Tensor, power: int) -> Tensor:
        return x**power

    @property
    def scale(self) -> float:
        return float(self.config.scale)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        for name in self.active:
            x = x * self.table[name]
        x = self.layers(x) * self.loose + self.offset + self.caches[0] * self.slope + self.config.deep.shift
        return (
            self.heads[0](self.unregistered[0](self.raised(self.activation(x * self.scale), self._power))) * self.gain
        )


def evaluated(**attributes: Any) -> Net:
    """A net in evaluation mode."""
    net = Net().eval()
    net.__dict__.update(attributes)
    return net


def of_net(name: str, change: Change, *, make: Callable[[], Any] = evaluated, **more: Any) -> None:
    """A change of a net."""
    run(name, **more)(make, lambda net, x: net(x), change)


def hook(module: nn.Module) -> Any:
    """A hook that doubles."""
    return module.register_forward_hook(lambda module, args, output: output * 2)


def hook_of_all(_: Any) -> None:
    """A hook on all modules there are."""
    table = nn.modules.module._global_forward_hooks
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 2)
    made = table.pop(handle.id)
    PATCH.setitem(table, handle.id, made)


def cut_rows(net: Any) -> None:
    """Cut the last layer's weights where they lie."""
    last = net.heads[0]
    last.weight.data, last.bias.data = last.weight.data[:2], last.bias.data[:2]


of_net("weight_data_assigned", lambda net: to(net.layers[0].weight, data=ones(3, 3)), row=True)
of_net("parameter removed", lambda net: to(net.layers[0], bias=None))
of_net("weight_cut_in_place", cut_rows, row=True)
of_net("weights_loaded_by_assignment", lambda net: net.load_state_dict(Net().state_dict(), assign=True), row=True)
of_net("submodule_replaced", put(layers=nn.Sequential(nn.Linear(3, 3))), row=True)
of_net("submodule added", lambda net: net.layers.append(nn.Threshold(9.0, 7.0)))
of_net("submodule removed", lambda net: net.layers.__delitem__(0))
of_net("loose_tensor_replaced", put(loose=zeros(3)), row=True)
of_net("loose tensor moved", put("loose", data=zeros(3)))
of_net("tensors swapped", lambda net: torch.utils.swap_tensors(net.loose, zeros(3)))
of_net("tensor in a list replaced", lambda net: net.caches.__setitem__(0, zeros(3)))
of_net("list replaced", put(caches=[zeros(3)]))
of_net("module_number_changed", put(slope=5.0), row=True)
of_net("class_attribute_changed", patch(Net, "gain", 5.0), row=True)
of_net("module_config_changed: read by a property", put("config", scale=5.0))
of_net("module_config_changed", put("config.deep", shift=zeros(3)), row=True)
of_net("module_container_changed", lambda net: net.table.update(a=4.0), row=True)
of_net("module_container_changed: replaced", put(active=["b"]))
of_net("train_eval_flip", lambda net: net.train(), row=True)
of_net("inner module trained", lambda net: net.layers[1].train())
of_net("hook_added", lambda net: hook(net.layers[0]), row=True)
of_net("hook on all modules", hook_of_all)
of_net("class of a module", lambda net: to(net.heads[0], __class__=own_class(nn.Linear, forward=lambda s, x: x)))
of_net("code_replaced", patch(Net, "forward", lambda self, x: x * 9.0), row=True)
of_net("unread attribute", put("config", unread=2.0), table=KEPT)
of_net("weights_written_in_place", lambda net: net.load_state_dict(Net().state_dict()), table=KEPT, row=True)
of_net("equal entry", lambda net: net.table.update(a=float("1.0")), table=KEPT)
of_net("hook removed again", lambda net: hook(net).remove(), table=KEPT)


class Late(nn.Module):
    """A module that has nothing yet."""

    def forward(self, x: Tensor) -> Tensor:
        extra = getattr(self, "extra", None)
        return x if extra is None else extra(x) if callable(extra) else x * extra


of_net("first buffer", lambda net: net.register_buffer("extra", torch.full((3,), 5.0)), make=Late)
of_net("first parameter", lambda net: to(net, extra=nn.Parameter(torch.full((3,), 5.0))), make=Late)
of_net("first submodule", lambda net: to(net, extra=nn.Linear(3, 3)), make=Late)


def hooked() -> Any:
    """A net and the handle of its hook."""
    net = evaluated()
    return net, hook(net)


run("hook_added: removed")(hooked, lambda h, x: h[0](x), lambda h: h[1].remove())
run("hook replaced")(
    hooked, lambda h, x: h[0](x), lambda h: (h[1].remove(), h[0].register_forward_hook(lambda *_: _[2] * 3))
)


def _with_hook() -> Made:
    config, model = Box(k=2.0), nn.Sequential(nn.Identity()).eval()
    model[0].register_forward_hook(lambda module, args, output: output * config.k)
    return Made(lambda x: model(x), lambda: to(config, k=5.0))


READS["state of a hook"] = Read(_with_hook)


class Half:
    def factor(self) -> float:
        return 0.5


class Third:
    def factor(self) -> float:
        return 0.25


def with_tables() -> nn.Module:
    """A model that reads a configuration, a method of a base class, weights and hooks."""
    scaled = own_class(own_class(Half))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.config, self.scaled = nn.Linear(3, 3), Box(scale=1.0), scaled()
            self.scaled.unused = 1

        def forward(self, x: Tensor) -> Tensor:
            bonus = getattr(self.linear.weight, "bonus", 1.0)
            return self.linear(x) * self.config.scale * self.scaled.factor() * bonus

    model = Model().eval()
    model.linear.weight.bonus = 2.0
    return model


def hide_method(model: Any) -> None:
    """One attribute goes, and another one hides a method: as many as before."""
    del model.scaled.unused
    model.scaled.factor = lambda: 0.125


TABLES: dict[str, Change] = {
    "of a module": lambda m: to(m, __dict__={**m.__dict__, "config": Box(scale=3.0)}),
    "of an object": lambda m: to(m.config, __dict__={"scale": 3.0}),
    "of a tensor": lambda m: to(m.linear.weight, __dict__={"bonus": 5.0}),
    "of submodules": lambda m: to(m, _modules={"linear": nn.Linear(3, 3)}),
    "of parameters": lambda m: to(m.linear, _parameters=OrderedDict(weight=nn.Parameter(ones(3, 3)), bias=None)),
    "of hooks": lambda m: to(m.linear, _forward_hooks=OrderedDict({1: lambda module, args, output: output + 1})),
    "of bases": lambda m: to(type(m.scaled).__bases__[0], __bases__=(Third,)),
    "with a method hidden": hide_method,
}
for name, change in TABLES.items():
    of_net(f"table replaced {name}", change, make=with_tables)


class Factor(nn.Module):
    """A model with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def through(forward: Fn) -> Fn:
    """A function that calls another."""
    return lambda x: forward(x)


def own(name: str) -> Callable[[], Any]:
    """A model with a method of its own, which reads the number of another model."""

    def make() -> Any:
        other, model = Factor(), Factor()
        model.other = [other]
        setattr(model, name, through(other.forward))
        return model

    return make


for name in ("forward", "_call_impl"):  # names in torch's code alone
    of_net(f"own {name}", put(**{name: through(lambda x: x + 1)}), make=own(name))
    of_net(f"what its own {name} reads", lambda m: to(m.other[0], factor=2.0), make=own(name))


# Containers and objects.


def cached_number() -> Any:
    """What computes a number, which it has done."""
    box = Box(k=2.0)
    number = functools.cache(lambda: box.k)
    number()
    return Apart(box, number)


class OwnList(list):
    """A list that iterates in its own way."""

    def __iter__(self) -> Any:
        return iter(())


read("entry to the next list")(lambda: ([2.0, 3.0], [4.0]), lambda h: len(h[0]), lambda h: h[1].append(h[0].pop(0)))
read("list grew")(lambda: [2.0], len, lambda h: h.append(5.0))
read("list of a class of its own")(lambda: OwnList([2.0]), lambda h: h[0], enter(0, 5.0))
read("key of a dict")(lambda: {"k": 2.0}, len, lambda h: h.update(other=2.0))
read("keys of a dict")(lambda: {"k": 2.0}, lambda h: 2 if "k" in h else 5, lambda h: h.update(j=h.pop("k")))
read("large table")(lambda: {f"{n}": n for n in range(5000)}, lambda h: h["2"], lambda h: h.update({"2": 7}))
read("order of a dict")(lambda: OrderedDict(a=2, b=3), lambda h: next(iter(h.values())), lambda h: h.move_to_end("a"))
read("set grew")(lambda: {1, 2}, len, lambda h: h.add("new"))
read("default factory")(lambda: defaultdict(lambda: 2), lambda h: h.default_factory(), put(default_factory=lambda: 5))
read("closure of a default factory")(
    lambda: Apart(k := [2], defaultdict(lambda: k[0])),
    lambda h: (h[0], h.clear())[0],
    lambda h: h.owner.append(h.owner.pop() + 3),
)
read("attribute that comes")(Box, lambda h: getattr(h, "k", 2.0), put(k=5.0))
read("attribute that goes")(lambda: Box(k=5.0), lambda h: getattr(h, "k", 2.0), lambda h: delattr(h, "k"))
read("sign of zero")(lambda: Box(k=0.0), lambda h: math.copysign(1, h.k), put(k=-0.0))
run("number_type_changed", row=True)(lambda: Box(k=2.0), lambda h, x: x.long() * h.k, put(k=2))
read("large integer")(lambda: Box(k=1 << 70), lambda h: h.k % 4 + 1, put(k=(1 << 70) + 1))
read("not a number")(lambda: Box(k=math.nan), lambda h: 2 if h.k != h.k else 5, put(k=1.0))
read("attribute by a generic class")(
    lambda: Box(k=2.0),
    lambda h: Pair[type("New", (), {})](h.k).k,
    put(k=5.0),  # type: ignore[misc]
)
read("type of data")(lambda: Box(dtype=torch.float32), lambda h: ones(3).to(h.dtype), put(dtype=torch.float64))
read("slot that goes")(lambda: Slotted(2.0), lambda h: getattr(h, "k", 5.0), lambda h: delattr(h, "k"))
read("computed_name", row=True)(lambda: Box(k=2.0, name="k"), lambda h: getattr(h, h.name), put(k=5.0))
read("computed name of a part")(lambda: [Box(k=2.0), "k"], lambda h: getattr(h[0], h[1]), lambda h: to(h[0], k=5.0))
read("names in a text")(lambda: Box(a=Box(k=2.0)), lambda h: attrgetter("a.k")(h), put("a", k=5.0))
read("name in a text")(lambda: Box(k=2.0, t="{0.k}"), lambda h: float(h.t.format(h)), put(k=5.0))
read("result of a call")(lambda: Apart(b := Box(mean=2.0), lambda: b), lambda h: h().mean, put("owner", mean=5.0))
read("lru_cache cleared")(cached_number, lambda h: h(), lambda h: (to(h.owner, k=5.0), h.seen.cache_clear()))
read("equal arguments")(
    lambda: [argparse.Namespace(k=1) for _ in "ab"], lambda h: 2 if h[0] == h[1] else 5, lambda h: to(h[0], k=3)
)
for constant in ("2.5", "1 << 70", "'some text'", "b'some bytes'", "float('nan')", "0.0"):
    kept(f"equal constants: {constant}")(
        lambda text=constant: Box(k=eval(text), slotted=Slotted(eval(text)), listed=[eval(text)]),
        lambda h: len({h.k, h.slotted.k, h.listed[0]}),
        lambda h, text=constant: (to(h, k=eval(text)), to(h.slotted, k=eval(text)), enter(0, eval(text))(h.listed)),
    )
kept("equal list in its place")(lambda: Box(k=["2.0"]), lambda h: float(h.k[0]), put(k=["2.0"]))
run("equal list beside a global tensor in its place", KEPT)(
    lambda: Box(k=[2.0]), lambda h, x: x * h.k[0] + OFFSET, put(k=[2.0])
)
kept("equal nest in its place")(
    lambda: Box(k={"a": [1, (2.0, {3})]}), lambda h: h.k["a"][1][0], put(k={"a": [1, (2.0, {3})]})
)
read("unequal list in its place")(lambda: Box(k=[2.0]), lambda h: h.k[0], put(k=[5.0]))
read("longer list in its place")(lambda: Box(k=[2.0]), lambda h: sum(h.k), put(k=[2.0, 3.0]))
read("list of another class in its place")(lambda: Box(k=[2.0]), lambda h: float(isinstance(h.k, tuple)), put(k=(2.0,)))
read("list_in_two_places", row=True)(lambda: Box(a=(one := [2]), b=one), which, lambda h: to(h, a=[2], b=[2]))
read("list_in_two_places: from now on")(lambda: Box(a=[2], b=[2]), which, lambda h: to(h, a=(one := [2]), b=one))
kept("list that is not read")(lambda: Box(k=2.0, log=[]), lambda h: h.k, lambda h: h.log.append(1))
kept("equal size of a tensor in its place")(lambda: Box(k=torch.Size([3])), lambda h: h.k[0], put(k=torch.Size([3])))
read("entry of a list of parameters")(lambda: nn.ParameterList([2.0]), lambda h: h[0], enter(0, 5.0))


def beside_others() -> Box:
    """A number beside what other threads set, and draw from."""
    unused = {"event": threading.Event(), "random": random.Random(0), "thread": threading.Thread()}
    return Box(k=2.0, state=3.0, **unused)


class Refusing(Tensor):
    """A tensor that takes no function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def nested() -> Tensor:
    """A tensor of tensors, of which torch warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([ones(2), ones(3)])


UNUSED: dict[str, Callable[[], Any]] = {
    "without sizes": nested,
    "without memory": lambda: nn.LazyLinear(2),
    "that takes no function": lambda: Refusing(ones(3)),
}
for name, make in UNUSED.items():
    kept(f"unused tensor {name}")(lambda make=make: Box(k=2.0, unused=make()), lambda h: h.k, lambda _: None)
kept("generator beside what is read")(beside_others, lambda h: h.k, lambda h: h.random.random())
kept("generator beside what has a name of its own")(beside_others, lambda h: h.state, lambda h: h.random.random())


def many_tensors() -> dict[int, Tensor]:
    """More tensors than anything reads."""
    return {n: ones(3) for n in range(2000)}


kept("unused one of many tensors")(many_tensors, lambda h: h[1], lambda h: to(h[2], data=zeros(3)))
read("used one of many tensors")(many_tensors, lambda h: h[1], lambda h: to(h[1], data=zeros(3)))


class Engine:
    """A plain object that holds the model, as engines do."""

    def __init__(self) -> None:
        self.layers, self.cache, self.scale = [nn.Linear(3, 3).eval()], {"bias": ones(3)}, 2.0

    @torch.no_grad()
    def step(self, x: Tensor) -> Tensor:
        return self.layers[0](x) * self.scale + self.cache["bias"]


def of_engine(name: str, change: Change, table: dict[str, Read] = READS) -> None:
    """A change of an engine, through every front end."""
    run(name, table, row=":" not in name)(Engine, lambda engine, x: engine.step(x), change)


of_engine("object_attribute_changed", put(scale=5.0))
of_engine("container_entry_changed", lambda e: e.layers.__setitem__(0, nn.Linear(3, 3).eval()))
of_engine("container_entry_changed: dict", lambda e: e.cache.__setitem__("bias", zeros(3)))
of_engine("container_entry_changed_instead", lambda e: e.cache["bias"].fill_(7.0), KEPT)
of_net("module_number_changed_instead", lambda net: net.offset.fill_(5.0), table=KEPT, row=True)


OF_OBJECT: dict[str, Callable[[Any], Any]] = {
    "in a generator": lambda h: max(one.k for one in [h]),
    "mapped": lambda h: [*map(lambda one: one.k, [h])][0],  # noqa: C417, RUF015
    "among arguments": lambda h: k_of(*[h]),
    "in a function within": lambda h: (lambda: (lambda: h.k)())(),
    "reduced": lambda h: functools.reduce(getattr, ["k"], h),
    "among its variables": lambda h: vars(h)["k"],
    "in its table": lambda h: h.__dict__["k"],
}
OF_LIST: dict[str, Callable[[Any], Any]] = {
    "sorted": lambda h: sorted(h)[0],
    "within": lambda h: 2 if 3.0 in h else 5,
    "cut": lambda h: sum(h[:2]),
    "numbered": lambda h: dict(enumerate(h))[0],
    "folded": lambda h: functools.reduce(lambda one, other: one * other, h),
}
for name, get in OF_OBJECT.items():
    read(f"attribute, {name}")(lambda: Box(k=2.0), get, put(k=5.0))
for name, get in OF_LIST.items():
    read(f"list, {name}")(lambda: [2.0, 3.0], get, lambda h: h.__setitem__(slice(None), [7.0, 5.0]))


class Equal(Box):
    """Equal to each other one."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    def __hash__(self) -> int:
        return 1


class Naive(Box):
    """Compares an attribute that the other may not have."""

    def __eq__(self, other: Any) -> bool:
        return bool(self.name == other.name)

    __hash__ = None


class Keyed:
    """Looks attributes up in a dict, and raises ``KeyError`` for those that it has not."""

    def __init__(self, **entries: Any) -> None:
        self.entries = entries

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["entries"][name]


class Hidden:
    """Finds attributes under other names."""

    def __init__(self) -> None:
        self._k = 2

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name if name.startswith("_") else f"_{name}")


def number_of(held: Any, *_: Any) -> int:
    """Its number."""
    return held.k


def with_methods() -> Any:
    """An object whose special methods give its number."""
    plain = dict.fromkeys(("__len__", "__getitem__", "__call__", "__index__", "__rmul__", "__getattr__"), number_of)
    return own_class(
        k=2,
        **plain,
        __float__=lambda self: float(self.k),
        __bool__=lambda self: self.k == 2,
        __iter__=lambda self: iter([self.k]),
        __enter__=number_of,
        __exit__=lambda *_: None,
        number=property(number_of),
    )()


def entered(held: Any) -> int:
    """What a block gives."""
    with held as number:
        return number


class Lazy:
    """Computes its settings once."""

    @functools.cached_property
    def config(self) -> Any:
        return Box(k=2.0)


read("equal object")(lambda: Box(c=Equal(k=2.0)), lambda h: h.c.k, put(c=Equal(k=5.0)))
read("naive __eq__")(lambda: Box(c=Naive(name="a", k=2.0)), lambda h: h.c.k, put(c=Box(k=5.0)))
read("__getattr__ that raises KeyError")(lambda: Keyed(k=2.0), lambda h: h.k, lambda h: h.entries.update(k=5.0))
read("__getattribute__")(Hidden, lambda h: h.k, put(_k=5))
SPECIAL: dict[str, Callable[[Any], Any]] = {
    "__len__": len,
    "__getitem__": lambda h: h[0],
    "__call__": lambda h: h(),
    "__index__": lambda h: range(9)[h],
    "__rmul__": lambda h: 1 * h,
    "__getattr__": lambda h: h.other,
    "__float__": float,
    "__bool__": lambda h: 2 if h else 5,
    "__iter__": lambda h: [*h][0],  # noqa: RUF015
    "__enter__": entered,
    "property": lambda h: h.number,
}
for name, get in SPECIAL.items():
    read(name)(with_methods, get, put(k=5))
read("cached_property")(lambda: (h := Lazy(), h.config)[0], lambda h: h.config.k, put("config", k=5.0))
read("class of an object")(lambda: Box(k=2.0), lambda h: h.limit, put(__class__=type("Other", (Box,), {"limit": 5.0})))


Point = dataclasses.make_dataclass("Point", [("number", int)])


def matched(point: Any) -> int:
    """Its field, by a pattern."""
    match point:
        case Point(found):
            return found


class Answer:
    """It answers with a number, whatever it is asked for."""

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, *_: Any) -> int:
        return self.k


read("class pattern")(lambda: Point(2), matched, put(number=5))
for name in ("__len__", "__getitem__", "__call__", "__index__"):
    of_class = lambda name=name: own_class(**{name: Answer(2)})()  # noqa: E731
    read(f"object that is {name}")(of_class, SPECIAL[name], lambda h, name=name: to(vars(type(h))[name], k=5))
    read(f"object that is {name}, replaced")(of_class, SPECIAL[name], put("__class__", **{name: Answer(5)}))
read("compiled __len__, replaced")(
    lambda: own_class(list, __len__=list.__len__)([2, 3]), len, put("__class__", __len__=lambda _: 5)
)
# Functions and classes.


def with_variable() -> Made:
    """A variable of the function around it."""
    number = 2

    def change() -> None:
        nonlocal number
        number = 5

    return Made(lambda x: x * number, change)


READS["closure_number_changed"] = Read(with_variable, row=True)


def function(value: int = 2, *, by: int = 1) -> int:
    """Two defaults."""
    return value * by


def other(value: int = 2, *, by: int = 1) -> int:
    """Other code."""
    return value + 5 * by


def copy_of(fn: Any) -> Any:
    """A function of its own."""
    made = types.FunctionType(fn.__code__, globals(), fn.__name__, fn.__defaults__, fn.__closure__)
    made.__kwdefaults__ = dict(fn.__kwdefaults__)
    return made


read("code of a function")(lambda: copy_of(function), lambda h: h(), put(__code__=other.__code__))
read("default")(lambda: copy_of(function), lambda h: h(), put(__defaults__=(5,)))
SAID = {"__name__": "longer_name", "__qualname__": "Another", "__module__": "a_module", "__doc__": "Text."}
for name, value in SAID.items():
    read(f"{name} of a function")(
        lambda: copy_of(function), partial(lambda name, h: len(getattr(h, name) or ""), name), put(**{name: value})
    )
read("closure of a function that does not run")(
    lambda: (lambda k: lambda: k)([2]), lambda h: h.__closure__[0].cell_contents[0], lambda h: h().__setitem__(0, 5)
)
read("all attributes of a function at once")(
    lambda: with_attributes(copy_of(function), k=2.0), lambda h: h.k, put(__dict__={"k": 5.0})
)
read("attribute_tried_for_instead", row=True)(lambda: copy_of(function), lambda h: getattr(h, "k", 2.0), put(k=5))
read("single dispatch")(
    lambda: functools.singledispatch(lambda _: 2), lambda h: h(1), lambda h: h.register(int, lambda _: 5)
)


DECORATORS: dict[str, Callable[[Any], Any]] = {
    "no_grad": torch.no_grad(),
    "autocast": torch.autocast("cpu", enabled=False),
    "disable": torch.compiler.disable,
}
for name, decorate in DECORATORS.items():
    read(f"object within {name}")(
        lambda decorate=decorate: Apart(o := own_class(k=2, __call__=number_of)(), decorate(o)),
        lambda h: h(),
        put("owner", k=5),
    )
read("cache within a decorator")(
    lambda: Apart((made := cached_number()), torch.no_grad()(made.seen)),
    lambda h: h(),
    lambda h: (to(h.owner.owner, k=5.0), h.owner.seen.cache_clear()),
)


def with_metaclass() -> Any:
    """A class and its metaclass."""
    meta = type("Meta", (type,), {"__module__": __name__, "k": 2})
    return meta("Own", (), {"__module__": __name__}), meta


def choice() -> Any:
    """A member of an enumeration."""
    first = enum.Enum("Choice", {"FIRST": {"k": 2}}, module=__name__).FIRST
    first.number = 2
    return first


read("attribute of a class by a computed name")(
    lambda: own_class(k=2, names=("k",), first=lambda self: getattr(self, self.names[0]))(),
    lambda h: h.first(),
    put("__class__", k=5),
)
read("method of a class")(lambda: own_class(k=lambda self: 2)(), lambda h: h.k(), put("__class__", k=lambda self: 5))
for kind in (staticmethod, classmethod):
    read(f"default of a {kind.__name__}")(
        lambda kind=kind: own_class(k=kind(lambda *_, by=[2]: by[0])),
        lambda h: h.k(),
        lambda h: h.k.__kwdefaults__["by"].__setitem__(0, 5),
    )
read("text of a class")(lambda: own_class(__doc__="2"), lambda h: float(h.__doc__), put(__doc__="5"))
read("enumeration_changed", row=True)(choice, lambda h: h.value["k"], lambda h: h.value.update(k=5))


def cached_isinstance() -> Any:
    """An abstract class that has answered, and an object of it, with a name that stands in no code."""
    base = own_class(ABC)
    assert not isinstance(2.5, base)
    return base, own_class(base, number=2)()


kept("what isinstance caches")(
    cached_isinstance,
    lambda h: getattr(h[1], "number".lower()) if isinstance(h[1], h[0]) else 5,
    lambda h: [isinstance(other, h[0]) for other in (None, 1, "text", [], own_class()())],
)


# Variables, modules and builtins.


def module(**names: Any) -> Any:
    """A module with variables."""
    made = types.ModuleType("users_settings")
    vars(made).update(names)
    return made


def settings() -> Apart:
    """A module that code finds by its name alone."""
    made = module(k=2, config={"k": 2})
    PATCH.setitem(sys.modules, "users_settings", made)
    return Apart(made, None)


put_there = put("owner", k=5)
"""Set a variable of the module."""


def module_with_code() -> Any:
    """An object that holds a module, and a function of it that reads another variable."""
    made = module(k=2, one=1)
    exec("def number():\n    return one", vars(made))
    return Box(module=made, number=made.number)


FACTOR, OFFSET, ALIAS, TABLE, BOXES, SETTINGS = 2.0, ones(3), torch.relu, {"k": 2.0}, [Box(k=2.0)], module(k=2)
PACKAGE = module(settings=module(k=2))


def reads_offset(x: Tensor) -> Tensor:
    """A helper that reads a global."""
    return x + OFFSET


class Shifted(nn.Module):
    """Calls a helper that reads a global."""

    def forward(self, x: Tensor) -> Tensor:
        return reads_offset(x) * 1.0


def of_settings(_: Any) -> float:
    """A variable of a module by its name."""
    import users_settings

    return users_settings.k


def from_settings(_: Any) -> float:
    """A variable itself."""
    from users_settings import k

    return k


def k_of(held: Any) -> float:
    """A helper that reads what it is given."""
    return held.k


def the_settings() -> Any:
    """A helper that gives a module."""
    return SETTINGS


def passes_first_import(_: Any) -> float:
    """Of a module that is imported twice, under two names other than its own, only the first is given to a helper."""
    import users_settings as given
    import users_settings as other

    return k_of(given) * len(other.config)


def copies() -> list[Any]:
    """Two modules of one file, whose code is equal, and whose variables are their own."""
    made = [module(), module()]
    for copy in made:
        exec(compile("FACTOR = 2.0\ndef scaled(x): return x * FACTOR", "copied.py", "exec"), vars(copy))
    return made


def in_folder(folder: str) -> Any:
    """Code of the user's in a folder that has the name of a library."""
    made = module(__file__=f"/home/{folder}/model.py", k=2.0)
    exec(compile("def number(): return k", made.__file__, "exec"), vars(made))
    return made


for folder in ("networkx", "jinja2", "triton"):
    read(f"variable of code in a folder {folder}")(partial(in_folder, folder), lambda h: h.number(), put(k=5.0))
for place in (0, 1):
    run(f"copy {place} of a module")(
        copies,
        lambda h, x: h[0].scaled(x) + h[1].scaled(x + 1),
        lambda h, place=place: to(h[place], FACTOR=5.0),
    )


def none() -> None:
    """No state of one's own."""


run("global_number_changed", row=True)(none, lambda _, x: x * FACTOR, patch(globals(), "FACTOR", 5.0))
run("global_tensor_rebound", row=True)(none, lambda _, x: x + OFFSET, patch(globals(), "OFFSET", zeros(3)))
run("helper_global_changed", row=True)(none, lambda _, x: reads_offset(x), patch(globals(), "OFFSET", zeros(3)))
run("helper_of_module_changed", row=True)(Shifted, lambda m, x: m(x), patch(globals(), "OFFSET", zeros(3)))
run("global function")(none, lambda _, x: ALIAS(x), patch(globals(), "ALIAS", torch.tanh))
run("settings_module_changed", row=True)(none, lambda _, x: x * SETTINGS.k, patch(SETTINGS, "k", 5.0))
run("global that hides a builtin")(none, lambda _, x: x * abs(-2), patch(globals(), "abs", lambda _: 7))
run("builtin replaced")(none, lambda _, x: x * abs(-2), patch(builtins, "abs", lambda _: 7))
read("import inside")(settings, of_settings, put_there)
read("import of a name inside")(settings, from_settings, put_there)
read("import inside of another module")(settings, of_settings, patch(sys.modules, "users_settings", module(k=5)))
read("module of a package passed on")(none, lambda _: k_of(PACKAGE.settings), patch(PACKAGE.settings, "k", 5.0))
read("module that a helper gives")(none, lambda _: the_settings().k, patch(SETTINGS, "k", 5.0))
read("import under two names, passed on under one")(settings, passes_first_import, put_there)
read("module that an object holds, and whose code runs")(
    module_with_code, lambda h: h.number() * h.module.k, put("module", k=5)
)


def crowd() -> Box:
    """A module of the user's that nobody names, with what nobody can compare under names of the code."""
    PATCH.setitem(sys.modules, "users_crowd", module(k=threading.local(), name=threading.local()))
    return Box(k=2.0)


def of_loaded(_: Any) -> float:
    """What a module gives if it is loaded."""
    found = sys.modules.get("users_own")
    return 2.0 if found is None else found.k


def tries_to_import(_: Any) -> float:
    """What a module gives if it can be imported."""
    try:
        import users_own
    except ImportError:
        return 2.0
    return users_own.k


def imports_another(_: Any) -> None:
    """Somebody imports a module that the code does not ask for."""
    PATCH.setitem(sys.modules, "users_other", module(k=5, name=threading.local()))


def imports_it(_: Any) -> None:
    """Somebody imports the module that the code asks for."""
    PATCH.setitem(sys.modules, "users_own", module(k=5))


read("sys.modules")(settings, lambda _: sys.modules["users_settings"].k, put_there)
read("module that takes another's place in sys.modules")(
    settings, lambda _: sys.modules["users_settings"].k, patch(sys.modules, "users_settings", module(k=5))
)
read("whether a module is loaded")(crowd, lambda h: 3.0 if "users_own" in sys.modules else h.k, imports_it)
read("what a module that is not loaded gives")(crowd, of_loaded, imports_it)
read("import that failed")(none, tries_to_import, imports_it)
kept("import beside a look whether a module is loaded")(
    crowd, lambda h: 3.0 if "users_own" in sys.modules else h.k, imports_another
)
kept("import beside a look for a module whose name an attribute holds")(
    lambda: Box(name="users_own"), lambda h: 3.0 if h.name in sys.modules else 2.0, imports_another
)
kept("import beside a look for a module")(crowd, of_loaded, imports_another)


# Tensors.


class PackedParameter(nn.Parameter):
    """A parameter of a class of its own, as engines have them."""


class WatchedParameter(nn.Parameter):
    """One that sees each function of torch that it is given to."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class OwnTensor(Tensor):
    """A tensor of a class of its own."""


def of_tensor(name: str) -> Callable[..., None]:
    """A tensor that a closure holds, and one that a module holds."""

    def case(make: Callable[[], Any], get: Callable[[Any], Any], change: Change) -> None:
        def held_by_module() -> Any:
            net = nn.Module()
            net.held = make()
            return net

        read(f"tensor: {name}")(make, get, change)
        read(f"tensor of a module: {name}")(held_by_module, lambda net: get(net.held), lambda net: change(net.held))

    return case


def assign(change: Callable[[Tensor], Tensor]) -> Change:
    """Assign the data anew."""
    return lambda w: to(w, data=change(w.detach().as_subclass(Tensor)))


def plain(w: Tensor) -> Tensor:
    """The same values in a plain tensor."""
    return (w * 1).as_subclass(Tensor)


def matrix() -> nn.Parameter:
    """Nine different numbers."""
    return nn.Parameter(torch.randn(3, 3), requires_grad=False)


def form(w: Tensor) -> Any:
    """What a form shows."""
    return w[0].sum() + w.sum() + w.shape[0]


of_tensor("type")(lambda: torch.rand(3), lambda w: w.to(torch.float32), assign(lambda w: w.view(torch.int32)))
of_tensor("conjugate")(
    lambda: torch.randn(3, dtype=torch.complex64),
    lambda w: torch.view_as_real(w.resolve_conj())[:, 1],
    assign(torch.conj),
)
of_tensor("negative")(lambda: torch.rand(3), lambda w: w * 1, assign(torch._neg_view))
for kind in (PackedParameter, WatchedParameter, OwnTensor):
    of_tensor(f"memory of a {kind.__name__}")(
        lambda kind=kind: torch.rand(3).as_subclass(kind), plain, assign(lambda w: w * 2)
    )
of_tensor("form of a PackedParameter")(lambda: torch.rand(4).as_subclass(PackedParameter), len, assign(lambda w: w[:2]))
of_tensor("form in seven dimensions")(
    lambda: torch.rand(1, 1, 1, 1, 1, 2, 4), lambda w: w.shape[5], lambda w: w.transpose_(5, 6)
)
of_tensor("_version")(lambda: ones(3), lambda w: 2 if w._version else 5, lambda w: w.mul_(1))
of_tensor("grad")(lambda: nn.Parameter(ones(3)), lambda w: 2 if w.grad is None else 5, put(grad=ones(3)))
of_tensor("hooks")(lambda: nn.Parameter(ones(3)), lambda w: not w._backward_hooks, lambda w: w.register_hook(print))
of_tensor("is_shared")(lambda: ones(3), lambda w: 2 if w.is_shared() else 5, lambda w: w.share_memory_())
of_tensor("storage")(
    lambda: ones(8)[:3], lambda w: w.untyped_storage().nbytes(), lambda w: w.untyped_storage().resize_(64)
)
of_tensor("requires_grad")(lambda: ones(3), lambda w: 2 if w.requires_grad else 5, lambda w: w.requires_grad_(True))
of_tensor("transposed")(matrix, form, assign(torch.t))
of_tensor("class")(lambda: ones(3), lambda w: 2 if isinstance(w, nn.Parameter) else 5, put(__class__=nn.Parameter))
of_tensor("attribute")(lambda: ones(3), lambda w: getattr(w, "k", 2), put(k=5))
run("weight_reshaped_in_place", row=True)(lambda: torch.rand(2, 3), lambda w, x: x * form(w), lambda w: w.resize_(3, 2))
read("unused_tensor_resized", row=True)(lambda: zeros(2), lambda w: w.numel(), lambda w: w.resize_(5))


# NumPy.


def as_integers(held: Any) -> None:
    """Change the type in place, over bytes that give the same number."""
    held[:] = np.array([5], dtype=np.int32).view(np.float32)
    held.dtype = np.int32


read("array_changed", row=True)(lambda: np.full(1, 2.0), lambda h: float(h[0]), lambda h: h.fill(5.0))
read("shape of an array")(lambda: np.zeros((2, 5)), len, put(shape=(5, 2)))
read("type of an array")(lambda: np.array([2], dtype=np.float32), lambda h: int(h[0]), as_integers)
read("sign of an array")(lambda: np.array([-1], dtype=np.int8), lambda h: 2 if h[0] < 0 else 5, put(dtype=np.uint8))
read("flag of an array")(lambda: np.zeros(2), lambda h: 2 if h.flags.writeable else 5, put("flags", writeable=False))


# The process and its libraries.


def in_autocast(x: Tensor) -> Tensor:
    """A product in the type that autocast has."""
    with torch.autocast("cpu"):
        return x @ torch.ones(3, 3)


run("default_dtype_changed", row=True, serves=False)(
    none, lambda _, x: x + torch.zeros(3), lambda _: torch.set_default_dtype(torch.float64)
)
run("type of autocast")(none, lambda _, x: in_autocast(x), lambda _: torch.set_autocast_dtype("cpu", torch.float16))
run("determinism of operators", serves=False)(  # which fill new memory if they are deterministic
    none,
    lambda _, x: x + (torch.empty(3, dtype=torch.int32) == 2**31 - 1),
    lambda _: torch.use_deterministic_algorithms(True),
)
read("environment_changed", row=True)(
    lambda: PATCH.setenv("GD_K", "2"), lambda _: float(os.environ["GD_K"]), patch(os.environ, "GD_K", "5")
)
read("python function replaced")(none, lambda _: int(math.sqrt(4)), patch(math, "sqrt", lambda _: 5))
run("library_replaced", row=True)(
    none, lambda _, x: nn.functional.relu(x), patch(nn.functional, "relu", lambda x: x * 5)
)
run("library_replaced: method")(
    lambda: nn.Tanh().eval(), lambda h, x: h(x), patch(nn.Tanh, "forward", lambda s, x: x * 7)
)
read("attribute of a class of torch")(
    lambda: nn.Linear(2, 2), lambda h: getattr(h, "of_all", 2), patch(nn.Linear, "of_all", 5)
)
read("generator of Python")(
    lambda: (g := random.Random(3), g.getstate()), lambda h: h[0].getstate() == h[1], lambda h: h[0].random()
)
read("generator of NumPy")(
    lambda: (g := np.random.default_rng(3), g.bit_generator.state),
    lambda h: 2 if h[0].bit_generator.state == h[1] else 5,
    lambda h: h[0].random(),
)


def stub(**attributes: Any) -> Any:
    """A module of a package of torch that is not ``torch.nn``."""
    made = torch.ao.nn.quantized.FloatFunctional()
    vars(made).update(attributes)
    return made


def operator() -> Made:
    """What the Python of a custom operator reads besides its arguments is frozen, as on CUDA, and compared."""
    context, library = Box(k=2.0), torch.library.Library("graphdispatch_cases", "FRAGMENT")
    PATCH.setattr(Box, "library", library, raising=False)

    def attend(x: Tensor) -> Tensor:
        return x * context.k

    library.define("attend(Tensor x) -> Tensor")
    library.impl("attend", attend, "CPU")
    gd.row_rule("graphdispatch_cases::attend", "n ... -> n ...")
    PATCH.setattr(Box, "library", None)
    return Made(lambda x: torch.ops.graphdispatch_cases.attend(x), lambda: to(context, k=5.0))


READS["operator_context_changed"] = Read(operator, row=True)


# Threads and what else belongs to the machinery.


class Worker(threading.Thread):
    """A thread with state of its own."""

    kind = 2

    def __init__(self) -> None:
        super().__init__(target=lambda: None)
        self.k, self.calls, self.net = 2, 0, nn.Linear(3, 3, bias=False)


def with_attributes(held: Any, **attributes: Any) -> Any:
    """An object that was given attributes."""
    vars(held).update(attributes)
    return held


read("attribute of a class of queues")(lambda: own_class(asyncio.Queue, k=2)(), lambda h: h.k, put("__class__", k=5))


def log_to_memory() -> logging.Logger:
    """A logger whose handler writes to what nobody can compare."""
    logger = logging.Logger("x")
    logger.addHandler(logging.StreamHandler(io.StringIO()))
    return logger


def lock_in_a_block(lock: Any) -> int:
    """Take a lock and give it back."""
    with lock:
        return 2


kept("lock_left_instead", row=True)(threading.Lock, lock_in_a_block, lambda _: None)
kept("lock that is given back")(threading.RLock, lock_in_a_block, lambda _: None)
kept("log")(lambda: logging.getLogger("graphdispatch.tests"), lambda h: h.debug("hello") or 2, lambda _: None)
kept("log to memory")(
    lambda: log_to_memory(), lambda h: 2 * len(h.handlers) * (not hasattr(h, "stream")), lambda h: h.warning("hello")
)
kept("decimal number")(lambda: decimal.Decimal(4), lambda h: float(h.sqrt()), lambda _: None)
kept("function of pybind11")(lambda: torch._C._get_tracing_state, lambda h: 2 if h() is None else 5, lambda _: None)


def metadata_of_a_break() -> Made:
    """An object that is replaced before each call, as engines do, and that only a break reads."""
    net = nn.Module()
    net.metadata = Box(shift=2.0)
    part = gd.eager_break(lambda x: x + net.metadata.shift)
    return Made(lambda x: part(x * 2).relu(), lambda: to(net, metadata=Box(shift=5.0)))


KEPT["metadata that a break reads"] = Read(metadata_of_a_break, options={"mode": "PIECEWISE"})
KEPT["number that a break reads"] = Read(
    lambda: (lambda box: Made(gd.eager_break(lambda x: x * box.k), lambda: to(box, k=5.0)))(Box(k=2.0)),
    options={"mode": "PIECEWISE"},
)


# What stands behind a class of the user over one of a library.


read("attribute of a static method")(
    lambda: Box(k=with_attributes(staticmethod(abs), n=2)), lambda h: h.k.n, lambda h: vars(h.k).update(n=5)
)
