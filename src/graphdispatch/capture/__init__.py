"""Capturing a callable: static inputs and pad rules, guards, effects, entries, and the one capture path."""
