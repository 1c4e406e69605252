"""What graphs cost in memory.

Note [what shared memory costs]
    Graphs of one pool use the same memory, so that a graph alone has no share of it: what a set of graphs costs is
    what would be held if there were no others. Releasing one of them frees its own bytes; the pool shrinks when the
    graphs that need its largest part are gone, and on CUDA when the last one is.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ..backends.base import Graph, Pool
from ..descriptors import size_text
from ..showing import html_table, storage
from .entry import CUDAGraphEntry
from .static_inputs import StaticInputs


@dataclass(frozen=True)
class MemoryReport:
    """The memory of some graphs, in bytes, as measured when it was made; ``total`` counts everything once.

    ``pool_bytes`` is what the allocator says of the pools, intermediates and shared outputs; ``driver_bytes`` is the
    fall of the device's free memory during the captures that no allocator accounts for (0 without a driver).
    """

    graphs: tuple[tuple[str, str], ...]
    """Size, as text, and mode of each graph; ``serve.graphs`` has the bytes that each holds for itself."""
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
        return asdict(self) | {"total": self.total}

    def _parts(self) -> list[tuple[str, str]]:
        parts = {
            "pool": self.pool_bytes,
            "static inputs": self.input_bytes,
            f"{len(self.graphs)} graphs": self.entry_bytes,
            "driver": self.driver_bytes,
            "total": self.total,
        }
        return [(name, storage(amount)) for name, amount in parts.items()]

    def __str__(self) -> str:
        return "\n".join(f"{name:<14}{held:>12}" for name, held in self._parts())

    def _repr_html_(self) -> str:
        return html_table("Memory of graphs", ("part", "held"), self._parts())


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
    driver_bytes = sum(entry.graph.driver_nbytes for entry in entries)
    return MemoryReport(
        tuple((size_text(entry.key), entry.mode.name) for entry in entries),
        pool_bytes=sum(p.nbytes if p in whole else p.nbytes_of(kept) for p, kept in graphs.items()),
        input_bytes=sum(one.nbytes for one in {*inputs, *(entry.inputs for entry in entries)}),
        entry_bytes=sum(entry.nbytes for entry in entries) - driver_bytes,
        driver_bytes=driver_bytes,
    )


def bytes_of(entries: Iterable[CUDAGraphEntry]) -> int:
    """The bytes that would be held if there were only these entries: see Note [what shared memory costs]."""
    return memory_report(entries).total
