"""Reports to look at: one HTML file each, with all that it needs, for a browser with or without a network."""

from .callables import callable_report
from .page import Report
from .plans import plan_report

__all__ = ["Report", "callable_report", "plan_report"]
