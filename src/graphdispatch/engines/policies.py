"""Policies: whether a graph should serve a key, and in which mode. Pure decisions over plain data."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

from ..descriptors import DispatchKey
from ..errors import ConfigError, check_count
from .keys import DispatchMode

__all__ = ["DefaultDispatchPolicy", "DispatchPolicy"]


def check_limits(min_tokens_for_graph: int, max_tokens_for_graph: int) -> None:
    """Raise ``ConfigError`` unless these are numbers of tokens in order."""
    check_count("min_tokens_for_graph", min_tokens_for_graph)
    check_count("max_tokens_for_graph", max_tokens_for_graph)
    if max_tokens_for_graph < min_tokens_for_graph:
        raise ConfigError(
            f"max_tokens_for_graph must be at least min_tokens_for_graph={min_tokens_for_graph}, "
            f"got {max_tokens_for_graph}"
        )


class DispatchPolicy(ABC):
    """Decides for one key whether a graph serves it, and in which mode. Subclass it for rules of your own.

    A dispatcher calls it on every dispatch, possibly from several threads at once: first ``should_use_graph``, and if
    that is true ``select_mode``. Otherwise the step runs eagerly. A policy that learns returns True also where a graph
    is due for a trial; its ``select_mode`` may return ``EAGER``, to try that.
    """

    learns: ClassVar[bool] = False
    """Whether a dispatcher measures its steps and calls ``record`` with what they took."""

    def record(self, key: DispatchKey, mode: DispatchMode, latency: float) -> None:  # noqa: B027 (most do not learn)
        """Learn what a step took. A dispatcher calls it only if ``learns`` is true, and possibly late.

        Args:
            key: The key of the step.
            mode: The mode that it ran in.
            latency: Its device time in milliseconds.
        """

    @abstractmethod
    def should_use_graph(self, key: DispatchKey, graph_available: bool) -> bool:
        """Whether a graph should serve a key.

        Args:
            key: The key of the batch.
            graph_available: Whether there is a graph that can serve it now.
        """

    @abstractmethod
    def select_mode(self, key: DispatchKey, available_modes: Collection[DispatchMode]) -> DispatchMode:
        """The mode for a key.

        Args:
            key: The key of the batch.
            available_modes: The modes that can serve it now; ``EAGER`` always can.

        Returns:
            One of ``available_modes``.
        """


class DefaultDispatchPolicy(DispatchPolicy):
    """Prefers a graph where there is one, for batches whose number of tokens is within limits. Thread-safe.

    Args:
        min_tokens_for_graph: The fewest tokens of a batch that a graph serves.
        max_tokens_for_graph: The most tokens of a batch that a graph serves.
        prefer_piecewise: Take a piecewise graph before a full one.

    Raises:
        ConfigError: A limit is no positive integer, or they are out of order.
    """

    def __init__(
        self, min_tokens_for_graph: int = 1, max_tokens_for_graph: int = 8192, prefer_piecewise: bool = False
    ) -> None:
        check_limits(min_tokens_for_graph, max_tokens_for_graph)
        self.min_tokens_for_graph = min_tokens_for_graph
        self.max_tokens_for_graph = max_tokens_for_graph
        self.prefer_piecewise = prefer_piecewise

    def __repr__(self) -> str:
        preferred = "piecewise" if self.prefer_piecewise else "full"
        return (
            f"<DefaultDispatchPolicy {preferred} graphs for {self.min_tokens_for_graph} to "
            f"{self.max_tokens_for_graph} tokens>"
        )

    def should_use_graph(self, key: DispatchKey, graph_available: bool) -> bool:
        """Whether there is a graph and the number of tokens is within the limits.

        Args:
            key: The key of the batch.
            graph_available: Whether there is a graph that can serve it now.
        """
        return graph_available and self.min_tokens_for_graph <= key.num_tokens <= self.max_tokens_for_graph

    def select_mode(self, key: DispatchKey, available_modes: Collection[DispatchMode]) -> DispatchMode:
        """The preferred kind of graph, then the other, then eager.

        Args:
            key: The key of the batch.
            available_modes: The modes that can serve it now.

        Returns:
            One of ``available_modes``, or ``EAGER``.
        """
        first, second = DispatchMode.CUDAGRAPH, DispatchMode.PIECEWISE
        if self.prefer_piecewise:
            first, second = second, first
        graphs = {first, second} & set(available_modes)
        if not self.should_use_graph(key, bool(graphs)):
            return DispatchMode.EAGER
        return first if first in graphs else second
