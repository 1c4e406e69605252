"""Python state that a callable reads is followed, and state that it changes is refused: the answers are eager's."""

import importlib
import random
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

from graphdispatch import CUDAGraphOptions, Reason, eager_break, graphed

Case = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], Any]]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


class Box:
    """A plain object with whatever attributes it is given."""

    limit = 1.0

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slotted:
    """An object without a dict."""

    __slots__ = ("k",)

    def __init__(self, k: Any) -> None:
        self.k = k


def _served(fn: Callable[..., Any], **options: Any) -> Any:
    """``fn`` behind ``graphed``, for batches of any number of rows."""
    return graphed(fn, dynamic={"x": 0}, sizes=(4,), **options)


# --- reads -----------------------------------------------------------------------------------------------------------


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
    step = _served(fn)
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
    step = _served(fn)
    for _ in range(2):
        for _ in range(3):
            step(torch.ones(4, 3))
        assert step.last_decision.reason is Reason.EXACT, step.explain(torch.ones(4, 3))
        change()


# --- writes ----------------------------------------------------------------------------------------------------------


class Layer:
    """One layer of a cache, as a plain object."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None

    def update(self, k: torch.Tensor) -> torch.Tensor:
        """Append, and give all of it."""
        self.keys = k if self.keys is None else torch.cat([self.keys, k], 0)
        return self.keys


class Cache:
    """A list of layers that grows, as ``DynamicCache`` does."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []

    def update(self, k: torch.Tensor) -> torch.Tensor:
        """Append to the first layer."""
        if not self.layers:
            self.layers.append(Layer())
        return self.layers[0].update(k)


class Set:
    """Has a property with a setter."""

    def __init__(self) -> None:
        self._held: Any = None

    @property
    def held(self) -> Any:
        """What was set."""
        return self._held

    @held.setter
    def held(self, value: Any) -> None:
        self._held = value


def _write(act: Callable[[Any, torch.Tensor], Any], **attributes: Any) -> Callable[[], tuple[Any, Any]]:
    """A callable that does something to an object, and what reads how often it was done."""

    def make() -> tuple[Any, Any]:
        owner = Box(**{name: value() for name, value in attributes.items()})

        def fn(x: torch.Tensor) -> torch.Tensor:
            act(owner, x)
            return x * 2

        return fn, owner

    return make


def _count_in_class(owner: Any, x: torch.Tensor) -> None:
    type(owner.inner).number = getattr(type(owner.inner), "number", 0) + 1


class Hooked(nn.Module):
    """Its hook keeps features."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ReLU()
        self.features: dict[str, Any] = {}
        self.inner.register_forward_hook(lambda module, args, output: self.features.__setitem__("h", output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice what is positive."""
        return self.inner(x) * 2


def _hook_that_writes() -> tuple[Any, Any]:
    model = Hooked().eval()
    return model, model


def _nonlocal_counter() -> tuple[Any, Any]:
    count = 0

    def fn(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return x * count

    return fn, None


WRITES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "cache of objects": _write(lambda o, x: o.cache.update(x[:1]), cache=Cache),
    "attribute of an entry": _write(lambda o, x: setattr(o.caches[0], "k", x[:1] * 1), caches=lambda: [Box(k=None)]),
    "written and never read": _write(lambda o, x: setattr(o.context, "hidden", x * 1), context=Box),
    "class attribute": _write(_count_in_class, inner=lambda: type("Inner", (Box,), {"__module__": __name__})()),
    "setter": _write(lambda o, x: setattr(o.inner, "held", x * 1), inner=Set),
    "slot": _write(lambda o, x: setattr(o.inner, "k", x * 1), inner=lambda: Slotted(None)),
    "gradient": _write(lambda o, x: setattr(o.w, "grad", x[0] * 1), w=lambda: nn.Parameter(torch.ones(3))),
    "attribute of a tensor": _write(lambda o, x: setattr(o.w, "tag", x[0] * 1), w=lambda: torch.ones(3)),
    "hook": _hook_that_writes,
    "counter in a closure": _nonlocal_counter,
    "list in a list": _write(lambda o, x: o.a[0].append(1), a=lambda: [[]]),
    "dict": _write(lambda o, x: o.a.update(n=len(o.a), **{str(len(o.a)): 1}), a=dict),
    "set": _write(lambda o, x: o.a.add(len(o.a)), a=set),
    "array": _write(lambda o, x: o.a.__iadd__(1), a=lambda: np.zeros(2)),
    "bytes": _write(lambda o, x: o.a.append(1), a=bytearray),
}


@pytest.mark.parametrize("make", WRITES.values(), ids=WRITES.keys())
def test_what_is_changed_is_refused(make: Callable[[], tuple[Any, Any]]) -> None:
    """With the reason, after one run of the callable: an attempt to capture leaves nothing behind."""
    fn, _ = make()
    step = _served(fn)
    for _ in range(5):
        step(torch.ones(4, 3))
        assert not step.last_decision.reason.is_graph
    assert step.stats.capture_failures
    assert step.stats.reasons[Reason.STATE_REBOUND]


@pytest.mark.parametrize("sizes", [(4,), (1, 2, 3)])
def test_failed_captures_leave_python_as_it_is(sizes: tuple[int, ...]) -> None:
    """Six calls that each append one row to a cache of plain objects give what eager gives."""
    cache, twin = Cache(), Cache()
    step = graphed(lambda x: cache.update(x[:1]).sum(0), dynamic={"x": 0}, sizes=sizes)
    for rows in (1, 2, 3, 3, 2, 1):
        x = torch.ones(rows, 3)
        assert torch.equal(step(x), twin.update(x[:1]).sum(0))
    assert cache.layers[0].keys is not None
    assert len(cache.layers[0].keys) == 6


@pytest.mark.parametrize("make", WRITES.values(), ids=WRITES.keys())
def test_prewarm_leaves_python_as_it_is(make: Callable[[], tuple[Any, Any]]) -> None:
    """The runs for a capture that fails are undone, those of the warm-up included."""
    fn, owner = make()
    before = _picture(owner)
    _served(fn).prewarm(torch.ones(4, 3), sizes=(4,))
    assert _picture(owner) == before


def _picture(value: Any, depth: int = 6) -> Any:
    """What an object holds, by value; tensors by identity."""
    if isinstance(value, torch.Tensor):
        return id(value), None if not value.is_leaf else id(value.grad), _picture(vars(value), depth - 1)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _picture(held, depth - 1) for key, held in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_picture(held, depth - 1) for held in value]
    if isinstance(value, Slotted):
        return id(value.k)
    if isinstance(value, (Box, Cache, Layer, Set, Hooked)) and depth:
        return _picture(vars(value), depth - 1), getattr(type(value), "number", None)
    return repr(value)


# --- what cannot be compared ------------------------------------------------------------------------------------------


def _draws(draw: Callable[[], float]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * 2 if draw() < 2 else x


def _steps(iterator: Iterator[Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * float(next(iterator))


UNSEEN: dict[str, Callable[[], Callable[..., Any]]] = {
    "random": lambda: _draws(random.random),
    "own generator of Python": lambda: _draws(random.Random(0).random),
    "numpy.random": lambda: _draws(np.random.random),
    "own generator of NumPy": lambda: _draws(np.random.default_rng(0).random),
    "generator": lambda: _steps(float(n) for n in range(1, 1000)),
    "iterator": lambda: _steps(iter(list(range(1, 1000)))),
}


@pytest.mark.parametrize("make", UNSEEN.values(), ids=UNSEEN.keys())
def test_draws_and_steps_are_refused(make: Callable[[], Callable[..., Any]]) -> None:
    """A number that Python or NumPy draws, and what an iterator gives next, differ from call to call."""
    step = _served(make())
    for _ in range(4):
        step(torch.ones(4, 3))
        assert not step.last_decision.reason.is_graph
    assert step.stats.reasons[Reason.STATE_UNSEEN]


def test_an_iterator_moves_once_for_each_call() -> None:
    """The refusal comes before a second run."""
    step = _served(_steps(iter(list(range(1, 1000)))))
    answers = [float(step(torch.ones(1, 1))[0]) for _ in range(5)]
    assert answers == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_the_default_generator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callable that draws nothing never has it set, so that no other thread draws the same numbers twice."""
    weight = torch.ones(3)
    step = _served(lambda x: (x * weight).relu())
    states: list[Any] = []
    for owner, name in ((torch, "set_rng_state"), (torch.random, "set_rng_state")):
        monkeypatch.setattr(owner, name, states.append)
    default, before = torch.default_generator, torch.get_rng_state()
    for rows in (1, 4, 2, 4, 3):
        step(torch.ones(rows, 3))
    step.prewarm(torch.ones(4, 3), sizes=(4,))
    assert step.stats.captures
    assert not states
    assert torch.equal(default.get_state(), before)


# --- keyed by state, and counted -------------------------------------------------------------------------------------


def test_two_adapters_that_alternate_both_stay_captured() -> None:
    """Each state has its graph, which serves again when the state comes back."""
    adapters = {name: torch.full((3,), value) for name, value in (("a", 1.0), ("b", 2.0))}
    owner = Box(active="a")
    step = _served(lambda x: x + adapters[owner.active])
    for index in range(20):
        owner.active = "ab"[index % 2]
        x = torch.randn(4, 3)
        assert torch.equal(step(x), x + adapters[owner.active])
    assert step.stats.captures == 2
    assert step.stats.hits >= 14


class Annotated(nn.Module):
    """Carries metadata that only a break reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.metadata: Any = None

    @eager_break
    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Adds what the metadata says."""
        return x + self.metadata.shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Graph, break, graph."""
        return self.attend(self.linear(x)).relu()


def test_metadata_that_a_break_reads_keeps_the_hits() -> None:
    """It is set before each call, and no graph ends."""
    model = Annotated().eval()
    step = _served(model, mode="PIECEWISE")
    for index in range(20):
        model.metadata = Box(shift=float(index))
        x = torch.randn(4, 3)
        assert torch.equal(step(x), model(x))
    assert step.stats.captures == 1
    assert step.stats.hits >= 17


def test_a_failure_survives_a_change_of_state() -> None:
    """An uncapturable model with an attribute that is set before each call is tried a few times, not each time."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.number = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.sum().item() + self.number

    model = Reads().eval()
    step = _served(model, options=CUDAGraphOptions(max_failures=2))
    for index in range(60):
        model.number = index
        step(torch.ones(4, 3))
    assert 1 <= step.stats.capture_failures <= 4
