"""One decoder under one trace, called directly and through graphs side by side. Each step is timed and compared.

The trace is generated: which tokens the scheduler of a small chat service puts into each step.
"""

import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api.graphed import graphed
from ..api.progress import Progress
from ..backends import get_backend
from ..config import CUDAGraphOptions
from ..errors import ConfigError
from ..reasons import Reason
from ..runtime.rules import Pad
from .decoder import PRESETS, Decoder

Model = tuple[Decoder, dict[str, Any], dict[str, Any]]
"""The decoder, the keyword arguments of one call, and options for ``graphed``."""

_BURSTS_PER_STEP = 0.08
_LARGEST_BURST = 8
_TOKEN_BUDGET = 128
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
        ConfigError: The preset is unknown, or is too large for the CPU.
        BackendError: The device is unknown or not available.
    """
    if preset not in PRESETS:
        raise ConfigError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    backend, config = get_backend(device), PRESETS[preset]
    if preset == "1b" and backend.device_type == "cpu":
        raise ConfigError("preset '1b' needs a GPU, and this would run on the CPU; choose tiny or small")
    dtype = torch.bfloat16 if backend.device_type == "cuda" and preset == "1b" else torch.float32
    decoder = Decoder(config, _SLOTS, seed=seed, device=backend.device, dtype=dtype)
    row = torch.arange(_EXAMPLE_ROWS, device=backend.device)
    # As in any step, each row has a place of its own in the cache.
    example = {"token_ids": row % config.vocab, "slots": row // config.window, "positions": row % config.window}
    # Padding rows write to the scratch slot, which no request reads.
    pad, options = {"slots": Pad.value(decoder.scratch_slot)}, CUDAGraphOptions(padding_writes="allow")
    return decoder, example, {"dynamic": dict.fromkeys(example, 0), "pad": pad, "options": options}


class Step(NamedTuple):
    """One step. Each row is one token: of the request in ``slots[i]``, at ``positions[i]`` of its sequence."""

    slots: list[int]
    positions: list[int]

    @property
    def num_tokens(self) -> int:
        """The number of rows."""
        return len(self.slots)

    @property
    def num_reqs(self) -> int:
        """The number of requests that have a row."""
        return len(set(self.slots))


@dataclass
class _Request:
    slot: int
    prompt: int
    total: int
    done: int = 0


def generate_trace(num_steps: int, slots: int = 16, seed: int = 0, *, window: int = 64) -> list[Step]:
    """A trace in which requests arrive in bursts. The same arguments give the same trace.

    Decoding requests come first in a step, with one token each. Then come prompts, in chunks within a budget of 128
    tokens for the step.

    Args:
        num_steps: The number of steps.
        slots: The most requests that run at once, from 1 to 128.
        seed: Seeds arrivals and lengths.
        window: The longest sequence in tokens, at least 8: a prompt takes at most half of it, and an output, too.
    """
    rng = random.Random(seed)
    free, running = list(range(slots)), list[_Request]()
    steps = []
    for _ in range(num_steps):
        if not running or rng.random() < _BURSTS_PER_STEP:
            for _ in range(min(len(free), rng.randint(1, _LARGEST_BURST))):
                prompt, output = rng.randint(2, window // 2), rng.randint(window // 8, window // 2)
                running.append(_Request(free.pop(), prompt, prompt + output))
        step = Step([], [])
        for request in sorted(running, key=lambda each: each.done < each.prompt):
            count = min(max(1, request.prompt - request.done), _TOKEN_BUDGET - step.num_tokens)
            step.slots.extend([request.slot] * count)
            step.positions.extend(range(request.done, request.done + count))
            request.done += count
        steps.append(step)
        free += [request.slot for request in running if request.done == request.total]
        running = [request for request in running if request.done < request.total]
    return steps


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
        progress: As ``prewarm`` of ``graphed`` takes it.

    Raises:
        ConfigError: The preset is unknown, or ``max_size`` is not a size.
        BackendError: The device is unknown or not available.
    """

    def __init__(
        self,
        preset: str = "tiny",
        device: str = "auto",
        *,
        max_size: int = 64,
        seed: int = 0,
        progress: bool | Progress = False,
    ) -> None:
        self.eager, example, options = build(preset, device, seed)
        self.graphed = graphed(self.eager.twin(), sizes="pow2", max_size=max_size, backend=device, **options)
        self.tolerance = _TOLERANCES[self.eager.head.weight.dtype]
        self._backend = get_backend(device)
        self._tokens = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            self.eager(**example)
            self.graphed.prewarm(**example, progress=progress)

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
