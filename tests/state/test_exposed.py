"""Memory that the host's code gets hold of: what it writes there happens once, and code that only reads is served."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import graphdispatch as gd
from graphdispatch import Reason
from graphdispatch.capture.effects import EffectRecorder


@pytest.fixture(autouse=True, params=[torch.no_grad, torch.inference_mode])
def _mode(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(0)
    with request.param():
        yield


def _add(array: Any) -> None:
    array += 1


def _first(tensor: torch.Tensor) -> None:
    tensor.numpy()[0] += 1


def _by_address(address: int) -> None:
    (ctypes.c_float * 2).from_address(address)[1] += 1


def _after_torch(n: torch.Tensor) -> None:
    n.add_(1)
    _add(n.numpy())


def _before_torch(n: torch.Tensor) -> None:
    array = n.numpy()
    n.add_(1)
    _add(array)


def _storage(n: torch.Tensor) -> None:
    storage = n.untyped_storage()
    storage[0] = storage[0] + 1


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda n: _add(n.numpy()),
    "one element": _first,
    "out": lambda n: np.add(n, 1, out=n.numpy()),
    "asarray": lambda n: _add(np.asarray(n)),
    "dlpack": lambda n: _add(np.from_dlpack(n)),
    "to_dlpack": lambda n: _add(np.from_dlpack(torch.from_dlpack(torch.utils.dlpack.to_dlpack(n)))),
    "part": lambda n: _add(n[1:].numpy()),
    "detached": lambda n: _add(n.detach().numpy()),
    "address": lambda n: _by_address(n.data_ptr()),
    "address of the storage": lambda n: _by_address(n.untyped_storage().data_ptr()),
    "after torch": _after_torch,
    "before torch": _before_torch,
    "storage": _storage,
    "filled storage": lambda n: n.untyped_storage().fill_((int(n.untyped_storage()[0]) + 1) % 100),
}


class Counts(nn.Module):
    """Counts its calls in a buffer, and who knows how."""

    n: torch.Tensor

    def __init__(self, write: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(2))
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self.n)
        return x * 2


@pytest.mark.parametrize("name", WRITES)
def test_a_write_by_the_host_happens_once(name: str) -> None:
    """A buffer that numpy or ctypes writes to is after each call as after eager's; the call is refused."""
    eager, model = Counts(WRITES[name]), Counts(WRITES[name])
    served = gd.graphed(model, dynamic={"x": 0}, sizes=[3])
    for call in range(6):
        x = torch.randn(3 - call % 2, 4)
        assert torch.equal(served(x), eager(x))
        assert torch.equal(model.n, eager.n)
    assert served.stats.reasons[Reason.CAPTURE_UNSAFE]


def test_an_argument_that_the_host_writes_is_written_once() -> None:
    """So is an argument of the caller's."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        _add(x.numpy())
        return x * 2

    served = gd.graphed(fn, dynamic={"x": 0}, sizes=[4])
    for rows in (4, 4, 3, 4):
        x = torch.zeros(rows, 2)
        assert torch.equal(served(x), torch.full((rows, 2), 2.0))
        assert torch.equal(x, torch.ones(rows, 2))


def test_prewarming_leaves_what_the_host_writes() -> None:
    """A capture ahead of traffic leaves no trace of its runs."""
    model = Counts(WRITES["numpy"])
    served = gd.graphed(model, dynamic={"x": 0}, sizes=[3])
    served.prewarm(torch.randn(3, 4))
    assert torch.equal(model.n, torch.zeros(2))


def test_a_break_that_writes_with_numpy_runs_once() -> None:
    """In PIECEWISE mode a break may do so, and each call counts once: captures, comparisons and hits alike."""
    count = torch.zeros(2)

    @gd.eager_break
    def halve(x: torch.Tensor) -> torch.Tensor:
        _add(count.numpy())
        return torch.from_numpy(x.numpy() / 2)

    served = gd.graphed(lambda x: halve(x + 1) * 3, dynamic={"x": 0}, sizes=[4], mode="PIECEWISE")
    for call in range(1, 9):
        x = torch.randn(4 - call % 2, 3)
        assert torch.equal(served(x), (x + 1) / 2 * 3)
        assert torch.equal(count, torch.full((2,), float(call)))
    assert served.stats.hits


def test_code_that_reads_only_while_nobody_captures_is_served() -> None:
    """It reads an argument and a buffer with numpy in eager runs; neither counts as written."""
    table = torch.ones(3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        try:
            captures = torch.cuda.is_current_stream_capturing()
        except RuntimeError:  # a torch without CUDA
            captures = False
        if not captures:
            assert np.asarray(x).size == x.numel()
            assert x.expand(2, *x.shape).numpy().any()
            assert table.numpy().sum() == 3
            assert x.data_ptr() != table.untyped_storage().data_ptr()
        return torch.cat(torch.tensor_split(x * table, 2, dim=1), 1)

    served = gd.graphed(fn, dynamic={"x": 0}, sizes=[4])
    for call in range(8):
        x = torch.randn(4 - call % 2, 3)
        assert torch.equal(served(x), x * table)
    assert served.stats.hits == 5


def test_too_much_to_save_is_said() -> None:
    """What cannot be saved cannot be undone: nothing is run again, and the reason names the option."""
    model = Counts(WRITES["numpy"])
    served = gd.graphed(model, dynamic={"x": 0}, sizes=[3], options=gd.CUDAGraphOptions(state_limit_bytes=7))
    for _ in range(4):
        served(torch.randn(3, 4))
    assert torch.equal(model.n, torch.full((2,), 4.0))
    assert served.stats.reasons[Reason.STATE_TOO_LARGE]
    assert "state_limit_bytes" in served.explain(torch.randn(3, 4))


def test_only_writes_are_kept() -> None:
    """Of what the host got hold of, the recorder keeps what changed, and nothing stays patched."""
    before = vars(torch.Tensor).get("numpy")
    read, written = torch.zeros(2), torch.zeros(2)
    effects = EffectRecorder(1000)
    with effects.guarding():
        read.numpy().sum()
        _add(written.numpy())
    assert [region.target.data_ptr() for region in effects.regions] == [written.data_ptr()]
    assert not effects.is_quiet
    assert vars(torch.Tensor).get("numpy") is before
