"""Ranks that share collectives, and therefore take the same decisions."""
