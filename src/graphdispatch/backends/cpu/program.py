"""The calls that a replay makes, in order: by a native tape where there is one, else by a loop in Python.

Note [one replay, two loops]
    Both loops call the same operators on the same tensors below autograd, so they give the same bits, draw the same
    random numbers and raise the same errors. The tape releases the GIL. It leaves to Python what cannot be prepared:
    compiled code, collectives, and arguments that it does not know. Where a mode or a transform of torch watches the
    calling thread, the whole replay is Python's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from ...errors import ReplayError
from ...native.tape import TAPE
from ..operators import storage_key, tensors_in

__all__ = ["Program", "Step", "below_autograd", "loop", "run_and_copy", "run_collective", "tell"]

# The recorder saw the operators below autograd. Replaying them there saves the way through autograd.
below_autograd = torch._C._AutoDispatchBelowAutograd


class Step(NamedTuple):
    """One call of a replay, and the operator behind it.

    ``run`` is Python's call, and ``func`` what it calls. A tape may call the operator ``func`` with ``operands``, its
    ``args`` and ``kwargs``, instead; without them the call is Python's alone. New results are copied to ``outs``; where
    ``outs`` is None the operator itself writes them.
    """

    run: Callable[[], Any]
    func: Any
    operands: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    outs: tuple[torch.Tensor, ...] | None = None


class Program:
    """Steps, ready to run. One thread at a time runs them: the one that holds the pool's lock."""

    __slots__ = ("__weakref__", "calls", "steps", "tape")

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.calls = [step.run for step in steps]
        """What Python's loop calls."""
        self.tape: Any = None
        """What runs the steps with ``replay()``, or None until there is such a thing."""
        TAPE.start()
        self.make_tape()

    def __len__(self) -> int:
        return len(self.steps)

    def make_tape(self) -> None:
        """Make the tape, if the extension is ready."""
        if TAPE.module is None:
            return
        tape = TAPE.module.Tape(partial(loop, self.calls, self.steps), partial(tell, self.steps))
        for run, func, operands, outs in self.steps:
            if operands is None:
                tape.add_call(run)
            else:
                tape.add(run, func._schema.name, func._schema.overload_name, *operands, outs)
        self.tape = tape

    def run(self) -> None:
        """Make the calls. An error of an operator passes through, with a note that names the operator.

        Raises ``ReplayError`` if the results of a copied operator have other shapes than the graph has places for.
        """
        if self.tape is None:
            self.make_tape()
        if self.tape is not None:
            self.tape.replay()
        else:
            loop(self.calls, self.steps)


def tell(steps: Sequence[Step], position: int, what: BaseException | list[tuple[int, ...]]) -> None:
    """Note in an error which step raised it. Shapes that a step gave instead are a ``ReplayError``."""
    step = steps[position]
    if not isinstance(what, BaseException):
        raise _other_shapes(step.func, what, step.outs)
    what.add_note(f"raised by {step.func} in the replay of a graph")


def loop(calls: list[Callable[[], Any]], steps: Sequence[Step]) -> None:
    """Python's way through a program's calls. An error passes through, with a note that names the operator."""
    try:
        with below_autograd():
            for call in calls:
                call()
    except BaseException as error:
        tell(steps, calls.index(call), error)
        raise


def run_and_copy(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[torch.Tensor, ...]
) -> None:
    """Call an operator, and copy the new tensors that it makes to ``outs``. Raises ``ReplayError`` for other shapes."""
    results = tensors_in(func(*args, **kwargs))
    if func.namespace == "_c10d_functional":
        results = [torch.ops._c10d_functional.wait_tensor(t) for t in results]
    # A result that is one of the arguments needs no copy; the recorder made no output for it.
    own = set(map(storage_key, tensors_in(args, kwargs)))
    fresh = [t for t in results if storage_key(t) not in own]
    got = [tuple(t.shape) for t in fresh]
    if got != [tuple(t.shape) for t in outs]:
        raise _other_shapes(func, got, outs)
    for out, result in zip(outs, fresh, strict=True):
        out.copy_(result)


def run_collective(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call a collective and wait until its work is done."""
    result = func(*args, **kwargs)
    work = result[-1] if isinstance(result, tuple) else result
    work.wait()


def _other_shapes(func: Any, got: list[tuple[int, ...]], outs: tuple[torch.Tensor, ...] | None) -> ReplayError:
    held = [tuple(t.shape) for t in outs or ()]
    return ReplayError(
        f"{func} gave new tensors of shapes {got} where the graph holds {held}: the "
        "shapes of its results, or whether they are its arguments, depend on data; make it a break of a PIECEWISE "
        "capture"
    )
