"""``RankConsensus``: ranks that share collectives take the same decision at each step, or run eagerly together.

Every rank says what it could do (``RankVote``), one small all-reduce on the CPU brings all votes to every rank, and a
pure function makes of them the one ``Agreement``. A rank whose capture failed says so in its next vote.

Note [collectives inside a graph]
    A capture, and the comparison that follows it, run the callable several times, a replay once. Where the callable
    holds collectives, all ranks must therefore capture the same size in the same step (``Agreement.capture``; a rank
    that has the graph already captures it anew), and compare it with eager in the same step or not at all: give
    all ranks the same inputs, or capture with ``verify=False``. A rank whose capture breaks off half-way has run
    fewer collectives than its peers, who then wait until the group's timeout.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist

from ..decide.decision import Decision
from ..descriptors import BatchDescriptor
from ..errors import ConfigError, ConsensusError
from ..modes import CUDAGraphMode
from ..reasons import Reason

__all__ = ["Agreement", "RankConsensus", "RankVote", "decode_votes", "encode_vote", "merge_votes"]

_BITS = 62  # of a mask in one int64, so that no sum of votes can overflow
_MODES = (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)
_MASKS = 3  # full, piecewise, capturable


class RankVote(NamedTuple):
    """What one rank could do in one step. Masks have bit ``i`` for the size ``sizes[i]``.

    ``mode`` is the best runtime mode that its batch allows; ``full`` and ``piecewise`` are the sizes that it has
    graphs of, ``capturable`` those that it would capture now.
    """

    rows: int
    mode: CUDAGraphMode
    full: int = 0
    piecewise: int = 0
    capturable: int = 0

    def ready(self, mode: CUDAGraphMode) -> int:
        """The mask of the sizes that it has graphs of in ``mode``."""
        return self.full if mode is CUDAGraphMode.FULL else self.piecewise


class Agreement(NamedTuple):
    """What all ranks do in one step; equal on every rank.

    ``decision.rows`` are the rows of the largest batch. With ``capture`` every rank captures ``decision.descriptor``
    in this step: see Note [collectives inside a graph].
    """

    decision: Decision
    capture: bool = False

    @property
    def mode(self) -> CUDAGraphMode:
        """The runtime mode; ``NONE`` is eager."""
        return self.decision.mode

    @property
    def size(self) -> int:
        """The padded rows, the same on every rank; in an eager step those of the largest batch, where none pads."""
        return self.decision.size

    @property
    def descriptor(self) -> BatchDescriptor | None:
        """What the graph serves, or None."""
        return self.decision.descriptor


def merge_votes(votes: Sequence[RankVote], sizes: Sequence[int]) -> Agreement:
    """The agreement that follows from the votes of all ranks, in order of rank: a pure function.

    The mode is the least one, the rows are the most. Of the sizes that hold them, the nearest is taken if all ranks
    have its graph, or else captured if all would; then comes the nearest that all have, in the best mode that all have
    one in; then eager.
    """
    rows = max(vote.rows for vote in votes)
    mode = min(vote.mode for vote in votes)
    if rows == 0:
        return Agreement(Decision.eager(Reason.NO_ROWS))
    if mode is CUDAGraphMode.NONE:
        ask = _ranks(vote.mode is CUDAGraphMode.NONE for vote in votes)
        return Agreement(Decision.eager(Reason.MODE_MISMATCH, rows, f"no graph may serve this step on {ask}"))
    nearest = bisect_left(sizes, rows)
    if nearest == len(sizes):
        most = _ranks(vote.rows == rows for vote in votes)
        largest = sizes[-1] if sizes else 0
        return Agreement(
            Decision.eager(Reason.ABOVE_LARGEST_SIZE, rows, f"{rows} rows on {most}, above the largest size, {largest}")
        )
    bit = 1 << nearest
    if not all(vote.ready(mode) & bit for vote in votes) and all(vote.capturable & bit for vote in votes):
        return _agreement(mode, sizes[nearest], rows, capture=True)
    for candidate in _MODES[_MODES.index(mode) :]:
        common = -bit  # this size and all above
        for vote in votes:
            common &= vote.ready(candidate)
        if common:
            return _agreement(candidate, sizes[(common & -common).bit_length() - 1], rows)
    lacking = _ranks(not vote.ready(mode) & bit for vote in votes)
    return Agreement(
        Decision.eager(Reason.NOT_CAPTURED, rows, f"no {mode.name} graph of {sizes[nearest]} rows on {lacking}")
    )


def encode_vote(vote: RankVote, sizes: Sequence[int]) -> list[int]:
    """A vote as integers that fit int64; ``decode_votes`` reads them back."""
    words = _words(sizes)
    row = [vote.rows, int(vote.mode)]
    for mask in vote[2:]:
        row += [(mask >> (_BITS * i)) & ((1 << _BITS) - 1) for i in range(words)]
    return row


def decode_votes(table: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[RankVote]:
    """The votes of all ranks, in order, from their encoded rows."""
    words = _words(sizes)
    votes = []
    for rows, mode, *rest in table:
        parts = [rest[words * k : words * (k + 1)] for k in range(_MASKS)]
        full, piecewise, capturable = (sum(word << (_BITS * i) for i, word in enumerate(part)) for part in parts)
        votes.append(RankVote(rows, CUDAGraphMode(mode), full, piecewise, capturable))
    return votes


class RankConsensus:
    """Agrees with the other ranks of ``group`` (default: all) on mode, padded size and capture, once for each step.

    ``sizes`` are the capture sizes, increasing and the same on every rank. ``agree`` is collective: every rank calls
    it once for each step, a rank without work with 0 rows. Nothing is exchanged where the group has one rank, where
    ``torch.distributed`` is not in use, or with ``coupled=False``, which declares that no rank waits for another.

    The constructor is collective too: it makes a gloo group of its own over the ranks of ``group``, so that votes pair
    up with nothing else, and compares the sizes (``ConfigError`` names ranks whose sizes differ). No call waits for a
    rank longer than ``timeout_s`` for the votes and ``grace_s`` more to find out who is missing; after a
    ``ConsensusError`` the object refuses all further calls, since ranks may have lost step with each other. One
    thread at a time calls it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        sizes: Sequence[int] = (),
        coupled: bool = True,
        timeout_s: float = 60.0,
        grace_s: float = 1.0,
    ) -> None:
        if any(a >= b for a, b in zip((0, *sizes), sizes, strict=False)):
            raise ConfigError(f"sizes must be positive and strictly increasing, got {list(sizes)}")
        if timeout_s <= 0 or grace_s < 0:
            raise ConfigError(f"timeout_s must be positive and grace_s not negative, got {timeout_s} and {grace_s}")
        self.sizes = tuple(sizes)
        self._index = {size: i for i, size in enumerate(self.sizes)}
        self._ready = dict.fromkeys(_MODES, 0)
        self._barred = 0
        in_use = dist.is_available() and dist.is_initialized()
        self.world_size = dist.get_world_size(group) if in_use else 1
        self.rank = dist.get_rank(group) if in_use else 0
        self.exchanges = 0
        """All-reduces made so far."""
        self._lock = threading.Lock()
        coupled = coupled and self.world_size > 1
        self._channel = _Channel(group, self.rank, timeout_s, grace_s) if coupled else None
        self._compare_sizes()

    def record_captured(self, size: int, mode: CUDAGraphMode = CUDAGraphMode.FULL) -> None:
        """This rank has a graph of ``size`` from the next step on."""
        self._ready[_runtime(mode)] |= self._bit(size)
        self._barred &= ~self._bit(size)

    def record_failed(self, size: int) -> None:
        """This rank has no graph of ``size`` and will not capture one, until ``record_captured`` or ``rearm``."""
        self.record_released(size, CUDAGraphMode.FULL)
        self.record_released(size, CUDAGraphMode.PIECEWISE)
        self._barred |= self._bit(size)

    def record_released(self, size: int, mode: CUDAGraphMode = CUDAGraphMode.FULL) -> None:
        """This rank's graph of ``size`` is gone (evicted); it may be captured again."""
        self._ready[_runtime(mode)] &= ~self._bit(size)

    def rearm(self) -> None:
        """Try sizes again whose capture failed on this rank."""
        self._barred = 0

    def vote(self, rows: int, mode: CUDAGraphMode = CUDAGraphMode.FULL, *, may_capture: bool = True) -> RankVote:
        """This rank's vote for a step of ``rows`` rows. Raises ``ConfigError`` for what no batch can be."""
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
            raise ConfigError(f"rows must be an integer >= 0, got {rows!r}")
        if mode is not CUDAGraphMode.NONE:
            _runtime(mode)
        every = (1 << len(self.sizes)) - 1
        full, piecewise = (self._ready[m] for m in _MODES)
        return RankVote(rows, mode, full, piecewise, every & ~self._barred if may_capture else 0)

    def agree(self, rows: int, mode: CUDAGraphMode = CUDAGraphMode.FULL, *, may_capture: bool = True) -> Agreement:
        """What all ranks do in this step; collective, so that every rank gets the same answer.

        ``mode`` is the best runtime mode that this rank's batch allows, ``rows`` its size (0: no work here). Raises
        ``ConsensusError``, naming the ranks that did not come where that can be known.
        """
        vote = self.vote(rows, mode, may_capture=may_capture)
        if self._channel is None:
            return merge_votes([vote], self.sizes)
        if not self._lock.acquire(blocking=False):
            raise ConsensusError("agree() is called by two threads at once; call it from the one that runs the steps")
        try:
            table = self._channel.exchange(encode_vote(vote, self.sizes))
            self.exchanges += 1
            return merge_votes(decode_votes(table, self.sizes), self.sizes)
        finally:
            self._lock.release()

    def _compare_sizes(self) -> None:
        if self._channel is None:
            return
        sums = [row[0] for row in self._channel.exchange([crc32(repr(self.sizes).encode())])]
        if len(set(sums)) > 1:
            others = _ranks(one != sums[0] for one in sums)
            raise ConfigError(
                f"sizes must be the same on every rank; rank 0 has others than {others}, and this rank "
                f"has {list(self.sizes)}"
            )

    def _bit(self, size: int) -> int:
        if size not in self._index:
            raise ConfigError(f"size must be one of {list(self.sizes)}, got {size!r}")
        return 1 << self._index[size]

    def __repr__(self) -> str:
        ready = {m.name: [s for s, i in self._index.items() if self._ready[m] >> i & 1] for m in _MODES}
        barred = [s for s, i in self._index.items() if self._barred >> i & 1]
        return f"<RankConsensus rank {self.rank} of {self.world_size}, ready {ready}, failed {barred}>"


class _Channel:
    """Brings one row of integers from every rank to every rank; fails for good, and says who did not come."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, timeout_s: float, grace_s: float) -> None:
        self._rank = rank
        self._grace = timedelta(seconds=grace_s)
        self._step = count()  # 0 compares the sizes
        self._broken: str | None = None
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self._size = len(ranks)
        try:
            self._group = dist.new_group(
                ranks, timeout=timedelta(seconds=timeout_s), backend="gloo", use_local_synchronization=True
            )
        except (RuntimeError, ValueError) as error:
            raise ConsensusError(f"rank {rank} could not form a group with the others: {error}") from error
        # Only asked when an exchange fails; without a store the error says less.
        find_store = getattr(dist.distributed_c10d, "_get_process_group_store", None)
        self._store: Any = find_store(self._group) if find_store is not None else None

    def exchange(self, row: list[int]) -> list[list[int]]:
        """The rows of all ranks, in order. Raises ``ConsensusError``, and from then on at once."""
        if self._broken is not None:
            raise ConsensusError(f"no step is agreed on after a failed one ({self._broken}); make a new RankConsensus")
        step = next(self._step)
        # Every rank fills its own row, so that the sum is the table of all rows.
        table = torch.zeros(self._size, len(row), dtype=torch.int64)
        table[self._rank] = torch.tensor(row, dtype=torch.int64)
        try:
            dist.all_reduce(table, group=self._group)
        except RuntimeError as error:
            missing = self._missing(step)
            who = (
                f"{_ranks(rank in missing for rank in range(self._size))} did not come" if missing else "a rank failed"
            )
            self._broken = f"step {step}: {who}"
            raise ConsensusError(
                f"rank {self._rank} found no agreement in {self._broken} ({_first_line(error)})"
            ) from error
        rows: list[list[int]] = table.tolist()
        return rows

    def _missing(self, step: int) -> set[int]:
        """The ranks that have not failed in this step as well, so were not there; empty if that cannot be known."""
        if self._store is None:
            return set()
        keys = [f"graphdispatch/failed/{step}/{rank}" for rank in range(self._size)]
        missing: set[int] = set()
        with suppress(RuntimeError):  # the store may have gone with the rank that held it
            self._store.set(keys[self._rank], "")
            with suppress(RuntimeError):
                self._store.wait(keys, self._grace)
            missing = {rank for rank, key in enumerate(keys) if not self._store.check([key])}
        return missing


def _agreement(mode: CUDAGraphMode, size: int, rows: int, *, capture: bool = False) -> Agreement:
    reason = Reason.EXACT if rows == size else Reason.PADDED
    return Agreement(Decision(mode, BatchDescriptor(size), size, reason, rows), capture)


def _runtime(mode: CUDAGraphMode) -> CUDAGraphMode:
    if mode not in _MODES:
        raise ConfigError(f"mode must be FULL or PIECEWISE for a graph, got {mode!r}")
    return mode


def _words(sizes: Sequence[int]) -> int:
    return -(-len(sizes) // _BITS)


def _ranks(chosen: Iterable[bool]) -> str:
    """``rank 1`` or ``ranks 0, 2``."""
    numbers = [str(rank) for rank, is_in in enumerate(chosen) if is_in]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
