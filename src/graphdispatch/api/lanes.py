"""Lanes: a stream, a pool and the graphs that run there; and the results of the steps that were given to them.

Note [a step on a lane]
    Everything that touches a lane's pool runs on the lane's queue: loading, replay, handing out, and captures and
    comparisons too. A thread that held the pool's lock while it waited for the queue would wait for work that needs
    that lock. The lane first waits for what the caller's stream was given before the call, and the caller's stream
    waits for the lane before it sees the outputs. Failures stay in the step's ``LaneResult``: a lane never fails.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ..backends import Backend
from ..backends.base import Event, Stream
from ..call.rules import ArgumentRules
from ..call.signature import Refusal
from ..call.spec import CallSpec
from ..config import CUDAGraphOptions
from ..descriptors import BatchDescriptor, DispatchKey
from ..errors import CaptureError, GuardError
from ..memory.cache import GraphCache
from ..memory.entry import CUDAGraphEntry
from ..modes import DispatchMode, EntryState
from ..reasons import Reason
from ..serve.graphset import GraphSet
from ..serve.group import GraphGroup
from ..stats import EvictionReason
from .dispatcher import CudagraphDispatcher
from .registered import Registered

__all__ = ["Lane", "LaneResult", "LaneStep"]


class LaneResult:
    """What a submitted call gives back; ``lane`` is the index of the lane that runs it, None for an eager call."""

    def __init__(self, backend: Backend, lane: int | None = None) -> None:
        self.lane = lane
        self._backend = backend
        self._done: Event | None = None
        self._is_filled = False
        self._value: Any = None
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether the device has finished the step. Never blocks."""
        return self._is_filled and (self._done is None or self._done.query())

    def result(self) -> Any:
        """The outputs, which are the caller's; raises what the step raised.

        Orders the calling thread's current stream after the lane. Blocks only where the stream has no queue.
        """
        if self._done is not None:
            self._done.wait()
            if not self._is_filled:
                self._done.synchronize()
            _hold(self._value, self._backend.current_stream())
        if self._error is not None:
            raise self._error
        return self._value

    def mark(self, done: Event) -> None:
        """``done`` stands behind the step in the lane's order."""
        self._done = done

    def fill(self, step: Callable[[], Any]) -> None:
        """Run ``step`` and keep what it returns or raises. Called once, by whoever runs the step."""
        try:
            self._value = step()
        except BaseException as error:  # whatever it is, it belongs to whoever asks for the result
            self._error = error
        self._is_filled = True

    def __repr__(self) -> str:
        where = "eager" if self.lane is None else f"lane {self.lane}"
        return f"<LaneResult {where}, {'done' if self.is_done else 'under way'}>"


@dataclass(frozen=True)
class _Captured:
    """How calls are compared with the example that a graph was captured from."""

    group: GraphGroup
    form: CallSpec


class LaneStep(NamedTuple):
    """A decided call: what runs on the lane, and how it counts."""

    run: Callable[[], Any]
    mode: DispatchMode
    reason: Reason


class Lane:
    """One stream with a pool, and the graphs that run there; made by ``StreamDispatcher``. Thread-safe.

    ``pool`` is for captures that are registered on this lane alone, for example
    ``CUDAGraphWrapper(fn, backend=dispatcher.backend, pool=lane.pool)``. ``table`` holds the lane's graphs by key.
    """

    def __init__(self, index: int, backend: Backend, table: CudagraphDispatcher, options: CUDAGraphOptions) -> None:
        self.index = index
        self.backend = backend
        self.stream = backend.make_stream()
        self.pool = backend.make_pool()
        self.table = table
        self.steps = 0
        """Steps that were given to this lane."""
        runner, limit = table.eager_runner, table.max_cached_graphs
        self._graphs = GraphSet(runner, options, GraphCache(limit), backend=backend, pool=self.pool)
        self._captured: dict[CUDAGraphEntry, _Captured] = {}
        self._changes = threading.RLock()
        self._counts = threading.Lock()
        self._marks: deque[Event] = deque()
        self._claims = 0

    @property
    def busy(self) -> int:
        """Steps that are not finished."""
        with self._counts:
            while self._marks and self._marks[0].query():
                self._marks.popleft()
            return len(self._marks) + self._claims

    @property
    def entries(self) -> list[tuple[DispatchKey, CUDAGraphEntry]]:
        """The graphs of the lane, with their keys."""
        return [(found.key, found.entry) for found in self.table.registered()]

    def launch(self, step: Callable[[], Any], arguments: Any) -> LaneResult:
        """Put a step on the lane's queue: see Note [a step on a lane]. Raises ``BackendError`` after ``close``."""
        outcome = LaneResult(self.backend, self.index)
        arrived = self.backend.make_event()
        arrived.record()
        _hold(arguments, self.stream)

        def after_caller() -> Any:
            # Inside the step, so that a failure of the caller's stream is this step's and not the lane's.
            arrived.wait()
            return step()

        with self._counts:
            self._claims += 1
        done = self.backend.make_event()
        try:
            self.stream.submit(lambda: outcome.fill(after_caller))
            done.record(self.stream)
            outcome.mark(done)
        finally:
            with self._counts:
                self._claims -= 1
                self._marks.append(done)
                self.steps += 1
        return outcome

    def step(self, key: DispatchKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LaneStep | Reason:
        """The step that serves a call by a graph of this lane, or why there is none."""
        found, decision = self.table.choose(key, args, kwargs)
        if found is None:
            return decision.reason
        captured = self._captured.get(found.entry)
        if captured is None:
            return _registered_step(found, decision.reason, args, kwargs)
        return self._captured_step(found.entry, captured, args, kwargs)

    def capture(self, key: DispatchKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CUDAGraphEntry:
        """Capture the runner on these example arguments; ``keep`` publishes the entry, ``drop`` releases it."""
        entry: CUDAGraphEntry = self.launch(lambda: self._capture(key, args, kwargs), (args, kwargs)).result()
        return entry

    def keep(self, key: DispatchKey, entry: CUDAGraphEntry) -> None:
        """Serve ``key`` by an entry that ``capture`` made."""
        with self._changes:
            self.table.register_graph(key, entry)
            self.tidy()

    def drop(self, entry: CUDAGraphEntry) -> None:
        """Forget an entry, whatever its key; one that was captured here is released."""
        with self._changes:
            for found in self.table.registered():
                if found.entry is entry:
                    self.table.drop(found)
            self._release(entry)

    def tidy(self) -> None:
        """Make the table of graphs and the graphs captured here agree, after either lost one."""
        with self._changes:
            for found in self.table.registered():
                if found.entry.state in (EntryState.EVICTED, EntryState.FAILED):
                    self.table.drop(found)
            kept = {entry for _, entry in self.entries}
            for entry in [entry for entry in self._captured if entry not in kept]:
                self._release(entry)

    def close(self) -> None:
        """Finish all steps, and release the graphs captured here, the pool and the stream."""
        self.stream.synchronize()
        self.table.clear_cache()
        self.tidy()
        self.stream.close()
        self.pool.close()

    def _release(self, entry: CUDAGraphEntry) -> None:
        if self._captured.pop(entry, None) is not None:
            self._graphs.release(self._graphs.cache.retire(entry, EvictionReason.DROPPED))

    def _capture(self, key: DispatchKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CUDAGraphEntry:
        graphs = self._graphs
        with torch.no_grad(), graphs.lock:
            graphs.refresh()
            form = CallSpec(graphs.fn, len(args), tuple(kwargs))
            made = graphs.make_group(key, form, form.values(args, kwargs), ArgumentRules({}, {}, frozenset()), 1)
            if isinstance(made, Refusal):
                raise CaptureError(f"no graph for {key}: {made.detail}", made.reason)
            group, leaves = made
            descriptor = BatchDescriptor(key.num_tokens, key.num_reqs)
            outcome = graphs.capture(group, leaves, 1, 1, descriptor=descriptor, keep_effects=False)
            if outcome.entry is None:
                raise CaptureError(
                    f"no graph for {key} on lane {self.index}: {outcome.detail}", outcome.reason
                ) from outcome.error
            outcome.entry.guard = None  # the lane compares weights itself, and releases what is stale
            self._captured[outcome.entry] = _Captured(group, form)
            return outcome.entry

    def _captured_step(
        self, entry: CUDAGraphEntry, captured: _Captured, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LaneStep | Reason:
        graphs, group, form = self._graphs, captured.group, captured.form
        if torch.is_grad_enabled() and graphs.needs_gradients(args, kwargs):
            return Reason.NEEDS_GRADIENTS
        with torch.no_grad():
            leaves = group.caller.flatten(form.values(args, kwargs)) if form.fits(args, kwargs) else None
            if leaves is None or group.signature.match(leaves) < 0:
                return Reason.ARGUMENTS_CHANGED
        if not graphs.guard_holds():
            with self._changes, graphs.lock:
                graphs.rearm()
                self.tidy()
            return Reason.NOT_CAPTURED
        if entry.clash(leaves) is not None:
            return Reason.ALIASED_ARGUMENTS
        if entry.state is not EntryState.VERIFIED and group.needs_check(entry, leaves, 1):
            return LaneStep(lambda: self._verify(entry, group, leaves), DispatchMode.EAGER, Reason.VERIFIED_NOW)
        return LaneStep(lambda: _serve(entry, leaves, 1), DispatchMode.CUDAGRAPH, Reason.EXACT)

    def _verify(self, entry: CUDAGraphEntry, group: GraphGroup, leaves: list[Any]) -> Any:
        graphs = self._graphs
        with torch.no_grad(), graphs.lock:
            if entry.state is EntryState.EVICTED:
                return _serve(entry, leaves, 1)  # raises as for any evicted entry
            outcome = graphs.verify(group, leaves, 1, entry)
        if outcome.entry is None:
            self.tidy()
        return outcome.answer

    def __repr__(self) -> str:
        return f"<Lane {self.index}: {self.table.num_graphs} graphs, {self.busy} steps under way, {self.steps} in all>"


def _registered_step(
    found: Registered, reason: Reason, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LaneStep | Reason:
    try:
        values, rows = found.arguments(args, kwargs)
    except GuardError:
        return Reason.ARGUMENTS_CHANGED
    return LaneStep(lambda: _serve(found.entry, values, rows), found.mode, reason)


def _serve(entry: CUDAGraphEntry, values: Any, rows: int) -> Any:
    with torch.no_grad():
        return entry.serve(values, rows)


def _hold(tree: Any, stream: Stream) -> None:
    """Keep the memory of the tensors in ``tree`` from being used again before ``stream`` is done with it.

    A caching allocator knows only the stream that a tensor was made on.
    """
    native = getattr(stream, "native", None)
    if native is not None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                leaf.record_stream(native)
