"""``Workload``: how often steps of each size come, from traces, logs, histograms, request traces or live counters."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import ConfigError
from ..stats import CUDAGraphStats
from .readers import read_requests, read_trace
from .scheduler import SchedulerModel
from .storage import read_document, write_document
from .traffic import LARGEST_STEP, Bools, Floats, Ints, Steps, booleans, floats, integers, read_only

__all__ = ["Steps", "Workload"]


@dataclass(frozen=True, eq=False)
class Workload:
    """The weight of steps by size. Immutable: its arrays are read-only, so threads may share it.

    ``sizes`` are numbers of tokens, int64, sorted, unique and at least 1; ``decode`` and ``mixed`` are float64 weights
    of the same length, of uniform decode steps and of all others; no size has the weight 0. ``steps`` are the steps in
    order, if the order is known. Use one of the constructors below: they check and copy their arguments, and raise
    ``ConfigError`` for impossible traffic.
    """

    sizes: Ints
    decode: Floats
    mixed: Floats
    steps: Steps | None = None

    @classmethod
    def from_steps(
        cls, num_tokens: ArrayLike, is_decode: ArrayLike | None = None, num_reqs: ArrayLike | None = None
    ) -> Self:
        """The workload of steps in order; without ``is_decode`` all are uniform decode, which full graphs serve."""
        tokens = integers("num_tokens", num_tokens)
        kinds = booleans("is_decode", np.ones(len(tokens), bool) if is_decode is None else is_decode)
        reqs = None if num_reqs is None else integers("num_reqs", num_reqs)
        for name, column in (("is_decode", kinds), ("num_reqs", reqs)):
            if column is not None and len(column) != len(tokens):
                raise ConfigError(f"{name} must have an element for each of {len(tokens)} steps, got {len(column)}")
        if reqs is not None and (reqs > tokens).any():
            index = int((reqs > tokens).argmax())
            raise ConfigError(f"num_reqs[{index}] must be at most num_tokens={tokens[index]}, got {reqs[index]}")
        return cls._of(_by_size(tokens, kinds), _by_size(tokens, ~kinds), Steps(tokens, kinds, reqs))

    @classmethod
    def from_histogram(cls, counts: Mapping[int, float], decode: Mapping[int, float] | None = None) -> Self:
        """The workload of ``counts[n]`` steps of ``n`` tokens, ``decode[n]`` of them uniform decode (None: all)."""
        sizes = integers("counts", list(counts))
        weights = floats("counts", list(counts.values()))
        every, uniform = np.zeros(sizes.max() + 1), np.zeros(sizes.max() + 1)
        every[sizes] = uniform[sizes] = weights
        if decode is not None:
            uniform[:] = 0.0
            for size, weight in decode.items():
                if not 0 <= weight <= counts.get(size, -1.0):
                    raise ConfigError(
                        f"decode[{size}] must be from 0 to counts[{size}]={counts.get(size)}, got {weight}"
                    )
                uniform[size] = weight
        if not every.any():
            raise ConfigError("counts must hold a size with a weight above 0, got none")
        return cls._of(uniform, every - uniform)

    @classmethod
    def from_trace(cls, path: str | Path) -> Self:
        """The steps in a file: CSV, JSON lines, Parquet, or a log with vLLM's ``--cudagraph-metrics`` tables; also .gz.

        Columns: ``num_tokens``, and ``uniform_decode`` and ``num_reqs`` where there are any. The log has no order, and
        counts steps by mode: those that ran FULL are taken for uniform decode. Raises ``ConfigError`` that names the
        file, and the line and field at fault.
        """
        found = read_trace(path)
        try:
            return cls.from_steps(*found) if isinstance(found, Steps) else cls.from_histogram(*found)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_requests(cls, path: str | Path, scheduler: SchedulerModel | None = None) -> Self:
        """The steps into which ``scheduler`` (default: vLLM's limits) batches the requests in a CSV or JSON-lines file.

        ``read_requests`` lists the columns. Raises ``ConfigError`` that names the file, line and field at fault.
        """
        return cls.from_steps(*(scheduler or SchedulerModel()).run(read_requests(path)))

    @classmethod
    def from_stats(cls, stats: CUDAGraphStats) -> Self:
        """The calls that live counters have seen, by number of rows; all count as uniform decode."""
        if not stats.rows:
            raise ConfigError(
                "stats must have counted calls by rows, got none: serve some traffic first; a wrapper's calls arrive "
                "padded, and their real rows are not known"
            )
        return cls.from_histogram(stats.rows)

    @property
    def counts(self) -> Floats:
        """The weight of all steps, by size."""
        return self.decode + self.mixed

    @property
    def total(self) -> float:
        """The weight of all steps of all sizes."""
        return float(self.counts.sum())

    @property
    def largest(self) -> int:
        """The largest size."""
        return int(self.sizes[-1])

    def split(self, fraction: float) -> tuple[Self, Self]:
        """The first ``fraction`` of the steps and the rest, in time. Raises ``ConfigError`` without ordered steps."""
        steps = self.steps
        if steps is None:
            raise ConfigError(
                "a workload without ordered steps cannot split in time; make it with from_steps or from a trace"
            )
        first = round(fraction * len(steps.num_tokens)) if 0 < fraction < 1 else 0
        if not 0 < first < len(steps.num_tokens):
            raise ConfigError(
                f"fraction must leave steps on both sides of the split, got {fraction} of {len(steps.num_tokens)} steps"
            )
        sides = [[None if c is None else c[part] for c in steps] for part in (slice(first), slice(first, None))]
        return self.from_steps(*sides[0]), self.from_steps(*sides[1])  # type: ignore[arg-type]

    def merge(self, *others: "Workload") -> "Workload":
        """All steps of this workload and then of ``others``; their order is kept if it is known of all of them."""
        parts = (self, *others)
        steps = [part.steps for part in parts if part.steps is not None]
        if len(steps) == len(parts):
            reqs = [part.num_reqs for part in steps if part.num_reqs is not None]
            return Workload.from_steps(
                np.concatenate([part.num_tokens for part in steps]),
                np.concatenate([part.is_decode for part in steps]),
                np.concatenate(reqs) if len(reqs) == len(steps) else None,
            )
        decode, mixed = np.zeros((2, max(part.largest for part in parts) + 1))
        for part in parts:
            decode[part.sizes] += part.decode
            mixed[part.sizes] += part.mixed
        return Workload._of(decode, mixed)

    def save(self, path: str | Path) -> None:
        """Write the workload to ``path`` as JSON, ordered steps included, replacing a file there in one step."""
        steps = histogram = None
        if self.steps is not None:
            tokens, kinds, reqs = self.steps
            counts = None if reqs is None else reqs.tolist()
            steps = _StepList(num_tokens=tokens.tolist(), is_decode=kinds.tolist(), num_reqs=counts)
        else:
            sizes, decode, mixed = self.sizes.tolist(), self.decode.tolist(), self.mixed.tolist()
            histogram = _Histogram(sizes=sizes, decode=decode, mixed=mixed)
        write_document(path, _Document(format="graphdispatch.workload", version=1, steps=steps, histogram=histogram))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The workload that was saved to ``path``. Raises ``ConfigError`` for a file that holds none."""
        document = read_document(path, _Document)
        try:
            if document.steps is not None:
                return cls.from_steps(*document.steps.model_dump().values())
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        assert document.histogram is not None
        sizes = document.histogram.sizes
        decode, mixed = np.zeros((2, max(sizes) + 1))
        decode[sizes], mixed[sizes] = document.histogram.decode, document.histogram.mixed
        if np.count_nonzero(decode + mixed) != len(sizes):
            raise ConfigError(f"{path} is not valid at histogram: sizes must be unique, and have weights above 0")
        return cls._of(decode, mixed)

    def __repr__(self) -> str:
        share = 100 * float(self.decode.sum()) / self.total
        order = "ordered" if self.steps is not None else "no order"
        return (
            f"<Workload {self.total:g} steps of {len(self.sizes)} sizes up to {self.largest}, "
            f"{share:.1f} % uniform decode, {order}>"
        )

    @classmethod
    def _of(cls, decode: Floats, mixed: Floats, steps: Steps | None = None) -> Self:
        """The workload of weights that are indexed by size."""
        sizes = np.flatnonzero(decode + mixed).astype(np.int64)
        return cls(read_only(sizes), read_only(decode[sizes]), read_only(mixed[sizes]), steps)


def _by_size(tokens: Ints, weights: Floats | Bools) -> Floats:
    return np.bincount(tokens, weights).astype(np.float64)


_Size = Annotated[int, Field(ge=1, le=LARGEST_STEP)]
_Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Part(BaseModel):
    """A part of the file: columns of equal length."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="after")
    def _equally_long(self) -> Self:
        lengths = {name: len(column) for name, column in self if column is not None}
        if len(set(lengths.values())) != 1 or not min(lengths.values()):
            raise ValueError(f"the columns must be equally long and not empty, got {lengths}")
        return self


class _StepList(_Part):
    num_tokens: list[_Size]
    is_decode: list[bool]
    num_reqs: list[_Size] | None = None


class _Histogram(_Part):
    sizes: list[_Size]
    decode: list[_Weight]
    mixed: list[_Weight]


class _Document(BaseModel):
    """The file: the ordered steps, or the histogram where there is no order."""

    model_config = ConfigDict(extra="forbid", strict=True)
    format: Literal["graphdispatch.workload"]
    version: Literal[1]
    steps: _StepList | None = None
    histogram: _Histogram | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.steps is None) == (self.histogram is None):
            raise ValueError("expected either steps or histogram")
        return self
