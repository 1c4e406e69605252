"""``AdaptiveDispatchPolicy``: learns from measured latencies which mode serves which size best."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import hypot, inf, log, sqrt
from operator import itemgetter
from typing import ClassVar, NamedTuple

from ..copying import Unlocked
from ..decide.memo import Memo
from ..descriptors import DispatchKey
from ..errors import ConfigError, check_count, shown
from ..forking import make_lock
from ..modes import DispatchMode
from ..sizes import check_sizes
from .policies import DispatchPolicy, check_limits

__all__ = ["AdaptiveDispatchPolicy", "Estimate", "bucket_of"]

_EAGER, _FULL, _PIECEWISE = DispatchMode.EAGER, DispatchMode.CUDAGRAPH, DispatchMode.PIECEWISE
_DEFAULT_ORDER = (_FULL, _PIECEWISE, _EAGER)

# Spreads and errors are relative to the mean, since timing noise grows with what is timed.
_PRIOR_SPREAD = 0.2  # assumed before anything was measured,
_PRIOR_WEIGHT = 3  # as if that many latencies had shown it
_LEAST_SPREAD = 0.01
_CLIP = 4.0  # a latency counts as at most this many spreads from the mean, so that one stall changes little
# Changes are detected by CUSUM.
_SLACK = 1.0  # deviations of fewer spreads than this are noise,
_ALARM = 12.0  # and a sum of the rest above this is a change,
_LATEST = 4  # after which only so many latencies count
# An estimate is less sure the older it is and the further away the size that it was measured at.
_AGE_ERROR2 = 0.08**2 / 1000  # by which the squared error grows with each record of any kind,
_OTHER_SIZE_ERROR = 0.05  # the error of an estimate from another size,
_DISTANCE_ERROR = 0.3  # and what it grows by for each factor of e between the sizes
_REACH = log(2.1)  # sizes further apart say nothing about each other
_CONFIDENCE = 1.0  # standard errors by which a mode must be faster to take another's position,
_LEAST_GAIN = 0.01  # and the share of the cost that it must save at least
_REVIEW_EVERY = 8  # latencies of a bucket
_UNKNOWN_COST = 2.0  # the assumed cost of a mode that was never measured, as a multiple of the best
_CHECKS = 0.5  # the part of the budget that may be spent on modes known to be slower
_LOST_AFTER = 256  # records after which a trial without a latency is given up
_LEAST_MS = 1e-6


class Estimate(NamedTuple):
    """A mean cost in milliseconds, and its standard error as a share of the mean."""

    mean: float
    error: float

    def beats(self, other: "Estimate", confidence: float) -> bool:
        """Whether this cost is lower than ``other`` by more than ``confidence`` standard errors of their ratio."""
        return log(other.mean / self.mean) > max(_LEAST_GAIN, confidence * hypot(self.error, other.error))

    @property
    def lowest(self) -> float:
        """The lowest mean that two standard errors allow."""
        return self.mean * (1 - 2 * self.error)


def bucket_of(tokens: int) -> int:
    """The largest number of tokens that shares measurements with ``tokens``: eight buckets for each power of two.

    A bucket ends at a multiple of its width, as kernels' tiles do, so that 256 and 257 tokens never share one.
    """
    tokens = max(tokens, 1)
    shift = max(0, (tokens - 1).bit_length() - 4)
    return ((tokens - 1 >> shift) + 1) << shift


@dataclass(slots=True, eq=False)
class _Cost:
    """What one mode costs at one size: the mean of its latencies, their spread, and when the latest came."""

    size: int
    mean: float = 0.0
    spread2: float = _PRIOR_SPREAD**2
    count: int = 0
    latest: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_LATEST))
    above: float = 0.0
    below: float = 0.0
    near: list[tuple[float, "_Cost"]] = field(default_factory=list, repr=False)
    """The costs of the same mode from which this size can be estimated, the nearest (its own) first, each with the
    squared error that its distance adds."""

    def add(self, latency: float, now: int, window: int) -> bool:
        """Take in one latency, the record number ``now``; about the latest ``window`` of them count.

        True if it is the first, or the one by which a change is detected: then only the latest few count.
        """
        if not self.count:
            self.latest.clear()
        self.latest.append((now, latency))
        if not self.count:
            self.mean, self.count = latency, 1
            return True
        spread = max(_LEAST_SPREAD, sqrt(self.spread2))
        deviation = min(max((latency / self.mean - 1) / spread, -_CLIP), _CLIP)
        self.above = max(0.0, self.above + deviation - _SLACK)
        self.below = max(0.0, self.below - deviation - _SLACK)
        if max(self.above, self.below) > _ALARM:
            self.mean = sum(value for _, value in self.latest) / len(self.latest)
            self.count = min(len(self.latest), window)
            self.above = self.below = 0.0
            return True
        change = deviation * spread
        self.count = min(self.count + 1, window)
        self.mean = max(_LEAST_MS, self.mean * (1 + change / self.count))
        self.spread2 += (change * change - self.spread2) / (self.count + _PRIOR_WEIGHT)
        return False

    def estimate(self, now: int, spread2: float) -> Estimate | None:
        """The surest estimate at this size, from here or a size near by, as if costs grew with the root of the size;
        ``spread2`` is the least that is assumed. None if no such size was measured."""
        best, least = self, inf
        for distance2, cost in self.near:
            if distance2 >= least:
                break
            if cost.count:
                age2 = (now - cost.latest[-1][0]) * _AGE_ERROR2
                error2 = max(cost.spread2, spread2) / cost.count + age2 + distance2
                if error2 < least:
                    best, least = cost, error2
        return Estimate(best.mean * sqrt(self.size / best.size), sqrt(least)) if least < inf else None


def _cost_of(costs: dict[int, _Cost], size: int) -> _Cost:
    """The cost of ``size`` among those of a mode; made, and linked with those near by, at its first use."""
    if size not in costs:
        made = costs[size] = _Cost(size)
        for other in costs.values():
            apart = abs(log(size / other.size))
            if apart <= _REACH:
                distance2 = (_OTHER_SIZE_ERROR + _DISTANCE_ERROR * apart) ** 2 if apart else 0.0
                for one, its in {made: other, other: made}.items():
                    insort(one.near, (distance2, its), key=itemgetter(0))
    return costs[size]


class _Trial(NamedTuple):
    """A mode that is to be tried once: what that is expected to cost, and the record at which it counts as lost."""

    mode: DispatchMode
    price_ms: float
    lost_at: int


@dataclass(slots=True, eq=False)
class _Bucket:
    """Batches that share one decision: the same kind, the same graph, about the same number of tokens.

    ``order`` is replaced whole, so that readers need no lock.
    """

    tokens: int
    is_prefill: bool
    costs: dict[DispatchMode, _Cost]
    order: Sequence[DispatchMode] = _DEFAULT_ORDER
    available: Collection[DispatchMode] = _DEFAULT_ORDER
    records: int = 0
    trial: _Trial | None = None

    def rank(self, found: dict[DispatchMode, Estimate]) -> None:
        """Change the order where the estimates clearly contradict it.

        Before its first latency a bucket simply takes the order of the estimates. A kind of graph without an estimate
        follows the best kind that has one. If none has one, graphs come before eager.
        """
        confidence = _CONFIDENCE if self.records else 0.0
        known: list[DispatchMode] = []
        for mode in self.order:
            if mode in found:
                index = len(known)
                while index and found[mode].beats(found[known[index - 1]], confidence):
                    index -= 1
                known.insert(index, mode)
        graphs = [mode for mode in known if mode is not _EAGER]
        index = known.index(graphs[0]) + 1 if graphs else 0
        unknown = [mode for mode in (_FULL, _PIECEWISE) if mode not in found]
        self.order = (*known[:index], *unknown, *known[index:], *(() if _EAGER in found else (_EAGER,)))


class AdaptiveDispatchPolicy(Unlocked, DispatchPolicy):
    """Learns the fastest mode by kind and size of batch from measured latencies; prefers graphs until it knows better.

    Feed it with ``record``; a dispatcher does so by itself. Latencies may come late and out of order. A graph costs
    what its capture size costs, and an eager step what its own tokens cost, so a batch of 260 may run eagerly if the
    graph of 512 is slower. A size that was not measured is judged by the sizes near by. The preferred mode changes only
    if the difference is larger than its error. Now and then the policy tries another mode, since it may be faster or
    become so. Equal histories give equal decisions.

    Memory grows with the number of sizes, not with time. Thread-safe: ``record`` takes a lock, a decision takes one
    only for a number of tokens that it has not seen before.

    Args:
        history_size: About so many of the latest latencies of each kind, size and mode count; after a change, only
            those since.
        sizes: The capture sizes, strictly increasing. None: keys arrive padded.
        min_tokens_for_graph: Below this number of tokens no graph is used and nothing is learnt.
        max_tokens_for_graph: Above this number of tokens no graph is used and nothing is learnt.
        exploration: The share of the recorded time that all trials together cost at most, roughly; from 0 to 1.

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
        self._costs: dict[tuple[bool, DispatchMode], dict[int, _Cost]] = {
            (is_prefill, mode): {} for is_prefill in (False, True) for mode in _DEFAULT_ORDER
        }
        self._buckets: dict[tuple[bool, int, int], _Bucket] = {}
        self._outside = _Bucket(0, False, {}, order=(_EAGER,))
        self._bucket_of = Memo[tuple[int, bool], _Bucket](self._find_bucket)
        self._trials: dict[_Bucket, DispatchMode] = {}
        self._records = 0
        self._spent_ms = self._explored_ms = 0.0

    def should_use_graph(self, key: DispatchKey, graph_available: bool) -> bool:
        """Whether there is a graph, and it is preferred to eager for ``key`` or due for a trial.

        True also before anything is known, and where ``select_mode`` may return ``EAGER`` to try it.

        Args:
            key: The key of the batch.
            graph_available: Whether there is a graph that can serve it now.
        """
        if not graph_available:
            return False
        bucket = self._bucket_of[key.num_tokens, key.is_prefill]
        return bucket.order[0] is not _EAGER or bucket in self._trials

    def select_mode(self, key: DispatchKey, available_modes: Collection[DispatchMode]) -> DispatchMode:
        """The preferred mode for ``key``, or now and then one on trial.

        Args:
            key: The key of the batch.
            available_modes: The modes that can serve it now.

        Returns:
            One of ``available_modes``, or ``EAGER``.
        """
        bucket = self._bucket_of[key.num_tokens, key.is_prefill]
        bucket.available = available_modes
        if self._trials:
            # Popping is atomic, so that of several threads one gets the trial.
            trial = self._trials.pop(bucket, None)
            if trial is not None and trial in available_modes:
                return trial
        for mode in bucket.order:
            if mode in available_modes:
                return mode
        return _EAGER

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
        bucket = self._bucket_of[key.num_tokens, key.is_prefill]
        with self._lock:
            self._records += 1
            self._spent_ms += latency
            if bucket is self._outside:
                return
            cost = bucket.costs[mode]
            is_news = cost.add(max(latency, _LEAST_MS), self._records, self.history_size)
            if is_news:
                if len(cost.latest) > 1:  # a change, and not the first latency
                    self._forget(mode, cost.latest[0][0])
                # Other buckets may depend on this cost: the next batch of each has it ranked again.
                self._bucket_of.clear()
            is_trial = bucket.trial is not None and bucket.trial.mode is mode
            if is_trial:
                # What it really cost more than the preferred mode takes the place of what was expected.
                best = next((bucket.costs[m] for m in bucket.order if m in bucket.available and m is not mode), None)
                self._end_trial(bucket, latency - best.mean if best is not None and best.count else 0.0)
            if is_news or is_trial or bucket.records < _REVIEW_EVERY or bucket.records % _REVIEW_EVERY == 0:
                found = self._estimates(bucket)
                bucket.rank(found)
                self._grant(bucket, found)
            bucket.records += 1

    def estimates(self, key: DispatchKey) -> dict[DispatchMode, Estimate]:
        """What a batch is expected to cost in each mode that was measured at its size or at one near by.

        Args:
            key: The key of the batch.

        Returns:
            By mode, the mean in milliseconds and its standard error as a share of the mean.
        """
        bucket = self._bucket_of[key.num_tokens, key.is_prefill]
        with self._lock:
            return self._estimates(bucket)

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

    def _find_bucket(self, asked: tuple[int, bool]) -> _Bucket:
        tokens, is_prefill = asked[0], bool(asked[1])
        low, high = self._limits
        if not low <= tokens <= high:
            return self._outside
        graph = end = bucket_of(tokens)
        if self.sizes is not None and tokens <= self.sizes[-1]:
            graph = self.sizes[bisect_left(self.sizes, tokens)]
        with self._lock:
            bucket = self._buckets.get((is_prefill, graph, end))
            if bucket is None:
                sizes = {_FULL: graph, _PIECEWISE: graph, _EAGER: end}
                costs = {mode: _cost_of(self._costs[is_prefill, mode], size) for mode, size in sizes.items()}
                bucket = self._buckets[is_prefill, graph, end] = _Bucket(min(end, high), is_prefill, costs)
            bucket.rank(self._estimates(bucket))
            return bucket

    def _estimates(self, bucket: _Bucket) -> dict[DispatchMode, Estimate]:
        """The surest estimate for each mode, of those at the bucket's own size and at the sizes near by."""
        # Noise is mostly the machine's: a mode that was seldom measured is assumed to spread like the others.
        spread2 = max((cost.spread2 for cost in bucket.costs.values() if cost.count), default=0.0)
        found = {}
        for mode, own in bucket.costs.items():
            estimate = own.estimate(self._records, spread2)
            if estimate is not None:
                found[mode] = estimate
        return found

    def _forget(self, mode: DispatchMode, since: int) -> None:
        """Forget what ``mode`` cost at sizes without a latency after record ``since``, when it changed at one size."""
        for is_prefill in (False, True):
            for cost in self._costs[is_prefill, mode].values():
                if cost.count and cost.latest[-1][0] < since:
                    cost.count = 0

    def _end_trial(self, bucket: _Bucket, cost_ms: float) -> None:
        """Replace what a trial was expected to cost by what it did."""
        if bucket.trial is not None:
            self._explored_ms = max(0.0, self._explored_ms - bucket.trial.price_ms + cost_ms)
            bucket.trial = None

    def _grant(self, bucket: _Bucket, found: dict[DispatchMode, Estimate]) -> None:
        """Have the most promising other mode tried by the next batch of ``bucket``, if the budget allows it."""
        order = [mode for mode in bucket.order if mode in bucket.available]
        is_waiting = bucket.trial is not None and self._records < bucket.trial.lost_at
        if is_waiting or len(order) < 2 or order[0] not in found or not self.exploration:
            return
        self._end_trial(bucket, 0.0)
        best = found[order[0]]
        unknown = Estimate(_UNKNOWN_COST * best.mean, 1.0)
        mode = min(order[1:], key=lambda mode: found.get(mode, unknown).lowest)
        tried = found.get(mode, unknown)
        share = self.exploration * (1.0 if tried.lowest < best.mean else _CHECKS)
        price = max(0.0, tried.mean - best.mean)
        if self._explored_ms + price <= share * self._spent_ms:
            self._explored_ms += price
            bucket.trial = _Trial(mode, price, self._records + _LOST_AFTER)
            self._trials[bucket] = mode

    def _thresholds(self) -> tuple[int, int]:
        low, high = self._limits
        with self._lock:
            measured = sorted((b.tokens, b.order[0] is not _EAGER) for b in self._buckets.values() if b.records)
        graphs = [tokens for tokens, prefers_graph in measured if prefers_graph]
        if not graphs:
            return low, 0 if measured else high
        first = low if graphs[0] == measured[0][0] else graphs[0]
        return first, high if graphs[-1] == measured[-1][0] else graphs[-1]
