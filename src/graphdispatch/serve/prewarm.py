"""Captures made on purpose, before batches need them: all sizes at the start, or one while nothing is to be served."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..capture.collector import swept_collector
from ..errors import CaptureError, ConfigError, FallbackError, GraphDispatchError
from ..modes import CUDAGraphMode, EntryState
from ..reasons import Reason
from .estimate import BudgetedCapture, MemoryEstimate, estimate_memory
from .group import GraphGroup
from .progress import progress_bar
from .routine import Routine
from .slow_path import SlowPath

__all__ = ["Limits", "PrewarmReport", "capture_size", "estimate", "prewarm"]


class Limits(NamedTuple):
    """What a prewarm may take: seconds, and bytes held in the end; None for no limit of its own."""

    max_seconds: float | None = None
    max_bytes: int | None = None

    def checked(self) -> "Limits":
        """Itself. Raises ``ConfigError`` for what is no amount."""
        for name, value in self._asdict().items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise ConfigError(f"{name} must be a number above 0 or None, got {value!r}")
        return self


@dataclass(frozen=True)
class PrewarmReport:
    """What a prewarm did: sizes by mode, in the order of capture, and why each of the others has no graph."""

    captured: dict[CUDAGraphMode, tuple[int, ...]]
    left_out: dict[tuple[CUDAGraphMode, int], str]
    seconds: float
    memory_bytes: int

    def __str__(self) -> str:
        lines = [
            f"{len(sizes)} {mode.name} graphs captured" + (f": {' '.join(map(str, sizes))}" if sizes else "")
            for mode, sizes in self.captured.items()
        ]
        lines.append(f"{self.seconds:.2f} s, {self.memory_bytes / 2**20:.1f} MiB held")
        return "\n".join(lines + [f"{mode.name} {size} left out: {why}" for (mode, size), why in self.left_out.items()])


def prewarm(
    path: SlowPath,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    sizes: Sequence[int] | None,
    limits: Limits,
    progress: bool,
) -> PrewarmReport:
    """See ``Graphed.prewarm``. Called with the lock of ``path.graphs`` held."""
    started = time.perf_counter()
    batch = _Batch(path, limits.checked(), started)
    path.graphs.refresh()
    with swept_collector(path.config.options.gc_disable):
        for routine in path.routines or [path.decode]:
            batch.capture(routine, args, kwargs, sizes, progress)
    captured = {mode: tuple(done) for mode, done in batch.captured.items()}
    return PrewarmReport(captured, batch.left_out, time.perf_counter() - started, path.graphs.memory_bytes)


def estimate(
    path: SlowPath, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int] | None
) -> MemoryEstimate:
    """See ``Graphed.estimate_memory``. Called with the lock of ``path.graphs`` held."""
    routine = (path.routines or [path.decode])[0]
    group, leaves = _example(path, routine, args, kwargs)
    wanted = routine.checked_sizes(sizes) if group.signature.has_rows else (1,)
    return estimate_memory(path.graphs, group, leaves, wanted, routine.table.mode)


def capture_size(path: SlowPath, size: int) -> bool:
    """See ``Graphed.capture_size``. Called with the lock of ``path.graphs`` held."""
    largest = max((routine.table.largest for routine in path.routines), default=0)
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= largest:
        raise ConfigError(f"size must be an integer from 1 to {largest}, the largest size, got {size!r}")
    if path.graphs.closed() is not None or not path.graphs.guard_holds():
        return False
    for routine, group in _groups(path):
        fits = size <= routine.table.largest and group.example and group.blocked(size) is None
        if fits and path.graphs.current(group, size) is None:
            try:
                _capture(path, routine, group, group.example, _min_batch(routine, size), size)
            except GraphDispatchError:
                raise
            except Exception as error:  # of the callable, which refused the example when it was a call, too
                most = path.config.options.max_failures
                group.quarantine(size, Reason.CALL_RAISED, f"{type(error).__name__}: {error}", most)
    return size in captured_sizes(path)


def captured_sizes(path: SlowPath) -> tuple[int, ...]:
    """See ``Graphed.captured_sizes``. Called with the lock of ``path.graphs`` held."""
    ready = [set(group.entries) for _, group in _groups(path)]
    return tuple(sorted(set.intersection(*ready))) if ready else ()


def _groups(path: SlowPath) -> list[tuple[Routine, GraphGroup]]:
    """The groups that have a batch dimension, each with its routine."""
    forms = [(routine, form) for routine in path.routines for form in routine.forms.values()]
    return [(routine, f) for routine, form in forms for f in form.groups if f.signature.has_rows]


class _Batch:
    """The captures of one prewarm, over all routines."""

    def __init__(self, path: SlowPath, limits: Limits, started: float) -> None:
        self.path = path
        self.limits = limits
        self.captured: dict[CUDAGraphMode, list[int]] = {}
        self.left_out: dict[tuple[CUDAGraphMode, int], str] = {}
        self._started = started

    def capture(
        self,
        routine: Routine,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sizes: Sequence[int] | None,
        progress: bool,
    ) -> None:
        """Capture the sizes of one routine that have no graph yet."""
        path, mode = self.path, routine.table.mode
        group, leaves = _example(path, routine, args, kwargs)
        wanted = routine.checked_sizes(sizes) if group.signature.has_rows else (1,)
        todo = [size for size in sorted(wanted, reverse=True) if size not in group.entries]
        if len(todo) > path.config.max_cached_graphs:
            raise ConfigError(
                f"prewarm of {len(todo)} sizes needs max_cached_graphs >= {len(todo)}, "
                f"got {path.config.max_cached_graphs}; raise it, or name fewer in sizes="
            )
        for size in todo:
            path.graphs.warm_up(group, group.resized(leaves, size), size)
        done = self.captured.setdefault(mode, [])
        within = self._within_budget(group, leaves, todo, mode)
        for size in progress_bar(
            within, f"capturing {mode.name}", enabled=progress, total=len(todo), status=self._held
        ):
            rows = _min_batch(routine, size) if group.signature.has_rows else 1
            detail = _capture(path, routine, group, leaves, rows, size)
            if detail is None:
                done.append(size)
            else:
                self.left_out[mode, size] = detail

    def _held(self) -> str:
        return f"{self.path.graphs.memory_bytes / 2**20:.1f} MiB"

    def _within_budget(
        self, group: GraphGroup, leaves: list[Any], todo: list[int], mode: CUDAGraphMode
    ) -> Iterator[int]:
        """The sizes for which there are time and memory, each asked for when the one before it is done."""
        config, latest = self.path.config, 0.0
        limit = self.limits.max_bytes or config.memory_budget_bytes
        known = None
        if limit is not None and todo:
            try:
                known = estimate_memory(self.path.graphs, group, leaves, todo, mode)
            except CaptureError:  # the captures themselves will tell
                known = None
        memory = BudgetedCapture(lambda: self.path.graphs.memory_bytes, limit, known)
        for size in todo:
            begun = time.perf_counter()
            if self.limits.max_seconds is not None and begun - self._started + latest > self.limits.max_seconds:
                self.left_out[mode, size] = f"max_seconds={self.limits.max_seconds} are used up"
            elif not memory.next(size):
                self.left_out[mode, size] = f"it would not fit into {limit} bytes"
            else:
                yield size
                latest = time.perf_counter() - begun


def _min_batch(routine: Routine, size: int) -> int:
    """The smallest batch that a graph of ``size`` serves, or would serve if it were among the sizes."""
    sizes = routine.table.sizes
    if size in sizes:
        return routine.table.served_by(size)[0]
    return 1 + max((smaller for smaller in sizes if smaller < size), default=0)


def _example(
    path: SlowPath, routine: Routine, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[GraphGroup, list[Any]]:
    found = path.find(routine, args, kwargs)
    if found.group is None or not found.rows:
        raise ConfigError(f"prewarm cannot capture from this example: {found.decision.explain()}")
    if path.keeps_examples:
        found.group.keep_example(found.leaves)
    return found.group, found.leaves


def _capture(
    path: SlowPath, routine: Routine, group: GraphGroup, leaves: Sequence[Any], rows: int, size: int
) -> str | None:
    """Capture one size from its smallest batch, then check it with its largest; why there is no graph, or None.

    Raises ``FallbackError`` with ``strict``.
    """
    few = group.resized(leaves, rows)
    outcome = path.graphs.capture(group, few, rows, size, mode=routine.table.mode, keep_effects=False)
    if outcome.entry is not None and outcome.entry.state is EntryState.CAPTURED:
        other = group.resized(leaves, size, shift=1)
        if group.differs(outcome.entry, other):
            outcome = path.graphs.verify(group, other, size, outcome.entry, keep_effects=False)
    path.publish(routine, group, outcome.entry)
    if outcome.entry is None and path.config.strict:
        raise FallbackError(f"prewarm could not capture {size} rows: {outcome.detail}", outcome.reason)
    return None if outcome.entry is not None else outcome.detail
