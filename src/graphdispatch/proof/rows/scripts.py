"""What runs past torch's modes while a run is watched: scripts of TorchScript, compiled functions, ``len``, and code
that runs otherwise under a mode.

These switches belong to the process. The first run that begins sets them and the last one that ends puts them back;
code on other threads passes through.
"""

import builtins
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from threading import get_ident
from typing import Any

import torch
import torch.overrides

from ...backends.host_reads import StandIns
from ...copying import make_lock

_lock = make_lock()
_eager = ExitStack()
_eager_runs: list[int] = []
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _watched(name: str, original: Any, listeners: Callable[[], list[Any]]) -> Any:
    """What stands in for one of these functions while some run is watched."""

    def length(value: Any, /) -> Any:
        watchers = listeners() if type(value) in _TENSORS else ()
        found = watchers[-1].length(value) if watchers else None
        return original(value) if found is None else found

    def has_torch_function(args: Iterable[Any]) -> bool:
        watchers = listeners()
        with watchers[-1].unseen() if watchers else nullcontext():
            return bool(original(args))

    @wraps(original)
    def script(self: Any, *args: Any, **kwargs: Any) -> Any:
        for watcher in listeners():
            watcher.note_script(args, kwargs)
        return original(self, *args, **kwargs)

    return {"len": length, "has_torch_function": has_torch_function}.get(name, script)


SCRIPTS = StandIns(
    [
        *((kind, "__call__") for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod)),
        *((builtins, "len"), (torch.overrides, "has_torch_function")),
    ],
    _watched,
)
"""Scripts read sizes where no mode looks. ``len`` of a tensor gives a number made of sizes; Python would make a plain
one of what ``__len__`` gives. Layers of ``torch.nn`` leave their fast kernel where functions of torch are overridden:
they do not see the watcher's mode. Who listens is a ``RowRun``."""


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
