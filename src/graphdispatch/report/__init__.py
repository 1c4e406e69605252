"""Reports to look at. Each is one HTML file that contains everything it needs, so it works without a network."""

from .callables import callable_report
from .page import Report
from .plans import plan_report

__all__ = ["Report", "callable_report", "plan_report"]
