"""What became of requests and steps."""

from collections import Counter
from dataclasses import dataclass, field

from ...reasons import Explained, Reason
from ...stats import CUDAGraphStats

__all__ = ["GenerationStats", "NotServed"]


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
    RAISED = "raised", "the model raised an error with a static cache, and none without; explain() shows it"
    BUSY = "busy", "another thread is using the cache of this batch size and length"
    PASSED_BY = (
        "passed_by",
        "this version of transformers did not hand the kept cache to the model, so that no graph could serve",
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
    capture_seconds: float = 0.0
    """Time spent in successful captures."""

    def add(self, stats: "CUDAGraphStats | GenerationStats") -> None:
        """Add the figures of one graph's calls, or of other steps."""
        self.steps += stats.calls if isinstance(stats, CUDAGraphStats) else stats.steps
        self.hits += stats.hits
        self.captures += stats.captures
        self.capture_failures += stats.capture_failures
        self.reasons.update(stats.reasons)
        if isinstance(stats, CUDAGraphStats):
            self.capture_seconds += stats.capture_time_ms * 1e-3
        else:
            self.capture_seconds += stats.capture_seconds

    @property
    def hit_rate(self) -> float:
        """The share of steps that graphs replayed; 0 without steps."""
        return self.hits / self.steps if self.steps else 0.0
