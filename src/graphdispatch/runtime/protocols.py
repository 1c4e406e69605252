"""The three things that the runtime takes from whoever makes its graphs: all that lies between the two storeys.

Capturer   captures a request, and compares an entry with eager
Guard      whether what a graph was made for is as it was
Licence    which batches a graph may serve

What a guard and a licence say by themselves is the plain answer, for engines that check for themselves: the state never
changes, and every batch is served. ``record.py`` has a capturer for them. ``proof`` has what is right for callables
that nobody vouches for.
"""

import math
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from ..backends.base import Backend, Pool
from ..backends.operators import storage_key
from ..config import CUDAGraphOptions
from ..descriptors import REAL_ROWS, BatchDescriptor
from ..modes import CUDAGraphMode, EntryState
from ..reasons import Reason
from .flatten import FlatCall
from .ranks import Ranks
from .signature import Signature
from .static_inputs import StaticInputs
from .windows import storages_of

if TYPE_CHECKING:
    from .entry import CUDAGraphEntry

PerCall = Callable[[Sequence[Any]], bool]
"""Whether a hit may serve a call, by its flat values."""
MOST_ALIKE = 8
"""At the replay of this number, a graph that agreed with eager on one batch alone is compared on one that is made of
it."""


class Guard(Protocol):
    """What must be as it was when a graph was captured. It holds what it compares. Thread-safe, but for ``is_broken``,
    which is changed with the server's lock held."""

    is_broken: bool = False
    """Whether it did not hold when it was last looked at: then its graphs wait until it does again."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The tensors that are read, or may be."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules that are reached."""

    @property
    def placed(self) -> Sequence[torch.Tensor]:
        """Those of them whose address counts."""

    @property
    def trainable(self) -> bool:
        """Whether a call may have to be differentiated. Call it right after ``holds`` was true."""

    def holds(self) -> bool:
        """Whether all is as it was. The core calls ``native.holds()`` in its place, where a guard has that."""
        return True

    def change(self) -> str:
        """What is not as it was, in words."""
        return ""

    def has_moved(self) -> bool:
        """Whether a tensor lies elsewhere now, so that it will not hold again."""
        return False

    def within(self, other: "Guard") -> bool:
        """Whether another guard covers all tensors of this one."""
        return True

    def renewed(self) -> "Guard | None":
        """A guard of the present state, if that is the same but for containers in the places of equal ones."""
        return None


class Licence:
    """Which batches a graph may serve, by what was shown of it: the one place for a policy of verification, which is a
    subclass.

    By itself it serves every batch, padded or not. After a replay that failed, and after as many as ``compare_after``
    says, the next call is for the capturer to look at, unless somebody else captured the graph.

    Called with the server's lock held; ``may_hit`` and ``per_call`` without it. Only ``agreed``, and what ``per_call``
    gives, may change anything.
    """

    def verdict(self, entry: "CUDAGraphEntry", values: Sequence[Any], rows: int) -> tuple[Reason | None, str]:
        """What becomes of a call that is no hit, in a word and in detail: None if the graph serves it, ``VERIFIED_NOW``
        if it must be compared with eager before, else why it runs eagerly."""
        is_due = entry.state is EntryState.FAILED or entry.is_due_again
        return (Reason.VERIFIED_NOW if is_due and entry.call is not None else None), ""

    def compare_after(self, entry: "CUDAGraphEntry") -> float:
        """After how many more replays a batch is compared with eager again; infinite: never. The runtime counts them,
        in parts, too, and while the graphs are frozen none is compared."""
        return entry.verify_every or math.inf

    def agreed(self, entry: "CUDAGraphEntry", values: Sequence[Any] | None = None) -> None:
        """Note that a graph agreed with eager on another batch, with these values; None: on as many as are wanted."""
        entry.passed()

    def may_hit(self, entry: "CUDAGraphEntry", rows: int) -> bool:
        """Whether calls of so many rows may be hits."""
        return entry.state is EntryState.VERIFIED

    def per_call(self, entry: "CUDAGraphEntry", rows: int) -> PerCall | None:
        """What such a hit has to look at in each call, if there is something."""
        return None

    def against_padding(self, rows: int) -> tuple[Reason, str] | None:
        """Why a batch may not be padded to the graph's size, in a word and in detail; None if nothing speaks against
        it."""
        return None

    def wants_look(self, rows: int) -> bool:
        """Whether the first batch of so many rows must be compared with eager."""
        return False

    def differs(self, values: Sequence[Any]) -> bool:
        """Whether a batch is another one than those that the graph has agreed on so far, its capture included; not so
        where no batch is compared."""
        return False

    def misfit(self, values: Sequence[Any]) -> str:
        """What of a call's arguments, besides their values, speaks against the graph; empty if nothing does."""
        return ""

    def against_parts(self, entry: "CUDAGraphEntry", rows: int, part: int) -> str:
        """Why the graph may not serve ``part`` rows of a batch of ``rows``; empty if it may. That a graph serves padded
        batches does not say so."""
        return "nobody has shown that its rows are independent"


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
    peers: "Sequence[CUDAGraphEntry]" = ()
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
    entry: "CUDAGraphEntry | None"
    reason: Reason
    detail: str = ""
    error: BaseException | None = None


class Capturer(Protocol):
    """Makes the graphs of callables, and compares them with eager. Called with the server's lock held."""

    may_pad_otherwise: bool
    """Whether padding without a rule of the user's may become copies of the last row, where a capture raised for
    zeros: not where nobody checks what padding rows write."""

    def reach(self, fn: Callable[..., Any], *, by_names: bool = False) -> Guard:
        """The tensors that a callable reaches now, whatever it reads of them; also what the names in its code lead to
        through modules and classes, or not. Needs no lock."""

    def capture(self, request: CaptureRequest) -> CaptureResult:
        """Run the call, which answers the caller, and capture it.

        Raises what the call raises on the real rows.
        """

    def check(self, request: CaptureRequest, entry: "CUDAGraphEntry") -> CaptureResult:
        """Run the call, which answers the caller, and compare a graph with that. Raises as ``capture`` does."""
