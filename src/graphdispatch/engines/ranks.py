"""``RankConsensus``: ranks that share collectives take the same decision at each step, or run eagerly together.

Each rank votes for what it could do (``RankVote``). One small all-reduce on the CPU brings all votes to all ranks. A
pure function turns the votes into one ``Agreement``. A rank whose capture failed says so in its next vote.

Note [collectives inside a graph]
    A capture and the comparison after it run the callable several times; a replay runs it once. If the callable
    contains collectives, all ranks must therefore capture the same size in the same step (``Agreement.capture``). A
    rank that already has the graph captures it again. All ranks must also compare the graph with eager in the same
    step, or not at all: give all ranks the same inputs, or capture with ``verify=False``. A rank whose capture stops
    early has run fewer collectives than its peers, and they wait until the group's timeout.
"""

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
from ..errors import ConfigError, ConsensusError, check_count
from ..forking import make_lock
from ..modes import CUDAGraphMode
from ..reasons import Reason

__all__ = ["Agreement", "RankConsensus", "RankVote", "decode_votes", "encode_vote", "merge_votes"]

_MODES = (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)


class RankVote(NamedTuple):
    """What one rank could do in one step. Bit ``i`` of a mask stands for the size ``sizes[i]``.

    ``mode`` is the best runtime mode that the rank's batch allows. ``full`` and ``piecewise`` are the sizes that the
    rank has graphs for, ``capturable`` the sizes that it would capture now.
    """

    rows: int
    mode: CUDAGraphMode
    full: int = 0
    piecewise: int = 0
    capturable: int = 0

    def ready(self, mode: CUDAGraphMode) -> int:
        """The mask of the sizes that the rank has graphs for in ``mode``."""
        return self.full if mode is CUDAGraphMode.FULL else self.piecewise


class Agreement(NamedTuple):
    """What all ranks do in one step. It is equal on every rank.

    ``decision.rows`` is the number of rows of the largest batch. With ``capture``, every rank captures
    ``decision.descriptor`` in this step: see Note [collectives inside a graph].
    """

    decision: Decision
    capture: bool = False

    @property
    def mode(self) -> CUDAGraphMode:
        """The runtime mode. ``NONE`` is eager."""
        return self.decision.mode

    @property
    def size(self) -> int:
        """The padded number of rows, the same on every rank. In an eager step: the rows of the largest batch."""
        return self.decision.size

    @property
    def descriptor(self) -> BatchDescriptor | None:
        """What the graph serves, or None in an eager step."""
        return self.decision.descriptor


def merge_votes(votes: Sequence[RankVote], sizes: Sequence[int]) -> Agreement:
    """The agreement that follows from the votes of all ranks, in order of rank. A pure function.

    The mode is the least mode of all votes, and the number of rows the largest. The first of these that is possible is
    taken: replay the nearest size that holds the rows, if all ranks have its graph; capture that size, if all ranks
    would; replay the nearest size that all ranks have, in the best mode for which there is one; run eagerly.
    """
    rows = max(vote.rows for vote in votes)
    mode = min(vote.mode for vote in votes)
    if rows == 0:
        return Agreement(Decision.eager(Reason.NO_ROWS))
    if mode is CUDAGraphMode.NONE:
        ask = _ranks(vote.mode is CUDAGraphMode.NONE for vote in votes)
        return Agreement(Decision.eager(Reason.MODE_MISMATCH, rows, f"{ask} allowed no graph in this step"))
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
    """A vote as bytes, each a number from 0 to 255. ``decode_votes`` reads them."""
    width = _width(sizes)
    return [byte for number in vote for byte in int(number).to_bytes(width, "little")]


def decode_votes(table: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[RankVote]:
    """The votes of all ranks, in order of rank, from their encoded rows."""
    width, votes = _width(sizes), []
    for row in table:
        parts = [row[start : start + width] for start in range(0, len(row), width)]
        rows, mode, *masks = (int.from_bytes(part, "little") for part in parts)
        votes.append(RankVote(rows, CUDAGraphMode(mode), *masks))
    return votes


class RankConsensus:
    """Agrees with the other ranks of ``group`` (default: all) on mode, padded size and capture, once for each step.

    ``sizes`` are the capture sizes, in increasing order and the same on every rank. ``agree`` is collective: every
    rank calls it once for each step, and a rank without work passes 0 rows. Nothing is exchanged if the group has one
    rank, if ``torch.distributed`` is not in use, or with ``coupled=False``, which declares that no rank waits for
    another.

    The constructor is collective too. It makes a gloo group of its own over the ranks of ``group``, so that votes
    never mix with other messages. It also compares the sizes; a ``ConfigError`` names the ranks whose sizes differ. A
    call waits at most ``timeout_s`` for the votes, and at most ``grace_s`` more to find out which ranks are missing.
    After a ``ConsensusError`` the object refuses all calls, because the ranks may be at different steps. Only one
    thread at a time may call it.
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
        """The number of all-reduces made so far."""
        self._lock = make_lock()
        coupled = coupled and self.world_size > 1
        self._channel = _Channel(group, self.rank, timeout_s, grace_s) if coupled else None
        self._compare_sizes()

    def record_captured(self, size: int, mode: CUDAGraphMode = CUDAGraphMode.FULL) -> None:
        """Note that this rank has a graph of ``size`` from the next step on."""
        self._ready[_runtime(mode)] |= self._bit(size)
        self._barred &= ~self._bit(size)

    def record_failed(self, size: int) -> None:
        """Note that this rank has no graph of ``size``. It captures none before ``record_captured`` or ``rearm``."""
        self.record_released(size, CUDAGraphMode.FULL)
        self.record_released(size, CUDAGraphMode.PIECEWISE)
        self._barred |= self._bit(size)

    def record_released(self, size: int, mode: CUDAGraphMode = CUDAGraphMode.FULL) -> None:
        """Note that this rank's graph of ``size`` was evicted. The size may be captured again."""
        self._ready[_runtime(mode)] &= ~self._bit(size)

    def rearm(self) -> None:
        """Allow this rank to capture the sizes again whose capture failed."""
        self._barred = 0

    def vote(self, rows: int, mode: CUDAGraphMode = CUDAGraphMode.FULL, *, may_capture: bool = True) -> RankVote:
        """This rank's vote for a step of ``rows`` rows. Raises ``ConfigError`` for a batch that cannot exist."""
        check_count("rows", rows, 0)
        if mode is not CUDAGraphMode.NONE:
            _runtime(mode)
        every = (1 << len(self.sizes)) - 1
        full, piecewise = (self._ready[m] for m in _MODES)
        return RankVote(rows, mode, full, piecewise, every & ~self._barred if may_capture else 0)

    def agree(self, rows: int, mode: CUDAGraphMode = CUDAGraphMode.FULL, *, may_capture: bool = True) -> Agreement:
        """What all ranks do in this step. The call is collective, and every rank gets the same answer.

        ``rows`` is the size of this rank's batch (0: no work), and ``mode`` the best runtime mode that the batch
        allows. Raises ``ConsensusError`` if the ranks do not agree; if known, it names the ranks that did not vote.
        """
        vote = self.vote(rows, mode, may_capture=may_capture)
        if self._channel is None:
            return merge_votes([vote], self.sizes)
        if not self._lock.acquire(blocking=False):
            raise ConsensusError("two threads called agree() at once; call it only from the thread that runs the steps")
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
                f"sizes must be the same on every rank; those of {others} differ from rank 0's, and this rank "
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
    """Brings one row of integers from every rank to every rank. The first failure is final and names who is missing."""

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
            raise ConsensusError(f"rank {rank} could not form a group with the other ranks: {error}") from error
        # The store is only used after a failed exchange. Without a store, the error cannot name the missing ranks.
        find_store = getattr(dist.distributed_c10d, "_get_process_group_store", None)
        self._store: Any = find_store(self._group) if find_store is not None else None

    def exchange(self, row: list[int]) -> list[list[int]]:
        """The rows of all ranks, in order. After the first ``ConsensusError``, every call raises one at once."""
        if self._broken is not None:
            raise ConsensusError(
                f"an earlier step failed ({self._broken}), so no later one can be agreed on; make a new RankConsensus"
            )
        step = next(self._step)
        # Every rank fills only its own row, so the sum is the table of all rows.
        table = torch.zeros(self._size, len(row), dtype=torch.int64)
        table[self._rank] = torch.tensor(row, dtype=torch.int64)
        try:
            dist.all_reduce(table, group=self._group)
        except RuntimeError as error:
            missing = self._missing(step)
            who = (
                f"{_ranks(rank in missing for rank in range(self._size))} did not vote" if missing else "a rank failed"
            )
            self._broken = f"step {step}: {who}"
            raise ConsensusError(
                f"rank {self._rank} got no agreement in {self._broken} ({_first_line(error)})"
            ) from error
        rows: list[list[int]] = table.tolist()
        return rows

    def _missing(self, step: int) -> set[int]:
        """The ranks that did not report a failure of this step, so were not there. Empty if that is not known."""
        if self._store is None:
            return set()
        keys = [f"graphdispatch/failed/{step}/{rank}" for rank in range(self._size)]
        missing: set[int] = set()
        with suppress(RuntimeError):  # the store is gone if the rank that held it is
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


def _width(sizes: Sequence[int]) -> int:
    """The bytes of each number of a vote: of a count of rows, or of a mask with a bit for each size."""
    return 8 + len(sizes) // 8


def _ranks(chosen: Iterable[bool]) -> str:
    """``rank 1`` or ``ranks 0, 2``."""
    numbers = [str(rank) for rank, is_in in enumerate(chosen) if is_in]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
