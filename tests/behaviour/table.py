"""The one table of Python state, filled.

``cases_places.py`` has a number in each place, ``cases_names.py`` each way to compute a name, ``ways.py`` each way to
reach a callable; ``cases_read.py``, ``cases_written.py`` and ``cases_mixed.py`` what is no product.
"""

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
