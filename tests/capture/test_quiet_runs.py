"""A native watch of a run that should only compute sees the memory that Python's watch sees, and stops all else."""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from graphdispatch.backends.insight import COMPILER, reveal_operators
from graphdispatch.capture import quiet
from graphdispatch.capture.effects import EffectRecorder
from graphdispatch.native.tape import TAPE

pytestmark = pytest.mark.skipif(not TAPE.wait(), reason="runs are watched in Python")
X, INDEX, MASK = torch.linspace(-1, 1, 24).reshape(4, 6), torch.tensor([1, 0]), torch.tensor([True, False] * 3)
HEADS, ROW, WEIGHT = torch.randn(1, 2, 4, 6), torch.ones(6), torch.randn(6, 6)
BUFFER = torch.zeros(4, 6)
LAYERS = nn.TransformerEncoderLayer(6, 2, batch_first=True).eval(), nn.GRU(6, 5, batch_first=True).eval()

QUIET: dict[str, Callable[[], Any]] = {
    "composite": lambda: functional.linear(X, WEIGHT, ROW).reshape(-1).softmax(0),
    "norm": lambda: functional.layer_norm(X, (6,), ROW, ROW),
    "lists": lambda: torch.cat([X, BUFFER]).chunk(2) + torch.stack((X, X)).unbind(),
    "indices": lambda: (X[INDEX], X[:, MASK], X.gather(0, INDEX[None]), torch.index_select(X, 0, INDEX)),
    "attention": lambda: torch.baddbmm(HEADS[0], HEADS[0, :, :, :4], HEADS[0]).softmax(-1),
    "views": lambda: X.t()[1:].expand(2, 5, 4).narrow(0, 0, 1).movedim(0, 1).contiguous(),
    "made of nothing": lambda: torch.arange(4).float() + torch.ones(4) * torch.full((), 2.0),
    "encoder layer": lambda: LAYERS[0](X[None]),
    "complex": lambda: torch.view_as_real(torch.complex(X, X).conj() * 2),
    "host": lambda: X if X.sum().item() > 5 else X[0].tolist(),
    "operator by name": lambda: torch.ops.aten.add.Tensor(X, BUFFER),
}


def _swallows() -> None:
    with contextlib.suppress(BaseException):
        BUFFER.add_(1)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    """Writes to its argument where Python does not see it."""
    return x.add_(1)


LIMITING = {
    "to integers": lambda: (X.abs() * 3).long(),
    "seen as integers": lambda: X.view(torch.int32) + 1,
    "cross entropy": lambda: functional.binary_cross_entropy(X.sigmoid(), torch.ones_like(X)),
}
QUIET |= LIMITING

STOPPED: dict[str, Callable[[], Any]] = {
    "in place": lambda: BUFFER.add_(1),
    "one's own": lambda: torch.ones(3).add_(1),
    "to a view": lambda: BUFFER[0, :2].fill_(1),
    "by index": lambda: BUFFER.index_put_((INDEX,), X[:2]),
    "out": lambda: torch.add(X, 1, out=BUFFER),
    "assignment": lambda: BUFFER.__setitem__(0, 1.0),
    "batch norm": lambda: functional.batch_norm(X, BUFFER[0], BUFFER[1], training=True),
    "scripted": lambda: scripted(BUFFER),
    "draw": lambda: torch.rand(3),
    "dropout": lambda: functional.dropout(X),
    "empty": lambda: torch.empty(3),
    "check": lambda: torch._assert_async(torch.tensor(True)),
    "sparse": lambda: X.to_sparse().sum(),
    "swallowed": _swallows,
    "raised": lambda: functional.linear(X, X[:, :3]),
}


@pytest.fixture(autouse=True, params=[torch.no_grad, torch.inference_mode])
def _mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delitem(sys.modules, COMPILER, raising=False)  # another test may have loaded it
    reveal_operators()
    with request.param():
        yield


def watched(run: Callable[[], Any]) -> Any:
    """The watch of a run, which tells what it saw."""
    assert quiet.can_watch()
    with quiet.watching() as watch:
        run()
    return watch


@pytest.mark.parametrize("name", QUIET)
def test_quiet_runs_use_what_python_sees(name: str) -> None:
    """Of the memory that was there before; what the run makes itself is no one's concern."""
    with EffectRecorder(1 << 20, strict=True) as seen:
        QUIET[name]()
    assert seen.is_quiet
    there = {value.untyped_storage()._cdata for value in (X, INDEX, MASK, HEADS, ROW, WEIGHT, BUFFER)}
    there |= {p.untyped_storage()._cdata for layer in LAYERS for p in layer.parameters()}
    watch = watched(QUIET[name])
    assert watch.used() & there == seen.used & there
    assert (watch.limits_values(), watch.groups_rows()) == (seen.limits_values, seen.groups_rows)
    assert watch.limits_values() is (name in LIMITING)


@pytest.mark.parametrize("name", STOPPED)
def test_all_else_is_stopped_before_it_happens(name: str) -> None:
    """Nothing is written, nothing is drawn, and the thread is watched no longer."""
    before, state = BUFFER.clone(), torch.get_rng_state()
    with pytest.raises(quiet.StoppedError):
        watched(STOPPED[name])
    assert torch.equal(BUFFER, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.zeros(2).add_(1), torch.ones(2))


def test_operators_of_others_are_stopped() -> None:
    """In Python, in a tensor subclass, and in the place of a kernel of torch, whenever that came."""

    class Wrapped(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*(a.as_subclass(Tensor) if type(a) is cls else a for a in args))

    with torch.library._scoped_library("quiet_runs", "DEF") as library:
        library.define("noted(Tensor x) -> Tensor")
        library.impl("noted", lambda x: (BUFFER.add_(1), x.clone())[1], "CompositeExplicitAutograd")
        before = BUFFER.clone()
        with pytest.raises(quiet.StoppedError):
            watched(lambda: torch.ops.quiet_runs.noted(X))
        assert torch.equal(BUFFER, before)
    with torch.inference_mode(False):
        wrapped = X.clone().as_subclass(Wrapped)
    with pytest.raises(quiet.StoppedError):
        watched(lambda: wrapped * 2)
    watched(lambda: torch.sinc(X))
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("sinc", lambda x: BUFFER.add_(1), "CPU")
        assert not quiet.can_watch()
    assert quiet.can_watch()


def test_where_the_dispatcher_does_not_show_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python watches under autocast, and as soon as torch's compiler was loaded, in the run itself too."""
    with torch.autocast("cpu"):
        assert not quiet.can_watch()
    with pytest.raises(quiet.StoppedError):
        watched(lambda: monkeypatch.setitem(sys.modules, COMPILER, sys))
    assert not quiet.can_watch()
