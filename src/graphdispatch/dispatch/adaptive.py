"""``AdaptiveDispatchPolicy``: learns from measured step times which mode serves which size best, and keeps learning."""

import json
import random
import reprlib
import threading
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from ..descriptors import DispatchKey
from ..errors import ConfigError
from ..modes import DispatchMode
from ..sizes import check_sizes
from .adaptive_state import parse_state
from .estimates import CostCurve, Estimate, bucket_of
from .policies import DispatchPolicy

__all__ = ["AdaptiveDispatchPolicy"]

_EAGER, _FULL, _PIECEWISE = DispatchMode.EAGER, DispatchMode.CUDAGRAPH, DispatchMode.PIECEWISE
_MODES = (_FULL, _PIECEWISE, _EAGER)
"""The modes that a step runs in; in this order until measurements say otherwise."""

_CONFIDENCE = 1.5  # standard errors by which a mode must be faster to take another's place
_UNKNOWN_COST = 2.0  # what a mode without any record may cost, as a multiple of the best: only the budget needs it
_PROBE_GAP = 8  # records of a place between two probes there, in the mean
_PROBES_AT_ONCE = 4
_CHECKS = 0.5  # the part of the budget up to which modes known to be slower are looked at again
_LOST_AFTER = 256  # records after which a trial that has not come back is given up
_REFRESH = 64  # records after which choices between measured sizes are made anew
_LEAST_MS = 1e-6
_SECOND_SIGHTING = 2


class _Place(NamedTuple):
    """Batches that share one choice: the same kind, the same graph, about the same number of tokens."""

    prefill: bool
    graph_size: int
    bucket: int


class _Standing:
    """What is remembered of a place: the order of preference, its sightings, and the probe under way."""

    def __init__(self, order: tuple[DispatchMode, ...] = _MODES, sightings: int = 0) -> None:
        self.order = order
        self.sightings = sightings
        self.next_probe = 0
        self.probing: DispatchMode | None = None


class AdaptiveDispatchPolicy(DispatchPolicy):
    """Learns the fastest mode by kind and size of batch from measured times; until it knows better, prefers graphs.

    Feed it with ``record``: device time, polled whenever it is there; late and out of order does no harm. A graph costs
    what its padded size costs, an eager step what its own tokens cost, so a batch of 260 may run eagerly where the
    graph of 512 is slower. Unmeasured sizes are judged by their measured neighbours. An order of preference changes
    only on a difference that is larger than its error; a mode that is not known to be slower is tried now and then,
    as is one whose measurements have become old. All trials together cost at most the share ``exploration`` of the time
    recorded so far.

    ``sizes`` are the capture sizes; None says that keys arrive padded, so that a graph's size is its key's. Beyond
    ``min_tokens_for_graph`` and ``max_tokens_for_graph`` no graph is used. At most ``history_size`` estimates and as
    many places are kept, those idle longest go first; of a long history an estimate weighs about ``window`` records.
    ``rng`` spreads the trials over the steps; by default it is seeded, so that equal histories give equal decisions.

    Thread-safe: records take a lock; ``select_mode`` takes none and looks into a table that is swapped on a change.
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
        window: int = 100,
        rng: random.Random | None = None,
    ) -> None:
        for name, value, least in (
            ("history_size", history_size, len(_MODES)),
            ("min_tokens_for_graph", min_tokens_for_graph, 1),
            ("max_tokens_for_graph", max_tokens_for_graph, min_tokens_for_graph),
            ("window", window, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be an integer >= {least}, got {value!r}")
        if not 0 <= exploration <= 1:
            raise ConfigError(f"exploration must be a share of the time, from 0 to 1, got {exploration!r}")
        self.history_size = history_size
        self.sizes = None if sizes is None else check_sizes(sizes, "sizes")
        self.exploration = exploration
        self.window = window
        self._limits = (min_tokens_for_graph, max_tokens_for_graph)
        self._rng = rng or random.Random(0)
        self._lock = threading.Lock()
        self._curves = {(mode, prefill): CostCurve(window) for prefill in (False, True) for mode in _MODES}
        self._standings: dict[_Place, _Standing] = {}
        self._table: dict[tuple[int, bool], tuple[tuple[DispatchMode, ...], _Place]] = {}
        self._probes: dict[_Place, DispatchMode] = {}
        self._offered: Collection[DispatchMode] = _MODES
        self._records = 0
        self._spent_ms = self._explored_ms = 0.0
        self._capture_ms: float | None = None

    def should_use_graph(self, key: DispatchKey, graph_available: bool) -> bool:
        """Whether there is a graph and it is preferred to eager for ``key``."""
        order, place = self._look_up(key)
        if not graph_available or order[0] is _EAGER:
            return False
        # A kind of graph that never ran says nothing, unless no other did.
        graphs = [mode for mode in order if mode is not _EAGER]
        known = [mode for mode in graphs if len(self._curves[mode, place.prefill])] or graphs
        return order.index(known[0]) < order.index(_EAGER)

    def select_mode(self, key: DispatchKey, available_modes: Collection[DispatchMode]) -> DispatchMode:
        """The preferred one of ``available_modes`` for ``key``, or now and then one on trial; else ``EAGER``."""
        self._offered = available_modes
        order, place = self._table.get((key.num_tokens, key.is_prefill)) or self._look_up(key)
        if self._probes:
            # Popping is atomic, so that of several threads one gets the trial.
            probe = self._probes.pop(place, None)
            if probe is not None and probe in available_modes:
                return probe
        for mode in order:
            if mode in available_modes:
                return mode
        return _EAGER

    def record(self, key: DispatchKey, mode: DispatchMode, latency: float) -> None:
        """Learn that ``key`` ran in ``mode`` for ``latency`` milliseconds.

        Records count in the order in which they arrive. Raises ``ConfigError`` for values that no step can have.
        """
        if mode not in _MODES:
            raise ConfigError(f"mode must be EAGER, CUDAGRAPH or PIECEWISE, got {mode!r}; record what really ran")
        if not isfinite(latency) or latency < 0:
            raise ConfigError(f"latency must be a finite number of milliseconds >= 0, got {latency!r}")
        place = self._place(key)
        size = key.num_tokens if mode is _EAGER else place.graph_size
        with self._lock:
            self._records += 1
            self._spent_ms += latency
            standing = self._standing(place)
            self._settle(standing, place, key.num_tokens, mode, latency)
            curve = self._curves[mode, place.prefill]
            curve.add(place.bucket if mode is _EAGER else size, size, max(latency, _LEAST_MS), self._records)
            self._forget()
            order = self._rank(standing, place, key.num_tokens)
            standing.sightings += 1
            if order != standing.order or self._records % _REFRESH == 0:
                standing.order = order
                self._table = {}
            self._grant(standing, place, key.num_tokens)

    def record_capture(self, key: DispatchKey, latency: float) -> None:
        """Learn that capturing a graph for ``key`` took ``latency`` milliseconds; see ``should_capture``."""
        if not isfinite(latency) or latency < 0:
            raise ConfigError(f"latency must be a finite number of milliseconds >= 0, got {latency!r}")
        with self._lock:
            known = self._capture_ms
            self._capture_ms = latency if known is None else known + 0.25 * (latency - known)

    def should_capture(self, key: DispatchKey) -> bool:
        """Whether a graph for ``key`` would pay for its capture.

        Batches of its size are expected to come as often again as they came so far. Until captures, graphs and eager
        steps were measured, the second sighting decides.
        """
        place = self._place(key)
        low, high = self._limits
        if not low <= key.num_tokens <= high:
            return False
        with self._lock:
            sightings = sum(
                standing.sightings
                for other, standing in self._standings.items()
                if other.graph_size == place.graph_size and other.prefill == place.prefill
            )
        eager, graph = (self._at(mode, place, key.num_tokens) for mode in (_EAGER, _FULL))
        if eager is None or graph is None:
            return sightings >= _SECOND_SIGHTING
        if graph.mean >= eager.mean:
            return False
        return sightings >= _SECOND_SIGHTING and sightings * (eager.mean - graph.mean) >= (self._capture_ms or 0.0)

    def estimates(self, key: DispatchKey) -> dict[DispatchMode, Estimate]:
        """What ``key`` is thought to cost in each mode that has been measured at any size."""
        place = self._place(key)
        found = {mode: self._at(mode, place, key.num_tokens) for mode in _MODES}
        return {mode: estimate for mode, estimate in found.items() if estimate is not None}

    @property
    def min_tokens_for_graph(self) -> int:
        """The smallest measured number of tokens that prefers a graph, or the lower limit if the smallest does."""
        return self._thresholds()[0]

    @property
    def max_tokens_for_graph(self) -> int:
        """The largest measured number of tokens that prefers a graph, the upper limit if the largest does; 0: none."""
        return self._thresholds()[1]

    def to_dict(self) -> dict[str, Any]:
        """Settings and everything learnt, as plain data that JSON can hold; trials under way are left out."""
        with self._lock:
            return {
                "version": 1,
                "history_size": self.history_size,
                "sizes": None if self.sizes is None else list(self.sizes),
                "limits": list(self._limits),
                "exploration": self.exploration,
                "window": self.window,
                "records": self._records,
                "spent_ms": self._spent_ms,
                "explored_ms": self._explored_ms,
                "capture_ms": self._capture_ms,
                "curves": [
                    {"mode": mode.value, "prefill": prefill, "cells": [list(cell) for cell in curve.to_list()]}
                    for (mode, prefill), curve in self._curves.items()
                ],
                "places": [
                    place._asdict() | {"order": [mode.value for mode in standing.order], "seen": standing.sightings}
                    for place, standing in self._standings.items()
                ],
            }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], *, rng: random.Random | None = None) -> Self:
        """The policy that ``to_dict`` described. Raises ``ConfigError`` that names what is wrong with ``state``."""
        try:
            return cls._from_json(json.dumps(state), rng)
        except (TypeError, RecursionError) as error:
            raise ConfigError(f"state must be what to_dict() gives, got {reprlib.repr(state)}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the state to ``path`` as JSON, replacing a file there in one step."""
        path = Path(path)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(self.to_dict()), encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: str | Path, *, rng: random.Random | None = None) -> Self:
        """The policy that was saved to ``path``. Raises ``ConfigError`` for a file that holds none, or ``OSError``."""
        try:
            return cls._from_json(Path(path).read_bytes(), rng)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def __repr__(self) -> str:
        low, high = self._thresholds()
        return (
            f"<AdaptiveDispatchPolicy {self._records} records, {sum(map(len, self._curves.values()))} of "
            f"{self.history_size} estimates, graphs for {f'{low} to {high} tokens' if high else 'no size'}>"
        )

    @classmethod
    def _from_json(cls, text: str | bytes, rng: random.Random | None) -> Self:
        state = parse_state(text)
        low, high = state.limits
        policy = cls(
            state.history_size,
            sizes=state.sizes,
            min_tokens_for_graph=low,
            max_tokens_for_graph=high,
            exploration=state.exploration,
            window=state.window,
            rng=rng,
        )
        policy._records = state.records
        policy._spent_ms, policy._explored_ms = state.spent_ms, state.explored_ms
        policy._capture_ms = state.capture_ms
        for curve in state.curves:
            policy._curves[DispatchMode(curve.mode), curve.prefill] = CostCurve(state.window, curve.cells)
        for saved in state.places:
            order = tuple(map(DispatchMode, saved.order))
            policy._standings[_Place(saved.prefill, saved.graph_size, saved.bucket)] = _Standing(order, saved.seen)
        return policy

    def _place(self, key: DispatchKey) -> _Place:
        tokens = max(1, key.num_tokens)
        graph = tokens
        if self.sizes is not None and tokens <= self.sizes[-1]:
            graph = self.sizes[bisect_left(self.sizes, tokens)]
        return _Place(bool(key.is_prefill), graph, bucket_of(tokens))

    def _at(self, mode: DispatchMode, place: _Place, tokens: int) -> Estimate | None:
        curve = self._curves[mode, place.prefill]
        if mode is _EAGER:
            return curve.at(place.bucket, max(1, tokens), self._records)
        return curve.at(place.graph_size, place.graph_size, self._records)

    def _look_up(self, key: DispatchKey) -> tuple[tuple[DispatchMode, ...], _Place]:
        """The order of preference for ``key``, and its place; remembered in the table of the moment."""
        table = self._table
        found = table.get((key.num_tokens, key.is_prefill))
        if found is not None:
            return found
        place = self._place(key)
        standing = self._standings.get(place)
        order = self._rank(standing or _Standing(), place, key.num_tokens)
        if len(table) >= self.history_size:
            self._table = table = {}
        table[key.num_tokens, key.is_prefill] = order, place
        return order, place

    def _rank(self, standing: _Standing, place: _Place, tokens: int) -> tuple[DispatchMode, ...]:
        """The standing order, changed where estimates contradict it for sure; modes without any stay just before eager.

        A place without records has no order worth defending: the better guess is enough.
        """
        low, high = self._limits
        if not low <= tokens <= high:
            return (_EAGER, _FULL, _PIECEWISE)
        confidence = _CONFIDENCE if standing.sightings else 0.0
        ranked: list[tuple[DispatchMode, Estimate]] = []
        for mode in standing.order:
            estimate = self._at(mode, place, tokens)
            if estimate is None:
                continue
            spot = len(ranked)
            while spot and estimate.beats(ranked[spot - 1][1], confidence):
                spot -= 1
            ranked.insert(spot, (mode, estimate))
        known = [mode for mode, _ in ranked]
        unknown = [mode for mode in _MODES if mode not in known]
        spot = known.index(_EAGER) if _EAGER in known else len(known)
        return (*known[:spot], *unknown, *known[spot:])

    def _standing(self, place: _Place) -> _Standing:
        """What is remembered of ``place``, moved to the end of the order in which places are forgotten."""
        standing = self._standings.pop(place, None) or _Standing()
        self._standings[place] = standing
        if len(self._standings) > self.history_size:
            del self._standings[next(iter(self._standings))]
        return standing

    def _forget(self) -> None:
        while sum(map(len, self._curves.values())) > self.history_size:
            min(self._curves.values(), key=lambda curve: curve.oldest).drop_oldest()

    def _settle(self, standing: _Standing, place: _Place, tokens: int, mode: DispatchMode, latency: float) -> None:
        """Charge a trial that has come back with what it cost more than the preferred mode."""
        if standing.probing is not mode:
            return
        standing.probing = None
        preferred = next((m for m in standing.order if m in self._offered), mode)
        best = self._at(preferred, place, tokens)
        if best is not None and preferred is not mode:
            self._explored_ms = max(0.0, self._explored_ms + latency - best.mean)

    def _grant(self, standing: _Standing, place: _Place, tokens: int) -> None:
        """Have the most promising other mode tried at ``place`` next time, if the budget allows it."""
        low, high = self._limits
        waiting = standing.probing is not None and self._records < standing.next_probe + _LOST_AFTER
        if waiting or self._records < standing.next_probe or not low <= tokens <= high:
            return
        offered = self._offered
        order = [mode for mode in standing.order if mode in offered]
        best = self._at(order[0], place, tokens) if order else None
        if best is None:
            return
        choices = []
        for mode in order[1:]:
            estimate = self._at(mode, place, tokens) or Estimate(_UNKNOWN_COST * best.mean, 1.0)
            choices.append((estimate.hopeful - best.mean, estimate.mean - best.mean, mode))
        if not choices:
            return
        hope, extra, mode = min(choices, key=lambda choice: choice[0])
        share = self.exploration if hope < 0 else self.exploration * _CHECKS
        if self._explored_ms + max(0.0, extra) <= share * self._spent_ms:
            for old in list(self._probes)[: 1 - _PROBES_AT_ONCE]:
                self._probes.pop(old, None)
            self._probes[place] = mode
            standing.probing = mode
            standing.next_probe = self._records + self._rng.randint(1, 2 * _PROBE_GAP)

    def _thresholds(self) -> tuple[int, int]:
        low, high = self._limits
        with self._lock:
            keys = sorted(
                DispatchKey(tokens, 1, 0, prefill)
                for (_, prefill), curve in self._curves.items()
                for tokens in curve.buckets
                if low <= tokens <= high
            )
        if not keys:
            return low, high
        graphs = [key.num_tokens for key in keys if self.should_use_graph(key, True)]
        if not graphs:
            return low, 0
        first = low if graphs[0] == keys[0].num_tokens else graphs[0]
        return first, high if graphs[-1] == keys[-1].num_tokens else graphs[-1]
