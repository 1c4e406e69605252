"""Argument metadata that code reads, besides the values of an argument.

It is where an argument lies in its storage, whether it needs a gradient, whether it is another argument or a tensor of
the callable's state.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..call.spec import is_tensor
from ..state.reads import IDENTITY, TENSOR_READERS

__all__ = ["ArgumentMetadata"]


_MOST_KNOWN = 8


class ArgumentMetadata:
    """What the code of a graph reads of its arguments' metadata, in the calls that were compared with eager.

    A graph reads its own buffers, so a call that differs here may take another branch. Calls are noted under the lock
    of whoever compares; any thread may ask. ``state`` are the tensors that an argument may be; it holds them.
    """

    def __init__(self, names: Sequence[str], values: Sequence[Any], state: Sequence[torch.Tensor]) -> None:
        self.names = names
        self._readers = [TENSOR_READERS[name] for name in names if name != IDENTITY]
        self._positions = [place for place, value in enumerate(values) if is_tensor(value)]
        self._state = {id(tensor): (tensor, -1 - place) for place, tensor in enumerate(state)}
        self._known: list[list[Any]] = []

    @property
    def is_full(self) -> bool:
        """Whether so many different calls were compared that others run eagerly."""
        return len(self._known) >= _MOST_KNOWN

    @property
    def text(self) -> str:
        """Why a call that differs runs eagerly."""
        spelled = ", ".join(name if name == IDENTITY else f".{name}" for name in self.names)
        return f"the code may read {spelled} of an argument, and each call differs there; pass that as an argument"

    def note(self, values: Sequence[Any]) -> None:
        """Note a call that was compared with eager."""
        if not self.knows(values):
            self._known.append(self._read(values))

    def knows(self, values: Sequence[Any]) -> bool:
        """Whether a call is like one that was compared."""
        now = self._read(values)
        return any(all(map(_same, now, known)) for known in self._known)

    def _read(self, values: Sequence[Any]) -> list[Any]:
        read = [reader(values[place]) for place in self._positions for reader in self._readers]
        return read + self._identities(values) if IDENTITY in self.names else read

    def _identities(self, values: Sequence[Any]) -> list[int]:
        """For each tensor the place of the first that is the same, or a number of its own for one of the state."""
        firsts: dict[int, int] = {}
        for place in self._positions:
            key = id(values[place])
            firsts.setdefault(key, self._state[key][1] if key in self._state else place)
        return [firsts[id(values[place])] for place in self._positions]


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is int and type(b) is int and a == b)
