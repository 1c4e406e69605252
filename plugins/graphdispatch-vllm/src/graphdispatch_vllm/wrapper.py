"""vLLM's static graph wrapper, whose graphs are this library's."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

from vllm import forward_context
from vllm.compilation import monitor
from vllm.config import CUDAGraphMode as TheirMode
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from .core import (
    BatchDescriptor,
    ConfigError,
    CUDAGraphMode,
    CUDAGraphOptions,
    Decision,
    Reason,
    bits_equal,
    mode_of,
    tensors_in,
)
from .engine import EagerSteps, EngineGraphs, least_of_ranks, on_all_ranks
from .steps import FixedStep, Schedules, uncompiled, vary_slots

__all__ = ["GraphTotals", "StaticGraphWrapper", "graph_stats"]

_logger = init_logger("vllm.graphdispatch")


class GraphTotals(NamedTuple):
    """What graphs did: how many there are, captures, captures that failed, replays, and eager runs by reason."""

    graphs: int
    captures: int
    failures: int
    hits: int
    eager: Counter[Reason]

    @classmethod
    def of(cls, parts: Iterable["GraphTotals"]) -> "GraphTotals":
        """The sum of several."""
        every = list(parts)
        return cls(
            graphs=sum(each.graphs for each in every),
            captures=sum(each.captures for each in every),
            failures=sum(each.failures for each in every),
            hits=sum(each.hits for each in every),
            eager=sum((each.eager for each in every), start=Counter[Reason]()),
        )


class _Served(NamedTuple):
    """What serves one descriptor. Each has a server of its own, since each has its own forward context: to the guards
    of one, that of another would be a callable that has changed."""

    key: BatchDescriptor
    graphs: EngineGraphs
    step: FixedStep | None


class StaticGraphWrapper:
    """Captures ``runnable`` for each batch descriptor of vLLM's forward context, in ``runtime_mode``, and replays it.

    Made with vLLM's arguments, as its own ``CUDAGraphWrapper``. Arguments are vLLM's own buffers, and outputs the
    graph's own memory, which the next replay overwrites. In any other mode, and without a forward context, the runnable
    is called as it is.

    Captures and comparisons with eager happen while vLLM allows captures (``set_cudagraph_capturing_enabled``). After
    that a step that no verified graph serves runs eagerly, and the first of each reason is logged. Not thread-safe, as
    vLLM's own is not. Attributes that it does not have are the runnable's.

    A FULL graph reads metadata in memory of its own (``steps.py``), and so does the eager run that it is captured and
    compared with. So each step of the warm-up runs once more, by vLLM's own metadata in vLLM's own memory. If a step
    gave other bits, what all the graphs read is in doubt: they are released, and there are none until ``clear_graphs``.
    """

    _all_instances: ClassVar["weakref.WeakSet[StaticGraphWrapper]"] = weakref.WeakSet()

    @classmethod
    def clear_all_graphs(cls) -> None:
        """Release the graphs of all wrappers."""
        for each in list(cls._all_instances):
            each.clear_graphs()

    @classmethod
    def why_any_eager(cls, mode: CUDAGraphMode) -> Reason | None:
        """Why the latest call of some wrapper in ``mode`` ran eagerly; None if graphs served all of them."""
        return next((each.why_eager for each in cls._all_instances if each._mode is mode and each.why_eager), None)

    def __init__(
        self,
        runnable: Callable[..., Any],
        vllm_config: VllmConfig,
        runtime_mode: TheirMode,
        cudagraph_options: Any = None,
    ) -> None:
        if runtime_mode not in (TheirMode.FULL, TheirMode.PIECEWISE):
            raise ConfigError(f"runtime_mode must be PIECEWISE or FULL, got {runtime_mode}")
        self.runnable = runnable
        self.vllm_config = vllm_config
        self.runtime_mode = runtime_mode
        self.cudagraph_options = cudagraph_options
        self.graph_pool = current_platform.get_global_graph_pool()
        self._mode = mode_of(runtime_mode)
        self._options = CUDAGraphOptions(inputs="static", outputs="static")
        self._served: dict[Any, _Served] = {}
        self.is_refused = False
        """Whether some step gave other bits than eager by vLLM's own metadata, so that no graph serves."""
        self._schedules = Schedules() if runtime_mode == TheirMode.FULL else None
        self._captures = True
        self._rounds = 0
        self._cleared = GraphTotals.of([])
        self._left = EagerSteps(f"{self._mode.name} step", _logger)
        self.why_eager: Reason | None = None
        """Why the latest call ran eagerly; None if a graph served it."""
        StaticGraphWrapper._all_instances.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Serve a step, or a piece of one. Raises what the runnable raises."""
        context = forward_context._forward_context
        if context is None or context.cudagraph_runtime_mode != self.runtime_mode:
            return self.runnable(*args, **kwargs)
        if self.is_refused:
            return self._eagerly(Reason.VERIFICATION_FAILED, args, kwargs)
        if self._captures is not monitor.cudagraph_capturing_enabled:
            self._follow(monitor.cudagraph_capturing_enabled)
        served = self._served.get(context.batch_descriptor)
        if served is None:
            if not self._captures:
                return self._eagerly(Reason.NOT_CAPTURED, args, kwargs)
            served = self._served[context.batch_descriptor] = self._make(context)
        step = served.step
        if step is None:
            return self._serve(served, args, kwargs)
        if self._captures:
            self._rounds += 1
            vary_slots(context, self.vllm_config.cache_config.block_size, self._rounds)
        is_loaded = step.load(context)
        if not (on_all_ranks(is_loaded) if self._captures else is_loaded):
            return self._eagerly(Reason.ARGUMENTS_CHANGED, args, kwargs)
        with step.entered():
            answer = self._serve(served, args, kwargs)
        return self._compared(context, answer, args, kwargs) if self._captures else answer

    def _compared(self, context: Any, answer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The answer of a step of the warm-up; that of eager by vLLM's own metadata, if they differ on some rank.

        Eager runs behind the graph, which must not find what eager wrote.
        """
        with uncompiled(context):
            eager = self.runnable(*args, **kwargs)
        pairs = zip(tensors_in(answer), tensors_in(eager), strict=True)
        if on_all_ranks(all(bits_equal(got, want) for got, want in pairs)):
            return answer
        for each in self._served.values():
            each.graphs.clear_cache()
        self.is_refused, self.why_eager = True, Reason.VERIFICATION_FAILED
        self._left.note(Decision.eager(Reason.VERIFICATION_FAILED))
        return eager

    def _make(self, context: Any) -> _Served:
        given = context.batch_descriptor
        variant = (given.has_lora, given.num_active_loras)
        key = BatchDescriptor(given.num_tokens, given.num_reqs, given.uniform, variant)
        backend, pool = self.graph_pool
        where = {"backend": backend, "pool": pool, "agree": least_of_ranks()}
        graphs = EngineGraphs(self.runnable, self._mode, self._options, **where)
        return _Served(key, graphs, None if self._schedules is None else FixedStep(context, self._schedules))

    def _serve(self, served: _Served, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        graphs = served.graphs
        answer = graphs(*args, batch_descriptor=served.key, cudagraph_runtime_mode=self._mode, **kwargs)
        decision = graphs.why_eager
        self.why_eager = None if decision is None else decision.reason
        if decision is not None:
            self._left.note(decision, counts=False)
        return answer

    def _eagerly(self, reason: Reason, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.why_eager = reason
        self._left.note(Decision.eager(reason))
        return self.runnable(*args, **kwargs)

    def _follow(self, captures: bool) -> None:
        """Allow captures, or no longer."""
        self._captures = captures
        for each in self._served.values():
            (each.graphs.unfreeze if captures else each.graphs.freeze)()

    def get_stats(self) -> GraphTotals:
        """What happened so far in this wrapper's mode, with graphs that were cleared."""
        every = ((len(each.graphs.get_cached_descriptors()), each.graphs.get_stats()) for each in self._served.values())
        own = [
            GraphTotals(count, stats.captures, stats.capture_failures, stats.hits, Counter(stats.reasons))
            for count, stats in every
        ]
        return GraphTotals.of([*own, self._cleared, GraphTotals(0, 0, 0, 0, Counter(self._left))])

    def clear_graphs(self) -> None:
        """Release the graphs of this wrapper; they are captured anew where vLLM allows captures."""
        for each in self._served.values():
            each.graphs.clear_cache()
        self._cleared = self.get_stats()._replace(graphs=0)
        self._left.clear()
        self._served.clear()
        self.is_refused = False

    def unwrap(self) -> Any:
        """The runnable, however many wrappers are around it."""
        inner = self.runnable
        return inner.unwrap() if isinstance(inner, StaticGraphWrapper) else inner

    @property
    def cudagraph_wrapper(self) -> "StaticGraphWrapper":
        """This wrapper; vLLM asks models for theirs."""
        return self

    def __getattr__(self, name: str) -> Any:
        if "runnable" not in self.__dict__:  # half made
            raise AttributeError(name)
        return getattr(self.runnable, name)

    def __repr__(self) -> str:
        return f"<StaticGraphWrapper {self._mode.name} {type(self.runnable).__name__}: {self.get_stats()}>"


def graph_stats() -> dict[str, GraphTotals]:
    """The totals of all wrappers of this process, by mode. In PIECEWISE mode each piece of a step counts by itself."""
    found: dict[str, list[GraphTotals]] = {}
    for each in list(StaticGraphWrapper._all_instances):
        found.setdefault(each._mode.name, []).append(each.get_stats())
    return {mode: GraphTotals.of(parts) for mode, parts in found.items()}
