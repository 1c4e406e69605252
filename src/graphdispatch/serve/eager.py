"""The eager path: how a call runs that no graph serves."""

import logging
import threading
from collections.abc import Sequence
from typing import Any

from torch.autograd import forward_ad

from ..backends.modes import function_modes, is_transformed, trace, transform
from ..call.rules import callable_name
from ..call.signature import PLAIN_TENSORS
from ..call.spec import VALUES, leaves_of
from ..decide.decision import Decision
from ..errors import FallbackError
from ..memory.windows import WINDOWS, storages_of
from ..reasons import Reason
from ..state.guards import StateGuard, wants_gradient
from .graphs import GraphSet
from .group import Route
from .hit import HitPath

__all__ = ["EagerPath"]

_log = logging.getLogger("graphdispatch")


class EagerPath(HitPath):
    """Runs calls of ``graphs.fn`` eagerly, each with its reason. ``strict`` raises ``FallbackError`` instead."""

    def __init__(self, graphs: GraphSet, *, strict: bool) -> None:
        self.fn = graphs.fn
        self.graphs = graphs
        self.stats = graphs.stats
        self.lock = graphs.lock
        self.local = threading.local()
        self.observes = False
        self.strict = strict

    @property
    def decision(self) -> Decision | None:
        """The decision of the calling thread's latest call, or None before the first."""
        return getattr(self.local, "decision", None)

    def needs_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with gradients on may have to be differentiated. Needs no lock."""
        values = [*args, *kwargs.values()]
        for value in values:
            kind = type(value)
            if kind in PLAIN_TENSORS:
                if value.requires_grad:
                    return True
            elif kind not in VALUES:
                return self.may_need_gradients(leaves_of(values), None)
        return self.graphs.guard.trainable

    def may_need_gradients(self, leaves: Sequence[Any], guard: StateGuard | None) -> bool:
        """Whether a call with these values may have to be differentiated, by a guard that holds (None: a new one)."""
        return any(map(wants_gradient, leaves)) or (guard or self.graphs.guard).trainable

    def closed(self, route: Route) -> Reason | None:
        """Why no graph may replay on the calling thread now, whatever the call; or None.

        The thread is in a capture, in a break of a replay in this pool, in somebody's mode, or in forward-mode
        differentiation, or the graphs are asleep. Needs no lock, and must be asked before one is taken: a break runs
        with its pool's lock held.
        """
        graphs, entry = self.graphs, route.entry
        backend, pool = (graphs.backend, graphs.pool) if entry is None else (entry.backend, entry.pool)
        if backend is not None and (backend.watch.depth or backend.is_capturing()):
            return Reason.INSIDE_CAPTURE
        if pool is not None and pool.replaying_on is not None and pool.is_inside_replay():
            return Reason.INSIDE_REPLAY
        if (function_modes() or trace() is not None or transform() is not None) and is_transformed():
            return Reason.MODE_ACTIVE
        if forward_ad._current_level >= 0:  # tangents come with plain tensors, whatever the grad mode
            return Reason.NEEDS_GRADIENTS
        return Reason.ASLEEP if graphs.is_asleep else None

    def run_eagerly(self, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the callable, and count why. Raises ``FallbackError`` with ``strict``. Needs no lock."""
        self.count_eager(decision)
        if self.strict and not decision.reason.leads_to_graph:
            raise FallbackError(decision.explain(), decision.reason)
        run = WINDOWS.begin(self._reach)
        try:
            return self.graphs.give(self.fn(*args, **kwargs))
        finally:
            WINDOWS.end(run)
            self.local.decision = decision  # the callable may have called this object, too

    def count_eager(self, decision: Decision) -> None:
        """Count a call whose answer is eager's. The first one for each reason is a line of the log."""
        self.local.decision, reason = decision, decision.reason
        if self.stats.record_eager(reason, decision.rows) and not reason.leads_to_graph:
            told = decision.detail or reason.text
            _log.info("eager callable=%s reason=%s rows=%s: %s", callable_name(self.fn), reason, decision.rows, told)

    def _reach(self) -> set[int]:
        return storages_of(self.graphs.guard._tensors)
