"""An engine on the runtime alone: it schedules requests, and its graphs are recorded and trusted. Nothing is proven.

The model keeps one state for each request, in a slot of its cache. A step runs all requests that are under way. So the
batch changes whenever one ends, and padding rows write to slot 0, which nobody reads.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphMode, CUDAGraphOptions
from graphdispatch.record import PlainCapturer
from graphdispatch.runtime.cache import make_cache
from graphdispatch.runtime.decide import SizeTable
from graphdispatch.runtime.group import Route
from graphdispatch.runtime.rules import ArgumentRules
from graphdispatch.runtime.server import Server
from graphdispatch.sizes import ROWS

VOCABULARY, WIDTH, SLOTS, SIZES = 100, 64, 17, (1, 2, 4, 8, 16)


class Model(nn.Module):
    """A recurrent language model, whose states lie in a cache by slot."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("cache", torch.zeros(SLOTS, WIDTH))

    def forward(self, ids: Tensor, slots: Tensor) -> Tensor:
        """The last ids [N] of requests and their slots [N] -> the next ids [N]. Writes the slots."""
        state = torch.tanh(self.mix(torch.cat([self.embed(ids), self.cache[slots]], -1)))
        self.cache[slots] = state
        return self.head(state).argmax(-1)


def generate(step: Callable[[Tensor, Tensor], Tensor], lengths: list[int]) -> list[list[int]]:
    """The tokens of requests of these lengths. A request takes a slot as soon as one is free."""
    tokens: list[list[int]] = [[number % VOCABULARY] for number in range(len(lengths))]
    waiting, free, slot_of = list(range(len(lengths))), list(range(1, SLOTS)), dict[int, int]()
    while waiting or slot_of:
        while waiting and free:
            slot_of[waiting.pop(0)] = free.pop()
        running = list(slot_of)
        following = step(torch.tensor([tokens[one][-1] for one in running]), torch.tensor([*slot_of.values()]))
        for one, token in zip(running, following.tolist(), strict=True):
            tokens[one].append(token)
            if len(tokens[one]) > lengths[one]:
                free.append(slot_of.pop(one))
    return tokens


@torch.inference_mode()
def main() -> None:
    """Record a graph for each size, generate by them and eagerly, and compare. Exits with an error if tokens differ."""
    torch.manual_seed(0)
    model = Model().eval().requires_grad_(False)
    options = CUDAGraphOptions(verify=False, guard_weights=False, capture_share=None)
    server = Server(model, options, make_cache(options, len(SIZES), capture_after=1), PlainCapturer())
    rules = ArgumentRules({"ids": {0: ROWS}, "slots": {0: ROWS}}, {}, frozenset())  # padding is zeros: slot 0
    route = Route("decode", SizeTable(SIZES, CUDAGraphMode.FULL), rules)
    for size in reversed(SIZES):  # the largest first; a dummy batch writes slot 0 alone
        server.serve(route, (torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)), {})

    lengths = torch.randint(5, 60, (40,)).tolist()
    graphs = generate(lambda ids, slots: server.serve(route, (ids, slots), {}), lengths)
    model.cache.zero_()
    eager = generate(model, lengths)
    print(server.stats)
    proof = "loaded" if "graphdispatch.proof" in sys.modules else "not loaded"
    print(f"{sum(lengths)} tokens, {'equal' if graphs == eager else 'different'}; the proof was {proof}")
    if graphs != eager:
        raise SystemExit("the tokens differ from eager's")


if __name__ == "__main__":
    main()
