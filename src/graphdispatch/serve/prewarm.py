"""Captures made on purpose, before batches need them: all sizes at the start, or one while nothing is to be served."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from ..axes import lengths_of
from ..call.signature import Refusal
from ..capture.collector import paused_collector
from ..capture.request import CaptureResult
from ..config import CUDAGraphConfig
from ..decide.decision import Decision
from ..errors import CaptureError, ConfigError, FallbackError, GraphDispatchError, shown
from ..memory.entry import CUDAGraphEntry
from ..modes import CUDAGraphMode, EntryState
from ..reasons import Reason
from ..showing import html_table
from .estimate import MemoryEstimate, estimate_memory
from .graphs import GraphSet
from .group import GraphGroup, Route
from .other_batches import difference_on, stretched, varied
from .server import Server

T = TypeVar("T")


class Limits(NamedTuple):
    """What a prewarm may take: seconds, and bytes held in the end; None for no limit of its own."""

    max_seconds: float | None = None
    max_bytes: int | None = None

    def checked(self) -> "Limits":
        """Itself. Raises ``ConfigError`` for what is no amount."""
        for name, value in self._asdict().items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise ConfigError(f"{name} must be a number above 0 or None, got {shown(value)}")
        return self


@dataclass(frozen=True)
class PrewarmReport:
    """What a prewarm did: sizes by mode, in the order of capture, and why each of the others has no graph."""

    captured: dict[CUDAGraphMode, tuple[int, ...]]
    left_out: dict[tuple[CUDAGraphMode, int], str]
    seconds: float
    memory_bytes: int
    reasons: dict[tuple[CUDAGraphMode, int], Reason] = field(default_factory=dict)
    """The reasons of those of ``left_out`` whose capture failed; no budget left them out."""

    def __str__(self) -> str:
        lines = [
            f"{len(sizes)} {mode.name} graphs captured" + (f": {' '.join(map(str, sizes))}" if sizes else "")
            for mode, sizes in self.captured.items()
        ]
        lines.append(f"{self.seconds:.2f} s, {self.memory_bytes / 2**20:.1f} MiB held")
        return "\n".join(lines + [f"{mode.name} {size} left out: {why}" for (mode, size), why in self.left_out.items()])

    def _repr_html_(self) -> str:
        rows = [(size, mode.name, "captured") for mode, sizes in self.captured.items() for size in sizes]
        rows += [(size, mode.name, why) for (mode, size), why in self.left_out.items()]
        title = f"{self.seconds:.2f} s, {self.memory_bytes / 2**20:.1f} MiB held"
        return html_table(title, ("size", "mode", "what became of it"), rows)


def estimate(
    server: Server, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int] | None
) -> MemoryEstimate:
    """See ``Graphed.estimate_memory``. Called with the server's lock held."""
    _check_open(server, route, "estimate_memory")
    group, leaves = _example(server, route, args, kwargs)
    wanted = route.table.checked(sizes) if group.signature.has_rows else (1,)
    return estimate_memory(server.graphs, group, leaves, wanted)


def capture_size(server: Server, routes: Sequence[Route], size: int) -> bool:
    """See ``Graphed.capture_size``. Called with the server's lock held."""
    largest = max((route.table.largest for route in routes), default=0)
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= largest:
        raise ConfigError(f"size must be an integer from 1 to {largest}, the largest size, got {shown(size)}")
    graphs = server.graphs
    if server.closed(routes[0]) is not None or graphs.is_frozen:
        return False
    for group in _groups(routes):
        table = group.route.table
        fits = size <= table.largest and group.example and group.blocked(size) is None
        if fits and graphs.current(group, size) is None:
            try:
                capture_checked(server, group, group.example, table.min_batch_of(size), size, compares_all=True)
            except GraphDispatchError:
                raise
            except Exception as error:  # of the callable, which refused the example when it was a call, too
                group.quarantine(size, Reason.CALL_RAISED, f"{type(error).__name__}: {error}")
    return size in captured_sizes(routes)


def captured_sizes(routes: Sequence[Route]) -> tuple[int, ...]:
    """See ``Graphed.captured_sizes``. Called with the server's lock held."""
    return common_sizes(sizes_of_groups(routes))


def sizes_of_groups(routes: Sequence[Route]) -> list[set[int]]:
    """The sizes that have a graph, for each group that has a batch dimension. Called with the server's lock held."""
    return [set(group.entries) for group in _groups(routes)]


def common_sizes(groups: Sequence[set[int]]) -> tuple[int, ...]:
    """The sizes that are in all groups, increasing; none without a group."""
    return tuple(sorted(set.intersection(*groups))) if groups else ()


def _groups(routes: Sequence[Route]) -> list[GraphGroup]:
    """The groups that have a batch dimension."""
    return [group for route in routes for group in route.groups if group.signature.has_rows]


class CaptureBatch:
    """The captures of one prewarm, over all routes. Used with the server's lock held."""

    def __init__(
        self, server: Server, config: CUDAGraphConfig, limits: Limits, *, progress: bool = False, compare: str = "ends"
    ) -> None:
        if compare not in ("ends", "all"):
            raise ConfigError(f"compare must be 'ends' or 'all', got {shown(compare)}")
        self._compares_all = compare == "all"
        self._server = server
        self._config = config
        self._limits = limits.checked()
        self._progress = progress
        self._captured: dict[CUDAGraphMode, list[int]] = {}
        self._left_out: dict[tuple[CUDAGraphMode, int], str] = {}
        self._reasons: dict[tuple[CUDAGraphMode, int], Reason] = {}
        self._started = time.perf_counter()

    def run(
        self, routes: Sequence[Route], args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int] | None
    ) -> PrewarmReport:
        """Capture the sizes that have no graph yet, from an example call. See ``Graphed.prewarm``."""
        _check_open(self._server, routes[0], "prewarm")
        self._server.graphs.refresh()
        with paused_collector(self._config.options.gc_disable, sweeps=True):
            for route in routes:
                self._capture(route, args, kwargs, sizes)
        captured = {mode: tuple(done) for mode, done in self._captured.items()}
        seconds = time.perf_counter() - self._started
        held = self._server.graphs.memory_bytes
        return PrewarmReport(captured, self._left_out, seconds, held, self._reasons)

    def _capture(
        self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int] | None
    ) -> None:
        """Capture the sizes of one route."""
        graphs, mode = self._server.graphs, route.table.mode
        most = graphs.cache.limit.max_cached_graphs
        group, leaves = _example(self._server, route, args, kwargs)
        wanted = route.table.checked(sizes) if group.signature.has_rows else (1,)
        todo = [size for size in sorted(wanted, reverse=True) if graphs.current(group, size) is None]
        if most is not None and len(todo) > most:
            raise ConfigError(
                f"prewarm of {len(todo)} sizes needs max_cached_graphs >= {len(todo)}, got {most}; raise it, or name "
                "fewer in sizes="
            )
        self._capture_all(group, leaves, todo)
        # The first run of a size may make state, such as a table of its length: it ends graphs made before, and runs of
        # other sizes need it.
        again = (size for size in todo if self._reasons.get((mode, size)) is Reason.STATE_REBOUND)
        if unfit := [*again, *(size for size in todo if graphs.is_stale(group, size))]:
            graphs.refresh()
            self._capture_all(group, leaves, unfit)
        self._captured.setdefault(mode, []).extend(size for size in todo if graphs.current(group, size) is not None)

    def _capture_all(self, group: GraphGroup, leaves: Sequence[Any], todo: list[int]) -> None:
        """Capture sizes of a group, and note why each of the others has no graph."""
        table = group.route.table
        within = self._within_budget(group, leaves, todo)
        title = f"capturing {table.mode.name}"
        for size in _progress_bar(within, title, enabled=self._progress, total=len(todo), status=self._held):
            rows = table.min_batch_of(size) if group.signature.has_rows else 1
            result = capture_checked(self._server, group, leaves, rows, size, compares_all=self._compares_all)
            key = table.mode, size
            self._left_out.pop(key, None)
            self._reasons.pop(key, None)
            if result.entry is None:
                self._left_out[key], self._reasons[key] = result.detail, result.reason

    def _held(self) -> str:
        return f"{self._server.graphs.memory_bytes / 2**20:.1f} MiB"

    def _within_budget(self, group: GraphGroup, leaves: Sequence[Any], todo: list[int]) -> Iterator[int]:
        """The sizes for which there are time and memory, each given when the one before it is done.

        What a capture took beyond the estimate is expected of the next one too.
        """
        graphs, mode, latest, beyond, is_first = self._server.graphs, group.route.table.mode, 0.0, 0, True
        seconds, limit = self._limits.max_seconds, self._limits.max_bytes or self._config.options.memory_budget_bytes
        known = None
        if limit is not None and todo:
            with suppress(CaptureError):  # the captures themselves will tell
                known = estimate_memory(graphs, group, leaves, todo)
        for size in todo:
            begun, held = time.perf_counter(), graphs.memory_bytes
            guess = known.per_size[size] if known is not None else 0
            # The first one brings the pool and the inputs, as far as they are not there already.
            needed = max(known.alone(size) - held, 0) if known is not None and is_first else guess + beyond
            if seconds is not None and begun - self._started + latest > seconds:
                self._left_out[mode, size] = f"max_seconds={seconds} are used up"
            elif limit is not None and held + needed > limit:
                self._left_out[mode, size] = f"it would not fit into {limit} bytes"
            else:
                yield size
                latest = time.perf_counter() - begun
                beyond = 0 if is_first else max(graphs.memory_bytes - held - guess, 0)
                is_first = False


def _progress_bar(
    items: Iterable[T], description: str, *, enabled: bool, total: int, status: Callable[[], str]
) -> Iterator[T]:
    """``items`` one by one, behind a bar on standard error if ``enabled``, which shows ``status()`` after each.

    Needs the extra ``progress``. Items that are left out of ``total`` leave the bar short.
    """
    if not enabled:
        yield from items
        return
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError("progress=True needs tqdm: pip install 'graphdispatch[progress]'") from error
    with tqdm(desc=description, unit="graph", total=total) as bar:
        for item in items:
            yield item
            bar.set_postfix_str(status(), refresh=False)
            bar.update()


def _check_open(server: Server, route: Route, what: str) -> None:
    """Raise ``ConfigError`` if nothing may be captured now, such as between ``sleep()`` and ``wake()``, or frozen."""
    closed = server.closed(route) or (Reason.FROZEN if server.graphs.is_frozen else None)
    if closed is not None:
        raise ConfigError(f"{what} cannot capture now: {Decision.eager(closed).explain()}")


def _example(
    server: Server, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[GraphGroup, Sequence[Any]]:
    found = server.find(route, args, kwargs)
    if isinstance(found, Refusal):
        why = Decision.eager(found.reason, detail=found.detail)
        raise ConfigError(f"prewarm cannot capture from this example: {why.explain()}")
    group, leaves, rows = found
    if not all(lengths_of(group.inputs.axes, rows)):
        raise ConfigError(f"prewarm cannot capture from this example: {group.decide(rows).explain()}")
    if server.keeps_examples:
        group.keep_example(leaves)
    return group, leaves


def capture_checked(
    server: Server, group: GraphGroup, leaves: Sequence[Any], rows: int, size: int, *, compares_all: bool = False
) -> CaptureResult:
    """Capture one size from a full batch, and compare it on another one of ``rows`` rows, the fewest that it serves;
    with ``compares_all``, on every further number of rows, up to ``MOST_COMPARED``.

    Raises ``FallbackError`` with ``strict``.
    """
    result = server.graphs.capture(group, group.resized(leaves, size), size, size, keep_effects=False)
    if result.entry is not None and result.entry.state is EntryState.CAPTURED:
        result = _compare(server.graphs, group, leaves, rows, result.entry, compares_all) or result
    if result.entry is None and server.strict:
        raise FallbackError(f"prewarm could not capture {size} rows: {result.detail}", result.reason)
    return result


def _compare(
    graphs: GraphSet, group: GraphGroup, leaves: Sequence[Any], rows: int, entry: CUDAGraphEntry, compares_all: bool
) -> CaptureResult | None:
    """Compare a new graph with eager on other batches made of the example; what found a difference, or None.

    They are a second batch unless the example has nothing but integers, since its rows are repeated.
    """
    other = varied(group, leaves, entry.size)
    is_second = entry.differs(other)
    if rows != entry.size and not entry.depends_on_padding(rows) and _tells(group, varied(group, leaves, rows), rows):
        found = _compare_numbers(graphs, group, leaves, rows, entry, compares_all)
        if found is None and is_second:
            entry.passed()
        return found
    return difference_on(graphs, group, other, entry.size, entry) if is_second else None


def capture_example(
    server: Server, route: Route, call: tuple[tuple[Any, ...], dict[str, Any]], rows: int, size: int, name: str
) -> CaptureResult:
    """Capture one size from a call of ``rows`` rows, and compare it on all numbers of rows that it pads. Leaves no
    effect. Raises ``CaptureError`` if there can be no graph."""
    with torch.no_grad(), server.lock:
        server.graphs.refresh()
        found = server.find(route, *call)
        if isinstance(found, Refusal):
            raise CaptureError(f"no graph for {name}: {found.detail}", found.reason)
        group, leaves, _ = found
        result = server.graphs.capture(group, leaves, rows, size, keep_effects=False)
        if result.entry is not None and rows < size:
            result = _compare_numbers(server.graphs, group, leaves, rows, result.entry) or result
    if result.entry is None:
        raise CaptureError(f"no graph for {name}: {result.detail}", result.reason) from result.error
    return result


def _compare_numbers(
    graphs: GraphSet,
    group: GraphGroup,
    leaves: Sequence[Any],
    rows: int,
    entry: CUDAGraphEntry,
    compares_all: bool = True,
) -> CaptureResult | None:
    """Compare a new graph with eager on a batch of ``rows`` rows, and of each further number that it pads: without
    ``compares_all`` of as many as its proof needs. What found a difference, or None. No batch counts as the second."""
    state, batch = entry.state, entry.warm_batch
    for number in (rows, *entry.compared.missing(rows, entry.size)):
        if number != rows and not (compares_all or (entry.proof is not None and entry.proof.needs_batches)):
            break
        example = varied(group, leaves, number) if entry.compares(number) else None
        if example is not None and _tells(group, example, number):
            found = difference_on(graphs, group, example, number, entry)
            found = found or stretched(graphs, group, example, number, entry)
            if found is not None:
                return found
    entry.state, entry.warm_batch = state, batch
    return None


def _tells(group: GraphGroup, batch: Sequence[Any], rows: int) -> bool:
    """Whether a batch made of an example is one that graphs serve: not if a mask in it hides a whole row."""
    return group.signature.match(batch) == rows


def arguments_of(dummy: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The positional and keyword arguments that a ``dummy_fn`` returned in one of four ways."""
    if isinstance(dummy, Mapping):
        return (), dummy
    if not isinstance(dummy, tuple):
        return (dummy,), {}
    if len(dummy) == 2 and isinstance(dummy[0], tuple) and isinstance(dummy[1], Mapping):
        return dummy
    return dummy, {}
