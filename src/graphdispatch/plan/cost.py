"""``CostModel``: what a step, a capture and a graph's memory cost, by batch size; measured, stated, or the default."""

import reprlib
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import ConfigError
from ..modes import CUDAGraphMode
from .storage import read_document, write_document
from .traffic import LARGEST_STEP, Floats

__all__ = ["Cost", "CostModel", "Curve", "GraphCosts"]

Cost: TypeAlias = float | Mapping[int, float | tuple[float, float]] | Callable[[int], float]
"""A cost by size: one number for all sizes, measured points (``{size: value}`` or ``{size: (value, error)}``), or a
function of the size."""

_SAMPLED = (*range(1, 65), *sorted({round(64 * 2 ** (step / 12)) for step in range(1, 97)}))

_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Curve(_Frozen):
    """A cost by size that never falls: points, and a line between neighbours.

    ``values`` are as they were given, ``errors`` their half-widths (empty: not known). Points that fall with the size
    are noise far more often than kernels that gain from a larger batch, and a plan needs costs that do not fall (else
    the nearest graph would not be the fastest); so ``at`` uses the isotonic fit, the nearest rising sequence by least
    squares, weighted by the errors, and ``moved`` says how far it had to go. Below the first point the curve is flat;
    above the last it rises as it does between the last two, and not less than on average.
    """

    sizes: tuple[Annotated[int, Field(ge=1, le=LARGEST_STEP)], ...] = Field(min_length=1)
    values: tuple[_Amount, ...]
    errors: tuple[_Amount, ...] = ()

    @model_validator(mode="after")
    def _points(self) -> Self:
        if len(self.values) != len(self.sizes) or len(self.errors) not in (0, len(self.sizes)):
            raise ValueError("expected a value, and an error if there are any, for each size")
        if any(left >= right for left, right in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError("expected sizes in strictly increasing order")
        return self

    @classmethod
    def of(cls, cost: Cost, name: str = "cost") -> "Curve":
        """The curve of a number, of points, or of a function, which is sampled: each size to 64, 12 for each doubling
        from there to 16,384. Raises ``ConfigError`` that names the cost as ``name``."""
        if callable(cost):
            cost = {size: float(cost(size)) for size in _SAMPLED}
        elif not isinstance(cost, Mapping):
            cost = {1: float(cost)}
        points = sorted(cost.items())
        if not points:
            raise ConfigError(f"{name} must hold a point, got none")
        pairs = [value if isinstance(value, tuple) else (value, 0.0) for _, value in points]
        values, errors = (tuple(map(float, column)) for column in zip(*pairs, strict=True))
        try:
            return cls(sizes=tuple(size for size, _ in points), values=values, errors=errors if any(errors) else ())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join((name, *map(str, first["loc"])))
            raise ConfigError(f"{where} is not valid: {first['msg']}, got {reprlib.repr(first['input'])}") from None

    @cached_property
    def fitted(self) -> tuple[float, ...]:
        """The values after the isotonic fit (pool adjacent violators)."""
        weights = (
            [error**-2 for error in self.errors] if self.errors and min(self.errors) > 0 else [1.0] * len(self.sizes)
        )
        blocks: list[tuple[float, float, int]] = []
        for value, weight in zip(self.values, weights, strict=True):
            mean, mass, count = value, weight, 1
            while blocks and blocks[-1][0] > mean:
                before, heavy, many = blocks.pop()
                mean, mass, count = (before * heavy + mean * mass) / (heavy + mass), heavy + mass, many + count
            blocks.append((mean, mass, count))
        return tuple(mean for mean, _, count in blocks for _ in range(count))

    @property
    def moved(self) -> float:
        """The largest share of its value by which the fit moved a point; 0.0 where the points never fall."""
        pairs = zip(self.values, self.fitted, strict=True)
        return max(abs(fit - value) / max(value, fit) if fit != value else 0.0 for value, fit in pairs)

    def at(self, sizes: ArrayLike) -> Floats:
        """The cost at each of ``sizes``."""
        wanted = np.asarray(sizes, float)
        values: Floats = np.interp(wanted, self.sizes, self.fitted)
        if len(self.sizes) > 1:
            rise = np.diff(self.fitted[-2:])[0] / (self.sizes[-1] - self.sizes[-2])
            average = (self.fitted[-1] - self.fitted[0]) / (self.sizes[-1] - self.sizes[0])
            values += max(rise, average) * np.maximum(wanted - self.sizes[-1], 0.0)
        return values

    def error_at(self, sizes: ArrayLike) -> Floats:
        """The half-width of the error at each of ``sizes``, between and beyond points as near them; 0.0 if unknown."""
        wanted = np.asarray(sizes, float)
        return np.interp(wanted, self.sizes, self.errors) if self.errors else np.zeros_like(wanted)


class GraphCosts(_Frozen):
    """What graphs of one mode cost by size: a replayed step, a capture, a graph's own bytes, and the shared pool.

    All graphs share one pool, as large as its largest graph needs: a plan costs the sum of ``graph_bytes`` and the
    largest ``pool_bytes``. Times are in milliseconds.
    """

    step_ms: Curve
    capture_ms: Curve
    graph_bytes: Curve
    pool_bytes: Curve


class CostModel(_Frozen):
    """The costs of eager steps and of graphs in the modes FULL and PIECEWISE. Immutable plain data.

    ``source`` tells where the figures come from: ``measured``, ``stated``, or ``default``.
    """

    format: Literal["graphdispatch.cost"]
    version: Literal[1]
    source: Literal["measured", "stated", "default"]
    eager_ms: Curve
    full: GraphCosts | None = None
    piecewise: GraphCosts | None = None

    @classmethod
    def of(
        cls,
        eager_ms: Cost,
        full_ms: Cost | None = None,
        piecewise_ms: Cost | None = None,
        *,
        capture_ms: Cost = 60.0,
        graph_bytes: Cost = 26 * 2**20,
        pool_bytes: Cost = 0.0,
    ) -> Self:
        """The model of step times in milliseconds; both modes share the costs of captures and memory.

        Where all step times are points they count as ``measured``, else as ``stated``. Raises ``ConfigError`` for a
        negative or infinite cost, or none of a graph.
        """
        shared = {
            "capture_ms": Curve.of(capture_ms, "capture_ms"),
            "graph_bytes": Curve.of(graph_bytes, "graph_bytes"),
            "pool_bytes": Curve.of(pool_bytes, "pool_bytes"),
        }
        times = {"full": full_ms, "piecewise": piecewise_ms}
        given = {name: time for name, time in times.items() if time is not None}
        if not given:
            raise ConfigError("full_ms or piecewise_ms must be given, got neither; a plan is of graphs")
        modes = {name: GraphCosts(step_ms=Curve.of(time, f"{name}_ms"), **shared) for name, time in given.items()}
        measured = all(isinstance(time, Mapping) for time in (eager_ms, *given.values()))
        return cls(
            format="graphdispatch.cost",
            version=1,
            source="measured" if measured else "stated",
            eager_ms=Curve.of(eager_ms, "eager_ms"),
            **modes,
        )

    @classmethod
    def default(cls) -> Self:
        """Figures for want of measurements; they say of an 8B model on one large GPU what is true to a factor of two.

        A FULL step takes 8 ms and 0.03 ms for each token. A PIECEWISE step takes 7 % of the 8 ms more (vllm#16072).
        An eager step takes as long, but not less than the host needs to launch it, 24 ms: small batches that lose
        their graphs slow down 2 to 5 times (sglang#40346, sglang#33483, vllm#54933). So graphs gain nothing above 533
        tokens. A capture takes 60 ms (55 to 68: vllm#23184); a graph 26 MiB (vllm#20098), and the pool 0.6 MB for
        each token (float32 logits of 128,256 words and two bf16 activations of 14,336).
        """
        model = cls.of(
            {1: 24.0, 533: 24.0, 534: 8 + 0.03 * 534, 8192: 8 + 0.03 * 8192},
            {1: 8.03, 8192: 8 + 0.03 * 8192},
            {1: 8.59, 8192: 8.56 + 0.03 * 8192},
            pool_bytes={1: 0.6e6, 8192: 0.6e6 * 8192},
        )
        return model.model_copy(update={"source": "default"})

    def graphs(self, mode: CUDAGraphMode) -> GraphCosts:
        """The costs of graphs of the runtime mode FULL or PIECEWISE. Raises ``ConfigError`` if they are not known."""
        found = {CUDAGraphMode.FULL: self.full, CUDAGraphMode.PIECEWISE: self.piecewise}.get(mode)
        if found is None:
            raise ConfigError(f"cost must know graphs of mode {mode.name}; give {mode.name.lower()}_ms to CostModel.of")
        return found

    @property
    def moved(self) -> float:
        """The largest share of its value by which the isotonic fit moved a point of a step time."""
        graphs = (self.full, self.piecewise)
        return max(curve.moved for curve in (self.eager_ms, *(costs.step_ms for costs in graphs if costs is not None)))

    def save(self, path: str | Path) -> None:
        """Write the model to ``path`` as JSON, replacing a file there in one step."""
        write_document(path, self)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The model that was saved to ``path``. Raises ``ConfigError`` for a file that holds none."""
        return read_document(path, cls)

    def __repr__(self) -> str:
        modes = [name for name, costs in (("FULL", self.full), ("PIECEWISE", self.piecewise)) if costs is not None]
        fit = f", fit moved points by up to {100 * self.moved:.1f} %" if self.moved else ""
        return f"<CostModel {self.source}, eager and {' and '.join(modes)}{fit}>"
