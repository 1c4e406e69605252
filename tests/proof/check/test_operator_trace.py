"""``OperatorTrace``: whether a run of another batch does the same, and what operators say of their numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphdispatch.proof.watch.effects import EffectRecorder
from graphdispatch.proof.watch.operator_trace import OperatorTrace, TensorNames

F = torch.nn.functional
W, V = torch.ones(3), torch.ones(3)
COUNTS, OTHERS = W.long(), V.long()
Run = Callable[[Tensor], Any]


def shown(run: Run, x: Tensor) -> OperatorTrace:
    """What a run shows of its operators."""
    recorder = EffectRecorder(1 << 20, tensor_names=TensorNames.of_arguments([x], [None]))
    with recorder.watching():
        recorder.note_outputs(run(x))
    return recorder.dispatched


ALIKE: dict[str, tuple[Run, Run]] = {
    "a batch": (lambda x: x * 2, lambda x: x * 2),
    "a length": (lambda x: x[:2] * 2, lambda x: x[:3] * 2),
    "a length in a tuple": (lambda x: x.new_empty((2, 3)), lambda x: x.new_empty((4, 3))),
    "a length of numbers": (lambda x: torch.arange(2), lambda x: torch.arange(end=3)),
    "a view and a copy": (lambda x: x.view(-1).sin(), lambda x: x.clone().flatten().sin()),
    "a part beside the whole": (lambda x: (y := x.sin())[:1] + y, lambda x: (y := x.sin())[:1] + y),
    "a write to a weight": (lambda x: W.add_(0), lambda x: W.add_(0)),
    "numbers": (lambda x: torch.tensor([1.0, 2]), lambda x: torch.tensor([1.0, 2])),
    "a default": (lambda x: torch.add(x, W), lambda x: torch.add(x, W, alpha=1)),
    "no number": (lambda x: x * float("nan"), lambda x: x * float("nan")),
}
UNLIKE: dict[str, tuple[Run, Run]] = {
    "another number": (lambda x: x * 2, lambda x: x * 3),
    "another type of number": (lambda x: x * 2, lambda x: x * 2.0),
    "another number by its name": (lambda x: torch.add(x, W, alpha=2), lambda x: torch.add(x, W, alpha=3)),
    "an operator more": (lambda x: x * 2, lambda x: x * 2 * 2),
    "a number made a tensor": (lambda x: x * torch.tensor(1.0), lambda x: x * torch.tensor(3.0)),
    "numbers made a tensor": (lambda x: torch.tensor([1.0, 2]), lambda x: torch.tensor([1.0, 3])),
    "too many numbers": (lambda x: torch.tensor([1.0] * 99), lambda x: torch.tensor([1.0] * 99)),
    "another tensor of lengths": (lambda x: torch.repeat_interleave(COUNTS), lambda x: torch.repeat_interleave(OTHERS)),
    "another tensor": (lambda x: x + W, lambda x: x + V),
    "another part": (lambda x: x + W[:1], lambda x: x + W[1:2]),
    "another order": (lambda x: torch.cat([x, W[None]]), lambda x: torch.cat([W[None], x])),
    "another output": (lambda x: (x.sin(), x.exp()), lambda x: (x.sin(), x.exp())[::-1]),
    "another constant among the outputs": (lambda x: (x.sin(), 1), lambda x: (x.sin(), 2)),
    "memory that was written": (
        lambda x: (y := x.sin(), z := y[:1], y.exp_(), z.cos()),
        lambda x: (y := x.sin(), z := y[:1].clone(), y.exp_(), z.cos()),
    ),
}


@pytest.mark.parametrize("name", [*ALIKE, *UNLIKE])
def test_another_batch_does_the_same(name: str) -> None:
    """Where operators, tensors and constants are the same; lengths alone may follow the batch."""
    first, second = (ALIKE | UNLIKE)[name]
    assert shown(first, torch.ones(3, 3)).is_like(shown(second, torch.ones(4, 3))) is (name in ALIKE)


WIDTHS, PLACES = (torch.uint8, torch.int8, torch.int16, torch.int32), torch.arange(3)
FACTS = ("limits_values", "names_places", "groups_rows", "float_types")
GROUPS = torch.tensor([1, 3], dtype=torch.int32)
SAYS: dict[str, tuple[Run, set[str]]] = {
    "integers of others": (lambda x: x.long(), {"limits_values"}),
    "a draw by probabilities": (lambda x: x.bernoulli(), {"limits_values"}),
    "integers of integers": (lambda x: torch.arange(3) + 1, set()),
    "places of the largest": (lambda x: x.argmax(), set()),
    "places taken": (lambda x: x.index_select(0, torch.arange(2)), {"names_places"}),
    "an index written": (lambda x: COUNTS[torch.empty(3, dtype=torch.int64).copy_(x[:, 0] * 0)], {*FACTS[:2]}),
    "an exponent": (lambda x: torch.frexp(x).exponent, {"limits_values"}),
    "bits of a number": (lambda x: x.view(torch.int32), {"limits_values"}),
    "a probability": (lambda x: F.binary_cross_entropy(x / 8, x / 8), {"limits_values"}),
    "a check": (lambda x: torch._assert_async((x < 8).all()), {"limits_values"}),
    "a table": (lambda x: COUNTS[PLACES], {"names_places"}),
    "an embedding": (lambda x: F.embedding(PLACES, x), {"names_places"}),
    "places gathered": (lambda x: x.gather(1, PLACES[:, None]), {"names_places"}),
    "places of all": (lambda x: x.take(PLACES), {"names_places"}),
    "places scattered": (lambda x: x.scatter(1, PLACES[:, None], 1.0), {"names_places"}),
    "places copied": (lambda x: x.index_copy(0, PLACES, x), {"names_places"}),
    **{f"{kind} of others": (lambda x, kind=kind: x.to(kind), {"limits_values"}) for kind in WIDTHS},
    "products": (lambda x: x @ x.T, {"float_types"}),
    "products of groups": (lambda x: torch._grouped_mm(x, torch.ones(2, 4, 4), GROUPS), {*FACTS} - {"limits_values"}),
}


@pytest.mark.parametrize("name", SAYS)
def test_what_operators_say_of_numbers(name: str) -> None:
    """Whether they take numbers for places, fail for others, or round by what else there is."""
    run, said = SAYS[name]
    trace = shown(run, torch.ones(3, 4))
    assert {fact for fact in FACTS if getattr(trace, fact)} == said
