"""What a stream's thread takes over from the thread that submits work, since torch keeps its modes per thread."""

import contextlib
import contextvars
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

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
                # The mode's own __enter__ keeps what it must restore in the mode itself, where threads would mix it up.
                _push_mode(watcher)
                modes.callback(_pop_mode, getattr(watcher, "_mode_key", None))
            context.run(work)

    return call
