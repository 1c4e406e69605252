"""``RankConsensus``: ranks that share collectives take the same decision at each step, or run eagerly together.

Each rank votes for what it could do. One small all-reduce on the CPU brings all votes to all ranks, and a pure function
turns the votes into one ``Agreement``.

Note [collectives inside a graph]
    A capture and the comparison after it run the callable several times; a replay runs it once. If the callable
    contains collectives, all ranks must therefore capture the same size in the same step (``Agreement.capture``), and
    compare it in the same step. What happens in a step is up to the wrapper: with ``agree=consensus.least`` all ranks
    capture again what one has lost, and none goes on with a capture that one has stopped: see Note [ranks in step] in
    ``runtime/ranks.py``.
"""

import weakref
from collections.abc import Collection, Sequence
from datetime import timedelta
from itertools import compress
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist

from ..descriptors import BatchDescriptor
from ..errors import ConfigError, ConsensusError, check_count
from ..modes import CUDAGraphMode
from ..sizes import check_sizes

_Graph = tuple[CUDAGraphMode, int]


class RankVote(NamedTuple):
    """What one rank could do in one step.

    Attributes:
        rows: The number of rows of its batch; 0 for no work.
        mode: The value of the best mode that the batch allows.
        may_capture: Whether it would capture; 1 or 0.
        graphs: The mode and the size of each graph that it has.
    """

    rows: int
    mode: int
    may_capture: int
    graphs: frozenset[_Graph]


class Agreement(NamedTuple):
    """What all ranks do in one step. It is equal on every rank.

    Attributes:
        mode: The runtime mode; ``NONE`` is eager.
        size: The padded number of rows. In an eager step, the number of rows of the largest batch.
        capture: Whether every rank captures ``descriptor`` in this step: see Note [collectives inside a graph].
        detail: Why the step is eager, and because of which ranks; otherwise empty.
    """

    mode: CUDAGraphMode
    size: int
    capture: bool = False
    detail: str = ""

    @property
    def descriptor(self) -> BatchDescriptor | None:
        """What the graph serves, or None in an eager step."""
        return BatchDescriptor(self.size) if self.mode.has_graphs() else None


def merge_votes(votes: Sequence[RankVote], sizes: Sequence[int], tried: Collection[_Graph] = ()) -> Agreement:
    """The agreement that follows from the votes of all ranks. A pure function.

    The mode is the least mode of all votes, and the number of rows the largest. The first of these that is possible is
    taken: replay the nearest size that holds the rows, if all ranks have its graph; capture that size, if all ranks
    would and it is not in ``tried``; replay the nearest size that all ranks have, in the best mode for which there is
    one; run eagerly.

    Args:
        votes: The votes, in order of rank.
        sizes: The capture sizes, strictly increasing.
        tried: Graphs that are not captured again: the mode and the size of each.

    Returns:
        What all ranks do.
    """
    rows, mode = max(vote.rows for vote in votes), CUDAGraphMode(min(vote.mode for vote in votes))
    refusing = [rank for rank, vote in enumerate(votes) if vote.mode == CUDAGraphMode.NONE or vote.rows > sizes[-1]]
    if rows == 0 or refusing:
        detail = f"no graph may serve the rows of ranks {refusing}" if rows else "no rank has rows"
        return Agreement(CUDAGraphMode.NONE, rows, detail=detail)
    nearest = (mode, min(size for size in sizes if size >= rows))
    common = frozenset.intersection(*(vote.graphs for vote in votes))
    if nearest not in common and nearest not in tried and all(vote.may_capture for vote in votes):
        return Agreement(*nearest, capture=True)
    ready = [(kind, size) for kind, size in common if kind <= mode and size >= rows]
    if ready:
        return Agreement(*max(ready, key=lambda graph: (graph[0], -graph[1])))
    lacking = [rank for rank, vote in enumerate(votes) if nearest not in vote.graphs]
    detail = f"no {mode.name} graph of {nearest[1]} rows on ranks {lacking}"
    return Agreement(CUDAGraphMode.NONE, rows, detail=detail)


class RankConsensus:
    """Agrees with the other ranks of a group on mode, padded size and capture, once for each step.

    The constructor and ``agree`` are collective: every rank calls ``agree`` once for each step, and a rank without work
    passes 0 rows. The votes have a gloo group of their own, so that they never mix with other messages. Nothing is
    exchanged if ``torch.distributed`` is not in use. Only one thread may use it.

    Args:
        sizes: The capture sizes, in increasing order and the same on every rank.
        group: The ranks that share collectives. Default: all.
        timeout_s: How long a call waits for the votes of the other ranks, in seconds.

    Raises:
        ConfigError: The sizes are not increasing, or differ between the ranks.
        ConsensusError: A rank did not come in time.
    """

    def __init__(self, sizes: Sequence[int], group: dist.ProcessGroup | None = None, timeout_s: float = 60.0) -> None:
        self.sizes = check_sizes(sizes, "sizes")
        self._graphs = [(mode, size) for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE) for size in self.sizes]
        self._tried: set[_Graph] = set()
        """Graphs that all ranks captured in the same step, and that were not seen on all of them since."""
        self._failed = False
        in_use, timeout = dist.is_available() and dist.is_initialized(), timedelta(seconds=timeout_s)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD) if in_use else [0]
        self.rank, self.world_size = ranks.index(dist.get_rank()) if in_use else 0, len(ranks)
        group = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True) if in_use else None
        # Torch holds it until ``destroy_process_group``. Its threads must end then, and not with the interpreter.
        self._group = weakref.ref(group) if group is not None else None
        sums = self._exchange([crc32(repr(self.sizes).encode())]).tolist()
        if sums != [sums[0]] * len(sums):
            raise ConfigError(f"sizes must be the same on every rank; rank {self.rank} has {self.sizes}")

    def agree(
        self, rows: int, graphs: Collection[_Graph], mode: CUDAGraphMode = CUDAGraphMode.FULL, may_capture: bool = True
    ) -> Agreement:
        """What all ranks do in this step. The call is collective, and every rank gets the same answer.

        A size whose capture failed on a rank is not captured again, and replayed by none. One that all ranks had, and
        that a rank has given up since, is captured again.

        Args:
            rows: The number of rows of this rank's batch; 0 for no work.
            graphs: The mode and the size of each graph that this rank has now. Other sizes do not count.
            mode: The best runtime mode that the batch allows: FULL, PIECEWISE or NONE.
            may_capture: Whether this rank would capture in this step.

        Raises:
            ConfigError: The batch cannot exist.
            ConsensusError: A rank did not vote in time. The ranks may then be at different steps, so that each later
                call raises this, too; make a new ``RankConsensus`` on all ranks.
        """
        check_count("rows", rows, 0)
        if mode not in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            raise ConfigError(f"mode must be FULL, PIECEWISE or NONE, got {mode!r}")
        table = self._exchange([rows, mode, may_capture, *(graph in graphs for graph in self._graphs)]).tolist()
        votes = [RankVote(row[0], row[1], row[2], frozenset(compress(self._graphs, row[3:]))) for row in table]
        self._tried -= frozenset.intersection(*(vote.graphs for vote in votes))
        agreed = merge_votes(votes, self.sizes, self._tried)
        self._tried |= {agreed[:2]} if agreed.capture else set()
        return agreed

    def least(self, numbers: Sequence[int]) -> list[int]:
        """What ``CUDAGraphWrapper(agree=...)`` takes. The call is collective.

        Args:
            numbers: As many on every rank.

        Returns:
            For each place the least number of all ranks.

        Raises:
            ConsensusError: As ``agree``.
        """
        least: list[int] = self._exchange(numbers).amin(0).tolist()
        return least

    def _exchange(self, row: Sequence[int]) -> torch.Tensor:
        """The rows of all ranks. Each rank fills its own row only, so that the sum is the table of all."""
        table = torch.zeros(self.world_size, len(row), dtype=torch.int64, device="cpu")
        table[self.rank] = torch.tensor(row, device="cpu")
        if self._failed:
            raise ConsensusError("an earlier step failed, so no later one can be agreed on; make a new RankConsensus")
        group = self._group() if self._group is not None else None
        if group is None and self._group is not None:
            raise ConsensusError("the group of the votes was destroyed; make a new RankConsensus")
        try:
            if group is not None:
                dist.all_reduce(table, group=group)
        except RuntimeError as error:
            self._failed = True
            raise ConsensusError(f"rank {self.rank} got no agreement, as a rank did not vote: {error}") from error
        return table
