"""What the front ends share: releasing their graphs, and their bookkeeping."""

from typing import TYPE_CHECKING

from ..call.rules import callable_name
from ..copying import MadeAnew
from ..errors import check_type
from ..memory.cache import MemoryReport
from ..serve.graphs import GraphSet, Health

if TYPE_CHECKING:
    from ..report import GraphTable, Report
    from .manager import KeyedGraphs

__all__ = ["Lifecycle"]


class Lifecycle(MadeAnew):
    """Graphs that can be invalidated, put to sleep and woken, frozen and unfrozen. Thread-safe."""

    __slots__ = ()
    _graphs: "GraphSet | KeyedGraphs"

    def invalidate(self, tag: str = "") -> None:
        """Release all graphs, since what they captured changed in a way that no guard sees; calls capture anew.

        Args:
            tag: What changed; it is kept with the statistics' ``last_evictions``.

        Raises:
            ConfigError: ``tag`` is no text.
        """
        check_type("tag", tag, str, "text that says what changed")
        self._graphs.invalidate(tag)

    def sleep(self, tag: str = "") -> None:
        """Release graphs and buffers, and run calls eagerly until ``wake()``: while weights are unloaded or replaced.

        Waits for calls that a graph serves now. The pool is released too, unless it was given and is its owner's.

        Args:
            tag: Why; it is kept with the statistics' ``last_evictions``.

        Raises:
            ConfigError: ``tag`` is no text.
        """
        check_type("tag", tag, str, "text that says why")
        self._graphs.sleep(tag)

    def wake(self) -> None:
        """End ``sleep()``: graphs are captured again as calls come. Harmless when awake."""
        self._graphs.wake()

    def freeze(self) -> None:
        """Allow no capture and no comparison with eager from now on, so that no call takes longer than an eager one.

        A call that no verified graph serves runs eagerly, with the reason ``frozen``. That is also a batch that would
        have to be compared first: prewarm with real examples, which compares. ``verify_every`` rests.
        """
        self._graphs.freeze(True)

    def unfreeze(self) -> None:
        """End ``freeze()``. Harmless when not frozen."""
        self._graphs.freeze(False)

    @property
    def is_frozen(self) -> bool:
        """Whether captures and comparisons are forbidden."""
        return self._graphs.is_frozen

    def memory_report(self) -> MemoryReport:
        """The bytes held, part by part and graph by graph."""
        return self._graphs.memory_report()

    @property
    def memory_bytes(self) -> int:
        """The bytes held in all: what ``memory_budget_bytes`` bounds."""
        return self.memory_report().total

    def health(self) -> Health:
        """Whether graphs serve at least half of the calls, and stay, with the commonest reasons where they do not.

        The log says the same once, as a WARNING: after the first thousand calls, and after 32 captures.
        """
        return Health.of(self._graphs.stats)

    def report(self) -> "Report":
        """What happened so far: sizes, gains, why calls ran eagerly, and what to do; ``report().save("report.html")``.

        It runs nothing. If calls are served meanwhile, its figures may be from slightly different moments.
        """
        from ..report import make_report  # here, since a report is seldom made

        graphs = self._graphs
        if isinstance(graphs, GraphSet):
            name, sets = callable_name(graphs.fn), [graphs]
        else:
            name, sets = type(self).__name__, [one.server.graphs for one in graphs.callables]
        groups = [group for one in sets for group in list(one.groups.values())]
        return make_report(name, graphs.stats, list(graphs.cache), groups, graphs.memory_report().total)

    @property
    def graphs(self) -> "GraphTable":
        """The graphs that are held now, with their hits, times and bytes: ``print(serve.graphs)`` shows a table."""
        return self.report().graphs

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the cache's accounting is off; cheap enough to run when idle."""
        self._graphs.cache.check_integrity()
