"""The audit: what graphs would do with a callable, found out before it serves."""
