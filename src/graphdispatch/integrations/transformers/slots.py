"""Slots: each is one kept cache with the graph that writes to it, lent to one request at a time; and their counts."""

from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch

from ...api.graphed import Graphed, graphed
from ...config import CUDAGraphOptions
from ...copying import make_lock
from ...reasons import Explained, Reason
from ...stats import CUDAGraphStats
from .caches import KeptCache

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""The arguments by which models take their cache."""


class NotServed(Explained):
    """Why a request ran as it would without graphs: its value, and as ``text`` the sentence for people."""

    MODE = "mode", "graphs serve greedy search, sampling and beam search; this request asks for another mode"
    CUSTOM = "custom", "the request brings a decoding loop of its own (custom_generate)"
    ASSISTANT = "assistant", "the model writes drafts for another one, which takes tokens back"
    NO_CACHE = "no_cache", "the request or the model uses no key-value cache (use_cache=False)"
    OWN_CACHE = "own_cache", "the request brings a cache of its own, which the next request will not have"
    OTHER_CACHE = "other_cache", "the request asks for another kind of cache; leave cache_implementation out"
    BATCH_TOO_LARGE = "batch_too_large", "the batch is larger than max_batch_size"
    TOO_LONG = "too_long", "the request may need more tokens than the largest of cache_lengths"
    MODEL = "model", "the model cannot work with a static cache: encoder-decoder, or not marked _can_compile_fullgraph"
    DEVICES = "devices", "the model is spread over several devices"
    FLASH = "flash", "flash attention skips padding by reading the mask, which no graph can do; use sdpa"
    AUTOCAST = "autocast", "autocast gives keys and values several dtypes, and a static cache has one"
    TRAINING = (
        "training",
        "the model is in training mode, where dropout draws other numbers for a static cache; call eval()",
    )
    ATTENTIONS = "attentions", "the request asks for attentions (output_attentions), which a static cache makes longer"
    RAISED = "raised", "the model raised an error at its first step with a static cache; explain() shows it"
    BUSY = "busy", "another request is using the cache of this batch size and length"
    PASSED_BY = (
        "passed_by",
        "this version of transformers did not pass the kept cache to the model, so that no graph could serve",
    )
    NO_GRAPH = "no_graph", "no graph could be captured for this batch size and length; explain() says why"


@dataclass
class GenerationStats:
    """What happened so far: whole requests, and the decode steps of those that graphs serve.

    Of ``steps`` graphs replayed ``hits``. Prefills run eagerly and are no steps. Read it at any time; each access to
    ``stats`` makes a new one.
    """

    requests: int = 0
    served: int = 0
    not_served: Counter[NotServed] = field(default_factory=Counter)
    """Why requests ran as before."""
    steps: int = 0
    hits: int = 0
    captures: int = 0
    capture_failures: int = 0
    reasons: Counter[Reason] = field(default_factory=Counter)
    """Why steps were no hits."""
    capture_time_ms: float = 0.0
    """Time spent in successful captures, in milliseconds."""

    def add(self, stats: CUDAGraphStats) -> None:
        """Add the figures of one graph's calls: all counters that have the same names."""
        self.steps += stats.calls
        for counter in fields(self):
            if hasattr(stats, counter.name):
                setattr(self, counter.name, getattr(self, counter.name) + copy(getattr(stats, counter.name)))

    @property
    def hit_rate(self) -> float:
        """The share of steps that graphs replayed; 0 without steps."""
        return self.hits / self.steps if self.steps else 0.0


class SlotKey(NamedTuple):
    """What requests must have in common to use one cache: ``rows`` of ``length`` tokens, and what their tensors are."""

    rows: int
    length: int
    layers: tuple[tuple[type, int], ...]
    """What the cache consists of, which the model's configuration says: layers, and their windows."""
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
        """Whether no graph can serve, as far as was seen: captures have failed and none has served, but not for other
        threads alone; or the model reads in Python what each step changes."""
        stats = self.step.stats
        has_failed = bool(stats.capture_failures) and not stats.hits and Reason.STATE_SHARED not in stats.reasons
        return has_failed or self.cache.counts.was_read_inside

    def run_step(self, arguments: dict[str, Any]) -> Any:
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

    def __init__(self, step: Callable[..., Any], model: Any, most: int, options: CUDAGraphOptions) -> None:
        self._step = step
        self._model = model
        self.most = most
        self._options = options
        self.lock = make_lock()
        self._slots: dict[SlotKey, Slot] = {}  # by use: the latest last
        self.counted = GenerationStats()
        """What is counted under ``lock``: all but the steps of the slots that are here now."""
        self._is_closed = False

    def take(self, key: SlotKey) -> Slot | None:
        """The slot of a request, with an empty cache; None while another request uses it. Give it back."""
        with self.lock:
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
        with self.lock:
            slot.is_busy = False
            is_over = self._is_closed
        if is_over:
            self.close()

    def close(self) -> None:
        """Release the slots that no request uses, with their caches and graphs; the others follow when given back."""
        with self.lock:
            leaving = [self._leave(slot) for slot in list(self._slots.values()) if not slot.is_busy]
            self._is_closed = True
        for slot in leaving:
            slot.step.clear()

    def get(self, key: SlotKey) -> Slot | None:
        """The slot of a key, if there is one, whoever uses it."""
        return self._slots.get(key)

    def __iter__(self) -> Iterator[Slot]:
        return iter(list(self._slots.values()))

    @property
    def stats(self) -> GenerationStats:
        """What happened so far."""
        with self.lock:
            stats = deepcopy(self.counted)
            for slot in self._slots.values():
                stats.add(slot.step.stats)
        return stats

    def _make(self, key: SlotKey) -> Slot:
        cache = KeptCache(self._model.config, key.length)
        return Slot(key, cache, graphed(self._step, dynamic={}, static=CACHE_NAMES, options=self._options))

    def _make_room(self) -> list[Slot]:
        idle = [slot for slot in self._slots.values() if not slot.is_busy]
        return [self._leave(slot) for slot in idle[: max(0, len(self._slots) + 1 - self.most)]]

    def _leave(self, slot: Slot) -> Slot:
        del self._slots[slot.key]
        self.counted.add(slot.step.stats)
        return slot
