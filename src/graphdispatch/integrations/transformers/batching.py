"""``graphed_continuous_batching``: transformers' continuous batching with our graphs in the place of its own."""

import threading
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers.generation.continuous_batching import initialization, model_runner

from ...api.wrapper import CUDAGraphWrapper
from ...config import CUDAGraphOptions
from ...descriptors import BatchDescriptor
from ...errors import ConfigError, shown
from ...modes import CUDAGraphMode
from ...stats import CUDAGraphStats
from .available import FIRST_VERSION_OF_BATCHING, check_version
from .stats import BatchingStats

__all__ = ["GraphedBatching", "graphed_continuous_batching"]

_WRAPPERS = "_graphdispatch_wrappers"


class GraphedBatching:
    """Within the block, the batches of ``model.generate_batch(...)`` that transformers runs on graphs run on ours.

    transformers decides which: pass ``ContinuousBatchingConfig(use_cuda_graph=True)``. It pads batches to few shapes,
    and keeps inputs at fixed addresses. Each shape gets a graph, which is compared with eager and guarded as all are;
    what no graph serves runs eagerly. Without an accelerator the graphs are those of the CPU backend.

    Hooks of the process are set at the beginning of the block and taken away at its end, or by ``unpatch``; others
    models run as before. ``options`` are those of ``CUDAGraphWrapper``; inputs and outputs are static. Thread-safe.
    Raises ``ImportError`` for a transformers older than 5.23.
    """

    def __init__(self, model: Any, *, options: CUDAGraphOptions | None = None) -> None:
        check_version(transformers.__version__, FIRST_VERSION_OF_BATCHING)
        if not hasattr(model, "generate_batch"):
            raise ConfigError(f"model must have transformers' generate_batch(), got {shown(model)}")
        self.model = model
        chosen = CUDAGraphOptions.or_default(options, "options")
        self._options = chosen.replace(inputs="static", outputs="static")
        self._stats: list[CUDAGraphStats] = []
        self._runners: list[Any] = []
        self._hooks: list[tuple[Any, str, Any, Any]] = []
        self._lock = threading.Lock()

    def patch(self) -> "GraphedBatching":
        """Serve from now on. Harmless when it does already."""
        with self._lock:
            if not self._hooks:
                plain = model_runner.ModelRunner.compute_batch
                self._hook(model_runner.ModelRunner, "compute_batch", self._computing(plain))
                if not torch.accelerator.is_available():
                    self._hook(initialization, "get_accelerator_graph_name", lambda: "CUDAGraph")
                    self._hook(model_runner, "get_memory_pools", lambda: (None, None))
        return self

    def unpatch(self) -> None:
        """Take the hooks away and release the graphs."""
        with self._lock:
            # Hooks that came later go on calling what they found, and ours then step aside.
            for owner, name, before, hook in reversed(self._hooks):
                if getattr(owner, name) is hook:
                    setattr(owner, name, before)
            self._hooks.clear()
            for runner in self._runners:
                for wrapper in vars(runner).pop(_WRAPPERS).values():
                    wrapper.clear_cache()
            self._runners.clear()

    def __enter__(self) -> "GraphedBatching":
        return self.patch()

    def __exit__(self, *error: object) -> None:
        self.unpatch()

    @property
    def stats(self) -> BatchingStats:
        """What happened so far."""
        total = BatchingStats()
        for stats in list(self._stats):
            total.add(stats)
        return total

    def explain(self) -> str:
        """How many steps graphs served, and why others ran eagerly, a line for each."""
        stats = self.stats
        lines = [f"{stats.hits} steps by graphs, of which {stats.captures} were captured"]
        return "\n".join([*lines, *(f"{count} steps: {reason.text}" for reason, count in stats.reasons.items())])

    def _hook(self, owner: Any, name: str, hook: Any) -> None:
        self._hooks.append((owner, name, getattr(owner, name), hook))
        setattr(owner, name, hook)

    def _computing(self, plain: Callable[..., None]) -> Callable[..., None]:
        """The step of a runner, in the place of ``plain``."""

        def compute_batch(runner: Any, model: Any, batch_data: dict[str, Any]) -> None:
            ios = runner.inputs_and_outputs
            step, on_graph = runner._get_forward_fn(use_block_table=ios.use_block_table)
            has_accelerator = torch.accelerator.is_available()
            is_ours = model is self.model and self._hooks
            if not on_graph or not (is_ours or not has_accelerator):
                return plain(runner, model, batch_data)
            if runner.supports_logits_to_keep(model):
                batch_data["logits_to_keep"] = batch_data["logits_indices"]
            with model_runner.stream_context(ios.compute_stream):
                if not is_ours:  # another model, for which transformers has no graphs here
                    step(model, batch_data, *ios.get_cb_kwargs())
                    return None
                serve = self._wrapper(runner, step, batch_data["cache"])
                pair = getattr(ios, "current_pair", 0)  # asynchronous batching has two sets of inputs
                key = (ios.io_pairs[pair].device_io if hasattr(ios, "io_pairs") else ios)._get_graph_key()
                shape = BatchDescriptor(key[0], variant=(ios.use_block_table, pair, *key))
                seen = {name: value for name, value in batch_data.items() if name != "cache"}
                given = (model, seen, *ios.get_cb_kwargs())
                serve(*given, batch_descriptor=shape, cudagraph_runtime_mode=CUDAGraphMode.FULL)
                return None

        return compute_batch

    def _wrapper(self, runner: Any, step: Callable[..., None], cache: Any) -> CUDAGraphWrapper:
        """The wrapper of one of a runner's steps. The runner holds it, since it holds the runner."""
        if _WRAPPERS not in vars(runner):
            setattr(runner, _WRAPPERS, {})
            self._runners.append(runner)
        wrappers: dict[Any, CUDAGraphWrapper] = vars(runner)[_WRAPPERS]
        if step not in wrappers:
            wrappers[step] = CUDAGraphWrapper(_Step(step, cache), CUDAGraphMode.FULL, self._options)
            self._stats.append(wrappers[step].get_stats())
        return wrappers[step]


class _Step:
    """A runner's step without its lists of requests and pages. These change from step to step, and only the code that
    prepares a batch reads them; guards do not look into objects of this library."""

    def __init__(self, step: Callable[..., None], cache: Any) -> None:
        self._step = step
        self._cache = cache

    def __call__(self, model: Any, batch_data: dict[str, Any], *tensors: torch.Tensor) -> None:
        self._step(model, {**batch_data, "cache": self._cache}, *tensors)


def graphed_continuous_batching(model: Any, *, options: CUDAGraphOptions | None = None) -> GraphedBatching:
    """A context manager within which continuous batching runs on our graphs: see ``GraphedBatching``."""
    return GraphedBatching(model, options=options)
