"""A pytest plugin: wherever Python matches a call, the core matches it too, and may never be laxer.

``PYTHONPATH=tests/native pytest -p match_twins`` serves all hits in Python, and fails the test in which the core
says of a call that it fits, or of how many rows it is, what Python does not. ``LOG`` counts where the core is stricter.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from graphdispatch.call.dims import GridSignature
from graphdispatch.call.signature import Signature
from graphdispatch.memory.replay import ReplayPlan
from graphdispatch.serve.hit import HitPath

LOG: Counter[str] = Counter()
_MATCH = {kind: kind.match for kind in (Signature, GridSignature)}


def both(signature: Signature, values: Sequence[Any]) -> int:
    """Python's answer, after the core's was compared with it."""
    rows = _MATCH[type(signature)](signature, values)
    if signature.native is not None:
        found = signature.native.match(values)
        LOG["equal" if found == rows else "stricter"] += 1
        assert found in (rows, -1), f"the core finds {found} rows, and Python {rows}"
    return rows


def pytest_configure() -> None:
    """Put both in the place of one."""
    HitPath.serve, ReplayPlan.run = HitPath.serve_in_python, ReplayPlan.run_in_python
    Signature.match = GridSignature.match = both


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how often they were compared."""
    terminalreporter.write_line(f"matches: {dict(LOG)}")
