"""A pytest plugin: the core beside Python at each guard and each call of a run; a test in which it is laxer fails.

``PYTHONPATH=tests/native python -m pytest -p twins`` asks the native guard and Python's at every check, and serves all
hits in Python: wherever Python matches a call, the core matches it, too. At the end it prints how often they agreed.
"""

import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from graphdispatch.backends.tracing import is_profiled
from graphdispatch.proof.state.guards import StateGuard
from graphdispatch.runtime.replay import ReplayPlan
from graphdispatch.runtime.server import Server
from graphdispatch.runtime.signature import Signature

_holds, _match = StateGuard.holds, Signature.match
_lock = threading.RLock()
_lax: list[str] = []
_natives: weakref.WeakKeyDictionary[StateGuard, Any] = weakref.WeakKeyDictionary()
"""The native guards, which ``both_hold`` keeps away from all else, so that every check comes by here."""


def both_hold(self: StateGuard) -> bool:
    """``StateGuard.holds`` by Python alone, which must be true wherever the native guard says so."""
    with _lock:
        native, due = _natives.get(self), self._due
        said = native is not None and native.holds()
        self._due = 0
        try:
            holds = _holds(self)
        finally:
            self._due = due
        if said and not holds and native.holds():  # else another thread changed the state meanwhile
            _lax.append(f"the native guard of {self!r} holds, and Python's does not")
        way = "no native guard" if native is None else f"native {said}"
        TALLY.counter[f"guards: Python {holds}, {way}"] += 1
        if holds and not said and due:
            self._compile(native)
            _natives[self], self.native = self.native, None
        return holds


def both_match(signature: Signature, values: Sequence[Any]) -> int:
    """Python's answer, after the core's was compared with it."""
    rows = _match(signature, values)
    if signature.native is not None:
        found = signature.native.match(values)
        way = "equal" if found == rows else f"stricter in {os.environ['PYTEST_CURRENT_TEST']}"
        TALLY.counter[f"matches: {way}"] += 1
        assert found in (rows, -1), f"the core finds {found} rows, and Python {rows}"
    return rows


def serve(server: Server, *call: Any) -> Any:
    """Serve a call in Python, as where there is no native core."""
    return (server.serve_in_range if is_profiled() else server.serve_in_python)(*call)


class Tally:
    """Adds up what was counted over the processes of ``pytest -n``, and prints it at the end."""

    def __init__(self) -> None:
        self.counter: Counter[str] = Counter()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the count of a worker to the process that started it."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["twins"] = dict(self.counter)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a worker counted."""
        self.counter.update(getattr(node, "workeroutput", {}).get("twins", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the cases by name."""
        terminalreporter.section("the core beside Python")
        for case, times in sorted(self.counter.items()):
            terminalreporter.line(f"{times:10d}  {case}")


TALLY = Tally()


def pytest_configure(config: pytest.Config) -> None:
    """Put both in the place of one, as code of the package: no capture is to look into it."""
    for own, theirs in ((both_hold, _holds), (both_match, _match), (serve, Server.serve_in_python)):
        own.__code__ = own.__code__.replace(co_filename=theirs.__code__.co_filename)
    StateGuard.holds, Signature.match = both_hold, both_match  # type: ignore[method-assign]
    Server.serve, ReplayPlan.run = serve, ReplayPlan.run_in_python  # type: ignore[method-assign]
    config.pluginmanager.register(TALLY)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the tests of the core alone, and of how many calls a hit makes: here it serves no hit and no guard."""
    alone = ("test_guard.py", "test_hit.py", "test_output_copies.py", "test_hot_path.py")
    return True if collection_path.name in alone else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test in which a native guard was laxer."""
    yield
    laxer, _lax[:] = list(_lax), []
    assert not laxer, "\n".join(laxer)
