"""Who listens hears of the code that its thread runs, and of nothing that it said is plain; on any Python."""

import sys
import threading
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

import graphdispatch as gd
from graphdispatch import Reason
from graphdispatch.backends.code_events import CodeListener, pause, resume
from graphdispatch.backends.operator_mode import OperatorMode

from ..helpers import AT_ONCE, in_threads

SCALE = 2.0


class Listener(CodeListener):
    """Notes the names of functions, and the ends of those whose code is followed."""

    def __init__(self, *follows: FunctionType) -> None:
        super().__init__()
        self.heard: list[str] = []
        self.followed = {id(fn.__code__): fn.__code__ for fn in follows}

    def on_call(self, frame: FrameType) -> None:
        self.heard.append(frame.f_code.co_name)
        self.plain[id(frame.f_code)] = frame.f_code

    def on_return(self, code: CodeType) -> None:
        self.heard.append(f"end of {code.co_name}")

    def on_c_call(self, frame: FrameType, owner: Any, name: str) -> None:
        if name == "upper":
            self.heard.append(name)


def inner() -> str:
    """A function with a compiled method."""
    return "a".upper()


def outer() -> str:
    """A function that is called once."""
    return inner() + inner()


def heard_of(*follows: FunctionType) -> list[str]:
    """What a new listener hears of a call of ``outer``."""
    listener = Listener(*follows)
    assert listener.begin()
    outer()
    listener.end()
    outer()
    return listener.heard


def test_each_listener_hears_of_code_that_others_called_plain() -> None:
    """Once of each function, of each end that it follows, and of each compiled method."""
    for _ in range(3):
        assert heard_of() == ["outer", "inner", "upper", "upper"]
    assert heard_of(inner) == ["outer", "inner", "upper", "end of inner", "upper", "end of inner"]


def test_nothing_is_heard_in_a_pause_or_of_another_thread() -> None:
    """Nor does a pause end for somebody else."""
    listener = Listener()
    listener.begin()
    paused = pause()
    outer()
    resume(paused)
    in_threads(outer)
    inner()
    listener.end()
    assert [name for name in listener.heard if name in ("outer", "inner", "upper")] == ["inner", "upper"]


def test_two_threads_listen_at_once() -> None:
    """Neither hears less for the other."""
    gate, heard = threading.Barrier(2), list[list[str]]()

    def listen() -> None:
        listener = Listener()
        gate.wait()
        listener.begin()
        outer()
        listener.end()
        heard.append([name for name in listener.heard if name in ("outer", "inner", "upper")])

    for _ in range(20):
        in_threads(listen, listen)
    assert all(one == ["outer", "inner", "upper", "upper"] for one in heard), heard


def test_a_capture_inside_of_a_profile_function_is_refused() -> None:
    """Python tells of no code there, so that nobody would see the variable change."""
    step = gd.graphed(lambda x: x * SCALE, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    reasons = list[Reason]()

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and not reasons:
            step(torch.ones(4, 4))
            reasons.append(step.last_decision.reason)

    outer_profiler = sys.getprofile()
    sys.setprofile(profile)
    outer()
    sys.setprofile(outer_profiler)
    assert reasons == [Reason.STATE_UNSEEN]


class Watching(OperatorMode):
    """Runs each operator."""

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


@pytest.mark.filterwarnings("ignore:.*may also be overridden:UserWarning")
@pytest.mark.parametrize(("name", "key"), [("addmm", "CPU"), ("linear", "CompositeImplicitAutograd")])
def test_a_kernel_in_python_is_heard_of_wherever_it_is_called(name: str, key: str) -> None:
    """That of a part of an operator, or of an operator that has parts; the code that finds parts is not."""

    def kernel(*args: Tensor) -> Tensor:
        inner()
        return torch.zeros(2, 2)

    x = torch.ones(2, 2)
    with torch.library._scoped_library("aten", "IMPL") as library, torch.inference_mode():
        library.impl(name, kernel, key)
        listener = Listener()
        with Watching():
            listener.begin()
            torch.nn.functional.linear(x, x, x[0])
            torch.flatten(x)
            heard = list(listener.heard)
            outer()
            listener.end()
    assert [name for name in heard if name in ("kernel", "inner", "upper")] == ["kernel", "inner", "upper"]
    assert {"watch", "decompose", "_run_parts", "_has_parts"}.isdisjoint(heard)
    assert "outer" in listener.heard
