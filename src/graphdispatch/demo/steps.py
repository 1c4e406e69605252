"""Makes the tensors of a decoder's step from the counts of a trace.

Note [requests]
    A trace counts requests but does not name them, so we play them. Requests of the previous step continue to decode
    in the order of their arrival, as many as the step asks for; the others have finished. Each request that is still
    in its prompt begins on a free slot. A decoding request advances by one position and starts again at position 0
    when its window is full. A prompt that is longer than the window is cut into pieces of at most one window; each
    piece starts at position 0 on a slot of its own. The request continues from the last piece, and the other slots are
    free after the step. A step therefore has exactly the rows of the trace, whatever the window.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .trace import Step

__all__ = ["StepInputs", "StepMaker", "chunk_lengths", "slots_needed"]


class StepInputs(NamedTuple):
    """The arguments of ``Decoder.forward`` for one step: int64 ``[num_tokens]`` each."""

    token_ids: Tensor
    slots: Tensor
    positions: Tensor


def chunk_lengths(step: Step) -> list[int]:
    """The tokens that each request in its prompt schedules: ``max_query_len`` first, then equal shares."""
    count = step.num_prefill_reqs
    if count == 0:
        return []
    tokens = step.num_tokens - (step.num_reqs - count)
    first = min(max(step.max_query_len, -(-tokens // count)), tokens - (count - 1))
    if count == 1:
        return [first]
    share, more = divmod(tokens - first, count - 1)
    return [first] + [share + (i < more) for i in range(count - 1)]


def slots_needed(steps: Sequence[Step], window: int) -> int:
    """The largest number of slots that one step occupies, pieces of long prompts included."""
    return max(step.num_reqs - step.num_prefill_reqs + sum(_pieces(step, window)) for step in steps)


class StepMaker:
    """Turns steps into inputs, one after the other: see Note [requests]. Not thread-safe.

    Token ids are random, from ``seed``. They never depend on a model's output, so two models can get the same inputs
    from one maker. ``slots`` must be at least ``slots_needed`` of all steps.
    """

    def __init__(self, slots: int, window: int, vocab: int, seed: int = 0) -> None:
        self._window = window
        self._vocab = vocab
        self._generator = torch.Generator().manual_seed(seed)
        self._free = list(range(slots - 1, -1, -1))
        self._next: dict[int, int] = {}  # slot of each request, in order of arrival -> its next position

    def make(self, step: Step) -> StepInputs:
        """The inputs of ``step``. Moves the requests on to their state after it."""
        slots: list[int] = []
        positions: list[int] = []
        for slot in self._continue(step.num_reqs - step.num_prefill_reqs):
            slots.append(slot)
            positions.append(self._next[slot])
            self._next[slot] = (self._next[slot] + 1) % self._window
        for slot, length in self._begin(chunk_lengths(step)):
            slots.extend([slot] * length)
            positions.extend(range(length))
        tokens = torch.randint(self._vocab, (step.num_tokens,), generator=self._generator)
        return StepInputs(tokens, torch.tensor(slots), torch.tensor(positions))

    def _continue(self, count: int) -> list[int]:
        while len(self._next) > count:
            slot, _ = self._next.popitem()
            self._free.append(slot)
        while len(self._next) < count:
            self._next[self._free.pop()] = 0
        return list(self._next)

    def _begin(self, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
        borrowed: list[int] = []
        for length in lengths:
            for start in range(0, length, self._window):
                slot, piece = self._free.pop(), min(self._window, length - start)
                yield slot, piece
                if start + piece < length:
                    borrowed.append(slot)
                else:
                    self._next[slot] = piece % self._window
        self._free.extend(borrowed)


def _pieces(step: Step, window: int) -> Iterator[int]:
    return (-(-length // window) for length in chunk_lengths(step))
