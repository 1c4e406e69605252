"""What a stream's thread takes over from the thread that submits work, since torch keeps its modes per thread."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

__all__ = ["with_callers_modes"]


def with_callers_modes(work: Callable[[], None]) -> Callable[[], None]:
    """Wrap ``work`` so that another thread can call it as if it ran on this thread.

    It runs under this thread's gradient mode, inference mode, CPU autocast, context variables and dispatch modes. A
    mode that watches this thread's operators (what a call writes, what a break makes) thus sees those of ``work``.
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu")
    watchers = _get_current_dispatch_mode_stack()
    context = contextvars.copy_context()

    def call() -> None:
        with contextlib.ExitStack() as modes:
            modes.enter_context(torch.inference_mode(inference))
            modes.enter_context(torch.set_grad_enabled(grad))
            if autocast:
                modes.enter_context(torch.autocast("cpu", dtype=dtype))
            for watcher in watchers:
                modes.enter_context(_entered(watcher))
            context.run(work)

    return call


@contextlib.contextmanager
def _entered(mode: TorchDispatchMode) -> Iterator[None]:
    # The mode's own __enter__ keeps what it must restore in the mode itself, where two threads would mix it up.
    _push_mode(mode)
    try:
        yield
    finally:
        _pop_mode(getattr(mode, "_mode_key", None))
