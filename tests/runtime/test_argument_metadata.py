"""What code reads of an argument besides its values: a call that differs there is compared, and never answered wrongly.

A graph reads its own buffers, of which all this is always the same.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphdispatch import Reason, eager_break, graphed
from graphdispatch.engines import CUDAGraphManager
from graphdispatch.errors import GuardError

from ..helpers import AT_ONCE, assert_same, check_calls, check_rows, make


def plain(rows: int) -> Tensor:
    """A tensor of its own memory."""
    return torch.randn(rows, 4)


def with_grad(rows: int) -> Tensor:
    """A tensor with a gradient beside it."""
    x = torch.randn(rows, 4)
    x.grad = torch.ones(rows, 4)
    return x


OTHERS: dict[str, Callable[[int], Tensor]] = {
    "behind the beginning": lambda rows: torch.randn(rows + 3, 4)[3:],
    "the first part": lambda rows: torch.randn(rows + 50, 4)[:rows],
    "written": lambda rows: torch.randn(rows, 4).add_(1),
    "trained": lambda rows: torch.randn(rows, 4).requires_grad_(),
    "shared": lambda rows: torch.randn(rows, 4).share_memory_(),
    "parameter": lambda rows: nn.Parameter(torch.randn(rows, 4), requires_grad=False),
    "with a gradient": with_grad,
    "computed": torch.enable_grad()(lambda rows: torch.randn(rows, 4).requires_grad_() * 1),
    "of inference": torch.inference_mode()(plain),
}
READS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "storage_offset": (lambda x: x.storage_offset(), "behind the beginning"),
    "getattr": (lambda x: getattr(x, "storage_offset")(), "behind the beginning"),  # noqa: B009
    "_base": (lambda x: x._base is not None, "behind the beginning"),
    "_is_view": (lambda x: x._is_view(), "the first part"),
    "untyped_storage": (lambda x: x.untyped_storage().nbytes() > 400, "the first part"),
    "_version": (lambda x: x._version, "written"),
    "grad": (lambda x: x.grad is not None, "with a gradient"),
    "requires_grad": (lambda x: x.requires_grad, "trained"),
    "is_leaf": (lambda x: not x.is_leaf, "computed"),
    "grad_fn": (lambda x: x.grad_fn is not None, "computed"),
    "is_inference": (lambda x: x.is_inference(), "of inference"),
    "is_shared": (lambda x: x.is_shared(), "shared"),
    "isinstance": (lambda x: isinstance(x, nn.Parameter), "parameter"),
    "type": (lambda x: type(x) is not Tensor, "parameter"),
}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", READS)
def test_calls_that_differ_beside_their_values(name: str, is_first: bool) -> None:
    """Whichever kind comes first, and however many of it."""
    reads, kind = READS[name]
    served = graphed(lambda x: x * 2 if reads(x) else x + 1, dynamic={"x": 0}, sizes=[4, 8])
    for number in range(24):
        is_other = number % 3 == 0 and number >= 6
        check_calls(served, (OTHERS[kind] if is_other is is_first else plain)(1 + number % 8))


def test_gaps_that_differ() -> None:
    """How far the rows of an argument lie apart counts where the code reads it."""
    near, far = (partial(lambda width, rows: torch.randn(rows, width)[:, :4], width) for width in (5, 9))
    served = graphed(lambda x: x * 2 if x.stride(0) > 5 else x + 1, dynamic={"x": 0}, sizes=[4, 8], options=AT_ONCE)
    for number in range(24):
        check_calls(served, (far if number % 3 == 0 and number >= 6 else near)(1 + number % 8))
    assert served.stats.hits


def test_a_call_that_differs_speaks_for_its_own_shapes() -> None:
    """What else the code reads may decide with the number of rows, for which plain calls have shown nothing."""
    served = make(lambda x: x * 2 if x.untyped_storage().nbytes() > 150 else x + 1, sizes=(4, 8))
    for kind in (plain, OTHERS["behind the beginning"]):
        check_calls(served, *(kind(rows) for rows in (4, 4, 4, 8, 8, 8)))
    assert served.stats.hits


class Writes:
    """What a call adds to, if it is one of some."""

    def __init__(self, is_due: Callable[[Tensor], object], total: Any) -> None:
        self.is_due, self.total = is_due, total

    def to_state(self, x: Tensor) -> Tensor:
        """It counts."""
        if self.is_due(x):
            self.total += 1
        return x * 2

    def to_argument(self, x: Tensor) -> Tensor:
        """It adds to its argument."""
        y = x * 2
        return y if not self.is_due(x) else (x.add_(1), y)[1]


@pytest.mark.parametrize("where", ["to_state", "to_argument"])
@pytest.mark.parametrize("make_total", [lambda: torch.zeros(()), lambda: 0])
@pytest.mark.parametrize("is_due", [lambda x: x.storage_offset(), lambda x: x._base is not None])
def test_what_only_a_call_that_differs_does(
    is_due: Callable[[Tensor], object], make_total: Callable[[], Any], where: str
) -> None:
    """No run of another call speaks for it, nor does one on static inputs, which are views: each call writes once."""
    served_of, eager = Writes(is_due, make_total()), Writes(is_due, make_total())
    served = make(getattr(served_of, where), sizes=(4,))
    for kind in [plain, plain, plain, *[OTHERS["behind the beginning"], plain] * 4]:
        x = kind(4)
        # A copy of the whole memory is a view of it where the batch is.
        copy = x.clone() if x._base is None else x._base.clone()[3:]
        assert_same(served(x), getattr(eager, where)(copy), served.explain(x))
        assert_same(x, copy)
    assert served_of.total == eager.total


@pytest.mark.parametrize("fn", [lambda x, y: x * (x is y) + y, lambda x, y: x * (3 if x.storage_offset() else 2) + y])
def test_a_batch_of_zeros_speaks_for_no_other_numbers(fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Where the code does something else, one batch that agrees shows nothing."""
    served = make(fn, sizes=(4,))
    check_calls(served, *((plain(4), plain(4)) for _ in range(3)))
    for fill in (0.0, 1.0, 2.0):
        x = torch.full((8, 4), fill)[4:]
        assert torch.equal(served(x, x), fn(x, x))
        assert served.last_decision.reason is Reason.STATE_UNSEEN


class Compares(nn.Module):
    """It tells by identity which tensors it is given."""

    def __init__(self, is_same: Callable[["Compares", Tensor, Tensor], bool]) -> None:
        super().__init__()
        self.register_buffer("own", torch.randn(4, 4))
        self.is_same = is_same

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Another result where they are one."""
        return x * 2 if self.is_same(self, x, y) else x * 3 + y + self.own.sum()


COMPARED: dict[str, tuple[Callable[[Compares, Tensor, Tensor], bool], bool]] = {
    "another argument": (lambda _, x, y: x is y, False),
    "id": (lambda _, x, y: id(x) == id(y), False),
    "a result": (lambda _, x, y: y is (lambda a: a)(x), False),
    "a buffer": (lambda net, _, y: y is net.own, True),
}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", COMPARED)
def test_which_tensor_it_is(name: str, is_first: bool) -> None:
    """An argument may be another argument, or a tensor of the model."""
    is_same, is_of_model = COMPARED[name]
    net = Compares(is_same).eval()
    served = graphed(net, dynamic={"x": 0, "y": 0}, sizes=[4])
    hits = 0
    for number in range(24):
        x = torch.randn(4, 4)
        is_other = number % 3 == 0 and number >= 6
        check_calls(served, (x, (net.own if is_of_model else x) if is_other is is_first else torch.randn(4, 4)))
        hits = max(hits, served.stats.hits)
    assert hits or not is_first


def test_alike_calls_are_served() -> None:
    """Code that reads such things is served for calls that are alike, and tells why others are not."""
    served = make(lambda x: x + (1 if x._version > 100 else 0), sizes=(4,))
    check_rows(served, *[4] * 10)
    assert served.stats.hits == 8
    for number in range(12):
        x = torch.randn(4, 3)
        for _ in range(number):
            x.add_(1)
        check_calls(served, x)
    decision = served.last_decision
    assert decision.reason is Reason.STATE_UNSEEN
    assert "._version" in decision.detail


def test_an_entry_refuses_what_was_not_compared() -> None:
    """``CUDAGraphEntry.replay`` has nothing to compare with."""

    def fn(x: Tensor) -> Tensor:
        return x * 2 if x.storage_offset() else x + 1

    manager = CUDAGraphManager()
    entry = manager.capture_graph(4, 1, fn, inputs={"x": torch.randn(4, 3)})
    manager.execute_or_capture(4, 1, fn, inputs={"x": torch.randn(4, 3)})
    x = torch.randn(4, 3)
    assert torch.equal(entry.replay({"x": x}), x + 1)
    with pytest.raises(GuardError, match=r"\.storage_offset of an argument"):
        entry.replay({"x": torch.randn(6, 3)[2:]})


def test_what_the_compiler_notes_on_its_inputs_is_no_attribute() -> None:
    """A batch that a compiled callable saw before is served; one that carries what the code asks for runs eagerly."""
    served = make(lambda x: x * getattr(x, "scale", 2.0), sizes=(4,))
    check_rows(served, 4, 4, 4)
    for name, factor in (("_dynamo_dynamic_indices", 2.0), ("scale", 3.0)):
        x = torch.randn(4, 3)
        setattr(x, name, 3.0)
        hits = served.stats.hits
        assert torch.equal(served(x), x.as_subclass(Tensor) * factor)
        assert served.stats.hits - hits == (name != "scale")
    assert served.last_decision.reason is Reason.STATE_UNSEEN


def _requires(x: Tensor) -> Tensor:
    x.requires_grad_()
    return x.detach() * 2


def _swaps(x: Tensor) -> Tensor:
    torch.utils.swap_tensors(x, torch.zeros(4, 2))
    return x * 2


def _changes_class(x: Tensor) -> Tensor:
    x.__class__ = torch.nn.Parameter
    return x.detach() * 2


@pytest.mark.parametrize("fn", [_requires, _swaps, _changes_class])
def test_what_a_call_sets_of_its_argument_besides_values(fn: Callable[[Tensor], Tensor]) -> None:
    """No replay repeats that, so the call stays eager."""
    step = graphed(fn, dynamic={"x": 0}, sizes=[4], options=AT_ONCE)
    for _ in range(4):
        got, want = torch.ones(4, 2), torch.ones(4, 2)
        assert torch.equal(step(got), fn(want))
        assert (type(got), got.requires_grad, got.tolist()) == (type(want), want.requires_grad, want.tolist())
    assert step.stats.reasons[Reason.STATE_REBOUND] == 4


def test_code_that_asks_for_views_is_served_plain_tensors_after_a_prewarm() -> None:
    """Static inputs and the batches that a prewarm makes are no views to code."""
    total = torch.zeros(())
    aside = eager_break(lambda x: x + total.add_(1) * 0)
    step = make(lambda x: aside(x) if x._base is not None else x * 2, mode="PIECEWISE")
    step.prewarm(plain(4))
    check_calls(step, plain(4), plain(2))
    assert (step.stats.hits, total.item()) == (2, 0)
