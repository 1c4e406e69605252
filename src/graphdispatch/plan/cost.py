"""``CostModel``: what a step, a capture and a graph's memory cost by size; measured, stated, or the default."""

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..config import parse_mode
from ..errors import CaptureError, ConfigError, check_count, shown
from ..modes import CUDAGraphMode
from .workload import LARGEST_SIZE, Floats

_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Points = dict[Annotated[int, Field(ge=1, le=LARGEST_SIZE)], _Amount]


def _as_points(cost: Any) -> Any:
    return dict(sorted(cost.items())) if isinstance(cost, Mapping) else {1: cost}


Cost: TypeAlias = Annotated[_Points, Field(min_length=1), BeforeValidator(_as_points)]
"""A cost by number of tokens, as ``{1: 8.0, 512: 23.4}``; one number stands for all sizes."""


class Document(BaseModel):
    """Frozen plain data, whose every bad value is a ``ConfigError``, and which JSON files hold."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_first_fault(error)) from None

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a file as JSON.

        Args:
            path: The file, which it replaces.
        """
        Path(path).write_text(self.model_dump_json(exclude_none=True) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """What was saved to a file.

        Args:
            path: The file.

        Raises:
            ConfigError: If the file cannot be read, or holds something else. It names the file and the field.
        """
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        except ValidationError as error:
            raise ConfigError(f"{path} is no {cls.__name__} that was saved: {_first_fault(error)}") from None


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    text, place = fault["msg"].removeprefix("Value error, "), ".".join(map(str, fault["loc"]))
    return f"{place}: {text}, got {shown(fault['input'])}" if place else text


class CostModel(Document):
    """The costs of eager steps and of graphs, by number of tokens. Immutable plain data.

    Between two points a cost is on the line between them. Below the first it is flat. Above the last it rises on. A
    cost that falls with the size counts as noise: the larger cost of a smaller size stands.

    Attributes:
        eager_ms: Milliseconds of an eager step.
        full_ms: Milliseconds of a step by a ``FULL`` graph; None if there are no such graphs.
        piecewise_ms: Milliseconds of a step by ``PIECEWISE`` graphs; None if there are no such graphs.
        capture_ms: Milliseconds of the capture of a graph.
        graph_bytes: Bytes that a graph holds for itself.
        pool_bytes: Bytes of the pool, which all graphs share; it is as large as its largest graph needs.
    """

    eager_ms: Cost
    full_ms: Cost | None = None
    piecewise_ms: Cost | None = None
    capture_ms: Cost = {1: 60.0}
    graph_bytes: Cost = {1: 26.0 * 2**20}
    pool_bytes: Cost = {1: 0.0}

    @classmethod
    def default(cls) -> Self:
        """Figures for want of measurements: those of an 8B model on one large GPU, true to a factor of two.

        A FULL step takes 8 ms and 0.03 ms for each token. A PIECEWISE step takes 7 % of the 8 ms more (vllm#16072).
        An eager step takes as long, but not less than the host needs to launch it, 24 ms: small batches that lose
        their graphs slow down 2 to 5 times (sglang#40346, sglang#33483, vllm#54933). A capture takes 60 ms (55 to 68:
        vllm#23184); a graph 26 MiB (vllm#20098), and the pool 0.6 MB for each token (float32 logits of 128,256 words
        and two bf16 activations of 14,336).
        """
        return cls(
            eager_ms={1: 24.0, 533: 24.0, 8192: 8 + 0.03 * 8192},
            full_ms={1: 8.03, 8192: 8 + 0.03 * 8192},
            piecewise_ms={1: 8.59, 8192: 8.56 + 0.03 * 8192},
            pool_bytes={1: 0.6e6, 8192: 0.6e6 * 8192},
        )

    @classmethod
    def measure(
        cls,
        fn: Callable[..., Any],
        example: Mapping[str, Any],
        sizes: Iterable[int],
        *,
        dynamic: Mapping[str, int] | None = None,
        mode: str | CUDAGraphMode = CUDAGraphMode.FULL,
        seconds: float = 0.2,
        **options: Any,
    ) -> Self:
        """Measure eager steps, replays, captures and bytes of a callable on this machine, with torch.

        The callable really runs, and what it writes stays written. Nothing else should run on the device.

        Args:
            fn: The callable.
            example: The keyword arguments of one call, on the device to measure. Rows are repeated or left out.
            sizes: The numbers of rows to measure. The model's sizes are rows, then.
            dynamic: The batch dimension of each tensor that has one. By default dimension 0 of every tensor.
            mode: ``FULL`` or ``PIECEWISE``: which graphs to measure.
            seconds: How long each step is repeated for its median.
            **options: More options of ``graphed``.

        Returns:
            A model that knows the graphs of ``mode``.

        Raises:
            ConfigError: If an argument is wrong.
            CaptureError: If a size has no graph, or its graph does not serve it.
        """
        from ..api.graphed import graphed  # here, since planning needs no torch

        mode, sizes = parse_mode(mode), sorted(set(sizes))
        if mode not in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
            raise ConfigError(f"mode must be FULL or PIECEWISE, got {mode.name}; measure each alone")
        if not sizes:
            raise ConfigError("sizes must hold at least one number of rows, got none")
        columns: dict[str, dict[int, float]] = {}
        for size in sizes:
            inputs, dims = _with_rows(example, dynamic, size)
            served = graphed(fn, dynamic=dims, sizes=(size,), mode=mode, **options)
            try:
                found = _capture(served, inputs)
                found["eager_ms"], found[f"{mode.name.lower()}_ms"] = (
                    _median_ms(each, inputs, seconds) for each in (fn, served)
                )
                if not (served.last_decision and served.last_decision.reason.is_graph):
                    raise CaptureError(f"no graph serves {size} rows: {served.explain(**inputs)}")
            finally:
                served.clear()
            for name, value in found.items():
                columns.setdefault(name, {})[size] = value
        return cls(**columns)

    def at(self, name: str, sizes: ArrayLike) -> Floats:
        """The cost of one kind at each of some sizes: ``cost.at("eager_ms", [1, 8])``.

        Args:
            name: The name of a field.
            sizes: The sizes, in tokens.

        Returns:
            The cost at each size, in the unit of the field.
        """
        points: Mapping[int, float] = getattr(self, name)
        known, values = np.array(list(points), float), np.maximum.accumulate(list(points.values()))
        wanted = np.asarray(sizes, float)
        found: Floats = np.interp(wanted, known, values)
        if len(known) > 1:
            found += (values[-1] - values[0]) / (known[-1] - known[0]) * np.maximum(wanted - known[-1], 0.0)
        return found

    def step_ms(self, mode: CUDAGraphMode, sizes: ArrayLike) -> Floats:
        """The time of a step by a graph of each of some sizes.

        Args:
            mode: The runtime mode.
            sizes: The sizes, in tokens.

        Returns:
            Milliseconds for each size.

        Raises:
            ConfigError: If the model does not know graphs of this mode.
        """
        name = f"{mode.name.lower()}_ms"
        if getattr(self, name, None) is None:
            raise ConfigError(f"cost must know graphs of mode {mode.name}; give {name} to CostModel")
        return self.at(name, sizes)


def _with_rows(
    example: Mapping[str, Any], dynamic: Mapping[str, int] | None, rows: int
) -> tuple[dict[str, Any], Mapping[str, int]]:
    """The arguments with so many rows, their own repeated or left out, and their batch dimensions."""
    import torch

    check_count("sizes", rows)
    if dynamic is None:
        dynamic = {name: 0 for name, value in example.items() if isinstance(value, torch.Tensor) and value.dim()}
    inputs = dict(example)
    for name, dim in dynamic.items():
        value = inputs.get(name)
        if not isinstance(value, torch.Tensor) or not value.dim() or not value.shape[dim]:
            raise ConfigError(f"example must hold a tensor {name!r} with rows in dimension {dim}, got {shown(value)}")
        inputs[name] = value.index_select(dim, torch.arange(rows, device=value.device) % value.shape[dim])
    return inputs, dynamic


def _capture(served: Any, inputs: Mapping[str, Any]) -> dict[str, float]:
    """What the capture of the one size of ``served`` costs."""
    report = served.prewarm(**inputs)
    for size, why in report.left_out.items():
        raise CaptureError(f"no {report.mode.name} graph of {size} rows: {why}")
    memory = served.memory_report()
    own = float(memory.entry_bytes + memory.driver_bytes)
    return {"capture_ms": 1e3 * report.seconds, "graph_bytes": own, "pool_bytes": memory.total - own}


def _median_ms(fn: Callable[..., Any], inputs: Mapping[str, Any], seconds: float) -> float:
    import torch
    from torch.utils.benchmark import Timer

    timer = Timer("fn(**inputs)", globals={"fn": fn, "inputs": inputs}, num_threads=torch.get_num_threads())
    with torch.no_grad():
        return 1e3 * timer.blocked_autorange(min_run_time=seconds).median
