"""Millions of calls of twelve programs in turns, as a server makes them in days: ``make soak``.

Each turn is some hundred calls of one program, most of them hits. Between turns weights move, Python state changes,
models and pads raise, graphs are cleared or evicted, threads call at once, and the process forks. Answers and written
state are compared with eager's in a sample. Memory, file handles and threads must be as many at the end as after the
first third.
"""

import argparse
import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphOptions, Dim, Graphed, eager_break, graphed

from ..behaviour.forks import in_child
from ..helpers import assert_same, in_threads
from .test_soak import LEFT, WIDTH, Net, TrippedError, numbers, resident_bytes

LARGEST = 8
NEAR = {"rtol": 1e-4, "atol": 1e-5}
SPARE_BYTES = 64 << 20
"""What the resident memory may grow by: the allocator's own, and statistics with a bound."""
MOVES, CLEARS, TRIPS, FORKS, CROWDS, COMPARED = 0.05, 0.01, 0.05, 0.002, 0.01, 0.02
"""How often, for each turn, and for each call the sample."""


class Program:
    """A callable, how it is served, its batches, and what it writes."""

    def __init__(self, fn: Callable[..., Any], *state: Tensor, net: nn.Module | None = None, **how: Any) -> None:
        options = {"capture_after": 1, "capture_share": None} | how.pop("options", {})
        how = {"dynamic": {"x": 0}, "sizes": (1, 2, 4, 8)} | how
        self.fn, self.state, self.net, self.outputs = fn, state, net, how.get("outputs", "clone")
        self.has_lengths = len(how["dynamic"]["x"]) > 1 if isinstance(how["dynamic"]["x"], dict) else False
        self.step: Graphed[..., Any] = graphed(fn, options=CUDAGraphOptions(**options), **how)
        self.batches = [self._batch(1 + number % LARGEST) for number in range(16)]

    def _batch(self, rows: int) -> tuple[Any, ...]:
        if self.has_lengths:
            return numbers(rows, 1 + rows % 4, WIDTH), torch.ones(rows, 1 + rows % 4)
        return (numbers(rows, WIDTH),)

    def call(self, batch: tuple[Any, ...]) -> Any:
        """A call of the server; the tensors of its answer."""
        got = self.step(*batch)
        return got.get() if self.outputs == "view" else got

    def compare(self, batch: tuple[Any, ...]) -> None:
        """One call beside eager from the same state."""
        before, generator = [one.clone() for one in self.state], torch.get_rng_state()
        got = self.call(batch)
        got = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, got)
        after = [one.clone() for one in self.state]
        for one, was in zip(self.state, before, strict=True):
            one.copy_(was)
        torch.set_rng_state(generator)
        assert_same((got, after), (self.fn(*batch), list(self.state)), self.step.explain(*batch), **NEAR)


def programs() -> dict[str, Program]:
    """The twelve."""
    nets = {name: Net(trips=True, broken=name == "breaks").eval() for name in ("net", "breaks", "evicted")}
    plain = Net(trips=False, broken=False).eval()
    cache, ticks, total = torch.zeros(LARGEST, WIDTH), torch.zeros(1), torch.zeros(WIDTH)
    weight, table = numbers(WIDTH, WIDTH), nn.Embedding(32, WIDTH).eval()
    scale = nn.Module()
    scale.factor = 2.0  # type: ignore[assignment]
    halve = eager_break(lambda h: h / 2)

    def writes(x: Tensor) -> Tensor:
        cache[: x.shape[0]] = x * 2
        ticks.add_(1)
        return cache[: x.shape[0]] + ticks

    def sums(x: Tensor) -> Tensor:
        total.mul_(0.5).add_(x[0])
        return x + total

    def masked(x: Tensor, mask: Tensor) -> Tensor:
        scores = (x @ x.transpose(1, 2)).masked_fill(mask[:, None, :] == 0, float("-inf"))
        return (scores.softmax(-1) @ x * mask[..., None]).sum(1)

    lengths = {"x": {0: "rows", 1: Dim("length", sizes=[2, 4])}, "mask": {0: "rows", 1: "length"}}
    return {
        "net": Program(nets["net"], net=nets["net"]),
        "breaks": Program(nets["breaks"], net=nets["breaks"], mode="PIECEWISE"),
        "evicted": Program(nets["evicted"], net=nets["evicted"], options={"max_cached_graphs": 2}),
        "writes": Program(writes, cache, ticks, sizes=(1, 2, 3, 4, 5, 6, 7, 8)),
        "sums": Program(sums, total, options={"padding_writes": "allow"}),
        "draws": Program(lambda x: torch.dropout(x @ weight, 0.5, True), sizes=(1, 2, 3, 4, 5, 6, 7, 8)),
        "view": Program(lambda x: (x @ weight).relu(), outputs="view"),
        "static": Program(lambda x: (x @ weight).tanh(), outputs="static"),
        "lengths": Program(masked, dynamic=lengths, sizes=(2, 4, 8)),
        "python": Program(lambda x: x * scale.factor + halve(x), net=scale),
        "integers": Program(lambda x: table(x.long().clamp(0, 31)).sum(1), net=table),
        "plain": Program(plain, net=plain, options={"verify": False, "guard_weights": False}),
    }


class LongRun:
    """The programs, and what happens to them."""

    def __init__(self, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.programs = programs()
        self.events: Counter[str] = Counter()

    def turn(self, calls: int = 400) -> None:
        """Some calls of one program, after something has happened to it."""
        name, program = self.chance.choice(list(self.programs.items()))
        calls = calls // 20 if name == "evicted" else calls  # most of these capture
        chance = self.chance.random
        if chance() < MOVES and program.net is not None:
            self._move(name, program)
        if chance() < CLEARS:
            program.step.clear()
            self.events["clears"] += 1
        if chance() < TRIPS:
            self._trip(program)
        if chance() < FORKS:
            in_child(self._look)
            self.events["forks"] += 1
        if chance() < CROWDS:
            self._crowd()
        for batch in self.chance.choices(program.batches, k=calls):
            if chance() < COMPARED:
                program.compare(batch)
                self.events["compared"] += 1
            else:
                program.call(batch)
        self.events["calls"] += calls

    def _look(self) -> None:
        for program in self.programs.values():
            program.compare(program.batches[3])

    def _move(self, name: str, program: Program) -> None:
        """New values where the old ones are, a new tensor, or a new Python number: all show in the next answer."""
        assert program.net is not None
        if name == "python":
            program.net.factor = self.chance.choice((2.0, 3.0))  # type: ignore[assignment]
        else:
            place = self.chance.choice(
                [(m, n) for m in program.net.modules() for n, _ in m.named_parameters(recurse=False)]
            )
            value = getattr(*place)
            if name == "plain" or self.chance.random() < 0.5:
                value.copy_(numbers(*value.shape))
            else:
                setattr(*place, nn.Parameter(numbers(*value.shape)))
        program.compare(program.batches[0])
        self.events["moves"] += 1

    def _trip(self, program: Program) -> None:
        """The model raises in one of its next runs, wherever that is in a capture, a comparison or eager."""
        if self.chance.random() < 0.5:
            program.step.invalidate("a trip")
        LEFT.set(self.chance.randrange(3))
        try:
            for batch in program.batches:
                program.call(batch)
        except TrippedError:
            self.events["tripped"] += 1
        finally:
            LEFT.set(None)

    def _crowd(self) -> None:
        """Eight threads call at once what writes nothing."""
        crowd = [self.programs[name] for name in ("net", "breaks", "evicted", "draws", "python", "integers", "plain")]

        def work(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(100):
                program = chance.choice(crowd)
                program.call(chance.choice(program.batches))

        in_threads(*(lambda seed=seed: work(seed) for seed in range(8)))
        self.events.update({"crowds": 1, "calls": 800})

    def held(self) -> tuple[int, int, int]:
        """The resident memory, the file handles and the threads of the process."""
        gc.collect()
        return resident_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count()

    @torch.no_grad()
    def run(self, calls: int, seconds: float = float("inf")) -> list[str]:
        """So many calls, or as many as fit into the time; what is to be said of them."""
        began, early = time.monotonic(), self.held()
        is_early = True
        while (share := max(self.events["calls"] / calls, (time.monotonic() - began) / seconds)) < 1:
            self.turn()
            if is_early and share > 1 / 3:
                early, is_early = self.held(), False
        late = self.held()
        for program in self.programs.values():
            program.step.check_integrity()
            program.compare(program.batches[0])
        assert late[0] - early[0] < SPARE_BYTES, (early, late)
        assert late[1:] == early[1:], (early, late)
        lines = [f"{name}: {one.step.stats!r}" for name, one in self.programs.items()]
        resident = f"resident {early[0] >> 20} -> {late[0] >> 20} MiB, {late[1]} file handles, {late[2]} threads"
        return [*lines, f"{dict(self.events)} in {time.monotonic() - began:.0f} s", resident]


def main() -> None:
    """Run it, and print what was done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000_000, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end earlier, after so long")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(chosen.seed)
    print(*LongRun(chosen.seed).run(chosen.calls, chosen.minutes * 60), sep="\n")


if __name__ == "__main__":
    main()
