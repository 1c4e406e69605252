"""Hits of two launches, which copy inputs and outputs by kernels of ours, beside torch's copies: what a call costs, and
that buffers and answers are equal."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from graphdispatch import CUDAGraphOptions, Graphed, Pad, graphed
from graphdispatch.backends import Backend

from .bench import Bench, Call, Row, interleaved
from .overhead import Case

__all__ = ["TITLE", "by_torch", "run", "wrong_batches"]

TITLE = "Hits of two launches (GRAPHDISPATCH_COPY_KERNEL=1), beside torch's copies"
_INPUTS, _PARAMETERS = 4, 300
_TORCH, _KERNEL = "graphed()", "graphed(), two launches"
_CASES, _CASE_SECONDS = 300, 0.2
_BATCHES, _SIZES, _MOST_INPUTS = 12, (4, 8), 18
_PLAIN = CUDAGraphOptions(verify=False, guard_weights=False, capture_after=1)
_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.float32,
    torch.int64,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


def run(bench: Bench) -> None:
    """What calls cost, and then whether buffers are the same; where there is no such kernel, torch's copies alone."""
    with _switched_on(bench.backend) as has_kernel:
        if bench.device.type == "cuda" and not has_kernel:
            bench.emit(Row("all", _KERNEL, {"error": "the kernels cannot be compiled; a warning says why"}))
        _measure(bench, has_kernel)
        if has_kernel:
            seeds = [seed for seed in range(5 if bench.quick else _CASES) if bench.has_time(_CASE_SECONDS)]
            wrong = sum(wrong_batches(bench.backend, seed) for seed in seeds)
            bench.emit(Row("random batches", _KERNEL, {"wrong": float(wrong), "cases": float(len(seeds))}))


@contextmanager
def _switched_on(backend: Backend) -> Iterator[bool]:
    """A block whose captures have the kernels; whether they can be compiled. Other parts have torch's copies again."""
    with _switch("1"):
        backend.make_pool()
    try:
        yield backend.copy_kernel is not None
    finally:
        backend.copy_kernel = None


@contextmanager
def by_torch(backend: Backend) -> Iterator[None]:
    """A block whose captures are served by torch's copies alone, also behind it; so are hits that come first in it."""
    kernel, backend.copy_kernel = backend.copy_kernel, None
    try:
        with _switch("0"):  # a new pool would switch them on
            yield
    finally:
        backend.copy_kernel = kernel


def _switch(value: str) -> AbstractContextManager[Any]:
    return patch.dict(os.environ, GRAPHDISPATCH_COPY_KERNEL=value)


def _measure(bench: Bench, has_kernel: bool) -> None:
    """Whole calls, and beside them what it takes to give an output away; then calls that are padded anew in turn."""
    case, padded = Case(bench, _INPUTS, _PARAMETERS), Case(bench, _INPUTS, _PARAMETERS, rows=(2, 1))
    whole: dict[str, list[Call]] = {
        "bare replay": [case.graph.replay],
        "bare replay, copies in and out": case.by_hand(),
        "clone of the output": [case.output.clone],
        "new tensor for the output": [partial(torch.empty_like, case.output)],
    }
    in_turn: dict[str, list[Call]] = {}
    for side in (_TORCH, _KERNEL) if has_kernel else (_TORCH,):
        with by_torch(bench.backend) if side == _TORCH else nullcontext():
            whole[side], in_turn[side] = case.graphed(1), padded.graphed(2)
    for name, sides in ((case.name, whole), (f"{case.name}, each second batch padded", in_turn)):
        for side, timing in interleaved(bench, sides).items():
            bench.emit(Row(name, side, timing.figures()))


def wrong_batches(backend: Backend, seed: int) -> int:
    """How many of some random batches leave other bytes in the buffers, or other answers, by the kernel than by torch.

    Arguments have random dtypes, widths and pad rules; batches any number of rows, addresses, gaps and streams.
    """
    case = _Random(Random(seed), backend)
    return sum(not case.agrees() for _ in range(_BATCHES))


class _Random:
    """Random arguments, and two callables that are served alike but for the copies of their inputs."""

    def __init__(self, draw: Random, backend: Backend) -> None:
        self._draw, self._backend = draw, backend
        count = draw.choice((1, 2, 3, 4, 5, _MOST_INPUTS))
        self._forms = [(draw.choice(_DTYPES), draw.choice((0, 1, 3, 8, 64, 1000))) for _ in range(count)]
        pads = [draw.choice((0, 1, Pad.repeat_last(), Pad.leave())) for _ in range(count)]
        if draw.random() < 1 / 8:
            pads[0] = Pad.function(lambda padding, real: padding.copy_(real[:1].expand_as(padding)))
        self._kernel, self._torch = self._served(pads), self._served(pads)

    def _served(self, pads: list[Any]) -> Graphed[..., Any]:
        rules: dict[str, Any] = {f"inputs[{number}]": pad for number, pad in enumerate(pads)}
        return graphed(_copied, dynamic=dict.fromkeys(rules, 0), pad=rules, sizes=_SIZES, options=_PLAIN)

    def agrees(self) -> bool:
        """Whether a batch is served alike, perhaps on another stream."""
        current = self._backend.current_stream()
        stream = self._backend.make_stream() if self._draw.random() < 1 / 3 else current
        rows = self._draw.randint(0, max(_SIZES))
        batch = [self._argument(dtype, rows, width) for dtype, width in self._forms]
        stream.wait_stream(current)
        with self._backend.use_stream(stream):
            given = self._kernel(*batch)
            with by_torch(self._backend):
                wanted = self._torch(*batch)
        current.wait_stream(stream)
        same = all(map(_equal, (*given, *self._buffers(self._kernel)), (*wanted, *self._buffers(self._torch))))
        return same and all(map(_equal, given, batch))

    def _argument(self, dtype: torch.dtype, rows: int, width: int) -> Tensor:
        """Somewhere in its memory, and with gaps between its rows now and then."""
        gap, offset = self._draw.choice((0, 0, 0, 1)), self._draw.choice((0, 0, 1, 2, 3))
        numbers = torch.tensor([self._draw.randint(0, 99) for _ in range(13)], dtype=dtype)
        flat = numbers.repeat(rows * (width + gap) // 13 + 1 + offset)[: offset + rows * (width + gap)]
        return flat.to(self._backend.device)[offset:].view(rows, width + gap)[:, :width]

    @staticmethod
    def _buffers(served: Graphed[..., Any]) -> list[Tensor]:
        return [buffer for entry in served.entries for buffer in entry.inputs.buffers]


def _copied(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.clone() for x in inputs)


def _equal(one: Tensor, other: Tensor) -> bool:
    """To the bit."""
    there, here = one.cpu().contiguous(), other.cpu().contiguous()
    return there.shape == here.shape and bool(torch.equal(there.view(torch.uint8), here.view(torch.uint8)))
