"""Several dynamic dimensions: what is served, what is refused, and what is said of bad input."""

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from graphdispatch import Dim, Graphed, Pad, Reason, graphed
from graphdispatch.errors import ConfigError, FallbackError
from graphdispatch.runtime.signature import InputSpec
from graphdispatch.runtime.static_inputs import StaticInputs, resized
from graphdispatch.sizes import axes_of, pack

from ..helpers import AT_ONCE, assert_same, check_calls, check_rows, make

SEQ = Dim("seq", sizes=[8, 16])
BOTH = {0: "batch", 1: SEQ}


TOKENS, PLACES = torch.randn(50, 16), torch.randn(32, 16)


def encode(ids: Tensor, mask: Tensor, *, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """Attention with a mask, or causal; one output with the sequence and one without."""
    batch, length = ids.shape
    x = TOKENS[ids] + PLACES[:length]
    heads = x.view(batch, length, 2, 8).transpose(1, 2)
    hidden = torch.ones(length, length).triu(1).bool() if is_causal else (mask == 0)[:, None, None]
    shares = (heads @ heads.transpose(2, 3) / 9).masked_fill(hidden, -1e9).softmax(3)
    mixed = (shares @ heads).transpose(1, 2).reshape(batch, length, 16)
    weights = mask[:, :, None].float()
    return x + mixed, (mixed * weights).sum(1) / weights.sum(1)


NEAR = {"rtol": 1e-4, "atol": 1e-5}
"""What other kernels may round."""


def served(fn: Callable[..., Any], *names: str, **how: Any) -> Graphed[..., Any]:
    """``fn`` with these arguments by batch and sequence."""
    return make(fn, dynamic=dict.fromkeys(names, BOTH), **how)


def tokens(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Ids, and a mask of which each row begins with a one."""
    mask = (torch.rand(batch, length) < 0.8).long()
    mask[:, 0] = 1
    return torch.randint(1, 50, (batch, length)), mask


def last(step: Graphed[..., Any]) -> Reason:
    """Why the latest call was served as it was."""
    return step.last_decision.reason


@pytest.mark.parametrize("is_causal", [False, True], ids=["masked", "causal"])
@pytest.mark.parametrize("first", [(3, 11), (4, 16), (1, 1)], ids=str)
def test_lengths_and_batches_are_served(is_causal: bool, first: tuple[int, int]) -> None:
    """Whatever is captured first, calls are padded along both dimensions, and outputs are cut along those they have."""
    step = served(partial(encode, is_causal=is_causal), "ids", "mask")
    shapes = [first, first, *[(b, n) for b in range(1, 5) for n in (1, 3, 4, 8, 9, 11, 16)]]
    check_calls(step, *(tokens(*shape) for shape in shapes * 2), **NEAR)
    assert step.stats.captures == 4
    for shape in shapes:
        step(*tokens(*shape))
        assert last(step).is_graph, step.explain(*tokens(*shape))


def test_a_decision_tells_each_dimension() -> None:
    """``explain``, the sizes, the entries and the statistics speak of batch and length."""
    step = served(lambda x: x * 2, "x")
    check_rows(step, *[(3, 9)] * 4)
    assert step.explain(torch.randn(3, 9)).startswith("FULL graph, 3 x 9 -> 4 x 16 rows, 57.8 % padding")
    assert step.sizes == ((2, 8), (2, 16), (4, 8), (4, 16))
    assert [entry.key for entry in step.entries] == [(4, 16)]
    assert step.entries[0].descriptor.num_tokens == 64
    assert step.captured_sizes == ((4, 16),)
    assert step.stats.real_rows == 27 * step.stats.hits
    assert "(largest: 4 x 16)" in step.explain(torch.randn(3, 17))
    assert "along 'seq' (17 of 16): give that dimension a larger size" in step.explain(torch.randn(3, 17))
    assert "rows=3 x 9" in repr(step.last_decision)
    assert step.stats.rows == {27: 4}
    assert "4 x 16" in repr(step)


@pytest.mark.parametrize("shape", [(3, 17), (5, 3), (3, 2**21 + 5), (0, 3), (3, 0)], ids=str)
def test_what_no_size_holds_runs_eagerly(shape: tuple[int, int]) -> None:
    """A call above the largest size of one dimension, or empty along one, runs eagerly, as any batch."""
    step = served(lambda x: x * 2, "x")
    check_calls(step, torch.ones(shape))
    assert last(step) is (Reason.ABOVE_LARGEST_SIZE if min(shape) else Reason.NO_ROWS)


def test_a_batch_of_two_rows_whose_callable_takes_no_single_one_is_served() -> None:
    """As where a batch is normalised over: how outputs follow the batch is seen from one row more."""
    model = torch.nn.BatchNorm1d(3).requires_grad_(False)
    twin, step = copy.deepcopy(model), make(model, dynamic={"input": 0}, sizes=[2])
    assert check_rows(step, *[2] * 4, fn=twin, **NEAR)[-1] is Reason.EXACT
    torch.testing.assert_close(model.running_mean, twin.running_mean)


def test_three_dimensions() -> None:
    """Each of three is padded, and an argument may have some of them, or one twice."""

    def fn(x: Tensor, y: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2 + y[None, :, None], square * 2

    dims = {"x": {0: "a", 1: Dim("b", [4, 8]), 2: Dim("c", [2, 4])}, "y": {0: "b"}, "square": {0: "c", 1: "c"}}
    step = make(fn, dynamic=dims)
    for shape in [(3, 5, 2), (3, 5, 2), (4, 8, 4), (1, 2, 3), (2, 7, 4), (1, 1, 1), (3, 6, 2), (3, 5, 2)] * 2:
        check_calls(step, (torch.randn(shape), torch.randn(shape[1]), torch.randn(shape[2], shape[2])), **NEAR)
    assert last(step).is_graph


def test_a_mask_that_is_made_of_another_one_begins_where_that_did() -> None:
    """The rows come in turn from the second one on; along a length the elements of other arguments do, too."""
    axes = axes_of(["batch", "seq"])
    form = InputSpec(
        "mask", 0, (0, 0), (0, 1), torch.int64, torch.device("cpu"), tuple(enumerate(axes)), (Pad.zero(),) * 2
    )
    specs = [form, replace(form, name="x", position=1)]
    values = [torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([[0, 1, 2], [3, 4, 5]])]
    mask, x = resized(StaticInputs(specs, pack(axes, (4, 8)), axes), values, pack(axes, (3, 4)), shift=1)
    assert mask.tolist() == [[1, 0, 0, 1], [1, 1, 0, 1], [1, 0, 0, 1]]
    assert x.tolist() == [[4, 5, 3, 4], [1, 2, 0, 1], [4, 5, 3, 4]]


def test_pad_rules_by_argument_and_dimension() -> None:
    """A rule of the ``Dim`` counts along it, one of ``pad`` elsewhere; each is what the graph reads there."""
    dim = Dim("seq", [4], pad={"x": 7, "y": Pad.repeat_last()})
    dims = {"x": {0: "batch", 1: dim}, "y": {0: "batch", 1: "seq"}}
    step = make(lambda x, y: x + y * 2, dynamic=dims, sizes=[3], pad={"x": 5})
    batches = [(torch.randn(2, 3), torch.randn(2, 3)) for _ in range(4)]
    check_calls(step, *batches, **NEAR)
    assert last(step) is Reason.PADDED
    (entry,) = step.entries
    x, y = entry.inputs.views(entry.size)
    assert x[2].tolist() == [5.0] * 4
    assert x[:2, 3].tolist() == [7.0] * 2
    assert torch.equal(y[:2, 3], batches[-1][1][:, 2])
    assert y[2].tolist() == [0.0] * 4


def test_a_named_dimension_alone_is_its_number() -> None:
    """A single name, of one dimension of each argument, is served as its number would be."""
    step = graphed(lambda x: x * 2, dynamic={"x": {-1: Dim("seq", [4, 8], pad=3)}}, options=AT_ONCE)
    check_rows(step, *[(2, length) for length in (3, 3, 5, 5, 8, 2, 3, 5)])
    assert step.sizes == (4, 8)
    assert last(step) is Reason.PADDED


def test_written_arguments_are_copied_back() -> None:
    """What the call writes in place arrives in the caller's own tensor, its real elements alone."""
    step = served(lambda x, y: x.add_(y) * 2, "x", "y", sizes=[4])
    for shape in [(3, 5), (3, 5), (3, 5), (3, 5), (4, 16), (2, 3)] * 2:
        x, y = torch.randn(shape), torch.randn(shape)
        mine = x.clone()
        assert_same((step(mine, y), mine), ((x + y) * 2, x + y))
    assert last(step).is_graph


def test_combinations_are_captured_ahead() -> None:
    """``sizes`` and ``prewarm`` take combinations of lengths."""
    step = served(lambda x: x * 2, "x", sizes=[(2, 4), (4, 6), (8, 8)])
    assert step.sizes == ((2, 4), (4, 6), (8, 8))
    check_rows(step, *[(2, 3)] * 4)
    assert step.captured_sizes == ((2, 4),)
    step.prewarm(torch.randn(2, 3), sizes=[(4, 6)])  # type: ignore[list-item]
    check_rows(step, (3, 6))
    step.prewarm(torch.randn(2, 3), sizes=[(8, 8)])  # type: ignore[list-item]
    assert step.captured_sizes == ((2, 4), (4, 6), (8, 8))
    with pytest.raises(ConfigError, match=r"a size must be among the capture sizes .*, got \(4, 9\)"):
        step.prewarm(torch.randn(2, 3), sizes=[(4, 9)])  # type: ignore[list-item]


def test_lengths_that_disagree_run_eagerly() -> None:
    """One name has one length in a call; what disagrees is named, with its dimension."""
    step = served(lambda x, y: (x, y.sum()), "x", "y", strict=True)
    with pytest.raises(FallbackError, match=r"different lengths along 'seq': \{'x\[1\]': 5, 'y\[1\]': 6\}"):
        step(torch.ones(3, 5), torch.ones(3, 6))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown argument": ({"dynamic": {"z": BOTH}}, "dynamic names 'z', which is no argument"),
    "no name": ({"dynamic": {"x": {0: 3}}}, r"dynamic\['x'\]\[0\] must be a name, as 'seq', or a Dim, got 3"),
    "no dimension": ({"dynamic": {"x": {}}}, r"dynamic\['x'\] must name a dimension"),
    "no number": (
        {"dynamic": {"x": {"seq": 0}}},
        r"dynamic\['x'\] must map numbers of dimensions to names, got 'seq'; .* \"x\['seq'\]\"",
    ),
    "a name for an argument": ({"dynamic": {"x": BOTH, "y": "seq"}}, r"dynamic\['y'\] must be the number of a dim"),
    "four names": ({"dynamic": {"x": {0: "a", 1: "b", 2: "c", 3: "d"}}}, "at most 3 different dimensions"),
    "two Dims": ({"dynamic": {"x": BOTH, "y": {0: Dim("seq", [4])}}}, "two different Dims of the name 'seq'"),
    "sizes twice": ({"dynamic": {"x": {0: Dim("b", [4]), 1: "s"}}, "sizes": [8]}, "those of Dim\\('b'\\) already"),
    "a pad for nothing": ({"dynamic": {"x": {0: "b", 1: Dim("s", pad={"y": 0})}}}, "names 'y', which has no such"),
    "a bad pad": ({"dynamic": {"x": {0: "b", 1: Dim("s", pad="nil")}}}, r"pad\['x'\] must be a Pad"),
    "short combinations": ({"dynamic": {"x": BOTH}, "sizes": [(4, 8), (4,)]}, "a size for each of"),
    "equal combinations": ({"dynamic": {"x": BOTH}, "sizes": [(4, 8), (4, 8)]}, "each once"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_named(name: str) -> None:
    """Each is a ``ConfigError`` where it is given, which names the argument and what to give instead."""
    how, message = BAD[name]
    with pytest.raises(ConfigError, match=message):
        graphed(lambda x, y=None: x, **how)


BAD_DIMS: list[tuple[Any, ...]] = [
    ({"sizes": [16, 8]}, r"sizes of Dim\('seq'\) must be strictly increasing, got 16 before 8"),
    ({"sizes": [0, 8]}, r"sizes of Dim\('seq'\)\[0\]"),
    ({"sizes": []}, "must hold at least one size"),
    ({"max_size": 0}, r"max_size of Dim\('seq'\)"),
    ({"sizes": [8], "max_size": 4}, "give one of them"),
    ({"sizes": [2**30]}, "must be below"),
]


@pytest.mark.parametrize(("how", "message"), BAD_DIMS, ids=str)
def test_bad_dims_are_named(how: dict[str, Any], message: str) -> None:
    """Sizes that cannot be are refused where the ``Dim`` is made; a name alone has powers of two up to ``max_size``."""
    with pytest.raises(ConfigError, match=message):
        Dim("seq", **how)
    with pytest.raises(ConfigError, match="must be text"):
        Dim(3)  # type: ignore[arg-type]
    assert Dim("seq").all_sizes() == (16, 32, 64, 128, 256, 512)
    assert Dim("seq", max_size=100).all_sizes() == (16, 32, 64, 100)
    assert Dim("seq", max_size=5).all_sizes() == (5,)


def attend(x: Tensor, mask: Tensor) -> Tensor:
    """Attention under a mask."""
    scores = (x @ x.transpose(1, 2)).masked_fill((mask == 0)[:, None], -1e9)
    return scores.softmax(2) @ x


def test_a_mask_hides_the_padding_of_a_length() -> None:
    """What mixes along it under a mask is served for all lengths and batches, and without one nowhere."""
    step = served(attend, "x", "mask", sizes=[4])
    masks = [torch.ones(3, n).tril(n - 2) for n in (11, 11, 11, 12, 9, 9)]
    reasons = check_calls(step, *((torch.randn(*mask.shape, 4), mask) for mask in masks), **NEAR)
    assert reasons[-3:] == [Reason.PADDED] * 3
    bare = served(lambda x: (x @ x.transpose(1, 2)).softmax(2) @ x, "x", sizes=[4])
    reasons = check_rows(bare, *[(3, 9, 4)] * 4, (4, 16, 4), (4, 16, 4), (4, 16, 4), (3, 16, 4), (3, 16, 4), **NEAR)
    assert reasons[3] is Reason.ROWS_MIX
    assert reasons[-1] is Reason.PADDED, bare.last_decision  # along the batch alone
    assert "real rows depend on padding along 'seq'" in bare.explain(torch.randn(3, 9, 4))
    assert "a mask that is padded with zeros must hide it" in bare.explain(torch.randn(3, 9, 4))


def test_flags_that_are_all_zero_are_never_ones() -> None:
    """The callable meets no number that might name no place, as the kind of a token where there is one kind."""
    kinds, raised = torch.randn(1, 4), list[str]()

    def fn(x: Tensor, kind: Tensor, mask: Tensor) -> Tensor:
        return attend(x + torch.embedding(kinds, kind), mask)

    step = served(fn, "x", "kind", "mask", sizes=[4])
    before = sys.getprofile()
    sys.setprofile(
        lambda _, event, of: raised.append(event) if (event, of) == ("c_exception", torch.embedding) else None
    )
    try:
        for n in (16, 16, 11, 12, 9):
            step(torch.randn(3, n, 4), torch.zeros(3, n, dtype=torch.long), torch.ones(3, n).tril(n - 2))
    finally:
        sys.setprofile(before)
    assert last(step) is Reason.PADDED
    assert not raised


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rule_that_is_not_neutral_along_one_dimension(dim: int) -> None:
    """A bounded maximum hides the padding of a rule for now. What is padded along the other dimension is served."""

    def fn(x: Tensor) -> Tensor:
        return x + x.clamp(max=0.5).amax(dim, keepdim=True)

    step = make(fn, dynamic={"x": BOTH}, sizes=[4], pad={"x": 7.0})
    for rows, length, reason in ((3, 8, dim == 1), (4, 11, dim == 0), (3, 11, False)):
        check_calls(step, *(torch.rand(rows, length, 2) + 1 for _ in range(6)), **NEAR)
        assert last(step) is (Reason.PADDED if reason else Reason.ROWS_MIX), step.last_decision


def test_a_mask_of_which_a_one_hides_is_served_by_a_rule() -> None:
    """A pad rule of the user's says what padding holds."""
    hides = Dim("seq", [8, 16], pad={"mask": 1})
    dims = {"x": {0: "batch", 1: hides}, "mask": {0: "batch", 1: "seq"}}
    step = make(lambda x, mask: attend(x, 1 - mask), dynamic=dims, sizes=[4])
    lengths = (11, 11, 12, 9, 11, 12, 9)
    check_calls(step, *((torch.randn(3, length, 4), torch.zeros(3, length)) for length in lengths), **NEAR)
    assert last(step) is Reason.PADDED
    assert step.stats.verifications == 1


@pytest.mark.parametrize(
    ("sizes", "lengths"), [([16, 32], range(32, 16, -1)), ([64, 200], (150, 170, 65, 66, 199, 200))]
)
def test_no_length_is_compared_by_itself(sizes: list[int], lengths: Sequence[int]) -> None:
    """After the second batch all are hits."""
    step = make(dynamic={"x": {0: "b", 1: Dim("s", sizes)}}, sizes=[2])
    check_rows(step, *[(2, length) for length in lengths])
    assert (step.stats.captures, step.stats.verifications, step.stats.hits) == (1, 1, len(lengths) - 2)


def test_padding_that_writes_elsewhere_is_named() -> None:
    """A cache that padding rows would write keeps a size for full batches, and the reason says so."""
    cache = torch.zeros(9, 4)

    def fn(batch: Tensor, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        cache.index_copy_(0, slots, x)
        return batch * 2, cache[slots] * 0.5

    length = {0: Dim("length", sizes=[4])}
    step = make(fn, dynamic={"batch": {0: "batch"}, "x": length, "slots": {0: "length"}}, sizes=[3])
    for slots in ([1, 2, 3, 5], [7, 6, 5, 4], [4, 6, 8]):  # and padding rows take slot 0
        step(torch.ones(3), torch.randn(len(slots), 4), torch.tensor(slots))
    assert "padding rows would write to state at places that rows name" in step.last_decision.detail
    assert step.stats.captures == 1


def _place(x: Tensor) -> Tensor:
    try:
        return x[:, 12] * 2
    except IndexError:
        return x[:, 0] * 2


def _listed_places(x: Tensor) -> Tensor:
    try:
        return x[:, [0, 12]].sum(1)
    except IndexError:
        return x[:, 0] * 2


def _contiguous(x: Tensor) -> Tensor:
    part = x[:, :12]
    return (part + 1 if part.is_contiguous() else part * 1).sum(1)


NUMBERS = torch.randn(100)
OF_LENGTHS: dict[str, Callable[[Tensor], Any]] = {
    "a length": lambda x: {"y": x * 2, "len": x.size(1)},
    "a number of rows": lambda x: (x * 2, (x.shape[0] + 1) // 4),
    "a quotient": lambda x: (x * 2, x.shape[1] / 2),
    "lengths in a list": lambda x: (x * 2, [x.shape[1]] * 2),
    "a length as text": lambda x: (x * 2, list(map(int, f"{x.shape[1]}"))),
    "a shape": lambda x: (x * 2, x.shape),
    "a place that a length may lack": _place,
    "places that a length may lack": _listed_places,
    "the type of a length": lambda x: x + 1 if type(x.shape[1]) is int and x.shape[1] == 13 else x * 2,
    "whether a part is contiguous": _contiguous,
    "a table by place in rows of a length": lambda x: (x.flatten(1) + NUMBERS[: x.shape[1] * 3]).view(x.shape),
    "a table by place in a row": lambda x: (x.mT.flatten(1) + NUMBERS[: x.shape[1] * 3]).view(x.mT.shape),
    "numbers of all places": lambda x: x[..., 0] + torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2]),
    "a length twice beside each of its elements twice": lambda x: (
        torch.cat([x, x], 1) + x.repeat_interleave(2, 1)
    ).view(x.shape[0], 2, *x.shape[1:]),
}


@pytest.mark.parametrize("name", OF_LENGTHS)
def test_what_follows_a_length_besides_tensors_is_that_of_the_batch(name: str) -> None:
    """Batches of which a graph cannot tell stay eager."""
    fn = OF_LENGTHS[name]
    step = served(fn, "x", sizes=[4])
    shapes = [(4, 16, 3), (4, 16, 3), (3, 16, 3), (4, 13, 3), (2, 10, 3), (3, 16, 3), (4, 13, 3), (2, 10, 3)]
    check_rows(step, *shapes, fn=fn)
    assert step.stats.captures == 1


def test_a_table_by_place_in_a_picture_is_that_of_the_batch() -> None:
    """The place of a patch follows the width, so that graphs serve pictures of their own width alone."""
    dynamic = {"x": {0: "b", 1: Dim("h", sizes=[8]), 2: Dim("w", sizes=[8])}}
    step = make(lambda x: (x.flatten(1) + NUMBERS[: x.shape[1] * x.shape[2]]).view(x.shape), dynamic=dynamic, sizes=[4])
    shapes = [(4, 8, 8), (4, 8, 8), (3, 8, 8), (4, 8, 5), (3, 6, 8), (4, 8, 5), (3, 6, 8), (2, 6, 7)]
    reasons = check_rows(step, *shapes)
    assert reasons[6] is Reason.PADDED
