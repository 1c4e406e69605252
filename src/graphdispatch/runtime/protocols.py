"""The three things that the runtime takes from whoever makes its graphs: all that lies between the two storeys.

Capturer   captures a request, and compares an entry with eager
Guard      whether what a graph was made for is as it was
Licence    which batches a graph may serve

What a guard and a licence say by themselves is the plain answer, for engines that check for themselves: the state never
changes, and every batch is served. ``record.py`` has a capturer for them. ``proof`` has what is right for callables
that nobody vouches for.
"""

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from ..backends.operators import bits_equal
from ..config import CUDAGraphOptions
from ..modes import EntryState
from ..reasons import Reason

if TYPE_CHECKING:
    from .entry import CUDAGraphEntry
    from .request import CaptureRequest, CaptureResult

PerCall = Callable[[Sequence[Any]], bool]
"""Whether a hit may serve a call, by its flat values."""
MOST_ALIKE = 8
"""Calls with the first batch that a graph serves before it is compared on one made of it."""


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

    By itself it serves every batch, padded or not. After a replay that failed, and where ``verify_every`` wants it, the
    next call is for the capturer to look at, unless somebody else captured the graph.

    Called with the server's lock held; ``may_hit`` and ``per_call`` without it. Only ``agreed``, and what ``per_call``
    gives, may change anything.
    """

    def verdict(self, entry: "CUDAGraphEntry", values: Sequence[Any], rows: int) -> tuple[Reason | None, str]:
        """What becomes of a call that is no hit, in a word and in detail: None if the graph serves it, ``VERIFIED_NOW``
        if it must be compared with eager before, else why it runs eagerly."""
        is_due = entry.state is EntryState.FAILED or entry.is_due_again
        return (Reason.VERIFIED_NOW if is_due and entry.call is not None else None), ""

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
        """Why the graph may not serve ``part`` rows of a batch of ``rows`` that is larger than the largest graph; empty
        if it may. That a graph serves padded batches does not say so."""
        return "nobody has shown that its rows are independent"

    @property
    def in_parts(self) -> MutableMapping[int, tuple[Reason, str]]:
        """By the number of parts, how larger batches are served that were compared so with eager: ``IN_PARTS``, or why
        not. The graphs that were shown to be parts of one another share it."""
        return {}


class Capturer(Protocol):
    """Makes the graphs of callables, and compares them with eager. Called with the server's lock held."""

    may_pad_otherwise: bool
    """Whether padding without a rule of the user's may become copies of the last row, where a capture raised for
    zeros: not where nobody checks what padding rows write."""

    def reach(self, fn: Callable[..., Any], *, by_names: bool = False) -> Guard:
        """The tensors that a callable reaches now, whatever it reads of them; also what the names in its code lead to
        through modules and classes, or not. Needs no lock."""

    def capture(self, request: "CaptureRequest") -> "CaptureResult":
        """Run the call, which answers the caller, and capture it.

        Raises what the call raises on the real rows.
        """

    def check(self, request: "CaptureRequest", entry: "CUDAGraphEntry") -> "CaptureResult":
        """Run the call, which answers the caller, and compare a graph with that. Raises as ``capture`` does."""

    def gap(self, want: Iterable[Any], got: Iterable[Any], entry: "CUDAGraphEntry", options: CUDAGraphOptions) -> str:
        """How outputs of a graph differ from eager's, by more than rounding where that is allowed; empty if they do
        not. By itself it allows for none."""
        return "" if all(map(bits_equal, want, got)) else "other bits"
