"""What a stream's thread takes over from the thread that gives it work: torch keeps its modes for each thread apart."""

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
    """``work``, to be called on another thread as if on this one: under the same gradient and inference mode, CPU
    autocast, context variables and dispatch modes. Whoever watches the operators of this thread (what a call writes,
    what a break makes) thus sees those of the work too."""
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
    # Not by its own __enter__, which keeps what it has to put back in the mode, where two threads would mix it up.
    _push_mode(mode)
    try:
        yield
    finally:
        _pop_mode(getattr(mode, "_mode_key", None))
