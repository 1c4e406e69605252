"""Which attributes the code of a function reads, and of what."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphdispatch.state.bytecode import attribute_reads

SETTINGS = torch


def _chain(self: Any, x: Any) -> Any:
    return x * self.config.inner.scale


def _alias(self: Any, x: Any) -> Any:
    config = self.config
    return x * config.scale


def _nested(self: Any, x: Any) -> Any:
    config = self.config
    return [(lambda y: y * self.gain + config.shift)(x) for _ in range(2)]


def _of_global(x: Any) -> Any:
    return x * SETTINGS.scale


def _of_argument(self: Any, config: Any) -> Any:
    return config.scale


def _of_tensor(self: Any, x: Any) -> Any:
    return x.mean() + x.relu().sum()


def _written(self: Any, x: Any) -> None:
    self.last = x
    self.stats.latest = x


def _counted(self: Any) -> None:
    self.calls += 1


def _text(self: Any) -> Any:
    return getattr(self, "scale") + self.table["not a name"]  # noqa: B009


@pytest.mark.parametrize(
    ("fn", "of_self", "of_named", "of_other"),
    [
        (_chain, {"config"}, {("config", "inner"), ("inner", "scale")}, set()),
        (_alias, {"config"}, {("config", "scale")}, set()),
        (_nested, {"config", "gain"}, {("config", "shift")}, set()),
        (_of_global, set(), {("SETTINGS", "scale")}, set()),
        (_of_argument, set(), set(), {"scale"}),
        (_of_tensor, set(), set(), set()),
        (_written, {"stats"}, set(), set()),
        (_counted, {"calls"}, set(), set()),
        (_text, {"table"}, set(), {"scale"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_code_reads(
    fn: Callable[..., Any], of_self: set[str], of_named: set[tuple[str, str]], of_other: set[str]
) -> None:
    """Attributes of the first parameter, of what has a name, and of the rest; one that is only written is not read."""
    found = attribute_reads(fn.__code__)
    assert found.of_self == of_self
    assert found.of_named == of_named
    assert found.of_other == of_other
    assert found.names == of_self | of_other | {name for _, name in of_named}
