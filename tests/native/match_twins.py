"""A pytest plugin: wherever Python matches a call, the core matches it too, and may never be laxer.

``PYTHONPATH=tests/native pytest -p match_twins`` serves all hits in Python, and fails the test in which the core
says of a call that it fits, or of how many rows it is, what Python does not. ``LOG`` says where the core is stricter.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tallies import Tally

from graphdispatch.backends.modes import is_profiled
from graphdispatch.call.signature import Signature
from graphdispatch.memory.replay import ReplayPlan
from graphdispatch.serve.hit import HitPath

LOG: Counter[str] = Counter()
_MATCH = Signature.match


def both(signature: Signature, values: Sequence[Any]) -> int:
    """Python's answer, after the core's was compared with it."""
    rows = _MATCH(signature, values)
    if signature.native is not None:
        found = signature.native.match(values)
        LOG["equal" if found == rows else f"stricter in {os.environ['PYTEST_CURRENT_TEST']}"] += 1
        assert found in (rows, -1), f"the core finds {found} rows, and Python {rows}"
    return rows


def serve(server: HitPath, *call: Any) -> Any:
    """Serve a call in Python, as where there is no native core."""
    return (server.serve_in_range if is_profiled() else server.serve_in_python)(*call)


def pytest_configure(config: pytest.Config) -> None:
    """Put both in the place of one, as code of the package: no capture is to look into it."""
    both.__code__ = both.__code__.replace(co_filename=Signature.match.__code__.co_filename)
    serve.__code__ = serve.__code__.replace(co_filename=HitPath.serve_in_python.__code__.co_filename)
    HitPath.serve, ReplayPlan.run = serve, ReplayPlan.run_in_python  # type: ignore[method-assign]
    Signature.match = both
    config.pluginmanager.register(Tally("matches of the core beside Python's", LOG))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the tests of the core alone, and of how many calls a hit makes: the core serves no hit here."""
    return True if collection_path.name in ("test_hit.py", "test_handed.py", "test_hot_path.py") else None
