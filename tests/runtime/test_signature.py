"""All that a graph was captured for of a call's arguments, apart from the rows: it serves such calls alone."""

import copy
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Graphed, Reason, graphed
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper
from graphdispatch.errors import ConfigError
from graphdispatch.runtime.signature import NO_MATCH, PROPERTIES, Property

from ..helpers import double, make

ROWS = {"x": 0}


class Color(Enum):
    """An enumeration."""

    RED = 1
    BLUE = 2


class Level(IntEnum):
    """Members that are integers."""

    LOW = 1


def serving(*values: Any, dynamic: Any = ROWS, **options: Any) -> Graphed[..., Any]:
    """A callable of ``x`` and ``y`` with one graph, of calls as these ``values``; a value may be a lambda."""
    step = make(lambda x, y=None: x * 2, dynamic=dynamic, sizes=(9,), **options)
    for _ in range(3):
        step(*map(made, values))
    assert (step.stats.captures, step.stats.hits) == (1, 1)
    return step


def made(value: Any) -> Any:
    """What a lambda makes, and anything else itself."""
    return value() if getattr(value, "__name__", "") == "<lambda>" else value


def serves(step: Graphed[..., Any], *values: Any) -> bool:
    """Whether the graph that there is serves such a call; its rows may have to be compared first."""
    captures = step.stats.captures
    for _ in range(2):
        args = [made(value) for value in values]
        answer = step(*args)
        assert args[0].layout is not torch.strided or torch.equal(answer, args[0] * 2)
    return step.stats.captures == captures and step.last_decision.reason.is_graph


def drawn(*shape: int, **how: Any) -> Callable[[], Tensor]:
    """A maker of batches."""
    return lambda: torch.randn(shape, **how)


OTHERS: dict[str, Callable[[], Tensor]] = {
    "negative": lambda: torch._neg_view(torch.randn(4, 3)),
    "conjugate": lambda: torch.randn(4, 3, dtype=torch.complex64).conj(),
    "one column": drawn(4, 1),
    "a vector": drawn(4),
    "dtype": drawn(4, 3, dtype=torch.float64),
    "integers": lambda: torch.randint(9, (4, 3), dtype=torch.int32),
    "transposed": lambda: torch.randn(3, 4).T,
    "gaps": lambda: torch.randn(4, 6)[:, ::2],
    "expanded": lambda: torch.randn(4, 1).expand(4, 3),
    "sparse": lambda: torch.randn(4, 3).to_sparse(),
    "sparse rows": lambda: torch.randn(4, 3).to_sparse_csr(),
    "parameter": lambda: nn.Parameter(torch.randn(4, 3), requires_grad=False),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("other", OTHERS)
def test_any_other_difference_does_not_match(other: str) -> None:
    """Nothing is broadcast, cast, reordered or taken for a tensor of another type."""
    assert not serves(serving(drawn(4, 3)), OTHERS[other])


@pytest.mark.parametrize("first", [(1, 3), (4, 1)], ids=["rows", "columns"])
def test_what_an_expanded_argument_gives_lies_in_memory_as_eagers(first: tuple[int, int]) -> None:
    """It is contiguous, so that the caller may view it in another shape."""
    step = serving(lambda: torch.randn(first).expand(4, 3))
    x = torch.randn(first).expand(4, 3)
    answer = step(x)
    assert answer.stride() == (x * 2).stride()
    assert step.last_decision.reason.is_graph


def test_each_property_is_compared() -> None:
    """What each call compares of a tensor differs in one of the cases above, or here; the core and Python see it."""
    assert all(one.in_core for one in PROPERTIES), "has_form of native/core/signature.cpp must compare each"
    step = serving(drawn(4, 3))
    signature, like = step._route.groups[0].signature, torch.randn(4, 3)
    others = [make() for make in (*OTHERS.values(), drawn(4, 3, device="meta"))]
    for name, read, *_ in PROPERTIES:
        assert read(torch.randn(4, 3)) == read(like), f"{name} differs each time"
        differ = [other for other in others if read(other) != read(like)]
        assert differ, f"OTHERS has no tensor with another {name}"
        for way in filter(None, (signature, signature.native)):
            assert way.match([like]) == 4
            assert {way.match([other]) for other in differ} == {NO_MATCH}, name


def test_a_further_property_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are compared by it, by the core too, and a call that differs is described by it. One that cannot tell fits
    none."""

    def mark_of(tensor: Tensor) -> Any:
        if getattr(tensor, "mark", "") == "odd":
            raise RuntimeError("it cannot tell")
        return getattr(tensor, "mark", "")

    marked = Property("mark", mark_of)
    monkeypatch.setattr("graphdispatch.runtime.signature.PROPERTIES", [*PROPERTIES, marked])
    step = serving(drawn(4, 3))
    signature, other = step._route.groups[0].signature, torch.randn(4, 3)
    other.mark = "other"  # type: ignore[attr-defined]
    assert serves(step, drawn(4, 3))
    assert not serves(step, other)
    assert "mark" in signature.misfit([other])
    for way in filter(None, (signature, signature.native)):
        assert [way.match([one]) for one in (torch.randn(4, 3), other)] == [4, NO_MATCH]
        other.mark = "odd"  # type: ignore[attr-defined]
        assert way.match([other]) == NO_MATCH
        other.mark = "other"  # type: ignore[attr-defined]


def test_what_stands_in_for_an_argument_has_its_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that graphs read, and the batches of a prewarm: a call like the example is a hit at once."""
    shared = Property(
        "is_shared", Tensor.is_shared, give=lambda new, is_it: new.share_memory_() if is_it else new.clone()
    )
    monkeypatch.setattr("graphdispatch.runtime.signature.PROPERTIES", [*PROPERTIES, shared])
    for x in (torch.randn(4, 3).share_memory_(), torch.zeros(4, 3).share_memory_(), torch.randn(4, 3)):
        step = graphed(lambda x: x * (2 if x.is_shared() else 3), dynamic={"x": 0}, sizes=[2, 4])
        step.prewarm(x)
        assert {view.is_shared() for one in step.entries for view in one.inputs.views(one.size)} == {x.is_shared()}
        assert torch.equal(step(x), x * (2 if x.is_shared() else 3))
        assert step.last_decision.reason is Reason.EXACT


LAYOUTS: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor], bool]] = {
    "parameter": (OTHERS["parameter"], lambda: nn.Parameter(torch.randn(2, 3), requires_grad=False), True),
    "transposed": (OTHERS["transposed"], lambda: torch.randn(3, 7).T, True),
    "one column": (lambda: torch.randn(3, 4, 1).permute(1, 2, 0), lambda: torch.randn(3, 7, 1).permute(1, 2, 0), True),
    "gaps": (OTHERS["gaps"], lambda: torch.randn(2, 9)[:, ::2][:, :3], False),
    "expanded": (OTHERS["expanded"], lambda: torch.randn(2, 1).expand(2, 3), False),
    "offset": (lambda: torch.randn(4, 3)[1:], lambda: torch.randn(9, 3)[5:], True),
    "large strides": (lambda: torch.randn(2**15, 3)[::5000], lambda: torch.randn(8, 3)[::2], False),
}
"""Two batches of each, and whether they leave no gaps in memory."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_matches_itself(layout: str) -> None:
    """Order in memory and gaps are compared, not the strides themselves; no other layout is taken for it."""
    first, second, is_dense = LAYOUTS[layout]
    step = serving(first)
    assert step.entries[0].inputs.specs[0].is_dense is is_dense
    assert serves(step, second)
    assert layout in ("offset", "large strides") or not serves(step, drawn(4, 3))


def test_rows_of_two_arguments_agree() -> None:
    """A call whose batches differ is not served, whichever is larger; a batch may be any dimension, or none."""
    step = serving(drawn(4, 3), drawn(4), dynamic={"x": 0, "y": 0})
    assert serves(step, drawn(2, 3), drawn(2))
    for rows in ((2, 1), (1, 2)):
        assert not serves(step, drawn(rows[0], 3), drawn(rows[1]))
        assert step.last_decision.reason is Reason.ROWS_DISAGREE
    last = serving(drawn(3, 4), dynamic={"x": -1})
    assert [serves(last, drawn(rows, 9)) for rows in (3, 4)] == [True, False]
    fixed = serving(drawn(4, 3), dynamic={})
    assert [serves(fixed, drawn(rows, 3)) for rows in (4, 3)] == [True, False]


def test_shapes_that_fit_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compared once, until there are too many of them; those that do not fit are not kept."""
    monkeypatch.setattr("graphdispatch.runtime.signature._MOST_SHAPES", 2)
    signature = serving(drawn(4, 3))._route.groups[0].signature
    (check,) = signature._checks
    check.shapes.clear()
    for rows, width in ((4, 3), (2, 5), (4, 3), (2, 3), (9, 3)):
        assert signature.match([torch.randn(rows, width)]) == (rows if width == 3 else NO_MATCH)
    assert [[*shape] for shape in check.shapes] == [[9, 3]]
    signature.match([torch.randn(4, 3)])
    assert [[*shape] for shape in check.shapes] == [[9, 3], [4, 3]]


CONSTANTS: list[tuple[Any, ...]] = [
    (1, [1], [2, 1.0, True, Level.LOW, None, "1"]),
    (True, [True], [False, 1, 1.0]),
    (0.0, [0.0], [-0.0, 0, False, 1e-320]),
    (float("nan"), [float("nan"), -float("nan")], [0.0, float("inf")]),
    (complex(0.0, -0.0), [complex(0.0, -0.0)], [complex(0.0, 0.0), 0.0]),
    ("a", ["a"], ["b", b"a", None]),
    (None, [None], [0, False, ...]),
    (Color.RED, [Color.RED], [Color.BLUE, 1]),
    (Level.LOW, [Level.LOW], [1]),
    (torch.float32, [torch.float], [torch.float64, "torch.float32"]),
    (torch.device("cpu"), [torch.device("cpu")], [torch.device("cpu", 0), torch.device("meta"), "cpu"]),
    (torch.contiguous_format, [torch.contiguous_format], [torch.channels_last]),
    (np.float32(2), [np.float32(2)], [np.float32(3), np.float32("nan"), 2.0]),
    (range(2), [range(2)], [range(3), (0, 1)]),
    (int, [int], [float]),
    (torch.sin, [torch.sin], [torch.cos]),
    (nn.functional.relu, [nn.functional.relu], [nn.functional.gelu, double]),
]


@pytest.mark.parametrize(("value", "same", "other"), CONSTANTS, ids=lambda one: repr(one).partition(" at ")[0])
def test_constants_match_only_themselves(value: Any, same: list[Any], other: list[Any]) -> None:
    """By type and value; the sign of zero counts, and NaN is itself."""
    step = serving(drawn(4, 3), value)
    assert [serves(step, drawn(4, 3), one) for one in same] == [True] * len(same)
    assert [serves(step, drawn(4, 3), one) for one in other] == [False] * len(other)


@pytest.mark.parametrize("value", [{1}, torch.ones(5, 3)], ids=["object", "tensor"])
def test_what_is_static_is_compared_by_identity(value: Any) -> None:
    """The user vouches for one object, not for equal ones; a tensor is not copied, so it must lie where it lay."""
    step = serving(drawn(4, 3), value, static="y")
    assert [serves(step, drawn(4, 3), one) for one in (value, copy.deepcopy(value), value)] == [True, False, True]


@pytest.mark.parametrize("validates", [True, False])
def test_the_caller_may_answer_for_the_addresses_of_static_inputs(validates: bool) -> None:
    """Without ``validate_addresses`` a graph that reads the caller's tensors serves whatever it is called with."""
    options = CUDAGraphOptions(inputs="static", validate_addresses=validates)
    wrapper, x = CUDAGraphWrapper(lambda x: x * 2, options=options), torch.randn(4, 3)
    for one in (x, x, x.clone()):
        wrapper(one, batch_descriptor=BatchDescriptor(4), cudagraph_runtime_mode=CUDAGraphMode.FULL)
    assert wrapper.get_stats().hits == (1 if validates else 2)


@pytest.mark.parametrize(
    ("values", "dynamic", "reason", "said"),
    [
        ([torch.ones(4, 3), object()], {}, Reason.UNGUARDED_ARGUMENT, "argument 'y' is a object, whose change cannot"),
        ([torch.ones(4, 3), torch.ones(1, 3)], {"x": 0, "y": 0}, Reason.ROWS_DISAGREE, "{'x': 4, 'y': 1}"),
        ([1, 2], {}, Reason.NO_TENSORS, "no argument is a tensor"),
        ([torch.ones(4, 3, device="meta"), 1], ROWS, Reason.DEVICE_UNSUPPORTED, "'meta'"),
    ],
    ids=["object", "rows", "no tensors", "device"],
)
def test_a_refusal_says_what(values: list[Any], dynamic: dict[str, int], reason: Reason, said: str) -> None:
    """The argument, or both numbers of rows."""
    step = graphed(lambda x, y: x, dynamic=dynamic)
    step(*values)
    assert step.stats.reasons == {reason: 1}
    assert said in step.explain(*values)


@pytest.mark.parametrize(
    ("dim", "value", "named"),
    [
        (2, torch.ones(4, 3), r"dynamic\['x'\] = 2 is out of range: .*\(4, 3\); give a dimension that it has"),
        (-3, torch.ones(4, 3), r"dynamic\['x'\] = -3 is out of range"),
        (0, torch.tensor(1.0), r"shape \(\); .* leave it out of dynamic="),
        ({0: "batch", 2: "seq"}, torch.ones(3, 4), r"dynamic\['x'\]\[2\] = 'seq' is out of range.*\(3, 4\)"),
        ({1: "batch", -1: "seq"}, torch.ones(3, 4), "names dimension 1 of the tensor twice"),
    ],
)
def test_a_batch_dimension_must_exist(dim: Any, value: Tensor, named: str) -> None:
    """The message tells the shape and the remedy; a call that has the dimension is served afterwards."""
    step = make(dynamic={"x": dim})
    with pytest.raises(ConfigError, match=named):
        step(value)
    step(torch.randn(4, 4, 4))
    assert step.stats.captures == 1
