"""A pytest plugin: asks the native guard and Python's at every check of a run, and fails where the native one is laxer.

Run it as ``PYTHONPATH=tests/native python -m pytest -p guard_twins``.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tallies import Tally

from graphdispatch.state.guards import StateGuard

_holds = StateGuard.holds
_lock = threading.RLock()
_found: Counter[str] = Counter()
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
        _found[f"Python {holds}, {way}"] += 1
        if holds and not said and due:
            self._compile(native)
            _natives[self], self.native = self.native, None
        return holds


def pytest_configure(config: pytest.Config) -> None:
    """Put the comparison in place of ``StateGuard.holds``, as code of the package: no capture is to look into it."""
    both_hold.__code__ = both_hold.__code__.replace(co_filename=_holds.__code__.co_filename)
    StateGuard.holds = both_hold  # type: ignore[method-assign]
    config.pluginmanager.register(Tally("native guards beside Python's", _found))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the tests of the native guard alone, and of how many calls a hit makes: no guard has a native one."""
    return True if collection_path.name in ("test_guard.py", "test_hot_path.py") else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test in which a native guard was laxer."""
    yield
    laxer, _lax[:] = list(_lax), []
    assert not laxer, "\n".join(laxer)
