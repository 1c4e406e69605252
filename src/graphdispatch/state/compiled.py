"""What code reads that ``torch.compile`` put in the place of a function's: what the compiler's guards name.

In that code all is constant that the compiler has read, in the function and in others that it put inline. The compiler
compares what it read before each run, and compiles anew where something differs. So a run depends on what the code in
place reads itself, and on what these guards name.
"""

import re
import sys
from types import CodeType

import torch

from .bytecode import CodeReads

_MADE = "__compiled_fn"
"""How the names of compiled graphs begin."""
_VARIABLES = re.compile(r"(?:\bG|\['__builtins_dict\w*'\])\['(\w+)'\]")
_NAMES = re.compile(r"[.']([^\W\d]\w*)")
_ASKED = re.compile(r"hasattr\(.*, '(\w+)'\)")
_OF_COMPILER = ("_dynamo_", "__builtins_dict", _MADE)
"""How names begin that the compiler gives. What a compiled graph keeps for itself is torch's."""


class UntoldError(Exception):
    """Code that a compiler made, of which nobody can tell what it depends on."""


def compiled_from(code: CodeType) -> CodeType | None:
    """The code in whose place the compiler put this one; None for code that it did not make.

    Raises ``UntoldError`` for code that it made and does not know: it was loaded from a file.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    original: CodeType | None = None if utils is None else utils.orig_code_map.get(code)
    if original is None and any(name.startswith(_MADE) for name in code.co_names):
        raise UntoldError
    return original


def with_guards(reads: CodeReads, original: CodeType) -> tuple[CodeReads, frozenset[str]]:
    """What code reads that the compiler made of ``original``: besides its own ``reads`` all that guards name. And the
    names of attributes that need not be there.

    All that was compiled of the same function counts: which of it runs is found by these guards. Raises ``UntoldError``
    if there are none.
    """
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(original)
    text = "\n".join(part for entry in entries for part in entry.guard_manager.code_parts)
    if not text:
        raise UntoldError
    names, variables, asked = (
        frozenset(name for name in (*own, *pattern.findall(text)) if not name.startswith(_OF_COMPILER))
        for own, pattern in ((reads.attributes, _NAMES), (reads.variables, _VARIABLES), ((), _ASKED))
    )
    return reads._replace(attributes=names, variables=variables), asked
