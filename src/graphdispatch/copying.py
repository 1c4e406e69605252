"""How objects of this library are copied and pickled.

Graphs never are. A copy of what serves by graphs is made anew around the copied callable, by the same options, and so
is what a pickle gives back: it has no graphs and has counted nothing. What counts or decides keeps what it knows. A
graph, or memory of a device, says that it cannot be copied.
"""

from copy import copy, deepcopy
from typing import Any, ClassVar, NoReturn, Self

from .errors import CopyError
from .forking import make_lock

__all__ = ["MadeAnew", "NotCopied", "Shared", "Unlocked"]


class MadeAnew:
    """A copy is made anew, by the constructor's arguments; ``deepcopy`` and ``pickle`` copy these."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Note the arguments."""
        self = super().__new__(cls)
        self._note_arguments(args, kwargs)
        return self

    def _note_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.__dict__["_made_with"] = (args, kwargs)

    def _recipe(self) -> tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """What makes an object like this one: a class or function, its arguments, and attributes to set then."""
        return type(self), *self.__dict__["_made_with"], {}

    def __copy__(self) -> Any:
        return _make(*self._recipe())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        recipe = deepcopy(self._recipe(), memo)
        if id(self) not in memo:  # else the callable itself holds this object, which has just been copied with it
            memo[id(self)] = _make(*recipe)
        return memo[id(self)]

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, self._recipe()


def _make(make: Any, args: tuple[Any, ...], kwargs: dict[str, Any], attributes: dict[str, Any]) -> Any:
    made = make(*args, **kwargs)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


class Unlocked:
    """A copy has all that this object has, in containers of its own, and its own ``_lock``."""

    _lock: Any
    _left_out: ClassVar[frozenset[str]] = frozenset(("_lock",))
    """The attributes that a copy makes for itself."""

    def _attributes(self) -> dict[str, Any]:
        """All attributes by name, those that lie in slots first."""
        slots = [name for kind in type(self).__mro__ for name in getattr(kind, "__slots__", ()) if name != "__dict__"]
        return {name: getattr(self, name) for name in slots} | vars(self)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {name: copy(value) for name, value in self._attributes().items() if name not in self._left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._lock = make_lock()


def _refuse(self: object, *_: object) -> NoReturn:
    raise CopyError(
        f"a {type(self).__name__} cannot be copied or pickled, since its memory is the device's; copy what serves by "
        "it (Graphed, CUDAGraphWrapper, CUDAGraphManager, a dispatcher), which captures anew, or pickle its config"
    )


class Shared:
    """There is one of it, which copies of its users share. It cannot be pickled."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> Any:
        _refuse(self)


class NotCopied:
    """It can be neither copied nor pickled, since it holds a graph or work under way."""

    __slots__ = ()

    __copy__ = __deepcopy__ = __reduce__ = _refuse
