"""``Audit``: what was found, as plain data, and as text."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..errors import ConfigError
from ..showing import html_table
from ..units import storage

__all__ = ["Audit", "BreakSet", "Finding", "Replay", "Rows", "Tensors"]


_MOST_GUARDED = 8


@dataclass(frozen=True)
class Finding:
    """Something at a line of the user's code. ``kind``: ``"forbidden"`` or ``"frozen"``."""

    kind: str
    what: str
    """An operator, a method of tensors, or a value."""
    where: str
    """``file:line: source``; empty where there is no line."""
    why: str
    """What is wrong with it, and what to do."""
    module: str = ""
    """The innermost module around it, by name; empty if there is none."""
    times: int = 1


@dataclass(frozen=True)
class Tensors:
    """Memory that is not the call's own: its name, its bytes, and how many of them the call reads or writes."""

    name: str
    nbytes: int
    touched: int


@dataclass(frozen=True)
class Rows:
    """Whether padding can change real rows. ``verdict``: ``"independent"``, ``"dependent"``, ``"untested"`` or
    ``"no batch dimension"``, with what is to be said of it as ``text``.

    Replays of the same real rows with other padding gave the same bits, or with ``perturbation`` in the padding rows
    ``changed`` says what did not.
    """

    verdict: str
    text: str = ""
    perturbation: str = ""
    changed: str = ""


@dataclass(frozen=True)
class BreakSet:
    """The modules that must run eagerly so that graphs can hold the rest.

    ``share`` is the part of the operators, from 0 to 1, that then lie in graphs. ``failure`` says why even that was
    not enough; empty if it was captured so.
    """

    modules: tuple[str, ...]
    share: float
    graphs: int
    failure: str = ""


@dataclass(frozen=True)
class Replay:
    """What one replay of one size does. ``recorded`` and ``replayed`` count operators, and are 0 where the device does
    not tell. Sizes of copies are bytes of a full batch, ``padding`` is the padding's share of all computed rows if
    every number of rows that the graph serves is as likely."""

    mode: str
    size: int
    serves: int
    """The smallest batch that it serves."""
    graphs: int
    recorded: int
    replayed: int
    copied_in: int
    copied_out: int
    own_bytes: int
    """Memory beyond the pool, which all sizes share."""
    padding: float


@dataclass(frozen=True)
class Audit:
    """What graphs would do with a callable. Plain data, compared by value."""

    name: str
    device: str
    mode: str
    rows: int
    dynamic: Mapping[str, int]
    """The batch dimensions, as given or as guessed."""
    capturable: bool
    """Whether graphs of all sizes were captured and agreed with eager, and nothing was found that CUDA forbids."""
    failures: tuple[str, ...]
    """Why sizes were not captured, each reason once."""
    operators: int
    """The operators of one eager run."""
    forbidden: tuple[Finding, ...]
    reads: tuple[Tensors, ...]
    writes: tuple[Tensors, ...]
    rebinds: tuple[str, ...]
    """Python attributes and variables that a call leaves changed."""
    guarded: tuple[str, ...]
    """What is compared at each hit."""
    independence: Rows
    frozen: tuple[Finding, ...]
    breaks: BreakSet | None
    """None where no break is needed, or none would help."""
    replays: tuple[Replay, ...]
    """One for each size, with the breaks if they were captured."""
    pool_bytes: int
    input_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold; ``from_dict`` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Audit":
        """The audit that ``to_dict`` described. Raises ``ConfigError`` for anything else."""
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            raise ConfigError(f"this is no audit, as to_dict() writes it: {error}") from None

    def __repr__(self) -> str:
        verdict = "capturable" if self.capturable else "NOT capturable"
        forbidden = f"{len(self.forbidden) or 'none'} that CUDA forbids"
        return f"<Audit {self.name}: {verdict}, {self.operators} operators, {forbidden}>"

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        return html_table(repr(self)[1:-1], ("what was found",), ([line] for line in _lines(self)))


def _lines(audit: Audit) -> Iterable[str]:
    """The report as text, line by line."""
    dims = ", ".join(f"{name}[{dim}]" for name, dim in audit.dynamic.items())
    yield f"{audit.name} on {audit.device}" + (f", {audit.rows} rows in {dims}" if dims else "")
    sizes = ", ".join(str(one.size) for one in audit.replays)
    graphs = f"{audit.mode} graphs of {sizes} rows" if dims else f"one {audit.mode} graph"
    yield f"capturable: {graphs}" if audit.capturable else "NOT capturable"
    yield from _indented(map(_shortened, audit.failures))
    yield f"operators: {audit.operators} in one eager run, {len(audit.forbidden) or 'none'} that CUDA forbids"
    yield from _indented(line for found in audit.forbidden for line in _finding(found))
    yield from _titled("reads", map(_tensors, audit.reads))
    yield from _titled("writes", map(_tensors, audit.writes))
    yield from _titled("rebinds Python state", audit.rebinds)
    named = [*audit.guarded[:_MOST_GUARDED], *(["and others"] if len(audit.guarded) > _MOST_GUARDED else [])]
    yield from _titled("compared at each hit", filter(None, [", ".join(named)]))
    yield from _titled("frozen in a graph", (line for found in audit.frozen for line in _finding(found)))
    yield f"rows: {audit.independence.verdict}"
    yield from _indented(filter(None, [audit.independence.text]))
    if audit.breaks is not None:
        yield f"breaks: {', '.join(audit.breaks.modules) or 'no module'}"
        held = f"{audit.breaks.graphs} graphs" if audit.breaks.graphs else "graphs"
        gain = f"{100 * audit.breaks.share:.1f} % of the operators then lie in {held}" if audit.breaks.modules else ""
        yield from _indented(filter(None, [gain, _shortened(audit.breaks.failure)]))
    if audit.replays:
        yield f"each replay: the pool has {storage(audit.pool_bytes)}, static inputs {storage(audit.input_bytes)}"
        table = [REPLAY_COLUMNS, *map(replay_row, audit.replays)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        yield from _indented("  ".join(map(str.rjust, row, widths)) for row in table)


REPLAY_COLUMNS = ("rows", "serves", "graphs", "recorded", "replayed", "copied in", "copied out", "own", "padding")


def replay_row(one: Replay) -> tuple[str, ...]:
    """A replay as cells of a table."""
    first = str(one.serves) if one.serves == one.size else f"{one.serves}-{one.size}"
    recorded, replayed = (str(number) if number else "?" for number in (one.recorded, one.replayed))
    copies = (storage(one.copied_in), storage(one.copied_out), storage(one.own_bytes))
    return (str(one.size), first, str(one.graphs), recorded, replayed, *copies, f"{100 * one.padding:.1f} %")


def place(where: str) -> str:
    """A line of code as people look for it: its path from here, or from where packages lie."""
    where = re.sub(r"^\S*[/\\](?:site|dist)-packages[/\\]", "", where)
    return where.removeprefix(os.getcwd() + os.sep)


def _shortened(text: str) -> str:
    return re.sub(r"(?<=\bat )\S+:\d+: ", lambda found: place(found[0]), text)


def _finding(found: Finding) -> Iterable[str]:
    often = f" ({found.times} times)" if found.times > 1 else ""
    inside = f" in {found.module}" if found.module else ""
    text = f"{found.what}{often}{inside} {found.why}"
    return [place(found.where), f"  {text}"] if found.where else [text]


def _tensors(one: Tensors) -> str:
    part = f"{storage(one.touched)} of " if one.touched != one.nbytes else ""
    return f"{one.name}: {part}{storage(one.nbytes)}"


def _titled(title: str, lines: Iterable[str]) -> Iterable[str]:
    lines = list(lines)
    if lines:
        yield f"{title}:"
        yield from _indented(lines)


def _indented(lines: Iterable[str]) -> Iterable[str]:
    for line in lines:
        yield f"  {line}"
