"""What a case of Python state is: what a call reads, what may change without harm, and what a call writes.

``table.py`` has them all. A case makes its state anew each time that it is used.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from graphdispatch import Reason

__all__ = [
    "KEPT",
    "MIXED",
    "PATCH",
    "READS",
    "WRITES",
    "Box",
    "Case",
    "Fn",
    "Made",
    "Read",
    "Slots",
    "Slotted",
    "Write",
    "put_back",
]

Fn = Callable[[torch.Tensor], Any]


def _nothing() -> None:
    """What there is nothing to do for, or to say of."""


class Made(NamedTuple):
    """A callable, what changes the state that it uses between calls, and what says how that state is."""

    fn: Fn
    change: Callable[[], Any] = _nothing
    tell: Callable[[], Any] = _nothing


@dataclass(frozen=True)
class Case:
    """Makes a callable, and the state that it uses."""

    make: Callable[[], Made]
    row: bool = False
    """Whether it is tested through every front end, as the rows of ``docs/footguns.md`` are."""


@dataclass(frozen=True)
class Read(Case):
    """State that a call reads."""

    options: dict[str, Any] = field(default_factory=dict)
    """How it is served."""
    serves: bool = True
    """Whether a graph serves again after the change."""


@dataclass(frozen=True)
class Write(Case):
    """State that a call writes."""

    reason: Reason = Reason.STATE_REBOUND
    """Why no graph serves it."""
    is_shared: bool = False
    """Whether other threads may use it at the same time, so that nobody puts it back."""
    in_breaks: bool = True
    """Whether it is written once, too, where a break does it."""


READS: dict[str, Read] = {}
"""A graph must not serve after the change."""
KEPT: dict[str, Read] = {}
"""The graph serves on after the change."""
WRITES: dict[str, Write] = {}
"""Each call writes it, and no graph serves."""
MIXED: dict[str, Case] = {}
"""Calls write it or not, as it happens to be, and graphs serve or not."""
PATCH = pytest.MonkeyPatch()
"""What changes the process; ``put_back`` undoes it."""


class Box:
    """A plain object with whatever attributes it is given."""

    limit = 2.0

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slotted:
    """An object without a dict."""

    __slots__ = ("calls", "k")

    def __init__(self, k: Any) -> None:
        self.k = k


class InSlot:
    """A base class with a slot."""

    __slots__ = ("k",)


@dataclass(frozen=True)
class Slots(InSlot):
    """Its instances have a table, too, which is empty."""

    k: float


@contextmanager
def put_back() -> Iterator[None]:
    """Undo what the cases change in the process."""
    try:
        with torch.no_grad():
            yield
    finally:
        PATCH.undo()
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
