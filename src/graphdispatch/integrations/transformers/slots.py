"""Slots: each is one kept cache with the graph that writes to it, lent to one request at a time."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ...api.graphed import Graphed, graphed
from ...config import CUDAGraphOptions
from .caches import KeptCache
from .stats import GenerationStats

__all__ = ["CACHE_NAMES", "Slot", "SlotKey", "SlotPool"]

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""The arguments by which models take their cache."""


class SlotKey(NamedTuple):
    """What requests must have in common to use one cache: ``rows`` of ``length`` tokens, and what their tensors are."""

    rows: int
    length: int
    dtype: torch.dtype
    device: torch.device
    is_inference: bool
    """Whether the cache's tensors are made in inference mode; such tensors cannot be written elsewhere."""


class Slot:
    """A kept cache and the callable that serves the steps which use it."""

    def __init__(self, key: SlotKey, cache: KeptCache, step: Graphed[..., Any]) -> None:
        self.key = key
        self.cache = cache
        self.step = step
        self.is_busy = False
        self.error = ""
        """What the model raised with this cache, where it raises nothing without; empty if it did not."""

    @property
    def is_hopeless(self) -> bool:
        """Whether no graph can serve, as far as was seen: captures have failed and none has served, or the model reads
        in Python what each step changes."""
        stats = self.step.stats
        return (bool(stats.capture_failures) and not stats.hits) or self.cache.counts.was_read_inside

    def serve(self, arguments: dict[str, Any]) -> Any:
        """The model's answer to a step of one token."""
        with self.cache.counts.step():
            # Sorted, since the order of a prefill's arguments says nothing, and another order is another call.
            return self.step(**dict(sorted(arguments.items())))

    def explain(self) -> str:
        """One line: what served how often, and what became of the latest step."""
        stats, decision = self.step.stats, self.step.last_decision
        said = f"; latest: {decision.explain()}" if decision is not None else ""
        said += f"; raised {self.error}" if self.error else ""
        said += "; the model reads how full a sliding window is" if self.cache.counts.was_read_inside else ""
        return (
            f"{self.key.rows} rows, {self.key.length} tokens: {stats.hits} of {stats.calls} steps by graphs, "
            f"of which {stats.captures} were captured{said}"
        )


class SlotPool:
    """The slots of one model: at most ``most`` of them; the one that was used longest ago makes room. Thread-safe."""

    def __init__(self, step: Callable[..., Any], config: Any, most: int, options: CUDAGraphOptions) -> None:
        self._step = step
        self._config = config
        self._most = most
        self._options = options
        self._lock = threading.Lock()
        self._slots: dict[SlotKey, Slot] = {}  # by use: the latest last
        self._past = GenerationStats()
        self._is_closed = False

    def take(self, key: SlotKey) -> Slot | None:
        """The slot of a request, with an empty cache; None while another request uses it. Give it back."""
        with self._lock:
            slot = self._slots.pop(key, None)
            if slot is not None and slot.is_busy:
                self._slots[key] = slot
                return None
            leaving = self._make_room() if slot is None else []
            slot = self._slots[key] = slot or self._make(key)
            slot.is_busy, self._is_closed = True, False
        for other in leaving:
            other.step.clear()
        slot.cache.reset()
        return slot

    def give_back(self, slot: Slot) -> None:
        """End a request's use of a slot."""
        with self._lock:
            slot.is_busy = False
            is_over = self._is_closed
        if is_over:
            self.close()

    def close(self) -> None:
        """Release the slots that no request uses, with their caches and graphs; the others follow when given back."""
        with self._lock:
            leaving = [self._leave(slot) for slot in list(self._slots.values()) if not slot.is_busy]
            self._is_closed = True
        for slot in leaving:
            slot.step.clear()

    def get(self, key: SlotKey) -> Slot | None:
        """The slot of a key, if there is one, whoever uses it."""
        return self._slots.get(key)

    def __iter__(self) -> Iterator[Slot]:
        return iter(list(self._slots.values()))

    def count_into(self, stats: GenerationStats) -> None:
        """Add the figures of all steps, also of slots that are gone."""
        with self._lock:
            stats.add(self._past)
            for slot in self._slots.values():
                stats.add(slot.step.stats)

    def _make(self, key: SlotKey) -> Slot:
        cache = KeptCache(self._config, key.length)
        return Slot(key, cache, graphed(self._step, dynamic={}, static=CACHE_NAMES, options=self._options))

    def _make_room(self) -> list[Slot]:
        idle = [slot for slot in self._slots.values() if not slot.is_busy]
        return [self._leave(slot) for slot in idle[: max(0, len(self._slots) + 1 - self._most)]]

    def _leave(self, slot: Slot) -> Slot:
        del self._slots[slot.key]
        self._past.add(slot.step.stats)
        return slot
