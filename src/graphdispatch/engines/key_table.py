"""The immutable table behind the dispatchers: which graph serves a batch, or why none does.

A batch is uniform decode (every request schedules the same number of tokens, its *query length*) or mixed. The table
prefers FULL to PIECEWISE, then the nearest size, then the nearest variant, then a uniform graph to a general one, then
the graph that was captured for fewer requests.

Note [decisions on demand]
    A table of a thousand sizes and eight variants has some hundred thousand decisions, and traffic needs a few
    hundred of them. Each is made by bisection at its first lookup, and kept. So making a table costs no more than to
    sort its keys, and every later decision, hit or miss, is a lookup.
"""

import sys
from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from types import MappingProxyType

from ..copying import MadeAnew
from ..decide.decision import Decision, Memo
from ..descriptors import BatchDescriptor
from ..errors import ConfigError, FallbackError, shown
from ..modes import CUDAGraphMode
from ..reasons import Reason

__all__ = ["RUNTIME_MODES", "KeyTable", "query_len_of", "request_limit"]

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
RUNTIME_MODES = frozenset((NONE, PIECEWISE, FULL))
"""The modes that one batch can run in."""

_Answer = tuple[CUDAGraphMode, BatchDescriptor | None]
_Batch = tuple[int | None, Hashable, frozenset[CUDAGraphMode], int | None, int]
_Kind = tuple[CUDAGraphMode, int | None, Hashable]
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


class KeyTable(MadeAnew):
    """Every decision that a set of keys allows. Immutable and thread-safe.

    ``mode`` is the configured mode and ``query_len`` the uniform query length. Both are None until the keys are
    initialised, and until then no graph serves. No batch has more than ``max_num_reqs`` requests. See Note [decisions
    on demand].
    """

    def __init__(
        self,
        keys: Mapping[CUDAGraphMode, Collection[BatchDescriptor]],
        *,
        mode: CUDAGraphMode | None = None,
        query_len: int | None = None,
        max_num_reqs: int | None = None,
    ) -> None:
        self.keys: Mapping[CUDAGraphMode, frozenset[BatchDescriptor]] = MappingProxyType(
            {graph: frozenset(keys.get(graph, ())) for graph in (PIECEWISE, FULL)}
        )
        """All keys, by runtime mode."""
        self.mode, self.query_len, self.max_num_reqs = mode, query_len, max_num_reqs
        self._kinds = self._keys_by_kind() if mode is not None else {}
        variants = {variant for _, _, variant in self._kinds}
        self._counts = sorted(variant for variant in variants if isinstance(variant, int))
        """The variants that others are rounded up to."""
        self.variants = (*sorted(variants.difference(self._counts), key=repr), *self._counts)
        """The variants that have graphs."""
        self.query_lens = tuple(sorted({length for _, length, _ in self._kinds if length is not None}))
        """The uniform query lengths that have graphs of their own."""
        self.free = min(map(request_limit, chain.from_iterable(self._kinds.values())), default=sys.maxsize)
        """The number of requests that every graph has room for."""
        self._decisions = Memo[_Batch, Decision](self._decide)
        self.answers = Memo[BatchDescriptor, _Answer](partial(self._answer, (FULL, PIECEWISE)))
        """What a descriptor is dispatched to: the exact full graph, a general full one, a general piecewise one."""
        self.piecewise_answers = Memo[BatchDescriptor, _Answer](partial(self._answer, (PIECEWISE,)))
        """What a descriptor is dispatched to without full graphs."""

    def _keys_by_kind(self) -> dict[_Kind, list[BatchDescriptor]]:
        """The keys by kind, without those that can serve no batch: smaller sizes first, then fewer requests."""
        found: dict[_Kind, list[BatchDescriptor]] = {}
        for mode, keys in self.keys.items():
            for key in keys:
                length = query_len_of(key, self.query_len) if key.is_uniform_decode and mode is FULL else None
                if length is not None or not key.is_uniform_decode:
                    found.setdefault((mode, length, key.variant), []).append(key)
        for alike in found.values():
            # No two keys compare equal, so that every process decides alike, whatever order its sets have.
            alike.sort(key=lambda key: (key.num_tokens, request_limit(key), key.num_reqs or 0))
        return found

    def decide(
        self,
        num_tokens: int,
        num_reqs: int | None = None,
        query_len: int | None = None,
        variant: Hashable = None,
        allowed_modes: Collection[CUDAGraphMode] | None = None,
        excluded_modes: Collection[CUDAGraphMode] = (),
    ) -> Decision:
        """The decision for any batch; see ``CudagraphKeyDispatcher.decide``."""
        if query_len is not None and num_reqs is not None and num_reqs * query_len != num_tokens:
            query_len = None
        if allowed_modes is None:
            allowed_modes = RUNTIME_MODES
        if excluded_modes or allowed_modes.__class__ is not frozenset:
            # New sets: the caller's own must not change.
            allowed_modes = frozenset(allowed_modes) - frozenset(excluded_modes)
        if (num_reqs or num_tokens) <= self.free:
            num_reqs = 0
        return self._decisions[query_len, variant, allowed_modes, num_reqs, num_tokens]

    def _decide(self, batch: _Batch) -> Decision:
        """Make a decision, at its first lookup."""
        query_len, variant, allowed, num_reqs, num_tokens = batch
        _check_batch(num_tokens, query_len, allowed)
        if query_len is not None and num_tokens % query_len:
            query_len = None
        if num_reqs is None:
            most = num_tokens // (query_len or 1)
            num_reqs = most if self.max_num_reqs is None else min(most, self.max_num_reqs)
        for mode, key in self._find(query_len, variant, num_tokens, num_reqs).items():
            if mode in allowed:
                reason = Reason.EXACT if key.num_tokens == num_tokens else Reason.PADDED
                return Decision(mode, key, key.num_tokens, reason, num_tokens)
        decision = self._miss(query_len, variant, allowed, num_tokens)
        if NONE not in allowed and num_tokens:
            raise FallbackError(
                f"allowed_modes must hold NONE for a batch that no graph serves, got {_names(allowed)} for "
                f"{num_tokens} tokens: {decision.explain()}; allow NONE, or capture a graph for it",
                decision.reason,
            )
        return decision

    def _find(
        self, query_len: int | None, variant: Hashable, num_tokens: int, num_reqs: int
    ) -> dict[CUDAGraphMode, BatchDescriptor]:
        """The best key of each mode with room for a batch, FULL first."""
        found = {}
        for graph in (FULL, PIECEWISE) if num_tokens else ():
            keys = [_first_with_room(keys, num_tokens, num_reqs) for keys in self._lists_for(graph, query_len, variant)]
            best = min((key for key in keys if key is not None), key=_tokens, default=None)
            if best is not None:
                found[graph] = best
        return found

    def _lists_for(self, graph: CUDAGraphMode, query_len: int | None, variant: Hashable) -> list[list[BatchDescriptor]]:
        """The key lists of one mode that a batch may use: the nearest variant first, uniform graphs before general."""
        lengths = (query_len, None) if query_len in self.query_lens else (None,)
        kinds = ((graph, length, captured) for captured in self._serving(variant) for length in lengths)
        return [self._kinds[kind] for kind in kinds if kind in self._kinds]

    def _serving(self, variant: Hashable) -> Sequence[Hashable]:
        """The captured variants whose graphs may serve this one, the nearest first."""
        if isinstance(variant, int):
            return self._counts[bisect_left(self._counts, variant) :]
        return (variant,) if variant in self.variants else ()

    def _miss(
        self, query_len: int | None, variant: Hashable, allowed: frozenset[CUDAGraphMode], num_tokens: int
    ) -> Decision:
        """The eager decision for a batch that no graph serves, with the reason."""
        lists = [each for graph in (FULL, PIECEWISE) for each in self._lists_for(graph, query_len, variant)]
        largest = max((keys[-1].num_tokens for keys in lists), default=0)
        roomy = self._find(query_len, variant, num_tokens, 0)
        reason, detail = Reason.NOT_CAPTURED, ""
        if not num_tokens:
            reason = Reason.NO_ROWS
        elif self.mode is None:
            reason = Reason.NOT_INITIALIZED
        elif not self._kinds:
            reason = Reason.DISABLED if self.mode is NONE else Reason.NOT_CAPTURED
        elif not self._serving(variant):
            reason = Reason.VARIANT_NOT_CAPTURED
            detail = f"{reason.text} (asked: {variant!r}, captured: {_names(self.variants)})"
        elif roomy:
            reason = Reason.MODE_EXCLUDED if allowed.isdisjoint(roomy) else Reason.TOO_MANY_REQUESTS
        elif largest:
            reason = Reason.ABOVE_LARGEST_SIZE
            detail = f"the batch is larger than the largest graph for it ({largest}); capture a larger size"
        elif self.query_lens and query_len is None:
            reason = Reason.MIXED_BATCH
        elif self.query_lens:
            reason = Reason.QUERY_LEN_NOT_CAPTURED
            detail = f"{reason.text} (asked: {query_len}, captured: {_names(self.query_lens)})"
        return Decision.eager(reason, num_tokens, detail)

    def _answer(self, modes: Collection[CUDAGraphMode], asked: BatchDescriptor) -> _Answer:
        """What vLLM 0.11.1's rules give for a batch that the caller has padded."""
        if not isinstance(asked, BatchDescriptor):
            raise ConfigError(f"batch_descriptor must be a BatchDescriptor, got {shown(asked)}")
        num_tokens, num_reqs, uniform, variant = asked
        if self.mode is None:
            return NONE, None
        if FULL in modes and uniform:
            staged = BatchDescriptor(num_tokens, num_tokens // (self.query_len or 1), True, variant)
            exact = (asked, staged) if num_reqs is None and query_len_of(staged, None) == self.query_len else (asked,)
            for key in exact:
                if key in self.keys[FULL]:
                    return FULL, key
        for mode in modes:
            if asked.non_uniform in self.keys[mode]:
                return mode, asked.non_uniform
        if num_reqs is None:
            return NONE, None
        # A key without a number of requests serves every number of them, but no uniform batch of another length.
        is_uniform = uniform and num_reqs * (self.query_len or 0) == num_tokens
        return self._answer(modes, BatchDescriptor(num_tokens, None, is_uniform, variant))


_tokens = attrgetter("num_tokens")


def _first_with_room(keys: Sequence[BatchDescriptor], num_tokens: int, num_reqs: int) -> BatchDescriptor | None:
    start = bisect_left(keys, num_tokens, key=_tokens)
    return next((key for key in islice(keys, start, None) if num_reqs <= request_limit(key)), None)


def _check_batch(num_tokens: int, query_len: int | None, allowed: frozenset[CUDAGraphMode]) -> None:
    if not allowed or not allowed <= RUNTIME_MODES:
        raise ConfigError(
            f"allowed_modes less excluded_modes must leave some of NONE, PIECEWISE and FULL, got {_names(allowed)}; "
            "a configured mode such as FULL_AND_PIECEWISE is not the mode of one batch"
        )
    if num_tokens < 0 or (query_len is not None and query_len < 1):
        raise ConfigError(
            f"num_tokens must be >= 0 and query_len >= 1 or None, got {num_tokens} and {query_len}; "
            "a mixed batch has query_len=None"
        )


def _names(values: Iterable[object]) -> str:
    return ", ".join(str(getattr(value, "name", value)) for value in values) or "none"
