"""What a run says, for which batches, and what it leaves behind."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from graphdispatch.backends.operators import keeps_elements, storage_key, tensors_in
from graphdispatch.errors import ConfigError
from graphdispatch.proof.rows.batches import BatchSpace
from graphdispatch.proof.rows.run import RowRun

from .runs import Batch, judge, tensors_of, watching

F = nn.functional
D = 6
WEIGHT = torch.randn(D, D, generator=torch.Generator().manual_seed(0))
_LSTM = nn.LSTM(D, 4, 2).eval()


def _rows(n: int) -> Batch:
    x = torch.randn(n, D)
    return (x,), {}, [(x, {0: 0})]


def _grid(n: int, s: int) -> Batch:
    x = torch.randn(n, s, D)
    return (x,), {}, [(x, {0: 0, 1: 1})]


def _of_four(n: int) -> Batch:
    x = torch.randn(n, 4, D)
    return (x,), {}, [(x, {0: 0})]


def _two_lengths(n: int, s: int, t: int) -> Batch:
    x, y = torch.randn(n, s, D), torch.randn(n, t, D)
    return (x, y), {}, [(x, {0: 0, 1: 1}), (y, {0: 0, 1: 2})]


def _watching() -> AbstractContextManager[None]:
    return watching(RowRun(BatchSpace([range(1, 9)], [7]), ()))


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
    args, kwargs, _ = make(*extents)
    with torch.no_grad(), Shapes() as shapes:
        fn(*args, **kwargs)
    return shapes.steps


# -- what is said


def test_a_fault_names_the_operator_and_the_line() -> None:
    """The verdict says where rows mix first."""
    verdict = judge(lambda x: x - x.mean(0), _rows)
    line = test_a_fault_names_the_operator_and_the_line.__code__.co_firstlineno + 2
    assert verdict.mixes == f"rows mix in aten::mean, test_run.py:{line}"
    assert verdict.unknown == ""


def test_an_operator_without_a_rule_is_named() -> None:
    """What only the user can know is no mix."""
    verdict = judge(lambda x: torch.linalg.qr(x)[0], _rows)
    assert verdict.mixes == ""
    assert verdict.unknown.startswith("no rule for aten::linalg_qr, called at test_run.py:")


def test_a_fault_and_an_unknown_are_both_said() -> None:
    """One output mixes, and another is unknown."""
    verdict = judge(lambda x: (x.cumsum(0), torch.linalg.qr(x)[0]), _rows)
    assert verdict.mixes
    assert verdict.unknown


def test_a_restriction_excludes_one_number_and_says_where() -> None:
    """``if n == 3`` leaves all other numbers."""
    verdict = judge(lambda x: x + 1 if x.shape[0] == 3 else x, _rows)
    assert [n for n in range(2, 65) if not verdict.speaks_for((n,))] == [3]
    assert verdict.why_not((3,)).startswith("Python decides by the number of rows (n == 3), test_run.py:")
    assert verdict.why_not((4,)) == ""


def test_a_run_with_the_other_outcome_speaks_for_it_alone() -> None:
    """A run on three rows speaks for three."""
    verdict = judge(lambda x: x + 1 if x.shape[0] == 3 else x, _rows, own=(3,))
    assert [n for n in range(1, 65) if verdict.speaks_for((n,))] == [3]


def test_one_row_takes_a_run_of_its_own() -> None:
    """A size of one broadcasts, so that no run on more rows speaks for it; and a batch beyond the space is unknown."""
    verdict = judge(lambda x: x @ WEIGHT, _rows)
    assert "a size of one broadcasts" in verdict.why_not((1,))
    assert "1 to 64" in verdict.why_not((65,))


def test_a_run_on_one_row_is_unknown() -> None:
    """Nothing mixes where there is one row, which says nothing of more."""
    assert "one row" in judge(lambda x: x - x.mean(0), _rows, own=(1,)).unknown


def test_an_extent_outside_of_the_space_is_refused() -> None:
    """The error names the argument and the remedy."""
    with pytest.raises(ConfigError, match=r"own\[0\] must be one of extents\[0\] = range\(1, 5\), got 7; add it there"):
        BatchSpace([range(1, 5)], [7])
    with pytest.raises(ConfigError, match="1 to 3 entries"):
        BatchSpace([], [])


def test_strides_that_are_set_in_place_are_unknown() -> None:
    """Afterwards the tensor is as the result, which says nothing of what it was."""
    verdict = judge(lambda x: torch.cat([x, x]).as_strided_((2 * x.shape[0], D), (5, 1)).chunk(2)[0] * 1, _rows)
    assert "(strides)" in verdict.unknown


# -- lengths


def test_a_length_that_meets_no_other_element_is_not_mixed() -> None:
    """A layer for each element leaves the length alone, and the output follows both axes."""
    verdict = judge(lambda x: (x @ WEIGHT).relu(), _grid, own=(7, 11))
    assert (verdict.independent, verdict.mixed_axes, verdict.outputs) == (True, frozenset(), (((0,), (1,), ()),))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: (x @ x.mT).softmax(-1) @ x,
        lambda x: x + x.mean(1, keepdim=True),
        lambda x: F.conv1d(x.mT, torch.ones(D, D, 3), padding=1).mT,
        lambda x: x.flip(1),
        lambda x: x[:, :1] + x,
        lambda x: x[:, torch.arange(x.shape[1]) // 2],
        lambda x: torch.cat([x[:, :1], x], 1)[:, : x.shape[1]],
        lambda x: F.pad(x, (0, 0, 1, 0))[:, : x.shape[1]],
        lambda x: x[:, :, None] + x[:, None, :],
        lambda x: x.unfold(1, 2, 1).sum(-1),
        lambda x: x.cumsum(1),
        lambda x: x.split([1, x.shape[1] - 1], 1)[0] + x,
        lambda x: x.unbind(1)[0][:, None] + x,
        lambda x: x.narrow(1, 1, 2).sum(1, keepdim=True) + x,
        lambda x: _LSTM(x.transpose(0, 1))[0].transpose(0, 1),
    ],
)
def test_a_length_along_which_elements_meet_is_mixed(fn: Callable[..., Any]) -> None:
    """Rows stay independent, and the length is named."""
    verdict = judge(fn, _grid, own=(7, 11))
    assert (verdict.independent, verdict.mixed_axes) == (True, {1})


def test_each_length_is_mixed_or_not_by_itself() -> None:
    """Attention over the second length mixes that one alone."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.mT).softmax(-1) @ y + x

    verdict = judge(fn, _two_lengths, own=(7, 11, 5))
    assert (verdict.mixed_axes, verdict.outputs) == ({2}, (((0,), (1,), ()),))


def test_a_restriction_may_join_rows_and_a_length() -> None:
    """A decision by the number of elements excludes the batches with that product, and no others."""
    verdict = judge(lambda x: x + 1 if x.shape[0] * x.shape[1] == 24 else x, _grid, own=(7, 11))
    assert not verdict.speaks_for((4, 6))
    assert verdict.speaks_for((4, 7))


def test_a_restriction_of_one_axis_keeps_no_grid() -> None:
    """A decision by a length is kept for the lengths alone."""
    verdict = judge(lambda x: x + 1 if x.shape[1] > 20 else x, _grid, own=(7, 11))
    assert [one.mask.shape for one in verdict.space.restrictions] == [(1, 48)]


def test_as_many_as_the_length_are_no_length() -> None:
    """That the largest elements are as many as there are is chance."""
    verdict = judge(lambda x: x.topk(5, 1).values, _grid, own=(7, 5))
    assert verdict.speaks_for((3, 5))
    assert not any(verdict.speaks_for((3, length)) for length in (2, 4, 6))


def test_numbers_of_places_bind_the_length_within() -> None:
    """The place of an element in the flat batch follows the length, which no label tells."""
    verdict = judge(lambda x: x + torch.arange(x.shape[0] * x.shape[1]).view(*x.shape[:2], 1), _grid, own=(7, 11))
    assert verdict.speaks_for((9, 11))
    assert not verdict.speaks_for((9, 12))


def test_an_output_that_repeats_the_length_is_unknown() -> None:
    """Nobody can cut padding out of two lengths one behind the other by their end."""
    verdict = judge(lambda x: torch.cat([x, x], 1), _grid, own=(7, 11))
    assert verdict.outputs == (None,)
    assert verdict.uncut == {1: "dimension 1 of output 0 holds each length in several places"}


@pytest.mark.parametrize(
    "fn",
    [lambda x: x[:, ::2], lambda x: x.unfold(1, 3, 1), lambda x: F.conv1d(x.mT, torch.ones(D, D, 1), padding=1).mT],
)
def test_an_output_of_another_size_than_the_length_is_unknown(fn: Callable[[Tensor], Tensor]) -> None:
    """A size that follows the length in another way than by a factor: some lengths may share it."""
    verdict = judge(fn, _grid, own=(7, 11))
    assert verdict.outputs == (None,)
    assert verdict.uncut == {1: "the size of dimension 1 of output 0 is no multiple of the length"}


def test_rows_in_several_places_of_an_output_are_refused() -> None:
    """A doubled batch as the answer has padding between its halves."""
    assert "several places" in judge(lambda x: torch.cat([x, x]), _rows).unknown


def test_a_length_beside_the_rows_mixes() -> None:
    """Where both are equally long, an element of the length stands beside each row."""
    verdict = judge(lambda x: torch.where(x == x, x.mT, x).amax(1), _square, own=(7, 7))
    assert "rows beside a length" in verdict.mixes


def _square(n: int, s: int) -> Batch:
    x = torch.randn(n, s)
    return (x,), {}, [(x, {0: 0, 1: 1})]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_unknown() -> None:
    """Torch tells no shape of one, so that no rule can follow it; the run itself goes on."""
    verdict = judge(lambda x: torch.nested.as_nested_tensor(list(x)).to_padded_tensor(0.0), _rows)
    assert not verdict.independent


# -- another batch's operators


def _heads(x: Tensor) -> Tensor:
    n, s, _ = x.shape
    return (x @ WEIGHT).view(n, s, 2, 3).transpose(1, 2).reshape(n * 2, s, 3).softmax(-1).view(n, 2, s, 3)


def _image(x: Tensor) -> Tensor:
    return x[:, None]


SIZED: dict[str, Callable[[Tensor], Any]] = {
    "heads": _heads,
    "heads that share keys": lambda x: F.scaled_dot_product_attention(
        x[:, None].expand(-1, 4, -1, -1),
        x[:, None].expand(-1, 2, -1, -1),
        x[:, None].expand(-1, 2, -1, -1),
        enable_gqa=True,
    ),
    "convolution": lambda x: F.conv1d(x.mT, torch.ones(4, D, 3), stride=2, padding=2, dilation=2),
    "convolution of an image": lambda x: F.conv2d(
        _image(x), torch.ones(4, 1, 3, 2), stride=(2, 1), padding=(3, 1), dilation=(2, 3)
    ),
    "transposed": lambda x: F.conv_transpose1d(
        x.mT, torch.ones(D, 4, 3), stride=3, padding=1, output_padding=2, dilation=2
    ),
    "transposed image": lambda x: F.conv_transpose2d(
        _image(x), torch.ones(1, 4, 3, 2), stride=(3, 1), padding=(1, 0), output_padding=(2, 0)
    ),
    "every second": lambda x: x[:, ::2],
    "the inner ones": lambda x: x[:, 1:-1] * 2,
    "all but the last": lambda x: x[:, 2:-1:3] * 2,
    "beyond the end": lambda x: x[:, :100] * 2,
    "halves of rows": lambda x: torch.cat([x, x]).chunk(2),
    "windows": lambda x: x.unfold(1, 3, 2) * 2,
    "diagonal": lambda x: (x @ x.mT).diagonal(0, 1, 2) * 2,
    "half as wide": lambda x: x.view(torch.int16).float(),
    "time first": lambda x: _LSTM(x.transpose(0, 1))[0],
    "picked": lambda x: x.gather(1, torch.zeros(x.shape[0], 2, D, dtype=torch.long)),
    "some elements": lambda x: x.index_select(1, torch.tensor([0, 1])),
    "by place": lambda x: x[:, torch.arange(x.shape[1])],
}


@pytest.mark.parametrize("extents", [(7, 11), (2, 3), (64, 48), (9, 16)])
@pytest.mark.parametrize("name", SIZED)
def test_the_operators_of_another_batch_have_the_shapes_of_the_labels(name: str, extents: tuple[int, int]) -> None:
    """A plain run of any batch is the run that the labels tell of."""
    fn = SIZED[name]
    verdict = judge(fn, _grid, own=(7, 11))
    assert verdict.unknown == ""
    assert verdict.speaks_for((9, 16))
    assert verdict.has_shapes(_shapes(fn, _grid, *extents), extents) or not verdict.speaks_for(extents)


def test_a_label_that_was_right_by_chance_shows_in_another_batch() -> None:
    """Seven literal elements beside seven rows are others in a batch of nine, and so are other operators."""
    verdict = judge(lambda x: (x * 2, torch.zeros(7)), _rows)
    assert verdict.has_shapes(_shapes(lambda x: (x * 2, torch.zeros(7)), _rows, 9), (9,))
    assert not verdict.has_shapes(_shapes(lambda x: (x * 2, torch.zeros(9)), _rows, 9), (9,))
    assert not verdict.has_shapes(_shapes(lambda x: (x + 2, torch.zeros(7)), _rows, 9), (9,))
    assert not verdict.has_shapes(_shapes(lambda x: x * 2, _rows, 9), (9,))
    assert not verdict.has_shapes(_shapes(lambda x: (x * 2, torch.zeros(7)), _rows, 9), (10,))


def test_a_map_over_rows_is_named() -> None:
    """A transform hands the number of rows to C++; what it does to them only the user can say."""
    verdict = judge(lambda x: torch.func.vmap(lambda row: row - row.mean())(x), _rows)
    assert verdict.unknown.startswith("a transform of torch.func maps over rows, test_run.py:")


# -- numbers that C++ reads


@pytest.mark.parametrize(
    "read",
    [
        lambda number: WEIGHT[number],
        lambda number: WEIGHT[number:].sum(0),
        lambda number: torch.full((1,), number),
        lambda number: torch.add(WEIGHT[0], WEIGHT[1], alpha=number),
    ],
)
@pytest.mark.parametrize(
    "number", [lambda x: x.sum(0).argmax(), lambda x: torch.histc(x.argmax(-1).float(), D, 0, D - 1).argmax()]
)
def test_a_number_of_all_rows_that_torch_reads_by_itself_is_no_plain_number(
    read: Callable[[Tensor], Tensor], number: Callable[[Tensor], Tensor]
) -> None:
    """What such a number chooses has no label, and follows all rows."""
    verdict = judge(lambda x: x + read(number(x)), _rows)
    assert "data to the host" in verdict.unknown


@pytest.mark.parametrize(
    "size",
    [
        lambda x: len(torch.unique(x[:, 0] > 0)),
        lambda x: x[x[:, 0] > 0].shape[0],
        lambda x: x[x > 0].numel(),
        lambda x: x[x[:, 0] > 0].nbytes,
        lambda x: sum(1 for _ in x[x[:, 0] > 0]),
        lambda x: len(x[x > 0].split(3)),
        lambda x: x.mean(0).nonzero().size(0),
    ],
)
def test_a_size_that_follows_data_is_unknown(size: Callable[[Tensor], int]) -> None:
    """It is a number of Python, which no label follows."""
    verdict = judge(lambda x: x * size(x), _rows)
    assert "a size that may follow data" in verdict.unknown


# -- state and memory


def test_a_write_to_state_is_noted() -> None:
    """A counter that no row changes leaves rows independent."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.steps.add_(1)
            return x * 2

    verdict = judge(Steps(), _rows)
    assert verdict.independent
    assert verdict.writes_state
    assert not judge(lambda x: x * 2, _rows).writes_state


def test_a_tensor_from_elsewhere_is_unknown() -> None:
    """Memory that the callable does not reach may hold anything of other rows."""
    x, far = torch.randn(7, D), torch.randn(7, D)
    run = RowRun(BatchSpace([range(1, 9)], [7]), {storage_key(x)})
    run.follow(x, {0: 0})
    with watching(run):
        out = x + far
    assert "aten::add reads a tensor from nowhere" in run.verdict([out]).unknown
    assert "no operator made" in RowRun(BatchSpace([range(1, 9)], [7]), ()).verdict([far]).unknown


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_verdict_is_the_same_in_each_mode(mode: Callable[[], Any]) -> None:
    """Operators that torch hands over as a whole in inference mode are followed through their parts."""
    layer = nn.TransformerEncoderLayer(D, 2, 8, batch_first=True).eval()
    with mode():
        verdict = judge(lambda x: layer(x).reshape(x.shape[0], -1), _of_four)
        mixed = judge(lambda x: F.batch_norm(x.flatten(0, 1), None, None, training=True), _of_four)
    assert verdict.independent
    assert "aten::native_batch_norm" in mixed.mixes


def test_nothing_is_left_of_a_run_that_raises() -> None:
    """Labels, modes, scripts and gradients are as before."""
    x, call, has_gradients = torch.randn(7, D), torch._C.ScriptFunction.__call__, torch.is_grad_enabled()
    run = RowRun(BatchSpace([range(1, 9)], [7]), {storage_key(x)})
    run.follow(x, {0: 0})
    with pytest.raises(ValueError, match="mine"), watching(run):
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

    x, done = torch.randn(7, D), []
    run = RowRun(BatchSpace([range(1, 9)], [7]), {storage_key(x)})
    run.follow(x, {0: 0})
    with watching(run):
        worker = threading.Thread(target=lambda: done.append(double(torch.ones(3)).mean(0).item()))
        worker.start()
        worker.join()
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


def test_a_compiled_function_is_followed_as_it_is_written() -> None:
    """Its operators are seen, and so is where rows mix."""
    compiled = torch.compile(lambda x: x - x.mean(0), backend="eager")
    assert "aten::mean" in judge(compiled, _rows).mixes
    assert judge(torch.compile(lambda x: x * 2, backend="eager"), _rows).independent


def test_the_answer_of_the_run_is_that_of_the_callable() -> None:
    """Numbers made of sizes change no bit of it."""
    x = torch.randn(7, D)
    run = RowRun(BatchSpace([range(1, 65)], [7]), {storage_key(x), storage_key(WEIGHT)})
    run.follow(x, {0: 0})

    def fn(x: Tensor) -> Tensor:
        return (x @ WEIGHT).view(x.shape[0], 2, -1) * x.shape[0] ** 0.5 / max(x.shape[0], 3) + torch.ones(len(x), 2, 1)

    with watching(run):
        out = fn(x)
    assert torch.equal(out, fn(x))
    assert len(tensors_of(out)) == 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: torch.zeros(4).index_fill(0, i, 1.0) + x.sum((1, 2))[:, None],
        lambda x, i: torch.zeros(4).index_put((i,), torch.ones(())) + x.sum((1, 2))[:, None],
        lambda x, i: torch.zeros(4).scatter(0, i, 1.0) + x.sum((1, 2))[:, None],
    ],
)
def test_a_length_that_names_places_to_write_is_mixed(fn: Callable[..., Any]) -> None:
    """Two elements of a length may name one place, and the result has the length no more."""

    def make(n: int, s: int, t: int) -> Batch:
        x, i = torch.randn(n, s, D), torch.randint(0, 4, (t,))
        return (x, i), {}, [(x, {0: 0, 1: 1}), (i, {0: 2})]

    assert judge(fn, make, own=(7, 11, 5)).mixed_axes == {1, 2}


@pytest.mark.parametrize("write", [lambda y, x: y[:, : x.shape[1]].copy_(x), lambda y, x: y[:, : x.shape[1]].add_(x)])
def test_a_length_written_into_a_longer_one_is_mixed(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The longer tensor holds elements of the length, and has a size that is none of its."""

    def fn(x: Tensor) -> Tensor:
        y = torch.zeros(x.shape[0], 48, D)
        write(y, x)
        return y

    verdict = judge(fn, _grid, own=(7, 11))
    assert verdict.mixes == ""
    assert verdict.mixed_axes == {1}
