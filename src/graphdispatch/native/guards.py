"""The native half of state guards, and the self-test of what it takes from the interpreter."""

import gc
from collections.abc import Callable
from typing import Any

from .bound import CORE

__all__ = ["GUARD", "USES_VERSIONS", "versions_tell"]

_WARM = 32  # an interpreter has found its fastest way for a line that ran so often
_CHANGES = """
    owner.first = value
    object.__setattr__(owner, "first", value)
    owner.__dict__["first"] = value
    setattr(owner, f"new_{value % 4}", value)
    owner.passing = value; del owner.passing; owner.first = value
    table["a"] = value
    table.update(a=value)
    table |= {"d": value}
    table.pop("a", None) if value % 2 else table.setdefault("a", value)
    table.popitem() if value % 2 else table.update(c=value)
    table.clear() if value % 2 else table.update(b=value, first=0)
"""
"""Ways to change an object's attributes, or the dict that holds them."""


class _Plain:
    """An object with attributes as most classes make them."""

    def __init__(self) -> None:
        self.first = self.second = 0


class _Through(_Plain):
    """One whose stores go through a method, as those of modules do."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


class _Crowded(_Plain):
    """One with so many attributes that it shares no table of names."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(40):
            setattr(self, f"attribute_{number}", number)


def versions_tell(version_of: Callable[[dict[str, Any]], int]) -> bool:
    """Whether each way of changing a dict, or attributes of an object or class, gives the dict a new version.

    Each way is taken so often that the interpreter runs it in its fastest form.
    """
    kind = type("Kind", (), {"first": 0})
    (attributes,) = (table for table in gc.get_referents(vars(kind)) if type(table) is dict)
    return _tells(version_of, "type(owner).first = value", kind(), attributes) and all(
        _tells(version_of, line.strip(), owner := made(), vars(owner) if is_known else None)
        for line in _CHANGES.strip().splitlines()
        for made in ((_Plain, _Through, _Crowded) if "owner" in line else (_Plain,))
        for is_known in ((True, False) if "table" not in line else (True,))
    )


def _tells(version_of: Callable[[dict[str, Any]], int], line: str, owner: Any, table: dict[str, Any] | None) -> bool:
    """Whether a way of changing is told. The owner's table, if it is not given, is first asked for when all is warm."""
    names: dict[str, Any] = {}
    exec(f"def change(owner, table, value):\n    {line}", names)
    versions = {0}
    for value in range(1000, 1000 + 2 * _WARM):  # no small numbers, which are the same objects each time
        if table is None and value == 1000 + _WARM:
            table = vars(owner)
        names["change"](owner, table, value)
        if table is not None:
            version = version_of(table)
            if version in versions:
                return False
            versions.add(version)
    return True


GUARD: Any = CORE.Guard if CORE is not None else None
"""The class of native guards, or None."""
USES_VERSIONS: bool = CORE is not None and CORE.use_versions(versions_tell(CORE.dict_version))
"""Whether native guards skip dicts whose version is as it was; else they compare every entry."""
