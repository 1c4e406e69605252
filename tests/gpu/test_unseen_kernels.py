"""Kernels that no operator of torch launches: of compiled models, and of Triton called by the model itself."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphdispatch as gd
from graphdispatch import Reason
from graphdispatch.backends import Backend

from ..helpers import check_calls

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # of the compiler
    pytest.mark.skipif("emulated_cuda" in sys.modules, reason="the emulated device runs no compiled kernels"),
]
WIDTH = 16


@triton.jit
def _double_kernel(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    places = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(target + places, tl.load(source + places, mask=places < count) * 2, mask=places < count)


@triton.jit
def _write_slots_kernel(cache, slots, rows, width: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    row, columns = tl.program_id(0), tl.arange(0, width)
    slot = tl.load(slots + row)
    tl.store(cache + slot * width + columns, tl.load(rows + row * width + columns))


@triton.jit
def _add_one_kernel(count):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    tl.store(count, tl.load(count) + 1)


def double(x: Tensor) -> Tensor:
    """Twice ``x``, by a kernel that torch does not see."""
    out = torch.empty_like(x)
    _double_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), 64)
    return out


def write_slots(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write each row into its slot."""
    _write_slots_kernel[(len(rows),)](cache, slots, rows, WIDTH)


@torch.library.custom_op("graphdispatch_gpu_tests::double", mutates_args=())
def double_op(x: Tensor) -> Tensor:
    """The same as an operator."""
    return double(x)


@torch.library.custom_op("graphdispatch_gpu_tests::write_slots", mutates_args=("cache",))
def write_slots_op(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """The same as an operator that says what it writes."""
    write_slots(cache, slots, rows)


@double_op.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@write_slots_op.register_fake
def _(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    return None


class Cached(nn.Module):
    """Adds what each slot held before, and keeps the row there."""

    def __init__(self, write: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("cache", torch.zeros(12, WIDTH))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        """``x`` of (rows, 16), ``slots`` of (rows,)."""
        before = self.cache[slots]
        self.write(self.cache, slots, x.contiguous())
        return x + before


def serve_beside_eager(
    fn: Callable[[Tensor, Tensor], Tensor], model: Cached, twin: Cached, **how: Any
) -> gd.Graphed[..., Tensor]:
    """Serve ``fn``, which writes the cache of ``model``: answers and slots, but for the scratch slot 0, are eager's."""
    step = gd.graphed(fn, dynamic={"x": 0, "slots": 0}, sizes=(4,), **how)
    generator, device, first = torch.Generator().manual_seed(0), twin.cache.device, int("pad" in how)
    for rows in (3, 3, 3, 4, 3, 4, 3, 2, 2, 3):
        x = torch.randn(rows, WIDTH, generator=generator).to(device)
        slots = (torch.randperm(11, generator=generator)[:rows] + 1).to(device)
        wanted, why = twin(x, slots), f"{rows} rows: {step.explain(x, slots)}"
        torch.testing.assert_close(step(x, slots), wanted, msg=f"answers of {why}")
        torch.testing.assert_close(model.cache[first:], twin.cache[first:], msg=f"slots after {why}")
    return step


def test_a_compiled_model_is_served(cuda: Backend) -> None:
    """Inductor's kernels are replayed."""
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, WIDTH)).to(cuda.device).eval()
    )
    compiled = torch.compile(model, dynamic=True)
    step = gd.graphed(compiled, dynamic={"input": 0}, sizes=(4, 8))
    batches = [torch.randn(rows, WIDTH, device=cuda.device) for rows in (3, 3, 3, 4, 7, 7, 7, 8)]
    check_calls(step, *batches, fn=model, rtol=1e-4, atol=1e-5)
    assert step.stats.hits > 0, (step.explain(batches[-1]), step.stats.reasons)


@pytest.mark.parametrize("kernel", [double_op, double], ids=["custom operator", "launched"])
def test_a_kernel_answers_as_eager(cuda: Backend, kernel: Callable[[Tensor], Tensor]) -> None:
    """Served, where it is in a custom operator, of which nothing is hidden, or not."""
    options = gd.CUDAGraphOptions(capture_share=None)  # compiling the kernel takes the time that captures may take
    step = gd.graphed(lambda x: kernel(x) + 1, dynamic={"x": 0}, sizes=(4,), options=options)
    batches = [torch.randn(rows, WIDTH, device=cuda.device) for rows in (3, 3, 3, 4, 3, 3, 3, 3)]
    reasons = check_calls(step, *batches, fn=lambda x: x * 2 + 1, rtol=1.3e-6, atol=1e-5)
    assert kernel is double or reasons[-1] is Reason.PADDED, step.explain(batches[-1])


def write_by_torch(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """By an operator that inductor makes a kernel of."""
    cache[slots] = rows


SCRATCH = {"pad": {"slots": gd.Pad.value(0)}, "options": gd.CUDAGraphOptions(padding_writes="allow")}
WRITERS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], object], bool, dict[str, Any]]] = {
    "compiled": (write_by_torch, True, {}),
    "compiled, a scratch slot": (write_by_torch, True, SCRATCH),
    "custom operator": (write_slots_op, False, {}),
    "launched": (write_slots, False, {}),
}
"""By name: what writes the cache, whether the model is compiled, and how it is served."""


@pytest.mark.parametrize("name", WRITERS)
def test_a_model_that_writes_its_cache(cuda: Backend, name: str) -> None:
    """Padding rows write to no live slot, and each call's write is done once. Where padding may write, such a model is
    served; where a schema says that it does, that is the reason why it is not."""
    write, is_compiled, how = WRITERS[name]
    model, twin = Cached(write).to(cuda.device), Cached(write_by_torch).to(cuda.device)
    fn: Any = torch.compile(model, dynamic=True) if is_compiled else model
    step = serve_beside_eager(fn, model, twin, **how)
    assert step.stats.hits > 0 or how is not SCRATCH, step.stats.reasons
    assert step.stats.reasons[Reason.PADDING_WRITES_STATE] > 0 or write is not write_slots_op, step.stats.reasons


def test_a_launched_kernel_that_counts_calls(cuda: Backend) -> None:
    """Each call counts once, whatever is run beside it."""
    count = torch.zeros(1, device=cuda.device)

    def counting(x: Tensor) -> Tensor:
        _add_one_kernel[(1,)](count)
        return x + count

    step = gd.graphed(counting, dynamic={"x": 0}, sizes=(4,))
    for number, rows in enumerate((3, 3, 3, 4, 3, 2, 2), 1):
        x = torch.randn(rows, WIDTH, device=cuda.device)
        torch.testing.assert_close(step(x), x + number, msg=step.explain(x))
