"""Reports to look at. Each is one HTML file that contains everything it needs, so it works without a network."""

from .audits import audit_report
from .callables import callable_report
from .page import Report

__all__ = ["Report", "audit_report", "callable_report"]
