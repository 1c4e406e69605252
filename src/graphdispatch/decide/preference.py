"""Key lists: the keys of the graphs that one kind of batch may use in one mode, in order of preference.

A batch is uniform decode (every request schedules the same number of tokens, its *query length*) or mixed.
"""

import sys
from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterable, Mapping

from ..descriptors import BatchDescriptor
from ..modes import CUDAGraphMode

__all__ = ["KeyKind", "KeyList", "keys_by_kind", "order_variants", "query_len_of", "request_limit"]

KeyKind = tuple[CUDAGraphMode, int | None, Hashable]
"""What a graph serves besides its size: a mode, the query length of uniform batches (None: any batch), a variant."""


def request_limit(key: BatchDescriptor) -> int:
    """The most requests that a batch may have for the graph of ``key``; ``sys.maxsize`` if only its tokens limit it."""
    num_tokens, num_reqs, is_uniform_decode, _ = key
    if num_reqs is None or is_uniform_decode or num_reqs >= num_tokens:
        return sys.maxsize
    return num_reqs


def query_len_of(key: BatchDescriptor, default: int | None) -> int | None:
    """The query length that a uniform graph serves: ``default`` if its key names no requests. None if no batch fits."""
    if key.num_reqs is None:
        return default if default and key.num_tokens % default == 0 else None
    return key.num_tokens // key.num_reqs if key.num_reqs > 0 and key.num_tokens % key.num_reqs == 0 else None


class KeyList:
    """The keys of one kind, in order of preference: smaller sizes first, then fewer requests."""

    __slots__ = ("_keys", "_limits", "_sizes")

    def __init__(self, keys: Iterable[BatchDescriptor]) -> None:
        # No two keys compare equal, so that every process decides alike, whatever order its sets have.
        self._keys = sorted(keys, key=lambda key: (key.num_tokens, request_limit(key), key.num_reqs or 0))
        self._sizes = [key.num_tokens for key in self._keys]
        self._limits = [request_limit(key) for key in self._keys]

    @property
    def largest(self) -> int:
        """The largest size, or 0 if there is none."""
        return self._sizes[-1] if self._sizes else 0

    def find(self, num_tokens: int, num_reqs: int) -> BatchDescriptor | None:
        """The first key with room for this many tokens and requests, or None."""
        for index in range(bisect_left(self._sizes, num_tokens), len(self._keys)):
            if num_reqs <= self._limits[index]:
                return self._keys[index]
        return None


def keys_by_kind(
    keys: Mapping[CUDAGraphMode, Collection[BatchDescriptor]], query_len: int | None
) -> dict[KeyKind, list[BatchDescriptor]]:
    """The keys by kind. Keys that can serve no batch are left out.

    ``query_len`` is that of uniform keys which name no requests.
    """
    found: dict[KeyKind, list[BatchDescriptor]] = {}
    for mode, descriptors in keys.items():
        for key in descriptors:
            served = None
            if key.is_uniform_decode:
                served = query_len_of(key, query_len) if mode is CUDAGraphMode.FULL else None
                if served is None:
                    continue
            found.setdefault((mode, served, key.variant), []).append(key)
    return found


def order_variants(found: Iterable[Hashable]) -> tuple[tuple[Hashable, ...], tuple[int, ...]]:
    """All variants, and apart those that others are rounded up to: the integers, in increasing order."""
    distinct = set(found)
    counts = tuple(sorted(variant for variant in distinct if isinstance(variant, int)))
    others = sorted((variant for variant in distinct if not isinstance(variant, int)), key=repr)
    return (*others, *counts), counts
