"""Captures made on purpose, before batches need them: all sizes at the start, or one while nothing is to be served."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..call.signature import Refusal
from ..capture.collector import paused_collector
from ..capture.request import CaptureResult
from ..decide import Decision
from ..errors import CaptureError, ConfigError, FallbackError, shown
from ..memory.cache import GraphCache
from ..memory.entry import CUDAGraphEntry
from ..memory.replay import next_use
from ..modes import CUDAGraphMode, EntryState
from ..reasons import Reason
from ..showing import html_table
from ..sizes import lengths_of, pack
from .graphs import GraphSet, memory_of
from .group import GraphGroup, Route
from .server import Server


@dataclass(frozen=True)
class PrewarmReport:
    """What a prewarm did: sizes by mode, in the order of capture, and why each of the others has no graph."""

    captured: dict[CUDAGraphMode, tuple[int, ...]]
    left_out: dict[tuple[CUDAGraphMode, int], str]
    seconds: float
    memory_bytes: int
    reasons: dict[tuple[CUDAGraphMode, int], Reason] = field(default_factory=dict)
    """The reasons of those of ``left_out`` that the time did not leave out."""

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


def capture_size(server: Server, route: Route, size: Any) -> bool:
    """See ``Graphed.capture_size``. Called with the server's lock held."""
    sizes = route.table.points
    if not isinstance(size, int | tuple) or isinstance(size, bool) or size not in sizes:
        raise ConfigError(f"size must be one of {sizes}, got {shown(size)}")
    graphs, number = server.graphs, route.table.number_of(size)
    if server.closed(route) is not None or graphs.cache.is_frozen:
        return False
    open_groups = [group for group in _groups(route) if group.example and group.blocked(number) is None]
    for group in open_groups:
        if graphs.current(group, number) is None:
            _Prewarm(server, None, compares_all=True).capture(group, group.example, [number])
    return size in captured_sizes(route)


def captured_sizes(route: Route) -> tuple[Any, ...]:
    """See ``Graphed.captured_sizes``. Called with the server's lock held."""
    groups = [set(group.entries) for group in _groups(route)]
    return tuple(getattr(size, "lengths", size) for size in sorted(set.intersection(*groups))) if groups else ()


def _groups(route: Route) -> list[GraphGroup]:
    """The groups that have a batch dimension."""
    return [group for group in route.groups if group.signature.has_rows]


def prewarm(
    server: Server,
    route: Route,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sizes: Sequence[int] | None = None,
    max_seconds: float | None = None,
    *,
    compare: str = "ends",
) -> PrewarmReport:
    """Capture the sizes of a route that have no graph yet, from a call of it. See ``Graphed.prewarm``. Called with the
    server's lock held, and once ``check_open`` has passed: who puts graphs to sleep meanwhile waits for the lock."""
    if max_seconds is not None and (
        isinstance(max_seconds, bool) or not isinstance(max_seconds, int | float) or not max_seconds > 0
    ):
        raise ConfigError(f"max_seconds must be a number above 0 or None, got {shown(max_seconds)}")
    if compare not in ("ends", "all"):
        raise ConfigError(f"compare must be 'ends' or 'all', got {shown(compare)}")
    graphs, mode = server.graphs, route.table.mode
    most = graphs.cache.max_graphs
    run = _Prewarm(server, max_seconds, compares_all=compare == "all")
    graphs.refresh()
    with paused_collector(graphs.options.gc_disable):
        group, leaves, rows = _example(server, route, args, kwargs)
        wanted = sorted(route.table.checked(sizes), reverse=True) if group.signature.has_rows else [1]
        missing = []
        for size in wanted:
            if (entry := graphs.current(group, size)) is None:
                missing.append(size)
            else:
                entry.last_used = next_use()  # so that others give way first
        if len(missing) > most:
            raise ConfigError(
                f"prewarm of {len(missing)} sizes needs max_cached_graphs >= {len(missing)}, got {most}; raise it, or "
                "name fewer in sizes="
            )
        run.capture(group, leaves, missing)
        # The run of one size may move a workspace that graphs made before read.
        if unfit := [size for size in missing if graphs.is_stale(group, size)]:
            graphs.refresh()
            run.capture(group, leaves, unfit)
    if group.signature.has_rows and any(graphs.current(group, size) is None for size in route.table.sizes):
        axes = group.inputs.axes
        group.example = group.resized(leaves, pack(axes, [2, *lengths_of(axes, rows)[1:]]))
    lacking = [size for size in wanted if graphs.current(group, size) is None]
    for key in [(mode, size) for size in lacking if (mode, size) not in run.left_out]:  # a later capture displaced it
        run.left_out[key], run.reasons[key] = Reason.CACHE_FULL.text, Reason.CACHE_FULL
    captured = {mode: tuple(size for size in missing if size not in lacking)}
    held = memory_of(graphs.cache, [graphs]).total
    return PrewarmReport(captured, run.left_out, time.perf_counter() - run.started, held, run.reasons)


class _Prewarm:
    """The captures of one prewarm, within its limits."""

    def __init__(self, server: Server, max_seconds: float | None, *, compares_all: bool) -> None:
        self._server, self._max_seconds, self._compares_all = server, max_seconds, compares_all
        self.left_out: dict[tuple[CUDAGraphMode, int], str] = {}
        self.reasons: dict[tuple[CUDAGraphMode, int], Reason] = {}
        self.started = time.perf_counter()
        self._latest_s = 0.0
        self._latest_bytes = max((entry.nbytes for entry in server.graphs.cache), default=0)

    def capture(self, group: GraphGroup, leaves: Sequence[Any], sizes: Iterable[int]) -> None:
        """Capture these sizes from an example, and note why each of the others has no graph."""
        table = group.route.table
        for size in sizes:
            key = table.mode, size
            begun = time.perf_counter()
            if self._max_seconds is not None and begun - self.started + self._latest_s > self._max_seconds:
                self.left_out[key] = f"max_seconds={self._max_seconds} are used up"
                continue
            if self._is_beyond_budget():
                self.left_out[key], self.reasons[key] = Reason.CACHE_FULL.text, Reason.CACHE_FULL
                continue
            rows = table.min_batch_of(size) if group.signature.has_rows else 1
            result = self._capture_checked(group, leaves, rows, size)
            self.left_out.pop(key, None)
            self.reasons.pop(key, None)
            self._latest_s = time.perf_counter() - begun
            if result.entry is None:
                self.left_out[key], self.reasons[key] = result.detail, result.reason
            else:
                self._latest_bytes = result.entry.nbytes

    def _capture_checked(self, group: GraphGroup, leaves: Sequence[Any], rows: int, size: int) -> CaptureResult:
        """Capture one size from a full batch, and compare it on another one of ``rows`` rows, the fewest that it
        serves, and perhaps on every further number of rows, up to ``MOST_COMPARED``.

        Raises ``FallbackError`` with ``strict``.
        """
        result = self._server.graphs.capture(group, group.resized(leaves, size), size, size, keep_effects=False)
        if result.entry is not None and result.entry.state is EntryState.CAPTURED:
            result = self._compare(group, leaves, rows, result.entry) or result
        if result.entry is None and self._server.strict:
            raise FallbackError(f"prewarm could not capture {size} rows: {result.detail}", result.reason)
        return result

    def _compare(
        self, group: GraphGroup, leaves: Sequence[Any], rows: int, entry: CUDAGraphEntry
    ) -> CaptureResult | None:
        """Compare a new graph with eager on other batches made of the example; what found a difference, or None.

        They are a second batch unless the example has nothing but integers, since its rows are repeated.
        """
        graphs, other = self._server.graphs, group.varied(leaves, entry.size)
        is_second = entry.differs(other)
        is_padded = rows != entry.size and not entry.depends_on_padding(rows)
        if is_padded and _tells(group, group.varied(leaves, rows), rows):
            found = _compare_numbers(graphs, group, leaves, rows, entry, self._compares_all)
            if found is None and is_second:
                entry.passed()
            return found
        return graphs.difference_on(group, other, entry.size, entry) if is_second else None

    def _is_beyond_budget(self) -> bool:
        """Whether one more graph would not fit into the budget of memory beside those that there are.

        It is expected to take as much as the one before it, and as those that there are on average.
        """
        cache = self._server.graphs.cache
        if cache.max_bytes is None:
            return False
        sizes = [entry.nbytes for entry in cache]
        average = sum(sizes) // max(len(sizes), 1)
        return cache.nbytes + max(average, self._latest_bytes) > cache.max_bytes


def refuse_closed(cache: GraphCache, *, is_over: bool = False) -> None:
    """Raise ``CaptureError`` if graphs sleep or are frozen, or their callable was forgotten."""
    if cache.is_frozen or cache.is_asleep or is_over:
        closed = Reason.FROZEN if cache.is_frozen else Reason.ASLEEP if cache.is_asleep else Reason.NOT_CAPTURED
        raise CaptureError(f"no capture: {closed.text}", closed)


def check_open(server: Server, route: Route) -> None:
    """Raise ``ConfigError`` if nothing may be captured now, such as between ``sleep()`` and ``wake()``, or frozen."""
    closed = server.closed(route) or (Reason.FROZEN if server.graphs.cache.is_frozen else None)
    if closed is not None:
        raise ConfigError(f"prewarm cannot capture now: {Decision.eager(closed).explain()}")


def _example(
    server: Server, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[GraphGroup, Sequence[Any], int]:
    found = server.graphs.find(route, args, kwargs)
    if isinstance(found, Refusal):
        why = Decision.eager(found.reason, detail=found.detail)
        raise ConfigError(f"prewarm cannot capture from this example: {why.explain()}")
    group, _, rows = found
    if not all(lengths_of(group.inputs.axes, rows)):
        raise ConfigError(f"prewarm cannot capture from this example: {group.decide(rows).explain()}")
    server.graphs.give_way(group)  # it shall not wait, since its example may be kept for later captures
    return found


def capture_example(
    server: Server, route: Route, call: tuple[tuple[Any, ...], dict[str, Any]], rows: int, size: int, name: str
) -> CaptureResult:
    """Capture one size from a call of ``rows`` rows, and compare it on all numbers of rows that it pads. Leaves no
    effect. Raises ``CaptureError`` if there can be no graph."""
    with torch.no_grad(), server.lock:
        # Which another thread may have done since the caller asked.
        refuse_closed(server.graphs.cache, is_over=server.graphs.is_over)
        server.graphs.refresh()
        found = server.graphs.find(route, *call)
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
        example = group.varied(leaves, number) if entry.compares(number) else None
        if example is not None and _tells(group, example, number):
            found = graphs.difference_on(group, example, number, entry)
            if found is not None:
                return found
    entry.state, entry.warm_batch = state, batch
    return None


def _tells(group: GraphGroup, batch: Sequence[Any], rows: int) -> bool:
    """Whether a batch made of an example is one that graphs serve: not if a mask in it hides a whole row."""
    return group.signature.match(batch) == rows


def arguments_of(dummy: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that a ``dummy_fn`` returned in one of four ways."""
    if isinstance(dummy, Mapping):
        return (), dict(dummy)
    if not isinstance(dummy, tuple):
        return (dummy,), {}
    if len(dummy) == 2 and isinstance(dummy[0], tuple) and isinstance(dummy[1], Mapping):
        return dummy[0], dict(dummy[1])
    return dummy, {}
