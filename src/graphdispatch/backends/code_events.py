"""Tells which Python code a thread runs: by ``sys.monitoring``, or before Python 3.12 by ``sys.setprofile``.

Note [a profiler of Python 3.12 is not taken away for an operator]
    What watches operators runs much Python of its own, of which nobody shall hear. Before 3.12 the profiler is
    taken away for that long. Since 3.12 each ``sys.setprofile`` has the interpreter change all code once more, which
    took a third of a capture's time. ``sys.monitoring`` has a switch for each place in the code instead: an
    event that is heard only once costs nothing after that, until somebody begins to listen.
"""

import os
import sys
from threading import get_ident
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodDescriptorType, MethodType
from typing import Any

import torch

from .tracing import untraced

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_PROOF = os.path.join(_PACKAGE, "proof", "rows", "")
_DEMO = os.path.join(_PACKAGE, "demo", "")
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
AROUND_OPERATORS = {
    *(os.path.join(_TORCH, *path) for path in (["_ops.py"], ["_library", "simple_registry.py"])),
    os.path.join(_TORCH, "multiprocessing", "reductions.py"),
    *(os.path.join(_PACKAGE, "backends", name) for name in ("code_events.py", "operator_mode.py")),
}
"""Files of the code that runs on the way to a mode and through it."""
AROUND_CALLABLES = {os.path.join(_PACKAGE, *place) for place in (("proof", "breaks.py"), ("runtime", "flatten.py"))}
"""Files of this package whose code calls that of users: the rest of its code runs beside it."""


def is_own_code(path: str) -> bool:
    """Whether a file of code belongs to this package, but for its demo."""
    return path.startswith(_PACKAGE) and not path.startswith(_DEMO)


def is_code_of_proof(path: str) -> bool:
    """Whether a file of code belongs to what follows rows through a run, which runs in the place of torch's."""
    return path.startswith(_PROOF)


def is_torch_code(path: str) -> bool:
    """Whether a file of code belongs to torch."""
    return path.startswith(_TORCH)


class CodeListener:
    """Hears of the code that one thread runs from ``begin`` to ``end``, on that thread. They may be nested.

    ``plain`` is the code, by its ``id``, of which it hears nothing more, and ``followed`` that of whose ends
    ``on_return`` hears.
    """

    def __init__(self) -> None:
        ends = CodeListener.end.__code__, _end.__code__
        self.plain: dict[int, CodeType] = {id(code): code for code in ends}
        self.followed: dict[int, CodeType] = {}
        self.is_paused = False
        self.outer: Any = None

    def on_call(self, frame: FrameType) -> None:
        """A function begins whose code is not plain."""

    def on_return(self, code: CodeType) -> None:
        """A function ends whose code is ``followed``."""

    def on_c_call(self, frame: FrameType, owner: Any, name: str) -> None:
        """A compiled function is about to run; ``owner`` is the object of a method, else the module or None."""

    @untraced
    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """Hear of one event of ``sys.setprofile``, after who listened before."""
        if self.outer is not None:
            self.outer(frame, event, arg)
        if event == "call":
            if id(frame.f_code) not in self.plain:
                self.on_call(frame)
        elif event == "return":
            if id(frame.f_code) in self.followed:
                self.on_return(frame.f_code)
        elif event == "c_call" and frame.f_code.co_filename not in AROUND_OPERATORS:
            self.on_c_call(frame, getattr(arg, "__self__", None), arg.__name__)

    def begin(self) -> bool:
        """Listen; whether that was possible."""
        return _begin(self)

    def end(self) -> None:
        """Listen no more. Harmless where nobody listens."""
        _end(self)


if sys.version_info >= (3, 12):
    _events = sys.monitoring.events
    _DISABLE = sys.monitoring.DISABLE
    _listeners: dict[int, CodeListener] = {}
    """By thread, who began to listen last."""
    _begun = [0]
    """How often somebody began to listen: what was heard before is heard again then."""
    _taken: list[int] = []
    """The number under which this process listens, once it does."""
    _NAME = __name__.partition(".")[0]

    def _begin(listener: CodeListener) -> bool:
        tool = _take_tool()
        if tool is None:
            return False
        listener.outer, listener.is_paused = _listeners.get(get_ident()), False
        _begun[0] += 1
        _listeners[get_ident()] = listener
        wanted = _events.PY_START | _events.PY_RETURN | _events.PY_UNWIND | _events.CALL
        sys.monitoring.set_events(tool, wanted)
        sys.monitoring.restart_events()
        return True

    def _end(listener: CodeListener) -> None:
        if _listeners.get(get_ident()) is not listener:
            return
        if listener.outer is None:
            del _listeners[get_ident()]
        else:
            _listeners[get_ident()] = listener.outer
        if not _listeners:
            sys.monitoring.set_events(_taken[0], 0)

    def pause() -> CodeListener | None:
        """Tell the calling thread's listeners nothing for now; what ``resume`` takes, or None if nobody listens."""
        listener = _listeners.get(get_ident())
        if listener is None or listener.is_paused:
            return None
        listener.is_paused = True
        return listener

    def resume(paused: Any) -> None:
        """End a pause."""
        if paused is not None:
            paused.is_paused = False

    def listening() -> CodeListener | None:
        """What ``listen_as_before`` takes: who hears of the calling thread's code now."""
        return _listeners.get(get_ident())

    def listen_as_before(former: Any) -> None:
        """Have those listen no more who began since, and were stopped before they could end that."""
        while (last := _listeners.get(get_ident())) not in (None, former):
            _end(last)

    def _take_tool() -> int | None:
        """The number under which this process listens; None if others have taken all."""
        if not _taken:
            free = next((number for number in (4, 3) if sys.monitoring.get_tool(number) is None), None)
            if free is None:
                return None
            sys.monitoring.use_tool_id(free, _NAME)
            for event, callback in (
                (_events.PY_START, _on_start),
                (_events.PY_RETURN, _on_return),
                (_events.PY_UNWIND, _on_unwind),
                (_events.CALL, _on_call),
            ):
                sys.monitoring.register_callback(free, event, callback)
            _taken.append(free)
        return _taken[0]

    def _is_own(code: CodeType) -> bool:
        """Whether code is this package's, in which nothing is to be heard of."""
        return is_own_code(code.co_filename) and code.co_filename not in AROUND_CALLABLES

    def _is_silent(code: CodeType) -> bool:
        """Whether nobody is to hear of code: it runs around each operator that is watched."""
        return code.co_filename in AROUND_OPERATORS

    def _chain() -> list[CodeListener]:
        """The calling thread's listeners that are not paused, the innermost first."""
        each, found = _listeners.get(get_ident()), list[CodeListener]()
        while each is not None and not each.is_paused:
            found.append(each)
            each = each.outer
        return found

    @untraced
    def _on_start(code: CodeType, offset: int) -> Any:
        if _is_silent(code):
            return _DISABLE
        begun, listeners = _begun[0], _chain()
        if not listeners:
            return _DISABLE if _is_own(code) else None
        for each in listeners:
            if id(code) not in each.plain:
                each.on_call(sys._getframe(1))
        is_done = all(id(code) in each.plain for each in listeners) and len(_listeners) == 1
        return _DISABLE if is_done and begun == _begun[0] else None

    @untraced
    def _on_return(code: CodeType, offset: int, value: object) -> Any:
        if _is_silent(code):
            return _DISABLE
        begun, listeners = _begun[0], _chain()
        if not listeners:
            return _DISABLE if _is_own(code) else None
        _tell_end(code, listeners)
        is_over = len(_listeners) == 1 and not any(id(code) in each.followed for each in listeners)
        return _DISABLE if is_over and begun == _begun[0] else None

    @untraced
    def _on_unwind(code: CodeType, offset: int, error: BaseException) -> None:
        _tell_end(code, _chain())

    def _tell_end(code: CodeType, listeners: list[CodeListener]) -> None:
        for each in listeners:
            if id(code) in each.followed:
                each.on_return(code)

    @untraced
    def _on_call(code: CodeType, offset: int, function: Any, first: Any) -> Any:
        if _is_silent(code):
            return _DISABLE
        listeners, kind = _chain(), type(function)
        if not listeners:
            return _DISABLE if _is_own(code) else None
        if kind is BuiltinFunctionType:
            owner = function.__self__
        elif kind is MethodDescriptorType:
            owner = first
        else:
            return None
        for each in listeners:
            each.on_c_call(sys._getframe(1), owner, function.__name__)
        return None

else:
    listening = sys.getprofile

    def listen_as_before(former: Any) -> None:
        """The same as above."""
        present = sys.getprofile()
        is_left = present is None or isinstance(getattr(present, "__self__", None), CodeListener)
        if is_left and present != former:
            sys.setprofile(former)

    def _begin(listener: CodeListener) -> bool:
        listener.outer = sys.getprofile()
        if listener.outer is not None and type(listener.outer) not in (FunctionType, MethodType):
            return False
        sys.setprofile(listener.profile)
        return True

    def _end(listener: CodeListener) -> None:
        # Python takes away a profiler that raises.
        if sys.getprofile() in (None, listener.profile):
            sys.setprofile(listener.outer)

    def pause() -> Any:
        """Tell nobody of the calling thread's code for now; what ``resume`` takes, or None if nobody listens.

        A profiler in compiled code goes on: it cannot be put back by its name.
        """
        profiler = sys.getprofile()
        if type(profiler) not in (MethodType, FunctionType):
            return None
        sys.setprofile(None)
        return profiler

    def resume(paused: Any) -> None:
        """End a pause."""
        if paused is not None:
            sys.setprofile(paused)
