"""What the code of a function reads: the names of attributes, told apart by what they are read from."""

import dis
from functools import lru_cache
from types import CodeType
from typing import NamedTuple

import torch

__all__ = ["Reads", "reads"]

_OF_TENSORS = frozenset(dir(torch.Tensor))
_LEAVE_THE_TOP = ("CACHE", "COPY", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "SWAP")
_SELF = "<first>"


class Reads(NamedTuple):
    """``own`` are attributes of the first parameter; ``pairs`` of a variable or attribute with a known name, together
    with that name; ``loose`` of anything else, and strings, less what any tensor has."""

    own: frozenset[str] = frozenset()
    pairs: frozenset[tuple[str, str]] = frozenset()
    loose: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """All of them."""
        return self.own | self.loose | {name for _, name in self.pairs}

    def __or__(self, other: "Reads") -> "Reads":
        return Reads(self.own | other.own, self.pairs | other.pairs, self.loose | other.loose)


@lru_cache(maxsize=4096)
def reads(code: CodeType, around: tuple[tuple[str, str | None], ...] = ()) -> Reads:
    """What ``code`` and the code nested in it read; ``around`` are the known variables of the code around it.

    A local variable that was given an attribute (``config = self.config``) stands for it. What is only written is not
    read.
    """
    own, pairs, loose = set[str](), set[tuple[str, str]](), set[str]()
    aliases = {name: known for name, known in around if name not in code.co_varnames}
    if code.co_argcount and not around:
        aliases[code.co_varnames[0]] = _SELF
    top: str | None = None  # the name of what lies on the stack's top, if it has one
    for instruction in dis.get_instructions(code):
        kind, name = instruction.opname, instruction.argval
        if kind in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            if name.startswith("__"):
                pass
            elif top is _SELF:
                own.add(name)
            elif top is not None:
                pairs.add((top, name))
            elif name not in _OF_TENSORS:
                loose.add(name)
            top = name
        elif kind.startswith("LOAD_FAST") or kind == "LOAD_DEREF":
            name = name[-1] if isinstance(name, tuple) else name
            top = aliases.get(name, name if kind == "LOAD_DEREF" else None)
        elif kind in ("LOAD_GLOBAL", "LOAD_NAME"):
            top = name
        elif kind in ("STORE_FAST", "STORE_DEREF"):
            aliases[name], top = top, None
        elif kind == "STORE_FAST_LOAD_FAST":
            aliases[name[0]], top = top, aliases.get(name[1])
        elif kind == "STORE_FAST_STORE_FAST":
            aliases[name[0]], aliases[name[1]], top = top, None, None
        elif kind not in _LEAVE_THE_TOP:
            top = None
    texts = {value for value in code.co_consts if isinstance(value, str)}
    loose |= {text for text in texts if text.isidentifier() and not text.startswith("__")}
    found = Reads(frozenset(own), frozenset(pairs), frozenset(loose))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= reads(inner, tuple(aliases.items()))
    return found
