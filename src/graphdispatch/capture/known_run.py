"""The eager run of a callable that has a graph, for another batch or another size.

Note [a run that is not watched again]
    A watched run takes several times as long as a plain one, and each number of rows would take one. Where the captured
    run did nothing but compute, a plain run is enough, if no code ran that did not run then, and if it left all as it
    was: the versions of the tensors within reach, the random generator, and Python state, which is looked at where the
    code spells anything that changes it. The graph's outputs are compared as ever. Any other run is the caller's answer
    and proves nothing: the next batch of so many rows is watched.
"""

import sys
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

import torch

from ..backends.operators import bits_equal, tensors_in
from ..call.spec import FlatCall
from ..memory.entry import CUDAGraphEntry
from ..modes import CUDAGraphMode, EntryState
from ..state.objects import same_callable
from ..state.trace import CodeTrace
from ..state.walk import StateWalk
from .eager_run import EagerRun, opener
from .effects import EffectRecorder
from .request import CaptureRequest

_UNCOUNTED = ("data", "set_", "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage")
"""Attributes of a tensor by which code can write to its memory while no version counts that."""


def is_known(request: CaptureRequest, entry: CUDAGraphEntry) -> bool:
    """Whether the call's run need not be watched: it is a caller's own, and that of the ``entry``, of any size, was
    free of effects."""
    guard = entry.guard
    return (
        request.keep_effects
        and entry.is_known
        and entry.call is not None
        and same_callable(entry.call.fn, request.call.fn)  # a dispatcher may run something else than what was captured
        and entry.state is not EntryState.FAILED
        and entry.mode is CUDAGraphMode.FULL
        and guard is not None
        and not (guard.notes.is_blind or entry.uses_rng or entry.writes_outside or entry.metadata)
        and guard.notes.names.isdisjoint(_UNCOUNTED)
        and entry.program.computes
        and sys.getprofile() is None
    )


def run_known(
    request: CaptureRequest, entry: CUDAGraphEntry, *, captures: bool = False
) -> tuple[Any, float, EagerRun | None]:
    """The answer of a plain run and how long it took; and what a watched run would have told, or None if it did
    something else.

    An error of the callable passes through. With ``captures``, which needs all Python state as it was, the ``entry`` is
    one of another size.
    """
    assert entry.guard is not None
    new_code = list[CodeType]()
    known = set(map(id, (*entry.guard.notes.codes, FlatCall.__call__.__code__)))  # their hash takes long

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and id(frame.f_code) not in known:
            new_code.append(frame.f_code)

    rng, arguments = request.backend.rng_state(), request.arguments()
    walk = StateWalk(*(request.roots if captures or entry.guard.notes.may_change_state() else ()))
    for table, names in entry.guard.notes.by_table(entry.guard.notes.variables):
        walk.visit_variables(table, iter(names), str(table.get("__name__", "")))
    tensors = [*request.tensors, *walk.tensors]
    versions = _versions(tensors)
    copies = [value.clone() if value.is_inference() else value._version for value in arguments]
    started = request.clock()
    sys.setprofile(note)
    try:
        answer = request.call(request.values)
    finally:
        sys.setprofile(None)
    seconds = request.clock() - started
    is_pure = (
        not new_code
        and (versions is not None and versions == _versions(tensors))
        and all(map(_is_unwritten, arguments, copies))
        and torch.equal(rng, request.backend.rng_state())
    )
    if not is_pure or walk.overflow is not None or walk.change() is not None or walk.drew() is not None:
        return answer, seconds, None
    open_outputs = opener(walk)
    opened = open_outputs(answer)
    outputs = [tensor.detach().clone() for tensor in tensors_in(opened)]
    effects = EffectRecorder(request.options.state_limit_bytes)
    trace = CodeTrace(walk, within=FlatCall.__call__.__code__)
    run = EagerRun(answer, arguments, opened, open_outputs, effects, outputs, {}, rng, rng, False, trace, None, None)
    return answer, seconds, run


def _is_unwritten(value: torch.Tensor, before: torch.Tensor | int) -> bool:
    """Whether an argument is as it was, by its version or else by its bits."""
    return bits_equal(value, before) if isinstance(before, torch.Tensor) else value._version == before


def _versions(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """How often each tensor was written; None if one does not count that."""
    if any(tensor.is_inference() for tensor in tensors):
        return None
    return [tensor._version for tensor in tensors]
