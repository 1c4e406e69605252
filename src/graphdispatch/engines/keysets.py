"""A key set of a ``CudagraphKeyDispatcher``, seen live: a change of the set is a change of the dispatcher."""

from collections.abc import Iterable, Iterator, MutableSet
from typing import TYPE_CHECKING, Any

from ..descriptors import BatchDescriptor
from ..modes import CUDAGraphMode

if TYPE_CHECKING:
    from .key_dispatcher import CudagraphKeyDispatcher

__all__ = ["KeySet"]


class KeySet(MutableSet[BatchDescriptor]):
    """The keys of one runtime mode, as they are at the moment of each question.

    An iteration goes over the keys that there were when it began. ``add`` and ``discard`` are the dispatcher's
    ``add_cudagraph_key`` and ``remove_cudagraph_key``. Thread-safe.
    """

    def __init__(self, dispatcher: "CudagraphKeyDispatcher", mode: CUDAGraphMode) -> None:
        self._dispatcher = dispatcher
        self._mode = mode

    @property
    def _now(self) -> frozenset[BatchDescriptor]:
        return self._dispatcher.table.keys[self._mode]

    def __contains__(self, key: object) -> bool:
        return key in self._now

    def __iter__(self) -> Iterator[BatchDescriptor]:
        return iter(self._now)

    def __len__(self) -> int:
        return len(self._now)

    def add(self, value: BatchDescriptor) -> None:
        """Add the key of one more graph. Raises ``ConfigError`` as ``add_cudagraph_key`` does."""
        self._dispatcher.add_cudagraph_key(self._mode, value)

    def discard(self, value: BatchDescriptor) -> None:
        """Remove a key, if it is there."""
        self._dispatcher.remove_cudagraph_key(self._mode, value)

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> Any:
        return set(it)  # what ``a | b`` makes belongs to no dispatcher

    def __repr__(self) -> str:
        return repr(set(self._now))
