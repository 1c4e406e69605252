"""Entries around graphs that somebody else captured: they own the memory, this library keeps the statistics."""

from collections.abc import Hashable
from typing import Any, Protocol, runtime_checkable

from torch.utils._pytree import tree_leaves

from ..backends import get_backend
from ..backends.base import Graph, Pool
from ..call.signature import ForeignSignature
from ..call.spec import is_tensor
from ..descriptors import BatchDescriptor, DispatchKey
from ..errors import ReplayError
from ..memory.entry import CUDAGraphEntry
from ..memory.inputs import StaticInputs
from ..memory.outputs import OutputRule, Outputs
from ..modes import CUDAGraphMode, EntryState

__all__ = ["ForeignPool", "Replayable", "entry_around"]


@runtime_checkable
class Replayable(Protocol):
    """Anything that can be replayed: ``torch.cuda.CUDAGraph``, a graph of this library, ``MockCUDAGraph``."""

    def replay(self) -> Any:
        """Run it on the caller's current stream."""


class _ForeignGraph(Graph):
    def __init__(self, graph: Replayable, pool: Pool) -> None:
        self._graph: Replayable | None = graph
        self._pool = pool

    def replay(self) -> None:
        if self._graph is None:
            raise ReplayError("this graph was released; register it again")
        self._pool.generation += 1
        try:
            self._graph.replay()
        except ReplayError:  # a graph that raises it says itself whether it had effects
            raise
        except Exception as error:
            failure = ReplayError(
                f"the registered graph failed to replay: {type(error).__name__}: {error}; what it wrote before cannot "
                "be known, so that the step was not run again"
            )
            failure.had_effects = True
            raise failure from error

    def reset(self) -> None:
        self._graph = None

    @property
    def nbytes(self) -> int:
        return 0


class ForeignPool(Pool):
    """Memory that this library does not see; it orders the graph's users, and nothing else."""

    @property
    def nbytes(self) -> int:
        """Bytes that are known of: none."""
        return 0

    def order_after_last_use(self) -> None:
        """The graph's owner orders its streams."""

    def is_idle(self) -> bool:
        """Whether it may be closed: always, since closing releases nothing."""
        return True

    def close(self) -> None:
        """The memory is not ours to release."""


def entry_around(
    graph: Replayable,
    key: Hashable,
    outputs: Any = None,
    *,
    piecewise: bool = False,
    addresses: tuple[int, ...] | None = None,
) -> CUDAGraphEntry:
    """An entry around a graph that somebody else captured.

    The graph's inputs are its owner's to fill. Releasing the entry only drops the reference to the graph.

    Args:
        graph: The graph.
        key: The front end's name for it.
        outputs: The tensors that it writes, or any nest of them, which are returned themselves.
        piecewise: Whether it consists of graphs between eager breaks.
        addresses: The addresses of the tensors that it reads; None: not known.

    Returns:
        The entry.
    """
    pool = ForeignPool()
    tensors = sum(is_tensor(leaf) for leaf in tree_leaves(outputs))
    rows = key.num_tokens if isinstance(key, (DispatchKey, BatchDescriptor)) else 1
    return CUDAGraphEntry(
        descriptor=key if isinstance(key, BatchDescriptor) else BatchDescriptor(rows),
        mode=CUDAGraphMode.PIECEWISE if piecewise else CUDAGraphMode.FULL,
        key=key,
        size=rows,
        graph=_ForeignGraph(graph, pool),
        pool=pool,
        backend=get_backend("auto"),
        inputs=StaticInputs((), 0),
        outputs=Outputs(outputs, OutputRule(((),) * tensors), [False] * tensors, "static", pool),
        state=EntryState.VERIFIED,
        knows_effects=False,
        signature=ForeignSignature(addresses),
    )
