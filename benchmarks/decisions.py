"""What a decision costs: ``decide`` and ``dispatch`` against plain-Python transcriptions of vLLM's contracts.

The transcriptions follow the published rules (vLLM 0.11.1: the caller pads; 0.33: padding, LoRA counts and allowed
modes inside; Model Runner V2 of 0.32: a list of candidates for each number of tokens) over the same keys. The
dispatcher that runs graphs is compared with a bare replay of its graph, which does nothing.
"""

from bisect import bisect_left
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from graphdispatch import CUDAGraphMode as Mode
from graphdispatch.engines import BatchDescriptor, CudagraphDispatcher, CudagraphKeyDispatcher, DispatchKey, named_sizes
from graphdispatch.testing import MockCUDAGraph

from .timing import Effort, Row, interleaved, row

__all__ = ["TITLE", "rows"]

TITLE = "a decision, compared with plain-Python transcriptions of vLLM's dispatchers (0.11.1, 0.33, Model Runner V2)"
NONE, PIECEWISE, FULL = Mode.NONE, Mode.PIECEWISE, Mode.FULL
RUNTIME_MODES = frozenset((NONE, PIECEWISE, FULL))
MAX_REQS, COUNTS = 256, (0, 1, 2, 4, 5)
SIZES = named_sizes("vllm", 512)


class OldDescriptor(NamedTuple):
    """The key of 0.11.1."""

    num_tokens: int
    uniform_decode: bool = False
    has_lora: bool = False

    @property
    def non_uniform(self) -> "OldDescriptor":
        """The key of a graph for any batch."""
        return OldDescriptor(self.num_tokens, has_lora=self.has_lora)


class OldContract:
    """0.11.1: two sets, looked up in turn."""

    def __init__(self) -> None:
        self.keys = {
            PIECEWISE: {OldDescriptor(size) for size in SIZES},
            FULL: {OldDescriptor(size, True) for size in SIZES if size <= MAX_REQS},
        }
        self.keys_initialized = True

    def dispatch(
        self, batch_descriptor: OldDescriptor, use_cascade_attn: bool = False
    ) -> tuple[Mode, OldDescriptor | None]:
        """The exact full graph, the general full one, the general piecewise one, nothing."""
        if not self.keys_initialized:
            return NONE, None
        general = batch_descriptor.non_uniform
        if not use_cascade_attn:
            if batch_descriptor in self.keys[FULL]:
                return FULL, batch_descriptor
            if general in self.keys[FULL]:
                return FULL, general
        if general in self.keys[PIECEWISE]:
            return PIECEWISE, general
        return NONE, None


@dataclass(frozen=True)
class NewDescriptor:
    """The key of 0.33."""

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0


class NewContract:
    """0.33: pads by a table, rounds LoRA counts up, and looks in the allowed modes' sets."""

    def __init__(self) -> None:
        self.mode, self.largest = Mode.FULL_AND_PIECEWISE, SIZES[-1]
        self.padded = [SIZES[bisect_left(SIZES, tokens)] for tokens in range(SIZES[-1] + 1)]
        self.keys: dict[Mode, set[NewDescriptor]] = {PIECEWISE: set(), FULL: set()}
        self.keys_initialized = True
        for size in SIZES:
            for count in COUNTS:
                self.keys[PIECEWISE].add(NewDescriptor(size, None, False, count > 0, count))
                if size <= MAX_REQS:
                    self.keys[FULL].add(NewDescriptor(size, size, True, count > 0, count))

    def dispatch(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        has_lora: bool = False,
        num_active_loras: int = 0,
        valid_modes: Set[Mode] | None = None,
        invalid_modes: Set[Mode] | None = None,
    ) -> tuple[Mode, NewDescriptor]:
        """One size is tried: in the full graphs, then in the piecewise ones."""
        allowed = valid_modes or RUNTIME_MODES
        if invalid_modes:
            allowed = allowed - invalid_modes
        assert allowed, "no mode is allowed"
        if not self.keys_initialized or self.mode is NONE or num_tokens > self.largest or allowed <= {NONE}:
            return NONE, NewDescriptor(num_tokens)
        if has_lora and num_active_loras > 0:
            num_active_loras = COUNTS[bisect_left(COUNTS, num_active_loras)]
        wanted = self._padded(num_tokens, uniform_decode and self.mode.separate_routine(), has_lora, num_active_loras)
        if FULL in allowed and wanted in self.keys[FULL]:
            return FULL, wanted
        if PIECEWISE in allowed:
            general = replace(wanted, num_reqs=None, uniform=False)
            if general in self.keys[PIECEWISE]:
                return PIECEWISE, general
        assert NONE in allowed, "no graph, and eager is not allowed"
        return NONE, NewDescriptor(num_tokens)

    def _padded(self, num_tokens: int, uniform: bool, has_lora: bool, count: int) -> NewDescriptor:
        padded = self.padded[num_tokens]
        return NewDescriptor(padded, padded if uniform else min(padded, MAX_REQS), uniform, has_lora, count)


@dataclass(frozen=True)
class RunnerDescriptor:
    """What Model Runner V2 dispatches to."""

    mode: Mode
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None = None
    max_query_len: int | None = None
    num_active_loras: int = 0
    num_ubatches: int = 1


class RunnerContract:
    """Model Runner V2: for every number of tokens the graphs that may serve it, full ones first, tried in turn."""

    def __init__(self) -> None:
        self.is_captured, counts = True, COUNTS
        self.candidates: dict[tuple[int, int], list[RunnerDescriptor]] = {}
        full = [RunnerDescriptor(FULL, size, size, 1) for size in SIZES if size <= MAX_REQS]
        general = [RunnerDescriptor(PIECEWISE, size, None) for size in SIZES]
        for tokens in range(1, SIZES[-1] + 1):
            fitting = [graph for graph in (*full, *general) if graph.num_tokens >= tokens]
            for count in counts:
                self.candidates[tokens, count] = [replace(graph, num_active_loras=count) for graph in fitting]

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int = 0,
        max_query_len: int | None = None,
        num_ubatches: int = 1,
    ) -> RunnerDescriptor:
        """The first graph that fits; a call of a function asks each."""
        count = self._captured_count(num_active_loras)
        if self.is_captured and num_tokens > 0 and (num_tokens, count) in self.candidates:
            for graph in self.candidates[num_tokens, count]:
                if graph_fits(graph, num_reqs, num_tokens, uniform_token_count, count, max_query_len, num_ubatches):
                    return graph
        return RunnerDescriptor(NONE, num_tokens, num_reqs, num_active_loras=count, num_ubatches=num_ubatches)

    def _captured_count(self, num_active_loras: int) -> int:
        return COUNTS[bisect_left(COUNTS, num_active_loras)] if num_active_loras else 0


def graph_fits(
    graph: RunnerDescriptor,
    num_reqs: int,
    num_tokens: int,
    uniform_token_count: int | None,
    num_active_loras: int,
    max_query_len: int | None,
    num_ubatches: int,
) -> bool:
    """Whether Model Runner V2 may serve a batch by a graph."""
    return (
        graph.uniform_token_count in (None, uniform_token_count)
        and (graph.max_query_len is None or (max_query_len is not None and max_query_len <= graph.max_query_len))
        and (graph.num_reqs is None or num_reqs <= graph.num_reqs)
        and num_tokens <= graph.num_tokens
        and num_active_loras == graph.num_active_loras
        and num_ubatches == graph.num_ubatches
    )


class Case(NamedTuple):
    """One case: our call, and the transcription's."""

    name: str
    ours: Callable[[], object]
    theirs: Callable[[], object]


def cases() -> list[Case]:
    """The batches of a decoding engine: hits, padded hits, adapters, excluded modes, and misses."""
    plan = CudagraphKeyDispatcher(capture_sizes=SIZES, max_num_reqs=MAX_REQS, variants=(None, *COUNTS))
    plan.initialize_cudagraph_keys(Mode.FULL_AND_PIECEWISE)
    old, new, runner = OldContract(), NewContract(), RunnerContract()
    decode, mixed, miss = BatchDescriptor(24, None, True), BatchDescriptor(24), BatchDescriptor(25)
    old_decode, old_mixed, old_miss = OldDescriptor(24, True), OldDescriptor(24), OldDescriptor(25)
    no_full = frozenset((NONE, PIECEWISE))
    return [
        Case("dispatch, decode", lambda: plan.dispatch(decode), lambda: old.dispatch(old_decode)),
        Case("dispatch, mixed", lambda: plan.dispatch(mixed), lambda: old.dispatch(old_mixed)),
        Case("dispatch, miss", lambda: plan.dispatch(miss), lambda: old.dispatch(old_miss)),
        Case("decide, decode", lambda: plan.decide(20, 20, query_len=1), lambda: new.dispatch(20, True)),
        Case("decide, mixed", lambda: plan.decide(20, 3), lambda: new.dispatch(20)),
        Case("decide, 3 adapters", lambda: plan.decide(20, 3, variant=3), lambda: new.dispatch(20, False, True, 3)),
        Case(
            "decide, without FULL",
            lambda: plan.decide(20, 20, query_len=1, allowed_modes=no_full),
            lambda: new.dispatch(20, True, valid_modes=no_full),
        ),
        Case(
            "decide, FULL excluded",
            lambda: plan.decide(20, 20, query_len=1, excluded_modes={FULL}),
            lambda: new.dispatch(20, True, invalid_modes={FULL}),
        ),
        Case("decide, decode (V2)", lambda: plan.decide(20, 20, query_len=1), lambda: runner.dispatch(20, 20, 1)),
        Case("decide, prefill (V2)", lambda: plan.decide(500, 3), lambda: runner.dispatch(3, 500, None)),
        Case("decide, above any size (V2)", lambda: plan.decide(2000), lambda: runner.dispatch(3, 2000, None)),
        Case("decide, above largest", lambda: plan.decide(2000), lambda: new.dispatch(2000)),
        Case("decide, above any limit", lambda: plan.decide(20_000), lambda: new.dispatch(20_000)),
    ]


def rebuild(sizes: range) -> None:
    """Build the table of 8 variants of ``sizes`` in mode FULL, and ask it once."""
    plan = CudagraphKeyDispatcher(capture_sizes=sizes, max_num_reqs=sizes[-1], variants=range(8))
    plan.initialize_cudagraph_keys(FULL)
    plan.decide(sizes[0])


def executing() -> Case:
    """A hit of the dispatcher that runs graphs."""
    graph = MockCUDAGraph()
    graph.capture_begin()
    graph.capture_end()
    dispatcher, key = CudagraphDispatcher(lambda: None), DispatchKey(8, 8)
    dispatcher.register_graph(key, graph)
    return Case("CudagraphDispatcher.dispatch, of an empty graph", lambda: dispatcher.dispatch(key), graph.replay)


def rows(effort: Effort) -> list[Row]:
    """Every kind of batch against its transcription, a hit of the executing dispatcher, and rebuilding large tables."""
    found = [row(case.name, case.ours, case.theirs, effort.turns) for case in (*cases(), executing())]
    for sizes in (range(1, 1001), range(8, 8001, 8)):
        (seconds,) = interleaved([partial(rebuild, sizes)], effort.captures)
        found.append(Row(f"rebuild of {len(sizes)} sizes to {sizes[-1]} x 8 variants", seconds.median * 1e6))
    return found
