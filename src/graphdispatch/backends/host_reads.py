"""Stand-ins for functions of torch that bypass its dispatcher: host reads, and the question whether anyone captures.

A ``TorchFunctionMode`` would see host reads, too. But ``torch.nn`` leaves its fast paths within one, so that the graph
would hold other operators than eager runs. Stand-ins change nothing else.

They are in place only while some thread is in a ``Listening`` block, and each thread is served for itself: for all
others they do what torch does. A child that is forked meanwhile keeps them, and nobody listens there.
"""

import functools
import re
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self

import torch

from ..copying import make_lock
from ..errors import CaptureError
from .code_events import is_own_code
from .operators import unsafe

_LENGTHS = ("lstm", "gru", "rnn_tanh", "rnn_relu", "_pad_packed_sequence", "tensor_split")
"""Functions in C++ that read lengths from a tensor, if they get one, to choose the operators that they call."""
_QUESTION = "is_current_stream_capturing"
_NUMBERS = ("__bool__", "__int__", "__float__", "__complex__", "__index__")


class StandIns:
    """Replaces attributes of classes and modules while any thread has listeners. ``make`` gets an attribute's name, its
    value, and what gives the listeners of the calling thread; it returns what stands in."""

    originals: ClassVar[dict[int, Any]] = {}
    """What is behind those that are in place, by their ``id``."""

    def __init__(
        self, places: Iterable[tuple[Any, str]], make: Callable[[str, Any, Callable[[], list[Any]]], Any]
    ) -> None:
        self.places = [(owner, name) for owner, name in places if hasattr(owner, name)]
        # What a class inherits becomes its own for good, so that the number of its attributes stays the same.
        for owner, name in self.places:
            if name not in vars(owner):
                setattr(owner, name, getattr(owner, name))
        self._make = make
        self._here = threading.local()
        self._lock = make_lock()  # which a signal's handler may find held by its own thread
        self._users = 0
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def listeners(self) -> list[Any]:
        """The listeners of the calling thread; the latest is the last."""
        found: list[Any] = self._here.__dict__.setdefault("listeners", [])
        return found

    def add(self, listener: Any) -> None:
        """Listen on the calling thread until ``remove``; several may listen."""
        with self._lock:
            if not self._users:
                self._put_in()
            self._users += 1
        self.listeners().append(listener)

    def remove(self, listener: Any) -> None:
        """End what ``add`` began, on the same thread."""
        listeners = self.listeners()
        del listeners[next(i for i in reversed(range(len(listeners))) if listeners[i] == listener)]
        with self._lock:
            self._users -= 1
            if not self._users:
                self._take_out()

    def _put_in(self) -> None:
        for owner, name in self.places:
            current = getattr(owner, name)
            stand_in = self._make(name, current, self.listeners)
            self._replaced.append((owner, name, vars(owner).get(name, current), stand_in))
            self.originals[id(stand_in)] = current
            setattr(owner, name, stand_in)

    def _take_out(self) -> None:
        while self._replaced:
            owner, name, original, stand_in = self._replaced.pop()
            self.originals.pop(id(stand_in), None)
            if vars(owner).get(name) is stand_in:  # else somebody has replaced it, who will put back what was found
                setattr(owner, name, original)


def _tell_of_read(name: str, original: Any, listeners: Callable[[], list[Any]]) -> Any:
    @functools.wraps(original)
    def read(*args: Any, **kwargs: Any) -> Any:
        if (here := listeners()) and (what := _read_by(name, args, kwargs)):
            # A read by code outside of this library, and outside of an operator's kernel.
            is_in_kernel = torch._C._is_torch_function_all_disabled()
            if not is_in_kernel and not is_own_code(sys._getframe(1).f_code.co_filename):
                for on_read in reversed(here):
                    on_read(what, next(iter((*args, *kwargs.values())), None))
        return original(*args, **kwargs)

    return read


def _read_by(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What a call reads on the host, in words; None if it reads nothing there, or where torch's dispatcher sees it."""
    if name in _NUMBERS:
        # torch.tensor([t, 1]) and x[[t, 0]] read each element's number, and hide that from all modes.
        is_hidden = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)
        return "a tensor in a list of numbers (torch.stack keeps it on the device)" if is_hidden else None
    if name == "_str":
        is_data = type(args[0]).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and not args[0].is_meta
        return "printing a tensor" if is_data else None
    if name not in _LENGTHS:
        return f"{'UntypedStorage' if isinstance(next(iter(args), None), torch.UntypedStorage) else 'Tensor'}.{name}"
    lengths = any(isinstance(value, torch.Tensor) for value in (*args[1:2], *kwargs.values()))
    if name in ("gru", "rnn_tanh", "rnn_relu"):
        # A recurrent layer gets (input, state, weights, ...), or (data, batch_sizes, state, weights, ...).
        lengths = lengths and isinstance(args[2], torch.Tensor)
    return f"{name.strip('_')} with lengths in a tensor" if lengths else None


def _tell_of_capture(_: str, original: Any, listeners: Callable[[], list[Any]]) -> Any:
    is_dummy = isinstance(original, type)  # of a torch without the device: a class that cannot be called

    def is_capturing() -> bool:
        return any(is_on() for is_on in listeners()) or (not is_dummy and bool(original()))

    return is_capturing


_SHARING = {
    torch.Tensor: "numpy __array__ __dlpack__ data_ptr share_memory_ apply_ map_ map2_",
    torch.UntypedStorage: "data_ptr fill_ resize_ share_memory_ __setitem__",
}
EXPOSED = StandIns([(owner, name) for owner in _SHARING for name in _SHARING[owner].split()], _tell_of_read)
"""Methods, of classes alone, that let the host's code write unseen; pickling reads a storage's ``data_ptr``."""
_READS = StandIns(
    [
        *((torch.Tensor, name) for name in ("tolist", *_NUMBERS)),
        *((torch.UntypedStorage, name) for name in ("tolist", "__getitem__")),
        (torch._tensor_str, "_str"),
        *((owner, "to_dlpack") for owner in (torch, torch.utils.dlpack)),
        *((torch._C, name) for name in ("_to_dlpack", "_to_dlpack_versioned")),
        *((torch._VF, name) for name in _LENGTHS[:-1]),
        *((owner, "tensor_split") for owner in (torch, torch.Tensor)),
    ],
    _tell_of_read,
)
_GRAPHS = [module for path, module in list(sys.modules.items()) if re.fullmatch(r"torch\.\w+\.graphs", path)]
"""Where torch has the graphs of its accelerators."""
CAPTURE_QUERIES = frozenset(vars(module)[_QUESTION].__code__ for module in _GRAPHS if _QUESTION in vars(module))
"""Code that calls it may do something else while somebody captures."""
# What those functions call, so that it counts, too, where code has imported one by its name.
_CAPTURES = StandIns(
    [(module, name) for module in _GRAPHS for name in vars(module) if name.endswith("_isCurrentStreamCapturing")],
    _tell_of_capture,
)


class Listening:
    """Within its block, ``stand_ins`` tell ``listener`` of what the calling thread calls. Several may listen."""

    def __init__(self, listener: Any, *stand_ins: StandIns) -> None:
        self._listener, self._stand_ins = listener, stand_ins

    def __enter__(self) -> Self:
        for stand_ins in self._stand_ins:
            stand_ins.add(self._listener)
        return self

    def __exit__(self, *_: object) -> None:
        for stand_ins in self._stand_ins:
            stand_ins.remove(self._listener)


class HostReads(Listening):
    """Within its block, ``on_read`` is called before each host read of the calling thread that torch's dispatcher does
    not see, with the method's name and what it reads; it may raise.

    These are arrays and addresses of tensors, tensors in a list of numbers, and pickled or printed ones. Reads by the
    kernel of an operator count only if that is Python. What code kept of ``torch.Tensor``'s methods is not seen.
    """

    def __init__(self, on_read: Callable[[str, Any], None]) -> None:
        super().__init__(on_read, _READS, EXPOSED)


def given_to_host(
    name: str, remedy: str = "keep the value on the device, or move the read out of the call"
) -> CaptureError:
    """The error of a host read by ``name``, which no graph of the CPU holds."""
    return unsafe(f"{name} gives memory to the host while a graph is captured; {remedy}")


class SaysCapturing(Listening):
    """Within its block, ``torch.cuda.is_current_stream_capturing()`` is true on the calling thread while ``is_on()``.

    So code that checks this before it reads values back to the host takes the path that a graph of a device would hold.
    """

    def __init__(self, is_on: Callable[[], bool] = lambda: True) -> None:
        super().__init__(is_on, _CAPTURES)
