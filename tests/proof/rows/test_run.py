"""What a run says, for which batches, and what it leaves behind."""

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from graphdispatch.backends.operators import keeps_elements, storage_key, tensors_in
from graphdispatch.proof.rows.batches import BatchSpace
from graphdispatch.proof.rows.run import RowRun

from ...helpers import in_threads
from .independent import FIXED, mixture
from .runs import Batch, D, grid, judge, rows, sequences, watching

F = nn.functional
WEIGHT = torch.randn(D, D, generator=torch.Generator().manual_seed(0))
_LSTM = nn.LSTM(D, 4, 2).eval()


class _Part(Tensor):
    """A class of tensors."""


PART = WEIGHT.as_subclass(_Part)


def _two_lengths(n: int, s: int, t: int) -> Batch:
    x, y = torch.randn(n, s, D), torch.randn(n, t, D)
    return (x, y), [(x, {0: 0, 1: 1}), (y, {0: 0, 1: 2})]


def _watching() -> AbstractContextManager[None]:
    return watching(RowRun(BatchSpace([range(1, 9)], [7]), ()))


def _run_on(*tensors: Tensor) -> RowRun:
    """A run of seven rows in the first of the tensors that it reaches."""
    run = RowRun(BatchSpace([range(1, 65)], [7]), {*map(storage_key, tensors)})
    run.follow(tensors[0], {0: 0})
    return run


class Shapes(TorchDispatchMode):
    """The operators of a plain run, and the shapes of what they take and give."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[OpOverload, tuple[tuple[int, ...], ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = [tuple(t.shape) for t in tensors_in(args, kwargs or {})]
        out = func(*args, **(kwargs or {}))
        if not keeps_elements(func):
            self.steps.append((func, (*taken, *(tuple(t.shape) for t in tensors_in(out)))))
        return out


def _shapes(fn: Callable[..., Any], make: Callable[..., Batch], *extents: int) -> Any:
    args, _ = make(*extents)
    with torch.no_grad(), Shapes() as shapes:
        fn(*args)
    return shapes.steps


# -- what is said

_LAYER = nn.TransformerEncoderLayer(D, 2, 8, batch_first=True).eval()
_NO_RULE = "no rule for aten::linalg_qr, called at test_run.py:"
SAID: dict[str, tuple[Callable[[Tensor], Any], str, str]] = {
    "a fault": (lambda x: x - x.mean(0), "rows mix in aten::mean, test_run.py:", ""),
    "a fault of compiled code": (torch.compile(lambda x: x - x.mean(0), backend="eager"), "rows mix in aten::mean", ""),
    "an order of all rows": (lambda x: x[x[:, 0].argsort()] * 2, "output 0 has its rows in an order that depends", ""),
    "no rule": (lambda x: torch.linalg.qr(x)[0], "", _NO_RULE),
    "both, of two outputs": (lambda x: (x.cumsum(0), torch.linalg.qr(x)[0]), "rows mix in aten::cumsum", _NO_RULE),
    "a map": (
        lambda x: torch.func.vmap(lambda row: row - row.mean())(x),
        "",
        "a transform of torch.func maps over rows, test_run.py:",
    ),
    "strides set in place": (
        lambda x: torch.cat([x, x]).as_strided_((2 * x.shape[0], D), (5, 1)).chunk(2)[0] * 1,
        "",
        "Python reads a size that may follow data: the rule of aten::as_strided_ cannot tell (strides)",
    ),
    "rows twice": (lambda x: x @ x.t(), "a tensor has the rows along two dimensions, test_run.py:", ""),
    "rows in two places": (lambda x: torch.cat([x, x]), "", "output 0 has each row in several places; return"),
}
"""What it says of a program: where rows mix first, and what only the user can know."""


@pytest.mark.parametrize("name", SAID)
def test_a_verdict_names_the_operator_and_the_line(name: str) -> None:
    """The verdict says where rows mix first, and of which operator no rule tells."""
    fn, mixes, unknown = SAID[name]
    verdict = judge(fn)
    assert verdict.mixes.startswith(mixes)
    assert verdict.unknown.startswith(unknown)
    assert (bool(verdict.mixes), bool(verdict.unknown)) == (bool(mixes), bool(unknown))


READS: list[Callable[[Any], Tensor]] = [
    lambda number: WEIGHT[number],
    lambda number: WEIGHT[number:].sum(0),
    lambda number: torch.full((1,), number),
    lambda number: torch.add(WEIGHT[0], WEIGHT[1], alpha=number),
]
NUMBERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.sum(0).argmax(),
    lambda x: torch.histc(x.argmax(-1).float(), D, 0, D - 1).argmax(),
]


@pytest.mark.parametrize(("read", "number"), [*product(READS, NUMBERS)])
def test_a_number_of_all_rows_that_torch_reads_by_itself_is_no_plain_number(
    read: Callable[[Any], Tensor], number: Callable[[Tensor], Tensor]
) -> None:
    """What such a number chooses has no label, and follows all rows."""
    assert "data to the host" in judge(lambda x: x + read(number(x))).unknown


@pytest.mark.parametrize(
    "size",
    [
        lambda x: len(torch.unique(x[:, 0] > 0)),
        lambda x: x[x[:, 0] > 0].shape[0],
        lambda x: x[x > 0].numel(),
        lambda x: sum(1 for _ in x[x[:, 0] > 0]),
        lambda x: len(x[x > 0].split(3)),
        lambda x: x.mean(0).nonzero().size(0),
    ],
)
def test_a_size_that_follows_data_is_unknown(size: Callable[[Tensor], int]) -> None:
    """It is a number of Python, which no label follows."""
    assert "a size that may follow data" in judge(lambda x: x * size(x)).unknown


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_unknown() -> None:
    """Torch tells no shape of one, so that no rule can follow it; the run itself goes on."""
    assert not judge(lambda x: torch.nested.as_nested_tensor(list(x)).to_padded_tensor(0.0)).independent


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_verdict_is_the_same_in_each_mode(mode: Callable[[], Any]) -> None:
    """Operators that torch hands over as a whole in inference mode are followed through their parts."""
    with mode():
        verdict = judge(lambda x: _LAYER(x).reshape(x.shape[0], -1), sequences)
        mixed = judge(lambda x: F.batch_norm(x.flatten(0, 1), None, None, training=True), sequences)
    assert verdict.independent
    assert "aten::native_batch_norm" in mixed.mixes


# -- for which batches


def test_a_restriction_excludes_one_number_and_says_where() -> None:
    """``if n == 3`` leaves all other numbers; a run on three rows speaks for three. A batch beyond the space is
    unknown, and so is one of a single row, whose size broadcasts."""
    fn = lambda x: x + 1 if x.shape[0] == 3 else x  # noqa: E731
    verdict = judge(fn)
    assert [n for n in range(2, 65) if (n,) not in verdict.space] == [3]
    assert verdict.space.why_not((3,)).startswith("Python decides by the number of rows (n == 3), test_run.py:")
    assert verdict.space.why_not((4,)) == ""
    assert "a size of one broadcasts" in verdict.space.why_not((1,))
    assert "1 to 64" in verdict.space.why_not((65,))
    verdict = judge(fn, own=(3,))
    assert [n for n in range(1, 65) if (n,) in verdict.space] == [3]


def test_a_run_on_one_row_is_unknown() -> None:
    """Nothing mixes where there is one row, which says nothing of more."""
    assert "one row" in judge(lambda x: x - x.mean(0), own=(1,)).unknown


SPOKEN: dict[str, tuple[Callable[[Tensor], Any], list[tuple[int, int]], list[tuple[int, int]]]] = {
    "a product of both": (lambda x: x + 1 if x.shape[0] * x.shape[1] == 24 else x, [(4, 7)], [(4, 6)]),
    "a length": (lambda x: x + 1 if x.shape[1] > 20 else x, [(4, 20), (64, 2)], [(4, 21), (64, 48)]),
    "as many of the largest": (lambda x: x.topk(11, 1).values, [(3, 11)], [(3, 10), (3, 12), (3, 4)]),
    "places in the flat batch": (
        lambda x: x + torch.arange(x.shape[0] * x.shape[1]).view(*x.shape[:2], 1),
        [(9, 11)],
        [(9, 12)],
    ),
    "fixed places": (lambda x: x[:, FIXED], [(9, 5)], [(9, 4)]),
    "a fixed place": (lambda x: x[:, 3], [(9, 4)], [(9, 3)]),
    "a fixed place from the end": (lambda x: x[:, -3], [(9, 3)], [(9, 2)]),
    "a place of each row": (
        lambda x: x[torch.arange(x.shape[0]), (x[:, 0, 0] > 99).long() + 6],
        [(9, 4)],
        [],
    ),
    "experts of tokens": (lambda x: mixture(x.flatten(0, 1)).view_as(x), [(9, 11), (9, 12)], []),
}
"""For which batches of rows and a length a run on 7 x 11 speaks, and for which it does not."""


@pytest.mark.parametrize("name", SPOKEN)
def test_a_run_speaks_for_the_batches_of_its_path(name: str) -> None:
    """A decision excludes the batches with another outcome alone, and so does what no label tells of other lengths."""
    fn, spoken_for, others = SPOKEN[name]
    verdict = judge(fn, grid, own=(7, 11))
    assert verdict.independent
    assert all(extents in verdict.space for extents in spoken_for)
    assert not any(extents in verdict.space for extents in others)


# -- lengths


def _into_longer(write: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """A program that writes the length into a longer one."""

    def fn(x: Tensor) -> Tensor:
        y = torch.zeros(x.shape[0], 48, D)
        write(y[:, : x.shape[1]], x)
        return y

    return fn


MEETING: dict[str, Callable[[Tensor], Any]] = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "a product": lambda x: (x @ x.mT).softmax(-1) @ x,
    "a convolution": lambda x: F.conv1d(x.mT, torch.ones(D, D, 3), padding=1).mT,
    "shifted": lambda x: torch.cat([x[:, :1], x], 1)[:, : x.shape[1]],
    "padded": lambda x: F.pad(x, (0, 0, 1, 0))[:, : x.shape[1]],
    "each with each": lambda x: x[:, :, None] + x[:, None, :],
    "windows": lambda x: x.unfold(1, 2, 1).sum(-1),
    "a running sum": lambda x: x.cumsum(1),
    "a part": lambda x: x.split([1, x.shape[1] - 1], 1)[0] + x,
    "one of all": lambda x: x.unbind(1)[0][:, None] + x,
    "time": lambda x: _LSTM(x.transpose(0, 1))[0].transpose(0, 1),
    "fixed places selected": lambda x: x.index_select(1, FIXED),
    "fixed places": lambda x: x[:, FIXED],
    "a fixed place gathered": lambda x: x.gather(1, torch.zeros(x.shape[0], 1, D, dtype=torch.long)),
    "one line for all": lambda x: x.gather(2, torch.zeros(x.shape[0], 1, D, dtype=torch.long)),
    "behind another": lambda x: torch.cat([torch.zeros(x.shape[0], 1, D), x], 1),
    "a fixed place scattered": lambda x: x.scatter(1, torch.zeros(x.shape[0], 1, D, dtype=torch.long), 1.0),
    "copied into a longer one": _into_longer(lambda y, x: y.copy_(x)),
}


@pytest.mark.parametrize("name", MEETING)
def test_a_length_along_which_elements_meet_is_mixed(name: str) -> None:
    """Rows stay independent, and the length is named: an element meets another, or one at a place that is another
    element's for another length."""
    verdict = judge(MEETING[name], grid, own=(7, 11))
    assert (verdict.independent, verdict.mixed_axes) == (True, {1})


def test_each_length_is_mixed_or_not_by_itself() -> None:
    """Attention over the second length mixes that one alone."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.mT).softmax(-1) @ y + x

    verdict = judge(fn, _two_lengths, own=(7, 11, 5))
    assert (verdict.mixed_axes, verdict.outputs) == ({2}, (((0,), (1,), ()),))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: torch.zeros(4).index_fill(0, i, 1.0) + x.sum((1, 2))[:, None],
        lambda x, i: torch.zeros(4).index_put((i,), torch.ones(())) + x.sum((1, 2))[:, None],
        lambda x, i: torch.zeros(4).scatter(0, i, 1.0) + x.sum((1, 2))[:, None],
        lambda x, i: (torch.renorm(i[:, None] / 2, 2, 0, 1.0), x.sum((1, 2)))[1],
    ],
)
def test_a_length_that_names_places_or_has_no_rule_is_mixed(fn: Callable[..., Any]) -> None:
    """Two elements of a length may name one place, or meet, and the result has the length no more."""

    def make(n: int, s: int, t: int) -> Batch:
        x, i = torch.randn(n, s, D), torch.randint(0, 4, (t,))
        return (x, i), [(x, {0: 0, 1: 1}), (i, {0: 2})]

    assert judge(fn, make, own=(7, 11, 5)).mixed_axes == {1, 2}


_NO_MULTIPLE = "the size of dimension 1 of output 0 is no multiple of the length"
UNCUT: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "twice": (lambda x: torch.cat([x, x], 1), "dimension 1 of output 0 holds each length in several places"),
    "half": (lambda x: x[:, ::2], _NO_MULTIPLE),
    "windows": (lambda x: x.unfold(1, 3, 1), _NO_MULTIPLE),
    "a longer one": (lambda x: F.conv1d(x.mT, torch.ones(D, D, 1), padding=1).mT, _NO_MULTIPLE),
}


@pytest.mark.parametrize("name", UNCUT)
def test_an_output_that_cannot_be_cut_is_unknown(name: str) -> None:
    """Nobody can cut padding out of two lengths one behind the other by their end, nor out of a size that follows the
    length in another way than by a factor: some lengths may share it."""
    fn, why = UNCUT[name]
    verdict = judge(fn, grid, own=(7, 11))
    assert (verdict.outputs, verdict.uncut) == ((None,), {1: why})


def test_a_length_beside_the_rows_mixes() -> None:
    """Where both are equally long, an element of the length stands beside each row."""

    def square(n: int, s: int) -> Batch:
        x = torch.randn(n, s)
        return (x,), [(x, {0: 0, 1: 1})]

    assert "rows beside a length" in judge(lambda x: torch.where(x == x, x.mT, x).amax(1), square, own=(7, 7)).mixes


# -- another batch's operators


def _heads(x: Tensor) -> Tensor:
    n, s, _ = x.shape
    return (x @ WEIGHT).view(n, s, 2, 4).transpose(1, 2).reshape(n * 2, s, 4).softmax(-1).view(n, 2, s, 4)


def _image(x: Tensor) -> Tensor:
    return x[:, None]


SIZED: dict[str, Callable[[Tensor], Any]] = {
    "heads": _heads,
    "convolution": lambda x: F.conv1d(x.mT, torch.ones(4, D, 3), stride=2, padding=2, dilation=2),
    "convolution by one number for both lengths": lambda x: torch.convolution(
        _image(x), torch.ones(4, 1, 3, 2), None, [2], [1], [1], False, [0], 1
    ),
    "transposed": lambda x: F.conv_transpose1d(
        x.mT, torch.ones(D, 4, 3), stride=3, padding=1, output_padding=2, dilation=2
    ),
    "transposed image": lambda x: F.conv_transpose2d(
        _image(x), torch.ones(1, 4, 3, 2), stride=(3, 1), padding=(1, 0), output_padding=(2, 0)
    ),
    "windows": lambda x: x.unfold(1, 3, 2) * 2,
    "every second": lambda x: x[:, ::2],
    "the inner ones": lambda x: x[:, 1:-1] * 2,
    "halves of rows": lambda x: torch.cat([x, x]).chunk(2),
    "half as wide": lambda x: x.view(torch.int16).float(),
    "time first": lambda x: _LSTM(x.transpose(0, 1))[0],
    "picked": lambda x: x.gather(1, torch.zeros(x.shape[0], 2, D, dtype=torch.long)),
    "by place": lambda x: x[:, torch.arange(x.shape[1])],
}


@pytest.mark.parametrize("extents", [(7, 11), (2, 3), (64, 48), (9, 16)])
@pytest.mark.parametrize("name", SIZED)
def test_the_operators_of_another_batch_have_the_shapes_of_the_labels(name: str, extents: tuple[int, int]) -> None:
    """A plain run of any batch is the run that the labels tell of."""
    fn = SIZED[name]
    verdict = judge(fn, grid, own=(7, 11))
    assert verdict.unknown == ""
    assert (9, 16) in verdict.space
    assert verdict.has_shapes(_shapes(fn, grid, *extents), extents) or extents not in verdict.space


def test_a_label_that_was_right_by_chance_shows_in_another_batch() -> None:
    """Seven literal elements beside seven rows are others in a batch of nine, and so are other operators."""
    verdict = judge(lambda x: (x * 2, torch.zeros(7)))
    assert verdict.has_shapes(_shapes(lambda x: (x * 2, torch.zeros(7)), rows, 9), (9,))
    assert not verdict.has_shapes(_shapes(lambda x: (x * 2, torch.zeros(9)), rows, 9), (9,))
    assert not verdict.has_shapes(_shapes(lambda x: (x + 2, torch.zeros(7)), rows, 9), (9,))
    assert not verdict.has_shapes(_shapes(lambda x: x * 2, rows, 9), (9,))
    assert not verdict.has_shapes(_shapes(lambda x: (x * 2, torch.zeros(7)), rows, 9), (10,))


# -- state and memory


def test_a_tensor_from_elsewhere_is_unknown() -> None:
    """Memory that the callable does not reach may hold anything of other rows."""
    x, far = torch.randn(7, D), torch.randn(7, D)
    run = _run_on(x)
    with watching(run):
        out = x + far
    assert "aten::add reads a tensor from nowhere" in run.verdict([out]).unknown
    assert "no operator made" in _run_on(x).verdict([far]).unknown


def test_nothing_is_left_of_a_run_that_raises() -> None:
    """Labels, modes, scripts and gradients are as before."""
    x, call, has_gradients = torch.randn(7, D), torch._C.ScriptFunction.__call__, torch.is_grad_enabled()
    with pytest.raises(ValueError, match="mine"), watching(_run_on(x)):
        raise ValueError("mine")
    assert torch._C.ScriptFunction.__call__ is call
    assert torch.is_grad_enabled() == has_gradients
    assert not torch._C._len_torch_dispatch_stack()
    assert not torch._C._len_torch_function_stack()
    assert not vars(x)


def test_other_threads_are_not_followed() -> None:
    """A script that another thread calls during a run, and what it computes, are none of the run's business."""

    @torch.jit.script
    def double(x: Tensor) -> Tensor:
        return x * 2

    x = torch.randn(7, D)
    run = _run_on(x)
    with watching(run):
        done = in_threads(lambda: double(torch.ones(3)).mean(0).item())
        out = x * 2
    assert done == [2.0]
    assert run.verdict([out]).independent
    assert len(run.verdict([out]).steps) == 1


def test_two_runs_at_once_restore_what_both_changed() -> None:
    """Threads that enter and leave in turn leave torch as it was."""
    call, first, second = torch._C.ScriptFunction.__call__, threading.Event(), threading.Event()
    with _watching():

        def other() -> None:
            with _watching():
                first.set()
                second.wait(60)

        worker = threading.Thread(target=other)
        worker.start()
        assert first.wait(60)
    assert torch._C.ScriptFunction.__call__ is not call
    second.set()
    worker.join()
    assert torch._C.ScriptFunction.__call__ is call


def test_no_cache_keeps_a_number_of_the_run() -> None:
    """A shape made of sizes, as einops makes it: by a cache where they can be keys, else without it. What the run
    computes with must not come out of the cache later."""

    @lru_cache(maxsize=64)
    def halves(rows: int, width: int) -> tuple[int, int, int]:
        return rows, 2, width // 2

    def tried(x: Tensor) -> Tensor:
        try:
            shape = halves(*x.shape)
        except TypeError:
            shape = halves.__wrapped__(*x.shape)
        return x.reshape(shape).relu()

    assert judge(tried).independent
    assert (9,) in judge(tried).space
    assert halves.cache_info().currsize == 0


AS_PLAIN: list[Callable[[Any], Any]] = [
    *(lambda n: f"{n:03d}", lambda n: f"{n / 2:.2f}", lambda n: round(n / 3, 1), lambda n: {7: "seven"}[n]),
    *(lambda n: copy.deepcopy([n]), lambda n: (n.real, n.imag, n.bit_length()), lambda n: (+n, -n, ~n, abs(-n))),
    *(lambda n: torch.overrides.has_torch_function((WEIGHT,)), lambda n: torch.overrides.has_torch_function((PART,))),
    *(lambda n: divmod(n, 3), lambda n: divmod(30, n), lambda n: pow(n, 2, 5), lambda n: (n / 2).is_integer()),
]


@pytest.mark.parametrize("of", AS_PLAIN)
def test_python_gets_of_a_size_what_it_gets_of_a_plain_number(of: Callable[[Any], Any]) -> None:
    """Whatever it does with it, and in the same classes."""
    x, expected = torch.randn(7, D), of(7)
    with watching(_run_on(x)):
        got = of(x.shape[0])
        assert got == expected
        assert str(got) == str(expected)


def test_the_answer_of_the_run_is_that_of_the_callable() -> None:
    """Numbers made of sizes change no bit of it."""
    x = torch.randn(7, D)

    def fn(x: Tensor) -> Tensor:
        return (x @ WEIGHT).view(x.shape[0], 2, -1) * x.shape[0] ** 0.5 / max(x.shape[0], 3) + torch.ones(len(x), 2, 1)

    with watching(_run_on(x, WEIGHT)):
        out = fn(x)
    assert torch.equal(out, fn(x))
