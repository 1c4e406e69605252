"""Every front door of the library behind one face, so that one test body runs through each of them.

A ``Door`` wraps one callable. A test calls it like the callable itself; the adapter tells the front door the number of
rows in its own terms (a descriptor, a key, a batch size). ``LACKS`` is the one table of what a door cannot express.
"""

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

import graphdispatch as gd
from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Reason

__all__ = ["DOORS", "FEATURES", "LACKS", "OUTCOMES", "Door", "able", "needs"]

_PADDED = "its graphs have one number of rows each; padding is the caller's"
_TENSORS = "it takes tensors by name; constants, objects and nests are bound to the callable"
_NO_RULE = "it pads with zeros"
_NO_STATIC = "it has no `static=`"
_COPIES = "it always copies its inputs"
_FULL_ONLY = "it captures FULL graphs only"
_NO_POLICY = "it has no dispatch policy"
_GRAPH_ALONE = "it is a graph without the callable, so that there is nothing to compare it with"

FEATURES = {
    "padding": "a graph that serves smaller batches",
    "constants": "arguments that are no tensors, and nests of tensors",
    "pad_rules": "a pad rule of one's own",
    "static_objects": "objects that are declared unchanging",
    "static_inputs": "the caller's tensors as the graph's buffers",
    "pieces": "PIECEWISE graphs",
    "policy": "a dispatch policy",
    "comparisons": "a callable to compare the graph with again",
}
"""What a case may need beyond tensors and a callable, by the word that ``needs`` takes."""

LACKS: dict[str, dict[str, str]] = {
    "graphed": {
        "static_inputs": "it copies its inputs; `static=` names single tensors that never move",
        "policy": _NO_POLICY,
    },
    "wrapper": {"padding": _PADDED, "pad_rules": _PADDED, "static_objects": _NO_STATIC, "policy": _NO_POLICY},
    "adaptive_wrapper": {"padding": _PADDED, "pad_rules": _PADDED, "static_objects": _NO_STATIC, "policy": _NO_POLICY},
    "execute_or_capture": {
        "constants": _TENSORS,
        "pad_rules": _NO_RULE,
        "static_objects": _NO_STATIC,
        "static_inputs": _COPIES,
        "pieces": _FULL_ONLY,
        "policy": _NO_POLICY,
    },
    "replay_graph": {
        "constants": _TENSORS,
        "pad_rules": _NO_RULE,
        "static_objects": _NO_STATIC,
        "static_inputs": _COPIES,
        "pieces": _FULL_ONLY,
        "policy": _NO_POLICY,
    },
    "entry": {
        "constants": _TENSORS,
        "pad_rules": _NO_RULE,
        "static_objects": _NO_STATIC,
        "policy": _NO_POLICY,
        "comparisons": _GRAPH_ALONE,
    },
    "dispatcher": {"constants": _TENSORS, "pad_rules": _NO_RULE, "static_objects": _NO_STATIC},
    "streams": {
        "padding": _PADDED,
        "pad_rules": _PADDED,
        "static_objects": _NO_STATIC,
        "static_inputs": _COPIES,
        "pieces": _FULL_ONLY,
    },
    "streams_entry": {"constants": _TENSORS, "pad_rules": _NO_RULE, "static_objects": _NO_STATIC},
    "composite": {"constants": _TENSORS, "pad_rules": _NO_RULE, "static_objects": _NO_STATIC},
}
"""For each door what it cannot express, and why. A case that needs it is not run through that door."""


def needs(*features: str, outcome: str = "right") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare what a test needs of a door (words of ``FEATURES``); doors that lack it are left out.

    ``outcome`` is what the table says of the doors that have it.
    """
    assert outcome in OUTCOMES, outcome
    assert set(features) <= set(FEATURES), features

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        test.needs = features  # type: ignore[attr-defined]
        return test

    return mark


OUTCOMES = {
    "right": "the answer and the effects are eager's; a graph serves, or eager does where no graph is for such a call",
    "eager": "no graph serves the call, and the answer is eager's; the reason is counted",
    "error": "an exception, the same behind each door",
    "limit": "silently frozen, behind each door",
}
"""What the table says of a case, and what it means."""


def able(features: Sequence[str]) -> list[str]:
    """The names of the doors that can express a case with these needs."""
    return [name for name in DOORS if not set(features) & set(LACKS[name])]


class Door(ABC):
    """One callable behind one front door. Close it after use.

    ``sizes`` are the capture sizes of doors that pad; ``dynamic`` names the batch dimensions; ``options`` and
    ``outputs`` are as in ``CUDAGraphOptions``. Other options are those of ``graphed`` that the door has.
    """

    name: ClassVar[str]
    captures_ahead: ClassVar[bool] = False
    """Whether the caller captures before it serves (``prepare``). Such a door captures nothing by itself."""
    order: ClassVar[tuple[int, ...]] = (3, 4, 3)
    """The numbers of rows of the calls after which graphs serve three rows and four."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        dynamic: Mapping[str, int],
        sizes: Sequence[int] = (4,),
        mode: str = "FULL",
        outputs: str | None = None,
        options: CUDAGraphOptions | None = None,
        **more: Any,
    ) -> None:
        self.fn = fn
        self.dynamic = dict(dynamic)
        self.sizes = tuple(sizes)
        self.mode = CUDAGraphMode[mode]
        self.options = options or CUDAGraphOptions()
        if outputs is not None:
            self.options = self.options.replace(outputs=outputs)
        self.calls = 0
        """Calls so far; what a model counts must agree with it."""
        self._was_hit = False
        self._reason: Reason | None = None
        self._open(**more)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Serve one call through the door. Raises what the door raises."""
        hits, before = self.hits, Counter(self.reasons)
        self.calls += 1
        try:
            return self._call(args, kwargs)
        finally:
            self._was_hit = self.hits > hits
            more = Counter(self.reasons) - before
            self._reason = next(iter(more), None)

    @property
    @abstractmethod
    def plain(self) -> Callable[[torch.Tensor], Any]:
        """The front door alone, for a callable of one tensor ``x``: for a model that calls it from within."""

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Capture ahead with an example call, where that is the caller's job. A refusal is kept in ``refusal``."""

    def renew(self, *args: Any, **kwargs: Any) -> None:
        """Capture again what this example stands for, after a change, where that is the caller's job."""

    def forget(self, tag: str) -> None:
        """Tell the door, or the owner of its graphs, that something changed that no guard sees."""
        raise NotImplementedError

    def settle(self, batch: Callable[[int], tuple[Any, ...]]) -> "Door":
        """Prepare it and call it until a graph serves whatever can be served."""
        if self.captures_ahead:
            for rows in (3, 4):
                self.prepare(*batch(rows))
        for rows in self.order:
            self(*batch(rows))
        return self

    def reason(self) -> Reason | None:
        """The reason of the latest call; None where the door counts none for a call that a graph served."""
        return self._reason

    def was_hit(self) -> bool:
        """Whether a graph served the latest call."""
        return self._was_hit

    def check(self, expected: Reason, *, everywhere: bool = True) -> None:
        """The latest call was served by a graph if ``expected`` says so, and else it was not.

        ``graphed`` must give exactly this reason; with ``everywhere=False`` no other door is asked.
        """
        assert not everywhere or self.was_hit() is expected.is_graph, f"{self.name}: {self.reason()} instead of {expected}"

    def explanation(self, *args: Any) -> str | None:
        """What the door says of such a call in words, or None where it says nothing."""
        return None

    @property
    @abstractmethod
    def hits(self) -> int:
        """Calls that a graph served."""

    @property
    @abstractmethod
    def captures(self) -> int:
        """Graphs that were captured."""

    def close(self) -> None:
        """Release what the door holds."""

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    @property
    @abstractmethod
    def reasons(self) -> Counter[Reason]:
        """How often each reason was counted."""

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name, in the order of the call."""
        fn = self.fn.forward if isinstance(self.fn, torch.nn.Module) else self.fn
        try:
            names = list(inspect.signature(fn).parameters)
        except ValueError:  # a scripted module has none
            names = list(self.dynamic)
        if names[:1] == ["args"]:
            names = list(self.dynamic)
        return dict(zip(names, args, strict=False)) | kwargs

    def rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The number of rows of a call: that of its first argument with a batch dimension."""
        named = self.named(args, kwargs)
        for name, dim in self.dynamic.items():
            for leaf in tree_leaves(named.get(name)):
                if isinstance(leaf, torch.Tensor) and leaf.dim() > dim:
                    return leaf.shape[dim]
        return 1


class GraphedDoor(Door):
    name = "graphed"

    def _open(self, **more: Any) -> None:
        how: dict[str, Any] = {"sizes": self.sizes, "mode": self.mode, "options": self.options, "capture_after": 1}
        self.step = gd.graphed(self.fn, dynamic=self.dynamic, **(how | more))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.step(*args, **kwargs)

    @property
    def plain(self) -> Callable[[torch.Tensor], Any]:
        return self.step

    @property
    def reasons(self) -> Counter[Reason]:
        return self.step.stats.reasons

    def reason(self) -> Reason | None:
        decision = self.step.last_decision
        return decision.reason if decision is not None else None

    def check(self, expected: Reason, *, everywhere: bool = True) -> None:
        assert self.reason() is expected, self.step.last_decision and self.step.last_decision.explain()

    def explanation(self, *args: Any) -> str | None:
        return self.step.explain(*args)

    def forget(self, tag: str) -> None:
        self.step.invalidate(tag)

    @property
    def hits(self) -> int:
        return self.step.stats.hits

    @property
    def captures(self) -> int:
        return self.step.stats.captures

    def close(self) -> None:
        self.step.clear()


class WrapperDoor(Door):
    """Each number of rows is a descriptor of its own, captured and compared when it comes."""

    name = "wrapper"
    order = (3, 4, 3, 4, 3)
    kind: ClassVar[type[gd.CUDAGraphWrapper]] = gd.CUDAGraphWrapper

    def _open(self) -> None:
        self.wrapper = self.kind(self.fn, self.mode, self.options)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        descriptor = gd.BatchDescriptor(self.rows(args, kwargs))
        return self.wrapper(*args, batch_descriptor=descriptor, cudagraph_runtime_mode=self.mode, **kwargs)

    @property
    def plain(self) -> Callable[[torch.Tensor], Any]:
        wrapper, mode = self.wrapper, self.mode
        return lambda x: wrapper(x, batch_descriptor=gd.BatchDescriptor(len(x)), cudagraph_runtime_mode=mode)

    @property
    def reasons(self) -> Counter[Reason]:
        return self.wrapper.get_stats().reasons

    def forget(self, tag: str) -> None:
        self.wrapper.invalidate(tag)

    @property
    def hits(self) -> int:
        return self.wrapper.get_stats().hits

    @property
    def captures(self) -> int:
        return self.wrapper.get_stats().captures

    def close(self) -> None:
        self.wrapper.clear_cache()


class AdaptiveWrapperDoor(WrapperDoor):
    name = "adaptive_wrapper"
    kind = gd.AdaptiveCUDAGraphWrapper


class ManagerDoor(Door):
    """``execute_or_capture``: the manager pads, captures and serves."""

    name = "execute_or_capture"

    def _open(self) -> None:
        self.manager = _manager(self)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows, inputs = self.rows(args, kwargs), self.named(args, kwargs)
        return self.manager.execute_or_capture(rows, 1, self.fn, inputs, dynamic=self.dynamic)

    @property
    def plain(self) -> Callable[[torch.Tensor], Any]:
        manager, fn = self.manager, self.fn
        return lambda x: manager.execute_or_capture(len(x), 1, fn, {"x": x})

    @property
    def reasons(self) -> Counter[Reason]:
        return self.manager.stats.reasons

    def forget(self, tag: str) -> None:
        self.manager.invalidate(tag)

    @property
    def hits(self) -> int:
        return self.manager.stats.hits

    @property
    def captures(self) -> int:
        return self.manager.stats.captures

    def close(self) -> None:
        self.manager.reset()


def _manager(door: Door) -> gd.CUDAGraphManager:
    """A manager with the sizes and options of a door, which captures a size when it comes first."""
    most = max(door.sizes)
    config = gd.CUDAGraphConfig(
        capture_sizes=door.sizes, max_batch_size=most, capture_after=1, options=door.options, mode=CUDAGraphMode.FULL
    )
    return gd.CUDAGraphManager(config)


class _Ahead(Door):
    """What doors share whose graphs the caller captures: by ``capture_graph``, or as an entry of a wrapper.

    A wrapper gives the entries of PIECEWISE graphs and of static inputs, which have one number of rows each.
    """

    captures_ahead = True

    def _open(self) -> None:
        self.refusal: gd.CaptureError | None = None
        self.entries: dict[int, gd.CUDAGraphEntry] = {}
        self._tried: set[int] = set()
        self._is_exact = self.mode is CUDAGraphMode.PIECEWISE or self.options.inputs == "static"
        self.manager = _manager(self)
        self.source = gd.AdaptiveCUDAGraphWrapper(self.fn, self.mode, self.options) if self._is_exact else None

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
        return self.manager.capture_graph(
            rows, 1, self.fn, inputs=self.named(args, kwargs), dynamic=self.dynamic
        )

    def renew(self, *args: Any, **kwargs: Any) -> None:
        self._tried.discard(self.size(self.rows(args, kwargs)))
        self.prepare(*args, **kwargs)

    def _publish(self, size: int, entry: gd.CUDAGraphEntry) -> None:
        """Give a new entry to the front door."""

    def explanation(self, *args: Any) -> str | None:
        return None if self.refusal is None else str(self.refusal)

    def forget(self, tag: str) -> None:
        self.manager.invalidate(tag)
        if self.source is not None:
            self.source.invalidate(tag)

    @property
    def captures(self) -> int:
        return len(self.entries)

    def close(self) -> None:
        self.manager.reset()
        if self.source is not None:
            self.source.clear_cache()


class ReplayDoor(_Ahead):
    """``replay_graph``: what it refuses with nothing copied is run by the caller, as an engine would."""

    name = "replay_graph"

    def _open(self) -> None:
        super()._open()
        # Hits, refused arguments, refused replays; an array, since a model that calls the door must not rebind numbers.
        self._counts = np.zeros(3, dtype=int)

    @property
    def hits(self) -> int:
        return int(self._counts[0])

    @property
    def reasons(self) -> Counter[Reason]:
        _, arguments, replays = self._counts.tolist()
        return Counter({Reason.ARGUMENTS_CHANGED: arguments, Reason.REPLAY_FAILED: replays})

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            answer = self._replay(self.rows(args, kwargs), self.named(args, kwargs))
        except gd.GuardError:
            self._counts[1] += 1
        except gd.ReplayError as error:
            if error.had_effects:
                raise
            self._counts[2] += 1
        else:
            self._counts[0] += 1
            return answer
        return self.fn(*args, **kwargs)

    @property
    def plain(self) -> Callable[[torch.Tensor], Any]:
        manager, fn = self.manager, self.fn

        def serve(x: torch.Tensor) -> Any:
            try:
                return manager.replay_graph(len(x), 1, {"x": x})
            except (gd.GuardError, gd.ReplayError):
                return fn(x)

        return serve

    def _replay(self, rows: int, inputs: dict[str, Any]) -> Any:
        return self.manager.replay_graph(rows, 1, inputs)


class EntryDoor(ReplayDoor):
    """``CUDAGraphEntry.replay``, for those who were given the entry alone."""

    name = "entry"

    @property
    def plain(self) -> Callable[[torch.Tensor], Any]:
        entry, fn = max(self.entries.items())[1], self.fn

        def serve(x: torch.Tensor) -> Any:
            try:
                return entry.replay({"x": x})
            except (gd.GuardError, gd.ReplayError):
                return fn(x)

        return serve

    def _replay(self, rows: int, inputs: dict[str, Any]) -> Any:
        entry = self.entries.get(self.size(rows))
        if entry is None:
            raise gd.ReplayError("no graph")
        return entry.replay(inputs)


class DispatcherDoor(_Ahead):
    """``CudagraphDispatcher`` with registered entries: dispatched with a key of as many tokens as rows."""

    name = "dispatcher"

    def _open(self, policy: gd.DispatchPolicy | None = None) -> None:
        super()._open()
        self.policy = policy
        self.dispatcher = self._made()

    def _made(self) -> Any:
        return gd.CudagraphDispatcher(self.fn, self.policy)

    def _publish(self, size: int, entry: gd.CUDAGraphEntry) -> None:
        self.dispatcher.register_graph(gd.DispatchKey(size, size), entry)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = self.rows(args, kwargs)
        return self.dispatcher.dispatch(gd.DispatchKey(rows, rows), *args, **kwargs)

    @property
    def plain(self) -> Callable[[torch.Tensor], Any]:
        dispatcher = self.dispatcher
        return lambda x: dispatcher.dispatch(gd.DispatchKey(len(x), len(x)), x)

    @property
    def hits(self) -> int:
        return self.dispatcher.stats.graph + self.dispatcher.stats.piecewise

    @property
    def reasons(self) -> Counter[Reason]:
        return self.dispatcher.stats.reasons


class StreamsEntryDoor(DispatcherDoor):
    name = "streams_entry"

    def _made(self) -> Any:
        return gd.StreamDispatcher(self.fn, 2, policy=self.policy)

    def _publish(self, size: int, entry: gd.CUDAGraphEntry) -> None:
        self.dispatcher.register_graph(gd.DispatchKey(size, size), entry, lane=0)  # they all share a pool

    def close(self) -> None:
        self.dispatcher.close()
        super().close()


class StreamsDoor(StreamsEntryDoor):
    """``StreamDispatcher.capture``, on one stream, since a model that writes state must not run on two at once."""

    name = "streams"

    def _made(self) -> Any:
        return gd.StreamDispatcher(self.fn, 2, policy=self.policy, options=self.options)

    def size(self, rows: int) -> int:
        return rows

    def _capture(self, rows: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> gd.CUDAGraphEntry | None:
        key = gd.DispatchKey(rows, rows)
        self.dispatcher.capture(key, args, kwargs, lanes=[0])
        return self.dispatcher.get_entry(key)

    def _publish(self, size: int, entry: gd.CUDAGraphEntry) -> None:
        """The capture has done it."""

    def forget(self, tag: str) -> None:
        self.dispatcher.clear_cache()


class CompositeDoor(DispatcherDoor):
    """``CompositeDispatcher`` whose member has the entries."""

    name = "composite"

    def _made(self) -> Any:
        self.member = gd.CudagraphDispatcher(self.fn, self.policy)
        composite = gd.CompositeDispatcher(backoff_s=1e-9)  # quarantine has tests of its own
        composite.add_dispatcher("member", self.member)
        return composite

    def _publish(self, size: int, entry: gd.CUDAGraphEntry) -> None:
        self.member.register_graph(gd.DispatchKey(size, size), entry)


_KINDS: tuple[type[Door], ...] = (
    GraphedDoor,
    WrapperDoor,
    AdaptiveWrapperDoor,
    ManagerDoor,
    ReplayDoor,
    EntryDoor,
    DispatcherDoor,
    StreamsDoor,
    StreamsEntryDoor,
    CompositeDoor,
)
DOORS: dict[str, type[Door]] = {kind.name: kind for kind in _KINDS}
"""Every door by its name, in the order of the table."""
