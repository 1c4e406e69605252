"""Several dynamic dimensions: models that mix a sequence, or that use its length in Python."""

import re
from collections.abc import Callable

import pytest
import torch

from graphdispatch import Dim, Graphed, Reason

from ..helpers import check_calls, make, reason

DIMS = {0: "batch", 1: Dim("seq", sizes=[8])}
LENGTHS_OF_CALLS = (8, 8, 2, 3, 4, 5, 6, 7, 1, 8, 7, 4, 3)
FIRST = pytest.mark.parametrize("first", [(4, 8), (3, 5)], ids=["full-first", "padded-first"])
NEAR = {"rtol": 1e-4, "atol": 1e-6}
SEQUENCE_MIXERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "attention": lambda x: (x @ x.transpose(1, 2)).softmax(2) @ x,
    "mean": lambda x: x.mean(1),
    "softmax": lambda x: x.softmax(1),
    "maximum": lambda x: x.amax(1),
    "clamped maximum": lambda x: x.amax(1).clamp(max=1.0),
    "both": lambda x: x - x.mean((0, 1)),
}
LENGTHS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scales": lambda x: x / x.shape[1],
    "branches": lambda x: x * 2 if x.shape[1] > 5 else x * 3,
    "takes odd ones apart": lambda x: x * 2 if x.shape[1] % 2 else x * 3,
    "takes one apart": lambda x: x * 2 if x.shape[1] == 3 else x * 3,
    "counts": lambda x: x + torch.arange(x.shape[1]).flip(0)[:, None],
    "turns": lambda x: x.flip(1),
}


def tried(fn: Callable[..., torch.Tensor], first: tuple[int, int]) -> Graphed[..., torch.Tensor]:
    """``fn`` after calls of many lengths, of full batches and padded ones, each compared with eager."""
    step = make(fn, dynamic={"x": DIMS}, sizes=[4])
    shapes = [first] * 4 + [(rows, length) for length in LENGTHS_OF_CALLS for rows in (4, 3)]
    check_calls(step, *(torch.randn(*shape, 3) - 2 for shape in shapes), **NEAR)
    return step


@FIRST
@pytest.mark.parametrize("mixer", SEQUENCE_MIXERS.values(), ids=SEQUENCE_MIXERS)
def test_sequence_mixed(mixer: Callable[[torch.Tensor], torch.Tensor], first: tuple[int, int]) -> None:
    """Such a model runs eagerly where a sequence would be padded; if full ones came first, these by a graph."""
    step = tried(mixer, first)
    assert reason(step, torch.randn(4, 5, 3)) is Reason.ROWS_MIX
    if first == (4, 8):
        assert reason(step, torch.randn(4, 8, 3)) is Reason.EXACT
        assert re.search("depend on padding along .*'seq'|rows mix", step.explain(torch.randn(4, 5, 3)))


OF_INTEGERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "maximum": lambda x: x.amax(1),
    "place of the maximum": lambda x: x.argmax(1),
    "choice by sign": lambda x: torch.where((x < 0).any(1), x.sum(1), x[:, 0]),
}


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_sequence_of_integers_mixed(name: str) -> None:
    """Integers that name no place are numbers: that early ones are positive hides nothing."""
    step = make(OF_INTEGERS[name], dynamic={"x": DIMS}, sizes=[4])
    early, late = ([(torch.randint(1, 9, (4, n)) * sign,) for n in (8, 8, 5, 5, 3)] for sign in (1, -1))
    check_calls(step, *early, *late)
    assert reason(step, torch.ones(4, 5, dtype=torch.long)) is Reason.ROWS_MIX


def _attention(x: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
    """Attention of each element to those that it ``sees``, by their places."""
    return (x @ x.transpose(1, 2)).masked_fill(~sees, -1e9).softmax(2) @ x


def _places(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of the elements that attend, and of those that they attend to."""
    places = torch.arange(x.shape[1])
    return places[:, None], places[None]


def _blocks(x: torch.Tensor) -> torch.Tensor:
    own, others = _places(x)
    return _attention(x, own // 4 == others // 4)


def _chunks(x: torch.Tensor) -> torch.Tensor:
    own, others = _places(x)
    return _attention(x, own // 4 >= others // 4)


def _prefix(x: torch.Tensor) -> torch.Tensor:
    own, others = _places(x)
    return _attention(x, (own >= others) | (others < 4))


def _counted(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.ones_like(x).sum(1, keepdim=True) > 3, x * 2, x)


@pytest.mark.parametrize("fn", [_blocks, _chunks, _prefix, _counted])
def test_sequence_mixed_at_some_lengths(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What meets padding at some lengths alone runs eagerly, though the early batches have others."""
    step = make(fn, dynamic={"x": DIMS}, sizes=[4])
    check_calls(step, *(torch.randn(4, length, 3) for length in (8, 4, 8, 4, 7, 2, 5, 6, 3, 4)), **NEAR)
    assert reason(step, torch.randn(4, 7, 3)) is Reason.ROWS_MIX


def _masked_blocks(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask[..., None] != 0, _blocks(x), 0.0)


def _counts_hidden(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    hidden = (mask == 0).sum(1, keepdim=True).clamp(min=6)  # of five elements with padding at most seven
    return (x * mask[..., None]).sum(1) + hidden


@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize(
    ("fn", "early", "late"),
    [(_masked_blocks, [0, 0, 0, 1], [1, 1, 1, 1, 1]), (_counts_hidden, [1, 0, 1, 1, 1], [1, 0, 0, 0, 0])],
    ids=["shows", "hides"],
)
def test_sequence_mixed_where_masks_differ(
    fn: Callable[..., torch.Tensor], early: list[int], late: list[int], kind: torch.dtype
) -> None:
    """What early masks hide may meet padding, and so may the places that a later one hides."""
    step = make(fn, dynamic={"x": DIMS, "mask": {0: "batch", 1: "seq"}}, sizes=[4])
    full = (early * 2)[:8]
    for mask in (full, full, early, early, early, late):
        masks = torch.tensor(mask).to(kind).expand(4, -1).clone()
        check_calls(step, (torch.randn(4, len(mask), 3), masks), **NEAR)
    assert step.last_decision.reason is Reason.ROWS_MIX


def test_sequence_mixed_where_lengths_differ() -> None:
    """The zeros of a mask made of lengths hide that padding holds zeros, until a row is as long as the batch."""

    def maximum(x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return (x * (torch.arange(x.shape[1]) < length[:, None])[..., None]).amax(1)

    step = make(maximum, dynamic={"x": DIMS, "length": {0: "batch"}}, sizes=[4])
    batches = [(torch.randn(4, n, 3) - 2, torch.full((4,), longest)) for n, longest in ((8, 7), (5, 4), (5, 3), (5, 5))]
    check_calls(step, *batches, **NEAR)
    assert step.last_decision.reason is Reason.ROWS_MIX


def test_sequence_of_ids_mixed_at_some_lengths() -> None:
    """Ids that name places are replaced by others of the batch."""
    step = make(lambda ids: _blocks(TABLE[ids]), dynamic={"ids": DIMS}, sizes=[4])
    check_calls(step, *(torch.randint(0, 5, (4, length)) for length in (8, 4, 8, 4, 7, 2, 5)), **NEAR)
    assert reason(step, torch.ones(4, 7, dtype=torch.long)) is Reason.ROWS_MIX


def _each(value: bool | float) -> torch.Tensor:
    return torch.full((4,), value)


def test_sequence_mixed_in_longer_graphs() -> None:
    """Places that no short graph has are looked at, though a longer one comes by a full batch first."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        own, others = _places(x)
        return _attention(x, (own >= others) | (others == 10))

    step = make(fn, dynamic={"x": {0: "batch", 1: Dim("seq", sizes=[8, 16])}}, sizes=[4])
    lengths = (8, 5, 5, 16, 16, 16, 9, 12, 10, 5)
    check_calls(step, *(torch.randn(4, length, 3) for length in lengths), **NEAR)
    assert reason(step, torch.randn(4, 10, 3)) is Reason.ROWS_MIX


def _across(x: torch.Tensor, y: torch.Tensor, group: int) -> torch.Tensor:
    """Attention of one sequence to another, whose place is no later than that of the group."""
    sees = torch.arange(x.shape[1])[:, None] // group >= torch.arange(y.shape[1])[None]
    return (x @ y.transpose(1, 2)).masked_fill(~sees, -1e9).softmax(2) @ y


@pytest.mark.parametrize(
    ("group", "sizes", "lengths", "mixed"),
    [
        (1, [8], ((2, 5), (2, 5), (8, 8), (8, 8), (2, 6), (2, 4), (8, 5), (7, 3), (4, 8)), (8, 5)),
        (4, [8, 32], ((8, 8), (8, 8), (8, 5), (7, 4), (32, 8), (32, 8), (32, 5), (30, 3)), (32, 5)),
    ],
    ids=["sequence_mixed_before_another_length", "sequence_mixed_in_graphs_longer_elsewhere"],
)
def test_sequence_mixed_across_sequences(
    group: int, sizes: list[int], lengths: tuple[tuple[int, int], ...], mixed: tuple[int, int]
) -> None:
    """A place that only another, longer sequence has meets padding: early calls have that shorter, or graphs that are
    longer along this one come later."""
    dims = {"x": {0: "batch", 1: Dim("seq", sizes=sizes)}, "y": {0: "batch", 1: Dim("other", sizes=[8])}}
    step = make(lambda x, y: _across(x, y, group), dynamic=dims, sizes=[4])
    check_calls(step, *((torch.randn(4, s, 3), torch.randn(4, t, 3)) for s, t in lengths), **NEAR)
    assert reason(step, *(torch.randn(4, length, 3) for length in mixed)) is Reason.ROWS_MIX
    if group == 1:
        assert reason(step, torch.randn(4, 5, 3), torch.randn(4, 8, 3)) is Reason.PADDED


GATES: dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor, torch.Tensor]] = {
    "flag": (lambda x, g: torch.where(g, x.mean(1), x[:, 0]), torch.tensor(False), torch.tensor(True)),
    "flag of a count": (lambda x, g: x[:, 0] + g * (x == x).sum(1), torch.tensor(False), torch.tensor(True)),
    "weight of a count": (lambda x, g: x[:, 0] + g * (x == x).sum(1), torch.tensor(0.0), torch.tensor(1.0)),
    "flags": (lambda x, g: torch.where(g[:, None], x.mean(1), x[:, 0]), _each(False), _each(True)),
    "flags that are set": (lambda x, g: torch.where(g[:, None], x[:, 0], x[:, -1]), _each(True), _each(False)),
    "weight": (lambda x, g: x[:, 0] + g * x.mean(1), torch.tensor(0.0), torch.tensor(1.0)),
    "weights": (lambda x, g: x[:, 0] + g[:, None] * x.mean(1), _each(0.0), _each(1.0)),
}
"""Models with a gate, which is shut and open."""


@pytest.mark.parametrize("name", GATES)
def test_sequence_mixed_by_argument(name: str) -> None:
    """A gate that the early batches shut hides nothing: such a model runs eagerly where a sequence would be padded."""
    fn, shut, opened = GATES[name]
    step = make(fn, dynamic={"x": DIMS} | ({"g": {0: "batch"}} if shut.dim() else {}), sizes=[4])
    calls = [(length, shut) for length in (8, 8, 5, 5)] + [(length, opened) for length in (5, 7, 8, 3)]
    check_calls(step, *((torch.randn(4, length, 3), gate) for length, gate in calls), **NEAR)
    assert reason(step, torch.randn(4, 5, 3), opened) is Reason.ROWS_MIX


def test_sequence_mixed_by_integer() -> None:
    """LIMIT: an integer without the sequence opens a gate that all early batches shut."""

    def fn(x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return torch.where(task[:, None] == 1, x.mean(1), x[:, 0])

    step = make(fn, dynamic={"x": DIMS, "task": {0: "batch"}}, sizes=[4])
    check_calls(step, *((torch.randn(4, 5, 3), torch.zeros(4, dtype=torch.long)) for _ in range(4)), **NEAR)
    assert step.last_decision.reason is Reason.PADDED
    x, task = torch.ones(4, 5, 3), torch.ones(4, dtype=torch.long)
    assert not torch.allclose(step(x, task), fn(x, task))


TABLE = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
OF_IDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": lambda ids, mask: TABLE[ids].mean(1),
    "last": lambda ids, mask: TABLE[ids][:, -1],
    "masked": lambda ids, mask: (TABLE[ids] * mask[..., None]).sum(1),
}


def test_sequence_mixed_behind_the_smallest_id() -> None:
    """The first id decides whether the rest is read, and early batches have the smallest one elsewhere alone."""
    step = make(
        lambda ids: torch.where(ids[:, :1] == 0, TABLE[ids].mean(1), TABLE[ids[:, 0]]), dynamic={"ids": DIMS}, sizes=[4]
    )
    ids = torch.tensor([[1, 0, 3, 4, 2, 0, 1, 2]]).expand(4, 8)
    check_calls(step, *(ids[:, :length].clone() for length in (8, 4, 5, 5)), **NEAR)
    assert reason(step, ids[:, :5].clone()) is Reason.ROWS_MIX


@pytest.mark.parametrize("pad", [{}, {"ids": 3}], ids=["zeros", "threes"])
@pytest.mark.parametrize("name", OF_IDS)
def test_sequence_of_padding(name: str, pad: dict[str, int]) -> None:
    """Ids that are all what padding is show nothing, so that a padded sequence is compared until some have others."""
    ids, ones = torch.full((4, 8), pad.get("ids", 0)), torch.ones(4, 8)
    step = make(OF_IDS[name], dynamic={"ids": DIMS, "mask": {0: "batch", 1: "seq"}}, sizes=[4], pad=pad)
    step.prewarm(ids, ones)
    check_calls(step, *((ids[:, :length].clone(), ones[:, :length].clone()) for length in (5, 3, 7)), **NEAR)
    assert reason(step, ids[:, :5].clone(), ones[:, :5].clone()) is Reason.VERIFIED_NOW
    shapes = [(4, length) for length in (8, 5, 3, 7, 1, 8, 5)]
    check_calls(step, *((torch.randint(0, 5, shape), torch.ones(shape)) for shape in shapes), **NEAR)
    wanted = Reason.PADDED if name == "masked" else Reason.ROWS_MIX
    assert reason(step, ids[:, :5].clone(), ones[:, :5].clone()) is wanted


def test_sequence_behind_a_mask_of_numbers() -> None:
    """A mask of floating-point ones beside features is one in a prewarm, too: such a model is padded from then on."""
    dims = {"x": DIMS, "mask": {0: "batch", 1: "seq"}}
    step = make(lambda x, mask: (x * mask[..., None]).sum(1), dynamic=dims, sizes=[4])
    step.prewarm(torch.randn(4, 8, 3), torch.ones(4, 8))
    assert reason(step, torch.randn(4, 5, 3), torch.ones(4, 5)) is Reason.PADDED


@pytest.mark.parametrize("sign", [1, -1])
def test_sequence_that_begins_as_padding(sign: int) -> None:
    """The first element of each sequence may be what padding is, and the last: an example is looked at as a whole."""
    ids, x = torch.arange(32).view(4, 8) % 5 * sign, torch.zeros(4, 8)
    ids[:, :2] = ids[:, -1] = 0
    x[:, 0], x[:, 1] = 1, -1
    step = make(lambda x, ids: TABLE[ids].mean(1) + x[:, :1], dynamic={"x": DIMS, "ids": DIMS}, sizes=[4])
    step.prewarm(x, ids)
    assert reason(step, x[:, 1:6].clone(), ids[:, 1:6].clone()) is Reason.ROWS_MIX


@FIRST
@pytest.mark.parametrize("fn", LENGTHS.values(), ids=LENGTHS)
def test_length_in_python(fn: Callable[[torch.Tensor], torch.Tensor], first: tuple[int, int]) -> None:
    """A length for which Python takes another path than for the graph's runs eagerly; every answer is eager's."""
    step = tried(fn, first)
    others = (Reason.PATH_CHANGES, Reason.ROWS_MIX, Reason.PADDING_UNPROVEN)
    assert reason(step, torch.randn(4, 3, 3)) in others, step.last_decision


def test_place_beyond_real() -> None:
    """LIMIT: a place that counts from the end meets padding, where eager meets the last real element."""

    def fn(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return x[torch.arange(x.shape[0]), place]

    step = make(fn, dynamic={"x": DIMS, "place": {0: "batch"}}, sizes=[4])
    check_calls(step, *((torch.randn(3, 5, 2), torch.tensor([0, 4, 2])) for _ in range(4)), **NEAR)
    assert step.last_decision.reason is Reason.PADDED
    x = torch.ones(3, 5, 2)
    assert not torch.equal(step(x, torch.tensor([0, -1, 2])), fn(x, torch.tensor([0, -1, 2])))


@FIRST
@pytest.mark.parametrize(
    "fn",
    [lambda x: x[:, ::2] * 1, lambda x: torch.cat([x, x], 1), lambda x: x.reshape(-1, 3) * 2],
    ids=["every second", "twice", "with the batch"],
)
def test_output_size_of_length(fn: Callable[[torch.Tensor], torch.Tensor], first: tuple[int, int]) -> None:
    """An output that cannot be cut to a shorter sequence by its end: two lengths may even give one size."""
    step = tried(fn, first)
    assert reason(step, torch.randn(4, 5, 3)) is Reason.OUTPUT_ROWS_UNKNOWN
