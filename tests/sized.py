"""What the tests of the cache share: entries that hold as many bytes as one says and need no capture."""

from collections.abc import Sequence

from graphdispatch.backends import Graph, Pool
from graphdispatch.engines import CUDAGraphEntry, DispatchKey
from graphdispatch.engines.registered_graphs import entry_around
from graphdispatch.runtime.cache import GraphCache, Victim
from graphdispatch.testing import MockCUDAGraph


class Sized(Graph):
    """A graph that does nothing and holds ``size`` bytes."""

    def __init__(self, size: int) -> None:
        self._size = size

    def replay(self) -> None:
        """Nothing to run."""

    def reset(self) -> None:
        self._size = 0

    @property
    def nbytes(self) -> int:
        return self._size


class Unused(Pool):
    """A pool that nothing runs in, and that holds nothing."""

    @property
    def nbytes(self) -> int:
        return 0

    def order_after_last_use(self) -> None:
        """Nothing runs."""


def entry(nbytes: int = 0, replays: int = 0, capture_ms: float = 1.0, key: object = "key") -> CUDAGraphEntry:
    """An entry whose graph holds ``nbytes`` bytes and that was replayed so often."""
    made = entry_around(MockCUDAGraph(), DispatchKey(1, 1))
    made.key = key
    made.graph = Sized(nbytes)
    made.capture_time_ms = capture_ms
    for _ in range(replays):
        made.increment_replay()
    return made


def filled(cache: GraphCache, *sizes: int) -> list[CUDAGraphEntry]:
    """Put entries of these sizes into the cache; their keys are 0, 1, 2, ..."""
    entries = [entry(nbytes, key=key) for key, nbytes in enumerate(sizes)]
    for made in entries:
        assert cache.add(made) == []
    return entries


def gone(victims: Sequence[Victim]) -> list[CUDAGraphEntry]:
    """The entries of the victims."""
    return [victim.entry for victim in victims]
