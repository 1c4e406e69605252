"""``Gain``: what a replay of one graph takes beside an eager run of as many rows."""

from typing import NamedTuple

__all__ = ["Gain"]


class Gain(NamedTuple):
    """The times of a full batch, measured once; on an asynchronous device, until its work is done."""

    eager_ms: float
    """An eager run, in milliseconds."""
    replay_ms: float
    """A replay, the copy of the inputs included, in milliseconds."""

    @property
    def ms(self) -> float:
        """By how much a replay is faster, in milliseconds."""
        return self.eager_ms - self.replay_ms
