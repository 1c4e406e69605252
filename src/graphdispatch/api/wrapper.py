"""``CUDAGraphWrapper``: one callable, captured once for each batch descriptor that the caller names.

The front end for engines, which decide the descriptor themselves. The wrapper trusts it to choose the graph and checks
that the arguments are what that graph was captured with. ``AdaptiveCUDAGraphWrapper`` is for engines that have more
descriptors than there is room for.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..backends import Backend, Pool
from ..backends.tracing import untraced
from ..config import CUDAGraphOptions, parse_mode
from ..descriptors import BatchDescriptor, current_context
from ..errors import ConfigError, check_callable, check_count, check_type, shown
from ..modes import CUDAGraphMode
from ..runtime.admission import Admission
from ..runtime.cache import make_cache
from ..runtime.decide import Memo, SizeTable
from ..runtime.entry import CUDAGraphEntry
from ..runtime.group import MOST_ROUTES, Route
from ..runtime.prewarm import arguments_of, prewarm, refuse_closed, refuse_too_many
from ..runtime.ranks import Least, Ranks
from ..runtime.rules import ArgumentRules
from ..runtime.server import Server
from ..runtime.signature import Refusal
from ..runtime.windows import paused_collector
from ..stats import CUDAGraphStats
from .lifecycle import Lifecycle, capturer_for


class CUDAGraphWrapper(Lifecycle):
    """Captures ``runnable`` the first time that a descriptor comes in ``runtime_mode``, and replays it from then on.

    Call it with ``batch_descriptor=`` and ``cudagraph_runtime_mode=``, or inside a ``cudagraph_context``. In any other
    mode, and without a descriptor, the runnable is called directly; so a FULL wrapper around PIECEWISE ones leaves a
    PIECEWISE step to them, and while an outer one captures, the inner ones are part of its graph. The first two batches
    of a descriptor get eager's answer, while the graph is captured and compared.

    All arguments keep their shapes for one descriptor: padding is the caller's. By default tensors are copied into
    buffers of the wrapper on each call and outputs are copies; ``CUDAGraphOptions(inputs="static", outputs="static")``
    takes the caller's tensors as the buffers and returns the graph's own outputs, as engines do. A call whose arguments
    do not fit runs eagerly, with a reason in ``get_stats()``.

    Other attributes are those of the runnable. Names with double underscores are the wrapper's own. Thread-safe.

    Args:
        runnable: What is captured; it is called eagerly wherever no graph serves.
        runtime_mode: ``FULL`` or ``PIECEWISE``.
        options: How graphs are captured, replayed and kept; ``options.max_cached_graphs`` is refused.
        max_cached_graphs: The most graphs kept at once.
        backend: Where graphs run, given together with ``pool``. None follows the device of the arguments.
        pool: The memory of the graphs, which wrappers share that never run at the same time.
        agree: Keeps ranks in step that share collectives of the runnable. It gets integers, as many on each rank, and
            returns for each place the least one of all ranks: ``RankConsensus.least``, or an all-reduce of your own
            between hosts. Until ``freeze()`` each call is collective: what one rank has to capture or to compare, all
            do, and a graph that one refuses is refused by all, for its reason. Each rank makes the same calls, on one
            thread. None: each rank decides for itself.

    Raises:
        ConfigError: An argument or an option is wrong.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        runtime_mode: CUDAGraphMode = CUDAGraphMode.FULL,
        options: CUDAGraphOptions | None = None,
        max_cached_graphs: int = 100,
        *,
        backend: Backend | None = None,
        pool: Pool | None = None,
        agree: Least | None = None,
    ) -> None:
        mode = parse_mode(runtime_mode)
        if mode not in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            raise ConfigError(f"runtime_mode must be PIECEWISE or FULL, got {mode.name}")
        check_callable("runnable", runnable)
        if (backend is None) is not (pool is None):
            raise ConfigError("backend and pool must be given together, since a pool belongs to a backend")
        if backend is not None:
            check_type("backend", backend, Backend, "a Backend, as get_backend() gives")
            check_type("pool", pool, Pool, "a Pool, as backend.make_pool() gives")
        if agree is not None:
            check_callable("agree", agree, "a function from integers to the least ones of all ranks")
        self.runnable = runnable
        self.runtime_mode = mode
        self.options = CUDAGraphOptions.or_default(options, "options")
        stats = CUDAGraphStats(knows_rows=False)
        self.options.refuse(("max_cached_graphs",), "CUDAGraphWrapper", "give max_cached_graphs= to the wrapper itself")
        self._graph_cache = make_cache(
            self.options, max_cached_graphs, capture_after=1, stats=stats, backend=backend, pool=pool
        )
        self._server = Server(runnable, self.options, self._graph_cache, capturer_for(self.options, mode))
        self._serve = self._server.serve if agree is None else self._server.serve_in_step
        self._graphs = self._server.graphs
        self._graphs.ranks = None if agree is None else Ranks(agree)
        self._routes = Memo[Any, Route](self._make_route, MOST_ROUTES)

    @untraced
    def __call__(
        self,
        *args: Any,
        batch_descriptor: BatchDescriptor | None = None,
        cudagraph_runtime_mode: CUDAGraphMode | None = None,
        **kwargs: Any,
    ) -> Any:
        """Serve one call. What the runnable raises passes through.

        Args:
            *args: The positional arguments of the runnable.
            batch_descriptor: What the graph serves. None: as in the ``cudagraph_context``.
            cudagraph_runtime_mode: The runtime mode of the step. None: as in the ``cudagraph_context``.
            **kwargs: The keyword arguments of the runnable.

        Returns:
            The runnable's outputs, owned as ``options.outputs`` says.

        Raises:
            ConfigError: The descriptor or the mode is none, or ``agree`` gave no integers.
        """
        if cudagraph_runtime_mode is None or batch_descriptor is None:
            mode, descriptor = current_context() or (None, None)
            cudagraph_runtime_mode = cudagraph_runtime_mode if cudagraph_runtime_mode is not None else mode
            batch_descriptor = batch_descriptor if batch_descriptor is not None else descriptor
        if cudagraph_runtime_mode is not self.runtime_mode or batch_descriptor is None:
            if cudagraph_runtime_mode is not None:
                check_type("cudagraph_runtime_mode", cudagraph_runtime_mode, CUDAGraphMode, "a CUDAGraphMode")
            return self.runnable(*args, **kwargs)
        try:
            route = self._routes[batch_descriptor]
        except TypeError:
            raise ConfigError(f"batch_descriptor must be hashable, got {shown(batch_descriptor)}") from None
        return self._serve(route, args, kwargs)

    def _make_route(self, descriptor: Any) -> Route:
        """The route of a descriptor: one signature, whose shapes never change."""
        if not isinstance(descriptor, BatchDescriptor) or descriptor.num_tokens < 1:
            raise ConfigError(f"batch_descriptor must be a BatchDescriptor, num_tokens >= 1, got {shown(descriptor)}")
        rules = ArgumentRules({}, {}, frozenset()) if self.options.inputs == "copy" else None
        table = SizeTable.of_one(1, self.runtime_mode)
        return Route(descriptor, table, rules, descriptor=descriptor, is_single=True)

    def unwrap(self) -> Any:
        """The runnable, however many wrappers are around it."""
        inner: Any = self.runnable
        return inner.unwrap() if issubclass(type(inner), CUDAGraphWrapper) else inner

    def get_cached_descriptors(self) -> list[BatchDescriptor]:
        """The descriptors that have a graph now."""
        return [entry.descriptor for entry in self._graph_cache]

    def get_entry(self, descriptor: BatchDescriptor) -> CUDAGraphEntry | None:
        """The entry of a descriptor.

        Args:
            descriptor: The descriptor.

        Returns:
            The entry, or None.

        Raises:
            ConfigError: It is no ``BatchDescriptor``.
        """
        check_type("descriptor", descriptor, BatchDescriptor, "a BatchDescriptor")
        return next((entry for entry in self._graph_cache if entry.descriptor == descriptor), None)

    def get_stats(self) -> CUDAGraphStats:
        """What happened so far; calls in other modes are not counted."""
        return self._graphs.stats

    def clear_cache(self) -> None:
        """Release all graphs; descriptors are captured anew when they come again."""
        self._graph_cache.refuse_changes()
        with self._server.lock:
            self._routes.clear()
            self._graphs.clear()

    def __getattr__(self, name: str) -> Any:
        # Protocols (copying, tensors, arrays) read an object itself; and half-made there is no runnable.
        if (name.startswith("__") and name.endswith("__")) or "runnable" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.runnable, name)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.runtime_mode.name} {type(self.runnable).__name__}: "
            f"{len(self._graph_cache)} graphs, {self._graphs.stats.hits} hits, {self._graphs.stats.misses} misses>"
        )


class AdaptiveCUDAGraphWrapper(CUDAGraphWrapper):
    """A ``CUDAGraphWrapper`` that keeps the graphs in use, knows the shapes that are hot, and prewarms.

    When a limit is reached, graphs with fewer than ``min_replays_to_keep`` replays go first, and then the least
    recently used. While there is room, a descriptor is captured when it first comes, as far as ``capture_share``
    leaves time; without room, when it comes again within a while, and only in place of a graph that was not used for
    longer than that. So descriptors that come once, or in a cycle that is larger than the cache, run eagerly and
    displace nothing.

    ``Prewarmer.capture_one`` finds pauses in which ``prewarm`` captures the sizes that are forecast. Thread-safe.

    Args:
        runnable: What is captured; it is called eagerly wherever no graph serves.
        runtime_mode: ``FULL`` or ``PIECEWISE``.
        options: As for ``CUDAGraphWrapper``; ``capture_after`` is refused, too.
        max_cached_graphs: The most graphs kept at once.
        min_replays_to_keep: Graphs with fewer replays go first.
        backend: Where graphs run, given together with ``pool``. None follows the device of the arguments.
        pool: The memory of the graphs, which wrappers share that never run at the same time.

    Raises:
        ConfigError: An argument or an option is wrong.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        runtime_mode: CUDAGraphMode = CUDAGraphMode.FULL,
        options: CUDAGraphOptions | None = None,
        max_cached_graphs: int = 100,
        min_replays_to_keep: int = 3,
        *,
        backend: Backend | None = None,
        pool: Pool | None = None,
    ) -> None:
        check_count("min_replays_to_keep", min_replays_to_keep, 0)
        super().__init__(runnable, runtime_mode, options, max_cached_graphs, backend=backend, pool=pool)
        remedy = "this wrapper has a rule of its own; CUDAGraphWrapper takes the option"
        self.options.refuse(("capture_after",), "AdaptiveCUDAGraphWrapper", remedy)
        cache = self._graph_cache
        cache.admission, cache.min_replays, cache.fills_at_once = Admission(), min_replays_to_keep, True

    def get_hot_shapes(self, top_k: int = 10) -> list[tuple[BatchDescriptor, int]]:
        """The descriptors that came most often.

        Calls count since ``clear_cache`` or the beginning, with or without a graph; prewarming does not. Calls that no
        graph can ever serve do not count either.

        Args:
            top_k: The most descriptors to return.

        Returns:
            Each descriptor with its number of calls, the most frequent first.

        Raises:
            ConfigError: ``top_k`` is no positive integer.
        """
        check_count("top_k", top_k)
        groups = list(self._graphs.groups.values())
        calls = {group.route.descriptor: group.misses.total() + group.num_replays for group in groups}
        ranked = sorted(calls.items(), key=lambda item: -item[1])
        return [(shape, count) for shape, count in ranked if shape is not None and count][:top_k]

    @untraced
    def prewarm(
        self, shapes: Iterable[BatchDescriptor | int], dummy_fn: Callable[[BatchDescriptor], Any]
    ) -> list[BatchDescriptor]:
        """Capture ``shapes`` now, largest first.

        Whatever the runs write is put back. A graph is compared with eager for the dummy and, if that has
        floating-point numbers, for another one made of it; else the first real batch is. A shape that cannot be
        captured is left out, and stays eager. What ``dummy_fn`` raises passes through, and what the runnable raises on
        dummy arguments.

        Args:
            shapes: Descriptors; an integer stands for the descriptor of that many tokens.
            dummy_fn: ``dummy_fn(descriptor)`` gives the arguments of a call: a tensor, a tuple of positional arguments,
                a mapping of keyword arguments, or a pair of the latter two.

        Returns:
            The descriptors that have a graph afterwards, largest first.

        Raises:
            ConfigError: A shape is none, or there are more than ``max_cached_graphs``.
            CaptureError: The wrapper sleeps or is frozen.
        """
        check_callable("dummy_fn", dummy_fn, "a function from a descriptor to arguments")
        wanted = dict.fromkeys(_descriptors(shapes))
        refuse_too_many(self._graph_cache, wanted)
        largest_first = sorted(wanted, key=lambda descriptor: -descriptor.num_tokens)
        self._graph_cache.refuse_changes()
        with torch.no_grad(), self._server.lock, paused_collector(self.options.gc_disable):
            for descriptor in largest_first[:1]:
                refuse_closed(self._server, self._routes[descriptor])
            calls = [(self._routes[descriptor], *arguments_of(dummy_fn(descriptor))) for descriptor in largest_first]
            calls = [call for call in calls if not isinstance(self._graphs.find(*call), Refusal)]
            for call in calls:
                prewarm(self._server, *call)
            for call in calls:  # the run of one descriptor may move a workspace that graphs made before read
                if any(group.has_only_other_states(1) for group in call[0].groups):
                    prewarm(self._server, *call)
        return [descriptor for descriptor in largest_first if self.get_entry(descriptor) is not None]

    @property
    def captured_sizes(self) -> list[int]:
        """The numbers of tokens whose descriptor, ``BatchDescriptor(num_tokens)``, has a graph; increasing."""
        found = self.get_cached_descriptors()
        return sorted(d.num_tokens for d in found if d == BatchDescriptor(d.num_tokens))


def _descriptors(shapes: Iterable[BatchDescriptor | int]) -> Iterator[BatchDescriptor]:
    if not isinstance(shapes, Iterable) or isinstance(shapes, (str, BatchDescriptor)):
        raise ConfigError(
            f"shapes must be several descriptors or numbers of tokens, got {shown(shapes)}; put one in a list"
        )
    for shape in shapes:
        descriptor = shape if isinstance(shape, BatchDescriptor) else BatchDescriptor(shape)
        check_count("shapes: a number of tokens", descriptor.num_tokens)
        yield descriptor
