"""Many threads, random sizes, invalidations, evictions and failures, each answer compared with eager's.

    GRAPHDISPATCH_SOAK_CALLS=200000 pytest tests/soak -s

makes as many calls in all, instead of the few that fit into every run of the tests.
"""

import gc
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphOptions, Graphed, eager_break, graphed
from graphdispatch.backends import Backend, get_backend

THREADS = 16
CALLS = int(os.environ.get("GRAPHDISPATCH_SOAK_CALLS", "2400"))
LARGEST, WIDTH = 12, 8
DEVICE = torch.get_default_device()
"""Threads do not take the default over."""
_ROOM = (1 if DEVICE.type == "cpu" else 6) << 20
"""For graphs beside the first: a device's allocator gives a pool whole MiB."""
_SPARE_BYTES = 64 << 20
"""What the resident memory may grow by after the first third: the allocator's own, and statistics with a bound."""


class TrippedError(Exception):
    """The model's own failure."""


LEFT: ContextVar[int | None] = ContextVar("LEFT", default=None)
"""How many more runs of the model on this thread go well before one raises; None for all of them."""


def numbers(*shape: int) -> torch.Tensor:
    """Random ones, drawn on the host: CUDA refuses to draw from a generator while another thread captures with it."""
    return torch.randn(*shape, device="cpu").to(DEVICE)


class Net(nn.Module):
    """Two layers, a stretch that may be a break, and a trip wire that a thread sets for itself."""

    def __init__(self, *, trips: bool, broken: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self._trips = trips
        self._middle = eager_break(torch.relu) if broken else torch.relu

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = self._middle(self.first(x))
        if self._trips:
            _trip()
        return self.second(hidden) * scale, {"first": hidden[:, :1]}


def _trip() -> None:
    left = LEFT.get()
    if left is not None:
        LEFT.set(left - 1 if left else None)
        if not left:
            raise TrippedError


class Gate:
    """Calls enter together; who moves the weights enters alone, as the owner of a model would see to it."""

    def __init__(self) -> None:
        self._places = threading.Semaphore(THREADS)
        self._turn = threading.Lock()

    def __enter__(self) -> None:
        self._places.acquire()

    def __exit__(self, *_: object) -> None:
        self._places.release()

    def alone(self, work: Any) -> None:
        """Run ``work`` while nobody is inside."""
        with self._turn:
            for _ in range(THREADS):
                self._places.acquire()
            work()
            self._places.release(THREADS)


def resident_bytes() -> int:
    """The resident memory of the process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Soak:
    """The shared objects, and what one thread does with them.

    ``roomy``: the caches hold all graphs, little happens to them, and the models read nothing of a single thread,
    so that most calls are hits of the native core. Otherwise graphs are evicted all the time.
    """

    def __init__(self, *, roomy: bool) -> None:
        self.roomy = roomy
        self.gate = Gate()
        self.nets = [Net(trips=not roomy, broken=broken).eval() for broken in (False, True)]
        budget = None if roomy else self._of_one() + _ROOM
        self.steps: list[Graphed[..., Any]] = [
            graphed(
                net,
                dynamic={"x": 0},
                sizes=(1, 2, 4, 8),
                options=CUDAGraphOptions(
                    max_cached_graphs=None if roomy else 5,
                    memory_budget_bytes=budget,
                    max_signatures=8,
                    capture_share=None,
                ),
                mode="PIECEWISE" if index else "FULL",
            )
            for index, net in enumerate(self.nets)
        ]
        self.lock = threading.Lock()
        self.calls = self.tripped = self.moves = self.clears = 0

    @torch.no_grad()
    def _of_one(self) -> int:
        """The bytes that one graph holds, whose pool has the workspace of a library, too: cuBLAS's takes many MiB."""
        step = graphed(Net(trips=False, broken=False).eval(), dynamic={"x": 0}, sizes=(8,))
        step.prewarm(numbers(8, WIDTH))
        held = step.memory_bytes
        step.clear()
        return held

    def count(self, **events: int) -> None:
        """Add to the counters."""
        with self.lock:
            for name, number in events.items():
                setattr(self, name, getattr(self, name) + number)

    @torch.no_grad()
    def work(self, seed: int, calls: int) -> None:
        """One thread's calls; raises at the first answer that is not eager's."""
        chance = random.Random(seed)
        backend = get_backend(DEVICE.type)
        stream = backend.make_stream() if seed % 4 == 0 else None
        made = 0
        while made < calls:
            which, event = chance.randrange(2), chance.random() * (4.0 if self.roomy else 1.0)
            net, step = self.nets[which], self.steps[which]
            if event < 0.002:
                self.gate.alone(lambda net=net: self._move(net, chance, backend))
                self.count(moves=1)
            elif event < 0.006:
                step.clear()
                self.count(clears=1)
            with self.gate, backend.use_stream(stream) if stream is not None else nullcontext():
                self._call(net, step, chance)
            made += 1
        self.count(calls=made)

    def _move(self, net: Net, chance: random.Random, backend: Backend) -> None:
        """New values where the old ones are, or a new tensor altogether: both must show in the next answer."""
        backend.synchronize()  # streams of other threads may still read the old values
        if chance.random() < 0.5:
            net.first.weight.copy_(numbers(16, WIDTH))
        else:
            net.second.weight = nn.Parameter(numbers(WIDTH, 16))
        backend.synchronize()

    def _call(self, net: Net, step: Graphed[..., Any], chance: random.Random) -> None:
        rows = min(int(chance.expovariate(0.3)) + 1, LARGEST)
        x = numbers(rows, WIDTH)
        x = x.t().contiguous().t() if chance.random() < 0.1 else x
        scale = chance.choice((1.0, 1.0, 1.0, 0.5))
        want = net(x, scale)
        LEFT.set(chance.randrange(3) if not self.roomy and chance.random() < 0.02 else None)
        try:
            with torch.inference_mode(chance.random() < 0.1):
                got = step(x, scale)
        except TrippedError:
            self.count(tripped=1)
        else:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        finally:
            LEFT.set(None)

    def run(self, calls: int) -> None:
        """``calls`` calls over all threads; raises what any of them raises."""
        with ThreadPoolExecutor(THREADS) as pool:
            seeds = range(self.calls, self.calls + THREADS)
            for future in [pool.submit(self.work, seed, calls // THREADS) for seed in seeds]:
                future.result()
        for step in self.steps:
            step.check_integrity()

    def held(self) -> tuple[int, int]:
        """Bytes that the library says it holds, and the resident memory of the process."""
        gc.collect()
        return sum(step.memory_bytes for step in self.steps), resident_bytes()


@pytest.mark.parametrize("roomy", [False, True], ids=["evictions", "hits"])
def test_soak(roomy: bool) -> None:
    """No answer differs from eager's, the caches stay sound, and memory stays flat."""
    torch.manual_seed(0)
    soak = Soak(roomy=roomy)
    threads = threading.active_count()
    soak.run(CALLS // 3)
    _, resident = soak.held()
    soak.run(CALLS // 3)
    soak.run(CALLS // 3)
    tracked, later = soak.held()
    stats = [step.stats for step in soak.steps]
    print(f"\n{soak.calls} calls, {soak.tripped} tripped, {soak.moves} moves, {soak.clears} clears")
    for each in stats:
        print(each, f"{each.evictions} evictions, {dict(each.reasons)}")
    print(f"tracked {tracked} bytes, resident {resident >> 20} -> {later >> 20} MiB")
    assert later - resident < _SPARE_BYTES
    assert min(soak.moves, soak.clears) > 0
    assert (soak.tripped > 0) != roomy
    for each in stats:
        assert min(each.hits, each.captures, each.verifications) > 0
        assert each.hits > each.calls / 2 if roomy else each.evictions > 0
    # Every call was counted once, those that raised in their break excepted.
    assert soak.calls - soak.tripped <= sum(each.calls for each in stats) <= soak.calls
    for step in soak.steps:
        step.clear()
    assert soak.held()[0] == 0
    assert threading.active_count() == threads
