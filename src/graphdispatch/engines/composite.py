"""``CompositeDispatcher``: one front for several dispatchers, such as an encoder's, a draft model's and a decoder's.

A call goes to the first member, by priority, whose graph can serve it; without one, the runner of the first member
runs. The composite tries the graphs of all members first and enters a runner once, after that: an error that it raises
passes through, and nothing of it runs twice.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

from ..backends.tracing import untraced
from ..copying import MadeAnew
from ..descriptors import DispatchKey
from ..errors import ConfigError, ReplayError, check_callable, check_type, shown
from ..forking import make_lock
from ..memory.admission import Backoff, Failure, Quarantine
from ..memory.entry import CUDAGraphEntry
from ..reasons import Reason
from .dispatcher import CudagraphDispatcher
from .stats import DispatchStats

__all__ = ["CompositeDispatcher"]


@dataclass(frozen=True, eq=False)
class _Member:
    name: str
    priority: int
    dispatcher: "CudagraphDispatcher | CompositeDispatcher"
    accepts: Callable[[DispatchKey], bool]
    skips: Counter[Reason] = field(default_factory=Counter)


class CompositeDispatcher(MadeAnew):
    """Dispatches over members by priority: the first graph that can serve a call does, else the first member's runner.

    A member whose graph cannot be replayed is skipped, with the reason counted in ``skips``, and quarantined: its
    graphs are not tried for ``backoff_s``, twice as long after each further failure, at most ``max_backoff_s``. Only a
    ``ReplayError`` that says that nothing has happened moves a call on to the next member. Any other error ends the
    call and passes through unchanged, that of a runner too: what it wrote until then is not undone, so that another
    runner would do a part of the step twice. A graph that its owner released is no failure.

    ``stats`` sums up all members. Thread-safe.

    Args:
        backoff_s: Seconds of the first quarantine.
        max_backoff_s: Seconds of the longest quarantine.
        clock: Gives seconds that never decrease.

    Raises:
        ConfigError: An argument is wrong.
    """

    def __init__(
        self,
        *,
        backoff_s: float = 1.0,
        max_backoff_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for what, value in (("backoff_s", backoff_s), ("max_backoff_s", max_backoff_s)):
            check_type(what, value, (int, float), "a number of seconds")
        check_callable("clock", clock, "a function that gives seconds")
        if not 0 < backoff_s <= max_backoff_s:
            raise ConfigError(f"backoff_s must be positive and at most max_backoff_s={max_backoff_s}, got {backoff_s}")
        self._failures: Quarantine[_Member] = Quarantine(Backoff(backoff_s, 2.0, max_backoff_s))
        self._clock = clock
        self._members: tuple[_Member, ...] = ()
        self._lock = make_lock()

    def _recipe(self) -> Any:
        make, args, kwargs, _ = super()._recipe()
        return make, args, kwargs, {"_members": self._members}

    def add_dispatcher(
        self,
        name: str,
        dispatcher: "CudagraphDispatcher | CompositeDispatcher",
        priority: int = 0,
        *,
        accepts: Callable[[DispatchKey], bool] | None = None,
    ) -> None:
        """Add a member.

        Args:
            name: Its name, which no other member has.
            dispatcher: The dispatcher; another composite will do.
            priority: Higher priorities come first, and among equal ones those added first.
            accepts: Whether a key is the member's at all, for members that do different work. None: every key is.

        Raises:
            ConfigError: The name is taken, or an argument is wrong.
        """
        for what, value, kind in (("name", name, str), ("priority", priority, int)):
            check_type(what, value, kind, f"of type {kind.__name__}")
        if accepts is not None:
            check_callable("accepts", accepts, "a function of a key, or None")
        if not isinstance(dispatcher, (CudagraphDispatcher, CompositeDispatcher)) or dispatcher is self:
            raise ConfigError(f"dispatcher must be another dispatcher, got {shown(dispatcher)}")
        with self._lock:
            if any(other.name == name for other in self._members):
                raise ConfigError(f"name {name!r} is taken; names are {list(self.members)}")
            members = [*self._members, _Member(name, priority, dispatcher, accepts or _accept_all)]
            self._members = tuple(sorted(members, key=lambda m: -m.priority))

    def remove_dispatcher(self, name: str) -> None:
        """Remove a member; its graphs stay its own.

        Args:
            name: Its name.

        Raises:
            ConfigError: No member has this name.
        """
        gone = self._member(name)
        with self._lock:
            self._members = tuple(member for member in self._members if member is not gone)
            self._failures.forgive(gone)

    @untraced
    def dispatch(self, key: DispatchKey, *args: Any, **kwargs: Any) -> Any:
        """Run one call. What the graph or the runner raises passes through.

        Args:
            key: What the batch is.
            *args: The positional arguments.
            **kwargs: The keyword arguments.

        Returns:
            The outputs.

        Raises:
            ConfigError: No member accepts the key.
        """
        start = perf_counter_ns()
        served, result, reason, comparing = self._try_graphs(key, args, kwargs)
        if served:
            return result
        if comparing is not None:
            return comparing.dispatch(key, *args, **kwargs)
        return self.run_eagerly(key, reason, args, kwargs, perf_counter_ns() - start)

    @untraced
    def run_eagerly(
        self, key: DispatchKey, reason: Reason, args: tuple[Any, ...], kwargs: dict[str, Any], spent: int = 0
    ) -> Any:
        """Run a call eagerly by the first member that accepts its key, and count it.

        Args:
            key: What the batch is.
            reason: Why it runs eagerly.
            args: The positional arguments.
            kwargs: The keyword arguments.
            spent: The time that this decision took, in nanoseconds.

        Returns:
            The runner's outputs.

        Raises:
            ConfigError: No member accepts the key.
        """
        for member in self._members:
            if member.accepts(key):
                return member.dispatcher.run_eagerly(key, reason, args, kwargs, spent)
        raise ConfigError(f"no member accepts {key}; members are {list(self.members)}")

    @untraced
    def attempt(self, key: DispatchKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any, Reason]:
        """Serve a call by a member's graph if one can, so that composites nest. Never runs a runner.

        Args:
            key: What the batch is.
            args: The positional arguments.
            kwargs: The keyword arguments.

        Returns:
            Whether a graph served it, the outputs, and the reason.
        """
        return self._try_graphs(key, args, kwargs)[:3]

    def has_graph(self, key: DispatchKey) -> bool:
        """Whether a member has a graph for a key now, in quarantine or not.

        Args:
            key: The key.
        """
        return any(member.dispatcher.has_graph(key) for member in self._members)

    def rearm(self, name: str) -> None:
        """Try a member's graphs again now, without waiting for its quarantine to end.

        Args:
            name: The name of the member.

        Raises:
            ConfigError: No member has this name.
        """
        self._recover(self._member(name))

    @property
    def stats(self) -> DispatchStats:
        """The counters of all members together, as they are now; calls made to a member directly count too."""
        total = DispatchStats()
        for member in self._members:
            one = member.dispatcher.stats
            for name in ("eager", "graph", "piecewise", "fallbacks", "dispatch_time_ns"):
                setattr(total, name, getattr(total, name) + getattr(one, name))
            total.reasons.update(one.reasons)
        return total

    @property
    def skips(self) -> dict[str, dict[Reason, int]]:
        """By member, how often it was passed over although it accepts the key, and why."""
        with self._lock:
            return {member.name: dict(member.skips) for member in self._members}

    @property
    def members(self) -> tuple[str, ...]:
        """The names of the members, in the order in which they are tried."""
        return tuple(member.name for member in self._members)

    @property
    def failures(self) -> dict[str, Failure]:
        """By member in quarantine, its failures in a row, when its graphs are tried again, and the latest failure."""
        found = {member.name: self._failures.get(member) for member in self._members}
        return {name: failure for name, failure in found.items() if failure is not None}

    @property
    def entries(self) -> list[tuple[DispatchKey, CUDAGraphEntry]]:
        """The graphs of all members with their keys."""
        return [pair for member in self._members for pair in member.dispatcher.entries]

    def __repr__(self) -> str:
        names = [m.name + (" (quarantined)" if self._is_quarantined(m) else "") for m in self._members]
        return f"<CompositeDispatcher {', '.join(names) or 'empty'}: {self.stats!r}>"

    def _try_graphs(
        self, key: DispatchKey, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "tuple[bool, Any, Reason, CudagraphDispatcher | CompositeDispatcher | None]":
        """Ask one member after the other: whether a graph served, its outputs, the first member's reason, and the
        member that wants to compare its graph first."""
        first: Reason | None = None
        for member in self._members:
            if not member.accepts(key):
                continue
            reason = Reason.REPLAY_FAILED
            if not self._is_quarantined(member):
                try:
                    served, result, reason = member.dispatcher.attempt(key, args, kwargs)
                except ReplayError as error:
                    self._quarantine(member, error)
                    if error.had_effects:
                        raise
                else:
                    if served:
                        self._recover(member)
                        return True, result, reason, None
                    if reason is Reason.VERIFIED_NOW:
                        return False, None, reason, member.dispatcher
            with self._lock:
                member.skips[reason] += 1
            first = first or reason
        return False, None, first or Reason.NOT_CAPTURED, None

    def _is_quarantined(self, member: _Member) -> bool:
        return self._failures.blocked(member, self._clock()) is not None

    def _quarantine(self, member: _Member, error: ReplayError) -> None:
        with self._lock:
            if member in self._members:
                self._failures.fail(member, self._clock(), Reason.REPLAY_FAILED, str(error))

    def _recover(self, member: _Member) -> None:
        if self._failures.get(member) is not None:
            with self._lock:
                self._failures.forgive(member)

    def _member(self, name: str) -> _Member:
        for member in self._members:
            if member.name == name:
                return member
        raise ConfigError(f"name must be one of {list(self.members)}, got {shown(name)}")


def _accept_all(key: DispatchKey) -> bool:
    return True
