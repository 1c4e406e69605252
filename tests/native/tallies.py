"""A count that a pytest plugin makes in each process of a run, and prints once."""

from collections import Counter
from typing import Any

import pytest

__all__ = ["Tally"]


class Tally:
    """Adds up a counter over the processes of ``pytest -n``, and prints it at the end; register it as a plugin."""

    def __init__(self, title: str, counter: Counter[str]) -> None:
        self.title, self.counter = title, counter

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the count of a worker to the process that started it."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[self.title] = dict(self.counter)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a worker counted."""
        self.counter.update(getattr(node, "workeroutput", {}).get(self.title, {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the cases by name."""
        terminalreporter.section(self.title)
        for case, times in sorted(self.counter.items()):
            terminalreporter.line(f"{times:10d}  {case}")
