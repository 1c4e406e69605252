"""Companions for inference engines, beside the wrapper, the manager and the dispatchers."""
