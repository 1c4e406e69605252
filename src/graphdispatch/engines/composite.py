"""``CompositeDispatcher``: one front for several dispatchers, such as an encoder's, a draft model's and a decoder's."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..backends.tracing import untraced
from ..copying import NotCopied
from ..descriptors import DispatchKey
from ..errors import ConfigError, check_callable, check_type, shown
from ..forking import make_lock
from .dispatcher import Chosen, CudagraphDispatcher
from .stats import DispatchStats

__all__ = ["CompositeDispatcher"]


class _Member(NamedTuple):
    name: str
    priority: int
    dispatcher: "CudagraphDispatcher | CompositeDispatcher"
    accepts: Callable[[DispatchKey], bool]


class CompositeDispatcher(NotCopied):
    """Dispatches over members by priority: the first graph for a key serves, else the first member's runner.

    The member that was chosen runs the call: if the arguments do not fit its graph, or that fails before it has changed
    anything, its own runner does. An error that the runner raises passes through, and nothing runs twice. ``stats``
    sums up all members. Thread-safe.
    """

    def __init__(self) -> None:
        self._members: tuple[_Member, ...] = ()
        self._lock = make_lock()

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
        chosen = self.choose(key)
        if chosen is None:
            raise ConfigError(f"no member accepts {key}; members are {list(self.members)}")
        return chosen.dispatcher.serve(key, chosen, args, kwargs)

    def choose(self, key: DispatchKey) -> Chosen | None:
        """What shall serve a call: the first member's graph for its key, or the runner of the first. Runs nothing.

        Args:
            key: What the batch is.

        Returns:
            The choice of one of the members; None if none accepts the key.
        """
        first: Chosen | None = None
        for _, _, dispatcher, accepts in self._members:
            chosen = dispatcher.choose(key) if accepts(key) else None
            if chosen is not None and chosen.found is not None:
                return chosen
            first = first or chosen
        return first

    def has_graph(self, key: DispatchKey) -> bool:
        """Whether a member has a graph for a key now.

        Args:
            key: The key.
        """
        return any(member.dispatcher.has_graph(key) for member in self._members)

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
    def members(self) -> tuple[str, ...]:
        """The names of the members, in the order in which they are tried."""
        return tuple(member.name for member in self._members)

    def __repr__(self) -> str:
        return f"<CompositeDispatcher {', '.join(self.members) or 'empty'}: {self.stats!r}>"


def _accept_all(key: DispatchKey) -> bool:
    return True
