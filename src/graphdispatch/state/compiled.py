"""What code reads that ``torch.compile`` put in the place of a function's: what the compiler's guards name.

In that code all is constant that the compiler has read, in the function and in others that it put inline. The compiler
compares what it read before each run, and compiles anew where something differs. So a run depends on what the code in
place reads itself, and on what these guards name.
"""

import re
import sys
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .bytecode import CodeReads

_MADE = "__compiled_fn"
"""How the names of compiled graphs begin."""
_VARIABLES = re.compile(r"(?:\bG|\['__builtins_dict\w*'\])\['(\w+)'\]")
_NAMES = re.compile(r"(?<!\WL\[)(?<!\(key=)[.']([^\W\d]\w*)")
"""Not those of local variables, of which a script often has one of the same name."""
_CLASSES = re.compile(r"<class '[^']*'>")
_ASKED = re.compile(r"hasattr\(.*, '(\w+)'\)")
_OF_COMPILER = ("_dynamo_", "__builtins_dict", _MADE)
"""How names begin that the compiler gives. What a compiled graph keeps for itself is torch's."""
_seen: WeakKeyDictionary[Any, tuple[frozenset[str], ...]] = WeakKeyDictionary()
"""What guards name: those of a large model take some tenths of a second to print."""


class UntoldError(Exception):
    """Code that a compiler made, of which nobody can tell what it depends on."""


def compiled_from(code: CodeType) -> CodeType | None:
    """The code in whose place the compiler put this one; None for code that it did not make.

    Raises ``UntoldError`` for code that it made and does not know: it was loaded from a file.
    """
    original = original_of(code)
    if original is None and any(name.startswith(_MADE) for name in code.co_names):
        raise UntoldError
    return original


def original_of(code: CodeType) -> CodeType | None:
    """The code in whose place the compiler put this one; None for code that it did not make, or does not know."""
    utils = sys.modules.get("torch._dynamo.utils")
    original: CodeType | None = getattr(utils, "orig_code_map", {}).get(code)
    return original


def with_guards(reads: CodeReads, original: CodeType) -> tuple[CodeReads, frozenset[str]]:
    """What code reads that the compiler made of ``original``: besides its own ``reads`` all that guards name. And the
    names of attributes that need not be there.

    All that was compiled of the same function counts: which of it runs is found by these guards. Raises ``UntoldError``
    if there are none.
    """
    try:
        entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(original)
        told = [_named_by(entry.guard_manager) for entry in entries]
    except AttributeError as error:  # another torch
        raise UntoldError from error
    if not told:
        raise UntoldError
    names, variables, asked = (frozenset().union(*each) for each in zip(*told, strict=True))
    attributes = names.union(name for name in reads.attributes if not _is_compilers(name))
    variables = variables.union(name for name in reads.variables if not _is_compilers(name))
    return reads._replace(attributes=attributes, variables=variables), asked


def _named_by(guards: Any) -> tuple[frozenset[str], ...]:
    """Attributes, variables, and attributes that need not be there."""
    if guards not in _seen:
        text = _CLASSES.sub("", str(guards))  # guards of dicts stand nowhere else
        found = (pattern.findall(text) for pattern in (_NAMES, _VARIABLES, _ASKED))
        _seen[guards] = tuple(frozenset(name for name in each if not _is_compilers(name)) for each in found)
    return _seen[guards]


def _is_compilers(name: str) -> bool:
    return name.startswith(_OF_COMPILER)
