"""How eviction policies fare on a trace with less room than it has sizes: the library's own cache, no device.

A trace has a column ``num_tokens``; a cycle over more sizes than there is room for always comes last. Graphs are
wanted for the vLLM's capture sizes up to 512, or for exactly the tokens of each step, which are many more. A size is
captured at its second miss within the window, and later if its graphs keep going before they were used enough. Captures
take up to three times as long as each other, as on a busy machine, though all graphs are equal. *Guarded* is how the
library works: a graph goes only if it was not used since the newcomer's first miss. The optimum knows the future and
may decline to capture (Belady); no policy can hit more often. The last lines of a trace add its four cases up and
compare each guarded policy with the one of fewest misses and with the one of fewest captures.
"""

import csv
import gzip
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from graphdispatch.demo.trace import generate_trace
from graphdispatch.engines import named_sizes
from graphdispatch.memory.admission import Admission
from graphdispatch.memory.cache import GraphCache
from graphdispatch.memory.foreign import entry_around
from graphdispatch.testing import MockCUDAGraph

from .timing import Effort, Row

__all__ = ["TITLE", "rows"]

TITLE = "less room than sizes: misses and captures in percent of the steps, compared with the optimum (simulated)"
CAPTURE_MS = 60.0
SLOWER = 3  # what a busy machine makes of it at most
LARGEST = 512
ROOM = {"vllm": (8, 16), "exact": (16, 64)}
WAYS = {
    "lru unguarded": ("lru", False),
    "lru": ("lru", True),
    "lfu": ("lfu", True),
    "frecency": ("frecency", True),
    "gdsf": ("gdsf", True),
}


class Outcome(NamedTuple):
    """How many steps found their graph, and how many captures that took."""

    hits: int
    captures: int


def simulate(keys: Sequence[int], room: int, eviction: str, *, guarded: bool) -> Outcome:
    """Run the steps on a cache of ``room`` graphs."""
    admission = Admission()
    cache = GraphCache(room, eviction=eviction, admission=admission)
    busy = Random(0)
    hits = captures = 0
    for key in keys:
        entry = cache.get(key)
        if entry is not None:
            entry.increment_replay()
            hits += 1
            continue
        since = admission.since(key)
        if since is None or (guarded and not cache.has_room(since)):
            admission.count_miss(key)
            continue
        for victim in cache.make_room(since if guarded else None):
            victim.release()
        entry = entry_around(MockCUDAGraph(), key)
        entry.capture_time_ms = CAPTURE_MS * busy.uniform(1, SLOWER)
        cache.add(key, entry)
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
    return {way: simulate(keys, room, eviction, guarded=guarded) for way, (eviction, guarded) in WAYS.items()}


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


def beside_best(name: str, steps: int, cases: Sequence[dict[str, Outcome]]) -> list[Row]:
    """All cases of a trace added up: each guarded way beside the best of them, in misses and in captures."""
    made = []
    for what in ("misses", "captures"):
        total = {
            way: sum(steps - found[way].hits if what == "misses" else found[way].captures for found in cases)
            for way, (_, guarded) in WAYS.items()
            if guarded
        }
        made += [
            Row(
                f"{name}, beside the best policy: {way}, {what}",
                100 * count / steps / len(cases),
                100 * min(total.values()) / steps / len(cases),
                unit="%",
            )
            for way, count in total.items()
        ]
    return made


def rows(effort: Effort) -> list[Row]:
    """A line for each trace, kind of sizes, room and way, and those that add a trace up."""
    traces = {path.name.split(".")[0]: read(path) for path in effort.traces}
    named = traces or {"generated": [shape.num_tokens for shape in generate_trace(20_000, 64, 0)]}
    made: list[Row] = []
    for name, tokens in named.items():
        cases = []
        for kind, rooms in ROOM.items():
            keys = keys_of(tokens, kind)
            for room in rooms:
                cases.append(outcomes(keys, room))
                made += beside_optimum(f"{name} {kind}, room {room}", len(keys), cases[-1], optimum(keys, room))
        made += beside_best(name, len(keys), cases)
    cycle = [*range(20)] * 500
    return made + beside_optimum("cycle of 20, room 16", len(cycle), outcomes(cycle, 16), optimum(cycle, 16))
