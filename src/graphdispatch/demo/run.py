"""Runs one decoder on one trace, eagerly and through graphs side by side, and times and compares each step."""

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..api.graphed import graphed
from ..backends import get_backend
from ..call.breaks import eager_break
from ..call.padding import Pad
from ..capture.piecewise import PiecewiseGraph, break_figures
from ..config import CUDAGraphOptions
from ..errors import ConfigError
from ..memory.entry import CUDAGraphEntry
from ..sizes import named_sizes
from .decoder import PRESETS, Decoder
from .result import DemoResult, DemoSettings, Pieces, StepRecord
from .steps import StepInputs, StepMaker, slots_needed
from .trace import Step

__all__ = ["SideBySide", "largest_size"]

# The largest |eager - graphed|, in units of max(1, largest |eager|). Padding may select another kernel, which sums in
# another order, and the cache carries the difference to later steps.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def largest_size(steps: Sequence[Step], settings: DemoSettings) -> int:
    """The largest step that the mode has graphs for, in rows, but at most ``max_size``."""
    largest = max((step.num_tokens for step in steps if settings.has_graphs(step.uniform_decode)), default=1)
    return min(largest, settings.max_size)


class SideBySide:
    """Two decoders with the same weights and the same inputs: one is called directly, one through ``graphed``.

    ``prewarm`` captures every size: vLLM's capture sizes up to ``largest``, the size of the largest graph. ``run``
    yields a record for each step, ``result`` sums up, and ``close`` releases the graphs. ``decoders`` are the eager
    decoder and the graphed one. In piecewise graphs, the attention of each layer is a break. The trace's flag tells
    uniform decode steps from mixed ones, for modes that treat them differently.

    Raises ``ConfigError`` for an unknown preset and ``BackendError`` if the device is not available. Not thread-safe.
    """

    def __init__(self, steps: Sequence[Step], settings: DemoSettings) -> None:
        if settings.preset not in PRESETS:
            raise ConfigError(f"preset must be one of {', '.join(PRESETS)}, got {settings.preset!r}")
        config = PRESETS[settings.preset]
        self._steps = steps
        self._settings = settings
        self._backend = get_backend(settings.device)
        on_gpu = self._backend.device_type == "cuda"
        self._dtype = torch.bfloat16 if on_gpu and settings.preset == "1b" else torch.float32
        slots = slots_needed(steps, config.window)
        self._maker = StepMaker(slots, config.window, config.vocab, settings.seed)
        self._eager = Decoder(config, slots, seed=settings.seed, device=self._backend.device, dtype=self._dtype)
        twin = self._eager.twin()
        for layer in twin.layers:
            eager_break(layer.get_submodule("attention"))
        self.decoders = (self._eager, twin)
        self.largest = largest_size(steps, settings)
        self._uniform_decode = False  # of the current step: its tensors do not tell
        self._graphed = graphed(
            twin,
            dynamic={"token_ids": 0, "slots": 0, "positions": 0},
            pad={"slots": Pad.value(twin.scratch_slot)},
            sizes=sorted({*named_sizes("vllm", self.largest), self.largest}),
            mode=settings.mode,
            uniform_decode=self._is_uniform_decode,
            backend=self._backend.name,
            options=CUDAGraphOptions(padding_writes="allow"),
        )
        self._records: list[StepRecord] = []

    @torch.inference_mode()
    def prewarm(self, *, progress: bool = False) -> None:
        """Run the eager side once at the largest size, and capture every size of the graphed side."""
        window = self._eager.config.window
        row = torch.arange(self.largest, device=self._backend.device)
        # As in any step, each row has a cache place of its own. No step reads a place before it writes it.
        example = StepInputs(row % self._eager.config.vocab, row // window, row % window)
        self._eager(**example._asdict())
        if self._settings.mode.has_graphs():
            self._graphed.prewarm(**example._asdict(), progress=progress)

    def run(self) -> Iterator[StepRecord]:
        """Run the trace: one step for each record taken. The two sides take turns at going first."""
        for number, step in enumerate(self._steps):
            with torch.inference_mode():
                record = self._run_step(step, eager_first=number % 2 == 0)
            self._records.append(record)
            yield record

    def result(self) -> DemoResult:
        """The figures of all steps so far."""
        if not self._records:
            raise ConfigError("no step was run; take the records of run() first")
        return DemoResult(
            settings=self._settings,
            device=str(self._backend.device),
            dtype=str(self._dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
            largest=self.largest,
            captures=self._graphed.stats.captures,
            capture_time_ms=self._graphed.stats.capture_time_ms,
            tolerance=_TOLERANCES[self._dtype],
            records=tuple(self._records),
            pieces={entry.mode: _pieces(entry) for entry in self._graphed.entries},
            breaks=tuple(break_figures(self._graphed.entries)),
        )

    def close(self) -> None:
        """Release the graphs."""
        self._graphed.clear()

    def _run_step(self, step: Step, *, eager_first: bool) -> StepRecord:
        made = self._maker.make(step)
        inputs = StepInputs(*(tensor.to(self._backend.device) for tensor in made))
        self._uniform_decode = step.uniform_decode
        if eager_first:
            eager_s, expected = self._timed(self._eager, inputs)
        graphed_s, logits = self._timed(self._graphed, inputs)
        decision = self._graphed.last_decision
        assert decision is not None  # every call leaves one
        if not eager_first:
            eager_s, expected = self._timed(self._eager, inputs)
        rows = decision.size if decision.reason.is_graph else 0
        return StepRecord(
            step.num_tokens,
            step.uniform_decode,
            decision.reason,
            rows,
            eager_s,
            graphed_s,
            _difference(expected, logits),
            decision.mode,
        )

    def _is_uniform_decode(self, **_: Tensor) -> bool:
        return self._uniform_decode

    def _timed(self, call: Callable[..., Tensor], inputs: StepInputs) -> tuple[float, Tensor]:
        self._backend.synchronize()
        start = time.perf_counter()
        logits = call(token_ids=inputs.token_ids, slots=inputs.slots, positions=inputs.positions)
        self._backend.synchronize()
        return time.perf_counter() - start, logits


def _pieces(entry: CUDAGraphEntry) -> Pieces:
    graph = entry.graph
    return Pieces(len(graph.graphs), len(graph.breaks)) if isinstance(graph, PiecewiseGraph) else Pieces(1, 0)


def _difference(expected: Tensor, got: Tensor) -> float:
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return float("nan")
    scale = max(1.0, float(expected.abs().max()))
    return float((expected - got).abs_().max()) / scale
