"""What becomes of an object of this library in a copy, a pickle, and a forked child.

Graphs are never copied. A copy of what serves by graphs is made anew around the copied callable, by the same options,
and so is what a pickle gives back: it has no graphs and has counted nothing. What counts or decides keeps what it
knows. A graph, or memory of a device, says that it cannot be copied.

Note [after a fork]
    A child has one thread, the one that forked. A lock that another thread held is held for ever there. So every lock
    of the library is made here, and becomes free in the child unless the forking thread itself holds it. Objects that
    hold more of threads than a lock learn of it by ``after_fork``. What another thread was about to write to tensors
    stays as it was at that moment, as with any fork. A pipe or file that it was just opening stays open in the child
    for ever, and whoever waits for its end waits for the child: hence ``NO_FORK``.
"""

import os
import threading
from copy import copy, deepcopy
from typing import Any, NoReturn, Self
from weakref import WeakSet

from .errors import CopyError


class MadeAnew:
    """A copy is made anew, by the constructor's arguments; ``deepcopy`` and ``pickle`` copy these."""

    __slots__ = ()
    _made_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Note the arguments."""
        self = super().__new__(cls)
        object.__setattr__(self, "_made_with", (args, kwargs))  # in a slot, where there is one
        return self

    def _recipe(self) -> tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """What makes an object like this one: a class or function, its arguments, and attributes to set then."""
        return type(self), *self._made_with, {}

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

    def __getstate__(self) -> dict[str, Any]:
        """All attributes by name, those that lie in slots first."""
        slots = [name for cls in type(self).__mro__ for name in vars(cls).get("__slots__", ())]
        with self._lock:
            held = {name: getattr(self, name) for name in slots} | vars(self)
            return {name: copy(value) for name, value in held.items() if name != "_lock"}

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


NO_FORK = threading.RLock()
"""While a thread holds it, ``os.fork`` in another one waits. Hold it for moments, and wait for nothing meanwhile."""
_LOCKS: WeakSet[Any] = WeakSet()
_OBJECTS: WeakSet[Any] = WeakSet()


def make_lock() -> "threading.RLock":
    """A new lock that a forked child finds free, unless the thread that forked holds it.

    It is reentrant: wherever a thread holds it the collector may run a finalizer, which may call what is served.
    """
    lock = threading.RLock()
    _LOCKS.add(lock)
    return lock


def renew_in_child(thing: Any) -> None:
    """Call ``thing.after_fork()`` in every forked child, as long as it lives, before anything else runs there; all
    locks are free then."""
    _OBJECTS.add(thing)


def _after_fork() -> None:
    NO_FORK.release()
    for lock in list(_LOCKS):
        renew = getattr(lock, "_at_fork_reinit", None)  # what Python's own modules do with their locks
        if renew is not None and not (hasattr(lock, "_is_owned") and lock._is_owned()):
            renew()
    for thing in list(_OBJECTS):
        thing.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=NO_FORK.acquire, after_in_parent=NO_FORK.release, after_in_child=_after_fork)
