"""What the front ends share: which capturer makes their graphs, how these are released, and their bookkeeping."""

import logging
from typing import TYPE_CHECKING

from ..config import CUDAGraphOptions
from ..copying import MadeAnew
from ..errors import ConfigError, check_type, did_you_mean
from ..modes import CUDAGraphMode
from ..proof.check.licence import Verification
from ..proof.check.pipeline import ProvingCapturer
from ..record import PlainCapturer
from ..runtime.cache import GraphCache
from ..runtime.graph_set import GraphSet, memory_of
from ..runtime.group import GraphGroup
from ..runtime.health import Health, details_of
from ..runtime.memory import MemoryReport
from ..runtime.protocols import Capturer
from ..runtime.rules import callable_name
from ..stats import EvictionReason

if TYPE_CHECKING:
    from ..report import GraphTable, Report


_log = logging.getLogger("graphdispatch")


class Lifecycle(MadeAnew):
    """Graphs that can be invalidated, put to sleep and woken, frozen and unfrozen. Thread-safe.

    What changes graphs raises ``CaptureError`` in a break, a pad function or a finalizer that runs within their replay.
    """

    __slots__ = ()
    _graph_cache: GraphCache
    _graphs: GraphSet
    """Those of the only callable; what serves several has ``_graph_sets`` of its own."""

    @property
    def _graph_sets(self) -> list[GraphSet]:
        """The graphs of each callable."""
        return [self._graphs]

    @property
    def _groups(self) -> list[GraphGroup]:
        """The groups of all callables."""
        return [group for one in self._graph_sets for group in list(one.groups.values())]

    def _rearm(self, reason: EvictionReason) -> None:
        for graphs in self._graph_sets:
            graphs.rearm(reason)

    def invalidate(self, tag: str = "") -> None:
        """Release all graphs, since what they captured changed in a way that no guard sees; calls capture anew.

        Args:
            tag: What changed, for the log.

        Raises:
            ConfigError: ``tag`` is no text.
        """
        check_type("tag", tag, str, "text that says what changed")
        _log.info("invalidated graphs%s", tag and f": {tag}")
        self._rearm(EvictionReason.INVALIDATED)

    def sleep(self, tag: str = "") -> None:
        """Release graphs and buffers, and run calls eagerly until ``wake()``: while weights are unloaded or replaced.

        Waits for calls that a graph serves now. The pool's memory goes with its last graph.

        Args:
            tag: Why, for the log.

        Raises:
            ConfigError: ``tag`` is no text.
        """
        check_type("tag", tag, str, "text that says why")
        self._graph_cache.refuse_changes()
        self._graph_cache.is_asleep = True
        _log.info("put graphs to sleep%s", tag and f": {tag}")
        self._rearm(EvictionReason.ASLEEP)

    def wake(self) -> None:
        """End ``sleep()``: graphs are captured again as calls come. Harmless when awake."""
        if self._graph_cache.is_asleep:
            self._rearm(EvictionReason.ASLEEP)  # since weights may be elsewhere now
            self._graph_cache.is_asleep = False

    def freeze(self) -> None:
        """Allow no capture and no comparison with eager from now on, so that no call takes longer than an eager one.

        A call that no verified graph serves runs eagerly, with the reason ``frozen``. That is also a batch that would
        have to be compared first: prewarm with real examples, which compares. ``verify_every`` rests.
        """
        self._set_frozen(True)

    def unfreeze(self) -> None:
        """End ``freeze()``. Harmless when not frozen."""
        self._set_frozen(False)

    def _set_frozen(self, is_frozen: bool) -> None:
        self._graph_cache.refuse_changes()
        self._graph_cache.is_frozen = is_frozen
        for graphs in self._graph_sets:
            graphs.schedule_checks()

    @property
    def is_frozen(self) -> bool:
        """Whether captures and comparisons are forbidden."""
        return self._graph_cache.is_frozen

    def memory_report(self) -> MemoryReport:
        """The bytes held, part by part."""
        return memory_of(self._graph_cache, self._graph_sets)

    @property
    def memory_bytes(self) -> int:
        """The bytes held in all. ``memory_budget_bytes`` bounds those that the present graphs need."""
        return self.memory_report().total

    def health(self) -> Health:
        """Whether graphs serve at least half of the calls, and stay, with the commonest reasons where they do not.

        The log says the same once, as a WARNING: after the first thousand calls, and after 32 captures.
        """
        return Health.of(self._graph_cache.stats, self._groups)

    def report(self) -> "Report":
        """What happened so far: sizes, gains, why calls ran eagerly, and what to do; ``report().save("report.html")``.

        It runs nothing. If calls are served meanwhile, its figures may be from slightly different moments.
        """
        from ..report import make_report  # here, since a report is seldom made

        sets, cache = self._graph_sets, self._graph_cache
        name = callable_name(sets[0].fn) if len(sets) == 1 else type(self).__name__
        return make_report(name, cache.stats, list(cache), self._groups, details_of(self._groups), self.memory_bytes)

    @property
    def graphs(self) -> "GraphTable":
        """The graphs that are held now, with their hits, times and bytes: ``print(serve.graphs)`` shows a table."""
        return self.report().graphs

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the cache's accounting is off; cheap enough to run when idle."""
        self._graph_cache.check_integrity()


def capturer_for(options: CUDAGraphOptions, mode: CUDAGraphMode = CUDAGraphMode.FULL) -> Capturer:
    """The capturer for these options.

    Args:
        options: The options of the front end.
        mode: The mode of its graphs.

    Raises:
        ConfigError: ``options.verify`` names no policy.
    """
    named = options.verify
    if isinstance(named, str) and named not in Verification.policies:
        known = [str(name) for name in Verification.policies]
        raise ConfigError(
            f"options.verify must be True, False or the name of a policy, one of {known}, got {named!r}"
            f"{did_you_mean(named, known)}; a policy is a subclass of Verification with a name"
        )
    is_plain = not (options.verify or options.guard_weights or options.verify_every) and mode is CUDAGraphMode.FULL
    return PlainCapturer() if is_plain else ProvingCapturer()
