"""``Audit``: what was found, as plain data and as text."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..showing import html_table, percent, storage


@dataclass(frozen=True)
class Finding:
    """Something at a line of the user's code.

    Attributes:
        what: An operator, a method of tensors, or a value.
        where: ``file:line: source``; empty where there is no line.
        why: What is wrong with it, and what to do.
        module: The innermost module around it, by name; empty if there is none.
        times: How often it was met in one run.
    """

    what: str
    where: str
    why: str
    module: str = ""
    times: int = 1


@dataclass(frozen=True)
class Memory:
    """Memory that is not the call's own: its name, its bytes, and how many of them the call reads or writes."""

    name: str
    nbytes: int
    touched: int


@dataclass(frozen=True)
class Rows:
    """Whether padding can change real rows.

    Attributes:
        verdict: ``"independent"``, ``"dependent"``, ``"unknown"``, ``"untested"`` or ``"no batch dimension"``.
        text: Where rows mix, or which operator has no rule, with the user's line.
    """

    verdict: str
    text: str = ""


@dataclass(frozen=True)
class Breaks:
    """The modules that must run eagerly so that graphs can hold the rest; none if what stands against lies in none.

    ``share`` is the part of the operators, from 0 to 1, that would then lie in graphs.
    """

    modules: tuple[str, ...]
    share: float


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What eager runs of a call show.

    Attributes:
        operators: The number of operators of one run, views not counted.
        forbidden: Everything that CUDA forbids in a capture.
        reads: Memory that a call reads and does not own: parameters and buffers together, and other tensors.
        writes: Memory that a call writes to and does not own.
        rebinds: Python attributes and variables that a call leaves changed.
        frozen: What a graph keeps as it was at its capture.
    """

    operators: int = 0
    forbidden: tuple[Finding, ...] = ()
    reads: tuple[Memory, ...] = ()
    writes: tuple[Memory, ...] = ()
    rebinds: tuple[str, ...] = ()
    frozen: tuple[Finding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Audit(Findings):
    """What graphs would do with a callable. Plain data, compared by value; its text is the report.

    Attributes:
        name: The callable's name.
        device: Where it ran.
        mode: The mode of the graphs.
        rows: The number of rows of the call.
        dynamic: The batch dimension of each argument that has one, as given or as guessed.
        capturable: Whether graphs of all sizes were captured and agreed with eager, and CUDA forbids nothing.
        failures: Why sizes were not captured, each reason once.
        sizes: The sizes that were captured.
        breaks: Where to break so that graphs can hold the rest; None if CUDA forbids nothing.
        independence: Whether padding can change real rows.
        memory: The bytes of the ``pool`` of all graphs, of their static ``inputs``, and of ``graphs`` beyond these.
    """

    name: str
    device: str
    mode: str
    rows: int
    dynamic: Mapping[str, int]
    capturable: bool
    failures: tuple[str, ...]
    sizes: tuple[int, ...]
    breaks: Breaks | None
    independence: Rows
    memory: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return asdict(self)

    def __repr__(self) -> str:
        verdict = "capturable" if self.capturable else "NOT capturable"
        forbidden = f"{len(self.forbidden) or 'none'} that CUDA forbids"
        return f"<Audit {self.name}: {verdict}, {self.operators} operators, {forbidden}>"

    def __str__(self) -> str:
        text = "\n".join(_lines(self)).replace(os.getcwd() + os.sep, "")
        return re.sub(r"\S*[/\\](?:site|dist)-packages[/\\]", "", text)

    def _repr_html_(self) -> str:
        return html_table(repr(self)[1:-1], ("what was found",), ([line] for line in str(self).splitlines()))


def _lines(audit: Audit) -> Iterable[str]:
    """The report, line by line."""
    dims = ", ".join(f"{name}[{dim}]" for name, dim in audit.dynamic.items())
    yield f"{audit.name} on {audit.device}" + (f", {audit.rows} rows in {dims}" if dims else "")
    sizes = ", ".join(map(str, audit.sizes))
    graphs = f"{audit.mode} graphs of {sizes} rows" if dims else f"one {audit.mode} graph"
    yield f"capturable: {graphs}" if audit.capturable else "NOT capturable"
    yield from _indented(audit.failures)
    yield f"operators: {audit.operators} in one eager run, {len(audit.forbidden) or 'none'} that CUDA forbids"
    yield from _indented(line for found in audit.forbidden for line in _finding(found))
    if audit.breaks is not None:
        yield f"breaks: {', '.join(audit.breaks.modules) or 'in no module'}"
        share = f"{percent(audit.breaks.share)} of the operators then lie in graphs: mark these by eager_break"
        how = share if audit.breaks.modules else "put it into a function, and mark that by eager_break"
        yield f"  {how}, and use mode PIECEWISE"
    yield from _titled("reads", map(_memory, audit.reads))
    yield from _titled("writes", map(_memory, audit.writes))
    yield from _titled("rebinds Python state", audit.rebinds)
    yield from _titled("frozen in a graph", (line for found in audit.frozen for line in _finding(found)))
    yield f"rows: {audit.independence.verdict}"
    yield from _indented(filter(None, [audit.independence.text]))
    if audit.sizes:
        yield "memory: " + ", ".join(f"{name} {storage(nbytes)}" for name, nbytes in audit.memory.items())


def _finding(found: Finding) -> Iterable[str]:
    often = f" ({found.times} times)" if found.times > 1 else ""
    inside = f" in {found.module}" if found.module else ""
    text = f"{found.what}{often}{inside} {found.why}"
    return [found.where, f"  {text}"] if found.where else [text]


def _memory(one: Memory) -> str:
    part = f"{storage(one.touched)} of " if one.touched != one.nbytes else ""
    return f"{one.name}: {part}{storage(one.nbytes)}"


def _titled(title: str, lines: Iterable[str]) -> Iterable[str]:
    lines = list(lines)
    return [f"{title}:", *_indented(lines)] if lines else []


def _indented(lines: Iterable[str]) -> Iterable[str]:
    return (f"  {line}" for line in lines)
