"""What a capture or a comparison is given, and what it gives back."""

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..backends.base import Backend, Pool
from ..backends.operators import storage_key
from ..config import CUDAGraphOptions
from ..descriptors import REAL_ROWS, BatchDescriptor
from ..modes import CUDAGraphMode
from ..reasons import Reason
from .entry import CUDAGraphEntry
from .flatten import FlatCall
from .ranks import Ranks
from .signature import Signature
from .static_inputs import StaticInputs
from .windows import storages_of


@dataclass
class CaptureRequest:
    """What to capture or to verify: a callable on flat values, the real batch, and where the graph's parts go."""

    call: FlatCall
    values: Sequence[Any]
    rows: int
    size: int
    descriptor: BatchDescriptor
    mode: CUDAGraphMode
    key: Hashable
    inputs: StaticInputs
    signature: Signature
    pool: Pool
    backend: Backend
    options: CUDAGraphOptions
    peers: Sequence[CUDAGraphEntry] = ()
    """The graphs of other sizes of the same signature, in the present state of the callable."""
    tensors: Sequence[torch.Tensor] = ()
    """The tensors that the callable reaches."""
    follows_rows: bool = True
    """Whether a run is made whose rows are followed: it speaks for batches that are padded, and for other sizes."""
    keep_effects: bool = True
    """Whether the caller wants the call itself, with the effects of one run, or only the graph and no effects."""
    counts_as_second: bool = True
    """Whether a graph that agrees on this batch has agreed on a second one; not so for one made to look at padding."""
    real_rows: int | None = field(default_factory=REAL_ROWS.get)
    """How many rows of a batch that the caller has padded are real, if the caller says so."""
    ranks: Ranks | None = None
    """Those that share the call's collectives: they agree before each further run of it."""
    is_timed: bool = False
    """Whether an eager run is made for its time alone, once replays take as long as they will. Not so for engines:
    their ranks must run a call equally often, for its collectives, and do not agree on when that is."""
    clock: Callable[[], float] = time.perf_counter
    """The clock of the capture time, and of what is timed for the gain, in seconds."""

    @property
    def reach(self) -> set[int]:
        """The addresses of the storages that the callable reaches: see Note [windows] in ``runtime/windows.py``."""
        return storages_of(self.tensors)

    @property
    def is_piecewise(self) -> bool:
        """Whether the user's marks break the capture into pieces."""
        return self.mode is CUDAGraphMode.PIECEWISE

    @property
    def is_padded(self) -> bool:
        """Whether the graph has more rows than the batch."""
        return self.rows != self.size

    @property
    def has_gaps(self) -> bool:
        """Whether an argument leaves gaps in memory, which its static buffer does not: code may read that."""
        return not all(spec.is_dense for spec in self.inputs.specs)

    def real_rows_of(self, value: torch.Tensor) -> torch.Tensor:
        """The real rows of an output or argument, if the caller padded the batch and said how many are real: of what
        has as many rows as the descriptor has tokens. Else all of it."""
        rows, padded = self.real_rows, self.descriptor.num_tokens
        is_padded_by_caller = rows is not None and not self.inputs.has_rows
        if is_padded_by_caller and value.dim() and value.shape[0] == padded:
            return value[:rows]
        return value

    def arguments(self) -> list[torch.Tensor]:
        """The call's tensors that are copied to static inputs, in the order of ``inputs.specs``."""
        return [self.values[spec.position] for spec in self.inputs.specs]

    def values_with(self, copied: Iterable[Any]) -> list[Any]:
        """The call's values, with ``copied`` in the places of the tensors that are copied to static inputs."""
        values = list(self.values)
        for spec, value in zip(self.inputs.specs, copied, strict=False):
            values[spec.position] = value
        return values

    def static_values(self) -> list[Any]:
        """The call's values, with each copied tensor replaced by its static buffer."""
        return self.values_with(self.inputs.views(self.size))

    def buffer_storages(self) -> set[int]:
        """The keys of the storages of the static buffers."""
        return set(map(storage_key, self.inputs.views(self.size)))


@dataclass
class CaptureResult:
    """What a capture or a verification gave: eager's answer, and an entry or the reason why there is none."""

    answer: Any
    entry: CUDAGraphEntry | None
    reason: Reason
    detail: str = ""
    error: BaseException | None = None
