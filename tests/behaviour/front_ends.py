"""Every front end of the library behind one face, so that one test body runs through each of them.

A ``FrontEnd`` wraps one callable. A test calls it like the callable itself; the adapter tells it the number of
rows in its own terms (a descriptor, a key, a batch size). ``features.py`` says what a front end cannot express.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch

import graphdispatch as gd
from graphdispatch import CUDAGraphMode, Reason

from ..helpers import with_options
from .front_end import FrontEnd

__all__ = ["FRONT_ENDS"]


class _Capturing(FrontEnd):
    """What front ends share whose front captures by itself, and counts what it does."""

    order = (3, 3, 4, 3, 3, 3)

    @property
    def counts(self) -> gd.CUDAGraphStats:
        return self.front.stats  # type: ignore[no-any-return]

    @property
    def reasons(self) -> Counter[Reason]:
        return self.counts.reasons

    @property
    def hits(self) -> int:
        return self.counts.hits

    @property
    def captures(self) -> int:
        return self.counts.captures

    def forget(self, tag: str) -> None:
        self.front.invalidate(tag)

    def freeze(self, is_frozen: bool) -> None:
        (self.front.freeze if is_frozen else self.front.unfreeze)()
        assert self.front.is_frozen is is_frozen


class GraphedFrontEnd(_Capturing):
    name = "graphed"

    def _open(self, **more: Any) -> None:
        how: dict[str, Any] = {"sizes": self.sizes, "mode": self.mode, "options": self.options}
        self.front = gd.graphed(self.fn, dynamic=self.dynamic, **with_options(how | more, capture_after=1))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.front(*args, **kwargs)

    @property
    def plain(self) -> Callable[[torch.Tensor], Any]:
        return self.front

    def reason(self) -> Reason | None:
        decision = self.front.last_decision
        return decision.reason if decision is not None else None

    def check(self, expected: Reason, *, everywhere: bool = True) -> None:
        assert self.reason() is expected, self.front.last_decision and self.front.last_decision.explain()

    def explanation(self, *args: Any) -> str | None:
        return self.front.explain(*args)

    def close(self) -> None:
        self.front.clear()


class WrapperFrontEnd(_Capturing):
    """Each number of rows is a descriptor of its own, captured and compared when it comes."""

    name = "wrapper"
    order = (3, 4, 3, 4, 3)
    kind: ClassVar[type[gd.CUDAGraphWrapper]] = gd.CUDAGraphWrapper

    def _open(self) -> None:
        self.front = self.kind(self.fn, self.mode, self.options)

    @property
    def counts(self) -> gd.CUDAGraphStats:
        return self.front.get_stats()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        descriptor = gd.BatchDescriptor(self.rows(args, kwargs))
        return self.front(*args, batch_descriptor=descriptor, cudagraph_runtime_mode=self.mode, **kwargs)

    @property
    def plain(self) -> Callable[[torch.Tensor], Any]:
        wrapper, mode = self.front, self.mode
        return lambda x: wrapper(x, batch_descriptor=gd.BatchDescriptor(len(x)), cudagraph_runtime_mode=mode)

    def close(self) -> None:
        self.front.clear_cache()


class AdaptiveWrapperFrontEnd(WrapperFrontEnd):
    name = "adaptive_wrapper"
    kind = gd.AdaptiveCUDAGraphWrapper


class ManagerFrontEnd(_Capturing):
    """``execute_or_capture``: the manager pads, captures and serves."""

    name = "execute_or_capture"

    def _open(self) -> None:
        self.front = _manager(self)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows, inputs = self.rows(args, kwargs), self.named(args, kwargs)
        return self.front.execute_or_capture(rows, 1, self.fn, inputs, dynamic=self.dynamic)

    @property
    def plain(self) -> Callable[[torch.Tensor], Any]:
        manager, fn = self.front, self.fn
        return lambda x: manager.execute_or_capture(len(x), 1, fn, {"x": x})

    def close(self) -> None:
        self.front.reset()


def _manager(front: FrontEnd) -> gd.CUDAGraphManager:
    """A manager with the sizes and options of a front end, which captures a size when it comes first."""
    most = max(front.sizes)
    config = gd.CUDAGraphConfig(
        capture_sizes=front.sizes,
        max_batch_size=most,
        options=front.options.replace(capture_after=1),
        mode=CUDAGraphMode.FULL,
    )
    return gd.CUDAGraphManager(config)


class _Ahead(FrontEnd):
    """What front ends share whose graphs the caller captures: by ``capture_graph``, or as an entry of a wrapper.

    A wrapper gives the entries of PIECEWISE graphs and of static inputs, which have one number of rows each.
    """

    captures_ahead = True

    def _open(self) -> None:
        self.refusal: gd.CaptureError | None = None
        self.entries: dict[int, gd.CUDAGraphEntry] = {}
        self._tried: set[int] = set()
        self._is_exact = self.mode is CUDAGraphMode.PIECEWISE or self.options.inputs == "static"
        self.manager = _manager(self)
        options = self.options.replace(gc_disable=False)  # a collection of all memory for each capture is slow here
        self.source = gd.AdaptiveCUDAGraphWrapper(self.fn, self.mode, options) if self._is_exact else None

    def size(self, rows: int) -> int:
        """The number of rows of the graph that serves a batch of ``rows``."""
        return rows if self._is_exact else self.manager.config.get_padded_batch_size(rows)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        rows = self.rows(args, kwargs)
        size = self.size(rows)
        if size in self._tried:
            return
        self._tried.add(size)
        try:
            entry = self._capture(rows, args, kwargs)
        except gd.CaptureError as error:
            self.refusal = error
            return
        if entry is not None:
            self.entries[size] = entry
            self._publish(size, entry)

    def _capture(self, rows: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> gd.CUDAGraphEntry | None:
        if self.source is not None:
            descriptor = gd.BatchDescriptor(rows)
            self.source.prewarm([descriptor], lambda _: (args, kwargs))
            return self.source.get_entry(descriptor)
        return self.manager.capture_graph(rows, 1, self.fn, inputs=self.named(args, kwargs), dynamic=self.dynamic)

    def renew(self, *args: Any, **kwargs: Any) -> None:
        self._tried.discard(self.size(self.rows(args, kwargs)))
        self.prepare(*args, **kwargs)

    def _publish(self, size: int, entry: gd.CUDAGraphEntry) -> None:
        """Give a new entry to the front end."""

    def explanation(self, *args: Any) -> str | None:
        return None if self.refusal is None else str(self.refusal)

    def forget(self, tag: str) -> None:
        self.manager.invalidate(tag)
        if self.source is not None:
            self.source.invalidate(tag)

    def freeze(self, is_frozen: bool) -> None:
        (self.manager.freeze if is_frozen else self.manager.unfreeze)()
        assert self.manager.is_frozen is is_frozen

    @property
    def captures(self) -> int:
        return len(self.entries)

    def close(self) -> None:
        self.manager.reset()
        if self.source is not None:
            self.source.clear_cache()


class ReplayFrontEnd(_Ahead):
    """``replay_graph``: what it refuses with nothing copied is run by the caller, as an engine would."""

    name = "replay_graph"

    def _open(self) -> None:
        super()._open()
        self.front = self.manager
        self._refused: Counter[Reason] = Counter()

    @property
    def hits(self) -> int:
        return self.front.stats.hits

    @property
    def reasons(self) -> Counter[Reason]:
        return self.front.stats.reasons + self._refused

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._replay(self.rows(args, kwargs), self.named(args, kwargs))
        except gd.errors.GuardError:
            self._refused[Reason.ARGUMENTS_CHANGED] += 1
        except gd.ReplayError as error:
            if error.had_effects:
                raise
            self._refused[Reason.REPLAY_FAILED] += 1
        return self.fn(*args, **kwargs)

    @property
    def plain(self) -> Callable[[torch.Tensor], Any]:
        replay, fn = self._replayer(), self.fn

        def serve(x: torch.Tensor) -> Any:
            try:
                return replay(x)
            except (gd.errors.GuardError, gd.ReplayError):
                return fn(x)

        return serve

    def _replayer(self) -> Callable[[torch.Tensor], Any]:
        manager = self.front
        return lambda x: manager.replay_graph(len(x), 1, {"x": x})

    def _replay(self, rows: int, inputs: dict[str, Any]) -> Any:
        return self.front.replay_graph(rows, 1, inputs)


class EntryFrontEnd(ReplayFrontEnd):
    """``CUDAGraphEntry.replay``, for those who were given the entry alone."""

    name = "entry"

    @property
    def hits(self) -> int:
        return sum(entry.replay_count for entry in self.entries.values())

    def _replayer(self) -> Callable[[torch.Tensor], Any]:
        entry = max(self.entries.items())[1]
        return lambda x: entry.replay({"x": x})

    def _replay(self, rows: int, inputs: dict[str, Any]) -> Any:
        entry = self.entries.get(self.size(rows))
        if entry is None:
            raise gd.ReplayError("no graph")
        return entry.replay(inputs)


class DispatcherFrontEnd(_Ahead):
    """``CudagraphDispatcher`` with registered entries: dispatched with a key of as many tokens as rows."""

    name = "dispatcher"

    def _open(self) -> None:
        super()._open()
        self.front = self._made()

    def _made(self) -> Any:
        return gd.CudagraphDispatcher(self.fn)

    def _publish(self, size: int, entry: gd.CUDAGraphEntry) -> None:
        self.front.register_graph(gd.DispatchKey(size, size), entry)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = self.rows(args, kwargs)
        return self.front.dispatch(gd.DispatchKey(rows, rows), *args, **kwargs)

    @property
    def plain(self) -> Callable[[torch.Tensor], Any]:
        dispatcher = self.front
        return lambda x: dispatcher.dispatch(gd.DispatchKey(len(x), len(x)), x)

    @property
    def hits(self) -> int:
        return self.front.stats.graph + self.front.stats.piecewise

    @property
    def reasons(self) -> Counter[Reason]:
        return self.front.stats.reasons


class StreamsEntryFrontEnd(DispatcherFrontEnd):
    name = "streams_entry"

    def _made(self) -> Any:
        return gd.StreamDispatcher(self.fn, 2)

    def close(self) -> None:
        self.front.close()
        super().close()


class StreamsFrontEnd(StreamsEntryFrontEnd):
    """``StreamDispatcher.capture``, on one stream, since a model that writes state must not run on two at once."""

    name = "streams"

    def _made(self) -> Any:
        return gd.StreamDispatcher(self.fn, 1, options=self.options)

    def size(self, rows: int) -> int:
        return rows

    def _capture(self, rows: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> gd.CUDAGraphEntry | None:
        key = gd.DispatchKey(rows, rows)
        self.front.capture(key, args, kwargs)
        return self.front.get_entry(key)

    def _publish(self, size: int, entry: gd.CUDAGraphEntry) -> None:
        """The capture has done it."""

    def forget(self, tag: str) -> None:
        self.front.clear_cache()


class CompositeFrontEnd(DispatcherFrontEnd):
    """``CompositeDispatcher`` whose member has the entries."""

    name = "composite"

    def _made(self) -> Any:
        self.member = gd.CudagraphDispatcher(self.fn)
        composite = gd.CompositeDispatcher()
        composite.add_dispatcher("member", self.member)
        return composite

    def _publish(self, size: int, entry: gd.CUDAGraphEntry) -> None:
        self.member.register_graph(gd.DispatchKey(size, size), entry)


FRONT_ENDS: dict[str, type[FrontEnd]] = {
    kind.name: kind for kind in tuple(vars().values()) if isinstance(kind, type) and "name" in vars(kind)
}
"""Every front end by its name: the classes of this file that have one, in their order."""
