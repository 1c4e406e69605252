"""What graphs cost in memory, measured and counted once: pools, static inputs, and the graphs' own.

Note [what shared memory costs]
    Graphs of one pool use the same memory, so that a graph alone has no share of it: what a set of graphs costs is
    what would be held if there were no others. Releasing one of them frees its own bytes; the pool shrinks when the
    graphs that need its largest part are gone, and on CUDA when the last one is.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..backends.base import Graph, Pool
from ..showing import html_table, storage
from .entry import CUDAGraphEntry
from .inputs import StaticInputs


class EntryMemory(NamedTuple):
    """One graph, in bytes: ``own`` is what it holds for itself and ``driver`` what the driver took for it, both beyond
    the pool; ``outputs`` is the size of what it writes out, wherever that lies."""

    size: int
    mode: str
    own: int
    driver: int
    outputs: int


@dataclass(frozen=True)
class MemoryReport:
    """The memory of some graphs, in bytes, as measured when it was made; ``total`` counts everything once.

    ``pool_bytes`` is what the allocator says of the pools, intermediates and shared outputs; ``driver_bytes`` is the
    fall of the device's free memory during the captures that no allocator accounts for (0 without a driver).
    """

    entries: tuple[EntryMemory, ...]
    pool_bytes: int
    input_bytes: int
    """Static inputs; those of the caller (``inputs="static"``) are not counted."""
    entry_bytes: int
    driver_bytes: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.pool_bytes + self.input_bytes + self.entry_bytes + self.driver_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        plain = asdict(self) | {"total": self.total}
        return plain | {"entries": [entry._asdict() for entry in self.entries]}

    def _parts(self) -> list[tuple[str, str]]:
        parts = {
            "pool": self.pool_bytes,
            "static inputs": self.input_bytes,
            f"{len(self.entries)} graphs": self.entry_bytes,
            "driver": self.driver_bytes,
            "total": self.total,
        }
        return [(name, storage(amount)) for name, amount in parts.items()]

    def _graphs(self) -> list[tuple[str, str]]:
        return [
            (
                f"{e.mode} {e.size} rows",
                f"{storage(e.own)} own, {storage(e.driver)} driver, writes {storage(e.outputs)}",
            )
            for e in self.entries
        ]

    def __str__(self) -> str:
        lines = [f"{name:<14}{held:>12}" for name, held in self._parts()]
        return "\n".join(lines + [f"  {name}: {held}" for name, held in self._graphs()])

    def _repr_html_(self) -> str:
        return html_table("Memory of graphs", ("part", "held"), self._parts() + self._graphs())


def memory_report(
    entries: Iterable[CUDAGraphEntry], pools: Iterable[Pool] = (), inputs: Iterable[StaticInputs] = ()
) -> MemoryReport:
    """What ``entries`` hold, with all of ``pools`` and ``inputs`` besides; a pool that is not among them counts for as
    much as the entries keep of it. Reads the allocator's figures; not for a hit."""
    entries = sorted(entries, key=lambda entry: (entry.size, entry.mode))
    whole = set(pools)
    graphs: dict[Pool, list[Graph]] = {pool: [] for pool in whole}
    for entry in entries:
        graphs.setdefault(entry.pool, []).append(entry.graph)
    rows = tuple(_row(entry) for entry in entries)
    return MemoryReport(
        rows,
        pool_bytes=sum(p.nbytes if p in whole else p.nbytes_of(kept) for p, kept in graphs.items()),
        input_bytes=sum(one.nbytes for one in {*inputs, *(entry.inputs for entry in entries)}),
        entry_bytes=sum(row.own for row in rows),
        driver_bytes=sum(row.driver for row in rows),
    )


def bytes_of(entries: Iterable[CUDAGraphEntry]) -> int:
    """The bytes that would be held if there were only these entries: see Note [what shared memory costs]."""
    return memory_report(entries).total


def _row(entry: CUDAGraphEntry) -> EntryMemory:
    driver = entry.graph.driver_nbytes
    return EntryMemory(entry.size, entry.mode.name, entry.nbytes - driver, driver, entry.outputs.nbytes)
