"""What the Python code of some runs reads: the names that it holds, its variables, and the code itself."""

import types
from collections.abc import Iterable
from typing import Any

from .bytecode import may_change_state
from .objects import is_library_code

Names = dict[int, tuple[dict[str, Any], set[str]]]
"""For each namespace, by its ``id``: the namespace, and names in it."""
_SETS = ("names", "asked", "library_names", "whole_types")
_FLAGS = ("is_blind", "reads_environment", "reads_whole")


class CodeNotes:
    """Notes of the code that ran; those of several runs add up. A guard compares what they name."""

    def __init__(self) -> None:
        self.codes: set[types.CodeType] = set()
        self.names: set[str] = set()
        """Names of attributes that code of the user reads."""
        self.asked: set[str] = set()
        """Names that code of the user asks for by ``getattr`` or ``hasattr``, so that they need not exist."""
        self.library_names: set[str] = set()
        """Those that code of libraries reads."""
        self.whole_types: set[type] = set()
        """Classes whose objects are read under names that are not spelled in the code."""
        self.reads_whole: str = ""
        """The code that reads objects of any class so; empty if none does."""
        self.variables: Names = {}
        """The global variables that code of the user uses."""
        self.absent: Names = {}
        """Names under which that code finds nothing there: a builtin serves, or a default."""
        self.whole_tables: Names = {}
        """The namespaces that code gets hold of by ``globals()``."""
        self.functions: list[types.FunctionType] = []
        """Functions that ran and that nothing within reach holds, but for the interpreter."""
        self.reads_environment = False
        """Whether code of the user names the environment variables."""
        self.is_blind = False
        """Whether something ran unseen; then everything within reach counts as read."""

    def may_change_state(self) -> bool:
        """Whether code of the user that ran may change Python state, be it in lines that did not run."""
        return self.is_blind or any(may_change_state(c) for c in self.codes if not is_library_code(c.co_filename))

    def lacks(self, other: "CodeNotes") -> bool:
        """Whether ``other`` notes code of the user, or what any code reads, that these notes do not have."""
        if any(getattr(other, kind) - getattr(self, kind) for kind in _SETS):
            return True
        if any(getattr(other, flag) and not getattr(self, flag) for flag in _FLAGS):
            return True
        if not other.whole_tables.keys() <= self.whole_tables.keys():
            return True
        tables = ((self.variables, other.variables), (self.absent, other.absent))
        if any(names - own.get(key, (table, set()))[1] for own, new in tables for key, (table, names) in new.items()):
            return True
        known = set(map(id, self.functions))
        return any(id(fn) not in known for fn in other.functions) or any(
            not is_library_code(code.co_filename) for code in other.codes - self.codes
        )

    def absorb(self, other: "CodeNotes") -> None:
        """Note all that ``other`` notes."""
        self.codes |= other.codes
        for kind in _SETS:
            getattr(self, kind).update(getattr(other, kind))
        tables = ((self.variables, other.variables), (self.absent, other.absent))
        for own, new in (*tables, (self.whole_tables, other.whole_tables)):
            for table, names in new.values():
                keep(own, table, names)
        known = set(map(id, self.functions))
        self.functions += [fn for fn in other.functions if id(fn) not in known]
        self.reads_whole = self.reads_whole or other.reads_whole
        self.reads_environment |= other.reads_environment
        self.is_blind |= other.is_blind


def keep(notes: Names, table: dict[str, Any], names: Iterable[str]) -> None:
    """Note names of a namespace."""
    notes.setdefault(id(table), (table, set()))[1].update(names)
