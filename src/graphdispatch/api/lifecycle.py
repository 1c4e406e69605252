"""What the doors around one callable share: letting its graphs go, and its bookkeeping."""

from ..copying import MadeAnew
from ..errors import check_type
from ..memory.accounting import MemoryReport
from ..serve.server import Server
from ..stats import EvictionReason

__all__ = ["Lifecycle", "freeze"]


def freeze(server: Server, *, is_frozen: bool) -> None:
    """Forbid captures and comparisons of one callable, or allow them again. Thread-safe."""
    with server.lock:
        server.graphs.is_frozen = is_frozen
        for group in server.graphs.groups.values():
            group.freeze(is_frozen)


class Lifecycle(MadeAnew):
    """Graphs that can be invalidated, put to sleep and woken, frozen and unfrozen. Thread-safe."""

    __slots__ = ()
    _server: Server

    def invalidate(self, tag: str = "") -> None:
        """Release all graphs, since what they captured changed in a way that no guard sees; calls capture anew.

        ``tag`` says what changed, and is kept with the statistics' ``last_evictions``.
        """
        check_type("tag", tag, str, "text that says what changed")
        with self._server.lock:
            self._server.graphs.rearm(EvictionReason.INVALIDATED, tag)

    def sleep(self, tag: str = "") -> None:
        """Release graphs and buffers, and run calls eagerly until ``wake()``: while weights are unloaded or replaced.

        Waits for calls that a graph serves now. The pool is released too, unless it was given and is its owner's.
        """
        check_type("tag", tag, str, "text that says why")
        with self._server.lock:
            self._server.graphs.sleep(tag)

    def wake(self) -> None:
        """End ``sleep()``: graphs are captured again as calls come. Harmless when awake."""
        with self._server.lock:
            self._server.graphs.wake()

    def freeze(self) -> None:
        """Allow no capture and no comparison with eager from now on, so that no call takes longer than an eager one.

        A call that no verified graph serves runs eagerly, with the reason ``frozen``. That is also a batch that would
        have to be compared first: prewarm with real examples, which compares. ``verify_every`` rests.
        """
        freeze(self._server, is_frozen=True)

    def unfreeze(self) -> None:
        """End ``freeze()``. Harmless when not frozen."""
        freeze(self._server, is_frozen=False)

    @property
    def is_frozen(self) -> bool:
        """Whether captures and comparisons are forbidden."""
        return self._server.graphs.is_frozen

    def memory_report(self) -> MemoryReport:
        """The bytes held, part by part and graph by graph."""
        return self._server.graphs.memory_report()

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the cache's accounting is off; cheap enough to run when idle."""
        self._server.graphs.cache.check_integrity()
