"""What a person at a terminal sees while a command works."""

from contextlib import AbstractContextManager, nullcontext

from rich.console import Console


def waiting(task: str) -> AbstractContextManager[object]:
    """Show a task while it runs, on a terminal's stderr alone: what the command prints stays as it is.

    Args:
        task: What is done, as "capturing graphs".
    """
    console = Console(stderr=True)
    return console.status(task) if console.is_interactive else nullcontext()
