"""Static caches that outlive a request, and that a graph may write to.

transformers makes a new static cache for each ``generate``. Graphs hold addresses, so here a cache is kept and reset.
It differs from a new one in two ways: beams are reordered in place, and sliding windows count tokens in a tensor.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from transformers.cache_utils import (
    DynamicCache,
    LinearAttentionLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)


class KeptCache(StaticCache):
    """A static cache for ``max_cache_len`` tokens whose tensors stay where they are, whatever a request does.

    Its tensors are made by the first request, for that request's rows. Used by one request at a time.
    """

    __module__ = StaticCache.__module__  # state of the model's, which guards compare, and none of this library's

    def __init__(self, config: Any, max_cache_len: int) -> None:
        super().__init__(config=config, max_cache_len=max_cache_len)
        self.counts = TokenCounts()
        for layer in self.layers:
            if isinstance(layer, StaticSlidingWindowLayer):
                kind: Any = type(layer)
                del layer.cumulative_length_int
                layer.counts = self.counts
                layer.__class__ = _counting(kind)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the rows for beam search. Layers do so into new tensors, which are copied back."""
        for layer in self.layers:
            before = [(table, key, table[key]) for table, key in _tensors(layer)]
            layer.reorder_cache(beam_idx)
            for table, key, tensor in before:
                if table[key] is not tensor:
                    tensor.copy_(table[key])
                    table[key] = tensor

    @property
    def is_linear_alone(self) -> bool:
        """Whether all layers are of linear attention, whose cache has one size whatever the length."""
        return all(type(layer) is LinearAttentionLayer for layer in self.layers)


def layers_of(config: Any, length: int) -> tuple[tuple[type, int], ...]:
    """What a static cache of so many tokens consists of: by layer, its class and the tokens that it holds."""
    layers = StaticCache(config=config, max_cache_len=length).layers
    return tuple((type(layer), getattr(layer, "max_cache_len", 0)) for layer in layers)


class TokenCounts:
    """How many tokens each sliding window has seen, in Python, for the code that makes masks before each step.

    It changes with each step and is no state that guards compare. So captured code must not read it.
    """

    def __init__(self) -> None:
        self.was_read_inside = False
        """Whether a step has read a count, which its graph would keep."""
        self._tokens: dict[int, int] = {}
        self._before: dict[int, int] | None = None

    @property
    def is_stepping(self) -> bool:
        """Whether a step of one token is under way, whose code may be captured."""
        return self._before is not None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within the block a step is under way; at its end each layer has seen one token more."""
        self._before = before = dict(self._tokens)
        try:
            yield
        finally:
            self._tokens = {layer: tokens + 1 for layer, tokens in before.items()}
            self._before = None

    def read(self, layer: Any) -> int:
        """The tokens that a layer has seen."""
        self.was_read_inside |= self.is_stepping
        return self._tokens.get(id(layer), 0)

    def write(self, layer: Any, tokens: int) -> None:
        """Set what ``read`` gives."""
        self._tokens[id(layer)] = tokens

    def note_step(self, layer: Any) -> None:
        """Note that a layer has seen the token of this step, however often the step's code runs."""
        if self._before is not None:
            self._tokens[id(layer)] = self._before.get(id(layer), 0) + 1


class _CountsInTensor(StaticSlidingWindowLayer):
    """A sliding window whose step of one token is the same code before and after the window is full."""

    @property
    def cumulative_length_int(self) -> int:
        """The number of tokens so far, in Python."""
        counts: TokenCounts = self.counts
        return counts.read(self)

    @cumulative_length_int.setter
    def cumulative_length_int(self, tokens: int) -> None:
        self.counts.write(self, tokens)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens and return what they attend to, with the same values as the base class."""
        if key_states.shape[-2] != 1 or not self.counts.is_stepping:
            return self._update_eagerly(key_states, value_states)
        self.counts.note_step(self)
        last = self.max_cache_len - 1
        is_full = (self.cumulative_length > last).long()
        # A full window drops its oldest token.
        kept = (torch.arange(self.max_cache_len, device=self.device) + is_full).clamp_(max=last)
        place = self.cumulative_length.clamp(max=last).view(1)
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            held.copy_(held.index_select(2, kept))
            held.index_copy_(2, place, new)
        self.cumulative_length.add_(1)
        return self.keys, self.values

    def _update_eagerly(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states)
        self.cumulative_length.fill_(self.cumulative_length_int)
        return states

    def get_seq_length(self) -> Any:
        """The number of tokens so far, as a tensor, so that captured code may use it."""
        return self.cumulative_length if self.is_initialized else 0


@cache
def _counting(kind: Any) -> type:
    """The class of such layers that counts in a tensor."""
    return type(kind.__name__, (_CountsInTensor, kind), {"__module__": kind.__module__})


def _tensors(layer: Any) -> Iterator[tuple[dict[Any, Any], Any]]:
    """Where a layer holds its tensors: pairs (dict, key)."""
    for table in (vars(layer), *(inner for inner in vars(layer).values() if type(inner) is dict)):
        yield from ((table, key) for key, value in table.items() if isinstance(value, torch.Tensor))


def take_out(cache: KeptCache, config: Any) -> DynamicCache:
    """A copy of a cache for the caller to keep: one that grows, as ``generate`` returns it without graphs."""
    taken = DynamicCache(config=config)
    for layer, kept in zip(taken.layers, cache.layers, strict=True):
        if isinstance(kept, LinearAttentionLayer):
            vars(layer).update(copy.deepcopy({name: vars(kept)[name] for name in vars(LinearAttentionLayer())}))
        if isinstance(kept, StaticLayer) and kept.is_initialized:
            seen = int(kept.cumulative_length)
            held = min(seen, kept.max_cache_len)
            layer.update(kept.keys[:, :, :held], kept.values[:, :, :held])
            if kept.is_sliding:
                layer.cumulative_length = seen
            if getattr(kept, "is_indexer_initialized", False):
                layer.update_indexer(kept.indexer_keys[:, :held])
                layer.indexer_position_ids = kept.indexer_position_ids
    return taken
