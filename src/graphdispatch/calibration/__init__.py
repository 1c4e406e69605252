"""Measures what steps and graphs of a callable cost on this machine."""
