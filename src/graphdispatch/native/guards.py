"""The native half of state guards, and the self-test of what it takes from the interpreter."""

from collections.abc import Callable
from typing import Any

from .bound import CORE

__all__ = ["GUARD", "USES_VERSIONS", "versions_tell"]

_WARM = 64  # more stores than any interpreter runs before it takes a faster way for them


class _Plain:
    """An object with attributes as most classes make them."""

    def __init__(self) -> None:
        self.first = 0
        self.second = 0


class _Through(_Plain):
    """One whose stores go through a method, as those of modules do."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


class _Crowded:
    """One with so many attributes that its table is its own."""

    def __init__(self) -> None:
        for number in range(200):
            setattr(self, f"attribute_{number}", number)
        self.first = 0


def _store(owner: Any, value: int) -> None:
    owner.first = value


def _store_low(owner: Any, value: int) -> None:
    object.__setattr__(owner, "first", value)


def _store_table(owner: Any, value: int) -> None:
    vars(owner)["first"] = value


def _store_new(owner: Any, value: int) -> None:
    setattr(owner, f"new_{value % 4}", value)


def _delete(owner: Any, value: int) -> None:
    owner.passing = value
    del owner.passing
    owner.first = value


def _change_class(owner: Any, value: int) -> None:
    type(owner).shared = value


_STORES = (_store, _store_low, _store_table, _store_new, _delete)
_DICT_CHANGES: tuple[Callable[[dict[Any, Any], int], object], ...] = (
    lambda table, value: table.__setitem__("a", value),
    lambda table, value: table.update(a=value),
    lambda table, value: table.pop("a", None) if value % 2 else table.setdefault("a", value),
    lambda table, value: table.clear() if value % 2 else table.__setitem__("b", value),
    lambda table, value: table.popitem() if value % 2 else table.__setitem__("c", value),
    lambda table, value: table.__ior__({"d": value}),
    lambda table, value: table.__delitem__("e") if value % 2 else table.__setitem__("e", value),
)


def versions_tell(version_of: Callable[[dict[Any, Any]], int]) -> bool:
    """Whether each way of changing a dict or an object's attributes gives its dict another version.

    Each way is taken often enough that the interpreter runs it in its fastest form.
    """
    for change in _DICT_CHANGES:
        if not _tells(version_of, {"z": 1}, change):
            return False
    for kind in (_Plain, _Through, _Crowded):
        for store in _STORES:
            seen, unseen = kind(), kind()
            vars(seen)  # before the stores are warm, and below after
            if not _tells(version_of, vars(seen), lambda _, value, store=store, owner=seen: store(owner, value)):  # type: ignore[misc]
                return False
            for value in range(_WARM):
                store(unseen, value)
            if not _tells(version_of, vars(unseen), lambda _, value, store=store, owner=unseen: store(owner, value)):  # type: ignore[misc]
                return False
    return _class_versions_tell(version_of)


def _class_versions_tell(version_of: Callable[[dict[Any, Any]], int]) -> bool:
    """The same for the attributes of a class and for global variables."""
    import gc

    kind = type("Kind", (), {"shared": 0})
    (table,) = (held for held in gc.get_referents(vars(kind)) if type(held) is dict)
    variables: dict[str, Any] = {"value": 0}
    exec("def store(new):\n    global value\n    value = new", variables)
    return _tells(version_of, table, lambda _, value: _change_class(kind(), value)) and _tells(
        version_of, variables, lambda _, value: variables["store"](value)
    )


def _tells(
    version_of: Callable[[dict[Any, Any]], int],
    table: dict[Any, Any],
    change: Callable[[dict[Any, Any], int], object],
) -> bool:
    for value in range(1000, 1000 + _WARM):  # no small numbers, which are the same objects each time
        before, version = dict(table), version_of(table)
        if not version:
            return False
        change(table, value)
        is_same = before.keys() == table.keys() and all(before[key] is table[key] for key in before)
        if not is_same and version_of(table) == version:
            return False
    return True


GUARD: Any = CORE.Guard if CORE is not None else None
"""The class of native guards, or None."""
USES_VERSIONS: bool = CORE is not None and CORE.use_versions(versions_tell(CORE.dict_version))
"""Whether native guards skip dicts whose version is as it was; else they compare every entry."""
