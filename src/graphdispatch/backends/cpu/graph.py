"""A recorded program bound to memory, and the pool whose arenas its programs share."""

import weakref
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from ...errors import ReplayError
from ...native import known_to_core
from ..base import Graph, Pool
from ..operators import OperatorKind, map_leaves
from .kernels import out_names
from .parts import Call, parts_of
from .planner import lay_out, prune
from .program import Program, Step, run_and_copy, run_collective
from .recorder import Instruction, Literal, Recording, Slot, TensorRef

__all__ = ["CPUGraph", "CPUPool"]


class CPUPool(Pool):
    """Arenas of host memory.

    A graph uses the smallest arena that holds its intermediates and shared outputs. Sizes that are captured largest
    first therefore need only one arena. An arena is freed with its last graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self._arenas: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas. Memory that belongs to one graph is in ``CPUGraph.nbytes``."""
        return sum(arena.nbytes for arena in self._arenas.values())

    def nbytes_of(self, graphs: Sequence[Graph]) -> int:
        """Bytes of the arenas that these graphs keep alive."""
        parts = [part for graph in graphs for part in graph.graphs]
        arenas = {id(p.arena): p.arena for p in parts if isinstance(p, CPUGraph) and p.arena is not None}
        return sum(arena.nbytes for arena in arenas.values())

    def take_arena(self, nbytes: int) -> torch.Tensor:
        """An arena of at least ``nbytes`` bytes. The caller holds it as long as it uses it."""
        fitting = [arena for arena in self._arenas.values() if arena.nbytes >= nbytes]
        if fitting:
            return min(fitting, key=lambda arena: arena.nbytes)
        arena = torch.empty(nbytes, dtype=torch.uint8)
        self._arenas[id(arena)] = arena
        return arena

    @known_to_core
    def order_after_last_use(self) -> None:
        """Do nothing: replays run at once, on the thread that holds the pool's lock."""

    def close(self) -> None:
        """Do nothing: an arena is freed with its last graph."""


class CPUGraph(Graph):
    """A program bound to memory. A replay runs it on the calling thread."""

    __slots__ = ("_pool", "program")

    def __init__(self, recording: Recording, pool: CPUPool) -> None:
        self._pool = pool
        binder = _Binder(recording, pool)
        self.program: Program | None = Program(binder.steps)
        """What a replay runs, or None after ``reset``."""
        self._memory = binder.memory
        self.arena = binder.arena
        """The memory of the pool that the graph uses, or None."""
        self._nbytes = binder.nbytes
        self.outputs = binder.outputs
        """The shared outputs. They lie in the arena and hold the pool's latest replay."""
        self.num_recorded = len(recording.program)

    @known_to_core
    def replay(self) -> None:
        """Run the calls."""
        if self.program is None:
            raise ReplayError("this graph was released; capture it again")
        self._pool.generation += 1
        self.program.run()

    def reset(self) -> None:
        """Release the calls and their memory."""
        self.program = None
        self._memory = []
        self.arena = None
        self._nbytes = 0
        self.outputs = None

    @property
    def nbytes(self) -> int:
        """Bytes of its own: constants, and results that somebody holds. The arena belongs to the pool."""
        return self._nbytes

    @property
    def num_replayed(self) -> int:
        """The number of operators that a replay runs."""
        return len(self.program or ())

    def __repr__(self) -> str:
        state = "released" if self.program is None else f"{self.num_replayed} of {self.num_recorded} operators"
        return f"<CPUGraph {state}, {self._nbytes} bytes>"


class _Binder:
    """Turns a recording into bound calls: finds what is still alive, lays out the rest, builds the tensors."""

    def __init__(self, recording: Recording, pool: CPUPool) -> None:
        self._storages: dict[Slot, torch.UntypedStorage] = {}
        self._offsets: dict[Slot, int] = {}
        self._tensors: dict[TensorRef, torch.Tensor] = {}
        shared = {ref.slot for ref in tree_leaves(recording.outputs) if isinstance(ref, TensorRef)}
        slots = shared.union(*(i.reads | i.writes for i in recording.program))
        for slot in slots:
            storage = slot.live_storage()
            if storage is not None:
                self._storages[slot] = storage
        literals = {literal.ref.slot for literal in recording.literals}
        pinned = (shared | set(self._storages)) - literals
        once, each = prune(recording.program, recording.literals, pinned)
        constant = {slot for i in once for slot in i.reads | i.writes}
        for slot in (constant | literals) - set(self._storages):
            self._storages[slot] = torch.empty(slot.nbytes, dtype=torch.uint8).untyped_storage()
        layout = lay_out(each, set(self._storages), shared)
        self.arena = pool.take_arena(layout.nbytes) if layout.nbytes else None
        if self.arena is not None:
            self._storages |= dict.fromkeys(layout.offsets, self.arena.untyped_storage())
            self._offsets = layout.offsets
        own = [s for slot, s in self._storages.items() if slot not in self._offsets]
        self.nbytes = sum(storage.nbytes() for storage in own)
        with torch.inference_mode(False), torch.no_grad():
            fills = {literal.ref.slot: self._fill(literal) for literal in recording.literals}
            for step in (*fills.values(), *chain.from_iterable(map(self._bind, once))):
                step.run()
            written = {slot for instruction in each for slot in instruction.writes}
            self.steps = [
                *(fill for slot, fill in fills.items() if slot in written),
                *chain.from_iterable(map(self._bind, each)),
            ]
            self.outputs = tree_map_only(TensorRef, self._tensor, recording.outputs)
        self.memory = own

    def _tensor(self, ref: TensorRef) -> torch.Tensor:
        if ref not in self._tensors:
            offset = self._offsets.get(ref.slot, 0) // ref.dtype.itemsize + ref.offset
            tensor = torch.empty(0, dtype=ref.dtype).set_(self._storages[ref.slot], offset, ref.size, ref.stride)
            if ref.conj:
                tensor = tensor.conj()
            if ref.neg:
                tensor = torch._neg_view(tensor)
            self._tensors[ref] = tensor
        return self._tensors[ref]

    def _bound(self, value: Any) -> Any:
        return self._tensor(value) if type(value) is TensorRef else value

    def _fill(self, literal: Literal) -> Step:
        place = self._tensor(literal.ref)
        return Step(partial(place.copy_, literal.initial), torch.ops.aten.copy_.default, ((place, literal.initial), {}))

    def _bind(self, instruction: Instruction) -> list[Step]:
        args, kwargs = map_leaves(self._bound, instruction.args), map_leaves(self._bound, instruction.kwargs)
        outs = tuple(map(self._tensor, instruction.outs))
        func, kernel = instruction.func, instruction.kernel
        if kernel is not None:
            kwargs = kwargs | dict(zip(out_names(kernel), outs, strict=True))
            parts = parts_of(kernel, args, kwargs) or [Call(kernel, args, kwargs)]
            return [
                Step(partial(part.func._op, *part.args, **part.kwargs), part.func, (part.args, part.kwargs))
                for part in parts
            ]
        if func.namespace == "c10d":
            return [Step(partial(run_collective, func, args, kwargs), func)]
        operands = (args, kwargs) if isinstance(func, OpOverload) and func.namespace != "_c10d_functional" else None
        if outs or instruction.kind is OperatorKind.OPAQUE:
            return [Step(partial(run_and_copy, func, args, kwargs, outs), func, operands, outs)]
        return [Step(partial(getattr(func, "_op", func), *args, **kwargs), func, operands)]
