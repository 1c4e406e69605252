"""Decides which part of a recorded program a replay runs, and where its memory lies. Pure functions on plain data."""

from dataclasses import dataclass

from ..operators import OperatorKind, is_total
from .recorder import Instruction, Literal, Slot

__all__ = ["Layout", "lay_out", "prune"]

_ALIGNMENT = 64  # bytes, as in torch's CPU allocator, so that kernels take the same vector path as in eager


@dataclass(frozen=True)
class Layout:
    """The byte offset of each slot of a program in one arena of ``nbytes`` bytes."""

    offsets: dict[Slot, int]
    nbytes: int


def prune(
    program: list[Instruction], literals: list[Literal], pinned: set[Slot]
) -> tuple[list[Instruction], list[Instruction]]:
    """Split a program into the instructions that run once, to make constants, and those that run at each replay.

    ``pinned`` slots are read after the program. They must then hold what eager would have left in them. Operators
    that are known to do nothing but compute results, which nobody needs, are dropped (``is_total``).
    """
    needed = set(pinned)
    kept: list[Instruction] = []
    for instruction in reversed(program):
        is_pure = instruction.kind not in (OperatorKind.RANDOM, OperatorKind.OPAQUE) and is_total(instruction.func)
        must_run = instruction.writes_outside or not is_pure
        if must_run or not needed.isdisjoint(instruction.writes):
            kept.append(instruction)
            needed |= instruction.reads
    kept.reverse()
    overwritten = {slot for i in kept if i.kind is OperatorKind.WRITE for slot in i.writes} | pinned
    constant = {literal.ref.slot for literal in literals} - overwritten
    once: list[Instruction] = []
    each: list[Instruction] = []
    for instruction in kept:
        if (
            instruction.kind is OperatorKind.PURE
            and not instruction.touches_outside
            and instruction.reads <= constant
            and instruction.writes.isdisjoint(overwritten)
        ):
            constant |= instruction.writes
            once.append(instruction)
        else:
            each.append(instruction)
    return once, each


def lay_out(program: list[Instruction], private: set[Slot], outputs: set[Slot]) -> Layout:
    """Place each slot of ``program`` that is not ``private``, so that slots alive at the same time never overlap.

    ``outputs`` stay alive to the end, even those that no instruction touches.
    """
    touched = [*(instruction.reads | instruction.writes for instruction in program), outputs]
    last = {slot: index for index, slots in enumerate(touched) for slot in slots}
    offsets: dict[Slot, int] = {}
    alive: dict[Slot, tuple[int, int]] = {}
    top = 0
    for index, slots in enumerate(touched):
        for slot in sorted(slots, key=lambda s: -s.nbytes):
            if slot in private or slot in offsets:
                continue
            size = -(-max(slot.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
            offset = _lowest_gap(sorted(alive.values()), size)
            offsets[slot] = offset
            alive[slot] = (offset, offset + size)
            top = max(top, offset + size)
        for slot in [s for s in alive if last[s] == index]:
            del alive[slot]
    return Layout(offsets, top)


def _lowest_gap(taken: list[tuple[int, int]], size: int) -> int:
    start = 0
    for begin, end in taken:
        if begin - start >= size:
            return start
        start = max(start, end)
    return start
