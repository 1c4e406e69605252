"""The page of an audit: what graphs would do with a callable."""

from collections.abc import Sequence

from ..auditing.result import REPLAY_COLUMNS, Audit, Finding, Tensors, place, replay_row
from ..units import count, percent, storage
from .page import Content, Note, Part, Report, Section, Table, Tile, make_report

__all__ = ["audit_content", "audit_report"]


def audit_report(audit: Audit) -> Report:
    """An audit as a page to look at. Raises ``ConfigError`` if plotly is not installed."""
    return make_report(audit_content(audit))


def audit_content(audit: Audit) -> Content:
    """What the page of an audit shows. It has no charts."""
    sizes = ", ".join(str(one.size) for one in audit.replays)
    headline = f"{audit.name} is capturable" if audit.capturable else f"{audit.name} is not capturable"
    dims = ", ".join(f"dimension {dim} of {name}" for name, dim in audit.dynamic.items())
    facts = [f"{audit.device}, {audit.mode}", f"{count(audit.rows)} rows by {dims or 'no dimension'}"]
    tiles = [
        Tile("Graphs", count(len(audit.replays)), f"of {sizes} rows" if sizes else "none was captured"),
        Tile("Operators", count(audit.operators), f"{len(audit.forbidden) or 'none'} of which CUDA forbids"),
        Tile("Rows", audit.independence.verdict, "whether padding can change real rows"),
        Tile("Writes", storage(sum(one.touched for one in audit.writes)), "of memory that is not the call's own"),
        Tile("Pool", storage(audit.pool_bytes), f"and {storage(audit.input_bytes)} of static inputs"),
    ]
    sections = [_verdict(audit), _state(audit), _frozen(audit.frozen), _replays(audit)]
    return Content(f"graphdispatch audit: {audit.name}", headline, facts, tiles, sections)


def _verdict(audit: Audit) -> Section:
    parts: list[Part] = [Note("No graph", failure, True) for failure in audit.failures]
    if audit.capturable:
        parts.append(Note("Capturable", "Graphs of all sizes were captured, and agree with eager."))
    if audit.forbidden:
        parts.append(_findings(audit.forbidden))
    kind = audit.independence
    parts.append(Note(f"Rows: {kind.verdict}", kind.text, kind.verdict in ("dependent", "untested")))
    if audit.breaks is not None:
        names = ", ".join(audit.breaks.modules) or "none"
        gain = f"{percent(audit.breaks.share)} of the operators then lie in {audit.breaks.graphs} graphs."
        parts.append(Note(f"Breaks: {names}", audit.breaks.failure or gain, bool(audit.breaks.failure)))
    return Section("Can graphs hold it?", "", parts)


def _state(audit: Audit) -> Section:
    parts: list[Part] = []
    for title, tensors in (("reads", audit.reads), ("writes", audit.writes)):
        if tensors:
            parts.append(Table((title, "bytes", "of"), [_cells(one) for one in tensors]))
    if audit.rebinds:
        parts.append(Note("A call rebinds Python state", ", ".join(audit.rebinds), True))
    if audit.guarded:
        parts.append(Table(("compared at each hit",), [(text,) for text in audit.guarded]))
    return Section("State", "What the call reads and writes besides its arguments and results.", parts)


def _cells(one: Tensors) -> tuple[str, str, str]:
    return one.name, storage(one.touched), storage(one.nbytes)


def _frozen(frozen: Sequence[Finding]) -> Section:
    parts = [_findings(frozen)] if frozen else [Note("Nothing", "No value of Python was found that a graph keeps.")]
    return Section("What a graph would keep for ever", "", parts)


def _findings(found: Sequence[Finding]) -> Table:
    rows = [(one.what, count(one.times), one.module, place(one.where), one.why) for one in found]
    return Table(("what", "times", "module", "where", "why"), rows)


def _replays(audit: Audit) -> Section:
    lead = "What one replay of each size does: operators, copies of a full batch, and the padding of an average one."
    return Section("Each replay", lead, [Table(REPLAY_COLUMNS, [replay_row(one) for one in audit.replays])])
