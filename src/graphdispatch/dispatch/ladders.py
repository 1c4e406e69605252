"""Ladders: the graphs that one kind of batch may use in one mode, in order of preference.

A batch is uniform decode (every request schedules the same number of tokens, its *query length*) or mixed. Within a
mode the nearest size comes first, then the nearest variant, then a uniform graph before a general one, then the one
captured for fewer requests.
"""

import sys
from collections.abc import Collection, Hashable, Iterable, Mapping
from functools import partial
from itertools import repeat

from ..descriptors import BatchDescriptor
from ..modes import CUDAGraphMode
from ..reasons import Reason
from .decision import Decision

__all__ = [
    "NO_ROWS",
    "Ladder",
    "group_by_kind",
    "make_decisions",
    "order_variants",
    "query_len_of",
    "request_limit",
    "steps_by_variant",
]

_Kind = tuple[CUDAGraphMode, int | None]
_Steps = dict[int, list[BatchDescriptor]]

# Half the cost of Decision(...), which matters for the hundred thousand decisions of a large table.
_new = partial(tuple.__new__, Decision)

NO_ROWS = Decision.eager(Reason.NO_ROWS)
"""The decision for an empty batch."""


def request_limit(key: BatchDescriptor) -> int:
    """The most requests of a batch that the graph of ``key`` serves, ``sys.maxsize`` where its tokens already say."""
    if key.num_reqs is None or key.is_uniform_decode or key.num_reqs >= key.num_tokens:
        return sys.maxsize
    return key.num_reqs


def query_len_of(key: BatchDescriptor, default: int | None) -> int | None:
    """The query length that a uniform graph serves, ``default`` if its key names no requests; None if no batch fits."""
    if key.num_reqs is None:
        return default if default and key.num_tokens % default == 0 else None
    return key.num_tokens // key.num_reqs if key.num_reqs > 0 and key.num_tokens % key.num_reqs == 0 else None


def make_decisions(
    mode: CUDAGraphMode,
    keys: Iterable[BatchDescriptor | None],
    sizes: Iterable[int],
    reasons: Iterable[Reason],
    rows: Iterable[int],
    detail: str = "",
) -> tuple[Decision, ...]:
    """Many decisions at once, as long as the shortest of the arguments."""
    return tuple(map(_new, zip(repeat(mode), keys, sizes, reasons, rows, repeat(detail))))


class Ladder:
    """The graphs of one mode that one kind of batch may use, nearest size first. Immutable.

    ``decisions[n]`` is the answer for ``n`` tokens, up to the largest size, where no request limit binds.
    """

    __slots__ = ("_first", "decisions", "keys", "limits")

    def __init__(self, mode: CUDAGraphMode, steps: Mapping[int, Iterable[BatchDescriptor]]) -> None:
        keys: list[BatchDescriptor] = []
        first: list[int] = []
        sizes: list[int] = []
        for size in sorted(steps):
            missing = size + 1 - len(first)
            first += [len(keys)] * missing
            sizes += [size] * missing
            keys += steps[size]
        reasons = [Reason.PADDED] * len(sizes)
        for size in steps:
            reasons[size] = Reason.EXACT
        self.keys = tuple(keys)
        self.limits = tuple(map(request_limit, keys))
        decisions = make_decisions(mode, map(keys.__getitem__, first), sizes, reasons, range(len(sizes)))
        self.decisions = (NO_ROWS, *decisions[1:])
        self._first = tuple(first)

    def find(self, num_tokens: int, num_reqs: int) -> BatchDescriptor | None:
        """The first graph with room for this many tokens and requests; walks past those for fewer requests."""
        if num_tokens >= len(self._first):
            return None
        for index in range(self._first[num_tokens], len(self.keys)):
            if num_reqs <= self.limits[index]:
                return self.keys[index]
        return None


def group_by_kind(
    keys: Mapping[CUDAGraphMode, Collection[BatchDescriptor]], query_len: int | None
) -> dict[_Kind, list[BatchDescriptor]]:
    """The graphs that each kind of batch may use; a uniform batch may use the general ones as well."""
    kinds: dict[_Kind, list[BatchDescriptor]] = {}
    for mode, descriptors in keys.items():
        for key in descriptors:
            if not key.is_uniform_decode:
                kinds.setdefault((mode, None), []).append(key)
            elif mode is CUDAGraphMode.FULL and (served := query_len_of(key, query_len)) is not None:
                kinds.setdefault((mode, served), []).append(key)
    general = kinds.get((CUDAGraphMode.FULL, None), [])
    return {(mode, kind): [*group, *(general if kind else ())] for (mode, kind), group in kinds.items()}


def order_variants(found: Iterable[Hashable]) -> tuple[tuple[Hashable, ...], tuple[int, ...]]:
    """All variants, and those that can be rounded up to: the integers, in increasing order."""
    distinct = set(found)
    counts = tuple(sorted(variant for variant in distinct if isinstance(variant, int)))
    others = sorted((variant for variant in distinct if not isinstance(variant, int)), key=repr)
    return (*others, *counts), counts


def steps_by_variant(group: Iterable[BatchDescriptor], variants: tuple[Hashable, ...]) -> dict[Hashable, _Steps]:
    """By variant and size: the graphs in order of preference, each for more requests than those before it."""
    own: dict[Hashable, _Steps] = {variant: {} for variant in variants}
    for key in group:
        own[key.variant].setdefault(key.num_tokens, []).append(key)
    steps: dict[Hashable, _Steps] = {}
    above: _Steps = {}
    for variant in reversed(variants):
        merged = dict(above) if isinstance(variant, int) else {}
        for size, keys in own[variant].items():
            merged[size] = _rising(keys, merged.get(size, []))
        steps[variant] = merged
        if isinstance(variant, int):
            above = merged
    return steps


def _rising(keys: list[BatchDescriptor], larger_variants: list[BatchDescriptor]) -> list[BatchDescriptor]:
    if len(keys) > 1:
        # The order is total, so that every process decides alike, whatever order its sets have.
        keys = sorted(keys, key=lambda key: (not key.is_uniform_decode, request_limit(key), key.num_reqs or 0))
    kept = keys[:1]
    if kept[0].num_reqs is None:
        return kept
    for key in (*keys[1:], *larger_variants):
        if request_limit(key) > request_limit(kept[-1]):
            kept.append(key)
    return kept
