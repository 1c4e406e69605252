"""Calls for which the reason to run eagerly is known: by their rows, or by argument types that no graph can take."""

from collections import Counter, UserDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ..axes import cells_of
from ..call.caches import is_cache
from ..call.signature import PLAIN_TENSORS
from ..call.spec import VALUES
from ..decide.decision import Decision
from ..native.bound import CORE
from ..reasons import Reason
from .hits import Standing

if TYPE_CHECKING:
    from .eager import EagerPath
    from .group import Route
    from .server import Choice

__all__ = ["RefusedCalls", "remember"]

_MOST = 1024
_MOST_ROWS = 4096
_MOST_AT_ONCE = 256  # refused calls without one on the slow path
_NESTS = (dict, list, tuple)
_SEEN_INTO = (*_NESTS, UserDict, slice, frozenset)
"""Some of these may be flattened, or compared part by part."""
# These follow from the arguments alone. All others also depend on what the server holds.
_LASTING = frozenset(
    (
        Reason.TENSOR_SUBCLASS,
        Reason.DEVICES_DISAGREE,
        Reason.DEVICE_UNSUPPORTED,
        Reason.ROWS_DISAGREE,
        Reason.STATE_REBOUND,
        Reason.UNGUARDED_ARGUMENT,
        Reason.NO_TENSORS,
    )
)


class RefusedCalls:
    """Refusals by the look of the call: classes, nesting, and of tensors all that ``refusal`` asks of them.

    So a call with the same look would be refused for the same reason, and making that out again is saved. At most 1,024
    looks are kept, the latest. A call that holds something whose look says too little is not remembered: a class that
    torch flattens, a mapping of its own class, a cache. Used with one backend and one set of rules. Changed only with
    the server's lock held; ``get`` needs none.
    """

    __slots__ = ("_known", "_opaque", "at_once")

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Decision] = {}
        self._opaque: set[type] = set()
        self.at_once: dict[tuple[Any, ...], Standing] = {}
        """Refusals by the looks of the core (``native/core/look.h``), which tell more apart; it takes no lock."""

    def get(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Decision | None:
        """The decision for an earlier call that looked like this one."""
        look: list[Any] = [len(args), *kwargs]
        known = self._add_look(look, (*args, *kwargs.values()))
        return self._known.get(tuple(look)) if known else None

    def add(self, decision: Decision, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Remember a refusal, if the look of the call shows that it stays."""
        if decision.reason not in _LASTING:
            return
        self._note_kinds([*args, *kwargs.values()])
        look: list[Any] = [len(args), *kwargs]
        if self._add_look(look, [*args, *kwargs.values()]):
            self._known[tuple(look)] = decision
            if len(self._known) > _MOST:
                del self._known[next(iter(self._known))]

    def let_stand(
        self, server: "EagerPath", route: "Route", decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Have the core run calls like this one, which was just refused, at once: 256 times, then it is looked at."""
        look = CORE.look_of(args, kwargs) if CORE is not None and decision.reason in _LASTING else None
        if look is None:
            return
        known = self.at_once.get(look)
        if known is not None and known.misses[0] < known.until:
            known.misses[0] += 1
            return
        if len(self.at_once) >= _MOST:
            self.at_once.clear()
        self.at_once[look] = Standing(route, Counter(), 0, decision, 0, _MOST_AT_ONCE, server.core_of(route))

    def __len__(self) -> int:
        return len(self._known)

    def _add_look(self, look: list[Any], values: Iterable[Any]) -> bool:
        """Add the look of some values; False if the look of one of them does not identify it."""
        for value in values:
            kind = type(value)
            look.append(kind)
            if kind in PLAIN_TENSORS:
                if value.is_nested:
                    look.append(value.layout)
                    continue
                look += (value.shape, value.device, value.layout, value.is_conj(), value.is_neg())
            elif kind in _NESTS:
                look.append(len(value))
                if kind is dict:
                    look += value
                if not self._add_look(look, value.values() if kind is dict else value):
                    return False
            elif kind not in VALUES and (kind not in self._opaque or kind in pytree.SUPPORTED_NODES):
                return False
        return True

    def _note_kinds(self, values: Iterable[Any]) -> None:
        """Note the classes among some values that nobody looks into: they alone say what becomes of a call."""
        for value in values:
            kind = type(value)
            if kind in _NESTS:
                self._note_kinds(value.values() if kind is dict else value)
            elif issubclass(kind, torch.Tensor) or not (issubclass(kind, _SEEN_INTO) or is_cache(value)):
                self._opaque.add(kind)


def remember(server: "EagerPath", choice: "Choice", calls: int) -> None:
    """Let calls like this one, which no graph serves, run eagerly at once until one may be captured for them.

    The last misses before a size may be tried again take the slow path, where admission counts them; so does one call
    in 256, which finds graphs that can never serve again. A size with graphs of another state is not remembered, since
    that state may come back. A refusal that is no failure stands for so many ``calls``. Called with the lock held.
    """
    group, size, decision = choice.group, choice.size, choice.decision
    assert group is not None
    until: float = group.misses[size] + (calls or _MOST_AT_ONCE)
    if size and not calls:
        failure = group.failures.get(size)
        if failure is None or failure.reason is not decision.reason or group.of_size(size) or group.wants_example:
            return
        until = min(until, failure.retry_at - server.graphs.cache.admission.capture_after)
    if group.misses[size] < until and len(group.hits) < _MOST_ROWS:
        why = decision, cells_of(decision.rows)
        core = server.core_of(group.route)
        group.hits[group.signature.match(choice.leaves)] = Standing(group.route, group.misses, size, *why, until, core)
