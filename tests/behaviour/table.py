"""The one table of Python state, filled."""

from . import cases_mixed, cases_names, cases_places, cases_read, cases_written
from .cases import KEPT, MIXED, READS, WRITES

__all__ = [
    "KEPT",
    "MIXED",
    "READS",
    "WRITES",
    "cases_mixed",
    "cases_names",
    "cases_places",
    "cases_read",
    "cases_written",
]
