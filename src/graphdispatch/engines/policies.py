"""How a dispatcher serves a key, and policies: whether a graph should, and in which mode. They decide over plain data.

``AdaptiveDispatchPolicy`` learns from measured latencies which mode serves which size best.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import hypot, inf, sqrt
from typing import ClassVar

from ..copying import Unlocked, make_lock
from ..descriptors import DispatchKey
from ..errors import ConfigError, check_count, shown
from ..sizes import check_sizes

__all__ = ["AdaptiveDispatchPolicy", "DefaultDispatchPolicy", "DispatchMode", "DispatchPolicy"]


class DispatchMode(Enum):
    """What a dispatcher did with one call.

    Attributes:
        EAGER: It ran the eager runner.
        CUDAGRAPH: A full graph served it.
        PIECEWISE: Graphs between eager breaks served it.
        HYBRID: No call's mode; while it is enabled, the policy chooses at each call.
    """

    EAGER = "eager"
    CUDAGRAPH = "cudagraph"
    PIECEWISE = "piecewise"
    HYBRID = "hybrid"

    # Members are compared by identity. Enum's own hash would cost a Python call at every look-up.
    __hash__ = object.__hash__


_EAGER, _FULL, _PIECEWISE = DispatchMode.EAGER, DispatchMode.CUDAGRAPH, DispatchMode.PIECEWISE


def check_limits(min_tokens_for_graph: int, max_tokens_for_graph: int) -> None:
    """Raise ``ConfigError`` unless these are numbers of tokens in order."""
    check_count("min_tokens_for_graph", min_tokens_for_graph)
    check_count("max_tokens_for_graph", max_tokens_for_graph)
    if max_tokens_for_graph < min_tokens_for_graph:
        raise ConfigError(
            f"max_tokens_for_graph must be at least min_tokens_for_graph={min_tokens_for_graph}, "
            f"got {max_tokens_for_graph}"
        )


class DispatchPolicy(ABC):
    """Decides for one key whether a graph serves it, and in which mode. Subclass it for rules of your own.

    A dispatcher calls it on every dispatch, possibly from several threads at once: first ``should_use_graph``, and if
    that is true ``select_mode``. Otherwise the step runs eagerly. A policy that learns returns True also where a graph
    is due for a trial; its ``select_mode`` may return ``EAGER``, to try that.
    """

    learns: ClassVar[bool] = False
    """Whether a dispatcher measures its steps and calls ``record`` with what they took."""

    def record(self, key: DispatchKey, mode: DispatchMode, latency: float) -> None:  # noqa: B027 (most do not learn)
        """Learn what a step took. A dispatcher calls it only if ``learns`` is true, and possibly late.

        Args:
            key: The key of the step.
            mode: The mode that it ran in.
            latency: Its device time in milliseconds.
        """

    @abstractmethod
    def should_use_graph(self, key: DispatchKey, graph_available: bool) -> bool:
        """Whether a graph should serve a key.

        Args:
            key: The key of the batch.
            graph_available: Whether there is a graph that can serve it now.
        """

    @abstractmethod
    def select_mode(self, key: DispatchKey, available_modes: Collection[DispatchMode]) -> DispatchMode:
        """The mode for a key.

        Args:
            key: The key of the batch.
            available_modes: The modes that can serve it now; ``EAGER`` always can.

        Returns:
            One of ``available_modes``.
        """


class DefaultDispatchPolicy(DispatchPolicy):
    """Prefers a graph where there is one, for batches whose number of tokens is within limits. Thread-safe.

    Args:
        min_tokens_for_graph: The fewest tokens of a batch that a graph serves.
        max_tokens_for_graph: The most tokens of a batch that a graph serves.
        prefer_piecewise: Take a piecewise graph before a full one.

    Raises:
        ConfigError: A limit is no positive integer, or they are out of order.
    """

    def __init__(
        self, min_tokens_for_graph: int = 1, max_tokens_for_graph: int = 8192, prefer_piecewise: bool = False
    ) -> None:
        check_limits(min_tokens_for_graph, max_tokens_for_graph)
        self.min_tokens_for_graph = min_tokens_for_graph
        self.max_tokens_for_graph = max_tokens_for_graph
        self.prefer_piecewise = prefer_piecewise

    def __repr__(self) -> str:
        preferred = "piecewise" if self.prefer_piecewise else "full"
        return (
            f"<DefaultDispatchPolicy {preferred} graphs for {self.min_tokens_for_graph} to "
            f"{self.max_tokens_for_graph} tokens>"
        )

    def should_use_graph(self, key: DispatchKey, graph_available: bool) -> bool:
        """Whether there is a graph and the number of tokens is within the limits.

        Args:
            key: The key of the batch.
            graph_available: Whether there is a graph that can serve it now.
        """
        return graph_available and self.min_tokens_for_graph <= key.num_tokens <= self.max_tokens_for_graph

    def select_mode(self, key: DispatchKey, available_modes: Collection[DispatchMode]) -> DispatchMode:
        """The preferred kind of graph, then the other, then eager.

        Args:
            key: The key of the batch.
            available_modes: The modes that can serve it now.

        Returns:
            One of ``available_modes``, or ``EAGER``.
        """
        order = (_PIECEWISE, _FULL) if self.prefer_piecewise else (_FULL, _PIECEWISE)
        mode = next((mode for mode in order if mode in available_modes), _EAGER)
        return mode if self.should_use_graph(key, mode is not _EAGER) else _EAGER


_DEFAULT_ORDER = (_FULL, _PIECEWISE, _EAGER)

# Spreads and errors are relative to the mean, since timing noise grows with what is timed.
_PRIOR_SPREAD = 0.2  # assumed before anything was measured,
_PRIOR_WEIGHT = 3  # as if that many latencies had shown it
_LEAST_SPREAD = 0.05
_CLIP = 4.0  # a latency counts as at most this many spreads from the mean, so that one stall changes little;
_CHANGE = 3  # so many in a row beyond that, on one side, are a change of the cost
_REACH = 2  # a size that was not measured is judged by the nearest one that differs by at most this factor
_LEAST_GAIN = 0.01  # the share of the cost that a mode must save to take another's position
_LEAST_LOSS = 0.1  # a trial is taken to cost at least so much more, as a share of the cost
_REVIEW_EVERY = 8  # latencies of a bucket: who looks more often is misled by noise more often
_LEAST_MS = 1e-6


def bucket_of(tokens: int) -> int:
    """The largest number of tokens that shares measurements with ``tokens``: eight buckets for each power of two.

    A bucket ends at a multiple of its width, as kernels' tiles do, so that 256 and 257 tokens never share one.
    """
    shift = max(0, (tokens - 1).bit_length() - 4)
    return ((tokens - 1 >> shift) + 1) << shift


@dataclass(slots=True, eq=False)
class _Cost:
    """What one mode costs at one size: the running mean of its latencies, their spread, and the latest one."""

    size: int
    mean: float = 0.0
    spread: float = _PRIOR_SPREAD
    count: int = 0
    latest_ms: float = 0.0
    beyond: int = 0
    """How many of the latest latencies were beyond the clip: above it, or below it as a negative number."""

    def add(self, latency: float, window: int) -> bool:
        """Take in one latency; about the latest ``window`` count. Whether it shows that the cost has changed."""
        self.latest_ms = latency
        limit = _CLIP * self.spread
        change = latency / self.mean - 1 if self.count else 0.0
        side = (change > limit) - (change < -limit)
        self.beyond = self.beyond + side if side * self.beyond > 0 else side
        is_change = abs(self.beyond) == _CHANGE
        if is_change or not self.count:
            self.mean, self.count, self.beyond = latency, 1, 0
            return is_change
        change = min(max(change, -limit), limit)
        self.count = min(self.count + 1, window)
        self.mean = max(_LEAST_MS, self.mean * (1 + change / self.count))
        spread2 = self.spread**2 + (change**2 - self.spread**2) / (self.count + _PRIOR_WEIGHT)
        self.spread = max(_LEAST_SPREAD, sqrt(spread2))
        return False

    def distance(self, other: "_Cost") -> float:
        """The factor by which the sizes differ."""
        return max(self.size / other.size, other.size / self.size)

    def beats(self, other: "_Cost") -> bool:
        """Whether this cost is lower than ``other`` by more than the error of the two means."""
        error = hypot(self.spread / sqrt(self.count), other.spread / sqrt(other.count))
        return self.mean * (1 + max(_LEAST_GAIN, error)) < other.mean


@dataclass(slots=True, eq=False)
class _Bucket:
    """Batches that share one decision: the same kind, the same graph, about the same number of tokens.

    ``order`` is replaced whole, so that readers need no lock. ``tried`` has the number of records when each mode was
    last granted a trial; buckets have trials of their own, so that none waits for another.
    """

    tokens: int
    is_prefill: bool
    costs: dict[DispatchMode, _Cost]
    order: Sequence[DispatchMode] = _DEFAULT_ORDER
    available: Collection[DispatchMode] = _DEFAULT_ORDER
    trial: DispatchMode | None = None
    records: int = 0
    tried: dict[DispatchMode, int] = field(default_factory=dict)


class AdaptiveDispatchPolicy(Unlocked, DispatchPolicy):
    """Learns the fastest mode by kind and size of batch from measured latencies; prefers graphs until it knows better.

    Feed it with ``record``; a dispatcher does so by itself. Latencies may come late and out of order. A graph costs
    what its capture size costs, and an eager step what its own tokens cost, so a batch of 260 may run eagerly if the
    graph of 512 is slower. A size that was not measured is judged by the nearest one that was, if that differs by at
    most a factor of two. The preferred mode changes only if the difference is larger than its error. Now and then the
    policy tries another mode, since it may be faster or become so. Equal histories give equal decisions.

    Memory grows with the number of sizes, not with time. Thread-safe: ``record`` takes a lock, a decision takes one
    only while nothing was recorded for such batches.

    Args:
        history_size: About so many of the latest latencies of each kind, size and mode count; after a change, which
            three latencies in a row show, only those since.
        sizes: The capture sizes, strictly increasing. None: keys arrive padded.
        min_tokens_for_graph: Below this number of tokens no graph is used and nothing is learnt.
        max_tokens_for_graph: Above this number of tokens no graph is used and nothing is learnt.
        exploration: The share of the time of batches of one size that trials cost at most, roughly; from 0 to 1.

    Raises:
        ConfigError: An argument is wrong.
    """

    learns: ClassVar[bool] = True

    def __init__(
        self,
        history_size: int = 1000,
        *,
        sizes: Sequence[int] | None = None,
        min_tokens_for_graph: int = 1,
        max_tokens_for_graph: int = 8192,
        exploration: float = 0.01,
    ) -> None:
        check_count("history_size", history_size)
        check_limits(min_tokens_for_graph, max_tokens_for_graph)
        if not 0 <= exploration <= 1:
            raise ConfigError(f"exploration must be a share of the time, from 0 to 1, got {shown(exploration)}")
        self.history_size = history_size
        self.sizes = None if sizes is None else check_sizes(sizes, "sizes")
        self.exploration = exploration
        self._limits = (min_tokens_for_graph, max_tokens_for_graph)
        self._lock = make_lock()
        self._costs: defaultdict[tuple[bool, DispatchMode], dict[int, _Cost]] = defaultdict(dict)
        self._buckets: dict[tuple[bool, int, int], _Bucket] = {}
        self._records = 0

    def should_use_graph(self, key: DispatchKey, graph_available: bool) -> bool:
        """Whether there is a graph, and it is preferred to eager for ``key`` or due for a trial.

        True also before anything is known, and where ``select_mode`` may return ``EAGER`` to try it.

        Args:
            key: The key of the batch.
            graph_available: Whether there is a graph that can serve it now.
        """
        bucket = self._bucket(key) if graph_available else None
        return bucket is not None and (self._order(bucket)[0] is not _EAGER or bucket.trial is not None)

    def select_mode(self, key: DispatchKey, available_modes: Collection[DispatchMode]) -> DispatchMode:
        """The preferred mode for ``key``, or now and then one on trial.

        Args:
            key: The key of the batch.
            available_modes: The modes that can serve it now.

        Returns:
            One of ``available_modes``, or ``EAGER``.
        """
        bucket = self._bucket(key)
        if bucket is None:
            return _EAGER
        bucket.available = available_modes
        trial, bucket.trial = bucket.trial, None  # two threads may both get it, which costs one trial more
        if trial is not None and trial in available_modes:
            return trial
        return next((mode for mode in self._order(bucket) if mode in available_modes), _EAGER)

    def record(self, key: DispatchKey, mode: DispatchMode, latency: float) -> None:
        """Learn what a step took.

        Most latencies only change a mean: the preference is reviewed after the first few, after every eighth, and at
        once where a cost has changed.

        Args:
            key: The key of the step.
            mode: The mode that it ran in: ``EAGER``, ``CUDAGRAPH`` or ``PIECEWISE``.
            latency: Its device time in milliseconds.

        Raises:
            ConfigError: No step can have such values.
        """
        if mode not in _DEFAULT_ORDER:
            raise ConfigError(f"mode must be EAGER, CUDAGRAPH or PIECEWISE, got {shown(mode)}; record what really ran")
        if not 0 <= latency < inf:
            raise ConfigError(f"latency must be a finite number of milliseconds >= 0, got {shown(latency)}")
        bucket = self._bucket(key)
        with self._lock:
            self._records += 1
            if bucket is None:
                return
            cost = bucket.costs[mode]
            is_change = cost.add(max(latency, _LEAST_MS), self.history_size)
            if is_change:
                self._forget(mode, cost)
            bucket.records += 1
            if is_change or bucket.records < _REVIEW_EVERY or bucket.records % _REVIEW_EVERY == 0:
                self._rank(bucket)
                self._grant(bucket)

    def estimates(self, key: DispatchKey) -> dict[DispatchMode, float]:
        """What a batch is expected to cost in each mode that was measured at its size or at one near by.

        Args:
            key: The key of the batch.

        Returns:
            By mode, the mean in milliseconds.
        """
        bucket = self._bucket(key)
        with self._lock:
            return {} if bucket is None else {mode: cost.mean for mode, cost in self._measured(bucket).items()}

    @property
    def min_tokens_for_graph(self) -> int:
        """The smallest measured number of tokens that prefers a graph, or the lower limit if the smallest does."""
        return self._thresholds()[0]

    @property
    def max_tokens_for_graph(self) -> int:
        """The largest measured number of tokens that prefers a graph, the upper limit if the largest does; 0: none."""
        return self._thresholds()[1]

    def __repr__(self) -> str:
        low, high = self._thresholds()
        graphs = f"{low} to {high} tokens" if high else "no size"
        return f"<AdaptiveDispatchPolicy {self._records} records, graphs for {graphs}>"

    def _bucket(self, key: DispatchKey) -> _Bucket | None:
        """The bucket of a batch; None outside of the limits."""
        low, high = self._limits
        if not low <= key.num_tokens <= high:
            return None
        graph = end = bucket_of(key.num_tokens)
        if self.sizes is not None and key.num_tokens <= self.sizes[-1]:
            graph = self.sizes[bisect_left(self.sizes, key.num_tokens)]
        place = bool(key.is_prefill), graph, end
        if place not in self._buckets:
            with self._lock:
                sizes = {_FULL: graph, _PIECEWISE: graph, _EAGER: end}
                costs = {
                    mode: self._costs[place[0], mode].setdefault(size, _Cost(size)) for mode, size in sizes.items()
                }
                self._buckets.setdefault(place, _Bucket(min(end, high), place[0], costs))
        return self._buckets[place]

    def _order(self, bucket: _Bucket) -> Sequence[DispatchMode]:
        """The modes for a bucket, the preferred first; while it has no record of its own, as those near by are now."""
        if not bucket.records:
            with self._lock:
                self._rank(bucket)
        return bucket.order

    def _measured(self, bucket: _Bucket) -> dict[DispatchMode, _Cost]:
        """What each mode costs: as measured at the bucket's own size, or else at the nearest within reach."""
        found = {}
        for mode, own in bucket.costs.items():
            every = self._costs[bucket.is_prefill, mode].values()
            nearest = own if own.count else min((c for c in every if c.count), key=own.distance, default=own)
            if nearest.count and nearest.distance(own) <= _REACH:
                found[mode] = nearest
        return found

    def _rank(self, bucket: _Bucket) -> None:
        """Change the order of a bucket where what was measured clearly contradicts it.

        A kind of graph that was not measured is taken to cost what the other one does.
        """
        costs = self._measured(bucket)
        known = [costs[mode] for mode in (_FULL, _PIECEWISE) if mode in costs]
        if known:
            costs = {_FULL: known[0], _PIECEWISE: known[-1]} | costs
        order: list[DispatchMode] = []
        for mode in bucket.order:
            place = len(order)
            while place and mode in costs and order[place - 1] in costs and costs[mode].beats(costs[order[place - 1]]):
                place -= 1
            order.insert(place, mode)
        bucket.order = order

    def _forget(self, mode: DispatchMode, changed: _Cost) -> None:
        """Forget what ``mode`` cost at all other sizes, when it changed at one."""
        for is_prefill in (False, True):
            for cost in self._costs[is_prefill, mode].values():
                if cost is not changed:
                    cost.count = 0

    def _grant(self, bucket: _Bucket) -> None:
        """Have the next batch of a bucket try another mode, if the last trial of that was long enough ago: what trials
        cost more than the preferred mode is about the share ``exploration`` of its cost."""
        order, costs = [mode for mode in bucket.order if mode in bucket.available], self._measured(bucket)
        if len(order) < 2 or order[0] not in costs or not self.exploration:
            return
        usual_ms, most = costs[order[0]].mean, self.exploration / (len(order) - 1)
        for mode in order[1:]:
            # What is not known is taken to cost twice as much.
            loss = min(costs[mode].mean, costs[mode].latest_ms) / usual_ms - 1 if mode in costs else 1.0
            if bucket.records - bucket.tried.get(mode, 0) >= max(loss, _LEAST_LOSS) / most:
                bucket.tried[mode] = bucket.records
                bucket.trial = mode
                return

    def _thresholds(self) -> tuple[int, int]:
        low, high = self._limits
        with self._lock:
            measured = sorted((b.tokens, b.order[0] is not _EAGER) for b in self._buckets.values() if b.records)
        graphs = [tokens for tokens, prefers_graph in measured if prefers_graph]
        if not graphs:
            return low, 0 if measured else high
        first = low if graphs[0] == measured[0][0] else graphs[0]
        return first, high if graphs[-1] == measured[-1][0] else graphs[-1]
