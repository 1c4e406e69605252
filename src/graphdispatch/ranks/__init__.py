"""Ranks that share collectives and decide alike."""
