"""``Gain``: what replays of one graph gain over eager runs, by how much of the graph a batch fills."""

from typing import NamedTuple

__all__ = ["Gain"]


class _Timed(NamedTuple):
    """A batch that was run both ways; its graph takes the same time for every batch."""

    cells: int
    eager_s: float
    replay_s: float


class Gain:
    """The measured times of one graph. A graph computes on its padding, too, so that a small batch may be faster
    eagerly although a full one is not.

    ``cells`` are the rows of a batch, or the product of its extents where there are several dynamic dimensions. More of
    them take longer eagerly, and as long in the graph.
    """

    __slots__ = ("_faster", "_slower", "full_ms", "loses_below")

    def __init__(self) -> None:
        self.full_ms: float | None = None
        """By how much a replay of a full batch was faster than eager, in milliseconds; None if not measured."""
        self.loses_below = 0.0
        """Batches of fewer cells are expected to be faster eagerly."""
        self._slower: _Timed | None = None
        """The largest batch whose replay was clearly slower than eager."""
        self._faster: _Timed | None = None
        """The smallest batch of which that was not seen."""

    def tells(self, cells: int) -> bool:
        """Whether it is known already how such a batch fares."""
        return cells < self.loses_below or (self._faster is not None and cells >= self._faster.cells)

    def note(self, cells: int, eager_s: float, replay_s: float, *, is_slower: bool) -> None:
        """Note the times of a batch, in seconds. Between two batches eager's time is taken to grow evenly."""
        timed = _Timed(cells, eager_s, replay_s)
        if is_slower:
            self._slower = timed if self._slower is None or self._slower.cells < cells else self._slower
        else:
            self._faster = timed if self._faster is None or self._faster.cells > cells else self._faster
        low, high = self._slower, self._faster
        if low is None:
            return
        self.loses_below = low.cells + 1.0
        if high is not None and high.eager_s > low.eager_s and high.cells > low.cells:
            share = min(max((low.replay_s - low.eager_s) / (high.eager_s - low.eager_s), 0.0), 1.0)
            self.loses_below = max(self.loses_below, low.cells + share * (high.cells - low.cells))

    @property
    def text(self) -> str:
        """Why a batch that loses runs eagerly, as a sentence."""
        assert self._slower is not None
        _, eager, replay = self._slower
        return (
            f"eager is expected to be faster than the padding: a replay took {replay * 1e6:.0f} us and an eager run of "
            f"such a batch {eager * 1e6:.0f} us; have a size nearer to such batches (sizes=)"
        )
