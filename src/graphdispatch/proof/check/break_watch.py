"""The breaks of a PIECEWISE recording: each ends a graph, runs the marked part eagerly, and begins the next graph."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...backends.base import Capture, Graph
from ...backends.operators import (
    is_expanded,
    is_strided,
    storage_key,
    tensors_in,
    unsafe,
    user_line,
    written_tensors,
)
from ...errors import CaptureError
from ...reasons import Reason
from ...runtime.flatten import is_tensor
from ...runtime.protocols import CaptureRequest
from ..breaks import ACTIVE, breaks_at
from ..state.walk import StateWalk
from ..watch.memory import MemoryWatch, Runner
from .piecewise import EagerPart, PiecewiseGraph, change_of_given


class BreakWatch(MemoryWatch):
    """Watches a PIECEWISE recording, and runs its breaks.

    ``existing`` are the keys of the storages that existed before; the call may read these and what it makes itself.
    ``walk`` has met the Python objects that existed before.
    """

    def __init__(self, request: CaptureRequest, existing: set[int], walk: StateWalk) -> None:
        super().__init__(existing.__contains__)
        self._request = request
        self._walk = walk
        self._existing = existing
        self._parts: list[Graph | EagerPart] = []
        """The graphs and breaks so far."""
        self._part = 0
        self._part_of: dict[int, int] = {}
        self._in_break = False
        """Whether a break runs: what it makes is noted, and nothing is refused."""
        self._failed: str | None = None
        """The break that raised, if one did; nothing has been recorded since."""
        self._crossing: list[torch.Tensor] = []
        """Tensors that one part made and a later one used."""
        self._unreturned: dict[int, str] = {}
        """Storages that a break made and did not return, and its name; later parts must not use them."""
        self._returned: dict[int, EagerPart] = {}
        """The break that made a storage and returned it."""

    @contextmanager
    def watching(self, runner: Runner | None = None) -> Iterator[Self]:
        """As of ``MemoryWatch``, with the breaks."""
        token = ACTIVE.set(self.run_break)
        try:
            with super().watching(runner):
                yield self
        finally:
            ACTIVE.reset(token)
        if self._failed is not None:
            raise CaptureError(
                f"break {self._failed!r} raised and the callable went on; no graph can hold that",
                Reason.CAPTURE_UNSAFE,
            )

    def finished(self, graph: Graph) -> Graph:
        """All parts as one graph."""
        self._parts.append(graph)
        return PiecewiseGraph(self._parts, self._crossing, self._request.pool)

    def discard(self) -> None:
        """As of ``MemoryWatch``."""
        for part in self._parts:
            if isinstance(part, Graph):
                part.reset()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator as a break, if it is one, or watch it."""
        if not self._in_break and breaks_at(func):
            return self._heard(self.run_break, str(func), func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run_break(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End the current graph, run ``fn`` eagerly, begin the next graph. An inner break runs inside the outer one."""
        if self._in_break or self._failed is not None:
            return fn(*args, **kwargs)
        self._check_returned(args, kwargs)
        assert isinstance(self._runner, Capture)
        graph = self._runner.pause()
        self._parts.append(graph)
        if not self._request.backend.capture_executes:
            graph.replay()  # so that the break sees values, rather than memory that nothing has written yet
        before = self._existing | set(self._made)
        self._next_part()
        self._in_break = True
        try:
            objects = self._objects_given(name, fn, args, kwargs)
            leaves, spec = tree_flatten(fn(*args, **kwargs))
            if objects is not None and (change := objects.change()) is not None:
                raise CaptureError(change_of_given(name, change), Reason.STATE_REBOUND)
            leaves, made = self._checked_results(name, leaves, before)
        except BaseException:
            self._failed = name
            raise
        finally:
            self._in_break = False
        self._next_part(leaves)
        part = EagerPart(name, user_line(), fn, args, kwargs, leaves, spec, made, objects)
        self._parts.append(part)
        self._returned |= {storage_key(leaf): part for leaf, is_made in zip(leaves, made, strict=True) if is_made}
        self._runner.resume()
        return tree_unflatten(leaves, spec)

    def _objects_given(
        self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StateWalk | None:
        """See ``EagerPart.objects``. Raises ``CaptureError`` for objects that nobody can compare."""
        if isinstance(fn, OpOverload):  # it changes tensors alone
            return None
        given = [("its function", fn), *((f"argument {place}", one) for place, one in enumerate(args)), *kwargs.items()]
        with _disable_current_modes():
            objects = self._walk.beyond(given)
        if objects is not None and (objects.has_opaque or objects.overflow):
            raise CaptureError(
                f"break {name!r} is given objects that the call makes and nobody can compare, such as iterators; "
                "make them in the break",
                Reason.STATE_UNSEEN,
            )
        return objects

    def _checked_results(self, name: str, leaves: list[Any], before: set[int]) -> tuple[list[Any], list[bool]]:
        """The results of a break, and for each whether the break made it; ``before`` are the storages seen before it.

        Replays write to what the break made. So a copy replaces a tensor that no operator made (numpy, compiled code)
        and an expanded one, whose elements share memory. Raises ``CaptureError`` for tensors that are not dense.
        """
        results, made = [], []
        for leaf in leaves:
            is_made = False
            if is_tensor(leaf):
                if type(leaf) is not torch.Tensor or not is_strided(leaf):
                    what = f"{type(leaf).__name__} with layout {leaf.layout}"
                    raise CaptureError(f"break {name!r} returned a {what}; return dense tensors", Reason.CAPTURE_UNSAFE)
                is_made = storage_key(leaf) not in before
                if is_made and (is_expanded(leaf) or not self.made(leaf)):
                    leaf = leaf.clone(memory_format=torch.contiguous_format)
            results.append(leaf)
            made.append(is_made)
        unreturned = self._made.keys() - before - set(map(storage_key, tensors_in(results)))
        self._unreturned |= dict.fromkeys(unreturned, name)
        return results, made

    def watch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As of ``MemoryWatch``; notes what of one part another one uses."""
        tensors = tensors_in(*args, *kwargs.values())
        if self._part:
            self._note_crossing(tensors)
        if self._returned:
            for tensor in written_tensors(func, args, kwargs):
                if (part := self._returned.get(storage_key(tensor))) is not None:
                    part.is_written = True
        if not self._in_break:
            self._check_returned(tensors)
            return super().watch(func, args, kwargs)
        assert self._runner is not None
        result = self._runner.run(func, args, kwargs, tensors)
        for tensor in tensors_in(result):
            self._note_result(tensor, is_new=True)
        return result

    def _is_unknown(self, key: int) -> bool:
        """As of ``MemoryWatch``; a break may use any memory."""
        return not self._in_break and super()._is_unknown(key)

    def _check_returned(self, *trees: Any) -> None:
        """Raise ``CaptureError`` if a break made one of the tensors and did not return it: later parts would go on
        reading what the break made at the capture."""
        for tensor in tensors_in(*trees):
            name = self._unreturned.get(storage_key(tensor)) if is_strided(tensor) else None
            if name is not None:
                what = f"a tensor of shape {tuple(tensor.shape)} that break {name!r} made is used"
                self.give_up(unsafe(f"{what}, but the break did not return it; return it from the break"))

    def _next_part(self, given: Any = None) -> None:
        """Begin the next part of a PIECEWISE capture. ``given`` are tensors that the part so far hands over to it."""
        for tensor in tensors_in(given):
            self._note_result(tensor, is_new=True)
        self._part += 1

    def _note_crossing(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if is_strided(tensor) and self._part_of.get(storage_key(tensor), self._part) != self._part:
                self._crossing.append(tensor.detach())
                self._part_of[storage_key(tensor)] = self._part

    def _note_result(self, tensor: torch.Tensor, is_new: bool) -> None:
        """As of ``MemoryWatch``; notes which part made it."""
        if not is_strided(tensor):
            return
        key = storage_key(tensor)
        super()._note_result(tensor, is_new and key not in self._existing)
        if key in self._made:
            self._part_of.setdefault(key, self._part)
