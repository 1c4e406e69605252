"""Finds which attributes the code of a function reads, and of what, from its bytecode."""

import dis
from functools import lru_cache
from types import CodeType
from typing import NamedTuple

import torch

__all__ = ["AttributeReads", "attribute_reads"]

_TENSOR_ATTRIBUTES = frozenset(dir(torch.Tensor))
_KEEP_THE_TOP = ("CACHE", "COPY", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "SWAP")
_SELF = "<first>"


class AttributeReads(NamedTuple):
    """The names of the attributes that some code reads, told apart by what they are read from."""

    of_self: frozenset[str] = frozenset()
    """Read from the first parameter."""
    of_named: frozenset[tuple[str, str]] = frozenset()
    """Pairs (owner, attribute), read from a variable or attribute whose name is known."""
    of_other: frozenset[str] = frozenset()
    """Read from anything else, and strings that could be names; without the attributes that every tensor has."""

    @property
    def names(self) -> frozenset[str]:
        """All attribute names."""
        return self.of_self | self.of_other | {name for _, name in self.of_named}

    def __or__(self, other: "AttributeReads") -> "AttributeReads":
        return AttributeReads(
            self.of_self | other.of_self, self.of_named | other.of_named, self.of_other | other.of_other
        )


@lru_cache(maxsize=4096)
def attribute_reads(code: CodeType, outer: tuple[tuple[str, str | None], ...] = ()) -> AttributeReads:
    """What ``code`` and the code nested in it read. ``outer`` are the variables of the code around it, by known name.

    A local variable that an attribute was assigned to (``config = self.config``) stands for that attribute. An
    attribute that is only written is not read.
    """
    of_self, of_named, of_other = set[str](), set[tuple[str, str]](), set[str]()
    aliases = {name: known for name, known in outer if name not in code.co_varnames}
    if code.co_argcount and not outer:
        aliases[code.co_varnames[0]] = _SELF
    top: str | None = None  # the name of the value on top of the stack, if it has one
    for instruction in dis.get_instructions(code):
        kind, name = instruction.opname, instruction.argval
        if kind in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            if name.startswith("__"):
                pass
            elif top is _SELF:
                of_self.add(name)
            elif top is not None:
                of_named.add((top, name))
            elif name not in _TENSOR_ATTRIBUTES:
                of_other.add(name)
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
        elif kind not in _KEEP_THE_TOP:
            top = None
    texts = {value for value in code.co_consts if isinstance(value, str)}
    of_other |= {text for text in texts if text.isidentifier() and not text.startswith("__")}
    found = AttributeReads(frozenset(of_self), frozenset(of_named), frozenset(of_other))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= attribute_reads(inner, tuple(aliases.items()))
    return found
