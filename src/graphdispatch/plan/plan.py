"""``Plan``: which sizes to capture, in which mode; and what they come to on a workload."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from ..config import parse_mode
from ..errors import ConfigError
from ..modes import CUDAGraphMode
from ..showing import html_table, milliseconds, percent, storage
from ..sizes import named_sizes
from .cost import CostModel, Document
from .workload import LARGEST_SIZE, Floats, Ints, Shape, Workload

_Mode = Annotated[CUDAGraphMode, BeforeValidator(parse_mode), PlainSerializer(lambda mode: mode.name)]
_Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
_Point = Annotated[tuple[_Size, ...], Field(min_length=2)]
_MOST_NAMED = 8


@dataclass(frozen=True)
class Evaluation:
    """What a plan comes to on a workload.

    Attributes:
        graphs: The number of graphs.
        hit_rate: The share of the steps that graphs serve.
        padding: Padding tokens as a share of the real tokens of the steps that graphs serve.
        step_ms: The mean time of a step, in milliseconds.
        eager_ms: The same if every step ran eagerly.
        capture_ms: The time of all captures.
        memory: The bytes of all graphs and of the pool that they share.
        warnings: Steps above the largest graph that a graph would speed up, and graphs that no step reaches.
    """

    graphs: int
    hit_rate: float
    padding: float
    step_ms: float
    eager_ms: float
    capture_ms: float
    memory: float
    warnings: tuple[str, ...] = ()

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("graphs", str(self.graphs)),
            ("steps by graphs", percent(self.hit_rate)),
            ("padding", percent(self.padding, 2)),
            ("mean step", f"{milliseconds(self.step_ms)} ({milliseconds(self.eager_ms)} eagerly)"),
            ("memory", storage(self.memory)),
            ("captures", milliseconds(self.capture_ms)),
            *(("warning", text) for text in self.warnings),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{name:<17}{text}" for name, text in self._rows())

    def _repr_html_(self) -> str:
        return html_table("A plan on its traffic", ("figure", "value"), self._rows())


class Plan(Document):
    """The sizes to capture. Immutable plain data; ``graphed`` and ``CUDAGraphConfig`` take it as sizes.

    Attributes:
        mode: The configured mode. Where it tells uniform decode from other steps, the graphs of each runtime mode serve
            their steps alone.
        graphs: The sizes by runtime mode, in increasing order; tuples, as (8, 64), with several dynamic dimensions.
    """

    mode: _Mode = CUDAGraphMode.FULL
    graphs: dict[_Mode, tuple[_Size | _Point, ...]]

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        unknown = set(self.graphs) - set(_runtime_modes(self.mode))
        if unknown:
            raise ConfigError(f"graphs must be of the modes of {self.mode.name}, got {sorted(m.name for m in unknown)}")
        if len({len(_as_point(size)) for sizes in self.graphs.values() for size in sizes}) > 1:
            raise ConfigError(f"graphs must all have the same number of dimensions, got {self.graphs}")
        for mode, sizes in self.graphs.items():
            if list(sizes) != sorted(set(sizes)):
                raise ConfigError(f"graphs of {mode.name} must be in increasing order, each once, got {sizes}")
        return self

    @classmethod
    def from_sizes(
        cls, sizes: str | Iterable[Shape], max_size: int = 512, *, mode: str | CUDAGraphMode = CUDAGraphMode.FULL
    ) -> Self:
        """The plan of given sizes in each runtime mode, to judge them.

        Args:
            sizes: The name of an engine's capture sizes, such as ``"vllm"``, or sizes in increasing order.
            max_size: The largest of the sizes that a name stands for.
            mode: The configured mode.

        Raises:
            ConfigError: If a size or the name is wrong.
        """
        chosen = named_sizes(sizes, max_size) if isinstance(sizes, str) else tuple(sizes)
        mode = parse_mode(mode)
        return cls(mode=mode, graphs=dict.fromkeys(_runtime_modes(mode), chosen))

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The sizes that a graph of any mode has, in increasing order."""
        return tuple(sorted({size for sizes in self.graphs.values() for size in sizes}))

    def sizes_of(self, mode: CUDAGraphMode) -> tuple[Any, ...]:
        """The sizes of the graphs of a runtime mode.

        Args:
            mode: The runtime mode.

        Returns:
            The sizes in increasing order; none if the mode was not planned for.
        """
        return self.graphs.get(mode, ())

    def evaluate(self, workload: Workload, cost: CostModel | None = None) -> Evaluation:
        """What the plan comes to on a workload.

        A step runs in the graph of the fewest tokens that it fits, or eagerly where it fits none.

        Args:
            workload: The steps, best some that were not planned for: ``seen, unseen = workload.split()``.
            cost: What steps and graphs cost. By default ``CostModel.default()``.

        Raises:
            ConfigError: If the workload has another number of dimensions than the plan.
        """
        cost = cost or CostModel.default()
        shapes = workload.histogram[0]
        tokens, eager_ms = _tokens(shapes), cost.at("eager_ms", _tokens(shapes))
        sums = np.zeros(5)  # the time, the eager time; weight, real tokens and padding of what graphs serve
        capture_ms, graph_bytes, pool_bytes = 0.0, 0.0, 0.0
        warnings: list[str] = []
        for mode, weights in weights_by_mode(self.mode, workload).items():
            sizes = self.sizes_of(mode)
            if not sizes:
                sums[:2] += weights @ eager_ms
                continue
            index = _serving(sizes, shapes)
            hit, cells = index >= 0, _tokens(np.array([_as_point(size) for size in sizes]))
            step_ms = np.where(hit, cost.step_ms(mode, cells)[index], eager_ms)
            real, padding = hit * tokens, hit * (cells[index] - tokens)
            sums += np.array([weights @ each for each in (step_ms, eager_ms, hit, real, padding)])
            capture_ms += float(cost.at("capture_ms", cells).sum())
            graph_bytes += float(cost.at("graph_bytes", cells).sum())
            pool_bytes = max(pool_bytes, float(cost.at("pool_bytes", cells).max()))
            missed: Floats = np.where(~hit & (cost.step_ms(mode, tokens) < eager_ms), weights / workload.total, 0.0)
            warnings += _warnings(mode, sizes, missed, tokens, np.unique(index[hit & (weights > 0)]))
        step, eager, served, real_tokens, padding_tokens = (float(each) for each in sums)
        return Evaluation(
            graphs=sum(map(len, self.graphs.values())),
            hit_rate=served / workload.total,
            padding=padding_tokens / real_tokens if real_tokens else 0.0,
            step_ms=step / workload.total,
            eager_ms=eager / workload.total,
            capture_ms=capture_ms,
            memory=graph_bytes + pool_bytes,
            warnings=tuple(warnings),
        )

    def __repr__(self) -> str:
        counts = " and ".join(f"{len(sizes)} {mode.name}" for mode, sizes in self.graphs.items()) or "no"
        return f"<Plan {counts} graphs up to {self.sizes[-1] if self.sizes else 0}>"

    def _rows(self) -> list[tuple[str, str]]:
        return [(mode.name, " ".join(map(_words, sizes))) for mode, sizes in self.graphs.items()]

    def __str__(self) -> str:
        return "\n".join((repr(self), *(f"{mode:<11}{sizes}" for mode, sizes in self._rows())))

    def _repr_html_(self) -> str:
        return html_table(repr(self)[1:-1], ("mode", "sizes"), self._rows())


def weights_by_mode(mode: CUDAGraphMode, workload: Workload) -> dict[CUDAGraphMode, Floats]:
    """The weights of the shapes that each runtime mode of ``mode`` serves, ``NONE`` among them."""
    _, decode, mixed = workload.histogram
    weights: dict[CUDAGraphMode, Floats] = {}
    for kind, part in ((mode.decode_mode(), decode), (mode.mixed_mode(), mixed)):
        weights[kind] = weights.get(kind, 0.0) + part
    return weights


def _warnings(
    mode: CUDAGraphMode, sizes: tuple[Shape, ...], missed: Floats, tokens: Floats, reached: Ints
) -> Iterable[str]:
    """What is wrong: ``missed`` are the shares of steps, by shape, that a larger graph would speed up."""
    if np.any(missed):
        yield (
            f"{percent(float(missed.sum()), 2)} of the steps fit no {mode.name} graph and run eagerly, though one "
            f"would be faster: capture up to {tokens[missed > 0].max():.0f} tokens"
        )
    idle = [_words(size) for index, size in enumerate(sizes) if index not in reached]
    if idle:
        named = ", ".join(idle[:_MOST_NAMED]) + (f" and {len(idle) - _MOST_NAMED} more" if idle[_MOST_NAMED:] else "")
        yield f"no step reaches the {mode.name} graphs of {named}: drop them to free memory"


def _serving(sizes: tuple[Shape, ...], shapes: Ints) -> Ints:
    """For each shape, the index of the graph of the fewest tokens that it fits, or -1."""
    points = np.array([_as_point(size) for size in sizes])
    if points.shape[1] != shapes.shape[1]:
        raise ConfigError(f"workload must have the {points.shape[1]} dimensions of the plan, got {shapes.shape[1]}")
    order = np.argsort(_tokens(points), kind="stable")
    fits = np.all(points[order][None] >= shapes[:, None], axis=2)
    found: Ints = np.where(fits.any(1), order[fits.argmax(1)], -1)
    return found


def _tokens(shapes: Ints) -> Floats:
    """The tokens of each shape: the product of its sizes."""
    tokens: Floats = shapes.prod(1, dtype=float)
    return tokens


def _as_point(size: Shape) -> tuple[int, ...]:
    return size if isinstance(size, tuple) else (size,)


def _words(size: Shape) -> str:
    return "x".join(map(str, _as_point(size)))


def _runtime_modes(mode: CUDAGraphMode) -> tuple[CUDAGraphMode, ...]:
    return tuple(sorted({mode.decode_mode(), mode.mixed_mode()} - {CUDAGraphMode.NONE}))
