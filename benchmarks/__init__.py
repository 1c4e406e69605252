"""Ratios measured in one run: ``python -m benchmarks``. Nothing is asserted."""
