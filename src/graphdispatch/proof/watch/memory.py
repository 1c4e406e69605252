"""Watches one run: which memory it makes and which it finds, and what of it no graph can hold.

Torch's dispatcher does not see some work (a compiled kernel, ctypes, numpy). Such work leaves tensors that no operator
made and that did not exist before. A graph would read their first value for ever.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, Self

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from ...backends.base import Capture, Graph
from ...backends.operator_mode import OperatorMode
from ...backends.operators import (
    OperatorKind,
    forbidden,
    is_strided,
    is_unsafe,
    kind_of,
    storage_key,
    tensors_in,
    unsafe,
)

LIFT = torch.ops.aten.lift_fresh.default
"""The operator that makes a tensor of Python values; it is given what they were made into."""


class Runner(Protocol):
    """Runs operators for a mode that sees them, which is entered in ``watching``: a ``Capture`` is one."""

    def watching(self, mode: OperatorMode) -> AbstractContextManager[object]:
        """A block in which the mode sees each operator, and has the runner ``run`` it."""

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        """Run an operator; ``tensors`` are those among its arguments."""

    def look_inside(
        self, mode: OperatorMode, func: OpOverload, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator's Python kernel within the mode."""


class MemoryWatch(OperatorMode):
    """Watches one run of a callable: notes the memory that it makes, and the memory that it uses and did not make.

    Enter ``watching`` around the callable. Where a capture is its runner, it raises ``CaptureError`` for what no graph
    can hold: a forbidden operator; and a tensor of unknown origin, if ``existed`` says of a storage's key whether it
    was there before.
    """

    def __init__(self, existed: Callable[[int], bool] | None = None) -> None:
        super().__init__()
        self.outside: dict[int, torch.Tensor] = {}
        """One tensor for each storage that the run used and did not make, by the storage's key."""
        self.latest: object = None
        """The operator that ran last, or None."""
        self._existed = existed
        self._made: dict[int, StorageWeakRef] = {}
        self._runner: Runner | None = None

    @contextmanager
    def watching(self, runner: Runner | None = None) -> Iterator[Self]:
        """Watch what the block does. ``runner`` runs the operators: a capture in progress records them, and a run whose
        rows are followed labels what they give."""
        self._runner = runner
        with self if runner is None else runner.watching(self):
            yield self
        if isinstance(runner, Capture):
            self.check_refused()  # the callable caught it

    def finished(self, graph: Graph) -> Graph:
        """The graph of the whole run, of which ``graph`` was recorded last."""
        return graph

    def discard(self) -> None:
        """Release what was recorded of the run before that."""

    def watch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check one operator's arguments, run it, and note what it gives."""
        given = tensors_in(*args, *kwargs.values())
        self._note_given(func, given)
        result = self._run(func, args, kwargs, given)
        self._note_results(func, kind_of(func), given, tensors_in(result))
        return result

    def look_inside(self, func: OpOverload, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Watch what an operator's Python kernel runs, and refuse a result of unknown origin."""
        if isinstance(self._runner, Capture) and is_unsafe(func):
            raise unsafe(f"{func} {_TAGGED}")
        if self._runner is not None:
            result = self._runner.look_inside(self, func, key, args, kwargs)
        else:
            result = super().look_inside(func, key, args, kwargs)
        for tensor in tensors_in(result):
            if is_strided(tensor) and self._is_unknown(storage_key(tensor)):
                raise unsafe(
                    f"{func} gives back a tensor of shape {tuple(tensor.shape)} that no operator inside it made; break "
                    f"there in PIECEWISE mode with eager_break({func._schema.name!r}), or register it in C++"
                )
            self._note_result(tensor, is_new=False)
        return result

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]) -> Any:
        """Have the runner run an operator. Raises ``CaptureError`` if that is a capture whose graph cannot hold it."""
        self.latest = func
        if self._runner is None:
            return func(*args, **kwargs)
        if isinstance(self._runner, Capture) and (why := why_not(func, args, kwargs, given)) is not None:
            raise unsafe(f"{func} {why}")
        return self._runner.run(func, args, kwargs, given)

    def _note_given(self, func: OpOverload, given: list[torch.Tensor]) -> dict[int, int]:
        """Note what an operator is given, before it runs. Returns the key of each tensor's storage by its ``id``.
        Raises ``CaptureError`` for a tensor of unknown origin."""
        keys: dict[int, int] = {}
        for tensor in given:
            if is_strided(tensor):
                keys[id(tensor)] = key = storage_key(tensor)
                if key not in self._made and key not in self.outside:
                    if func is not LIFT and self._is_unknown(key):
                        raise unsafe(
                            f"{func} is given a tensor of shape {tuple(tensor.shape)} that no operator of the call "
                            "made and that did not exist before; work outside of torch's dispatcher (numpy, ctypes, a "
                            "compiler) must be a break of a PIECEWISE capture, or an operator in C++"
                        )
                    self.outside[key] = tensor.detach()
        return keys

    def _is_unknown(self, key: int) -> bool:
        """Whether nobody knows where a storage comes from, though that matters."""
        if self._existed is None or key in self._made or key in self.outside:
            return False
        return not self._existed(key)

    def _note_results(
        self, func: OpOverload, kind: OperatorKind, given: list[torch.Tensor], returned: list[torch.Tensor]
    ) -> None:
        """Note the memory of what an operator returned."""
        if func is LIFT:  # its argument is what Python values were made into
            self.outside.pop(storage_key(given[0]), None)
        for tensor in returned:
            self._note_result(tensor, is_new=func is LIFT or kind is not OperatorKind.VIEW)

    def _note_result(self, tensor: torch.Tensor, is_new: bool) -> None:
        """Note the storage of a result, which the run has made unless it was there before. What no operator made new
        is somebody else's: inside of a sparse tensor, or of a storage that the code holds."""
        if not is_strided(tensor):
            return
        key = storage_key(tensor)
        if key not in self._made and key not in self.outside:
            if is_new:
                self._made[key] = StorageWeakRef(tensor.untyped_storage())
            else:
                self.outside[key] = tensor.detach()

    def made_storages(self) -> set[int]:
        """The keys of the storages that the run made and that something still holds."""
        return {key for key, weak in self._made.items() if not weak.expired()}

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether the run made the memory of a tensor that it gave back."""
        return is_strided(tensor) and storage_key(tensor) in self._made


_TAGGED = "is tagged cudagraph_unsafe; capture in PIECEWISE mode, where it is a break"


def why_not(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]) -> str | None:
    """Why no graph can hold an operator that is given these tensors, and is no break; None if one can."""
    return _TAGGED if is_unsafe(func) else forbidden(func, args, kwargs, given)
