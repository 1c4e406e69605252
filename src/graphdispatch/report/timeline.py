"""``timeline``: what served callables did, as a trace for Perfetto or Chrome, and as ranges of torch's profiler.

It stands in front of the server's own methods while it watches, so that calls pay nothing for it at other times.
"""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast  # no operator, so that captures do not see it

from ..errors import ConfigError, shown
from ..extents import Extents
from ..memory.entry import CUDAGraphEntry
from ..memory.replay import ReplayPlan
from ..serve.graphs import Capturer
from ..serve.hits import Hit
from ..serve.server import Server
from .page import save_text

__all__ = ["Timeline", "timeline"]


class Timeline:
    """Events of served callables in the order of their ends; ``save`` writes them for https://ui.perfetto.dev.

    Times are the host's: on CUDA a replay's event ends when it is launched. A call that is no hit is an event with the
    name of its reason, so that each reason has a colour of its own; what it did (capture, comparison, replay) lies
    within. Each replay is an event ``replay`` with its rows, size and mode; an eviction is a mark. Thread-safe.
    """

    def __init__(self, max_events: int) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=max_events)
        self._noted = 0

    @property
    def dropped(self) -> int:
        """How many of the oldest events made room for later ones."""
        return self._noted - len(self._events)

    def to_dict(self) -> dict[str, Any]:
        """The trace as plain data, in the JSON format of Chrome's trace events."""
        return {"displayTimeUnit": "ms", "traceEvents": sorted(self._events.copy(), key=lambda event: event["ts"])}

    def save(self, path: str | Path) -> None:
        """Write the trace to ``path``, and replace an old file in one step. Raises ``ConfigError`` if that fails."""
        save_text(path, json.dumps(self.to_dict()))

    def __repr__(self) -> str:
        return f"<Timeline {len(self._events)} events, {self.dropped} dropped>"

    def note(self, name: str, category: str, start: float, **told: Any) -> None:
        """Add an event that ended now; ``start`` is of ``time.perf_counter()``. One of no length is a mark."""
        end = time.perf_counter()
        thread, length = threading.get_native_id(), {"ph": "X", "dur": (end - start) * 1e6}
        args = {key: str(one) if isinstance(one, Extents) else one for key, one in told.items()}
        kind = length if start < end and category != "eviction" else {"ph": "i", "s": "t"}
        self._events.append(
            {"name": name, "cat": category, "ts": start * 1e6, "pid": os.getpid(), "tid": thread, "args": args} | kind
        )
        self._noted += 1


@contextmanager
def timeline(*served: Any, max_events: int = 100_000) -> Iterator[Timeline]:
    """Note what ``served`` callables do within the block: ``with gd.timeline(serve) as trace: ...; trace.save(path)``.

    ``served`` are what ``graphed`` returns, and ``CUDAGraphWrapper``s. While torch's profiler is on, a call by a graph
    is also a range of it, ``graphdispatch: serve``, with ``copy-in``, ``replay`` and ``copy-out`` within. Another call
    is a range ``graphdispatch: call``. Captures and comparisons are ranges without a timeline, too.
    ``torch.autograd.profiler.emit_nvtx`` makes marks of NVTX of all these.

    At most ``max_events`` are kept, the latest. A call within the block costs some microseconds more, and nothing
    afterwards. One block at a time for a callable: a second one raises ``ConfigError``, as does anything else that is
    given. Calls that other threads began before the block may be missing.
    """
    if not isinstance(max_events, int) or max_events < 1:
        raise ConfigError(f"max_events must be a whole number of at least 1, got {shown(max_events)}")
    servers = [_server(one) for one in served]
    if not servers:
        raise ConfigError("timeline needs something to watch; give it what graphed() returns, or a CUDAGraphWrapper")
    trace, watches = Timeline(max_events), []
    try:
        for server in dict.fromkeys(servers):
            watches.append(_Watch(server, trace))
        yield trace
    finally:
        for watch in watches:
            watch.end()


def _server(served: Any) -> Server:
    from ..api.graphed import Graphed
    from ..api.wrapper import CUDAGraphWrapper

    if not isinstance(served, Graphed | CUDAGraphWrapper):
        raise ConfigError(f"timeline watches what graphed() returns, or a CUDAGraphWrapper, got {shown(served)}")
    return served._server


class _Watch:
    """Stands in front of a server's methods until ``end``."""

    def __init__(self, server: Server, trace: Timeline) -> None:
        if "step" in vars(server):
            raise ConfigError(f"a timeline watches {server.fn!r} already; end that block first")
        self.server, self.trace = server, trace
        self.capturer, self.observes = server.graphs._capturer, server.observes
        methods = {"step": self._call(server.step), "refuse": self._call(server.refuse)}
        vars(server).update(methods, observed=self._observed(server.observed))
        server.observes = True
        vars(server)["core_of"] = lambda _: None  # the core would serve refused calls without asking
        self._forget_hits()
        server.graphs._capturer = Capturer(
            **{name: self._within(name, method) for name, method in self.capturer._asdict().items()}
        )

    def end(self) -> None:
        """Take everything away again."""
        self.server.observes = self.observes
        self.server.graphs._capturer = self.capturer
        for name in ("step", "refuse", "observed", "core_of"):
            del vars(self.server)[name]
        with self.server.lock:
            for group in self.server.graphs.groups.values():
                for entry in group.entries.values():
                    for rows in [rows for rows, plan in entry._plans.copy().items() if type(plan) is _RangedPlan]:
                        entry._plans.pop(rows, None)
        self._forget_hits()

    def _forget_hits(self) -> None:
        """Have refusals and prepared replays found anew; until then, they go where they went when they were found."""
        with self.server.lock:
            for group in self.server.graphs.groups.values():
                for spelling in group.route.spellings.values():
                    if spelling.resting is not None:
                        spelling.resting = spelling.resting._replace(core=self.server.core_of(group.route))
                for rows, hit in group.hits.copy().items():
                    if type(hit) is not Hit or type(hit.plan) is _RangedPlan:
                        group.hits.pop(rows, None)

    def _call(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A call that is no hit: an event with the name of its reason, and a mark for each eviction."""

        def call(*args: Any) -> Any:
            stats, start = self.server.stats, time.perf_counter()
            before = stats.evictions
            try:
                with _range("call"):
                    return method(*args)
            finally:
                evicted = stats.evictions - before
                for one in stats.last_evictions[-evicted:] if evicted else ():
                    told = {"cause": one.reason.value, "freed_bytes": one.freed_bytes, "replays": one.replays}
                    self.trace.note(f"evicted {one.descriptor.num_tokens}", "eviction", time.perf_counter(), **told)
                decision = self.server.decision
                if decision is not None:
                    told = {"rows": decision.rows, "explain": decision.explain()}
                    self.trace.note(decision.reason.value, "call", start, **told)

        return call

    def _observed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A replay."""

        def observed(entry: Any, rows: int, leaves: Any) -> Any:
            start = time.perf_counter()
            if torch._C._autograd._profiler_enabled() and type(entry.plan(rows)) is not _RangedPlan:
                entry._plans[rows] = _RangedPlan(entry, rows)
            with _range("serve"):
                answer = method(entry, rows, leaves)
            batch = Extents.of(entry.size.axes, rows) if isinstance(entry.size, Extents) else rows
            self.trace.note("replay", "replay", start, rows=batch, size=entry.size, mode=entry.mode.name)
            return answer

        return observed

    def _within(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A capture, a comparison or a warm-up."""

        def within(request: Any, *args: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(request, *args)
            finally:
                self.trace.note(name, "capture", start, rows=request.rows, size=request.size)

        return within


class _RangedPlan(ReplayPlan):
    """A prepared replay, run by Python, whose parts are ranges of torch's profiler."""

    __slots__ = ("_steps", "replay")

    def __init__(self, entry: CUDAGraphEntry, rows: int) -> None:
        super().__init__(entry, rows)
        if self._load is not None:
            self._load = _ranged("copy-in", self._load)
        self._take = _ranged("copy-out", self._take)
        self.replay = _ranged("replay", self._graph.replay)
        self._graph = self

    run = ReplayPlan.run_in_python


def _ranged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def within(*args: Any) -> Any:
        with _range(name):
            return function(*args)

    return within


def _range(name: str) -> Any:
    """A range of torch's profiler, and nothing where none is on."""
    return _RecordFunctionFast(f"graphdispatch: {name}")
