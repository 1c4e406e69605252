"""Pad rules: what the rows of a graph that no real row fills hold. Padding is data, and belongs to the argument.

A padding row runs through the model like any other: one that points at a live cache slot overwrites it. Hence one rule
for each argument, and no guess.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..errors import ConfigError

__all__ = ["Pad", "as_pad"]

PadFunction = Callable[[torch.Tensor, torch.Tensor], Any]


@dataclass(frozen=True)
class Pad:
    """How the padding rows of one argument are filled; make one with ``zero``, ``value``, ``repeat_last``,
    ``leave`` or ``function``."""

    kind: Literal["value", "repeat_last", "leave", "function"]
    fill: float | int | bool | complex = 0
    call: PadFunction | None = None

    @classmethod
    def zero(cls) -> "Pad":
        """Zeros (the default)."""
        return cls("value", 0)

    @classmethod
    def value(cls, fill: float | int | bool | complex) -> "Pad":
        """One value, for example the index of a scratch slot."""
        return cls("value", fill)

    @classmethod
    def repeat_last(cls) -> "Pad":
        """The last real row again."""
        return cls("repeat_last")

    @classmethod
    def leave(cls) -> "Pad":
        """Whatever earlier, larger batches left there; only for arguments whose padding rows are never used."""
        return cls("leave")

    @classmethod
    def function(cls, call: PadFunction) -> "Pad":
        """``call(padding, real)`` fills the view ``padding``, given the view ``real``, on every padded call."""
        return cls("function", call=call)

    @property
    def follows_data(self) -> bool:
        """Whether padding rows depend on the real ones, so that they are filled anew on each call."""
        return self.kind in ("repeat_last", "function")

    def apply(self, padding: torch.Tensor, real: torch.Tensor, dim: int) -> None:
        """Fill ``padding``; both are views of one buffer along ``dim``, ``real`` with at least one row."""
        if self.kind == "value":
            padding.fill_(self.fill)
        elif self.kind == "repeat_last":
            padding.copy_(real.narrow(dim, real.shape[dim] - 1, 1).expand_as(padding))
        elif self.call is not None:
            self.call(padding, real)


def as_pad(name: str, rule: Any) -> Pad:
    """``rule`` as a ``Pad``: one already, a number, ``"zero"``, ``"repeat_last"``, ``"leave"``, or a function."""
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
        f"(padding, real) -> None, got {rule!r}"
    )
