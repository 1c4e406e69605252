"""What code can tell of an argument besides its values: where it lies in its storage, whether it needs a gradient,
whether it is another argument or a tensor of the callable's state."""

import os
import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..call.spec import is_tensor
from ..state.bytecode import code_reads
from ..state.objects import is_library_code
from ..state.particulars import TENSOR_READERS

__all__ = ["Told", "told_by"]


_IDENTITY = "is"
_MOST_KNOWN = 8
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_DEMO = os.path.join(_OURS, "demo") + os.sep


def told_by(codes: Iterable[types.CodeType]) -> list[str]:
    """What of all this code of the user reads, of arguments or of other tensors; ``is`` where any compares objects."""
    paths = ((code, code.co_filename) for code in codes)
    others = [code for code, path in paths if not path.startswith(_OURS) or path.startswith(_DEMO)]
    theirs = [code for code in others if not is_library_code(code.co_filename)]
    # Torch's attention compares the query with the key.
    compares = any(code_reads(code).compared for code in theirs) or any(
        not code_reads(code).compared.isdisjoint(code.co_varnames) for code in others
    )
    return sorted(TENSOR_READERS.keys() & set().union(*map(_spelled, theirs))) + [_IDENTITY] * compares


def _spelled(code: types.CodeType) -> frozenset[str]:
    reads = code_reads(code)
    asks = not reads.variables.isdisjoint(("getattr", "hasattr"))
    return reads.attributes | reads.texts if asks else reads.attributes


class Told:
    """What the code of a graph reads of its arguments so, in the calls that were compared with eager.

    A graph reads its own buffers, so a call that differs here may take another branch. Calls are noted under the lock
    of whoever compares; any thread may ask. ``state`` are the tensors that an argument may be; it holds them.
    """

    def __init__(self, names: Sequence[str], values: Sequence[Any], state: Sequence[torch.Tensor]) -> None:
        self.names = names
        self._readers = [TENSOR_READERS[name] for name in names if name != _IDENTITY]
        self._positions = [place for place, value in enumerate(values) if is_tensor(value)]
        self._state = {id(tensor): (tensor, -1 - place) for place, tensor in enumerate(state)}
        self._known: list[list[Any]] = []

    @property
    def is_full(self) -> bool:
        """Whether so many kinds of calls were compared that others run eagerly."""
        return len(self._known) >= _MOST_KNOWN

    @property
    def text(self) -> str:
        """Why a call that differs runs eagerly."""
        spelled = ", ".join(name if name == _IDENTITY else f".{name}" for name in self.names)
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
        return read + self._identities(values) if _IDENTITY in self.names else read

    def _identities(self, values: Sequence[Any]) -> list[int]:
        """For each tensor the place of the first that is the same, or a number of its own for one of the state."""
        firsts: dict[int, int] = {}
        for place in self._positions:
            key = id(values[place])
            firsts.setdefault(key, self._state[key][1] if key in self._state else place)
        return [firsts[id(values[place])] for place in self._positions]


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is int and type(b) is int and a == b)
