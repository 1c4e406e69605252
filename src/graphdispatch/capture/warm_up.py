"""Runs a call before its capture, and puts everything back."""

import logging
from contextvars import copy_context

from ..backends.insight import reveal_operators
from ..backends.modes import profiler_range
from ..call.rules import graph_name
from ..call.spec import FlatCall
from ..memory.windows import WINDOWS
from ..state.trace import CodeTrace
from ..state.walk import StateWalk
from .eager_run import undo_run
from .effects import EffectRecorder
from .request import CaptureRequest

__all__ = ["warm_up"]

_log = logging.getLogger("graphdispatch")


def warm_up(request: CaptureRequest) -> None:
    """Run the call on the static inputs and put everything back; for warming all sizes before capturing any.

    Python state that the first run alone changes (a table that the callable makes when it is first called) stays. State
    that every run changes is put back. An error of the callable is only logged here: ``capture_entry`` reports it.
    """
    window = WINDOWS.capturing(request.reach, request.pool)
    with window as is_alone, request.pool.lock, request.backend.watched():
        if not is_alone:
            return
        request.pool.order_after_last_use()
        with profiler_range("warm-up", graph_name(request.call.fn, request.key)):
            copy_context().run(_run_twice, request)  # nobody could unset a context variable


def _run_twice(request: CaptureRequest) -> None:
    """Run the call on the static inputs, and once more if that changes Python state; put that back unless the second
    run shows that only a first one changes it."""
    first = _run_once(request)
    if first is None or (first.drew() is None and first.change() is None):
        return
    if first.drew() is None:
        if first.unrestorable is not None:
            return
        second = _run_once(request)
        if second is not None and second.change() is None:
            return
    first.restore(generators=True)


def _run_once(request: CaptureRequest) -> StateWalk | None:
    """Run the call once on the static inputs, if that can be undone, and put back what it writes; the Python state as
    it was before. None if it fails, after which all is as before."""
    rng_before = request.backend.rng_state()
    walk = StateWalk(*request.roots)
    trace = CodeTrace(walk, within=FlatCall.__call__.__code__, spares=True)
    if trace.refusal() is not None:
        return None
    reveal_operators()
    effects = EffectRecorder(request.options.state_limit_bytes, strict=True)
    try:
        # Other views each time: state that keeps one of them is not the same after a second run.
        values = request.values_with(view.detach() for view in request.inputs.views(request.size))
        request.inputs.load(request.values, request.rows, request.size)
        with request.backend.rehearsing(), trace, effects.guarding():
            request.call(values)
    except Exception as error:
        request.backend.raise_if_lost(error)
        _log.debug("warming up %s failed: %s", request.key, error)
        walk.restore(generators=True)
        return None
    finally:
        undo_run(request, effects, rng_before)
    return walk
