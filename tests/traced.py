"""Guards as a capture makes them: with a trace of one run."""

from collections.abc import Callable
from typing import Any

import torch

from graphdispatch.backends.operators import storage_key
from graphdispatch.capture.effects import EffectRecorder
from graphdispatch.state.guards import StateGuard
from graphdispatch.state.trace import CodeTrace
from graphdispatch.state.walk import StateWalk

__all__ = ["guard_of"]


def guard_of(fn: Callable[..., Any], *args: Any, skips_breaks: bool = False) -> StateGuard:
    """The guard of what one run reads; with three columns if no arguments are given. The run must change nothing."""
    walk, effects = StateWalk(fn), EffectRecorder(1 << 20)
    with torch.no_grad(), CodeTrace(walk, skips_breaks=skips_breaks) as trace, effects:
        fn(*(args or (torch.ones(2, 3),)))
    assert walk.change() is None
    used = set(effects.outside) | {storage_key(t) for t in walk.tensors if isinstance(t, torch.nn.Parameter)}
    guard = StateGuard(fn, trace, used)
    assert not guard.unguarded
    assert guard.holds()
    return guard
