"""Measures what the steps and graphs of a callable cost on this machine."""
