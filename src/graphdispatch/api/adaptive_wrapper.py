"""``AdaptiveCUDAGraphWrapper``: a wrapper that keeps the graphs which are worth their memory.

The front end for engines that have more descriptors than there is room for.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..backends import Backend, Pool
from ..backends.tracing import untraced
from ..call.signature import Refusal
from ..capture.collector import swept_collector
from ..config import CUDAGraphOptions
from ..descriptors import BatchDescriptor
from ..errors import ConfigError, check_callable, check_count, shown
from ..memory.admission import Admission
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..serve.group import GraphGroup
from ..serve.prewarm import arguments_of, capture_checked
from .wrapper import CUDAGraphWrapper

__all__ = ["AdaptiveCUDAGraphWrapper"]


class AdaptiveCUDAGraphWrapper(CUDAGraphWrapper):
    """A ``CUDAGraphWrapper`` that keeps the graphs in use, knows the shapes that are hot, and prewarms.

    When a limit is reached, graphs with fewer than ``min_replays_to_keep`` replays go first, and then the least
    recently used. While there is room, a descriptor is captured when it first comes, as by ``CUDAGraphWrapper``;
    without room, when it comes again within a while, and only in place of a graph that was not used for longer than
    that. So descriptors that come once, or in a cycle that is larger than the cache, run eagerly and displace nothing.

    After a ``prewarm``, ``Prewarmer.capture_one`` can drive the wrapper, to capture in pauses the sizes that are
    forecast. Thread-safe.

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

    _captures_at_once = True

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
        self._graphs.cache.admission = Admission(window=self.options.capture_window)
        self._graphs.cache.min_replays = min_replays_to_keep
        self._dummy_fn: Callable[[BatchDescriptor], Any] | None = None

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
        with self._server.lock:
            calls = {group.route.descriptor: group.num_calls for group in self._graphs.groups.values()}
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
                a mapping of keyword arguments, or a pair of the latter two. It is kept for ``capture_size``.

        Returns:
            The descriptors that have a graph afterwards, largest first.

        Raises:
            ConfigError: A shape is none, there are more than ``max_cached_graphs``, or the wrapper sleeps or is frozen;
                raised before anything is captured.
        """
        check_callable("dummy_fn", dummy_fn, "a function from a descriptor to arguments")
        self._dummy_fn = dummy_fn
        wanted = dict.fromkeys(_descriptors(shapes))
        most = self._graphs.cache.limit.max_cached_graphs
        if most is not None and len(wanted) > most:
            raise ConfigError(
                f"prewarm of {len(wanted)} shapes needs max_cached_graphs >= {len(wanted)}, got {most}; "
                "raise it, or name fewer in shapes"
            )
        if self._graphs.is_asleep:
            raise ConfigError(f"prewarm cannot capture now: {Reason.ASLEEP.text}")
        if self._graphs.is_frozen:
            raise ConfigError(f"prewarm cannot capture now: {Reason.FROZEN.text}")
        largest_first = sorted(wanted, key=lambda descriptor: -descriptor.num_tokens)
        with torch.no_grad(), self._server.lock, swept_collector(self.options.gc_disable):
            self._graphs.refresh()
            found = [self._prepared(d, dummy_fn(d)) for d in largest_first if self.get_entry(d) is None]
            todo = [call for call in found if call is not None]
            for group, leaves in todo:
                self._graphs.warm_up(group, leaves, 1)
            for group, leaves in todo:
                capture_checked(self._server, group, leaves, 1, 1)
        return [descriptor for descriptor in largest_first if self.get_entry(descriptor) is not None]

    @property
    def captured_sizes(self) -> list[int]:
        """The numbers of tokens whose descriptor, ``BatchDescriptor(num_tokens)``, has a graph; increasing."""
        found = self.get_cached_descriptors()
        return sorted(d.num_tokens for d in found if d == BatchDescriptor(d.num_tokens))

    def capture_size(self, size: int) -> bool:
        """Capture ``BatchDescriptor(size)`` now, as ``prewarm`` does, with the ``dummy_fn`` of the latest one.

        Args:
            size: The number of tokens.

        Returns:
            Whether it has a graph then.

        Raises:
            ConfigError: There was no ``prewarm`` yet, or the size is wrong.
        """
        if self._dummy_fn is None:
            raise ConfigError("capture_size needs a dummy_fn for its arguments; call prewarm(shapes, dummy_fn) first")
        return bool(self.prewarm([size], self._dummy_fn))

    def _prepared(self, descriptor: BatchDescriptor, dummy: Any) -> tuple[GraphGroup, Sequence[Any]] | None:
        args, kwargs = arguments_of(dummy)
        found = self._server.find(self._routes[descriptor], args, dict(kwargs))
        return None if isinstance(found, Refusal) else found[:2]


def _descriptors(shapes: Iterable[BatchDescriptor | int]) -> Iterator[BatchDescriptor]:
    if not isinstance(shapes, Iterable) or isinstance(shapes, (str, BatchDescriptor)):
        raise ConfigError(
            f"shapes must be several descriptors or numbers of tokens, got {shown(shapes)}; put one in a list"
        )
    for shape in shapes:
        descriptor = shape if isinstance(shape, BatchDescriptor) else BatchDescriptor(shape)
        check_count("shapes: a number of tokens", descriptor.num_tokens)
        yield descriptor
