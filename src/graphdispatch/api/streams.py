"""``StreamDispatcher``: a dispatcher over several lanes, whose graphs run at the same time."""

import threading
from collections.abc import Callable, Sequence
from itertools import count
from time import perf_counter_ns
from typing import Any, Literal

from ..backends import Backend, get_backend
from ..config import CUDAGraphOptions
from ..decide.decision import Decision
from ..decide.policies import DispatchPolicy
from ..descriptors import DispatchKey
from ..errors import BackendError, ConfigError, ReplayError
from ..memory.entry import CUDAGraphEntry
from ..memory.foreign import Replayable
from ..modes import DispatchMode
from ..reasons import Reason
from .dispatcher import CudagraphDispatcher
from .lanes import Lane, LaneResult, LaneStep

__all__ = ["StreamDispatcher"]


class StreamDispatcher(CudagraphDispatcher):
    """A ``CudagraphDispatcher`` over ``num_streams`` lanes whose graphs run at the same time.

    ``submit`` starts a call and returns at once; ``dispatch`` waits (on CUDA: lets the caller's stream wait) for its
    outputs. Calls overlap if they come from several streams or threads, or were all submitted before the first
    ``result``. Each call goes to the lane with the least unfinished steps among those that have a graph for its key;
    with ``selection="sticky"``, to the lane that the calling thread got first, where that one has a graph.
    Without a graph the call runs eagerly on the caller's own stream.

    Graphs of two lanes must not share memory that one of them writes: what can be seen of that (entries of this
    library) is refused with ``ConfigError``, and ``shared_writes="allow"`` declares that steps under way at once write
    to different rows of it. ``max_cached_graphs`` holds for each lane. Thread-safe.
    """

    def __init__(
        self,
        eager_runner: Callable[..., Any],
        num_streams: int = 2,
        *,
        policy: DispatchPolicy | None = None,
        max_cached_graphs: int = 64,
        selection: Literal["least_busy", "sticky"] = "least_busy",
        shared_writes: Literal["refuse", "allow"] = "refuse",
        backend: Backend | None = None,
        options: CUDAGraphOptions | None = None,
    ) -> None:
        super().__init__(eager_runner, policy, max_cached_graphs)
        if isinstance(num_streams, bool) or not isinstance(num_streams, int) or num_streams < 1:
            raise ConfigError(f"num_streams must be an integer >= 1, got {num_streams!r}")
        if selection not in ("least_busy", "sticky"):
            raise ConfigError(f"selection must be 'least_busy' or 'sticky', got {selection!r}")
        if shared_writes not in ("refuse", "allow"):
            raise ConfigError(f"shared_writes must be 'refuse' or 'allow', got {shared_writes!r}")
        self.backend = backend or get_backend("auto")
        self.options = CUDAGraphOptions.or_default(options, "options")
        self._selection = selection
        self._allows_shared_writes = shared_writes == "allow"
        self._own = threading.local()
        self._turns = count(1)
        self._last_turns = [0] * num_streams
        self.lanes = tuple(
            Lane(index, self.backend, CudagraphDispatcher(eager_runner, self.policy, max_cached_graphs), self.options)
            for index in range(num_streams)
        )

    def register_graph(
        self,
        key: DispatchKey,
        graph: Replayable | CUDAGraphEntry,
        input_ptrs: Sequence[int] | None = None,
        *,
        outputs: Any = None,
        mode: DispatchMode = DispatchMode.CUDAGRAPH,
        idempotent: bool = False,
        lane: int | None = None,
    ) -> None:
        """Serve ``key`` on ``lane`` by ``graph``; see ``CudagraphDispatcher.register_graph``.

        Without ``lane`` it goes to one that has no graph for the key, with the fewest graphs. Raises ``ConfigError``
        for an entry that shares a pool, or memory that is written, with a graph of another lane.
        """
        with self._lock:
            chosen = self._lane(lane) if lane is not None else self._emptiest(key)
            if isinstance(graph, CUDAGraphEntry):
                self._check_apart(graph, chosen)
            chosen.table.register_graph(key, graph, input_ptrs, outputs=outputs, mode=mode, idempotent=idempotent)
            chosen.tidy()

    def capture(
        self,
        key: DispatchKey,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        lanes: Sequence[int] | None = None,
    ) -> None:
        """Capture ``eager_runner(*args, **kwargs)`` once on each lane (or on ``lanes``), and serve ``key`` by it.

        The runs leave no effects. A call is served if it is spelt like the example and its arguments have the same
        shapes, dtypes and constants, while the runner's weights are as they are now. Raises ``CaptureError``,
        or ``ConfigError`` for lanes that would write the same memory; then no lane has the graph.
        """
        chosen = [self._lane(index) for index in lanes] if lanes is not None else list(self.lanes)
        made: list[tuple[Lane, CUDAGraphEntry]] = []
        try:
            for lane in chosen:
                made.append((lane, lane.capture(key, tuple(args), kwargs or {})))
            with self._lock:
                for lane, entry in made:
                    self._check_apart(entry, lane, made)
                for lane, entry in made:
                    lane.keep(key, entry)
        except BaseException:
            for lane, entry in made:
                lane.drop(entry)
            raise

    def has_graph(self, key: DispatchKey, lane: int | None = None) -> bool:
        """Whether a graph of any mode is registered for ``key`` on ``lane`` (default: on any)."""
        return self.get_graph(key, lane) is not None

    def get_graph(self, key: DispatchKey, lane: int | None = None) -> Replayable | CUDAGraphEntry | None:
        """The graph of ``key`` on ``lane`` (default: on the first lane that has one), as it was given, or None."""
        graphs = (one.table.get_graph(key) for one in self._among(lane))
        return next((graph for graph in graphs if graph is not None), None)

    def get_entry(
        self, key: DispatchKey, mode: DispatchMode = DispatchMode.CUDAGRAPH, lane: int | None = None
    ) -> CUDAGraphEntry | None:
        """The entry of ``key`` on ``lane`` (default: on the first lane that has one), or None."""
        entries = (one.table.get_entry(key, mode) for one in self._among(lane))
        return next((entry for entry in entries if entry is not None), None)

    def dispatch(self, key: DispatchKey, *args: Any, **kwargs: Any) -> Any:
        """Run one call and give its outputs to the caller's stream. Raises what the runner raises."""
        return self.submit(key, *args, **kwargs).result()

    def submit(self, key: DispatchKey, *args: Any, **kwargs: Any) -> LaneResult:
        """Start one call on a lane; a call without a graph runs here and now. Never raises what the call raises."""
        start = perf_counter_ns()
        lane, step = self._choose(key, args, kwargs)
        spent = perf_counter_ns() - start
        if lane is None or isinstance(step, Reason):
            assert isinstance(step, Reason)
            self.stats.record(DispatchMode.EAGER, step, spent)
            done = LaneResult(self.backend)
            done.fill(lambda: self.eager_runner(*args, **kwargs))
            return done

        def run() -> Any:
            try:
                result = step.run()
            except ReplayError as error:  # evicted while it was queued, or broken off
                lane.tidy()
                if error.had_effects:
                    raise
                self.stats.record(DispatchMode.EAGER, Reason.REPLAY_FAILED, spent)
                return self.eager_runner(*args, **kwargs)
            self.stats.record(step.mode, step.reason, spent)
            return result

        return self._launch(lane, run, (args, kwargs))

    def explain(self, key: DispatchKey, *args: Any, **kwargs: Any) -> str:
        """How ``dispatch`` would run this call, on which lane, and why, as one line. Nothing is run or counted."""
        lane, step = self._choose(key, args, kwargs)
        if lane is None or isinstance(step, Reason):
            assert isinstance(step, Reason)
            return Decision.eager(step, key.num_tokens).explain()
        return f"{lane.table.explain(key, *args, **kwargs)}, on lane {lane.index}"

    def attempt(self, key: DispatchKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any, Reason]:
        """Serve a call by a graph: whether one did, the outputs, and the reason. Never runs the runner.

        ``VERIFIED_NOW`` asks for ``dispatch``, which compares a new graph with eager. Raises ``ReplayError`` if the
        graph cannot be replayed.
        """
        start = perf_counter_ns()
        lane, step = self._choose(key, args, kwargs)
        spent = perf_counter_ns() - start
        if lane is None or isinstance(step, Reason):
            assert isinstance(step, Reason)
            return False, None, step
        if step.reason is Reason.VERIFIED_NOW:
            return False, None, step.reason
        try:
            under_way = self._launch(lane, step.run, (args, kwargs))
        except BackendError as error:
            raise ReplayError(f"lane {lane.index} takes no work: {error}") from error
        try:
            result = under_way.result()
        except ReplayError:
            lane.tidy()
            raise
        self.stats.record(step.mode, step.reason, spent)
        return True, result, step.reason

    def enable_mode(self, mode: DispatchMode) -> None:
        """Allow a mode again on all lanes."""
        super().enable_mode(mode)
        for lane in self.lanes:
            lane.table.enable_mode(mode)

    def disable_mode(self, mode: DispatchMode) -> None:
        """Forbid a mode on all lanes; graphs stay registered. Raises ``ConfigError`` for ``EAGER``."""
        super().disable_mode(mode)
        for lane in self.lanes:
            lane.table.disable_mode(mode)

    @property
    def num_graphs(self) -> int:
        """How many graphs are registered, on all lanes together."""
        return sum(lane.table.num_graphs for lane in self.lanes)

    @property
    def entries(self) -> list[tuple[DispatchKey, CUDAGraphEntry]]:
        """All registered graphs with their keys, lane by lane."""
        return [pair for lane in self.lanes for pair in lane.entries]

    def discard(self, entry: CUDAGraphEntry) -> None:
        """Forget one graph, whatever its key; one that was captured here is released."""
        for lane in self.lanes:
            lane.drop(entry)

    def clear_cache(self) -> None:
        """Forget all graphs, and release those that were captured here. The statistics stay."""
        with self._lock:
            for lane in self.lanes:
                lane.table.clear_cache()
                lane.tidy()

    def synchronize(self) -> None:
        """Block until all lanes have finished what they were given."""
        for lane in self.lanes:
            lane.stream.synchronize()

    def close(self) -> None:
        """Finish all steps, release the lanes' graphs and streams; later calls run eagerly. Idempotent."""
        with self._lock:
            for lane in self.lanes:
                lane.close()

    def __repr__(self) -> str:
        return f"<StreamDispatcher {len(self.lanes)} lanes, {self.num_graphs} graphs, {self.stats!r}>"

    def _lane(self, index: int) -> Lane:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self.lanes):
            raise ConfigError(f"lane must be an integer from 0 to {len(self.lanes) - 1}, got {index!r}")
        return self.lanes[index]

    def _among(self, lane: int | None) -> Sequence[Lane]:
        return self.lanes if lane is None else (self._lane(lane),)

    def _emptiest(self, key: DispatchKey) -> Lane:
        return min(self.lanes, key=lambda lane: (lane.table.has_graph(key), lane.table.num_graphs, lane.index))

    def _check_apart(self, entry: CUDAGraphEntry, lane: Lane, more: Sequence[tuple[Lane, CUDAGraphEntry]] = ()) -> None:
        """Raise ``ConfigError`` if ``entry`` must not run at the same time as a graph of another lane, registered or
        among ``more``."""
        registered = [(other, theirs) for other in self.lanes for _, theirs in other.entries]
        others = [(other, theirs) for other, theirs in (*registered, *more) if other is not lane]
        for other, theirs in others:
            if entry.pool is theirs.pool or entry.pool is other.pool:
                raise ConfigError(
                    f"graph for lane {lane.index} is in the same pool as one of lane {other.index}, so that they "
                    f"could never overlap; capture it with pool=dispatcher.lanes[{lane.index}].pool"
                )
            if not self._allows_shared_writes and (_writes_to(entry, theirs) or _writes_to(theirs, entry)):
                raise ConfigError(
                    f"graphs for lanes {lane.index} and {other.index} share memory that one of them writes, and would "
                    "run at the same time; give each lane its own state, or shared_writes='allow' if steps under way "
                    "at once write to different rows"
                )

    def _choose(
        self, key: DispatchKey, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Lane | None, LaneStep | Reason]:
        """The best lane that can take the call, and its step there; or why none can."""
        answer = Reason.NOT_CAPTURED
        for lane in self._in_order():
            step = lane.step(key, args, kwargs)
            if isinstance(step, LaneStep):
                return lane, step
            if step is Reason.POLICY:
                return None, step
            answer = step if step is not Reason.NOT_CAPTURED else answer
        return None, answer

    def _launch(self, lane: Lane, run: Callable[[], Any], arguments: Any) -> LaneResult:
        self._last_turns[lane.index] = next(self._turns)
        if getattr(self._own, "lane", None) is None:
            self._own.lane = lane.index
        return lane.launch(run, arguments)

    def _in_order(self) -> list[Lane]:
        """The lanes, the one to be preferred first; of equally busy ones, that which waits longest for a step."""
        own = getattr(self._own, "lane", None) if self._selection == "sticky" else None
        turns = self._last_turns
        return sorted(self.lanes, key=lambda lane: (lane.index != own, lane.busy, turns[lane.index]))


def _writes_to(one: CUDAGraphEntry, other: CUDAGraphEntry) -> bool:
    return one.written is not None and any(one.written.overlaps(tensor) for tensor in other.held)
