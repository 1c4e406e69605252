"""The report on what a served callable did: one page, a notebook's tables, or text."""

from .page import Bar, GraphRow, GraphTable, ReasonRow, Report
from .rows import make_report

__all__ = ["Bar", "GraphRow", "GraphTable", "ReasonRow", "Report", "make_report"]
