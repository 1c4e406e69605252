"""How the cache fares on a trace with less room than it has sizes: the library's own cache, no device.

A trace has a column ``num_tokens``; a cycle over more sizes than there is room for always comes last. Graphs are
wanted for the vLLM's capture sizes up to 512, or for exactly the tokens of each step, which are many more. A size is
captured at its second miss within the window, and the least recently used graph goes for it. *Guarded* is how the
library works: a graph goes only if it was not used since the newcomer's first miss. The optimum knows the future and
may decline to capture (Belady); nothing can hit more often.
"""

import csv
import gzip
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from graphdispatch.demo import generate_trace
from graphdispatch.engines import CUDAGraphEntry, DispatchKey, named_sizes
from graphdispatch.engines.registered_graphs import entry_around
from graphdispatch.runtime.admission import Admission
from graphdispatch.runtime.cache import GraphCache
from graphdispatch.testing import MockCUDAGraph

from .timing import Effort, Row

__all__ = ["TITLE", "rows"]

TITLE = "less room than sizes: misses and captures in percent of the steps, compared with the optimum (simulated)"
LARGEST = 512
ROOM = {"vllm": (8, 16), "exact": (16, 64)}
WAYS = {"unguarded": False, "guarded": True}


class Outcome(NamedTuple):
    """How many steps found their graph, and how many captures that took."""

    hits: int
    captures: int


def simulate(keys: Sequence[int], room: int, *, guarded: bool) -> Outcome:
    """Run the steps on a cache of ``room`` graphs."""
    admission = Admission()
    cache, held = GraphCache(room, admission=admission), dict[object, CUDAGraphEntry]()
    hits = captures = 0
    for key in keys:
        entry = held.get(key)
        if entry is not None:
            entry.increment_replay()
            hits += 1
            continue
        admission.look()
        since = admission.since(key)
        if since is None or (guarded and not cache.has_room(since)):
            admission.count_miss(key)
            continue
        for victim in cache.make_room(since if guarded else None):
            del held[victim.entry.key]
            victim.release()
        entry = entry_around(MockCUDAGraph(), DispatchKey(key, 1))
        entry.key = key
        held[key] = entry
        cache.add(entry)
        admission.forget(key)
        captures += 1
    return Outcome(hits, captures)


def optimum(keys: Sequence[int], room: int) -> Outcome:
    """Keep what is needed soonest; do not capture what is needed later than all that is kept."""
    following, later = [0] * len(keys), dict[int, int]()
    for step in range(len(keys) - 1, -1, -1):
        following[step] = later.get(keys[step], len(keys))
        later[keys[step]] = step
    kept: dict[int, int] = {}
    hits = captures = 0
    for key, needed in zip(keys, following, strict=True):
        if key in kept:
            hits += 1
        elif needed == len(keys):
            continue
        elif len(kept) < room:
            captures += 1
        else:
            latest = max(kept, key=kept.__getitem__)
            if kept[latest] <= needed:
                continue
            del kept[latest]
            captures += 1
        kept[key] = needed
    return Outcome(hits, captures)


def read(path: Path) -> list[int]:
    """The tokens of each step of a trace file."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return [int(row["num_tokens"]) for row in csv.DictReader(file)]


def keys_of(tokens: Sequence[int], kind: str) -> list[int]:
    """The graph that each step wants, without the steps that are larger than all graphs."""
    small = [count for count in tokens if count <= LARGEST]
    sizes = named_sizes("vllm", LARGEST)
    return small if kind == "exact" else [sizes[bisect_left(sizes, count)] for count in small]


def outcomes(keys: Sequence[int], room: int) -> dict[str, Outcome]:
    """What becomes of the steps by each way."""
    return {way: simulate(keys, room, guarded=guarded) for way, guarded in WAYS.items()}


def beside_optimum(case: str, steps: int, found: dict[str, Outcome], best: Outcome) -> list[Row]:
    """What each way misses, and how often it captures, beside the optimum."""
    return [
        Row(f"{case}: {way}, {what}", 100 * count / steps, 100 * least / steps, unit="%")
        for way, outcome in found.items()
        for what, count, least in (
            ("misses", steps - outcome.hits, steps - best.hits),
            ("captures a step", outcome.captures, best.captures),
        )
    ]


def rows(effort: Effort) -> list[Row]:
    """A line for each trace, kind of sizes, room and way."""
    traces = {path.name.split(".")[0]: read(path) for path in effort.traces}
    named = traces or {"generated": [shape.num_tokens for shape in generate_trace(20_000, 64, 0)]}
    made: list[Row] = []
    for name, tokens in named.items():
        for kind, rooms in ROOM.items():
            keys = keys_of(tokens, kind)
            for room in rooms:
                case = f"{name} {kind}, room {room}"
                made += beside_optimum(case, len(keys), outcomes(keys, room), optimum(keys, room))
    cycle = [*range(20)] * 500
    return made + beside_optimum("cycle of 20, room 16", len(cycle), outcomes(cycle, 16), optimum(cycle, 16))
