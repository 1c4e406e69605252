"""The native guard: it compares without Python, and leaves nothing behind.

That it notices what Python's notices is a claim of ``tests/behaviour/test_python_state.py``.
"""

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from graphdispatch.native.bound import CORE, GUARD, USES_CHANGES, USES_VERSIONS, versions_tell
from graphdispatch.proof.state import guards

from ..behaviour.cases import Box, Slotted
from ..helpers import check_rows, in_threads, make, native_answers

pytestmark = pytest.mark.skipif(GUARD is None, reason="there is no native core")


def settled(fn: Callable[..., Any], **options: Any) -> Any:
    """The guard of a graph, whose native half is there and holds."""
    step = make(fn, sizes=(4,), **options)
    check_rows(step, 4, 4, 4)
    guard = step.entries[0].guard
    assert guard.holds()
    return guard


EMPTY: dict[str, Any] = {
    "absent": object(),
    "handles": {"next_id": 1},
    "latest": 1,
    "trains": 0,
    **dict.fromkeys(("tables", "contents", "sequences", "readers", "tensors", "hooks"), ()),
}
"""What a guard is made of that compares nothing."""


class Steps(list[float]):
    """A user's list."""


class Net(nn.Module):
    """A module that reads state of some kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.factor, self.steps, self.names = 2.5, [1.5, 2.5], {"a": 1.5, "b": 2.5}
        self.kinds, self.settings, self.shared = {"relu", "tanh"}, Slotted(2.5), Box(gain=3.5)
        self.turns = Steps([1.5])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x) * self.factor * self.steps[0] * self.names["a"] * self.turns[0]
        return x + len(self.kinds) + self.settings.k + self.shared.gain


def test_a_native_guard_is_made_again_where_python_finds_that_it_holds() -> None:
    """The native guard compares no complex numbers by value. Python does, and the next native guard expects the new;
    state that changes all the time costs fewer and fewer of them."""
    net = Net().eval()
    net.factor = 2.5 + 1j
    guard = settled(lambda x: x * net.factor)
    made = {guard.native}
    for turn in range(200):
        net.factor = complex(repr(net.factor))
        assert turn or not guard.native.holds()
        assert guard.holds()
        assert turn or guard.native.holds()
        made.add(guard.native)
    assert 1 < len(made) < 12


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


def test_no_references_are_left_behind() -> None:
    """Guards take references and give them back, however they end; a check leaves the counts as they were, whether it
    holds or not."""
    net = Net().eval()
    guard = settled(net)
    watched = [net.layers[0].weight, net.steps, net.kinds, net.settings, net.shared, net.names]
    gc.collect()
    before = list(map(sys.getrefcount, watched))
    for _ in range(100):
        guard.native = None
        guard._due = 1
        assert guard.holds()
        net.factor = float(repr(net.factor))
        assert guard.native.holds()
        assert guard.native.trainable() is False
        net.factor, kept = 9.0, net.factor
        assert not guard.native.holds()
        net.factor = kept
    gc.collect()
    assert list(map(sys.getrefcount, watched)) == before


def test_a_cycle_through_a_guard_is_collected() -> None:
    """A module that holds its own guard goes when nobody else holds it."""
    net = Net().eval()
    net.guard = settled(net)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


class Alike(nn.Module):
    """Many layers of one shape, more than a guard looks back on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer.weight[0]
        return x


def test_each_of_many_tensors_is_compared() -> None:
    """Tensors with the same extents share what is expected of them, and each is compared by itself: a change of the
    first one, which others refer to, or of any other, is noticed, and leaves the others watched."""
    net = Alike().eval()
    guard = settled(net)
    native, weights = guard.native, [layer.weight for layer in net.layers]
    for place in (0, 1, 7, 255, 256, 257, 299, 0):
        weight = weights[place]
        weight.t_()
        assert native_answers(native) == {False}
        weight.t_()
        assert native_answers(native) == {True}
        data, weight.data = weight.data, torch.zeros(3, 3)
        assert native_answers(native) == {False}
        weight.data = data
        assert native_answers(native) == {True}
    same = [weight.data for weight in weights]
    for weight, data in zip(weights, same, strict=True):
        weight.data = data.view(9).view(3, 3)  # the same memory
    assert native_answers(native) == {True}
    for place in (0, 150, 299):
        weights[place].data = same[place].view(torch.int32).view(torch.float32).flatten()[:9].view(3, 3).t()
        assert native_answers(native) == {False}
        weights[place].data = same[place]
        assert native_answers(native) == {True}


def copied_when_written(net: Net, *, writes: bool) -> torch.Tensor:
    """Let a weight share memory until it is written, and maybe write it; returns what it shares it with."""
    weight = net.layers[0].weight.detach()
    copy = torch._lazy_clone(weight)
    if writes:
        weight.fill_(2.0)
    return copy


def in_turn(net: Net) -> None:
    """Delete a parameter, and make one that may get its memory."""
    layer, data = net.layers[0], net.layers[0].weight.data
    del layer.weight
    layer.weight = nn.Parameter(data)


def refilled(net: Net, _: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Clear a table and fill it with another parameter of the same memory; then with what it had."""
    table = net.layers[0]._parameters
    was = dict(table)

    def fill(entries: dict[str, Any]) -> None:
        table.clear()
        table.update(entries)

    fill(was | {"weight": nn.Parameter(was["weight"].data)})
    return partial(fill, was)


def swapped(net: Net, _: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Let a weight and another tensor change places behind their Python objects."""
    swap = partial(torch.utils.swap_tensors, net.layers[0].weight, nn.Parameter(torch.zeros(3, 3)))
    swap()
    return swap


MOVES: dict[str, Callable[[Net, pytest.MonkeyPatch], Any]] = {
    "a table is cleared and refilled": refilled,
    "another offset": lambda n, p: p.setattr(n.layers[0].weight, "data", torch.zeros(12)[3:].view(3, 3)),
    "swapped tensors": swapped,
    "an entry of a list": lambda n, p: (n.steps.append(9.5), n.steps.pop)[1],
    "an entry of a user's list": lambda n, p: (n.turns.append(9.5), n.turns.pop)[1],
}
"""Changes of a net that the patch takes back, or what they return."""
GONE: dict[str, Callable[[Net], Any]] = {
    "an empty storage": lambda net: net.layers[0].weight.untyped_storage().resize_(0),
    "memory that is shared until it is written": partial(copied_when_written, writes=False),
    "memory that was shared, and was written": partial(copied_when_written, writes=True),
    "a parameter in the place of a deleted one": in_turn,
}
"""Changes that nothing takes back."""


@pytest.mark.parametrize("name", [*MOVES, *GONE])
def test_a_change_is_noticed_until_it_is_taken_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard that does not hold does not hold at the next look, either; it does when all is back, and is not made
    anew."""
    net, other = Net().eval(), Net().eval()
    guard, unrelated = settled(net), settled(other)
    native = guard.native
    for _ in range(3):
        assert native_answers(guard.native) == {True}
        back = GONE[name](net) if name in GONE else MOVES[name](net, monkeypatch)
        assert native_answers(guard.native) == {False}
        assert native_answers(unrelated.native) == {True}
        assert native_answers(guard.native) == {False}
        assert not guard.holds()
        if name in GONE:
            return
        monkeypatch.undo() if back is None else back()
        assert native.holds()
        assert guard.holds()
        assert guard.native is native


def test_a_guard_relies_on_changes_of_dicts_that_are_watched_alone() -> None:
    """One that was made while no dict was watched compares them, whatever is used later."""
    net = Net().eval()
    CORE.skip_dicts(USES_VERSIONS, False)
    native = settled(net).native
    CORE.skip_dicts(USES_VERSIONS, USES_CHANGES)
    for factor in (3.5, 4.5):
        was = net.factor
        assert native.holds()
        net.factor = factor
        assert not native.holds()
        net.factor = was


def test_threads_check_while_one_changes() -> None:
    """Checks at the same time as changes see the state before or after, and nothing breaks."""
    net = Net().eval()
    guard = settled(net)
    stop = threading.Event()

    def check() -> None:
        while not stop.is_set():
            guard.holds()
            assert not guard.trainable

    def change() -> None:
        for number in range(50):
            net.factor, net.steps[0] = 2.5 + number, float(number)
            net.names["a"] = number
            net.kinds.add(str(number))
            net.layers[0].weight.data = torch.ones(3, 3)
        stop.set()

    in_threads(*[check] * 4, change)
    assert not guard.holds()


def test_versions_are_tested_before_they_are_used() -> None:
    """A number that misses a change is not trusted, whichever change it is."""
    assert not versions_tell(lambda table: 1)
    assert not versions_tell(lambda table: 0)
    assert not versions_tell(len)
    assert not versions_tell(lambda table: id(table.get("first")) or 1)
    if sys.version_info[:2] == (3, 12):  # others forget where attributes of objects are stored, or tell of nothing
        assert USES_VERSIONS
        assert USES_CHANGES
    for is_used, version_of in ((USES_VERSIONS, CORE.dict_version), (USES_CHANGES, CORE.dict_changes)):
        assert versions_tell(version_of) is is_used
        assert not versions_tell(lambda table, version_of=version_of: 1 if "__module__" in table else version_of(table))
        assert not versions_tell(lambda table, version_of=version_of: version_of(table) if table else 1)


def test_what_is_no_part_of_a_guard_is_refused() -> None:
    """The class checks what it is given, rather than trusting it."""
    assert GUARD(**EMPTY).holds()
    wrong: dict[str, Any] = {
        "tables": (([], -1, ()),),
        "contents": (({}, None, []),),
        "sequences": (1,),
        "readers": (
            *(
                (kind, 1, None, 1)
                for kind in ("cell", "__code__", "__dict__", "__mro__", "reference", "context", "other")
            ),
            ("slot", Slotted(1), 1, 1),
        ),
        "tensors": ((1, 0, (2,), (1,)), (torch.zeros(2), 0, (2,), ()), (torch.zeros(2), 0, ("2",), (1,))),
        "hooks": (1,),
    }
    for name, value in wrong.items():
        for part in value:
            with pytest.raises(TypeError):
                GUARD(**{**EMPTY, name: (part,)})


class Named(nn.Module):
    """Reads what functions say of themselves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + len(self.forward.__name__ + self.forward.__qualname__ + self.forward.__module__)


def test_functions_are_read_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check calls Python for nothing that lies at a place of an object: of large models there are thousands."""
    readers: set[tuple[str, Any]] = set()

    def spy(**given: Any) -> Any:
        readers.update((kind, subject) for kind, subject, *_ in given["readers"])
        return GUARD(**given)

    monkeypatch.setattr(guards, "GUARD", spy)
    settled(Named().eval())
    assert {"__name__", "__qualname__", "__module__", "__code__", "__class__", "__dict__"} <= {
        kind for kind, _ in readers
    }
    assert {subject for kind, subject in readers if kind == "call"} <= set(guards._SETTINGS)
