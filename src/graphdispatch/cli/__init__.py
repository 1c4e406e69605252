"""The command line: a file for each command. The commands need the extra ``cli``."""

from .app import main

__all__ = ["main"]
