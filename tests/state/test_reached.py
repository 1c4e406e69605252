"""What lies beside the state that code reads is no obstacle."""

import copy
import random
import threading
from collections.abc import Callable

import pytest
import torch

from graphdispatch import Reason

from ..helpers import check_rows, make


class Holder:
    """Holds what it never uses."""

    def __init__(self) -> None:
        self.scale, self.state = 2.0, 3.0
        self.event, self.random, self.thread = threading.Event(), random.Random(0), threading.Thread()


@pytest.mark.parametrize(
    "fn",
    [
        lambda h, x: x * vars(h)["scale"],
        lambda h, x: x * copy.copy(h).scale,
        lambda h, x: x * h.state,
        lambda h, x: x * vars(h)["scale"] * (torch.ops.aten.add.Tensor.name() == "aten::add.Tensor"),
    ],
    ids=["as a whole", "copied", "an attribute that a generator has, too", "a private name of torch that threads have"],
)
def test_what_is_not_used_is_no_obstacle(fn: Callable[[Holder, torch.Tensor], torch.Tensor]) -> None:
    """An event, a generator and a thread beside what is read: others set the one and draw from the other."""
    holder = Holder()
    step = make(lambda x: fn(holder, x), sizes=(4,))
    for _ in range(6):
        check_rows(step, 4)
        holder.random.random()
    assert step.last_decision.reason is Reason.EXACT, step.last_decision
