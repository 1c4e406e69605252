"""A call that no graph can serve runs eagerly with its reason, for as long as its refusal stands and no longer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode
from torch.utils import _pytree as pytree

from graphdispatch import CUDAGraphOptions, Graphed, Reason, graphed

ROWS = 4


class Opaque:
    """An object that nobody can compare."""

    def __init__(self) -> None:
        self.held: Any = 1


class Sub(torch.Tensor):
    """A subclass of no use."""


def first(x: Any, more: Any = None) -> Any:
    """The first argument."""
    return x


def unsafe(x: torch.Tensor, more: Any = None) -> torch.Tensor:
    """It reads a value on the host."""
    return x * 2 if x.sum().item() > -1e9 else x


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Reason]] = {
    "an object": (first, (torch.ones(ROWS, 3), Opaque()), Reason.UNGUARDED_ARGUMENT),
    "an object in a nest": (first, (torch.ones(ROWS, 3), {"a": [1, Opaque()]}), Reason.UNGUARDED_ARGUMENT),
    "a sparse tensor": (first, (torch.ones(ROWS, 3).to_sparse(),), Reason.TENSOR_SUBCLASS),
    "a lazy conjugate": (first, (torch.ones(ROWS, 3, dtype=torch.complex64).conj(),), Reason.TENSOR_SUBCLASS),
    "a lazy negative": (first, (torch.ones(ROWS, dtype=torch.complex64).conj().imag,), Reason.TENSOR_SUBCLASS),
    "a subclass": (first, (torch.ones(ROWS, 3), torch.ones(3).as_subclass(Sub)), Reason.TENSOR_SUBCLASS),
    "a set": (first, (torch.ones(ROWS, 3), {1, 2}), Reason.UNGUARDED_ARGUMENT),
    "a generator": (first, (torch.ones(ROWS, 3), torch.Generator()), Reason.UNGUARDED_ARGUMENT),
    "two devices": (first, (torch.ones(ROWS, 3), torch.ones(ROWS, device="meta")), Reason.DEVICES_DISAGREE),
    "no tensor": (first, (3,), Reason.NO_TENSORS),
    "too many rows": (first, (torch.ones(ROWS + 1, 3),), Reason.ABOVE_LARGEST_SIZE),
    "no rows": (first, (torch.ones(0, 3),), Reason.NO_ROWS),
    "a read on the host": (unsafe, (torch.ones(ROWS, 3),), Reason.CAPTURE_UNSAFE),
}


def serve(fn: Callable[..., Any]) -> Graphed[..., Any]:
    """A graphed callable whose first argument has the batch."""
    options = CUDAGraphOptions(max_failures=1)
    return graphed(fn, dynamic={"x": 0}, sizes=(ROWS,), options=options.replace(capture_after=1))


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_tensor_is_refused() -> None:
    """Its scale is no part of a signature. Torch warns that such tensors will go."""
    step, x = serve(lambda x: x.dequantize()), torch.quantize_per_tensor(torch.ones(ROWS), 0.5, 0, torch.qint8)
    assert torch.equal(step(x), torch.ones(ROWS))
    assert step.last_decision.reason is Reason.TENSOR_SUBCLASS
    assert "is a quantized tensor" in step.last_decision.detail


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("gradients", [False, True])
def test_a_refused_call_is_remembered(name: str, gradients: bool) -> None:
    """It is counted, and says why, each time, with gradients and without."""
    fn, args, reason = CALLS[name]
    step = serve(fn)
    with torch.set_grad_enabled(gradients):
        for _ in range(5):
            step(*args)
        counted = step.stats.reasons[reason]
        step(*args)
        assert step.last_decision.reason is reason
        assert step.stats.reasons[reason] == counted + 1
        assert (step.stats.misses, step.stats.captures) == (6, 0)
        assert step.explain(*args) == step.last_decision.explain()


def test_a_class_that_torch_comes_to_know_is_served() -> None:
    """Registering the class of an argument ends its refusal."""

    class Late:
        def __init__(self, held: torch.Tensor) -> None:
            self.held = held

    step, x, held = serve(lambda x, late: x + late.held), torch.ones(ROWS, 3), torch.ones(3)
    for _ in range(3):
        step(x, Late(held))
    pytree.register_pytree_node(Late, lambda late: ([late.held], None), lambda held, _: Late(*held))
    for factor in range(1, 5):
        assert torch.equal(step(x, Late(held * factor)), x + factor)
    assert step.stats.hits > 0


@pytest.mark.parametrize("name", [name for name, (_, args, _) in CALLS.items() if isinstance(args[0], torch.Tensor)])
@torch.enable_grad()
def test_gradients_are_seen_in_a_refused_call(name: str) -> None:
    """A call that comes to need gradients gets them, and so does one whose object comes to hold such a tensor."""
    fn, (x, *others), _ = CALLS[name]
    step, odd = serve(fn), Opaque()
    for _ in range(3):
        step(x, *others)
        step(x, odd)
    assert step(x.clone().requires_grad_(), *others).requires_grad
    assert step.last_decision.reason is Reason.NEEDS_GRADIENTS
    assert not step(x, *others).requires_grad
    odd.held = torch.ones(3, requires_grad=True)
    step(x, odd)
    assert step.last_decision.reason is Reason.NEEDS_GRADIENTS


class Weighted(torch.nn.Linear):
    """A layer that takes something else, too."""

    def forward(self, x: torch.Tensor, more: Any = None) -> torch.Tensor:
        """The layer's output."""
        return super().forward(x)


@pytest.mark.parametrize("args", [(torch.ones(ROWS + 1, 3),), (torch.ones(ROWS, 3), Opaque())], ids=["rows", "look"])
def test_weights_that_moved_are_released_in_a_refused_call(args: tuple[Any, ...]) -> None:
    """A call that no graph serves lets go of graphs that can serve no more."""
    model = Weighted(3, 3).eval()
    step = serve(model)
    for _ in range(3):
        step(torch.randn(ROWS, 3))
        step(*args)
    assert len(step.entries) == 1
    model.weight = torch.nn.Parameter(torch.zeros(3, 3))
    assert torch.equal(step(*args), model(*args))
    assert not step.entries


X = torch.ones(ROWS, 3)
LOOKS: dict[str, tuple[Any, ...]] = {
    "no object": (X, {"a": [1, 2]}),
    "an object elsewhere": (X, {"a": [Opaque(), 1]}),
    "another key": (X, {"b": [1, Opaque()]}),
    "another nest": (X, {"a": (1, Opaque())}),
    "more in a nest": (X, {"a": [1, Opaque(), 2]}),
    "a nest in a nest": (X, {"a": [1, [Opaque()]]}),
    "one argument": (X,),
    "other rows": (torch.ones(2, 3), {"a": [1, Opaque()]}),
    "too many rows": (torch.ones(ROWS + 1, 3), {"a": [1, Opaque()]}),
    "a row": (torch.ones(3), {"a": [1, Opaque()]}),
    "no tensor": (3, {"a": [1, Opaque()]}),
    "a parameter": (torch.nn.Parameter(X, requires_grad=False), {"a": [1, Opaque()]}),
    "a sparse tensor": (X.to_sparse(), {"a": [1, Opaque()]}),
    "a lazy conjugate": (X.to(torch.complex64).conj(), {"a": [1, Opaque()]}),
    "another device": (torch.ones(ROWS, 3, device="meta"), {"a": [1, Opaque()]}),
}


@pytest.mark.parametrize("name", LOOKS)
def test_calls_of_other_looks_are_distinguished(name: str) -> None:
    """What is known of one look says nothing of another."""
    refused = (X, {"a": [1, Opaque()]})
    reasons = []
    for before in (0, 5):
        step = serve(first)
        for _ in range(before):
            step(*refused)
        for _ in range(3):
            step(*LOOKS[name])
        reasons.append(step.last_decision.reason)
    assert reasons[0] is reasons[1]


def test_a_look_tells_nothing_of_the_thread() -> None:
    """Within somebody's mode the reason is the mode; after ``clear`` the call is looked at again."""
    fn, args, reason = CALLS["an object"]
    step = serve(fn)
    for _ in range(5):
        step(*args)
    with BaseTorchFunctionMode():
        step(*args)
    assert step.last_decision.reason is Reason.MODE_ACTIVE
    step(*args)
    assert step.last_decision.reason is reason
    step.clear()


@pytest.mark.parametrize("prewarms", [False, True])
def test_memory_that_moves_to_other_processes_is_refused(prewarms: bool) -> None:
    """What was noted of it is gone afterwards."""
    weight = torch.ones(3)
    options = CUDAGraphOptions(capture_share=None)
    serve = graphed(lambda x: x * weight.clone().share_memory_(), dynamic={"x": 0}, max_size=4, options=options)
    with torch.no_grad():
        if prewarms:
            assert Reason.CAPTURE_UNSAFE in serve.prewarm(torch.ones(4, 3)).reasons.values()
        for _ in range(3):
            assert torch.equal(serve(torch.ones(2, 3)), torch.ones(2, 3))
    assert serve.last_decision.reason is Reason.CAPTURE_UNSAFE
