"""Decisions for any keys and any batch: against a definition by search, and by what must never happen."""

import math
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from graphdispatch import CUDAGraphMode as Mode
from graphdispatch import Decision, Reason
from graphdispatch.engines import BatchDescriptor, CudagraphKeyDispatcher

NONE, PIECEWISE, FULL = Mode.NONE, Mode.PIECEWISE, Mode.FULL
QUERY_LEN, MAX_REQS = 2, 16
Key = tuple[Mode, BatchDescriptor]

variants = st.sampled_from([None, "a", 0, 1, 2, 5])
descriptors = st.builds(BatchDescriptor, st.integers(1, 24), st.none() | st.integers(1, 24), st.booleans(), variants)
keys_strategy = st.sets(st.tuples(st.sampled_from([PIECEWISE, FULL]), descriptors), max_size=12)


@dataclass(frozen=True)
class Batch:
    tokens: int
    reqs: int | None
    query_len: int | None
    variant: str | int | None
    excluded: frozenset[Mode]

    @property
    def uniform(self) -> int | None:
        """The query length, if the counts agree with it."""
        if self.query_len is None or self.tokens % self.query_len:
            return None
        return self.query_len if self.reqs in (None, self.tokens // self.query_len) else None

    @property
    def most_reqs(self) -> int:
        """The requests there may be."""
        return self.reqs if self.reqs is not None else min(self.tokens // (self.uniform or 1), MAX_REQS)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Batches around the sizes of the keys, some with counts that contradict their query length."""
    tokens = draw(st.integers(1, 26))
    reqs = draw(st.none() | st.integers(1, min(tokens, MAX_REQS)))
    query_len = draw(st.sampled_from([None, 1, 2, 3]))
    excluded = draw(
        st.sampled_from([frozenset(), frozenset({FULL}), frozenset({PIECEWISE}), frozenset({FULL, PIECEWISE})])
    )
    return Batch(tokens, reqs, query_len, draw(st.sampled_from([None, "a", "b", 0, 1, 2, 3, 5, 6])), excluded)


def dispatcher_of(keys: set[Key]) -> CudagraphKeyDispatcher:
    """An initialised dispatcher with these keys."""
    dispatcher = CudagraphKeyDispatcher(max_num_reqs=MAX_REQS)
    dispatcher.initialize_cudagraph_keys(NONE, QUERY_LEN)
    for mode, descriptor in keys:
        dispatcher.add_cudagraph_key(mode, descriptor)
    return dispatcher


def decide(dispatcher: CudagraphKeyDispatcher, batch: Batch) -> Decision:
    """The decision for a batch."""
    return dispatcher.decide(
        batch.tokens, batch.reqs, query_len=batch.query_len, variant=batch.variant, excluded_modes=batch.excluded
    )


def serves(key: Key, batch: Batch) -> bool:
    """Whether the graph of a key may serve a batch, from the definition alone."""
    mode, descriptor = key
    if descriptor.num_tokens < batch.tokens or mode in batch.excluded:
        return False
    if isinstance(batch.variant, int) and isinstance(descriptor.variant, int):
        right_variant = descriptor.variant >= batch.variant
    else:
        right_variant = descriptor.variant == batch.variant
    if not descriptor.is_uniform_decode:
        return right_variant and batch.most_reqs <= request_limit(descriptor)
    return right_variant and mode is FULL and batch.uniform == query_len_of(descriptor) != None  # noqa: E711


def rank(key: Key) -> tuple[float, ...]:
    """The order of preference, the best first."""
    mode, descriptor = key
    count = descriptor.variant if isinstance(descriptor.variant, int) else 0
    room = request_limit(descriptor)
    return (-mode, descriptor.num_tokens, count, not descriptor.is_uniform_decode, room, descriptor.num_reqs or 0)


def query_len_of(key: BatchDescriptor) -> int | None:
    """The query length of a uniform graph; None if no batch fits its key."""
    reqs = key.num_reqs or key.num_tokens / QUERY_LEN
    return int(key.num_tokens / reqs) if (key.num_tokens / reqs).is_integer() and reqs == int(reqs) else None


def request_limit(key: BatchDescriptor) -> float:
    """The most requests that a graph takes, if not its tokens limit them."""
    is_free = key.num_reqs is None or key.is_uniform_decode or key.num_reqs >= key.num_tokens
    return math.inf if is_free or key.num_reqs is None else key.num_reqs


@settings(max_examples=settings.default.max_examples * 8)
@given(keys=keys_strategy, batch=batches())
def test_a_decision_is_the_best_graph_that_serves_the_batch(keys: set[Key], batch: Batch) -> None:
    """The table gives what a search through all keys gives, and no graph where there is none."""
    found = decide(dispatcher_of(keys), batch)
    candidates = sorted((key for key in keys if serves(key, batch)), key=rank)
    if candidates:
        assert found.descriptor is None or (found.mode, found.descriptor) in candidates
        assert rank((found.mode, found.descriptor or BatchDescriptor(0))) == rank(candidates[0])
        assert found.reason is (Reason.EXACT if found.size == batch.tokens else Reason.PADDED)
    else:
        assert (found.mode, found.descriptor, found.size) == (NONE, None, batch.tokens)
        assert not found.reason.is_graph
    assert found.rows == batch.tokens


@given(keys=keys_strategy, batch=batches())
def test_the_quick_way_decides_as_the_general_one(keys: set[Key], batch: Batch) -> None:
    """The lookup in the dispatcher and the full rules of its table give equal decisions."""
    dispatcher = dispatcher_of(keys)
    allowed = frozenset({NONE, PIECEWISE, FULL}) - batch.excluded
    options = {"query_len": batch.query_len, "variant": batch.variant}
    quick = dispatcher.decide(batch.tokens, batch.reqs, **options, allowed_modes=allowed)
    general = dispatcher.table.decide(batch.tokens, batch.reqs, **options, allowed=allowed)
    assert quick[:5] == general[:5]
    assert quick == decide(dispatcher, batch)


@given(keys=keys_strategy, batch=batches())
def test_dispatch_gives_back_only_keys(keys: set[Key], batch: Batch) -> None:
    """The exact contract never invents a descriptor, and never pads."""
    descriptor = BatchDescriptor(batch.tokens, batch.reqs, batch.uniform is not None, batch.variant)
    mode, found = dispatcher_of(keys).dispatch(descriptor, FULL in batch.excluded)
    assert (mode is NONE) == (found is None)
    if found is not None:
        assert (mode, found) in keys
        assert (found.num_tokens, found.variant) == (descriptor.num_tokens, descriptor.variant)
        assert found.num_reqs in (descriptor.num_reqs, None) or descriptor.num_reqs is None
        assert mode not in batch.excluded or mode is not FULL
