"""The CPU backend's graphs: what is recorded, replayed against which memory, and refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._decomp  # which gives operators other parts, in Python

from graphdispatch import Reason
from graphdispatch.backends.cpu import recorder
from graphdispatch.backends.cpu.recorder import Recorder, choose_kernel
from graphdispatch.errors import CaptureError, ReplayError

from ..helpers import compiled_operator, follows, recorded


def test_what_need_not_run_is_not_replayed() -> None:
    """A view is no call of the graph; a pure operator of literals alone is none."""
    assert len(follows(lambda x: x.t()[1:].unsqueeze(0) * 2, 4, 6).steps) == 1
    assert len(follows(lambda x: x + torch.tensor([1.0, 2.0]).exp().sum(), 4, 6).steps) == 1


@pytest.mark.parametrize("batch_first", [False, True])
def test_operands_that_are_one_tensor_stay_one(batch_first: bool) -> None:
    """A kernel of attention looks whether queries and keys are one tensor, and multiplies otherwise then."""
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=batch_first).eval()
    for _ in range(3):
        follows(lambda x: attention(x, x, x)[0], 4, 5, 8)  # type: ignore[no-any-return]


def test_an_operator_has_the_parts_that_eager_runs() -> None:
    """Under inference mode, too: not those of a decomposition that torch keeps for its compiler."""
    model, x = torch.nn.GRU(8, 8).eval(), torch.randn(5, 4, 8)

    def operators() -> list[Any]:
        mode = Recorder()
        with mode:
            model(x)
        return [instruction.func for instruction in mode.pause().program]

    with torch.no_grad():
        expected = operators()
    with torch.inference_mode():
        assert operators() == expected


OTHER = torch.ones(4, 4)


@pytest.mark.parametrize(
    ("fn", "tested"),
    [
        (lambda x: x.add(1.0).add(1.0).add(1.0), 1),
        (lambda x: x.add(0.0).add(-0.0), 2),
        (lambda x: x.mul(1).mul(1.0), 2),
        (lambda x: x.add(1.0).t().add(1.0), 2),
        (lambda x: x.double().add(1.0).float().add(1.0), 4),
        (lambda x: x.add(OTHER).add(x).add(OTHER), 1),
        (lambda x: x.add(OTHER, alpha=2).add(OTHER, alpha=3), 2),
        (lambda x: x.mul(OTHER).mul(OTHER[:, :1]), 2),
        (lambda x: x.flatten()[:8].add(x.flatten()[8:]).add(x.flatten()[1:9]), 2),
        (lambda x: (y := x.add(OTHER)).add(y), 2),
        (lambda x: torch.cat([x.add(1.0), x]).add(1.0).sum(0).sum(-1), 5),
    ],
)
def test_calls_that_differ_in_numbers_alone_are_tested_once(
    fn: Callable[[torch.Tensor], torch.Tensor], tested: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether an ``out=`` kernel gives the same bits: others differ in types, places in memory or constants."""
    calls = 0

    def count(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return choose_kernel(*args)

    monkeypatch.setattr(recorder, "choose_kernel", count)
    follows(fn, 4, 4)
    assert calls == tested


TABLE = torch.randn(3, 2)
RAISING: dict[str, Callable[[torch.Tensor], Any]] = {
    "assert": lambda x: torch._assert_async((x < 3).all()),
    "index": lambda x: TABLE[x],
    "embedding": lambda x: torch.nn.functional.embedding(x, TABLE),
    "gather": lambda x: TABLE.gather(0, x[:, None]),
    "take": lambda x: TABLE.take(x + 3),
    "scatter": lambda x: torch.zeros(3).scatter(0, x, 1.0),
    "divide": lambda x: (x + 1).floor_divide(3 - x) + x,
}


@pytest.mark.parametrize("check", RAISING.values(), ids=RAISING)
def test_unused_operator_that_may_raise_is_run(check: Callable[[torch.Tensor], Any]) -> None:
    """What raises for some data raises in a replay, too, even if nobody needs its result."""
    x = torch.tensor([0, 1, 2])

    def fn() -> torch.Tensor:
        check(x)
        return x * 2

    graph, out = recorded(fn)
    x.fill_(1)
    graph.replay()
    assert out.tolist() == [2, 2, 2]
    x.fill_(3)
    with pytest.raises((IndexError, RuntimeError)):
        check(x)
    with pytest.raises((IndexError, RuntimeError)):
        graph.replay()


def test_temporary_that_is_sent_is_sent() -> None:
    """An operator of unknown effect that only writes to a temporary is replayed: it may have sent it."""
    sent: list[list[float]] = []

    def send(x: torch.Tensor) -> None:
        sent.append(x.tolist())
        x.zero_()

    with compiled_operator("send(Tensor(a!) x) -> ()", send) as op:
        x = torch.ones(2)

        def fn() -> torch.Tensor:
            op(x * 2)
            return x + 1

        graph, _ = recorded(fn)
        x.fill_(4.0)
        graph.replay()
    assert sent == [[2.0, 2.0], [8.0, 8.0]]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_result_of_another_shape_is_an_error(length: int) -> None:
    """A result that has another shape than at the capture is never broadcast or cut into its old place."""
    with compiled_operator("first(Tensor x, Tensor n) -> Tensor", lambda x, n: x[: int(n)].clone()) as op:
        x, n = torch.randn(5, 2), torch.tensor(3)
        graph, _ = recorded(lambda: op(x, n))
        graph.replay()
        n.fill_(length)
        with pytest.raises(ReplayError, match=r"shapes \[\(\d, 2\)\] where the graph holds \[\(3, 2\)\]"):
            graph.replay()


Refused = dict[str, Callable[[torch.Tensor, torch.Tensor], Any]]
FOREIGN: Refused = {
    "resize_": lambda x, other: other.resize_(x.shape),
    "resize_as_": lambda x, other: other.resize_as_(x),
    "unsqueeze_": lambda x, other: other.unsqueeze_(0),
    "set_": lambda x, other: other.set_(x),
    "add.out": lambda x, other: torch.add(x, 1, out=other),
    "index_select.out": lambda x, other: torch.index_select(x, 0, torch.tensor([0, 1]), out=other),
}
"""Another shape of a tensor that the call did not make: replays would not give it again."""
FORBIDDEN: Refused = {
    "Tensor.numpy": lambda x, _: x.numpy(),
    "layout": lambda x, _: x.to_sparse() * 2,
    "meta": lambda x, _: x.to("meta"),
    "quantized": lambda x, _: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8).dequantize(),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", [*FOREIGN, *FORBIDDEN])
def test_forbidden_operator_is_named(name: str) -> None:
    """What no graph can hold raises, naming the operator and the user's own line."""
    x, other = torch.randn(4, 6), torch.zeros(0)
    with pytest.raises(CaptureError, match=name) as caught:
        recorded(lambda: (FOREIGN | FORBIDDEN)[name](x, other))
    assert caught.value.reason is Reason.CAPTURE_UNSAFE
    assert "test_recorder.py" in str(caught.value)
    assert name not in FOREIGN or "another shape or memory" in str(caught.value)
