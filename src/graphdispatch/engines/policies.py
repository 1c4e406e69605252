"""Policies: whether a graph should serve a key, and in which mode. They decide over plain data.

``AdaptiveDispatchPolicy`` learns from measured latencies which mode serves which size best.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from ..copying import Unlocked, make_lock
from ..descriptors import DispatchKey
from ..errors import ConfigError, check_count, shown
from ..modes import DispatchMode

_EAGER, _FULL, _PIECEWISE = DispatchMode.EAGER, DispatchMode.CUDAGRAPH, DispatchMode.PIECEWISE


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
        check_count("min_tokens_for_graph", min_tokens_for_graph)
        check_count("max_tokens_for_graph", max_tokens_for_graph)
        if max_tokens_for_graph < min_tokens_for_graph:
            raise ConfigError(
                f"max_tokens_for_graph must be at least min_tokens_for_graph={min_tokens_for_graph}, "
                f"got {max_tokens_for_graph}"
            )
        self.min_tokens_for_graph = min_tokens_for_graph
        self.max_tokens_for_graph = max_tokens_for_graph
        self.prefer_piecewise = prefer_piecewise

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


_BEST_FIRST = (_FULL, _PIECEWISE, _EAGER)
"""The order of the modes while nothing is known."""
_CLIP = 2.0  # a latency counts as at most so many times the mean, and at least one such part: one stall changes little
_CHANGE = 3  # so many in a row beyond that, on one side, are a change of the cost
_LEAST_COUNT = 3  # latencies before a mode is preferred to another
_LEAST_GAIN = 0.03  # the share of the cost that it must save
_TRIALS = 0.01  # the share of the time that trials cost at most, roughly
_LEAST_LOSS = 0.1  # a trial is taken to cost at least so much more, as a share of the cost
_LEAST_MS = 1e-6


def bucket_of(tokens: int) -> int:
    """The largest number of tokens that shares measurements with ``tokens``: four buckets for each power of two.

    A bucket ends at a multiple of its width, as kernels' tiles do, so that 256 and 257 tokens never share one.
    """
    shift = max(0, (tokens - 1).bit_length() - 3)
    return ((tokens - 1 >> shift) + 1) << shift


@dataclass(slots=True, eq=False)
class _Cost:
    """What one mode costs in one bucket: the running mean of its latencies."""

    mean: float = 0.0
    count: int = 0
    beyond: int = 0
    """How many of the latest latencies were beyond the clip: above it, or below it as a negative number."""
    tried: int = 0
    """The number of the bucket's records when the mode was last granted a trial."""

    def add(self, latency: float, window: int) -> None:
        """Take in one latency. About the latest ``window`` count; after a change of the cost, those since."""
        low, high = self.mean / _CLIP, self.mean * _CLIP
        side = (latency > high) - (latency < low)
        self.beyond = self.beyond + side if side * self.beyond > 0 else side
        if not self.count or abs(self.beyond) == _CHANGE:
            self.mean, self.count, self.beyond = latency, 1, 0
        else:
            self.count += 1
            self.mean += (min(max(latency, low), high) - self.mean) / min(self.count, window)

    def beats(self, other: "_Cost") -> bool:
        """Whether the mode clearly costs less than the other one."""
        return self.count >= _LEAST_COUNT and self.mean * (1 + _LEAST_GAIN) < other.mean

    def is_due(self, preferred: "_Cost", records: int, share: float) -> bool:
        """Whether the mode is due for a trial beside the preferred one: at once while it is unknown or seems to be
        faster, else so seldom that what trials lose is the given share of the time."""
        is_promising = self.count < _LEAST_COUNT and self.mean < preferred.mean
        loss = max(self.mean / preferred.mean - 1, _LEAST_LOSS)
        return records - self.tried >= (1 if is_promising or self.beyond < 0 else loss / share)


@dataclass(slots=True, eq=False)
class _Bucket:
    """Batches that share one decision: the same kind, and about the same number of tokens."""

    costs: dict[DispatchMode, _Cost] = field(default_factory=lambda: {mode: _Cost() for mode in _BEST_FIRST})
    preferred: DispatchMode = _FULL
    available: Collection[DispatchMode] = _BEST_FIRST
    """The modes that the latest batch could be served in."""
    trial: DispatchMode | None = None
    """The mode that the next batch tries."""
    records: int = 0

    def review(self) -> None:
        """Choose the preferred mode anew, and grant the next batch a trial of another one if that is due."""
        offered = [mode for mode in _BEST_FIRST if mode in self.available]
        if offered and self.preferred not in offered:
            self.preferred = offered[0]
        if not self.costs[self.preferred].count:
            return
        for mode in offered:
            if self.costs[mode].beats(self.costs[self.preferred]):
                self.preferred = mode
        for mode in offered:
            cost, preferred = self.costs[mode], self.costs[self.preferred]
            if cost is not preferred and cost.is_due(preferred, self.records, _TRIALS / (len(offered) - 1)):
                cost.tried, self.trial = self.records, mode
                return


class AdaptiveDispatchPolicy(Unlocked, DispatchPolicy):
    """Learns the fastest mode by kind and size of batch from measured latencies; prefers graphs until it knows better.

    Feed it with ``record``; a dispatcher does so by itself. Latencies may come late and out of order. Sizes that differ
    by at most a quarter share what is learnt. The preferred mode changes only for a clear gain. Now and then the policy
    tries another mode, since it may be faster or become so: such trials cost about a hundredth of the time. Equal
    histories give equal decisions.

    Memory grows with the number of sizes, not with time. Thread-safe: ``record`` takes a lock, a decision takes none
    but at the first batch of a size.

    Args:
        history_size: About so many of the latest latencies of each kind, size and mode count; after a change, which
            three latencies in a row show, only those since.

    Raises:
        ConfigError: ``history_size`` is no positive integer.
    """

    learns: ClassVar[bool] = True

    def __init__(self, history_size: int = 1000) -> None:
        check_count("history_size", history_size)
        self.history_size = history_size
        self._lock = make_lock()
        self._buckets: dict[tuple[bool, int], _Bucket] = {}

    def should_use_graph(self, key: DispatchKey, graph_available: bool) -> bool:
        """Whether there is a graph, and it is preferred to eager for ``key`` or due for a trial.

        True also before anything is known, and where ``select_mode`` may return ``EAGER`` to try it.

        Args:
            key: The key of the batch.
            graph_available: Whether there is a graph that can serve it now.
        """
        bucket = self._bucket(key)
        return graph_available and (bucket.preferred is not _EAGER or bucket.trial is not None)

    def select_mode(self, key: DispatchKey, available_modes: Collection[DispatchMode]) -> DispatchMode:
        """The preferred mode for ``key``, or now and then one on trial.

        Args:
            key: The key of the batch.
            available_modes: The modes that can serve it now.

        Returns:
            One of ``available_modes``, or ``EAGER``.
        """
        bucket = self._bucket(key)
        bucket.available = available_modes
        trial, bucket.trial = bucket.trial, None  # two threads may both get it, which costs one trial more
        for mode in (trial, bucket.preferred, *_BEST_FIRST):
            if mode is not None and mode in available_modes:
                return mode
        return _EAGER

    def record(self, key: DispatchKey, mode: DispatchMode, latency: float) -> None:
        """Learn what a step took.

        Args:
            key: The key of the step.
            mode: The mode that it ran in: ``EAGER``, ``CUDAGRAPH`` or ``PIECEWISE``.
            latency: Its device time in milliseconds.

        Raises:
            ConfigError: No step can have such values.
        """
        if mode not in _BEST_FIRST:
            raise ConfigError(f"mode must be EAGER, CUDAGRAPH or PIECEWISE, got {shown(mode)}; record what really ran")
        if not 0 <= latency < inf:
            raise ConfigError(f"latency must be a finite number of milliseconds >= 0, got {shown(latency)}")
        bucket = self._bucket(key)
        with self._lock:
            bucket.records += 1
            bucket.costs[mode].add(max(latency, _LEAST_MS), self.history_size)
            bucket.review()

    @property
    def min_tokens_for_graph(self) -> int:
        """The smallest measured number of tokens that prefers a graph; 1 if none does."""
        return min(self._graph_sizes(), default=1)

    @property
    def max_tokens_for_graph(self) -> int:
        """The largest measured number of tokens that prefers a graph; 0 if none does."""
        return max(self._graph_sizes(), default=0)

    def _bucket(self, key: DispatchKey) -> _Bucket:
        place = bool(key.is_prefill), bucket_of(key.num_tokens)
        found = self._buckets.get(place)
        if found is None:
            with self._lock:
                found = self._buckets.setdefault(place, _Bucket())
        return found

    def _graph_sizes(self) -> list[int]:
        """The measured numbers of tokens that prefer a graph, each the largest of its bucket."""
        with self._lock:
            return [
                tokens
                for (_, tokens), bucket in self._buckets.items()
                if bucket.records and bucket.preferred is not _EAGER
            ]
