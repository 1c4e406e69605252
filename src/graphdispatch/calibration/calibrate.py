"""``calibrate``: measures the steps and graphs of a callable on this machine, as a cost model for planning."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from ..api.graphed import Graphed, graphed
from ..backends import Backend, get_backend
from ..capture.collector import swept_collector
from ..config import parse_mode
from ..errors import CaptureError, ConfigError, check_count
from ..modes import CUDAGraphMode
from ..plan.cost import CostModel, Curve, GraphCosts
from ..serve.prewarm import PrewarmReport
from ..sizes import check_sizes, named_sizes

__all__ = ["Calibration", "calibrate"]

_CAPTURES = 3
_LEAST_REPEATS = 5
_WARM_UPS = 2

# The standard error of a median of n samples is 1.2533 sigma / sqrt(n). For normal noise, sigma is the interquartile
# range / 1.349.
_ERROR_OF_MEDIAN = 1.2533 / 1.349

_Measured = tuple[float, float]
"""A median and its standard error."""


@dataclass(frozen=True)
class Calibration:
    """What was measured: ``cost`` on ``device``, each step ``repeats`` times.

    ``held_bytes`` is, for each mode, what the graphs of all sizes held together. Compare it with ``expected_bytes``,
    for which the cost model adds up graphs that were measured alone.
    """

    cost: CostModel
    device: str
    repeats: int
    held_bytes: Mapping[CUDAGraphMode, int]

    def expected_bytes(self, mode: CUDAGraphMode) -> float:
        """The bytes that the measured sizes hold together in ``mode``, according to the cost model."""
        costs = self.cost.graphs(mode)
        sizes = costs.graph_bytes.sizes
        return float(costs.graph_bytes.at(sizes).sum() + costs.pool_bytes.at(sizes).max())


def calibrate(
    fn: Callable[..., Any],
    example: Mapping[str, Any],
    *,
    sizes: Iterable[int] | None = None,
    mode: str | CUDAGraphMode = CUDAGraphMode.FULL,
    repeats: int = 30,
    dynamic: Mapping[str, int] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> Calibration:
    """Measure eager steps, replays, captures and bytes of ``fn`` at ``sizes``, on the device of ``example``.

    ``example`` holds the keyword arguments of one call. For each size, its rows are repeated or left out. ``sizes`` are
    numbers of rows (default: the powers of two up to the example's). ``dynamic`` names the batch dimensions (default:
    dimension 0 of every tensor). ``options`` go to ``graphed``. ``mode`` FULL or PIECEWISE measures graphs of that
    mode, and a mode that combines them measures both.

    First, each size is captured alone, three times, as ``prewarm`` does it. The cost of a capture is the median time,
    checks included. Then all sizes are captured, and each size runs eagerly and by its graph in turn, ``repeats``
    times. A step time is the median from the call to the idle device, by ``clock`` (seconds). Its error is the standard
    error of the median, estimated from the quartiles. Memory that graphs share (pool, static inputs) counts as pool.

    The callable really runs, and what it writes stays written. Raises ``ConfigError`` for bad arguments, and
    ``CaptureError`` if a size cannot be captured or no graph serves it.
    """
    check_count("repeats", repeats, _LEAST_REPEATS)
    mode = parse_mode(mode)
    modes = sorted({mode.decode_mode(), mode.mixed_mode()} - {CUDAGraphMode.NONE})
    if not modes:
        raise ConfigError("mode must have graphs to measure, got NONE")
    if dynamic is None:
        dynamic = {name: 0 for name, value in example.items() if isinstance(value, torch.Tensor) and value.dim()}
    call = _Example(example, dynamic)
    checked = named_sizes("pow2", call.rows) if sizes is None else check_sizes(sorted(set(sizes)), "sizes")
    inputs = {size: call.of(size) for size in checked}
    served = {each: graphed(fn, dynamic=dynamic, sizes=checked, mode=each, **options) for each in modes}
    backend = get_backend("auto", call.device)
    try:
        for one in served.values():  # so that no measurement contains what is loaded or made once
            _capture(one, inputs[checked[-1]], checked[-1:])
        with torch.no_grad(), swept_collector():  # so that no single capture pays for a garbage collection
            graphs = {each: [_capture_alone(one, inputs, size) for size in checked] for each, one in served.items()}
            for one in served.values():
                one.clear()
                _capture(one, inputs[checked[-1]], checked)
            times = _step_times({CUDAGraphMode.NONE: fn, **served}, inputs, backend, repeats, clock)
            held = {each: one.memory_bytes for each, one in served.items()}
    finally:
        for one in served.values():
            one.clear()
    costs = {each.name.lower(): _graph_costs(times[each], checked, graphs[each]) for each in modes}
    eager = Curve.of(times[CUDAGraphMode.NONE], "eager_ms")
    cost = CostModel(format="graphdispatch.cost", version=1, source="measured", eager_ms=eager, **costs)
    return Calibration(cost, _name(backend), repeats, held)


class _Alone(NamedTuple):
    """One size captured alone."""

    capture_ms: _Measured
    graph_bytes: int
    pool_bytes: int


def _capture_alone(served: Graphed[..., Any], inputs: Mapping[int, Mapping[str, Any]], size: int) -> _Alone:
    """Measure the time of several captures, and the bytes of the last: the first pays what the driver does once."""
    largest, times = max(inputs), []
    for _ in range(_CAPTURES):
        served.clear()
        times.append(1e3 * _capture(served, inputs[largest], [size]).seconds)
    report = served.memory_report()
    (entry,) = report.entries
    # Static inputs are always made for the largest size, so each size pays for its share of them.
    shared = report.pool_bytes + (report.input_bytes + report.ring_bytes) * size // largest
    return _Alone(_median(times), entry.own + entry.driver, shared)


def _capture(served: Graphed[..., Any], example: Mapping[str, Any], sizes: Sequence[int]) -> PrewarmReport:
    report = served.prewarm(sizes=sizes, **example)
    for (mode, size), why in report.left_out.items():
        raise CaptureError(f"no {mode.name} graph of {size} rows, so no measurement: {why}")
    return report


def _step_times(
    calls: Mapping[CUDAGraphMode, Callable[..., Any]],
    inputs: Mapping[int, Mapping[str, Any]],
    backend: Backend,
    repeats: int,
    clock: Callable[[], float],
) -> dict[CUDAGraphMode, dict[int, _Measured]]:
    """Milliseconds by mode (NONE: eager) and size. All take turns, so a change of the clock rate hits all alike."""
    samples: dict[CUDAGraphMode, dict[int, list[float]]] = {mode: {size: [] for size in inputs} for mode in calls}
    for number in range(_WARM_UPS + repeats):
        for size, arguments in inputs.items():
            for mode, call in calls.items():
                backend.synchronize()
                started = clock()
                call(**arguments)
                backend.synchronize()
                taken = clock() - started
                if number >= _WARM_UPS:
                    samples[mode][size].append(1e3 * taken)
                elif isinstance(call, Graphed):
                    _require_graph(call, size)
    return {mode: {size: _median(times) for size, times in each.items()} for mode, each in samples.items()}


def _require_graph(served: Graphed[..., Any], size: int) -> None:
    decision = served.last_decision
    assert decision is not None  # every call leaves one
    if not decision.reason.is_graph:
        raise CaptureError(
            f"no graph serves {size} rows, so no measurement: {decision.explain()}; see docs/footguns.md",
            decision.reason,
        )


def _graph_costs(times: Mapping[int, _Measured], sizes: Sequence[int], alone: Sequence[_Alone]) -> GraphCosts:
    capture_ms, graph_bytes, pool_bytes = (dict(zip(sizes, column, strict=True)) for column in zip(*alone, strict=True))
    return GraphCosts(
        step_ms=Curve.of(times, "step_ms"),
        capture_ms=Curve.of(capture_ms, "capture_ms"),
        graph_bytes=Curve.of(graph_bytes, "graph_bytes"),
        pool_bytes=Curve.of(pool_bytes, "pool_bytes"),
    )


def _median(samples: Sequence[float]) -> _Measured:
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return middle, _ERROR_OF_MEDIAN * (high - low) / math.sqrt(len(samples))


class _Example:
    """The keyword arguments of one call, at any number of rows. ``dynamic`` names the batch dimensions."""

    def __init__(self, example: Mapping[str, Any], dynamic: Mapping[str, int]) -> None:
        leaves, self._spec = tree_flatten_with_path(dict(example))
        self._leaves: list[tuple[Any, int | None]] = []
        for path, leaf in leaves:
            dim = dynamic.get(f"{path[0].key}{keystr(path[1:])}")  # type: ignore[attr-defined]
            has_rows = isinstance(leaf, torch.Tensor) and dim in range(-leaf.dim(), leaf.dim())
            self._leaves.append((leaf, dim if has_rows else None))
        batched = [(leaf.shape[dim], leaf.device) for leaf, dim in self._leaves if dim is not None]
        if not batched or not batched[0][0]:
            raise ConfigError(
                f"example must hold a tensor with rows in a dimension that dynamic names, got {sorted(example)} and "
                f"dynamic={dict(dynamic)}"
            )
        self.rows, self.device = batched[0]
        """Those of the first tensor that has a batch dimension."""

    def of(self, rows: int) -> dict[str, Any]:
        """The arguments with ``rows`` rows: their own, repeated as often as needed."""
        sized = [
            leaf if dim is None else leaf.index_select(dim, torch.arange(rows, device=leaf.device) % leaf.shape[dim])
            for leaf, dim in self._leaves
        ]
        arguments: dict[str, Any] = tree_unflatten(sized, self._spec)
        return arguments


def _name(backend: Backend) -> str:
    device = backend.device
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
