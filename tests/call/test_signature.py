"""Signatures: everything about a call's arguments, apart from the rows, that a graph was captured for."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from enum import Enum, IntEnum
from typing import Any

import pytest
import torch
from torch import nn

from graphdispatch import Reason
from graphdispatch.call.inputs import NO_MATCH
from graphdispatch.call.rules import ArgumentRules
from graphdispatch.call.signature import Signature, refusal
from graphdispatch.call.spec import Leaf
from graphdispatch.errors import ConfigError

CPU = torch.device("cpu")
ROWS = {"x": 0}


class Color(Enum):
    """An enumeration."""

    RED = 1
    BLUE = 2


class Level(IntEnum):
    """Members that are integers."""

    LOW = 1


def rules(dynamic: Mapping[str, int] = ROWS, static: tuple[str, ...] = (), *, addresses: bool = True) -> ArgumentRules:
    """What a user says of the arguments."""
    return ArgumentRules(dynamic, {}, frozenset(static), addresses)


def leaves(*names: str) -> list[Leaf]:
    """Leaves that are arguments themselves."""
    return [Leaf(name, name) for name in names]


def signature(value: Any, how: ArgumentRules | None = None) -> Signature:
    """The signature of a call with one argument ``x``."""
    return Signature(leaves("x"), [value], how or rules(), CPU)


def refused(value: Any, how: ArgumentRules | None = None) -> Reason | None:
    """Why a call with ``x`` and ``y`` is refused, where ``x`` is a plain tensor."""
    found = refusal(leaves("x", "y"), [torch.ones(4, 3), value], how or rules(), CPU)
    return found.reason if found is not None else None


@pytest.mark.parametrize("rows", [0, 1, 4, 9])
def test_the_rows_are_free(rows: int) -> None:
    """A call that fits gives its number of rows."""
    assert signature(torch.ones(4, 3)).match([torch.ones(rows, 3)]) == rows


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(4, 1),
        torch.ones(4, 4),
        torch.ones(4),
        torch.ones(4, 3, 1),
        torch.ones(4, 3, dtype=torch.float64),
        torch.ones(4, 3, dtype=torch.int32),
        torch.ones(4, 3, device="meta"),
        torch.ones(3, 4).T,
        torch.ones(4, 6)[:, ::2],
        torch.ones(4, 1).expand(4, 3),
        torch.ones(4, 3).to_sparse(),
        None,
        [torch.ones(4, 3)],
        1.0,
    ],
    ids=[
        "one column", "more columns", "a vector", "more dimensions", "dtype", "integers", "device", "transposed",
        "gaps", "expanded", "sparse", "none", "list", "number",
    ],
)  # fmt: skip
def test_any_other_difference_does_not_match(other: Any) -> None:
    """Nothing is broadcast, cast, reordered or taken for a tensor."""
    assert signature(torch.ones(4, 3)).match([other]) == NO_MATCH


def test_a_parameter_is_another_kind_of_argument() -> None:
    """Code can tell a parameter from another tensor."""
    parameter = nn.Parameter(torch.ones(4, 3))
    assert signature(parameter).match([torch.ones(2, 3)]) == NO_MATCH
    assert signature(torch.ones(2, 3)).match([parameter]) == NO_MATCH
    assert signature(parameter).match([nn.Parameter(torch.ones(2, 3))]) == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.ones(3, 4).T, torch.ones(3, 7).T),
        (torch.ones(4, 6)[:, ::2], torch.ones(2, 9)[:, ::2][:, :3]),
        (torch.ones(4, 1).expand(4, 3), torch.ones(2, 1).expand(2, 3)),
        (torch.ones(4, 3)[1:], torch.ones(9, 3)[5:]),
        (torch.ones(2**20, 3)[::1000], torch.ones(8, 3)[::2]),
    ],
    ids=["transposed", "gaps", "expanded", "offset", "large strides"],
)
def test_a_layout_matches_itself(first: torch.Tensor, second: torch.Tensor) -> None:
    """Order in memory and gaps are compared, not the strides themselves."""
    assert signature(first).match([second]) == len(second)


def test_rows_of_two_arguments_agree() -> None:
    """A call whose batches differ fits nothing, whichever is larger; a batch may be any dimension, or there is none."""
    made = Signature(leaves("x", "y"), [torch.ones(4, 3), torch.ones(4)], rules({"x": 0, "y": 0}), CPU)
    assert made.match([torch.ones(2, 3), torch.ones(2)]) == 2
    assert made.match([torch.ones(2, 3), torch.ones(1)]) == NO_MATCH
    assert made.match([torch.ones(1, 3), torch.ones(2)]) == NO_MATCH
    last = signature(torch.ones(3, 4), rules({"x": -1}))
    assert [last.match([torch.ones(rows, 9)]) for rows in (3, 4)] == [9, NO_MATCH]
    fixed = signature(torch.ones(4, 3), rules({}))
    assert [fixed.match([torch.zeros(rows, 3)]) for rows in (4, 3)] == [1, NO_MATCH]
    assert not fixed.has_rows


@pytest.mark.parametrize(
    ("value", "same", "other"),
    [
        (1, [1], [2, 1.0, True, Level.LOW, None, "1"]),
        (True, [True], [False, 1, 1.0]),
        (0.0, [0.0], [-0.0, 0, False, 1e-320]),
        (-0.0, [-0.0], [0.0]),
        (float("nan"), [float("nan"), -float("nan")], [0.0, float("inf")]),
        (0.1 + 0.2, [0.1 + 0.2], [0.3]),
        (complex(0.0, -0.0), [complex(0.0, -0.0)], [complex(0.0, 0.0), 0.0]),
        ("a", ["a"], ["b", b"a", None]),
        (None, [None], [0, False, ...]),
        (Color.RED, [Color.RED], [Color.BLUE, 1]),
        (Level.LOW, [Level.LOW], [1]),
        (torch.float32, [torch.float], [torch.float64, "torch.float32"]),
        (torch.device("cpu"), [torch.device("cpu")], [torch.device("cpu", 0), torch.device("meta"), "cpu"]),
        (torch.contiguous_format, [torch.contiguous_format], [torch.channels_last]),
    ],
    ids=repr,
)
def test_constants_match_only_themselves(value: Any, same: list[Any], other: list[Any]) -> None:
    """By type and value; the sign of zero counts, and NaN is itself."""
    made = Signature(leaves("x", "y"), [torch.ones(4, 3), value], rules(), CPU)
    x = torch.ones(2, 3)
    assert [made.match([x, v]) for v in same] == [2] * len(same)
    assert [made.match([x, v]) for v in other] == [NO_MATCH] * len(other)


def test_a_static_object_is_compared_by_identity() -> None:
    """The user vouches for one object, not for equal ones."""
    held: list[int] = []
    made = Signature(leaves("x", "y"), [torch.ones(4, 3), held], rules(static=("y",)), CPU)
    assert made.match([torch.ones(4, 3), held]) == 4
    assert made.match([torch.ones(4, 3), []]) == NO_MATCH


def test_a_static_tensor_is_compared_by_address() -> None:
    """It is not copied, so it must lie where it lay; without ``check_addresses`` the user answers for that."""
    table = torch.ones(5, 3)
    values = [torch.ones(4, 3), table]
    made = Signature(leaves("x", "y"), values, rules(static=("y",)), CPU)
    loose = Signature(leaves("x", "y"), values, rules(static=("y",), addresses=False), CPU)
    other = [torch.ones(4, 3), table.clone()]
    assert [made.match(values), made.match(other), loose.match(other)] == [4, NO_MATCH, 4]
    assert [spec.name for spec in made.inputs] == ["x"]


@pytest.mark.parametrize(
    "mode",
    [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["inference mode", "autocast"],
)
def test_the_threads_mode_counts(mode: Callable[[], AbstractContextManager[None]]) -> None:
    """A mode that chooses other operators for the same call is part of the signature."""
    x = torch.ones(4, 3)
    outside = signature(x)
    with mode():
        assert outside.match([x]) == NO_MATCH
        inside = signature(x)
        assert inside.match([x]) == 4
    assert inside.match([x]) == NO_MATCH
    assert outside.match([x]) == 4
    with torch.autocast("cpu", torch.float16):
        assert inside.match([x]) == NO_MATCH


class Sub(torch.Tensor):
    """A subclass of no use."""


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.ones(4, 3).as_subclass(Sub), Reason.TENSOR_SUBCLASS),
        (torch.ones(4, 3).to_sparse(), Reason.TENSOR_SUBCLASS),
        (torch.ones(4, dtype=torch.complex64).conj(), Reason.TENSOR_SUBCLASS),
        (torch.ones(4, dtype=torch.complex64).conj().imag, Reason.TENSOR_SUBCLASS),
        (torch.ones(4, 3, device="meta"), Reason.DEVICES_DISAGREE),
        (object(), Reason.UNGUARDED_ARGUMENT),
        ({1, 2}, Reason.UNGUARDED_ARGUMENT),
        (torch.Generator(), Reason.UNGUARDED_ARGUMENT),
        (torch.ones(2), None),
        (nn.Parameter(torch.ones(2)), None),
        (2.5, None),
        (Color.RED, None),
    ],
    ids=[
        "subclass", "sparse", "conjugate", "negative", "devices", "object", "set", "generator",
        "tensor", "parameter", "number", "enum",
    ],
)  # fmt: skip
def test_what_no_graph_can_serve_is_refused(value: Any, reason: Reason | None) -> None:
    """With the reason; everything else is accepted."""
    assert refused(value) is reason


@pytest.mark.parametrize(
    ("values", "how", "reason", "told"),
    [
        ([torch.ones(4, 3), object()], {}, Reason.UNGUARDED_ARGUMENT, "argument 'y' is a object, whose change cannot"),
        ([torch.ones(4, 3), torch.ones(1, 3)], {"x": 0, "y": 0}, Reason.ROWS_DISAGREE, "{'x': 4, 'y': 1}"),
        ([1, 2], ROWS, Reason.NO_TENSORS, ""),
        ([torch.ones(4, 3, device="meta"), 1], ROWS, Reason.DEVICE_UNSUPPORTED, ""),
    ],
    ids=["object", "rows", "no tensors", "device"],
)
def test_a_refusal_says_what(values: list[Any], how: dict[str, int], reason: Reason, told: str) -> None:
    """The argument, or both numbers of rows; an object that the user vouches for is not refused."""
    found = refusal(leaves("x", "y"), values, rules(how), CPU)
    assert found is not None
    assert found.reason is reason
    assert told in found.detail
    assert refused(object(), rules(static=("y",))) is None


@pytest.mark.parametrize(
    ("dim", "value", "named"),
    [
        (2, torch.ones(4, 3), r"dynamic\['x'\] = 2 is out of range: .*\(4, 3\); give a dimension from -2 to 1"),
        (0, torch.tensor(1.0), r"the tensor has no dimensions; leave it out of dynamic="),
    ],
)
def test_a_batch_dimension_must_exist(dim: int, value: torch.Tensor, named: str) -> None:
    """The message tells the shape and the remedy."""
    with pytest.raises(ConfigError, match=named):
        refusal(leaves("x"), [value], rules({"x": dim}), CPU)
