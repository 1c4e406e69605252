"""What runs past torch's modes while a run is watched: scripts of TorchScript, compiled functions, ``len``, and code
that runs otherwise under a mode.

These switches belong to the process. The first run that begins sets them and the last one that ends puts them back;
code on other threads passes through.
"""

import builtins
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from threading import get_ident
from typing import Any, Protocol

import torch
import torch.overrides

from ...copying import make_lock

_KINDS: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
_lock = make_lock()
_watchers: dict[int, list["Watcher"]] = {}
"""The runs that are watched, by thread; the innermost last."""
_eager = ExitStack()
_eager_runs: list[int] = []


class Watcher(Protocol):
    """Who wants to know of scripts."""

    def note_script(self, args: Any, kwargs: Any) -> None:
        """A script is about to run."""

    def length(self, tensor: torch.Tensor) -> Any:
        """The number made of sizes that ``len`` gives of a tensor; None for a plain one."""

    def unseen(self) -> AbstractContextManager[Any]:
        """The block in which the watcher's mode for functions is not on."""


@contextmanager
def watched_scripts(watcher: Watcher) -> Iterator[None]:
    """The block in which the calling thread's scripts are noted: they read sizes where no mode looks. ``len`` of a
    tensor gives a number made of sizes there; Python would make a plain one of what ``__len__`` gives. Layers of
    ``torch.nn`` leave their fast kernel where functions of torch are overridden: they do not see the watcher's mode.
    """
    thread = get_ident()
    with _lock:
        if not _watchers:
            _plain.update((kind, kind.__call__) for kind in _KINDS)
            for kind in _KINDS:
                kind.__call__ = _noted(kind.__call__)
            builtins.len = _length
            torch.overrides.has_torch_function = _is_overridden
        _watchers.setdefault(thread, []).append(watcher)
    try:
        yield
    finally:
        with _lock:
            _watchers[thread].remove(watcher)
            if not _watchers[thread]:
                del _watchers[thread]
            if not _watchers:
                builtins.len = _len
                torch.overrides.has_torch_function = _has_torch_function
                for kind in _KINDS:
                    kind.__call__ = _plain.pop(kind)


_plain: dict[Any, Callable[..., Any]] = {}
"""What is called without us."""


_len = builtins.len
_has_torch_function = torch.overrides.has_torch_function


def _length(value: Any, /) -> Any:
    """``len`` while some run is watched."""
    if type(value) in _TENSORS and (watchers := _watchers.get(get_ident())):
        length = watchers[-1].length(value)
        return _len(value) if length is None else length
    return _len(value)


def _is_overridden(args: Iterable[Any]) -> bool:
    """``has_torch_function`` while some run is watched."""
    watchers = _watchers.get(get_ident())
    with watchers[-1].unseen() if watchers else nullcontext():
        return _has_torch_function(args)


_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _noted(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        for watcher in _watchers.get(get_ident(), ()):
            watcher.note_script(args, kwargs)
        return call(self, *args, **kwargs)

    return noted


@contextmanager
def eager_compiler() -> Iterator[None]:
    """The block in which compiled functions run as written: those of other threads, too, with the same results."""
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled, and loading it takes a second
        yield
        return
    thread = get_ident()
    with _lock:
        if not _eager_runs:
            _eager.enter_context(torch.compiler.set_stance("force_eager"))
        _eager_runs.append(thread)
    try:
        yield
    finally:
        with _lock:
            _eager_runs.remove(thread)
            if not _eager_runs:
                _eager.close()
