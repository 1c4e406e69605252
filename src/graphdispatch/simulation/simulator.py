"""Drives production's server by recorded traffic, on a simulated device.

Only the device is simulated. The server admits, captures, compares, evicts and counts steps as it does real calls.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from sys import maxsize
from typing import Any, NamedTuple

import torch

from ..backends import get_backend
from ..call.signature import Refusal
from ..config import CUDAGraphOptions
from ..decide.decision import Decision, SizeTable
from ..decide.keys import CudagraphKeyDispatcher
from ..decide.memo import Memo
from ..decide.policies import DispatchPolicy
from ..descriptors import BatchDescriptor, DispatchKey
from ..errors import ConfigError
from ..memory.admission import Admission
from ..memory.cache import GraphCache
from ..modes import CUDAGraphMode, DispatchMode
from ..plan.cost import CostModel
from ..plan.workload import Workload
from ..reasons import Reason
from ..serve.graphs import Capturer
from ..serve.group import GraphGroup, Route
from ..serve.hits import Hit
from ..serve.prewarm import capture_checked
from ..serve.server import Server
from ..stats import CUDAGraphStats
from .device import SimulatedDevice, TokenCount

__all__ = ["SimulationResult", "simulate"]

_Key = tuple[CUDAGraphMode, BatchDescriptor]
_GRAPH_MODES = {CUDAGraphMode.FULL: DispatchMode.CUDAGRAPH, CUDAGraphMode.PIECEWISE: DispatchMode.PIECEWISE}
_MOST_KINDS = 65536  # of steps, whose decisions are kept


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
            f"{stats.calls} steps in {self.step_ms / 1e3:.2f} s: {100 * stats.graph_ratio:.2f} % by graphs, "
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
    when it is admitted, and compared with eager at its next batch and at each that is smaller than all before.
    ``cache`` (default: room for all) evicts by its own rules; it must be new, and the result has its statistics.
    ``policy`` (default: a graph wherever there is one) chooses among the graphs there are and eager, and may learn.

    A uniform decode step whose requests are not known has one token for each. Deterministic, if the policy is. Raises
    ``ConfigError`` for a workload without ordered steps, or a cost model that does not know a mode.
    """
    if workload.steps is None:
        raise ConfigError("workload must have ordered steps; make it with Workload.from_steps or from a trace")
    keys = [(mode, descriptor) for mode, of_mode in dispatcher.get_capture_descs() for descriptor in of_mode]
    cache = GraphCache(max(1, len(keys))) if cache is None else cache
    if len(cache) or cache.stats.calls:
        raise ConfigError(f"cache must be new, got {cache!r}")
    if admission is not None:
        cache.admission = admission
    run = _Simulation(SimulatedDevice(workload, cost), dispatcher, policy, cache)
    tokens, kinds, reqs = workload.steps
    with torch.no_grad(), run.server.lock:
        if admission is None:
            run.prewarm(keys)
        steps = Counter(map(run.step, tokens.tolist(), kinds.tolist(), repeat(None) if reqs is None else reqs.tolist()))
    return SimulationResult(cache.stats, steps, run.device.now, run.peak_bytes)


class _Kind(NamedTuple):
    """What may serve steps of one kind: the dispatcher's choice and all that a policy may choose; or why eager does."""

    key: DispatchKey
    first: GraphGroup | None
    groups: Mapping[DispatchMode, GraphGroup]
    eager: Decision


class _Simulation:
    """A door before production's server: it chooses the graph group of each step. Used with the server's lock held."""

    def __init__(
        self,
        device: SimulatedDevice,
        dispatcher: CudagraphKeyDispatcher,
        policy: DispatchPolicy | None,
        cache: GraphCache,
    ) -> None:
        self.device = device
        self.peak_bytes = 0
        self._decide = dispatcher.decide
        self._policy = policy
        self._allowed = (None,) if policy is None else (None, (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE))
        self._cache = cache
        self._captures = True
        self.server = Server(
            device.run,
            CUDAGraphOptions(guard_weights=False),  # there are no weights
            cache,
            backend=get_backend("cpu"),
            pool=device.pool,
            max_groups=maxsize,
            capturer=Capturer(device.capture, device.verify),
        )
        self._groups = Memo[_Key, GraphGroup](self._make_group, maxsize)
        self._kinds = Memo[tuple[int, int, int | None], _Kind](self._find_kind, _MOST_KINDS)

    def prewarm(self, keys: Iterable[_Key]) -> None:
        """Capture and verify graphs before the first step, as long as there is room; later steps capture none."""
        self._captures = False
        for key in keys:
            if not self._cache.is_full:
                size = key[1].num_tokens
                capture_checked(self.server, self._groups[key], (size,), 1, size)
                self.peak_bytes = max(self.peak_bytes, self._cache.nbytes)

    def step(self, tokens: int, is_decode: int, reqs: int | None) -> CUDAGraphMode:
        """Serve one step; the mode in which it ran."""
        key, first, groups, eager = self._kinds[tokens, is_decode, reqs]
        if first is None:
            self.server.run_eagerly(eager, (tokens,), {})
        elif self._policy is None or not _is_ready(first, tokens):
            self.server.serve(first.route, (tokens,), {})
        else:
            self._ask(self._policy, key, groups)
        decision: Decision = self.server.local.decision
        if decision.reason is Reason.CAPTURED_NOW:
            self.peak_bytes = max(self.peak_bytes, self._cache.nbytes)
        return decision.mode

    def _ask(self, policy: DispatchPolicy, key: DispatchKey, groups: Mapping[DispatchMode, GraphGroup]) -> None:
        """Have the policy choose among the graphs that are ready and eager, and tell it what the step took."""
        tokens, before, chosen = key.num_tokens, self.device.now, DispatchMode.EAGER
        ready = {mode: group for mode, group in groups.items() if _is_ready(group, tokens)}
        if policy.should_use_graph(key, True):
            chosen = policy.select_mode(key, (*ready, DispatchMode.EAGER))
        if chosen in ready:
            self.server.serve(ready[chosen].route, (tokens,), {})
        else:
            chosen = DispatchMode.EAGER
            self.server.run_eagerly(Decision.eager(Reason.POLICY, tokens), (tokens,), {})
        if policy.learns:
            policy.record(key, chosen, self.device.now - before)

    def _find_kind(self, step: tuple[int, int, int | None]) -> _Kind:
        """What may serve a step: the graph that the dispatcher decides for, and for a policy also a piecewise one."""
        tokens, is_decode, reqs = step
        query_len = (tokens // reqs if reqs else 1) if is_decode else None
        key = DispatchKey(tokens, reqs or (tokens if is_decode else 1), 0, not is_decode)
        found = [self._decide(tokens, reqs, query_len=query_len, allowed_modes=modes) for modes in self._allowed]
        groups = {_GRAPH_MODES[d.mode]: self._groups[d.mode, d.descriptor] for d in found if d.descriptor is not None}
        first = next(iter(groups.values()), None)
        if first is not None and not self._captures and not _is_ready(first, tokens):
            return _Kind(key, None, {}, Decision.eager(Reason.CACHE_FULL, tokens))
        return _Kind(key, first, groups, found[0])

    def _make_group(self, key: _Key) -> GraphGroup:
        """The group of one key of the dispatcher."""
        mode, descriptor = key
        table = SizeTable.of_one(descriptor.num_tokens, mode, descriptor, pads=True)
        route = Route(key, table, descriptor=descriptor, signature=TokenCount(), is_single=True)
        found = self.server.find(route, (descriptor.num_tokens,), {})
        assert not isinstance(found, Refusal)
        return found[0]


def _is_ready(group: GraphGroup, tokens: int) -> bool:
    """Whether a verified graph may serve steps of so many tokens."""
    return type(group.hits[tokens]) is Hit
