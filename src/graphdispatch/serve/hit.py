"""The hit path: all that runs when a graph serves a call that needs nothing else.

It matches the call, checks the guards, and executes a plan that was made before. Where there is a native core, its
``serve`` (``native/core/hit.cpp``) takes the place of ``serve_in_python``, which stays the reference. While a profiler
of torch is on in the thread, the core leaves the call to ``serve_in_range``.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ..backends.tracing import dispatch_modes, function_modes, is_profiled, profiler_range, trace
from ..call.rules import callable_name
from ..errors import ReplayError
from ..memory.entry import CUDAGraphEntry
from ..modes import EntryState
from ..native.bound import CORE
from ..state.guards import StateGuard
from ..stats import CUDAGraphStats
from .group import Route

_log = logging.getLogger("graphdispatch")


class HitPath(ABC):
    """Serves calls that are hits, and hands all others to ``step``."""

    __slots__ = ("__dict__", "__weakref__", "graphs", "local", "observes", "stats")

    fn: Callable[..., Any]
    stats: CUDAGraphStats
    local: threading.local
    observes: bool
    """Whether a replay is timed or logged."""
    times_replays = False
    """Whether entries collect the device time of their replays (``avg_replay_time_ms``)."""
    logs_replays = False
    """Whether each replay is logged at DEBUG level."""

    def serve_in_python(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve one call, by a graph where one fits and eagerly elsewhere. Raises what the callable raises."""
        gradients = torch.is_grad_enabled()
        spelling = route.spellings.get((len(args), *kwargs)) if trace() is None else None
        if spelling is not None:
            group, is_flat, order = spelling.latest
            values = [*args, *kwargs.values()]
            if order is not None:
                values = [values[place] for place in order]
            leaves = values if is_flat else group.call.flatten(values)
            hit = group.hits[group.signature.match(leaves)] if leaves is not None else None
            if hit is not None and leaves is not None:
                entry, plan, decision, guard = hit
                backend = entry.backend
                if (
                    entry.replay_count < entry.verify_at
                    and forward_ad._current_level < 0
                    and not (backend.watch.depth or backend.is_capturing())
                    and not ((entry.default_device or function_modes() or dispatch_modes()) and not entry.fits_modes())
                    and (guard is None or guard.holds())
                    and (entry.workspaces is None or entry.workspaces.holds())
                    and (not entry.writes_outside or plan.clash(leaves) is None)
                    and not (entry.bare and entry.carries(leaves))
                    and (entry.metadata is None or entry.metadata.knows(leaves))
                    and not (entry.state is EntryState.CAPTURED and entry.differs(leaves))
                    and not (gradients and self.may_need_gradients(leaves, guard))
                ):
                    torch._C._set_grad_enabled(False)
                    try:
                        result = (
                            self.observed(hit.entry, plan.rows, leaves)
                            if self.observes
                            else plan.run(leaves, self.stats)
                        )
                    except ReplayError as error:
                        group.hits.pop(plan.rows, None)
                        if error.had_effects:
                            raise
                    else:
                        self.local.decision = decision
                        return result
                    finally:
                        torch._C._set_grad_enabled(gradients)
        return self.step(route, args, kwargs)

    def serve_in_range(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same while torch's profiler is on: the call is a range of it, with its parts within."""
        with profiler_range("serve", callable_name(self.fn)):
            return self.serve_in_python(route, args, kwargs)

    def serve(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve one call, where there is no native core."""
        return (self.serve_in_range if is_profiled() else self.serve_in_python)(route, args, kwargs)

    def observed(self, entry: CUDAGraphEntry, rows: int, leaves: Sequence[Any]) -> Any:
        """A replay that is timed or logged."""
        if self.logs_replays:
            _log.debug("replaying %r for %d rows", entry, rows)
        return (entry.serve_timed if self.times_replays else entry.serve)(leaves, rows, self.stats)

    @abstractmethod
    def step(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call that is no hit (yet)."""

    @abstractmethod
    def may_need_gradients(self, leaves: Sequence[Any], guard: StateGuard | None) -> bool:
        """Whether a call with these values may have to be differentiated, by a guard that holds."""


if CORE is not None:
    HitPath.serve = CORE.serve_method(  # type: ignore[method-assign]
        HitPath,
        {"forward_ad": forward_ad, "replay_error": ReplayError},
    )
