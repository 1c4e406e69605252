"""What served callables count, for Prometheus and OpenTelemetry, with a Grafana dashboard and alert rules.

``PrometheusCollector`` needs the extra ``metrics``, ``OpenTelemetryMetrics`` the extra ``otel``.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collector import PrometheusCollector
    from .otel import OpenTelemetryMetrics

__all__ = ["ALERTS", "DASHBOARD", "OpenTelemetryMetrics", "PrometheusCollector"]

DASHBOARD = Path(__file__).with_name("dashboard.json")
"""A Grafana dashboard of these metrics; it asks for its Prometheus when it is imported."""

ALERTS = Path(__file__).with_name("alerts.yml")
"""Alert rules for Prometheus (``rule_files``)."""

_HOMES = {"PrometheusCollector": "collector", "OpenTelemetryMetrics": "otel"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
