"""What served callables count, for Prometheus: a collector, a Grafana dashboard, and alert rules. Needs the extra
``metrics``."""

from pathlib import Path

from .collector import PrometheusCollector

__all__ = ["ALERTS", "DASHBOARD", "PrometheusCollector"]

DASHBOARD = Path(__file__).with_name("dashboard.json")
"""A Grafana dashboard of these metrics; it asks for its Prometheus when it is imported."""

ALERTS = Path(__file__).with_name("alerts.yml")
"""Alert rules for Prometheus (``rule_files``)."""
