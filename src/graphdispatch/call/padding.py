"""Pad rules: what to put into the rows of a graph that the batch does not fill.

A padding row runs through the model like any other row. If it points at a cache slot in use, it overwrites that slot.
So each argument has its own rule, and the library does not guess one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from ..errors import ConfigError, shown

__all__ = ["Pad", "as_pad"]

PadFunction = Callable[[torch.Tensor, torch.Tensor], Any]


@dataclass(frozen=True)
class Pad:
    """How the padding rows of one argument are filled: a rule for ``pad`` of ``graphed``.

    Make one with ``zero``, ``value``, ``repeat_last``, ``leave`` or ``function``. Frozen.

    Args:
        kind: The rule.
        fill: The value that ``kind="value"`` fills in.
        call: The function that ``kind="function"`` calls.
    """

    kind: Literal["value", "repeat_last", "leave", "function"]
    fill: float | int | bool | complex = 0
    call: PadFunction | None = None

    @classmethod
    def zero(cls) -> "Pad":
        """Fill with zeros (the default)."""
        return cls("value", 0)

    @classmethod
    def value(cls, fill: float | int | bool | complex) -> "Pad":
        """Fill with one value, for example the index of a scratch slot.

        Args:
            fill: The value, of a type that the argument's dtype can hold.
        """
        return cls("value", fill)

    @classmethod
    def repeat_last(cls) -> "Pad":
        """Repeat the last real row."""
        return cls("repeat_last")

    @classmethod
    def leave(cls) -> "Pad":
        """Leave what earlier, larger batches put there; only for arguments whose padding rows are never used."""
        return cls("leave")

    @classmethod
    def function(cls, call: PadFunction) -> "Pad":
        """Let a function fill the padding rows on every padded call.

        Args:
            call: ``call(padding, real)`` writes the view ``padding`` in place, and may read the view ``real``. Both are
                views of one buffer of the graph, valid during the call alone; ``real`` has at least one row.
        """
        return cls("function", call=call)

    @property
    def is_left(self) -> bool:
        """Whether padding rows hold whatever was there before, which nobody knows."""
        return self.kind == "leave"

    @property
    def runs_code(self) -> bool:
        """Whether the user's function fills padding rows, which may do anything besides."""
        return self.kind == "function"

    @property
    def follows_data(self) -> bool:
        """Whether padding rows depend on the real rows, and so must be filled anew on each call."""
        return self.kind in ("repeat_last", "function")

    def filler(self, padding: torch.Tensor, real: torch.Tensor, dim: int) -> Callable[[], Any] | None:
        """What fills ``padding`` from what ``real`` holds at the time of each call.

        Args:
            padding: The view of the padding rows.
            real: The view of the real rows, of the same buffer; at least one row.
            dim: The dimension along which the buffer is cut.

        Returns:
            A function without arguments; None to leave the padding as it is.
        """
        if self.is_left:
            return None
        call = self.call
        if call is not None:
            return lambda: call(padding.view_as(padding), real.view_as(real))
        if self.kind == "repeat_last":
            return partial(padding.copy_, real.narrow(dim, real.shape[dim] - 1, 1).expand_as(padding))
        return partial(padding.fill_, self.fill)


def as_pad(name: str, rule: Any) -> Pad:
    """``rule`` as a ``Pad``. It may be a ``Pad``, a number, ``"zero"``, ``"repeat_last"``, ``"leave"`` or a function.

    Raises ``ConfigError`` for anything else.
    """
    if isinstance(rule, Pad):
        return rule
    if isinstance(rule, (bool, int, float, complex)):
        return Pad.value(rule)
    named: Mapping[str, Callable[[], Pad]] = {"zero": Pad.zero, "repeat_last": Pad.repeat_last, "leave": Pad.leave}
    if isinstance(rule, str) and rule in named:
        return named[rule]()
    if callable(rule):
        return Pad.function(rule)
    raise ConfigError(
        f"pad[{name!r}] must be a Pad, a number, one of {', '.join(map(repr, named))}, or a function "
        f"(padding, real) -> None, got {shown(rule)}"
    )
