"""The CPU backend's planner, over random programs as plain data."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from graphdispatch.backends.cpu.planner import lay_out, prune
from graphdispatch.backends.cpu.recorder import Instruction, Slot
from graphdispatch.backends.operators import OperatorKind

_KINDS = [OperatorKind.PURE, OperatorKind.PURE, OperatorKind.WRITE, OperatorKind.RANDOM, OperatorKind.OPAQUE]
Case = tuple[list[Slot], list[Instruction], set[Slot], set[Slot]]
_Row = tuple[OperatorKind, frozenset[int], int]  # kind, numbers of the slots it reads, slot it writes in place


def _slots(sizes: list[int]) -> list[Slot]:
    weak = StorageWeakRef(torch.empty(1).untyped_storage())
    return [Slot(size, weak) for size in sizes]


def _program(slots: list[Slot], rows: list[_Row]) -> list[Instruction]:
    """Instruction ``i`` makes slot ``i``, or writes an earlier one in place, and reads earlier ones."""
    program = []
    for index, (kind, numbers, target) in enumerate(rows):
        earlier = slots[:index]
        reads = frozenset(earlier[n % index] for n in numbers) if index else frozenset()
        writes = frozenset([slots[index]])
        if kind is OperatorKind.WRITE and index:
            writes = frozenset([earlier[target % index]])
            reads |= writes
        func = torch.ops.aten.add.Tensor
        program.append(Instruction(func, kind, (), {}, (), None, reads, writes, not reads, False))
    return program


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Slot], list[Instruction], set[Slot], set[Slot]]:
    """Slots, a program over them, those of them that somebody else holds, and those that are outputs."""
    rows = draw(
        st.lists(
            st.tuples(st.sampled_from(_KINDS), st.frozensets(st.integers(0, 40), max_size=3), st.integers(0, 40)),
            min_size=1,
            max_size=25,
        )
    )
    slots = _slots(draw(st.lists(st.integers(0, 500), min_size=len(rows), max_size=len(rows))))
    some = st.frozensets(st.integers(0, len(rows) - 1), max_size=4)
    held, outputs = draw(some), draw(some)
    untouched = _slots(draw(st.lists(st.integers(0, 500), max_size=2)))
    return slots, _program(slots, rows), {slots[n] for n in held}, {*untouched, *(slots[n] for n in outputs)}


@given(programs())
def test_no_two_live_slots_overlap(case: Case) -> None:
    """From the instruction that first touches a slot to the last one, for outputs to the end, no other slot has any of
    its bytes."""
    _, program, private, outputs = case
    layout = lay_out(program, private, outputs)
    touched = [*(instruction.reads | instruction.writes for instruction in program), outputs]
    lives = {
        slot: range(min(at := [i for i, t in enumerate(touched) if slot in t]), max(at) + 1) for slot in layout.offsets
    }
    for a in lives:
        for b in lives:
            if a is not b and lives[a].start < lives[b].stop and lives[b].start < lives[a].stop:
                begin, end = layout.offsets[a], layout.offsets[a] + a.nbytes
                assert end <= layout.offsets[b] or layout.offsets[b] + b.nbytes <= begin or not (a.nbytes and b.nbytes)


@given(programs())
def test_every_slot_has_an_aligned_place_inside(case: Case) -> None:
    """All touched slots and outputs that are not private, and no others, get a place within the arena, aligned to 64
    bytes."""
    _, program, private, outputs = case
    layout = lay_out(program, private, outputs)
    touched = outputs.union(*(instruction.reads | instruction.writes for instruction in program))
    assert set(layout.offsets) == touched - private
    for slot, offset in layout.offsets.items():
        assert offset % 64 == 0
        assert offset + slot.nbytes <= layout.nbytes


@given(programs())
def test_what_is_needed_is_kept_in_order(case: Case) -> None:
    """Pruning keeps the order, keeps every writer of what is read or held later, and keeps draws and custom work."""
    _, program, held, _ = case
    once, each = prune(program, [], held)
    kept = [instruction for instruction in program if instruction in once or instruction in each]
    assert [i for i in kept if i in each] == each
    assert len(kept) == len(once) + len(each)
    dropped = [i for i in program if i not in kept]
    for instruction in dropped:
        later = program[program.index(instruction) + 1 :]
        needed = held | {slot for i in later if i in kept for slot in i.reads}
        assert instruction.writes.isdisjoint(needed)
        assert instruction.kind in (OperatorKind.PURE, OperatorKind.WRITE)
