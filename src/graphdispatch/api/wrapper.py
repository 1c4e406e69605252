"""``CUDAGraphWrapper``: one callable, captured once for each batch descriptor that the caller names.

The front end for engines, which decide the descriptor themselves. The wrapper trusts it to choose the graph and checks
that the arguments are what that graph was captured with.
"""

from collections.abc import Callable
from typing import Any

from ..backends import Backend, Pool
from ..backends.tracing import untraced
from ..call.context import current_context, told_rows
from ..call.rules import ArgumentRules
from ..call.spec import parameter_names
from ..config import CUDAGraphOptions, parse_mode
from ..decide.size_table import SizeTable
from ..descriptors import BatchDescriptor
from ..errors import ConfigError, check_callable, check_type, shown
from ..memory.cache import make_cache
from ..memory.entry import CUDAGraphEntry
from ..modes import CUDAGraphMode
from ..serve.graphs import GraphSet
from ..serve.group import Route, Routes
from ..serve.server import Server
from ..stats import CUDAGraphStats
from .lifecycle import Lifecycle

__all__ = ["CUDAGraphWrapper"]


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

    Raises:
        ConfigError: An argument or an option is wrong.
    """

    _graphs: GraphSet
    _captures_at_once = False
    """Whether a descriptor is captured at its first miss while there is room, though admission would wait."""

    def __init__(
        self,
        runnable: Callable[..., Any],
        runtime_mode: CUDAGraphMode = CUDAGraphMode.FULL,
        options: CUDAGraphOptions | None = None,
        max_cached_graphs: int = 100,
        *,
        backend: Backend | None = None,
        pool: Pool | None = None,
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
        self.runnable = runnable
        self._takes_rows = "rows" in (parameter_names(runnable) or ())
        self.runtime_mode = mode
        self.options = CUDAGraphOptions.or_default(options, "options")
        stats = CUDAGraphStats(knows_rows=False)
        self.options.refuse(("max_cached_graphs",), "CUDAGraphWrapper", "give max_cached_graphs= to the wrapper itself")
        cache = make_cache(self.options, max_cached_graphs, capture_after=1, stats=stats)
        self._server = Server(
            runnable, self.options, cache, backend=backend, pool=pool, eager_captures=self._captures_at_once
        )
        self._graphs = self._server.graphs
        self._routes = Routes(self._make_route)

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
            **kwargs: The keyword arguments of the runnable. ``rows=`` says how many rows of a batch that the caller
                padded are real, as in ``cudagraph_context``; the runnable does not get it, unless it has a parameter of
                that name itself.

        Returns:
            The runnable's outputs, owned as ``options.outputs`` says.

        Raises:
            ConfigError: The descriptor or the mode is none.
        """
        if "rows" in kwargs and not self._takes_rows:
            rows = kwargs.pop("rows")
            with told_rows(rows, batch_descriptor or (current_context() or (None, None))[1]):
                return self(
                    *args,
                    batch_descriptor=batch_descriptor,
                    cudagraph_runtime_mode=cudagraph_runtime_mode,
                    **kwargs,
                )
        if cudagraph_runtime_mode is None or batch_descriptor is None:
            mode, descriptor = current_context() or (None, None)
            cudagraph_runtime_mode = cudagraph_runtime_mode if cudagraph_runtime_mode is not None else mode
            batch_descriptor = batch_descriptor if batch_descriptor is not None else descriptor
        if cudagraph_runtime_mode is not self.runtime_mode or batch_descriptor is None:
            if cudagraph_runtime_mode is not None and not isinstance(cudagraph_runtime_mode, CUDAGraphMode):
                raise ConfigError(
                    f"cudagraph_runtime_mode must be a CUDAGraphMode, got {shown(cudagraph_runtime_mode)}"
                )
            return self.runnable(*args, **kwargs)
        try:
            route = self._routes.get(batch_descriptor)
        except Exception:  # of the variant's class, too
            raise ConfigError(f"batch_descriptor must be hashable, got {shown(batch_descriptor)}") from None
        if route is None:
            with self._server.lock:
                route = self._routes[batch_descriptor]
        return self._server.serve(route, args, kwargs)

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
        return [entry.descriptor for entry in self._graphs.cache]

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
        return self._graphs.cache.get((descriptor, 1))

    def get_stats(self) -> CUDAGraphStats:
        """What happened so far; calls in other modes are not counted."""
        return self._graphs.stats

    def clear_cache(self) -> None:
        """Release all graphs; descriptors are captured anew when they come again."""
        with self._server.lock:
            self._routes.clear()
            self._graphs.clear()

    def __getattr__(self, name: str) -> Any:
        # Protocols (copying, tensors, arrays) ask an object itself; and half-made there is no runnable.
        if (name.startswith("__") and name.endswith("__")) or "runnable" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.runnable, name)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.runtime_mode.name} {type(self.runnable).__name__}: "
            f"{len(self._graphs.cache)} graphs, {self._graphs.stats.hits} hits, {self._graphs.stats.misses} misses>"
        )
