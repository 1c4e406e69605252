"""``Plan``: which graphs to capture, in which mode, for which batches; and what that comes to on a workload."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from ..config import parse_mode
from ..errors import ConfigError
from ..modes import CUDAGraphMode
from ..showing import html_table
from ..sizes import check_sizes, named_sizes
from .cost import CostModel
from .storage import read_document, write_document
from .traffic import LARGEST_STEP, Floats
from .workload import Workload

__all__ = ["Evaluation", "Plan", "PlannedGraph", "Proof", "explained", "weights_by_mode"]

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_Size = Annotated[int, Field(ge=1, le=LARGEST_STEP)]


class PlannedGraph(NamedTuple):
    """A graph of ``size`` tokens for batches from ``min_batch`` tokens on; smaller ones run faster eagerly.

    ``min_batch`` is ``size + 1`` for a graph that had to be included and is slower than all its batches.
    """

    mode: CUDAGraphMode
    size: int
    min_batch: int


@dataclass(frozen=True)
class Proof:
    """What a planned set of graphs was chosen for.

    ``expected_ms`` is the mean step time of the expected traffic, and ``bound_ms`` is proved: no set within the budgets
    is faster. ``regret`` is the guard that was kept (see ``Prior``; None: no guard), ``largest`` the end of the range.
    """

    __pydantic_config__ = _STRICT

    expected_ms: Annotated[float, Field(gt=0)]
    bound_ms: float
    cost: Annotated[str, Field(max_length=200)]
    prior: float
    drift: float
    regret: Annotated[float | None, Field(default=None)]
    largest: _Size

    @property
    def gap(self) -> float:
        """How much faster another set could be at most, as a share of the step time; 0.0 for a proved optimum."""
        return max(0.0, 1.0 - self.bound_ms / self.expected_ms)


@dataclass(frozen=True)
class Evaluation:
    """What a plan comes to on a workload; shares are of its steps, times are means over its steps.

    ``padding`` is padding tokens as a share of the real tokens of the steps that graphs serve. ``worst_padding`` is the
    most that any batch up to the largest graph is padded, seen or not, as a share of its own tokens, at ``worst_size``.
    """

    graphs: int
    hit_rate: float
    eager_share: float
    padding: float
    step_ms: float
    eager_ms: float
    capture_ms: float
    graph_bytes: float
    pool_bytes: float
    worst_padding: float
    worst_size: int

    @property
    def memory(self) -> float:
        """The bytes of all graphs and of the pool that they share."""
        return self.graph_bytes + self.pool_bytes

    def to_dict(self) -> dict[str, float]:
        """The figures as plain data, for JSON."""
        return asdict(self) | {"memory": self.memory}

    def __str__(self) -> str:
        return (
            f"{self.graphs} graphs serve {100 * self.hit_rate:.1f} % of steps with {100 * self.padding:.2f} % padding; "
            f"{self.step_ms:.3f} ms a step ({self.eager_ms:.3f} ms eagerly); captures {self.capture_ms / 1e3:.1f} s, "
            f"{self.memory / 2**20:.0f} MiB; worst padding {100 * self.worst_padding:.0f} % at {self.worst_size}"
        )

    def _repr_html_(self) -> str:
        return html_table(
            "A plan on its traffic",
            ("figure", "value"),
            [(name, f"{value:,.4g}") for name, value in self.to_dict().items()],
        )


@dataclass(frozen=True)
class Plan:
    """The graphs to capture. Immutable plain data, in the order of mode and size.

    ``mode`` is the configured mode: where it separates uniform decode from other batches, each kind is served by the
    graphs of its own runtime mode alone. ``proof`` is None for a plan that nobody optimised.
    """

    mode: CUDAGraphMode
    graphs: tuple[PlannedGraph, ...]
    proof: Proof | None = None

    def __post_init__(self) -> None:
        runtime = {self.mode.decode_mode(), self.mode.mixed_mode()} - {CUDAGraphMode.NONE}
        for graph in self.graphs:
            if graph.mode not in runtime or not 1 <= graph.min_batch <= graph.size + 1 <= LARGEST_STEP + 1:
                raise ConfigError(
                    f"graphs must be of the modes of {self.mode.name}, with 1 <= min_batch <= size + 1 and size <= "
                    f"{LARGEST_STEP}, "
                    f"got {graph.mode.name} {graph.min_batch}..{graph.size}"
                )
        keys = [(graph.mode, graph.size) for graph in self.graphs]
        if keys != sorted(set(keys)):
            raise ConfigError(f"graphs must be in the order of mode and size, each once, got {keys!r:.200}")

    @classmethod
    def from_sizes(
        cls,
        sizes: str | Iterable[int],
        max_size: int = 512,
        *,
        mode: CUDAGraphMode = CUDAGraphMode.FULL,
    ) -> Self:
        """The plan of capture sizes by name up to ``max_size``, or as given, in each runtime mode of ``mode``."""
        mode = parse_mode(mode)
        checked = named_sizes(sizes, max_size) if isinstance(sizes, str) else check_sizes(sizes, "sizes")
        return cls.of(mode, dict.fromkeys(_runtime(mode), checked))

    @classmethod
    def of(cls, mode: CUDAGraphMode, sizes: dict[CUDAGraphMode, Iterable[int]], proof: Proof | None = None) -> Self:
        """The plan of sizes by runtime mode, each for all batches above the next smaller size."""
        graphs = []
        for kind in sorted(sizes):
            above = 0
            for size in sizes[kind]:
                graphs.append(PlannedGraph(kind, size, above + 1))
                above = size
        return cls(mode, tuple(graphs), proof)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that any graph has, in increasing order."""
        return tuple(sorted({graph.size for graph in self.graphs}))

    def sizes_of(self, mode: CUDAGraphMode) -> tuple[int, ...]:
        """The sizes of the graphs of a runtime mode, in increasing order."""
        return tuple(graph.size for graph in self.graphs if graph.mode is mode)

    def min_batches_of(self, mode: CUDAGraphMode) -> tuple[int, ...]:
        """For each of ``sizes_of(mode)``, the smallest batch that its graph is for; smaller ones are faster eagerly."""
        return tuple(graph.min_batch for graph in self.graphs if graph.mode is mode)

    def evaluate(self, workload: Workload, cost: CostModel | None = None) -> Evaluation:
        """What the plan comes to on ``workload`` with the costs of ``cost`` (default: ``CostModel.default()``)."""
        cost = cost or CostModel.default()
        served = real = padded = time = eager = 0.0
        worst, worst_size, capture_ms, graph_bytes, pool_bytes = 0.0, 0, 0.0, 0.0, 0.0
        for kind, weights in weights_by_mode(self.mode, workload).items():
            eager_ms = cost.eager_ms.at(workload.sizes)
            eager += float(weights @ eager_ms)
            sizes, min_batch = (np.array([g[at] for g in self.graphs if g.mode is kind], np.int64) for at in (1, 2))
            if not len(sizes):
                time += float(weights @ eager_ms)
                continue
            costs = cost.graphs(kind)
            index = np.minimum(np.searchsorted(sizes, workload.sizes), len(sizes) - 1)
            hit = (workload.sizes <= sizes[index]) & (workload.sizes >= min_batch[index])
            time += float(weights @ np.where(hit, costs.step_ms.at(sizes)[index], eager_ms))
            served += float(weights @ hit)
            real += float(weights @ (hit * workload.sizes))
            padded += float(weights @ (hit * (sizes[index] - workload.sizes)))
            ratios = np.maximum(sizes / min_batch - 1, 0.0)
            if ratios.max() > worst or not worst_size:
                worst, worst_size = float(ratios.max()), int(np.minimum(min_batch, sizes)[ratios.argmax()])
            capture_ms += float(costs.capture_ms.at(sizes).sum())
            graph_bytes += float(costs.graph_bytes.at(sizes).sum())
            pool_bytes = max(pool_bytes, float(costs.pool_bytes.at(sizes).max()))
        total = workload.total
        return Evaluation(
            graphs=len(self.graphs),
            hit_rate=served / total,
            eager_share=1 - served / total,
            padding=padded / real if real else 0.0,
            step_ms=time / total,
            eager_ms=eager / total,
            capture_ms=capture_ms,
            graph_bytes=graph_bytes,
            pool_bytes=pool_bytes,
            worst_padding=worst,
            worst_size=worst_size,
        )

    def save(self, path: str | Path) -> None:
        """Write the plan to ``path`` as JSON, replacing a file there in one step."""
        graphs = [{"mode": graph.mode.name, "size": graph.size, "min_batch": graph.min_batch} for graph in self.graphs]
        content = {"format": "graphdispatch.plan", "version": 1, "mode": self.mode.name, "graphs": graphs}
        write_document(path, _Document.model_validate(content | {"proof": self.proof}))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The plan that was saved to ``path``. Raises ``ConfigError`` for a file that holds none."""
        document = read_document(path, _Document)
        graphs = tuple(PlannedGraph(parse_mode(g.mode), g.size, g.min_batch) for g in document.graphs)
        try:
            return cls(parse_mode(document.mode), graphs, document.proof)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def __repr__(self) -> str:
        by_mode = ", ".join(f"{len(self.sizes_of(kind))} {kind.name}" for kind in _runtime(self.mode))
        return f"<Plan {by_mode} graphs up to {max(self.sizes, default=0)}>"

    def __str__(self) -> str:
        lines = [repr(self)]
        for kind in _runtime(self.mode):
            lines.append(f"{kind.name}: {' '.join(map(str, self.sizes_of(kind))) or 'none'}")
            above, gaps = 0, []
            for graph in self.graphs:
                if graph.mode is kind:
                    if graph.min_batch > above + 1:
                        gaps.append(f"{above + 1}-{graph.min_batch - 1}")
                    above = graph.size
            if gaps:
                lines.append(f"{kind.name}: faster eagerly: {' '.join(gaps)}")
        if self.proof is not None:
            lines.extend(explained(self.proof))
        return "\n".join(lines)


def explained(proof: Proof) -> Iterable[str]:
    """What a proof says, in lines."""
    proved = "the least within the budgets" if proof.gap < 1e-9 else f"at most {100 * proof.gap:.3f} % above the least"
    yield f"expected {proof.expected_ms:.3f} ms a step, {proved}; costs: {proof.cost}"
    if proof.regret is None:
        yield "sizes that were not seen: no guard, they may be padded to any size or run eagerly"
    else:
        yield (
            f"sizes that were not seen, up to {proof.largest}: padded by at most {100 * proof.regret:.2f} % of their "
            "tokens more than by vLLM's capture sizes, where they are spread evenly"
        )


def _runtime(mode: CUDAGraphMode) -> tuple[CUDAGraphMode, ...]:
    return tuple(sorted({mode.decode_mode(), mode.mixed_mode()} - {CUDAGraphMode.NONE}))


def weights_by_mode(mode: CUDAGraphMode, workload: Workload) -> dict[CUDAGraphMode, Floats]:
    """The weights by size of the batches that each runtime mode of ``mode`` serves, ``NONE`` among them."""
    weights: dict[CUDAGraphMode, Floats] = {}
    for kind, part in ((mode.decode_mode(), workload.decode), (mode.mixed_mode(), workload.mixed)):
        weights[kind] = weights.get(kind, np.zeros(len(workload.sizes))) + part
    return weights


class _Graph(BaseModel):
    model_config = _STRICT
    mode: Literal["FULL", "PIECEWISE"]
    size: _Size
    min_batch: int = Field(ge=1, le=LARGEST_STEP + 1)


class _Document(BaseModel):
    model_config = _STRICT
    format: Literal["graphdispatch.plan"]
    version: Literal[1]
    mode: Literal["NONE", "FULL", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
    graphs: list[_Graph] = Field(max_length=100_000)
    proof: Proof | None = None
