"""A model for which graphs lose at large batches: what the adaptive policy gets of what can be got.

There are few capture sizes, so that just above one of them a padded graph computes far more than eager would.
"""

import random
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphOptions, Graphed, graphed
from graphdispatch.backends import Stopwatch
from graphdispatch.engines import AdaptiveDispatchPolicy, DispatchKey, DispatchMode

from .bench import Bench, Row, percentile

__all__ = ["TITLE", "run"]

TITLE = "Adaptive choice between eager and a padded graph (device time of all steps)"
_SIZES = (1, 8, 64, 512)
_ROUNDS = 3
_ROUND_SECONDS = 10
EAGER, GRAPH = DispatchMode.EAGER, DispatchMode.CUDAGRAPH
_Choice = Callable[[DispatchKey], DispatchMode]
_Costs = dict[tuple[int, DispatchMode], float]


def run(bench: Bench) -> None:
    """The same steps under each way to choose, the ways in turn, the best of three, or of fewer without the time."""
    sizes = _SIZES[:3] if bench.quick else _SIZES
    width, layers = (64, 2) if bench.device.type == "cpu" else (4096, 12)
    model = _model(width, layers).to(bench.device, bench.dtype).eval().requires_grad_(False)
    step = graphed(model, dynamic={"input": 0}, sizes=sizes, options=CUDAGraphOptions(capture_share=None))
    step.prewarm(torch.randn(sizes[-1], width, device=bench.device, dtype=bench.dtype))
    rng = random.Random(0)
    rows = [1 << rng.randrange(sizes[-1].bit_length()) for _ in range(60 if bench.quick else 1500)]
    rows = [min(sizes[-1], count + rng.randrange(count)) for count in rows]
    batches = {n: torch.randn(n, width, device=bench.device, dtype=bench.dtype) for n in set(rows)}
    costs = _calibrate(bench, model, step, batches)
    best = {n: min((EAGER, GRAPH), key=lambda mode, n=n: costs[n, mode]) for n in batches}
    totals: dict[str, list[float]] = {}
    for number in range(_ROUNDS):
        if number and not bench.has_time(_ROUND_SECONDS):
            break
        policy = AdaptiveDispatchPolicy()
        ways: dict[str, tuple[_Choice, AdaptiveDispatchPolicy | None]] = {
            "adaptive": (lambda key, policy=policy: policy.select_mode(key, (GRAPH, EAGER)), policy),
            "always graphs": (lambda key: GRAPH, None),
            "never graphs": (lambda key: EAGER, None),
            "oracle": (lambda key: best[key.num_tokens], None),
        }
        for name in [*ways][number:] + [*ways][:number]:
            choose, learner = ways[name]
            totals.setdefault(name, []).append(
                _total(bench, model, step, [(n, batches[n]) for n in rows], choose, learner)
            )
    case = f"{len(rows)} steps, eager is best for {sum(m is EAGER for m in best.values())} of {len(best)} sizes"
    for name, taken in totals.items():
        figures = {"seconds": min(taken), "over_oracle": min(taken) / min(totals["oracle"])}
        bench.emit(Row(case, name, figures))


def _model(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))


def _calibrate(bench: Bench, model: nn.Module, step: Graphed[..., Tensor], batches: dict[int, Tensor]) -> _Costs:
    """What each size costs either way: the median of a few steps, which no policy gets."""
    costs: _Costs = {}
    for rows, batch in batches.items():
        for mode, fn in ((EAGER, model), (GRAPH, step)):
            times: list[float] = []
            for _ in range(4 if bench.quick else 10):
                _time(bench, fn, batch, times)
            costs[rows, mode] = percentile(times, 50)
    return costs


def _total(
    bench: Bench,
    model: nn.Module,
    step: Graphed[..., Tensor],
    steps: list[tuple[int, Tensor]],
    choose: _Choice,
    learner: AdaptiveDispatchPolicy | None,
) -> float:
    """Seconds for all steps, each waited for as an engine does before it samples."""
    pending: deque[tuple[DispatchKey, DispatchMode, list[float]]] = deque()
    bench.synchronize()
    start = time.perf_counter()
    for rows, batch in steps:
        key = DispatchKey(rows, rows)
        mode = choose(key)
        taken: list[float] = []
        _time(bench, step if mode is GRAPH else model, batch, taken)
        pending.append((key, mode, taken))
        if learner is not None and len(pending) > 4:
            done, how, (elapsed,) = pending.popleft()
            learner.record(done, how, elapsed)
    return time.perf_counter() - start


def _time(bench: Bench, fn: Callable[[Tensor], Tensor], batch: Tensor, times: list[float]) -> None:
    """Run a step, wait for it, and note the device's time."""
    watch = Stopwatch()
    marks = watch.start(bench.backend)
    fn(batch)
    assert marks is not None
    watch.stop(marks, times.append)
    bench.synchronize()
    watch.collect()
