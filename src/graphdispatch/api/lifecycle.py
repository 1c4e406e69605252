"""What the doors around one callable share: letting its graphs go, and its bookkeeping."""

from ..copying import MadeAnew
from ..errors import check_type
from ..serve.server import Server
from ..stats import EvictionReason

__all__ = ["Lifecycle"]


class Lifecycle(MadeAnew):
    """Graphs that can be invalidated, put to sleep and woken. Thread-safe."""

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

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the cache's accounting is off; cheap enough to run when idle."""
        self._server.graphs.cache.check_integrity()
