"""``Probation``: entries that were hardly used go first."""

from collections.abc import Sequence

from ..errors import check_count
from .entry import CUDAGraphEntry
from .eviction import EvictionPolicy

__all__ = ["Probation"]


class Probation(EvictionPolicy):
    """Entries with fewer than ``min_replays`` replays go first, least recently used ones ahead; then as ``policy``."""

    def __init__(self, min_replays: int, policy: EvictionPolicy) -> None:
        check_count("min_replays_to_keep", min_replays, 0)
        self.min_replays = min_replays
        self.policy = policy

    def scores(self, entries: Sequence[CUDAGraphEntry]) -> list[float]:
        """What ``policy`` says, or minus infinity."""
        settled = self.policy.scores(entries)
        return [
            score if entry.replay_count >= self.min_replays else float("-inf")
            for score, entry in zip(settled, entries, strict=True)
        ]

    def evicted(self, entry: CUDAGraphEntry, score: float) -> None:
        """Tell ``policy``."""
        self.policy.evicted(entry, score)
