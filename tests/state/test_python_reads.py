"""Python state that a callable reads is compared, in whatever shape: the answers are eager's after each change."""

import importlib
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphdispatch import Reason

from ..python_objects import Box, Slotted, served

Case = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], Any]]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def _entry_of_a_list() -> Case:
    owner = Box(caches=[Box(k=torch.ones(3))])
    return lambda x: x + owner.caches[0].k, lambda: setattr(owner.caches[0], "k", torch.zeros(3))


def _entry_of_a_dict() -> Case:
    owner = Box(configs={"attn": Box(scale=2.0)})
    return lambda x: x * owner.configs["attn"].scale, lambda: setattr(owner.configs["attn"], "scale", 3.0)


LAYERS = [Box(scale=2.0)]


def _global_list() -> Case:
    LAYERS[0].scale = 2.0
    return lambda x: x * LAYERS[0].scale, lambda: setattr(LAYERS[0], "scale", 3.0)


def _scaled(config: Any, x: torch.Tensor) -> torch.Tensor:
    return x * config.scale


def _variables_of_the_module() -> Case:
    LAYERS[0].scale = 2.0
    return lambda x: x * globals()["LAYERS"][0].scale, lambda: setattr(LAYERS[0], "scale", 3.0)


def _first_argument_of_a_helper() -> Case:
    config = Box(scale=2.0)
    return lambda x: _scaled(config, x), lambda: setattr(config, "scale", 3.0)


def _conditional() -> Case:
    a, b, flag = Box(scale=2.0), Box(scale=4.0), Box(on=True)

    def fn(x: torch.Tensor) -> torch.Tensor:
        config = a if flag.on else b
        return x * config.scale

    return fn, lambda: setattr(a, "scale", 3.0)


def _condition() -> Case:
    a, b, flag = Box(scale=2.0), Box(scale=4.0), Box(on=True)

    def fn(x: torch.Tensor) -> torch.Tensor:
        config = a if flag.on else b
        return x * config.scale

    return fn, lambda: setattr(flag, "on", False)


def _result_of_a_call() -> Case:
    config = Box(mean=2.0)

    def get_config() -> Any:
        return config

    return lambda x: x * get_config().mean, lambda: setattr(config, "mean", 3.0)


def _name_of_a_tensor_attribute() -> Case:
    config = Box(dtype=torch.float32)
    return lambda x: x.to(config.dtype), lambda: setattr(config, "dtype", torch.float64)


def _behind_lru_cache() -> Case:
    @cache
    def config() -> Any:
        return Box(scale=2.0)

    return lambda x: x * config().scale, lambda: setattr(config(), "scale", 3.0)


class Lazy:
    """Computes its settings once."""

    @cached_property
    def config(self) -> Any:
        """The settings."""
        return Box(scale=2.0)


def _behind_cached_property() -> Case:
    lazy = Lazy()
    lazy.config  # noqa: B018
    return lambda x: x * lazy.config.scale, lambda: setattr(lazy.config, "scale", 3.0)


def _behind_a_weak_reference() -> Case:
    config = Box(scale=2.0)
    reference = weakref.ref(config)
    return lambda x: x * reference().scale, lambda: setattr(config, "scale", 3.0)  # type: ignore[union-attr]


def _imported_inside() -> Case:
    settings = sys.modules["users_settings"]

    def fn(x: torch.Tensor) -> torch.Tensor:
        import users_settings  # type: ignore[import-not-found]

        return x * users_settings.factor

    return fn, lambda: setattr(settings, "factor", 3.0)


def _name_imported_inside() -> Case:
    settings = sys.modules["users_settings"]

    def fn(x: torch.Tensor) -> torch.Tensor:
        from users_settings import factor

        return x * factor

    return fn, lambda: setattr(settings, "factor", 3.0)


def _import_module() -> Case:
    settings = sys.modules["users_settings"]
    fn = lambda x: x * importlib.import_module("users_settings").factor  # noqa: E731
    return fn, lambda: setattr(settings, "factor", 3.0)


class Operand:
    """Has special methods that read an attribute."""

    def __init__(self) -> None:
        self.scale = 2.0

    def __getitem__(self, index: int) -> float:
        return self.scale

    def __len__(self) -> int:
        return int(self.scale)

    def __float__(self) -> float:
        return self.scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def _special(read: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[], Case]:
    def make() -> Case:
        operand = Operand()
        return lambda x: read(operand, x), lambda: setattr(operand, "scale", 3.0)

    return make


class Equal(Box):
    """Equal to each other one."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    def __hash__(self) -> int:
        return 1


def _equal_object() -> Case:
    owner = Box(config=Equal(scale=2.0))
    return lambda x: x * owner.config.scale, lambda: setattr(owner, "config", Equal(scale=3.0))


class Naive(Box):
    """Compares an attribute that the other may not have."""

    def __eq__(self, other: Any) -> bool:
        return bool(self.name == other.name)

    __hash__ = None  # type: ignore[assignment]


def _naive_eq() -> Case:
    owner = Box(config=Naive(name="a", scale=2.0))
    return lambda x: x * owner.config.scale, lambda: setattr(owner, "config", Box(scale=3.0))


class Keyed:
    """Looks attributes up in a dict, and raises ``KeyError`` for those that it has not."""

    def __init__(self, **entries: Any) -> None:
        self.entries = entries

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["entries"][name]


def _getattr_that_raises_key_error() -> Case:
    config = Keyed(scale=2.0)
    return lambda x: x * config.scale, lambda: config.entries.update(scale=3.0)


def _code_of_the_class() -> Case:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    return Model().eval(), lambda: setattr(Model, "forward", lambda self, x: x * 3)


def _code_of_a_function() -> Case:
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    return lambda x: helper(x), lambda: setattr(helper, "__code__", (lambda x: x * 3).__code__)


def _default_dtype() -> Case:
    return lambda x: x + torch.ones(3), lambda: torch.set_default_dtype(torch.float64)


def _shadowed() -> Case:
    box = Box()
    return lambda x: x * box.limit, lambda: setattr(box, "limit", 3.0)


def _thread_local() -> Case:
    local = threading.local()
    local.scale = 2.0
    return lambda x: x * local.scale, lambda: setattr(local, "scale", 3.0)


def _slot() -> Case:
    slotted = Slotted(2.0)
    return lambda x: x * slotted.k, lambda: setattr(slotted, "k", 3.0)


def _computed_name() -> Case:
    box, name = Box(a=2.0, b=3.0), "a"
    return lambda x: x * getattr(box, name), lambda: setattr(box, "a", 3.0)


def _array() -> Case:
    array = np.full(2, 2.0)
    return lambda x: x * float(array[0]), lambda: array.fill(3.0)


def _hook_of_a_part() -> Case:
    config, model = Box(scale=2.0), nn.Sequential(nn.Identity()).eval()
    model[0].register_forward_hook(lambda module, args, output: output * config.scale)
    return lambda x: model(x), lambda: setattr(config, "scale", 3.0)


READS: dict[str, Callable[[], Case]] = {
    "object in a list": _entry_of_a_list,
    "object in a dict": _entry_of_a_dict,
    "object in a global list": _global_list,
    "globals()": _variables_of_the_module,
    "first argument of a helper": _first_argument_of_a_helper,
    "one of two objects": _conditional,
    "which of two objects": _condition,
    "result of a call": _result_of_a_call,
    "name that tensors have": _name_of_a_tensor_attribute,
    "lru_cache": _behind_lru_cache,
    "cached_property": _behind_cached_property,
    "weak reference": _behind_a_weak_reference,
    "import inside": _imported_inside,
    "import of a name inside": _name_imported_inside,
    "import_module": _import_module,
    "__getitem__": _special(lambda o, x: x * o[0]),
    "__len__": _special(lambda o, x: x * len(o)),
    "__float__": _special(lambda o, x: x * float(o)),
    "__call__": _special(lambda o, x: o(x)),
    "equal object": _equal_object,
    "naive __eq__": _naive_eq,
    "__getattr__ that raises KeyError": _getattr_that_raises_key_error,
    "method of the class": _code_of_the_class,
    "code of a function": _code_of_a_function,
    "default dtype": _default_dtype,
    "attribute of the class, shadowed": _shadowed,
    "threading.local": _thread_local,
    "slot": _slot,
    "computed name": _computed_name,
    "array": _array,
    "hook of a part": _hook_of_a_part,
}


@pytest.fixture
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    settings = types.ModuleType("users_settings")
    settings.factor = 2.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_settings", settings)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_settings")
@pytest.mark.parametrize("make", READS.values(), ids=READS.keys())
def test_what_is_read_is_compared(make: Callable[[], Case]) -> None:
    """After the change the answers are eager's, from the next call on."""
    fn, change = make()
    step = served(fn)
    for _ in range(4):
        x = torch.randn(4, 3)
        assert torch.equal(step(x), fn(x))
    before = fn(x)
    change()
    after = fn(x)
    assert after.dtype is not before.dtype or not torch.equal(after, before)
    for _ in range(3):
        answer = step(x)
        assert answer.dtype is after.dtype
        assert torch.equal(answer, after)


NOT_SERVED = {"threading.local"}
"""Reads that nobody can compare: such a callable may run eagerly for good."""


@pytest.mark.usefixtures("_settings")
@pytest.mark.parametrize("name", sorted(READS.keys() - NOT_SERVED))
def test_what_is_compared_is_served(name: str) -> None:
    """A graph serves it all the same, before the change and after it."""
    fn, change = READS[name]()
    step = served(fn)
    for _ in range(2):
        for _ in range(3):
            step(torch.ones(4, 3))
        assert step.last_decision.reason is Reason.EXACT, step.explain(torch.ones(4, 3))
        change()
