"""Records a call on its static inputs: one graph, or in PIECEWISE mode graphs between breaks.

The operators are watched, on any backend: an error names the line, and tensors of unknown origin are refused. Torch's
dispatcher does not see some work (a compiled kernel, ctypes, numpy). Such work leaves tensors that no operator made and
that did not exist in the warm-up. A graph would read their first value for ever.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ...backends.base import Capture, Graph
from ...backends.operator_mode import OperatorMode
from ...backends.operators import (
    forbidden,
    is_expanded,
    is_strided,
    is_unsafe,
    storage_key,
    tensors_in,
    user_line,
    written_tensors,
)
from ...backends.tracing import uncached_casts
from ...errors import CaptureError
from ...reasons import Reason
from ...runtime.flatten import is_tensor
from ...runtime.outputs import copied_from
from ...runtime.request import CaptureRequest
from ..breaks import ACTIVE, BREAKS
from ..state.walk import StateWalk
from ..watch.effects import EffectRecorder, made_by_nobody, of_unknown_origin, tagged_unsafe
from .attempt import CaptureAttempt
from .eager_run import Recording, existing_storages, queries_capture
from .piecewise import EagerPart, PiecewiseGraph, change_of_given


class CaptureWatch(OperatorMode):
    """Watches one recording, and in PIECEWISE mode runs breaks eagerly: each ends a graph and begins the next one.

    Enter ``recording`` around the callable. ``existing`` are the keys of the storages that existed before; the call may
    read these and what it makes itself. ``walk`` has met the Python objects that existed before.
    """

    def __init__(self, request: CaptureRequest, existing: set[int], walk: StateWalk) -> None:
        super().__init__()
        self._request = request
        self._walk = walk
        self._capture: Capture | None = None
        self._existing = existing
        self._breaks = request.is_piecewise
        self.parts: list[Graph | EagerPart] = []
        """The graphs and breaks so far."""
        self._made: dict[int, StorageWeakRef] = {}
        self._part = 0
        self._part_of: dict[int, int] = {}
        self._is_paused = False
        """True while a break runs: what it makes is noted, and nothing is refused."""
        self._failed: str | None = None
        """The break that raised, if one did; nothing has been recorded since."""
        self.crossing: list[torch.Tensor] = []
        """Tensors that one part made and a later one used."""
        self._unreturned: dict[int, str] = {}
        """Storages that a break made and did not return, and its name; later parts must not use them."""
        self._returned: dict[int, EagerPart] = {}
        """The break that made a storage and returned it."""
        self.latest: object = "nothing"
        """The operator that ran last."""

    @contextmanager
    def recording(self, capture: Capture) -> Iterator[None]:
        """Watch what the block does, to be entered within this capture."""
        self._capture = capture
        token = ACTIVE.set(self.run_break) if self._breaks else None
        try:
            with capture.watching(self):
                yield
        finally:
            if token is not None:
                ACTIVE.reset(token)
        self.check_refused()
        if self._failed is not None:
            raise CaptureError(
                f"break {self._failed!r} raised and the callable went on; no graph can hold that",
                Reason.CAPTURE_UNSAFE,
            )

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator as a break, if it is one, or watch it."""
        if type(func) is not OpOverload and isinstance(func, HigherOrderOperator):
            return super().__torch_dispatch__(func, types, args, kwargs)
        is_break = bool(BREAKS and func._schema.name in BREAKS) or is_unsafe(func)
        if is_break and self._breaks and not self._is_paused:
            return self._heard(self.run_break, str(func), func, args, kwargs or {})
        if is_break and is_unsafe(func) and not self._is_paused:
            self.give_up(tagged_unsafe(func))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run_break(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End the current graph, run ``fn`` eagerly, begin the next graph. An inner break runs inside the outer one."""
        if self._is_paused or self._failed is not None:
            return fn(*args, **kwargs)
        if self._unreturned:
            self._check_returned(args, kwargs)
        assert self._capture is not None
        graph = self._capture.pause()
        self.parts.append(graph)
        if not self._request.backend.capture_executes:
            graph.replay()  # so that the break sees values, rather than memory that nothing has written yet
        before = self._existing | set(self._made)
        self._next_part()
        self._is_paused = True
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
            self._is_paused = False
        self._next_part(leaves)
        part = EagerPart(name, user_line(), fn, args, kwargs, leaves, spec, made, objects)
        self.parts.append(part)
        self._returned |= {storage_key(leaf): part for leaf, is_made in zip(leaves, made, strict=True) if is_made}
        self._capture.resume()
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
                if is_made and (is_expanded(leaf) or not self._has_seen(leaf)):
                    leaf = leaf.clone(memory_format=torch.contiguous_format)
            results.append(leaf)
            made.append(is_made)
        unreturned = self._made.keys() - before - set(map(storage_key, tensors_in(results)))
        self._unreturned |= dict.fromkeys(unreturned, name)
        return results, made

    def look_inside(self, func: OpOverload, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Watch what an operator's Python kernel runs, and refuse a result of unknown origin."""
        self.latest = func
        assert self._capture is not None
        result = self._capture.look_inside(self, func, key, args, kwargs)
        for tensor in tensors_in(result):
            if not self._is_paused and is_strided(tensor) and not self._has_seen(tensor):
                raise made_by_nobody(func, tensor)
            self._note(tensor)
        return result

    def watch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check one operator's arguments, then run it."""
        self.latest = func
        if func is _LIFT:
            self._note(args[0])
        tensors = tensors_in(*args, *kwargs.values())
        if self._part:
            self._note_crossing(tensors)
        if self._returned:
            for tensor in written_tensors(func, args, kwargs):
                if (part := self._returned.get(storage_key(tensor))) is not None:
                    part.is_written = True
        if not self._is_paused:
            self._check(func, args, kwargs, tensors)
        assert self._capture is not None
        result = self._capture.run(func, args, kwargs, tensors)
        for tensor in tensors_in(result):
            self._note(tensor)
        return result

    def _check(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> None:
        if self._unreturned:
            self._check_returned(tensors)
        why = forbidden(func, args, kwargs, tensors)
        if why is not None:
            raise CaptureError(f"{func} {why}; at {user_line()}", Reason.CAPTURE_UNSAFE)
        made, existing = self._made, self._existing
        for tensor in tensors:
            if is_strided(tensor) and (key := storage_key(tensor)) not in made and key not in existing:
                raise of_unknown_origin(func, tensor)

    def _check_returned(self, *trees: Any) -> None:
        """Raise ``CaptureError`` if a break made one of the tensors and did not return it: later parts would go on
        reading what the break made at the capture."""
        for tensor in tensors_in(*trees):
            name = self._unreturned.get(storage_key(tensor)) if is_strided(tensor) else None
            if name is not None:
                self.give_up(
                    CaptureError(
                        f"a tensor of shape {tuple(tensor.shape)} that break {name!r} made is used at {user_line()}, "
                        "but the break did not return it; return it from the break",
                        Reason.CAPTURE_UNSAFE,
                    )
                )

    def _next_part(self, given: Any = None) -> None:
        """Begin the next part of a PIECEWISE capture. ``given`` are tensors that the part so far hands over to it."""
        for tensor in tensors_in(given):
            self._note(tensor)
        self._part += 1

    def _note_crossing(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if is_strided(tensor) and self._part_of.get(storage_key(tensor), self._part) != self._part:
                self.crossing.append(tensor.detach())
                self._part_of[storage_key(tensor)] = self._part

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether the captured call made the memory of ``tensor``."""
        return storage_key(tensor) in self._made

    def _has_seen(self, tensor: torch.Tensor) -> bool:
        """Whether the call made the memory of ``tensor``, or it existed before."""
        key = storage_key(tensor)
        return key in self._made or key in self._existing

    def _note(self, tensor: torch.Tensor) -> None:
        if is_strided(tensor) and (key := storage_key(tensor)) not in self._made and key not in self._existing:
            self._made[key], self._part_of[key] = StorageWeakRef(tensor.untyped_storage()), self._part


_LIFT = torch.ops.aten.lift_fresh.default


def record_watched(
    request: CaptureRequest,
    effects: EffectRecorder,
    values: Sequence[Any],
    open_outputs: Callable[[Any], Any],
    existed: Callable[[int], bool] | None = None,
    tracing: AbstractContextManager[Any] | None = None,
    check: Callable[[Any], None] = lambda _: None,
) -> tuple[Any, Recording]:
    """Run the call on its static inputs, watched by ``effects``, and record it: on a backend whose capture executes.

    Gives its opened output, with copies of what lies in the graph's memory. Raises what the call raises, and
    ``CaptureError`` for what no graph holds. ``existed`` as in ``EffectRecorder.saving_host_access``; ``tracing`` is
    entered around the call, and ``check`` looks at its opened output.
    """
    buffers = request.buffer_storages()
    with request.backend.begin_capture(request.pool) as capture:
        with effects.saving_host_access(capture, existed), tracing or nullcontext():
            output = copy_context().run(request.call, values)
        effects.check_refused()
        output = open_outputs(output)
        check(output)
        effects.note_outputs(output)
        with _disable_current_modes():
            answer = tree_map_only(torch.Tensor, lambda one: _copied(one) if effects.made(one) else one, output)
        described = _give_outputs(request, capture, values, buffers, output, (effects.made, output))
        del output  # so that only the capture holds the outputs
    return answer, Recording(capture.graph, capture.outputs, *described)


def record_at_once(attempt: CaptureAttempt) -> Recording:
    """Record the call in the run that warms up, on a backend whose capture executes. Raises ``CaptureError``."""
    request, eager = attempt.request, attempt.eager

    def run(effects: EffectRecorder, values: Sequence[Any]) -> tuple[Any, Recording]:
        before = map(storage_key, filter(is_strided, (*tensors_in(values), *request.tensors)))
        existed = existing_storages(eager.trace.walk, eager.effects.outside, eager.effects.made_storages(), before)
        reads = queries_capture(eager.trace) or eager.metadata_read(compares=bool(eager.effects.equated))
        is_traced = eager.like is None and bool(request.is_padded or request.has_gaps or reads)
        return record_watched(
            request, effects, values, eager.open_outputs, existed, attempt.tracing() if is_traced else None
        )

    try:
        recording: Recording = attempt.warm_up(run)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"{type(error).__name__}: {error}", request.backend.classify_error(error)) from error
    return recording


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def record(attempt: CaptureAttempt) -> Recording:
    """Record the call.

    Neither operators nor code are watched where the eager run on the same inputs was the warm-up and did what the
    run of a graph did: then the outputs lie where eager's did. Else the eager run's trace notes the code that the call
    runs. The recording begins where the eager run began. Raises ``CaptureError`` with the operator that ran last.
    """
    request, eager = attempt.request, attempt.eager
    attempt.start_over(f"capturing {request.size} rows")
    attempt.runs_code = True
    values, buffers = request.static_values(), request.buffer_storages()
    existing = set(attempt.warm_run.outside) | attempt.warm_run.made_storages()
    existing |= {storage_key(value) for value in values if is_tensor(value)}
    watch = CaptureWatch(request, existing, eager.trace.walk)
    watches = request.is_piecewise or not (eager.like is not None and eager.warms_up)
    try:
        begin, watched = request.backend.begin_capture, watch.recording if watches else nullcontext
        with uncached_casts(), begin(request.pool) as capture, watched(capture):
            # The trace is here, since the end of a capture runs much Python that reads nothing.
            with attempt.tracing() if watches else nullcontext():
                output = copy_context().run(request.call, values)  # nobody could unset a context variable
            output = eager.open_outputs(output)
            source = (watch.made, output) if watches else (eager.effects.made, eager.opened)
            described = _give_outputs(request, capture, values, buffers, output, source)
            del output, source  # so that only the capture holds the outputs
        watch.parts.append(capture.graph)
        eager.check_state()
        graph = capture.graph
        if request.is_piecewise:
            graph = PiecewiseGraph(watch.parts, watch.crossing, request.pool)
        return Recording(graph, capture.outputs, *described)
    except BaseException as error:
        for part in watch.parts:
            if isinstance(part, Graph):
                part.reset()
        if isinstance(error, CaptureError) or not isinstance(error, Exception):
            raise
        refused, watch.refused = watch.refused, None
        if refused is not None:
            raise refused from error
        raise CaptureError(
            f"{type(error).__name__} after {watch.latest}: {error}", request.backend.classify_error(error)
        ) from error


def _give_outputs(
    request: CaptureRequest,
    capture: Capture,
    values: Sequence[Any],
    buffers: set[int],
    output: Any,
    source: tuple[Callable[[torch.Tensor], bool], Any],
) -> tuple[list[bool], list[int], list[int | None]]:
    """Give the capture what the call on these values returned. For each output tensor: what ``Recording`` says of it;
    ``source`` tells of a run's outputs whether that run made them."""
    made, sources = source
    is_own = [made(tensor) or storage_key(tensor) in buffers for tensor in tensors_in(sources)]
    places = list(map(id, tensors_in(output)))
    firsts = list(map(places.index, places))
    positions = {id(value): position for position, value in enumerate(values)}
    given = list(map(positions.get, places))
    if request.options.outputs != "clone":
        output = copied_from(buffers, output)
    capture.set_outputs(output, shared=request.options.shares_outputs)
    return is_own, firsts, given
