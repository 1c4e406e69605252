"""Drives the dispatcher, policies, cache and entries of production by recorded traffic, on a simulated device.

Only the device and its clock are simulated: a replay, an eager step or a capture takes as long as a cost model says,
and graphs hold as many bytes. Everything that decides is the very object that would decide in production.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any
from weakref import WeakSet

from ..backends import get_backend
from ..backends.base import Graph, Pool
from ..decide.keys import CudagraphKeyDispatcher
from ..decide.policies import DispatchPolicy
from ..descriptors import BatchDescriptor, DispatchKey
from ..errors import ConfigError
from ..memory.admission import Admission
from ..memory.budget import Victim
from ..memory.cache import GraphCache
from ..memory.entry import CUDAGraphEntry
from ..memory.inputs import StaticInputs
from ..memory.outputs import OutputRule, Outputs
from ..modes import CUDAGraphMode, DispatchMode, EntryState
from ..plan.cost import CostModel
from ..plan.workload import Workload
from ..reasons import Reason
from ..stats import CUDAGraphStats

__all__ = ["SimulationResult", "simulate"]

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
_WITHOUT_FULL = frozenset((NONE, PIECEWISE))
_DISPATCH_MODES = {FULL: DispatchMode.CUDAGRAPH, PIECEWISE: DispatchMode.PIECEWISE}


@dataclass
class SimulationResult:
    """What the traffic met with."""

    stats: CUDAGraphStats
    """Hits, misses with their reasons, rows, captures and evictions, as production counts them."""
    steps: Counter[CUDAGraphMode] = field(default_factory=Counter)
    """Steps by the mode in which they ran; those that captured or checked a graph ran eagerly."""
    step_ms: float = 0.0
    """The time in steps, eager, replayed and compared; not in captures."""
    peak_bytes: int = 0
    """The most bytes that graphs held at once, for themselves and in their pool."""

    @property
    def capture_ms(self) -> float:
        """The time in captures."""
        return self.stats.capture_time_ms

    def eager_shares(self) -> dict[Reason, float]:
        """The steps that no graph served, by reason, as shares of all steps; the largest first."""
        return {reason: count / self.stats.calls for reason, count in self.stats.reasons.most_common()}

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, for JSON."""
        return {
            "steps": {mode.name: count for mode, count in self.steps.items()},
            "step_ms": self.step_ms,
            "capture_ms": self.capture_ms,
            "peak_bytes": self.peak_bytes,
            "eager_shares": {reason.value: share for reason, share in self.eager_shares().items()},
            "stats": self.stats.to_dict(),
        }

    def __str__(self) -> str:
        stats = self.stats
        lines = [
            f"{stats.calls} steps in {self.step_ms / 1e3:.2f} s: {100 * stats.hit_rate:.2f} % by graphs, "
            f"{100 * stats.padding_ratio:.2f} % padding",
            f"{stats.captures} captures in {self.capture_ms / 1e3:.2f} s, {stats.evictions} evictions, "
            f"at most {self.peak_bytes / 2**20:.1f} MiB",
        ]
        lines += [f"eager, {100 * share:.2f} %: {reason.text}" for reason, share in self.eager_shares().items()]
        return "\n".join(lines)


def simulate(
    workload: Workload,
    cost: CostModel,
    dispatcher: CudagraphKeyDispatcher,
    *,
    policy: DispatchPolicy | None = None,
    cache: GraphCache | None = None,
    admission: Admission | None = None,
) -> SimulationResult:
    """Serve the ordered steps of ``workload`` on a simulated device: hit rate, padding, times and bytes.

    ``dispatcher`` names the graphs that there may be, by a plan or capture sizes. Without ``admission`` as many of
    them as ``cache`` has room for are captured before the first step, the largest first, as engines do; with it, each
    when it is admitted, and it is compared with eager at its next batch. ``cache`` (default: room for all) evicts by
    its own rules; it must be new, and its statistics are those of the result. ``policy`` (default: a graph wherever
    there is one) chooses among the graphs there are and eager, and learns the simulated times, if it learns.

    A uniform decode step whose requests are not known has one token for each. Deterministic, if the policy is. Raises
    ``ConfigError`` for a workload without ordered steps, or a cost model that does not know a mode.
    """
    if workload.steps is None:
        raise ConfigError("workload must have ordered steps; make it with Workload.from_steps or from a trace")
    descriptors = dispatcher.get_capture_descs()
    if cache is None:
        cache = GraphCache(max(1, sum(len(of_mode) for _, of_mode in descriptors)))
    if len(cache) or cache.stats.calls:
        raise ConfigError(f"cache must be new, got {cache!r}")
    run = _Run(workload, cost, dispatcher, policy, cache, admission)
    if admission is None:
        for mode, of_mode in descriptors:
            for descriptor in of_mode:
                if not cache.is_full:
                    run.capture(mode, descriptor)
        for entry in cache:
            entry.state = EntryState.VERIFIED
    tokens, kinds, reqs = workload.steps
    modes = map(run.step, tokens.tolist(), kinds.tolist(), repeat(None) if reqs is None else reqs.tolist())
    run.result.steps.update(modes)
    run.result.step_ms = run.clock.now
    return run.result


class _Clock:
    """Device time in milliseconds."""

    def __init__(self) -> None:
        self.now = 0.0


class _SimulatedGraph(Graph):
    """A graph whose replay only takes time."""

    def __init__(self, clock: _Clock, replay_ms: float, nbytes: int, pool_bytes: int) -> None:
        self._clock = clock
        self._replay_ms = replay_ms
        self._nbytes = nbytes
        self.pool_bytes = pool_bytes

    def replay(self) -> None:
        self._clock.now += self._replay_ms

    def reset(self) -> None:
        self._nbytes = self.pool_bytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes


class _SimulatedPool(Pool):
    """Memory as large as the largest of its graphs needs."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: WeakSet[Graph] = WeakSet()

    @property
    def nbytes(self) -> int:
        return self.nbytes_of(list(self.graphs))

    def nbytes_of(self, graphs: Sequence[Graph]) -> int:
        return max((graph.pool_bytes for graph in graphs if isinstance(graph, _SimulatedGraph)), default=0)

    def order_after_last_use(self) -> None:
        """The simulated device does one thing at a time."""

    def is_idle(self) -> bool:
        return True

    def close(self) -> None:
        """There is nothing to release."""


class _Run:
    """One simulation: the device, the entries, and what has happened."""

    def __init__(
        self,
        workload: Workload,
        cost: CostModel,
        dispatcher: CudagraphKeyDispatcher,
        policy: DispatchPolicy | None,
        cache: GraphCache,
        admission: Admission | None,
    ) -> None:
        self.cost = cost
        self.decide = dispatcher.decide
        self.policy = policy
        self.cache = cache
        self.admission = admission
        if admission is not None:
            cache.admission = admission
        self.too_large: set[tuple[CUDAGraphMode, BatchDescriptor]] = set()
        self.result = SimulationResult(cache.stats)
        self.clock = _Clock()
        self.pool = _SimulatedPool()
        self.backend = get_backend("cpu")
        self.inputs = StaticInputs((), 0)
        self.outputs = Outputs(None, OutputRule(()), [], "static", self.pool)
        self.eager_ms = dict(zip(workload.sizes.tolist(), cost.eager_ms.at(workload.sizes).tolist(), strict=True))

    def step(self, tokens: int, is_decode: bool, reqs: int | None) -> CUDAGraphMode:
        """Serve one step as production would; the mode in which it ran."""
        query_len = (tokens // reqs if reqs else 1) if is_decode else None
        decision = self.decide(tokens, reqs, query_len=query_len)
        mode, descriptor = decision.mode, decision.descriptor
        if descriptor is None:
            return self.run_eagerly(tokens, decision.reason)
        entry = self.cache.get((mode, descriptor))
        if entry is None or entry.state is not EntryState.VERIFIED:
            return self.run_eagerly(tokens, self.advance(mode, descriptor, entry))
        if self.policy is None:
            entry.serve((), tokens, self.result.stats)
            return mode
        entries = {_DISPATCH_MODES[mode]: entry}
        if mode is FULL:
            second = self.decide(tokens, reqs, query_len=query_len, allowed_modes=_WITHOUT_FULL)
            other = self.cache.get((second.mode, second.descriptor))
            if other is not None and other.state is EntryState.VERIFIED:
                entries[DispatchMode.PIECEWISE] = other
        key = DispatchKey(tokens, reqs or (tokens if is_decode else 1), 0, not is_decode)
        return self.choose(self.policy, key, entries)

    def choose(
        self, policy: DispatchPolicy, key: DispatchKey, entries: dict[DispatchMode, CUDAGraphEntry]
    ) -> CUDAGraphMode:
        """Have the policy choose among the graphs there are and eager, and tell it what the step took."""
        before = self.clock.now
        chosen = policy.select_mode(key, (*entries, DispatchMode.EAGER))
        entry = entries.get(chosen)
        if entry is None:
            mode = self.run_eagerly(key.num_tokens, Reason.POLICY)
        else:
            entry.serve((), key.num_tokens, self.result.stats)
            mode = entry.mode
        if policy.learns:
            policy.record(key, chosen, self.clock.now - before)
        return mode

    def run_eagerly(self, tokens: int, reason: Reason) -> CUDAGraphMode:
        """One eager step."""
        self.clock.now += self.eager_ms[tokens]
        self.result.stats.record_miss(reason, tokens)
        return NONE

    def advance(self, mode: CUDAGraphMode, descriptor: BatchDescriptor, entry: CUDAGraphEntry | None) -> Reason:
        """Bring a graph nearer to serving: compare it with eager, capture it, or count a miss."""
        if entry is not None:
            entry.serve((), entry.size)
            entry.state = EntryState.VERIFIED
            return Reason.VERIFIED_NOW
        if self.admission is None:
            return Reason.CACHE_FULL
        key = (mode, descriptor)
        if key in self.too_large:
            return Reason.CACHE_FULL
        verdict = self.cache.admit(key)
        if verdict is Reason.CAPTURED_NOW:
            self.capture(mode, descriptor, self.admission.since(key))
            self.admission.forget(key)
        else:
            self.admission.count_miss(key)
        return verdict

    def capture(self, mode: CUDAGraphMode, descriptor: BatchDescriptor, since: int | None = None) -> CUDAGraphEntry:
        """Make one entry, with room made before."""
        size = descriptor.num_tokens
        costs = self.cost.graphs(mode)
        curves = (costs.step_ms, costs.capture_ms, costs.graph_bytes, costs.pool_bytes)
        step_ms, capture_ms, graph_bytes, pool_bytes = (float(curve.at(size)) for curve in curves)
        self.release(self.cache.make_room(since))
        entry = CUDAGraphEntry(
            descriptor=descriptor,
            mode=mode,
            key=(mode, descriptor),
            size=size,
            graph=_SimulatedGraph(self.clock, step_ms, round(graph_bytes), round(pool_bytes)),
            pool=self.pool,
            backend=self.backend,
            inputs=self.inputs,
            outputs=self.outputs,
            capture_time_ms=capture_ms,
        )
        self.pool.graphs.add(entry.graph)
        self.result.stats.record_capture(capture_ms)
        self.release(self.cache.add(entry.key, entry))
        if entry.state is EntryState.EVICTED:
            self.too_large.add((mode, descriptor))
        self.result.peak_bytes = max(self.result.peak_bytes, self.cache.nbytes)
        return entry

    def release(self, victims: Sequence[Victim]) -> None:
        for victim in victims:
            victim.release()
