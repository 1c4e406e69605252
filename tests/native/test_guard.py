"""The native guard: what it notices without Python, what it makes of equal constants, and what it leaves behind."""

import gc
import sys
import threading
import weakref
from abc import ABC
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphdispatch.native import guards as native_guards
from graphdispatch.native.bound import CORE
from graphdispatch.native.guards import GUARD, USES_VERSIONS, versions_tell
from graphdispatch.state.guards import StateGuard

from ..traced import guard_of
from .frames import frames_of

pytestmark = pytest.mark.skipif(GUARD is None, reason="there is no native core")

_scale = 2.5
_setting: ContextVar[float] = ContextVar("_setting", default=1.5)


class Settings:
    """An object with slots."""

    __slots__ = ("depth", "spare")

    def __init__(self) -> None:
        self.depth = 2.5


class Shared:
    """An object with attributes, whose class has some, too."""

    shift = 0.5

    def __init__(self) -> None:
        self.gain = 3.5


class Other(Shared):
    """What an object's class may become."""


def double(x: torch.Tensor, *, by: float = 2.0) -> torch.Tensor:
    """A function with a keyword's default."""
    return x * by


def half(x: torch.Tensor, *, by: float = 2.0) -> torch.Tensor:
    """Other code, which reads the same."""
    return x / by


class Net(nn.Module):
    """A module that reads state of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.register_buffer("offset", torch.zeros(3))
        self.loose = torch.ones(3)
        self.factor = 2.5
        self.steps = [1.5, 2.5]
        self.names = {"a": 1.5, "b": 2.5}
        self.ordered = OrderedDict(a=1.5, b=2.5)
        self.kinds = {"relu", "tanh"}
        self.recent = deque([1.5, 2.5])
        self.settings = Settings()
        self.shared = Shared()
        self.double = double
        self.target = Shared()
        self.reference = weakref.ref(self.target)
        self.table = np.ones(3)
        self.across = np.ones((2, 2)).T
        self.numbers = array("d", [1.5])
        self.setting = _setting
        closed = 1.25

        def add(x: torch.Tensor, extra: float = 0.5) -> torch.Tensor:
            return x + closed + extra

        self.add = add

        def turn(value: float) -> None:
            nonlocal closed
            closed = value

        self.turn = turn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.add(self.double(self.layers(x))) * self.factor * self.steps[0] * self.names["a"] * self.ordered["a"]
        x = x + self.offset + self.loose + len(self.kinds) + self.recent[0] + self.settings.depth + self.shared.gain
        x = x + self.shared.shift + self.setting.get() + _scale + float(self.table[0]) + self.numbers[0]
        reached = self.reference()
        return x + (reached.gain if reached is not None else 0) + float(self.across.sum())


def set_global(value: float) -> None:
    """Rebind a global variable that the module reads."""
    globals()["_scale"] = value


CHANGES: dict[str, Callable[[Net], Any]] = {
    "data assigned": lambda net: setattr(net.layers[0].weight, "data", torch.ones(3, 3)),
    "parameter replaced": lambda net: setattr(net.layers[0], "bias", nn.Parameter(torch.ones(3))),
    "parameter removed": lambda net: setattr(net.layers[1], "bias", None),
    "parameter transposed": lambda net: net.layers[0].weight.detach_().t_(),
    "parameter set": lambda net: net.layers[0].weight.detach_().set_(torch.ones(3, 3)),
    "buffer resized": lambda net: net.offset.resize_(1),
    "buffer replaced": lambda net: setattr(net, "offset", torch.zeros(3)),
    "tensors swapped": lambda net: torch.utils.swap_tensors(net.loose, torch.ones(3)),
    "submodule replaced": lambda net: setattr(net, "layers", nn.Sequential(nn.Linear(3, 3))),
    "submodule added": lambda net: net.layers.append(nn.ReLU()),
    "training": lambda net: net.layers[1].train(),
    "attribute": lambda net: setattr(net, "factor", 1.0),
    "attribute in the table": lambda net: vars(net).update(factor=1.0),
    "attribute removed": lambda net: delattr(net, "factor"),
    "new attribute": lambda net: setattr(net, "_new", 1.0),
    "list entry": lambda net: net.steps.__setitem__(0, 9.0),
    "list grew": lambda net: net.steps.append(9.0),
    "list shrank": lambda net: net.steps.pop(),
    "dict value": lambda net: net.names.update(a=9.0),
    "dict key": lambda net: net.names.__setitem__("c", 2.5),
    "dict key replaced": lambda net: (net.names.pop("b"), net.names.__setitem__("c", 2.5)),
    "ordered value": lambda net: net.ordered.update(a=9.0),
    "set entry": lambda net: net.kinds.add("new"),
    "set entry removed": lambda net: net.kinds.discard("relu"),
    "deque entry": lambda net: net.recent.append(9.0),
    "deque turned": lambda net: net.recent.rotate(),
    "slot": lambda net: setattr(net.settings, "depth", 9.0),
    "slot removed": lambda net: delattr(net.settings, "depth"),
    "object's attribute": lambda net: setattr(net.shared, "gain", 9.0),
    "object's class": lambda net: setattr(net.shared, "__class__", Other),
    "module's class": lambda net: setattr(net.layers[0], "__class__", type("Linear", (nn.Linear,), {})),
    "closure": lambda net: net.turn(9.0),
    "default": lambda net: setattr(net.add, "__defaults__", (9.0,)),
    "keyword default": lambda net: setattr(net.double, "__kwdefaults__", {"by": 9.0}),
    "keyword default in place": lambda net: net.double.__kwdefaults__.update(by=9.0),
    "code": lambda net: setattr(net.double, "__code__", half.__code__),
    "weak reference": lambda net: (delattr(net, "target"), gc.collect()),
    "array": lambda net: net.table.__setitem__(0, 9.0),
    "transposed array": lambda net: net.across.__setitem__((0, 1), 9.0),
    "array of Python": lambda net: net.numbers.__setitem__(0, 9.0),
    "array of Python grew": lambda net: net.numbers.append(9.0),
    "context variable": lambda net: net.setting.set(9.0),
    "forward hook": lambda net: net.layers[0].register_forward_hook(lambda *_: None),
    "global variable": lambda net: set_global(9.0),
    "class attribute": lambda net: setattr(Shared, "shift", 9.0),
    "default dtype": lambda net: torch.set_default_dtype(torch.float64),
    "default device": lambda net: torch.set_default_device("meta"),
    "determinism": lambda net: torch.use_deterministic_algorithms(True),
}


@pytest.fixture
def surroundings() -> Iterator[None]:
    """Puts back what changes do outside of the module."""
    code, defaults, shift = double.__code__, dict(double.__kwdefaults__), Shared.shift
    token = _setting.set(1.5)
    yield
    _setting.reset(token)
    set_global(2.5)
    double.__code__, double.__kwdefaults__, Shared.shift = code, defaults, shift  # type: ignore[assignment]
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[True, False], ids=["versions", "entries"])
def versions(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Guards that skip dicts by their versions, and guards that compare every entry."""
    if request.param and not USES_VERSIONS:
        pytest.skip("dicts have no versions here")
    CORE.use_versions(request.param)
    yield request.param
    CORE.use_versions(USES_VERSIONS)


def settled(fn: Callable[..., Any]) -> StateGuard:
    """A guard whose native half is there and holds."""
    guard = guard_of(fn)
    assert guard.native is not None
    assert guard.native.holds()
    assert guard.native.holds()
    return guard


@pytest.mark.usefixtures("surroundings", "versions")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_natively(change: str) -> None:
    """The native guard alone notices each kind of change."""
    net = Net().eval()
    guard = settled(net)
    CHANGES[change](net)
    assert not guard.native.holds()
    assert not guard.holds()


class Through:
    """It goes through its own attributes."""

    def __init__(self) -> None:
        self.first, self.second = 2, 5


class Kind(ABC):  # noqa: B024
    """A class with which others register."""


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize("change", ["order", "kind", "threads"])
def test_plain_readers_need_no_python(change: str) -> None:
    """The order of attributes, classes that register, and settings are compared by the core alone."""
    through, shared, threads = Through(), Shared(), torch.get_num_threads()

    def fn(x: torch.Tensor) -> torch.Tensor:
        first = next(iter(vars(through).values()))
        return x * first if isinstance(shared, Kind) or torch.get_num_threads() > 100 else x

    guard = settled(fn)
    assert frames_of(guard.native.holds) == []
    try:
        if change == "order":
            vars(through)["first"] = vars(through).pop("first")
        elif change == "kind":
            Kind.register(type("Registered", (), {}))
        else:
            torch.set_num_threads(threads + 1)
        assert not guard.native.holds()
        assert not guard.holds()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("versions")
def test_what_comes_back_holds_again() -> None:
    """The native guard holds again as soon as the state is back, without another guard in its place."""
    net = Net().eval()
    guard = settled(net)
    native, weight, data = guard.native, net.layers[0].weight, net.layers[0].weight.data
    weight.data = torch.zeros(3, 3)
    net.factor, kept = 9.0, net.factor
    assert not guard.holds()
    weight.data, net.factor = data, kept
    assert native.holds()
    assert guard.holds()
    assert guard.native is native


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize("value", [2.5, 1 << 70, "some text", b"some bytes", float("nan"), 0.0])
def test_equal_constants_are_the_same_natively(value: Any) -> None:
    """A constant that is made anew, equal to the one before, does not need Python's comparison."""
    net = Net().eval()
    net.settings.depth = value
    net.factor = value

    def fn(x: torch.Tensor) -> Any:
        return net.factor, net.settings.depth, net.steps[0], x

    net.steps[0] = value
    guard = settled(fn)
    for _ in range(3):
        net.factor, net.settings.depth, net.steps[0] = (eval(repr(value), {"nan": float("nan")}) for _ in range(3))
        assert guard.native.holds()


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize(("value", "other"), [(0.0, -0.0), (1, True), (1, 1.0), ("a", b"a"), (1 << 70, (1 << 70) + 1)])
def test_constants_of_other_types_or_bits_are_others(value: Any, other: Any) -> None:
    """Equality in Python's sense is not enough."""
    net = Net().eval()
    net.factor = value
    guard = settled(lambda x: (net.factor, x))
    net.factor = other
    assert not guard.native.holds()
    assert not guard.holds()


def test_a_native_guard_is_made_again_where_python_finds_that_it_holds() -> None:
    """The native guard compares no complex numbers by value. Python does, and the next native guard expects the new."""
    net = Net().eval()
    net.factor = 2.5 + 1j
    guard = settled(lambda x: x * net.factor)
    native = guard.native
    net.factor = complex(repr(net.factor))
    assert not native.holds()
    assert guard.holds()
    assert guard.native is not native
    assert guard.native.holds()


def test_native_guards_made_in_vain_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """State that Python alone can compare, and that changes all the time, costs fewer and fewer native guards."""
    net = Net().eval()
    net.factor = 2.5 + 1j
    guard = settled(lambda x: x * net.factor)
    made = set()
    for _ in range(200):
        net.factor = complex(repr(net.factor))
        assert guard.holds()
        made.add(guard.native)
    assert len(made) < 12


def test_hooks_elsewhere_are_no_change() -> None:
    """A hook on another module is registered: the native guard still holds, and again at once."""
    guard = settled(Net().eval())
    handle = nn.Linear(1, 1).register_forward_hook(lambda *_: None)
    assert guard.native.holds()
    handle.remove()
    assert guard.native.holds()


def test_global_hooks_are_noticed() -> None:
    """A hook on all modules is one on the callable's."""
    guard = settled(Net().eval())
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not guard.native.holds()
    handle.remove()


def test_only_a_call_in_training_mode_is_trainable() -> None:
    """The native guard knows the modes of the modules, and reads anew which tensors require gradients."""
    net = Net().train()
    guard = settled(net)
    assert guard.native.trainable() is True
    net.requires_grad_(False)
    assert guard.native.holds()
    assert guard.native.trainable() is False
    net.layers[1].bias.requires_grad_(True)
    assert guard.native.trainable() is True
    assert settled(Net().eval()).native.trainable() is False


def test_a_mode_that_the_guard_does_not_compare_is_asked_of_python() -> None:
    """A class that computes its mode may change it without a change of state."""

    class Odd(nn.Module):
        mode = True

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def __getattribute__(self, name: str) -> Any:
            return Odd.mode if name == "training" else super().__getattribute__(name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    guard = guard_of(Odd())
    assert guard.native is None or guard.native.trainable() is None
    assert guard.trainable
    Odd.mode = False
    assert not guard.trainable


def test_no_references_are_left_behind() -> None:
    """Guards take references and give them back, however they end."""
    net = Net().eval()
    guard = settled(net)
    watched = [net.layers[0].weight, net.steps, net.kinds, net.settings, net.shared, net.names, Other]
    gc.collect()
    before = list(map(sys.getrefcount, watched))
    for _ in range(100):
        guard.native = None
        guard._due = 1
        assert guard.holds()
        net.factor = float(repr(net.factor))
        assert guard.native.holds()
    gc.collect()
    assert list(map(sys.getrefcount, watched)) == before


def test_a_check_leaves_no_references() -> None:
    """A check that holds, and one that does not, leave the counts as they were."""
    net = Net().eval()
    guard = settled(net)
    watched = [net.layers[0].weight, net.steps, net.target, torch.float32, None, _setting.get()]
    before = list(map(sys.getrefcount, watched))
    for _ in range(1000):
        guard.native.holds()
        guard.native.trainable()
    assert all(abs(now - then) < 50 for now, then in zip(map(sys.getrefcount, watched), before, strict=True))


def test_a_cycle_through_a_guard_is_collected() -> None:
    """A module that holds its own guard goes when nobody else holds it."""
    net = Net().eval()
    net.guard = settled(net)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


def test_sixteen_threads_check_while_one_changes() -> None:
    """Checks at the same time as changes see the state before or after, and nothing breaks."""
    net = Net().eval()
    guard = settled(net)
    wrong: list[str] = []
    stop = threading.Event()

    def check() -> None:
        while not stop.is_set():
            guard.holds()
            if guard.trainable:
                wrong.append("trainable")

    threads = [threading.Thread(target=check) for _ in range(16)]
    for thread in threads:
        thread.start()
    for number in range(300):
        net.factor, net.steps[0] = 2.5 + number, float(number)
        net.names["a"] = number
        net.kinds.add(str(number))
        net.layers[0].weight.data = torch.ones(3, 3)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not guard.holds()


def test_versions_are_tested_before_they_are_used() -> None:
    """A number that misses a change is not trusted, whichever change it is."""
    assert not versions_tell(lambda table: 1)
    assert not versions_tell(lambda table: 0)
    assert not versions_tell(len)
    assert not versions_tell(lambda table: id(table.get("first")) or 1)
    if USES_VERSIONS:
        assert versions_tell(CORE.dict_version)
        assert not versions_tell(lambda table: 1 if "__module__" in table else CORE.dict_version(table))


def test_what_is_no_part_of_a_guard_is_refused() -> None:
    """The class checks what it is given, rather than trusting it."""
    empty: dict[str, Any] = dict.fromkeys(
        ("tables", "contents", "sequences", "types", "codes", "homes", "readers", "tensors", "arrays", "hooks"), ()
    )
    given = {"absent": object(), "handles": {"next_id": 1}, "latest": 1, "trains": 0, **empty}
    assert GUARD(**given).holds()
    wrong: dict[str, Any] = {
        "tables": (([], -1, ()),),
        "contents": (({}, None, []),),
        "sequences": (1,),
        "codes": ((1, 2),),
        "homes": ((1, 2),),
        "readers": (("cell", 1, None, 1), ("slot", Settings(), 1, 1), ("other", 1, None, 1)),
        "tensors": ((1, 0, (2,), (1,)), (torch.zeros(2), 0, (2,), ()), (torch.zeros(2), 0, ("2",), (1,))),
        "arrays": ((1, 2, True),),
        "hooks": (1,),
    }
    for name, value in wrong.items():
        for part in value:
            with pytest.raises(TypeError):
                GUARD(**{**given, name: (part,)})


def test_without_the_core_python_compares_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard works the same where no native one can be made."""
    monkeypatch.setattr("graphdispatch.state.compiled.GUARD", None)
    net = Net().eval()
    guard = guard_of(net)
    assert guard.native is None
    assert guard.holds()
    net.factor = 9.0
    assert not guard.holds()
    assert native_guards.GUARD is not None
