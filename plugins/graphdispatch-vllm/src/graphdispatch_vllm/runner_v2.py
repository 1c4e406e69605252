"""The decisions of vLLM's Model Runner V2, made by this library."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Any

from vllm.config import CUDAGraphMode as TheirMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from .core import BatchDescriptor, CUDAGraphMode, KeyTable, Memo, mode_of

__all__ = ["GraphManager", "StepDecisions"]

NONE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.FULL


class StepDecisions:
    """Decides by the graphs that Runner V2 means to capture, given as its own descriptors.

    By default the answers are Runner V2's own. It looks for a full graph only among those of the next captured size;
    with ``any_size`` a larger one serves too, where the next is for other query lengths. Answers are kept, of those of
    late at most 65,536.
    """

    def __init__(
        self, descriptors: Iterable[BatchExecutionDescriptor], max_num_reqs: int, *, any_size: bool = False
    ) -> None:
        self._any_size = any_size
        self._found = Memo[tuple[Any, ...], BatchExecutionDescriptor | None](lambda step: self._find(*step))
        self._graphs: dict[tuple[CUDAGraphMode, BatchDescriptor], BatchExecutionDescriptor] = {}
        self._full_sizes: dict[int, list[int]] = {}
        for each in descriptors:
            variant = (each.num_active_loras, each.num_ubatches, each.max_query_len)
            is_uniform = each.uniform_token_count is not None
            key = BatchDescriptor(each.num_tokens, each.num_reqs, is_uniform, variant)
            self._graphs[mode_of(each.cg_mode), key] = each
            sizes = self._full_sizes.setdefault(each.num_active_loras, [])
            if each.cg_mode == TheirMode.FULL and each.num_tokens not in sizes:
                insort(sizes, each.num_tokens)
        keys = {mode: [key for graph, key in self._graphs if graph is mode] for mode, _ in self._graphs}
        bounds = {key.variant[2] for _, key in self._graphs if isinstance(key.variant, tuple)} - {None}
        self._bounds = (*sorted(bounds), None)
        """The query lengths that bound a graph, the tightest first; None is for graphs that take any."""
        self._table = KeyTable(keys, mode=FULL, max_num_reqs=max_num_reqs)

    def find(
        self, num_reqs: int, num_tokens: int, query_len: int | None, loras: int, longest: int | None, ubatches: int
    ) -> BatchExecutionDescriptor | None:
        """The graph for a step, or None: the full one of the next size, else the piecewise one of the next size.

        ``query_len`` is that of a uniform batch, and ``longest`` bounds the query lengths of a batch without prefill.
        """
        return self._found[num_reqs, num_tokens, query_len, loras, longest, ubatches]

    def _find(
        self, num_reqs: int, num_tokens: int, query_len: int | None, loras: int, longest: int | None, ubatches: int
    ) -> BatchExecutionDescriptor | None:
        if num_tokens < 1:
            return None
        for mode in (FULL, CUDAGraphMode.PIECEWISE):
            for bound in self._bounds:
                if bound is not None and (longest is None or longest > bound):
                    continue
                decision = self._table.decide(
                    num_tokens, num_reqs, query_len, (loras, ubatches, bound), frozenset((mode, NONE))
                )
                found = self._graphs.get((decision.mode, decision.descriptor)) if decision.descriptor else None
                if found is not None and (mode is not FULL or self._is_next(found, num_tokens)):
                    return found
        return None

    def _is_next(self, found: BatchExecutionDescriptor, num_tokens: int) -> bool:
        sizes = self._full_sizes[found.num_active_loras]
        return self._any_size or sizes[bisect_left(sizes, num_tokens)] == found.num_tokens


class GraphManager(ModelCudaGraphManager):
    """Runner V2's manager of graphs, which captures and replays as vLLM does, and decides by this library.

    With ``lowers_sizes`` uniform decode gets one more full graph, at ``max_num_reqs`` requests, where the capture sizes
    leave the largest decode batches without one; and a larger full graph serves where the next one does not fit.
    """

    lowers_sizes = False

    def _init_candidates(self) -> None:
        super()._init_candidates()
        self._use(self._capture_descs)

    def _use(self, by_mode: dict[TheirMode, list[BatchExecutionDescriptor]]) -> None:
        if self.lowers_sizes:
            self._add_largest(by_mode.get(TheirMode.FULL, []))
        every = [each for descriptors in by_mode.values() for each in descriptors]
        self._decisions = StepDecisions(every, self.max_num_reqs, any_size=self.lowers_sizes)

    def _add_largest(self, full: list[BatchExecutionDescriptor]) -> None:
        """Add the graph of the largest uniform decode batch for each query length and number of adapters."""
        kinds = {(each.uniform_token_count, each.num_active_loras) for each in full if each.uniform_token_count}
        largest = self.compilation_config.max_cudagraph_capture_size
        for length, loras in sorted(kinds):
            added = BatchExecutionDescriptor(
                TheirMode.FULL,
                length * self.max_num_reqs,
                self.max_num_reqs,
                uniform_token_count=length,
                num_active_loras=loras,
            )
            if added not in full and added.num_tokens <= largest:
                full.append(added)
        full.sort(key=lambda each: each.num_tokens, reverse=True)

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int,
        max_query_len: int | None = None,
        num_ubatches: int = 1,
    ) -> BatchExecutionDescriptor:
        """The descriptor of the graph that serves a step; of mode NONE until graphs are captured, and for eager."""
        loras = self._resolve_effective_loras(num_active_loras)
        if self._graphs_captured:
            found = self._decisions.find(num_reqs, num_tokens, uniform_token_count, loras, max_query_len, num_ubatches)
            if found is not None:
                return found
        return BatchExecutionDescriptor(
            TheirMode.NONE, num_tokens, num_reqs, num_active_loras=loras, num_ubatches=num_ubatches
        )
