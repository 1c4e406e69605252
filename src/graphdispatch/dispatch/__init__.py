"""Deciding which mode and which graph serve a batch, and why: pure functions over plain data, and one runner."""

from .decision import Decision, SizeTable

__all__ = ["Decision", "SizeTable"]
