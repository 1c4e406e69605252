"""The peers: what else serves a callable by graphs, each given as it is meant to be used."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from graphdispatch.backends import Graph, Pool

from .bench import Bench

__all__ = ["PaddedRawGraphs", "compiled", "cuda_peers", "raw_graph"]


@contextmanager
def _recorded(bench: Bench, pool: Any) -> Iterator[list[Any]]:
    """What runs in the block becomes a graph, which is put into the list."""
    made: list[Any] = []
    if bench.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            yield made
        made.append(graph)
    elif bench.device.type != "cpu":
        graph = torch.accelerator.Graph(pool=pool.handle())
        with _capture_stream(bench.device), graph:
            yield made
        made.append(graph)
    else:
        with bench.backend.begin_capture(pool) as capture:
            yield made
        made.append(capture.graph)


@cache
def _capture_stream(device: torch.device) -> torch.Stream:
    """One for all graphs, as torch does on CUDA: memory is used again on the stream that it was used on."""
    return torch.Stream(device)


def new_pool(bench: Bench) -> Any:
    """A pool for ``raw_graph``: torch's handle on CUDA."""
    return torch.cuda.graph_pool_handle() if bench.device.type == "cuda" else bench.backend.make_pool()


def raw_graph(bench: Bench, fn: Callable[..., Any], args: Sequence[Tensor], pool: Any = None) -> tuple[Graph, Any]:
    """A bare graph of ``fn`` on ``args`` themselves, after one warm-up, and its outputs; by torch's own class."""
    stream = bench.backend.make_stream()
    stream.wait_stream(bench.backend.current_stream())
    with bench.backend.use_stream(stream):
        fn(*args)
    bench.backend.current_stream().wait_stream(stream)
    bench.synchronize()
    with _recorded(bench, pool if pool is not None else new_pool(bench)) as made:
        outputs = fn(*args)
    return made[0], outputs


class PaddedRawGraphs:
    """What one writes by hand: a bare graph for each size over shared buffers, copies in, padding, a cut, a copy out.

    Nothing is checked: the least that a padded call can cost.
    """

    def __init__(
        self, bench: Bench, fn: Callable[..., Tensor], examples: Sequence[Tensor], pads: Sequence[int], sizes: Any
    ) -> None:
        largest = max(sizes)
        self._pads = pads
        self._static = [
            torch.full((largest, *x.shape[1:]), p, dtype=x.dtype, device=x.device)
            for x, p in zip(examples, pads, strict=True)
        ]
        pool: Pool | Any = new_pool(bench)
        self._graphs: dict[int, tuple[Any, Tensor]] = {}
        for size in sorted(sizes, reverse=True):
            self._graphs[size] = raw_graph(bench, fn, [x[:size] for x in self._static], pool)
        self._size_of = [min(s for s in sizes if s >= rows) for rows in range(largest + 1)]

    def __call__(self, *args: Tensor) -> Tensor:
        """Serve one batch."""
        rows = len(args[0])
        size = self._size_of[rows]
        for static, value, pad in zip(self._static, args, self._pads, strict=True):
            static[:rows].copy_(value)
            if rows < size:
                static[rows:size].fill_(pad)
        graph, output = self._graphs[size]
        graph.replay()
        return output[:rows].clone()


def compiled(fn: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """``torch.compile`` with ``mode="reduce-overhead"``, from a clean slate; a call ends the former call's outputs."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = torch.compile(fn, mode="reduce-overhead", **how)

    def marked(*args: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return step(*args)

    return marked


def cuda_peers(model: nn.Module, args: tuple[Tensor, ...]) -> dict[str, Callable[[], Callable[..., Any]]]:
    """How to make the peers for one shape that exist on CUDA alone: torch's own and, where installed, tensordict's."""
    peers: dict[str, Callable[[], Callable[..., Any]]] = {
        "torch make_graphed_callables": lambda: _by_torch(_Plain(model), args)
    }
    if importlib.util.find_spec("tensordict") is not None:
        peers["tensordict CudaGraphModule"] = lambda: _by_tensordict(_Plain(model))
    return peers


def _by_torch(model: nn.Module, args: tuple[Tensor, ...]) -> Callable[..., Any]:
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no backward pass, so that its graph is empty
        made: Callable[..., Any] = torch.cuda.make_graphed_callables(model, args)
    return made


def _by_tensordict(model: nn.Module) -> Callable[..., Any]:
    from tensordict.nn import CudaGraphModule

    made: Callable[..., Any] = CudaGraphModule(model)
    return made


class _Plain(nn.Module):
    """A module of its own around ``model``, since torch replaces ``forward`` in place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Any:
        return self.model(*args)
