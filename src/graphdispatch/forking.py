"""What a forked child makes anew: locks, and what belonged to threads that it does not have.

Note [after a fork]
    A child has one thread, the one that forked. A lock that another thread held is held for ever there. So every lock
    of the library is made here, and becomes free in the child unless the forking thread itself holds it. Objects that
    know more of threads than a lock are told by ``after_fork``. What another thread was about to write to tensors stays
    as it was at that moment, as with any fork. A pipe or file that it was just opening stays open in the child for
    ever, and whoever waits for its end waits for the child: hence ``NO_FORK``.
"""

import os
import threading
from typing import Any, Protocol
from weakref import WeakSet

__all__ = ["NO_FORK", "Forkable", "make_lock", "make_rlock", "renew_in_child"]


class Forkable(Protocol):
    """What must be put right in a forked child."""

    def after_fork(self) -> None:
        """Called once in the child, before anything else runs there; all locks are free."""


NO_FORK = threading.RLock()
"""While a thread holds it, ``os.fork`` in another one waits. Hold it for moments, and wait for nothing meanwhile."""
_LOCKS: WeakSet[Any] = WeakSet()
_OBJECTS: WeakSet[Forkable] = WeakSet()


def make_lock() -> threading.Lock:
    """A new lock that a forked child finds free."""
    lock = threading.Lock()
    _LOCKS.add(lock)
    return lock


def make_rlock() -> "threading.RLock":
    """A new reentrant lock that a forked child finds free, unless the thread that forked holds it."""
    lock = threading.RLock()
    _LOCKS.add(lock)
    return lock


def renew_in_child(thing: Forkable) -> None:
    """Call ``thing.after_fork()`` in every forked child, as long as it lives."""
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
