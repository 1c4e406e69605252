"""Policies: whether a graph should serve a key, and in which mode. Pure decisions over plain data."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

from ..descriptors import DispatchKey
from ..errors import ConfigError, check_count
from ..modes import DispatchMode

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
    """Decides for one key. Called on every dispatch, possibly from several threads at once.

    A dispatcher asks ``should_use_graph``, and then ``select_mode``. If the first answer is no, the step runs eagerly
    and the second question is not asked. A policy that learns says yes also where a graph is due for a trial, and may
    answer ``EAGER`` to the second question, to try that.
    """

    learns: ClassVar[bool] = False
    """Whether a dispatcher measures its steps and tells ``record`` what they took."""

    def record(self, key: DispatchKey, mode: DispatchMode, latency: float) -> None:  # noqa: B027 (most do not learn)
        """Learn that a step of ``key`` took ``latency`` milliseconds of device time in ``mode``; may be called late."""

    @abstractmethod
    def should_use_graph(self, key: DispatchKey, graph_available: bool) -> bool:
        """Whether a graph should serve ``key``, given whether there is one."""

    @abstractmethod
    def select_mode(self, key: DispatchKey, available_modes: Collection[DispatchMode]) -> DispatchMode:
        """The mode for ``key`` among those that can serve it now; ``EAGER`` always can."""


class DefaultDispatchPolicy(DispatchPolicy):
    """Prefers a graph where there is one, for batches of ``min_tokens_for_graph`` to ``max_tokens_for_graph`` tokens.

    ``prefer_piecewise`` takes a piecewise graph before a full one. Raises ``ConfigError`` for limits out of order.
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
        """Whether there is a graph and the number of tokens is within the limits."""
        return graph_available and self.min_tokens_for_graph <= key.num_tokens <= self.max_tokens_for_graph

    def select_mode(self, key: DispatchKey, available_modes: Collection[DispatchMode]) -> DispatchMode:
        """The preferred kind of graph, then the other, then eager."""
        first, second = DispatchMode.CUDAGRAPH, DispatchMode.PIECEWISE
        if self.prefer_piecewise:
            first, second = second, first
        graphs = {first, second} & set(available_modes)
        if not self.should_use_graph(key, bool(graphs)):
            return DispatchMode.EAGER
        return first if first in graphs else second
