"""Code whose path or result depends on values: what a graph cannot hold is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphOptions, Reason

from ..helpers import catching
from .cases import Box
from .features import needs
from .front_end import Open

LINEAR = torch.nn.Linear(3, 3)
REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "item": (lambda x: x * x.sum().item(), "_local_scalar_dense"),
    "if_tensor": (lambda x: x if x.sum() > 0 else -x, "if tensor"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "boolean_mask": (lambda x: x[x > 0], "mask"),
    "unique": (lambda x: x.unique(), "unique"),
    "forward_mode_inside": (lambda x: torch.func.jvp(LINEAR, (x,), (x,))[1], "forward-mode"),
    "host_read: numpy": (lambda x: x + torch.from_numpy(x.numpy()), "numpy"),
    "host_read: tolist": (lambda x: x + x.tolist()[0][0], "tolist"),
    "host_read: data_ptr": (lambda x: x + 0.0 * x.data_ptr(), "data_ptr"),
    "host_read: list of numbers": (lambda x: x + torch.tensor([x[0, 0], 1.0, 2.0]), "list of numbers"),
    "host_read: printing": (lambda x: x + len(f"{x}"), "printing"),
}


def _refused(tried: Open, fn: Callable[[torch.Tensor], Any], operator: str) -> None:
    step = tried(fn)
    step.check_calls(4)
    step.check(Reason.CAPTURE_UNSAFE)
    said = step.explanation(torch.randn(4, 3))
    if said is not None:
        assert operator in said
        assert "test_footguns_control_flow.py" in said


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_values(tried: Open, name: str) -> None:
    """A value that the host reads, a branch on a tensor, a number of rows that the data says, memory that goes to code
    which no replay runs."""
    _refused(tried, *REFUSED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_caught(tried: Open, name: str) -> None:
    """The same where the callable catches the error of the recording and goes on."""
    fn, operator = REFUSED[name]
    _refused(tried, catching(fn), operator)


@needs("padding")
def test_branch_on_rows(settled: Open) -> None:
    """What takes another branch than the graph's size runs eagerly; what takes the same one is served."""
    step = settled(lambda x: x * 2 if x.shape[0] > 2 else x * 3)
    step.check_calls(2, 1, 3, 4, 2)
    step.check_not_padded()


@needs("padding", "comparisons")
def test_branch_on_some_rows(opened: Open) -> None:
    """A branch for one number of rows is found, whatever their number."""
    step = opened(lambda x: x * 3 if x.shape[0] == 2 else x * 2)
    step.prepare(torch.randn(3, 3))
    step.check_calls(3, 3, 1, 1, 4, 1, 3, 2)
    step.check_not_padded()


@needs("padding", "comparisons")
def test_state_of_some_rows(opened: Open) -> None:
    """What only a branch reads is compared on each hit, once a batch took that branch."""
    owner = Box(factor=1.0)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x if owner.factor == 1.0 else x * owner.factor

    step = opened(lambda x: scaled(x * 2) if x.shape[0] == 2 else x * 2)
    step.prepare(torch.randn(3, 3))
    step.check_calls(3, 3, 1, 1, 4, 2, 1, 2, 3, 2, fn=lambda x: x * 2)
    owner.factor = 5.0
    step.check_calls(2, fn=lambda x: x * 10)


@needs("comparisons")
def test_argument_distinguished(settled: Open) -> None:
    """A call that differs in more than its values, where the code can tell, is compared before a graph serves it."""
    step = settled(lambda x: x * 3 if x.storage_offset() else x * 2, options=CUDAGraphOptions(rows="independent"))
    step.check_calls(torch.randn(4, 3), torch.randn(6, 3)[2:])
    step.check(Reason.VERIFICATION_FAILED)


def test_operator_over_numpy(tried: Open) -> None:
    """Python inside a custom operator is frozen, so one that leaves torch's dispatcher is refused by its name."""
    name, body = "graphdispatch_footguns::numpy_double", lambda x: torch.from_numpy(x.numpy() * 2)
    op = torch.library.custom_op(name, body, mutates_args=(), schema="(Tensor x) -> Tensor")
    _refused(tried, lambda x: op(x) + 1, f"eager_break('{name}')")
