"""An output that its caller has dropped is filled again, and one of which anybody holds a part never is."""

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.dlpack import to_dlpack

from graphdispatch import Graphed, graphed
from graphdispatch.engines import CUDAGraphRegistry
from graphdispatch.native.bound import CORE

from ..helpers import AT_ONCE, check_rows, double

pytestmark = pytest.mark.skipif(CORE is None, reason="torch makes the copies of outputs")
ROWS, WIDTH = 4, 3
Step = Graphed[..., Any]


def settled(fn: Callable[[Tensor], Any], rows: int = ROWS, width: int = WIDTH) -> Step:
    """``fn`` served by a verified graph, in a hit of which nobody has its outputs any more."""
    step = graphed(fn, dynamic={"x": 0}, sizes=(rows,), options=AT_ONCE)
    check_rows(step, *[rows] * 6, width=width)
    assert step.stats.hits >= 2
    return step


def test_a_dropped_output_is_filled_again() -> None:
    """Two objects serve a caller that drops each output when it gets the next one."""
    step, seen = settled(double), set[int]()
    out = step(torch.ones(ROWS, WIDTH))
    for value in range(8):
        x = torch.full((ROWS, WIDTH), float(value))
        out = step(x)
        seen.add(id(out))
        assert torch.equal(out, x * 2)
        assert not out.requires_grad
    assert len(seen) == 2


def _saved(out: Tensor) -> Tensor:
    with torch.enable_grad():
        return torch.ones(ROWS, WIDTH, requires_grad=True) * out


@torch.enable_grad()
def _gradient_of_saved(product: Tensor) -> Tensor:
    product.sum().backward()
    weight: Any = product.grad_fn.next_functions[0][0]
    return weight.variable.grad


def _gradient(out: Tensor) -> Tensor:
    weight = torch.ones(ROWS, WIDTH, requires_grad=True)
    weight.backward(out)
    return weight


def _trained(out: Tensor) -> Tensor:
    with torch.enable_grad():
        return out.requires_grad_().sum()


def _swapped(out: Tensor) -> Tensor:
    other = torch.zeros(2)
    torch.utils.swap_tensors(out, other)
    return other


def _data_of(out: Tensor) -> Tensor:
    other = torch.zeros(2)
    other.data = out
    return other


HOLDERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "the output": (lambda out: out, lambda held: held),
    "a list": (lambda out: [out], lambda held: held[0]),
    "a view": (lambda out: out[1:], lambda held: torch.cat([held._base[:1], held])),
    "a detached alias": (torch.Tensor.detach, lambda held: held),
    "its data": (lambda out: out.data, lambda held: held),
    "a storage": (
        lambda out: out.untyped_storage(),
        lambda held: torch.empty(0).set_(held, 0, (ROWS, WIDTH)),
    ),
    "an array": (torch.Tensor.numpy, torch.from_numpy),
    "a buffer": (lambda out: memoryview(out.numpy()), lambda held: torch.frombuffer(held, dtype=torch.float32)),
    "a capsule": (to_dlpack, torch.from_dlpack),
    "a parameter": (nn.Parameter, lambda held: held.detach()),
    "a tensor saved for a gradient": (_saved, _gradient_of_saved),
    "a gradient": (_gradient, lambda held: held.grad),
    "a lazy copy": (lambda out: out._lazy_clone(), lambda held: held),
    "a transposed alias": (lambda out: out.t(), lambda held: held.t()),
    "a shallow copy": (copy.copy, lambda held: held),
    "a complex view": (lambda out: torch.view_as_real(torch.complex(out, out)), lambda held: held[..., 0]),
    "a tensor in its place": (_swapped, lambda held: held),
    "another's data": (_data_of, lambda held: held),
    "a swapped storage": (lambda out: torch.empty(0).set_(out), lambda held: held),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_anybody_holds_is_left_alone(name: str) -> None:
    """Whoever holds a part of an output, in whatever way, finds it as it was given."""
    hold, look = HOLDERS[name]
    step, x = settled(double), torch.randn(ROWS, WIDTH)
    held = hold(step(x))
    check_rows(step, *[ROWS] * 6, width=WIDTH)
    assert torch.equal(look(held).reshape(ROWS, WIDTH), x * 2)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "an attribute": lambda out: setattr(out, "note", "mine"),
    "a class": lambda out: setattr(out, "__class__", type("Mine", (Tensor,), {})),
    "a gradient": _trained,
    "requires_grad": torch.Tensor.requires_grad_,
    "a transposition": torch.Tensor.t_,
    "a size": lambda out: out.resize_(1, 2),
    "a larger size": lambda out: out.resize_(64, 64),
    "another storage": lambda out: out.set_(torch.zeros(5)),
    "no memory": lambda out: out.untyped_storage().resize_(0),
    "other data": lambda out: setattr(out, "data", torch.zeros(2)),
    "shared memory": torch.Tensor.share_memory_,
    "values": lambda out: out.fill_(7),
    "an array": torch.Tensor.numpy,
    "a storage": torch.Tensor.untyped_storage,
    "a squeeze": lambda out: out.unsqueeze_(0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_caller_changed_is_not_given_again(name: str) -> None:
    """After a caller did something to an output and dropped it, the next ones are as a copy is."""
    step = settled(double)
    for _ in range(3):
        out = step(torch.randn(ROWS, WIDTH))
        CHANGES[name](out)
        del out
    for _ in range(3):
        x = torch.randn(ROWS, WIDTH)
        out = step(x)
        assert type(out) is Tensor
        assert torch.equal(out, x * 2)
        assert out.is_contiguous()
        assert (out.shape, out.requires_grad, out.grad_fn) == ((ROWS, WIDTH), False, None)
        assert not hasattr(out, "note")
        assert out._version == 0
        assert not out.is_shared()
        assert out.resize_(9, 9).shape == (9, 9)


def test_weak_references_end() -> None:
    """An output with a weak reference is dropped by the next hits, or with its graph, and is never filled again."""
    step, gone = settled(double), list[str]()
    out = step(torch.ones(ROWS, WIDTH))
    weak = weakref.ref(out, lambda _: gone.append("first"))
    del out
    again = [step(torch.zeros(ROWS, WIDTH)) for _ in range(3)]
    assert weak() is None
    assert gone == ["first"]
    weak = weakref.ref(again[2])
    del again, step
    gc.collect()
    assert weak() is None


def test_a_finalizer_may_call_the_step() -> None:
    """What runs when an output is dropped does not meet a hit half done."""
    step = settled(lambda x: (x * 2, x + 1))
    seen = list[tuple[Tensor, Tensor]]()
    first, second = step(torch.ones(ROWS, WIDTH))
    finalizers = [
        weakref.finalize(t, lambda: seen.append(step(torch.full((ROWS, WIDTH), 9.0)))) for t in (first, second)
    ]
    del first, second
    for value in range(4):
        x = torch.full((ROWS, WIDTH), float(value))
        doubled, more = step(x)
        assert torch.equal(doubled, x * 2)
        assert torch.equal(more, x + 1)
    assert not any(finalizer.alive for finalizer in finalizers)
    assert [(float(a[0, 0]), float(b[0, 0])) for a, b in seen] == [(18.0, 10.0)] * 2


def test_modes_get_tensors_of_their_own() -> None:
    """What is made in inference mode is an inference tensor, and nothing else is; one graph may serve both."""
    layer = nn.Linear(WIDTH, WIDTH).eval().requires_grad_(False)
    entry = CUDAGraphRegistry().capture(ROWS, 1, layer, {"input": (ROWS, WIDTH)})
    for inference in (False, False, False, True, False, False, True, True, True, False):
        with torch.inference_mode(inference):
            assert entry.replay({"input": torch.ones(ROWS, WIDTH)}).is_inference() is inference


def test_large_outputs_are_not_kept() -> None:
    """An output above 64 KiB goes with its last reference."""
    step = settled(double, rows=64, width=512)
    out = step(torch.ones(64, 512))
    weak = weakref.ref(out)
    assert sys.getrefcount(out) == 2
    del out
    assert weak() is None


def test_all_that_is_kept_has_a_bound() -> None:
    """Many graphs keep outputs of 16 MiB at most, and give the memory back when they go."""

    def kept(rounds: int) -> tuple[int, list[Step]]:
        steps = [settled(double, rows=128, width=128) for _ in range(rounds)]
        outs = [step(torch.ones(128, 128)) for step in steps for _ in range(3)]
        others = 3  # the list's, the loop's and the argument's
        return sum(sys.getrefcount(out) > others for out in outs), steps

    gc.collect()
    few, steps = kept(4)
    assert few > 0
    many, more = kept(200)
    assert many * 64 * 1024 <= 16 * 1024 * 1024
    del steps, more
    gc.collect()
    assert kept(4)[0] == few
