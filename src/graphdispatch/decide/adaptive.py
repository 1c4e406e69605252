"""``AdaptiveDispatchPolicy``: learns from measured step times which mode serves which size best, and keeps learning."""

import json
import random
import reprlib
import threading
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Self

from ..descriptors import DispatchKey
from ..errors import ConfigError
from ..modes import DispatchMode
from ..sizes import check_sizes
from .adaptive_state import GRAPHS, MODES, Place, Standing, parse_state
from .estimates import CostCurve, Estimate, bucket_of
from .policies import DispatchPolicy

__all__ = ["AdaptiveDispatchPolicy"]

_EAGER, _FULL = DispatchMode.EAGER, DispatchMode.CUDAGRAPH
_KINDS = tuple(product((False, True), MODES))
"""Prefill or not, and mode: each has a cost curve."""

_UNKNOWN_COST = 2.0  # what a mode without any record may cost, as a multiple of the best: only the budget needs it
_PROBE_GAP = 8  # records of a place between two probes there, in the mean
_PROBES_AT_ONCE = 4
_CHECKS = 0.5  # the part of the budget up to which modes known to be slower are looked at again
_LOST_AFTER = 256  # records after which a trial that has not come back is given up
_REFRESH = 1024  # records after which choices for sizes that have none are guessed anew
_FORGET = 8  # where there is too much to remember, room is made for one part in so many at once
_LEAST_MS = 1e-6
_SECOND_SIGHTING = 2


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
    many places are kept, an eighth of them, idle longest, goes first; of a long history an estimate weighs about
    ``window`` records. ``rng`` spreads the trials over the steps; by default it is seeded, so that equal histories
    give equal decisions.

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
            ("history_size", history_size, len(MODES)),
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
        self._curves = {kind: CostCurve(window) for kind in _KINDS}
        self._standings: dict[Place, Standing] = {}
        self._table: dict[tuple[int, bool], Standing] = {}
        self._probes: dict[Standing, DispatchMode] = {}
        self._offered: Collection[DispatchMode] = MODES
        self._version = 0
        self._kept = history_size - history_size // _FORGET
        self._records = 0
        self._spent_ms = self._explored_ms = 0.0
        self._capture_ms: float | None = None

    def should_use_graph(self, key: DispatchKey, graph_available: bool) -> bool:
        """Whether there is a graph and it is preferred to eager for ``key``."""
        standing = self._table.get((key.num_tokens, key.is_prefill)) or self._look_up(key)
        before = standing.order[: standing.order.index(_EAGER)]
        if not graph_available or not before:
            return False
        # A kind of graph that never ran says nothing, unless no other did.
        known = [mode for mode, curve in zip(GRAPHS, standing.curves, strict=False) if curve.buckets]
        return not known or any(mode in before for mode in known)

    def select_mode(self, key: DispatchKey, available_modes: Collection[DispatchMode]) -> DispatchMode:
        """The preferred one of ``available_modes`` for ``key``, or now and then one on trial; else ``EAGER``."""
        self._offered = available_modes
        standing = self._table.get((key.num_tokens, key.is_prefill)) or self._look_up(key)
        if self._probes:
            # Popping is atomic, so that of several threads one gets the trial.
            probe = self._probes.pop(standing, None)
            if probe is not None and probe in available_modes:
                return probe
        for mode in standing.order:
            if mode in available_modes:
                return mode
        return _EAGER

    def record(self, key: DispatchKey, mode: DispatchMode, latency: float) -> None:
        """Learn that ``key`` ran in ``mode`` for ``latency`` milliseconds.

        Records count in the order in which they arrive. Most only add to sums: an order of preference is reviewed after
        1, 2, 4, at most 16 further records of its place, and at once where costs near by have changed. Raises
        ``ConfigError`` for values that no step can have.
        """
        if mode not in MODES:
            raise ConfigError(f"mode must be EAGER, CUDAGRAPH or PIECEWISE, got {mode!r}; record what really ran")
        if not 0 <= latency < inf:
            raise ConfigError(f"latency must be a finite number of milliseconds >= 0, got {latency!r}")
        tokens = key.num_tokens
        with self._lock:
            self._records = now = self._records + 1
            self._spent_ms += latency
            standing = self._table.get((tokens, key.is_prefill)) or self._look_up(key)
            standing.stamp = now
            _, size, bucket = standing.place
            if mode is not _EAGER:
                tokens = bucket = size
            curve = standing.curves[MODES.index(mode)]
            news = curve.add(bucket, tokens or 1, latency if latency > _LEAST_MS else _LEAST_MS, now)
            if news or standing.sightings >= standing.due or standing.probing is mode:
                self._review(standing, key.num_tokens, mode, latency, news)
            standing.sightings += 1
            if now % _REFRESH == 0:
                self._table = {}

    def record_capture(self, key: DispatchKey, latency: float) -> None:
        """Learn that capturing a graph for ``key`` took ``latency`` milliseconds; see ``should_capture``."""
        if not 0 <= latency < inf:
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
            alike = [standing for other, standing in self._standings.items() if other[:2] == place[:2]]
            sightings = sum(standing.sightings for standing in alike)
        found = self.estimates(key)
        eager, graph = found.get(_EAGER), found.get(_FULL)
        if eager is None or graph is None:
            return sightings >= _SECOND_SIGHTING
        if graph.mean >= eager.mean:
            return False
        return sightings >= _SECOND_SIGHTING and sightings * (eager.mean - graph.mean) >= (self._capture_ms or 0.0)

    def estimates(self, key: DispatchKey) -> dict[DispatchMode, Estimate]:
        """What ``key`` is thought to cost in each mode that has been measured at any size."""
        return self._look_up(key).estimates(key.num_tokens, self._records)

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
                    for (prefill, mode), curve in self._curves.items()
                ],
                "places": [
                    place._asdict() | {"order": [mode.value for mode in standing.order], "seen": standing.sightings}
                    for place, standing in sorted(self._standings.items(), key=lambda item: item[1].stamp)
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
            policy._curves[curve.prefill, DispatchMode(curve.mode)] = CostCurve(state.window, curve.cells)
        for saved in state.places:
            place = Place(saved.prefill, saved.graph_size, saved.bucket)
            order = tuple(map(DispatchMode, saved.order))
            policy._standings[place] = Standing(place, policy._curves_of(place), order, saved.seen)
        return policy

    def _place(self, key: DispatchKey) -> Place:
        tokens = max(1, key.num_tokens)
        graph = bucket = bucket_of(tokens)
        if self.sizes is None:
            graph = tokens
        elif tokens <= self.sizes[-1]:
            graph = self.sizes[bisect_left(self.sizes, tokens)]
        return Place(bool(key.is_prefill), graph, bucket)

    def _curves_of(self, place: Place) -> tuple[CostCurve, ...]:
        return tuple(self._curves[place.prefill, mode] for mode in MODES)

    def _look_up(self, key: DispatchKey) -> Standing:
        """What is remembered of ``key``'s place, or a guess at it; ready for the next time in the table of the moment.

        A place is ranked anew, and reviewed at its next record, if there was news since it last was. The table is
        taken before the places are looked at, and who changes the places then swaps the table: a guess that has been
        overtaken ends up in a table that nobody reads any more.
        """
        if len(self._table) >= self.history_size:
            self._table = {}
        table, place = self._table, self._place(key)
        low, high = self._limits
        if low <= key.num_tokens <= high:
            standing = self._standings.get(place) or Standing(place, self._curves_of(place))
            if standing.version != self._version:
                standing.version = self._version
                standing.order = standing.ranked(standing.estimates(key.num_tokens, self._records))
                standing.due = 0
        else:
            standing = Standing(place, self._curves_of(place), (_EAGER, *GRAPHS))
            standing.due = inf
        table[key.num_tokens, key.is_prefill] = standing
        return standing

    def _review(self, standing: Standing, tokens: int, mode: DispatchMode, latency: float, news: bool) -> None:
        """Rank the modes anew after a record of ``latency`` milliseconds in ``mode``, and grant a trial.

        ``news`` says that the record was the first of its estimate, or that its cost has drifted.
        """
        if news:
            self._forget()
        if standing.due == inf:
            return
        found = standing.estimates(tokens, self._records)
        if standing.probing is mode:
            self._settle(standing, mode, latency, found)
        order = standing.ranked(found)
        news = news or order != standing.order
        if news or not standing.sightings:
            self._remember(standing, order)
        standing.reviewed(news)
        self._grant(standing, found)

    def _remember(self, standing: Standing, order: tuple[DispatchMode, ...]) -> None:
        """Keep ``standing`` with a new order, and let all other places know that there was news."""
        standing.order = order
        self._standings[standing.place] = standing
        if len(self._standings) > self.history_size:
            idle = sorted(self._standings.values(), key=lambda standing: standing.stamp)
            self._standings = {kept.place: kept for kept in idle[-self._kept :]}
        self._version += 1
        standing.version = self._version
        self._table = {}

    def _forget(self) -> None:
        """Drop the idlest estimates, if there are too many."""
        if sum(map(len, self._curves.values())) > self.history_size:
            stamps = sorted(stamp for curve in self._curves.values() for stamp in curve.stamps)
            for curve in self._curves.values():
                curve.forget(stamps[-self._kept - 1])

    def _settle(
        self, standing: Standing, mode: DispatchMode, latency: float, found: Mapping[DispatchMode, Estimate]
    ) -> None:
        """Charge a trial that has come back with what it cost more than the preferred mode."""
        standing.probing = None
        preferred = next((m for m in standing.order if m in self._offered), mode)
        if preferred in found and preferred is not mode:
            self._explored_ms = max(0.0, self._explored_ms + latency - found[preferred].mean)

    def _grant(self, standing: Standing, found: Mapping[DispatchMode, Estimate]) -> None:
        """Have the most promising other mode tried at a place next time, if the budget allows it."""
        waiting = standing.probing is not None and self._records < standing.next_probe + _LOST_AFTER
        offered = self._offered
        order = [mode for mode in standing.order if mode in offered]
        if waiting or self._records < standing.next_probe or len(order) < 2 or order[0] not in found:
            return
        best = found[order[0]]
        unknown = Estimate(_UNKNOWN_COST * best.mean, 1.0)
        mode, tried = min(
            ((mode, found.get(mode, unknown)) for mode in order[1:]), key=lambda choice: choice[1].hopeful
        )
        share = self.exploration if tried.hopeful < best.mean else self.exploration * _CHECKS
        if self._explored_ms + max(0.0, tried.mean - best.mean) <= share * self._spent_ms:
            for old in list(self._probes)[: 1 - _PROBES_AT_ONCE]:
                self._probes.pop(old, None)
            self._probes[standing] = mode
            standing.probing = mode
            standing.next_probe = self._records + self._rng.randint(1, 2 * _PROBE_GAP)

    def _thresholds(self) -> tuple[int, int]:
        low, high = self._limits
        with self._lock:
            keys = sorted(
                DispatchKey(tokens, 1, 0, prefill)
                for (prefill, _), curve in self._curves.items()
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
