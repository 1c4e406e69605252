"""The immutable table behind a key dispatcher: every decision that its keys allow, made in advance.

A batch is uniform decode (every request schedules the same number of tokens, its *query length*) or mixed. Graphs are
preferred in this order: FULL before PIECEWISE, then the nearest size, the nearest variant, a uniform graph before a
general one, and the one captured for fewer requests.
"""

import sys
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from itertools import repeat
from types import MappingProxyType
from typing import NamedTuple

from ..descriptors import BatchDescriptor
from ..errors import ConfigError, FallbackError
from ..modes import CUDAGraphMode
from ..reasons import Reason
from .decision import Decision
from .ladders import (
    NO_ROWS,
    Ladder,
    group_by_kind,
    make_decisions,
    order_variants,
    steps_by_variant,
)

__all__ = ["RUNTIME_MODES", "CostModel", "KeyTable", "Row"]

CostModel = Callable[[CUDAGraphMode, int, int], float]
"""``cost(mode, padded, real)``: what a step of ``real`` tokens costs, padded; asked with mode NONE for eager."""

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
RUNTIME_MODES = frozenset((NONE, PIECEWISE, FULL))
"""The modes that one batch can run in."""

_GRAPHS = RUNTIME_MODES - {NONE}
_SUBSETS = (_GRAPHS, frozenset((FULL,)), frozenset((PIECEWISE,)), frozenset[CUDAGraphMode]())
_EMPTY = Ladder(NONE, {})

# Counts between two captured ones get rows of their own (the same objects) where the gap is no wider than this.
_WIDEST_GAP = 64

# _Answers are held in advance for batches of up to this many tokens, graph or none, so that a miss is a lookup too.
_LEAST_REACH = 8192


_Answers = dict[BatchDescriptor, tuple[CUDAGraphMode, BatchDescriptor]]
_Rows = dict[tuple[int | None, Hashable, object], "Row"]


class Row(NamedTuple):
    """The decisions for one kind of batch by number of tokens; beyond their end the misses, and why they are."""

    decisions: tuple[Decision, ...]
    misses: tuple[Decision, ...]
    reason: Reason
    detail: str


class KeyTable:
    """Every decision that a set of keys allows, made once. Immutable, so that any number of threads may read it.

    ``mode`` is the configured mode and ``query_len`` the uniform query length, both None while the keys are not
    initialised: then nothing is served. No batch has more than ``max_num_reqs`` requests. Decisions are held in advance
    for all batches up to the largest size, and those without a graph up to ``max_num_tokens``: memory grows with these
    numbers, the captured variants and query lengths. ``cost`` is asked about each of them, once.
    """

    def __init__(
        self,
        keys: Mapping[CUDAGraphMode, Collection[BatchDescriptor]],
        *,
        mode: CUDAGraphMode | None = None,
        query_len: int | None = None,
        max_num_reqs: int | None = None,
        max_num_tokens: int | None = None,
        cost: CostModel | None = None,
    ) -> None:
        self.keys: Mapping[CUDAGraphMode, frozenset[BatchDescriptor]] = MappingProxyType(
            {graph: frozenset(keys.get(graph, ())) for graph in (PIECEWISE, FULL)}
        )
        """All keys, by runtime mode."""
        self.mode, self.query_len, self.max_num_reqs, self.cost = mode, query_len, max_num_reqs, cost
        served = self.keys if mode is not None else dict.fromkeys(self.keys, frozenset[BatchDescriptor]())
        kinds = group_by_kind(served, query_len)
        self.query_lens = tuple(sorted({kind for _, kind in kinds if kind is not None}))
        """The uniform query lengths that have graphs of their own."""
        self._kinds = frozenset((*self.query_lens, query_len)) - {None}
        self.variants, self._counts = order_variants(key.variant for group in kinds.values() for key in group)
        self._known = frozenset(self.variants or (None,))
        self.ladders = {
            (graph, kind, variant): Ladder(graph, steps)
            for (graph, kind), group in kinds.items()
            for variant, steps in steps_by_variant(group, self.variants).items()
        }
        """The ladders by mode, query length (None: mixed) and variant."""
        limits = [limit for ladder in self.ladders.values() for limit in ladder.limits]
        self.free = min(limits, default=sys.maxsize)
        """The number of requests up to which no request limit of any graph binds."""
        self.rows = self._rows((max_num_tokens or 0) + 1)
        """The rows by query length, variant and the modes allowed (None: all; a frozenset with NONE)."""
        self.piecewise_answers = _general_answers(PIECEWISE, served[PIECEWISE])
        """What a descriptor is dispatched to without full graphs; one without a graph is missing."""
        full = _general_answers(FULL, served[FULL]) | _uniform_answers(served[FULL], query_len)
        self.answers = self.piecewise_answers | full
        """What a descriptor is dispatched to: the exact full graph, a general full one, a general piecewise one."""

    def decide(
        self,
        num_tokens: int,
        num_reqs: int | None = None,
        *,
        query_len: int | None = None,
        variant: Hashable = None,
        allowed_modes: Collection[CUDAGraphMode] | None = None,
        excluded_modes: Collection[CUDAGraphMode] = (),
    ) -> Decision:
        """The decision for any batch, as ``CudagraphKeyDispatcher.decide`` documents it."""
        if num_tokens < 0 or (query_len is not None and query_len < 1):
            raise ConfigError(
                f"num_tokens must be >= 0 and query_len >= 1 or None, got {num_tokens} and {query_len}; "
                "a mixed batch has query_len=None"
            )
        if query_len is not None:
            reqs = num_tokens // query_len if num_reqs is None else num_reqs
            query_len = query_len if reqs * query_len == num_tokens else None
        graphs, may_be_eager = _parse_modes(allowed_modes, excluded_modes)
        decision = self._lookup(num_tokens, num_reqs, query_len, variant, graphs, may_be_eager)
        if decision.mode is NONE and not may_be_eager and num_tokens:
            raise FallbackError(
                f"allowed_modes must hold NONE for a batch that no graph serves, got {_names(graphs)} for "
                f"{num_tokens} tokens: {decision.explain()}; allow NONE, or capture a graph for it",
                decision.reason,
            )
        return decision

    def _lookup(
        self,
        num_tokens: int,
        num_reqs: int | None,
        query_len: int | None,
        variant: Hashable,
        graphs: frozenset[CUDAGraphMode],
        may_be_eager: bool,
    ) -> Decision:
        served = self._served(variant)
        if served not in self._known:
            detail = f"{Reason.VARIANT_NOT_CAPTURED.text} (asked: {variant!r}, captured: {_names(self.variants)})"
            return Decision.eager(Reason.VARIANT_NOT_CAPTURED, num_tokens, detail)
        variant = served
        kind = query_len if query_len in self._kinds else None
        row = self.rows[kind, variant, None if graphs == _GRAPHS else graphs | {NONE}]
        decision = _at(row, num_tokens)
        if decision.reason is Reason.MIXED_BATCH and query_len is not None:
            detail = f"{Reason.QUERY_LEN_NOT_CAPTURED.text} (asked: {query_len}, captured: {_names(self.query_lens)})"
            return Decision.eager(Reason.QUERY_LEN_NOT_CAPTURED, num_tokens, detail)
        reqs = num_reqs if num_reqs is not None else self._most_requests(num_tokens, query_len)
        forced = decision.reason is Reason.POLICY and not may_be_eager
        if num_tokens and (forced or (reqs > self.free and decision.reason is not Reason.MODE_EXCLUDED)):
            found = {graph: self._ladder(graph, kind, variant).find(num_tokens, reqs) for graph in graphs}
            if any(found.values()):
                return _choose(num_tokens, found, self.cost, may_be_eager)
            if decision.mode is not NONE:
                return Decision.eager(Reason.TOO_MANY_REQUESTS, num_tokens)
        return decision

    def _most_requests(self, num_tokens: int, query_len: int | None) -> int:
        most = num_tokens // (query_len or 1)
        return most if self.max_num_reqs is None else min(most, self.max_num_reqs)

    def _served(self, variant: Hashable) -> Hashable:
        """The captured variant that serves this one, or the same if none does; any, without variants at all."""
        if not self.variants:
            return None
        if variant in self._known or not isinstance(variant, int):
            return variant
        index = bisect_left(self._counts, variant)
        return self._counts[index] if index < len(self._counts) else variant

    def _ladder(self, graph: CUDAGraphMode, kind: int | None, variant: Hashable) -> Ladder:
        found = self.ladders.get((graph, kind, variant)) or self.ladders.get((graph, None, variant))
        return found if found is not None else _EMPTY

    def _rows(self, reach: int) -> _Rows:
        length = max((len(ladder.decisions) for ladder in self.ladders.values()), default=1)
        eager = _EagerRuns(length, max(length, reach))
        rows: _Rows = {}
        for variant in self.variants or (None,):
            for graphs in _SUBSETS:
                mixed = self._row(None, variant, graphs, eager)
                found: dict[int | None, Row] = {None: mixed}
                for query_len in self._kinds:
                    uniform = self._row(query_len, variant, graphs, eager)
                    # A number of tokens that the query length does not divide cannot be uniform.
                    merged = list(mixed.decisions)
                    merged[::query_len] = uniform.decisions[::query_len]
                    found[query_len] = uniform._replace(decisions=tuple(merged))
                for kind, row in found.items():
                    rows[kind, variant, graphs | {NONE}] = row
                    if graphs == _GRAPHS:
                        rows[kind, variant, None] = row
        self._fill_gaps(rows)
        return rows

    def _row(self, kind: int | None, variant: Hashable, graphs: frozenset[CUDAGraphMode], eager: "_EagerRuns") -> Row:
        ladders = {graph: self._ladder(graph, kind, variant) for graph in (FULL, PIECEWISE)}
        hits: list[Decision] = []
        for graph, ladder in ladders.items():
            if graph in graphs:
                hits += ladder.decisions[len(hits) :]
        if self.cost is not None:
            allowed = [(graph, ladder) for graph, ladder in ladders.items() if graph in graphs]
            hits[1:] = [
                _choose(rows, {graph: ladder.find(rows, 0) for graph, ladder in allowed}, self.cost, True)
                for rows in range(1, len(hits))
            ]
        largest = max(len(ladder.decisions) for ladder in ladders.values()) - 1
        reason, detail = self._beyond(kind, largest)
        hits = hits or [NO_ROWS]
        hits += eager.run(Reason.MODE_EXCLUDED, "")[len(hits) : largest + 1]
        misses = eager.run(reason, detail)
        hits += misses[len(hits) : eager.length]
        return Row(tuple(hits), misses, reason, detail)

    def _beyond(self, kind: int | None, largest: int) -> tuple[Reason, str]:
        if self.mode is None:
            return Reason.NOT_INITIALIZED, ""
        if not self.ladders:
            return (Reason.DISABLED if self.mode is NONE else Reason.NOT_CAPTURED), ""
        if largest:
            detail = f"the batch is larger than the largest graph for it ({largest}); capture a larger size"
            return Reason.ABOVE_LARGEST_SIZE, detail
        if kind is None and self.query_lens:
            return Reason.MIXED_BATCH, ""
        return (Reason.QUERY_LEN_NOT_CAPTURED if self.query_lens else Reason.NOT_CAPTURED), ""

    def _fill_gaps(self, rows: _Rows) -> None:
        previous = -1
        for count in self._counts:
            of_count = [(key, row) for key, row in rows.items() if key[1] == count]
            for between in range(max(previous + 1, count - _WIDEST_GAP), count):
                rows.update({(kind, between, modes): row for (kind, _, modes), row in of_count})
            previous = count


class _EagerRuns:
    """Eager decisions for all numbers of tokens below ``reach``, made once for each reason and detail.

    ``length`` is the common length of the rows that are filled up with them.
    """

    def __init__(self, length: int, reach: int) -> None:
        self.length = length
        self._reach = reach
        self._made: dict[tuple[Reason, str], tuple[Decision, ...]] = {}

    def run(self, reason: Reason, detail: str) -> tuple[Decision, ...]:
        """The decisions of one reason, by number of tokens."""
        if (reason, detail) not in self._made:
            counts = range(self._reach)
            self._made[reason, detail] = make_decisions(NONE, repeat(None), counts, repeat(reason), counts, detail)
        return self._made[reason, detail]


def _at(row: Row, num_tokens: int) -> Decision:
    if num_tokens < len(row.decisions):
        return row.decisions[num_tokens]
    if num_tokens < len(row.misses):
        return row.misses[num_tokens]
    return Decision.eager(row.reason, num_tokens, row.detail)


def _choose(
    num_tokens: int, found: Mapping[CUDAGraphMode, BatchDescriptor | None], cost: CostModel | None, may_be_eager: bool
) -> Decision:
    """The best of the graphs found: the better mode, or the cheaper one where there is a cost model."""
    graphs = [(graph, key) for graph in (FULL, PIECEWISE) if (key := found.get(graph)) is not None]
    best = 0
    if cost is not None:
        costs = [cost(graph, key.num_tokens, num_tokens) for graph, key in graphs]
        best = min(range(len(costs)), key=costs.__getitem__)
        if may_be_eager and cost(NONE, num_tokens, num_tokens) < costs[best]:
            return Decision.eager(Reason.POLICY, num_tokens, "the cost model expects eager to be cheaper")
    graph, key = graphs[best]
    reason = Reason.EXACT if key.num_tokens == num_tokens else Reason.PADDED
    return Decision(graph, key, key.num_tokens, reason, num_tokens)


def _general_answers(mode: CUDAGraphMode, keys: Collection[BatchDescriptor]) -> _Answers:
    """What the keys of any kind of batch answer: themselves, and the uniform descriptor of the same size."""
    answers: _Answers = {}
    for key in keys:
        num_tokens, num_reqs, uniform, variant = key
        if not uniform:
            answers[key] = answers[BatchDescriptor(num_tokens, num_reqs, True, variant)] = (mode, key)
    return answers


def _uniform_answers(keys: Collection[BatchDescriptor], query_len: int | None) -> _Answers:
    """What the uniform keys answer: themselves, and, at the initialised query length, without the requests."""
    uniform = [key for key in keys if key.is_uniform_decode]
    staged = [key for key in uniform if key.num_reqs is not None and key.num_reqs * (query_len or 0) == key.num_tokens]
    answers: _Answers = {key._replace(num_reqs=None): (FULL, key) for key in staged}
    answers.update((key, (FULL, key)) for key in uniform)
    return answers


def _parse_modes(
    allowed: Collection[CUDAGraphMode] | None, excluded: Collection[CUDAGraphMode]
) -> tuple[frozenset[CUDAGraphMode], bool]:
    """The graph modes left, and whether eager is; new sets, so that the caller's own stay as they are."""
    left = RUNTIME_MODES if allowed is None else frozenset(allowed)
    if excluded:
        left -= frozenset(excluded)
    if not left or not left <= RUNTIME_MODES:
        raise ConfigError(
            f"allowed_modes less excluded_modes must leave some of NONE, PIECEWISE and FULL, got {_names(left)}; "
            "a configured mode such as FULL_AND_PIECEWISE is not the mode of one batch"
        )
    return _PARSED[left]


# One object for each choice: the rows are found by it.
_PARSED = {graphs: (graphs, False) for graphs in _SUBSETS} | {graphs | {NONE}: (graphs, True) for graphs in _SUBSETS}


def _names(values: Iterable[object]) -> str:
    return ", ".join(str(getattr(value, "name", value)) for value in values) or "none"
