"""What it costs to capture each of vLLM's sizes: the demo's tiny decoder, prewarmed on the CPU."""

from statistics import median

import torch

from graphdispatch.engines import named_sizes

from .decoder import tiny_step
from .timing import Effort, Row

__all__ = ["TITLE", "rows"]

TITLE = "capture of the tiny decoder by prewarm, for each of vLLM's capture sizes to 128"


def rows(effort: Effort) -> list[Row]:
    """Warm-up, recording and comparison of one size, as the entry's ``capture_time_ms`` has it; and the sum."""
    sizes = named_sizes("vllm", 128)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    row = torch.arange(sizes[-1])
    for _ in range(effort.captures):
        _, step = tiny_step(sizes[-1], sizes)
        step.prewarm(token_ids=row, slots=row, positions=row % 32)
        for entry in step.entries:
            times[entry.size].append(entry.capture_time_ms)
        step.clear()
    found = [Row(f"{size:3} rows", median(kept) * 1e3) for size, kept in times.items()]
    return [*found, Row(f"all {len(sizes)} sizes", sum(line.value for line in found))]
