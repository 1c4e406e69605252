"""A griffe extension: functions with several parameters get a table of them, in the words of their docstrings."""

import re
from typing import Any

import griffe

_FEWEST = 3
_UNTOLD = ("self", "cls")


class Parameters(griffe.Extension):
    """Adds the table to each docstring that has no section of that kind."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """A function or method; a class shows its constructor's."""
        parameters = [one for one in func.parameters if one.name not in _UNTOLD]
        owner = func.parent.docstring if func.name == "__init__" and func.parent is not None else func.docstring
        if owner is None or len(parameters) < _FEWEST:
            return
        sentences = re.split(r"(?<=[.;])\s+", " ".join(owner.value.split()))
        told = {one.name: _sentence(one.name, sentences) for one in parameters}
        if len([text for text in told.values() if text]) < _FEWEST:
            return
        rows = [
            griffe.DocstringParameter(
                one.name, annotation=one.annotation, description=told[one.name], value=_default(one.default)
            )
            for one in parameters
        ]
        sections = owner.parse("google")
        owner.__dict__["parsed"] = [*sections, griffe.DocstringSectionParameters(rows)]


def _sentence(name: str, sentences: list[str]) -> str:
    """The sentence that begins with a parameter, or else the first that speaks of it."""
    quoted = rf"``{re.escape(name)}\b"
    begins = next((one for one in sentences if re.match(quoted, one)), None)
    found = begins or next((one for one in sentences if re.search(quoted, one)), "")
    return found[:1].upper() + found[1:].rstrip(";")


def _default(value: Any) -> str | None:
    return None if value is None else str(value)
