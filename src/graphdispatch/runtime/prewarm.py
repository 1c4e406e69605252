"""Captures made on purpose, before batches need them: all sizes at the start, or one while nothing is to be served."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, product
from math import inf
from typing import Any

import torch

from ..errors import CaptureError, ConfigError, FallbackError, GraphDispatchError, error_of_signal, shown
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..showing import html_table, shortened, without_numbers
from ..sizes import Axis, lengths_of, pack
from .cache import GraphCache
from .decide import Decision, SizeTable
from .entry import CUDAGraphEntry
from .graph_set import GraphSet, memory_of
from .group import GraphGroup, Route
from .protocols import CaptureResult
from .rules import callable_name
from .server import Server
from .signature import Refusal
from .static_inputs import largest_within, pointing_within, resized, varied
from .windows import paused_collector

_log = logging.getLogger("graphdispatch")

_MOST_LOOKED_AT = 4096
"""The most batches of a size of which a prewarm sees whether its proof covers them."""
_MOST_BATCHES = 1024
"""The most hits that a prewarm makes."""
_POINTS = "If its integers point into the batch, give prewarm an example of each size"
_MANY = 64
"""A prewarm of more graphs says after the first one how long all of them may take."""


@dataclass(frozen=True)
class PrewarmReport:
    """What a prewarm did: the sizes captured, in order, and why each of the others has no graph."""

    mode: CUDAGraphMode
    captured: tuple[int, ...]
    left_out: dict[int, str]
    seconds: float
    memory_bytes: int
    reasons: dict[int, Reason] = field(default_factory=dict)
    """The reasons of those of ``left_out`` that the time did not leave out."""
    padding: str = ""
    """Why batches that would be padded run eagerly with some of these graphs; empty if graphs serve them."""

    def __str__(self) -> str:
        sizes = f": {' '.join(map(str, self.captured))}" if self.captured else ""
        lines = [f"{len(self.captured)} {self.mode.name} graphs captured{sizes}", self._cost]
        lines += [f"batches that would be padded run eagerly: {self.padding}"] if self.padding else []
        return "\n".join(lines + [f"{self.mode.name} {sizes} left out: {why}" for sizes, why in self._without_graph()])

    @property
    def _cost(self) -> str:
        return f"{self.seconds:.2f} s, {self.memory_bytes / 2**20:.1f} MiB held"

    def _without_graph(self) -> list[tuple[str, str]]:
        """Sizes, and why they have no graph. Sizes for which the same is said share a line, with the text of the first
        of them."""
        groups: dict[str, list[int]] = {}
        for size, why in self.left_out.items():
            groups.setdefault(without_numbers(why), []).append(size)
        return [(shortened(sizes), self.left_out[sizes[0]]) for sizes in groups.values()]

    def _repr_html_(self) -> str:
        rows = [*((str(size), "captured") for size in self.captured), *self._without_graph()]
        return html_table(f"{self.mode.name}: {self._cost}", ("size", "what became of it"), rows)


def captured_sizes(server: Server, route: Route) -> tuple[Any, ...]:
    """See ``Graphed.captured_sizes``."""
    groups = [set(group.entries.copy()) for group in _groups(route)]  # without the lock: a pad function may call it
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
    progress: Callable[[int, int, float], object] | None = None,
) -> PrewarmReport:
    """Capture the sizes of a route that have no graph yet, from a call of it. See ``Graphed.prewarm``. Who puts graphs
    to sleep meanwhile waits for the lock."""
    if max_seconds is not None and (
        isinstance(max_seconds, bool) or not isinstance(max_seconds, int | float) or not max_seconds > 0
    ):
        raise ConfigError(f"max_seconds must be a number above 0 or None, got {shown(max_seconds)}")
    graphs = server.graphs
    graphs.cache.refuse_changes()
    if torch.is_grad_enabled() and server.needs_gradients(args, kwargs):
        why = server.about_gradients(args, kwargs)
        _log.warning("%s is prewarmed with a call that will run eagerly: %s", callable_name(server.fn), why)
    with torch.no_grad(), server.lock, paused_collector(graphs.options.gc_disable):
        refuse_closed(server, route)
        run = _Prewarm(server, max_seconds, progress)
        graphs.refresh()
        group, leaves = _example(server, route, args, kwargs)
        wanted = sorted(route.table.checked(sizes), reverse=True) if group.signature.has_rows else [1]
        missing = []
        for size in wanted:
            if (entry := group.current(size)) is None:
                missing.append(size)
            else:
                entry.use()  # so that others give way first
        refuse_too_many(graphs.cache, missing)
        if max_seconds is not None and group.signature.has_rows:
            missing = _usable_first(route.table, missing)
        run.total = len(missing)
        inputs = group.inputs
        run.capture(group, leaves, missing)
        # The run of one size may move a workspace that graphs made before read, or show that padding must be another.
        lost = [size for size in missing if group.current(size) is None] if group.inputs is not inputs else []
        if unfit := lost or [size for size in missing if group.has_only_other_states(size)]:
            graphs.refresh()
            run.capture(group, leaves, unfit)
        run.make_sure(group, leaves, wanted)
        _make_hits(group)
        group.is_prewarmed = True
        lacking = [size for size in wanted if group.current(size) is None]
        left_out = dict.fromkeys(lacking, _why_lost(graphs, group, lacking)) | run.left_out
        if lacking == wanted:
            _say_why_none(server, left_out.values())
        present = filter(None, map(group.current, wanted))
        return PrewarmReport(
            route.table.mode,
            tuple(size for size in missing if size not in lacking),
            {size: why for size, (why, _) in left_out.items()},
            time.perf_counter() - run.started,
            memory_of(graphs.cache, [graphs]).total,
            {size: reason for size, (_, reason) in left_out.items() if reason is not None},
            next((detail or reason.text for reason, detail in group.against_padding(present)), ""),
        )


def _why_lost(graphs: GraphSet, group: GraphGroup, sizes: Iterable[int]) -> tuple[str, Reason]:
    """Why graphs of these sizes, which were captured, serve no call."""
    if any(map(group.has_only_other_states, sizes)):
        return f"each run leaves another state of the callable ({graphs.latest_change})", Reason.STATE_REBOUND
    return Reason.CACHE_FULL.text, Reason.CACHE_FULL


def _say_why_none(server: Server, left_out: Iterable[tuple[str, Reason | None]]) -> None:
    """Say aloud why no size has a graph, unless the time that the user gave was used up."""
    for why in [why for why, reason in left_out if reason is not None][:1]:
        _log.warning("%s: prewarm captured no graph, and calls run eagerly: %s", callable_name(server.fn), why)


class _Prewarm:
    """The captures of one prewarm, within its limits."""

    def __init__(
        self,
        server: Server,
        max_seconds: float | None,
        progress: Callable[[int, int, float], object] | None,
    ) -> None:
        self._server, self._max_seconds, self._progress = server, max_seconds, progress
        self.total = 0
        """How many sizes are to be captured, for those who watch the progress."""
        self._done = 0
        self.left_out: dict[int, tuple[str, Reason | None]] = {}
        """Why sizes have no graph, in words and, unless there was no time, by its reason."""
        self.started = time.perf_counter()

    def capture(self, group: GraphGroup, leaves: Sequence[Any], sizes: Iterable[int]) -> None:
        """Capture these sizes from an example, and note why each of the others has no graph."""
        for size in sizes:
            self.left_out.pop(size, None)
            if self._max_seconds is not None and time.perf_counter() - self.started > self._max_seconds:
                self.left_out[size] = f"max_seconds={self._max_seconds} are used up", None
            elif self._is_beyond_budget():
                self.left_out[size] = Reason.CACHE_FULL.text, Reason.CACHE_FULL
            elif (why := self._capture_cut(group, leaves, size)) is not None:
                self.left_out[size] = why
            if self._done < self.total:
                self._note_done()

    def _note_done(self) -> None:
        """Say that one more size is done, and how long the others may take: each as long as those so far."""
        self._done += 1
        each_s = (time.perf_counter() - self.started) / self._done
        if self._done == 1 and self.total > _MANY:
            _log.warning(
                "%s: prewarm captures %d graphs, one for each combination of sizes; the first took %.2f s, so that all "
                "may take %.0f s. Give fewer sizes, as Dim('seq', [64, 256]) in dynamic= or (8, 64) in sizes=",
                *(callable_name(self._server.fn), self.total, each_s, self.total * each_s),
            )
        if self._progress is not None:
            self._progress(self._done, self.total, each_s * (self.total - self._done))

    def make_sure(self, group: GraphGroup, leaves: Sequence[Any], sizes: Iterable[int]) -> None:
        """Find out whether graphs serve the smallest batches that are padded to them faster than eager would."""
        gain = group.gain
        if gain is None or not group.signature.has_rows:
            return
        for size in sizes:
            entry = group.current(size)
            least = group.route.table.min_batch_of(size)
            if entry is None or not entry.licence.may_hit(entry, least):
                continue
            values = _within(group, resized(group.inputs, _cut(group, leaves, least), least), least, size)
            if values is not None:
                gain.make_sure(entry, resized(group.inputs, _cut(group, leaves, size), size), least, values)

    def _capture_cut(
        self, group: GraphGroup, leaves: Sequence[Any], size: int, *, as_given: bool = False
    ) -> tuple[str, Reason] | None:
        """Capture one size; why there is no graph of it, or None.

        An error of the callable on the example passes on. On what the example was cut to, it is a reason to leave the
        size out: where integers point into the batch, such as the edges of a graph, part of them point to what was cut.
        The size that would serve the example is then captured from that ``as_given``, which shows whose fault it is.
        """
        given = group.signature.match(leaves)
        try:
            example, rows = (leaves, given) if as_given else (_cut(group, leaves, size), size)
            result = self._capture_checked(group, example, size, rows)
        except (GraphDispatchError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if error_of_signal(error) is not None:
                raise
            group.backend.raise_if_lost(error)
            batch = resized(group.inputs, leaves, size)
            is_cut = any(isinstance(a, torch.Tensor) and a.shape != b.shape for a, b in zip(leaves, batch, strict=True))
            if as_given or not is_cut:
                raise
            if group.decide(given).size == size:
                return self._capture_cut(group, leaves, size, as_given=True)
            why = f"the callable raises {type(error).__name__} for the example cut to this size: {error}"
            points = any(spec.spans and not spec.dtype.is_floating_point for spec in group.inputs.specs)
            why += group.inputs.missing_entries(given) or f". {_POINTS}" * points
            if self._server.strict:
                raise FallbackError(f"prewarm could not capture {size} rows: {why}", Reason.CALL_RAISED) from error
            return why, Reason.CALL_RAISED
        return None if result.entry is not None else (result.detail, result.reason)

    def _capture_checked(self, group: GraphGroup, leaves: Sequence[Any], size: int, rows: int) -> CaptureResult:
        """Capture one size from a batch of so many rows, and compare it on what its proof needs besides: a second
        batch, a padded one, and those for which no run speaks yet.

        Raises ``FallbackError`` with ``strict``.
        """
        graphs, batch = self._server.graphs, resized(group.inputs, leaves, rows)
        capture = partial(graphs.capture, group, batch, rows, size, keep_effects=False)
        result = graphs.budget.learn(capture, group.work_for(None, size))
        if result.entry is not None:
            result = self._compare(group, leaves, result.entry) or result
        if result.entry is None and self._server.strict:
            raise FallbackError(f"prewarm could not capture {size} rows: {result.detail}", result.reason)
        return result

    def _compare(self, group: GraphGroup, leaves: Sequence[Any], entry: CUDAGraphEntry) -> CaptureResult | None:
        """Compare a new graph with eager on other batches made of the example; what found a difference, or None.

        They are a second batch unless the example has nothing but integers, since its rows are repeated.
        """
        if (found := self._server.graphs.compare_on_made(group, leaves, entry.size, entry)) is not None:
            return found
        least = group.route.table.min_batch_of(entry.size) if group.signature.has_rows else entry.size
        return _compare_padded(self._server.graphs, group, leaves, least, entry)

    def _is_beyond_budget(self) -> bool:
        """Whether one more graph, as large as the largest there is, would not fit into the budget of memory."""
        cache = self._server.graphs.cache
        largest = max((entry.nbytes for entry in cache), default=0)
        return cache.max_bytes is not None and cache.nbytes + largest > cache.max_bytes


def _cut(group: GraphGroup, leaves: Sequence[Any], size: int) -> Sequence[Any]:
    """An example for a smaller size, in which integers name no element and point at no row that is gone: a device would
    stop at those. Only where rows mix integers may point at rows."""
    given, batch = group.signature.match(leaves), group.inputs.axes[:1]
    leaves = _within(group, list(leaves), size, given, group.inputs.axes[1:]) or leaves
    mixes = any(reason is Reason.ROWS_MIX for reason, _ in group.against_padding())
    if not batch or batch[0].of(size) >= batch[0].of(given) or not mixes:
        return leaves
    return pointing_within(group.inputs, resized(group.inputs, leaves, size), batch[0].of(size), batch[0].of(given))


def _make_hits(group: GraphGroup) -> None:
    """Make the hits of the batches that graphs serve, the smallest first, so that no call takes that time."""
    lengths = lengths_of(group.inputs.axes, group.route.table.largest) if group.signature.has_rows else ()
    for own in islice(product(*(range(1, most + 1) for most in lengths)), _MOST_BATCHES):
        group.hits[pack(group.inputs.axes, own) if own else 1]


def _usable_first(table: SizeTable, sizes: Sequence[int]) -> list[int]:
    """Sizes, the largest first, in an order in which the first few serve every batch: along each dimension the largest,
    and the next that is at most half of it, and so on; then the others."""
    kept = []
    for axis in table.axes:
        halves, last = set[int](), inf
        for length in sorted({axis.of(size) for size in sizes}, reverse=True):
            if 2 * length <= last:
                halves.add(length)
                last = length
        kept.append((axis, halves))
    return sorted(sizes, key=lambda size: any(axis.of(size) not in halves for axis, halves in kept))


def refuse_closed(server: Server, route: Route) -> None:
    """Raise ``CaptureError`` if nothing may be captured now, such as between ``sleep()`` and ``wake()``, or frozen."""
    closed = server.closed(route) or (Reason.FROZEN if server.graphs.cache.is_frozen else None)
    if closed is not None:
        raise CaptureError(f"nothing can be captured now: {closed.text}", closed)


def refuse_too_many(cache: GraphCache, wanted: Collection[Any]) -> None:
    """Raise ``ConfigError`` if there may not be as many graphs as are wanted."""
    if len(wanted) > cache.max_graphs:
        raise ConfigError(
            f"prewarm of {len(wanted)} sizes needs max_cached_graphs >= {len(wanted)}, got {cache.max_graphs}; raise "
            "it, or name fewer"
        )


def _example(
    server: Server, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[GraphGroup, Sequence[Any]]:
    found = server.graphs.find(route, args, kwargs)
    if isinstance(found, Refusal):
        why = Decision.eager(found.reason, detail=found.detail)
        raise ConfigError(f"prewarm cannot capture from this example: {why.explain()}")
    group, leaves, rows = found
    if not all(lengths_of(group.inputs.axes, rows)):
        raise ConfigError(f"prewarm cannot capture from this example: {group.decide(rows).explain()}")
    return group, leaves


def capture_example(
    server: Server, route: Route, call: tuple[tuple[Any, ...], dict[str, Any]], rows: int, size: int, name: str
) -> CaptureResult:
    """Capture one size from a call of ``rows`` rows, for all batches from that on. Leaves no effect. Raises
    ``CaptureError`` if there can be no graph."""
    with torch.no_grad(), server.lock:
        refuse_closed(server, route)
        server.graphs.refresh()
        found = server.graphs.find(route, *call)
        if isinstance(found, Refusal):
            raise CaptureError(f"no graph for {name}: {found.detail}", found.reason)
        group, leaves, _ = found
        server.graphs.cache.admission.look()
        result = server.graphs.capture(group, leaves, rows, size, keep_effects=False)
        if result.entry is not None and rows < size:
            result = _compare_padded(server.graphs, group, leaves, rows, result.entry) or result
    if result.entry is None:
        raise CaptureError(f"no graph for {name}: {result.detail}", result.reason) from result.error
    return result


def _compare_padded(
    graphs: GraphSet, group: GraphGroup, leaves: Sequence[Any], least: int, entry: CUDAGraphEntry
) -> CaptureResult | None:
    """Compare a new graph with eager on the padded batches, from that of ``least`` rows on, that its proof does not
    cover: as a rule on the first one alone, which has the most of the example. What found a difference, or None. None
    of them counts as the second."""
    axes = group.inputs.axes
    pairs = list(zip(lengths_of(axes, least), lengths_of(axes, entry.size), strict=True))
    nearest = tuple(max(low, high - 1) for low, high in pairs)
    every = chain([nearest], product(*(range(low, high + 1) for low, high in pairs)))
    for lengths in islice(every, _MOST_LOOKED_AT):
        rows = pack(axes, lengths)
        if not entry.licence.wants_look(rows):
            continue
        values = _within(group, varied(group.inputs, leaves, rows), rows, entry.size)
        if values is None:
            continue
        if (found := graphs.difference_on(group, values, rows, entry, counts_as_second=False)) is not None:
            return found
        if entry.licence.wants_look(rows):  # nothing in the example shows what padding does
            return None
    return None


def _within(
    group: GraphGroup, values: list[Any], rows: int, size: int, axes: Sequence[Axis] | None = None
) -> list[Any] | None:
    """A batch that was cut from one of ``size`` along these axes (None: all), with integers that name elements within
    it; None where there is no such batch: a length of no elements, made of one, would say something else."""
    shorter = [axis for axis in (group.inputs.axes if axes is None else axes) if axis.of(rows) < axis.of(size)]
    most = largest_within(group.inputs.specs, rows, shorter)
    if 0 in most.values():
        return None
    for spec in group.inputs.specs:
        if spec.name in most:
            values[spec.position] = values[spec.position].clamp(max=most[spec.name])
    return values


def arguments_of(dummy: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that a ``dummy_fn`` returned in one of four ways."""
    if isinstance(dummy, Mapping):
        return (), dict(dummy)
    if not isinstance(dummy, tuple):
        return (dummy,), {}
    if len(dummy) == 2 and isinstance(dummy[0], tuple) and isinstance(dummy[1], Mapping):
        return dummy[0], dict(dummy[1])
    return dummy, {}
