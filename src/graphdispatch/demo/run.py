"""One decoder under one trace, called directly and through graphs side by side. Each step is timed and compared."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api.graphed import graphed
from ..backends import get_backend
from ..call.rules import Pad
from ..config import CUDAGraphOptions
from ..errors import ConfigError
from ..reasons import Reason
from .decoder import PRESETS, Decoder
from .trace import Step

__all__ = ["DemoResult", "SideBySide", "StepRecord", "build"]

Model = tuple[Decoder, dict[str, Any], dict[str, Any]]
"""The decoder, the keyword arguments of one call, and options for ``graphed``."""

_SLOTS = 16
_EXAMPLE_ROWS = 128
# The largest |eager - graphed|, in units of max(1, largest |eager|). Padding may select another kernel, which sums in
# another order, and the cache carries the difference to later steps.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def build(preset: str = "tiny", device: str = "auto", seed: int = 0) -> Model:
    """A decoder with an empty cache. ``graphdispatch audit graphdispatch.demo:build`` audits it.

    Args:
        preset: The decoder's size, a key of ``PRESETS``.
        device: ``auto``, ``cpu`` or ``cuda``.
        seed: Seeds the weights.

    Raises:
        ConfigError: The preset is unknown.
        BackendError: The device is unknown or not available.
    """
    if preset not in PRESETS:
        raise ConfigError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    backend, config = get_backend(device), PRESETS[preset]
    dtype = torch.bfloat16 if backend.device_type == "cuda" and preset == "1b" else torch.float32
    decoder = Decoder(config, _SLOTS, seed=seed, device=backend.device, dtype=dtype)
    row = torch.arange(_EXAMPLE_ROWS, device=backend.device)
    # As in any step, each row has a place of its own in the cache.
    example = {"token_ids": row % config.vocab, "slots": row // config.window, "positions": row % config.window}
    # Padding rows write to the scratch slot, which no request reads.
    pad, options = {"slots": Pad.value(decoder.scratch_slot)}, CUDAGraphOptions(padding_writes="allow")
    return decoder, example, {"dynamic": dict.fromkeys(example, 0), "pad": pad, "options": options}


class StepRecord(NamedTuple):
    """One step: its rows, the size of the graph that served it (0: it ran eagerly), why, and both times in seconds."""

    rows: int
    size: int
    reason: Reason
    eager: float
    graphed: float
    difference: float


@dataclass(frozen=True)
class DemoResult:
    """What a run found. ``tolerance`` and each record's difference are relative to the largest output of the step."""

    records: tuple[StepRecord, ...]
    tolerance: float

    @property
    def hit_rate(self) -> float:
        """The share of steps that a graph served."""
        return sum(record.size > 0 for record in self.records) / len(self.records)

    @property
    def padding(self) -> float:
        """Padding rows as a share of the real rows that graphs served; 0.0 if graphs served none."""
        served = [record for record in self.records if record.size]
        return sum(record.size for record in served) / sum(record.rows for record in served) - 1 if served else 0.0

    @property
    def median_ms(self) -> tuple[float, float]:
        """The median step in milliseconds: eager, and through graphs."""
        return 1e3 * median(r.eager for r in self.records), 1e3 * median(r.graphed for r in self.records)

    @property
    def eager_reasons(self) -> Counter[Reason]:
        """Why steps ran eagerly on the side of the graphs, with the number of steps."""
        return Counter(record.reason for record in self.records if not record.size)

    @property
    def differing(self) -> int:
        """The number of steps whose output differs by more than the tolerance or is not a number."""
        return sum(not record.difference <= self.tolerance for record in self.records)

    @property
    def largest_difference(self) -> float:
        """The largest difference of any step; NaN if any is."""
        return float(torch.tensor([record.difference for record in self.records]).max())

    def by_graph(self) -> dict[int, "DemoResult"]:
        """The steps of each graph, by its size, from the smallest; the eager steps come last, under 0."""
        sizes = sorted({record.size for record in self.records}, key=lambda size: (not size, size))
        return {size: replace(self, records=tuple(r for r in self.records if r.size == size)) for size in sizes}


class SideBySide:
    """Two decoders with the same weights: one is called directly, one through ``graphed``. Not thread-safe.

    Captures all graphs at once, of the powers of two up to ``max_size``.

    Args:
        preset: The decoder's size, a key of ``PRESETS``.
        device: ``auto``, ``cpu`` or ``cuda``.
        max_size: The rows of the largest graph. Larger steps run eagerly.
        seed: Seeds weights and tokens.

    Raises:
        ConfigError: The preset is unknown, or ``max_size`` is not a size.
        BackendError: The device is unknown or not available.
    """

    def __init__(self, preset: str = "tiny", device: str = "auto", *, max_size: int = 64, seed: int = 0) -> None:
        self.eager, example, options = build(preset, device, seed)
        self.graphed = graphed(self.eager.twin(), sizes="pow2", max_size=max_size, backend=device, **options)
        self.tolerance = _TOLERANCES[self.eager.head.weight.dtype]
        self._backend = get_backend(device)
        self._tokens = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            self.eager(**example)
            self.graphed.prewarm(**example, compare="all")

    def run(self, trace: Iterable[Step]) -> Iterator[StepRecord]:
        """Run the trace, one step for each record taken. The two sides take turns at going first."""
        for number, step in enumerate(trace):
            token_ids = torch.randint(self.eager.config.vocab, (step.num_tokens,), generator=self._tokens)
            inputs = {
                "token_ids": token_ids,
                "slots": torch.tensor(step.slots),
                "positions": torch.tensor(step.positions),
            }
            placed = {name: tensor.to(self._backend.device) for name, tensor in inputs.items()}
            with torch.inference_mode():
                record = self._run_step(placed, eager_first=number % 2 == 0)
            yield record

    def _run_step(self, inputs: dict[str, Tensor], *, eager_first: bool) -> StepRecord:
        times, outputs = {}, {}
        for side in ("eager", "graphed") if eager_first else ("graphed", "eager"):
            self._backend.synchronize()
            start = time.perf_counter()
            outputs[side] = getattr(self, side)(**inputs)
            self._backend.synchronize()
            times[side] = time.perf_counter() - start
        decision = self.graphed.last_decision
        assert decision is not None  # every call leaves one
        size = decision.size if decision.reason.is_graph else 0
        return StepRecord(len(inputs["slots"]), size, decision.reason, **times, difference=_difference(**outputs))


def _difference(eager: Tensor, graphed: Tensor) -> float:
    """The largest difference in units of max(1, largest |eager|); NaN if shapes or types differ."""
    if eager.shape != graphed.shape or eager.dtype != graphed.dtype:
        return float("nan")
    return float((eager - graphed).abs().max()) / max(1.0, float(eager.abs().max()))
