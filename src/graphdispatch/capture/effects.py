"""Saves what a run writes to memory that it did not make, so that the write can be undone, and done again.

Note [exactly once]
    A call that captures runs the callable several times: eagerly, to warm up, to record (on backends whose capture
    executes), as a first replay. The caller must see the effects of one run, on the batch as it was given. Each run
    of Python is therefore watched at torch's dispatcher: before an operator first writes to memory that the run did
    not make itself, the recorder saves what is about to be overwritten. Undoing restores in reverse order. Only the
    written part is saved (for an indexed write, the indexed rows), so a large cache costs what a step writes to it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Self

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from ..backends.base import Backend
from ..backends.compiled import CompiledRegion, PythonCalls
from ..backends.insight import OperatorMode, python_kernel, run_kernel
from ..backends.operators import (
    OperatorKind,
    check_geometry,
    draws,
    geometry,
    is_strided,
    kind_of,
    storage_key,
    tensors_in,
    view_key,
    written_tensors,
)
from ..backends.standins import EXPOSED, HostReads, Listening
from ..errors import CaptureError
from ..memory.program import Labels, Operator
from ..reasons import Reason
from .regions import Region, indexed_region, save_exposed


def undo(regions: list[Region]) -> None:
    """Put back what all regions held before the run that made them."""
    with torch.no_grad():
        for region in reversed(regions):
            region.write(region.before)


def redo(regions: list[Region]) -> None:
    """Write again what all regions held after the run that made them."""
    with torch.no_grad():
        for region in regions:
            if region.after is not None:
                region.write(region.after)


def retry_once(put_back: Callable[[], None], backend: Backend) -> None:
    """Call a function that writes saved values. If it fails or is interrupted, call it once more: to write the same
    values twice does no harm.

    Raises what the second call raises, or ``DeviceLostError`` if nothing works on the device any more.
    """
    try:
        put_back()
    except BaseException as first:
        try:
            put_back()
        except Exception as error:
            backend.raise_if_lost(error)
            raise
        if not isinstance(first, Exception):
            raise


class EffectRecorder(OperatorMode):
    """Watches one run of a callable: saves what it overwrites, and notes the memory that it uses and did not make.

    ``limit_bytes`` bounds what is saved. If the limit is passed, or saving fails, the run goes on undisturbed but can
    no longer be undone, and ``unsaved`` says why. ``strict`` is for runs that must be undone: the error is raised
    before the write happens. With ``labels`` it keeps the ``operators``.
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        strict: bool = False,
        labels: Labels | None = None,
    ) -> None:
        super().__init__()
        self.regions: list[Region] = []
        self.unsaved: Exception | None = None
        self.uses_rng = False
        """Whether the run drew from a random generator."""
        self.reserves_memory = False
        """Whether the run made memory that it did not write at once; see ``unwritten``."""
        self.runs_custom = False
        """Whether it ran an operator of somebody else's, which may draw without saying so."""
        self.limits_values = False
        """Whether it may fail for numbers unlike those of the batch: it checks data, or made integers or probabilities
        of floating-point numbers. On a GPU such a failure ends the process's use of the device."""
        self.groups_rows = False
        """Whether it multiplied groups of rows whose sizes are data, so that the bits of a row follow its group."""
        self.operators: list[Operator] = []
        """What it ran, if there are labels for its tensors."""
        self._labels = labels
        self.outside: dict[int, torch.Tensor] = {}
        """One tensor for each storage that the run used and did not make, by the storage's key."""
        self._limit = limit_bytes
        self._strict = strict
        self._saved = 0
        self._made: dict[int, StorageWeakRef] = {}
        self._saved_views: set[tuple[Any, ...]] = set()
        self._generators: dict[int, torch.Generator] = {}
        self.exposed: list[Region] = []

    @contextmanager
    def guarding(self) -> Iterator[Self]:
        """Enter it, and save what the host's code gets hold of (``regions.save_exposed``)."""
        try:
            with Listening(self._save_exposed, EXPOSED), self:
                yield self
        finally:
            self._save_exposed("", None)

    def look_inside(self, func: OpOverload, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator's Python kernel and save what the operators inside it overwrite.

        What the schema marks as written is saved as a whole. That copy is dropped if an operator inside was seen to
        write there, and the kernel could have done so in no other way: a device runs kernels that no mode sees.
        """
        start, saved, views = len(self.regions), self._saved, set(self._saved_views)
        hidden: list[str] = []
        self._save_written(func, args, kwargs)
        marked, self.regions[start:] = self.regions[start:], []
        self._saved_views = views
        try:
            with HostReads(lambda name, _: hidden.append(name)), self:
                result = run_kernel(func, key, args, kwargs)
        except BaseException:
            hidden.append("")
            raise
        finally:
            seen = {storage_key(region.target) for region in self.regions[start:]}
            self.regions[start:start] = [
                region
                for region in marked
                if hidden or region.target.device.type != "cpu" or storage_key(region.target) not in seen
            ]
            self._saved = saved + sum(region.before.nbytes for region in self.regions[start:])
        for tensor in tensors_in(result):
            self._note_made(tensor)
        return result

    def watch_region(self, region: CompiledRegion, args: tuple[Any, ...]) -> Any:
        """Save what compiled code overwrites. Python inside it would not be frozen, so no graph may hold that."""
        before = torch.get_rng_state()
        with PythonCalls(python_kernel) as inside:
            result = super().watch_region(region, args)
        is_hidden = len(args) > 1 and isinstance(args[1], torch.Tensor) and args[1].device.type != "cpu"
        self.uses_rng |= is_hidden
        self.limits_values |= is_hidden
        self.uses_rng |= not torch.equal(before, torch.get_rng_state())
        if inside.names:
            self.give_up(
                CaptureError(
                    f"compiled code calls {inside.names[0]!r}, an operator in Python; split the compiled graph there "
                    "(vLLM's splitting_ops do), or register it in C++",
                    Reason.CAPTURE_UNSAFE,
                )
            )
        return result

    def watch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Save what the operator is about to overwrite, then run it."""
        kind, made, outside = kind_of(func), self._made, self.outside
        used = set[int]()
        for tensor in tensors_in(*args, *kwargs.values()):
            if is_strided(tensor):
                used.add(key := storage_key(tensor))
                if key not in made and key not in outside:
                    outside[key] = tensor.detach()
        if kind not in _COMPUTES:
            self.runs_custom = self.runs_custom or func.namespace not in ("aten", "prims")
        if self._labels is not None:
            self.operators.append(self._labels.operator(func, args, kwargs))
        shapes = []
        if kind is OperatorKind.WRITE:
            written = written_tensors(func, args, kwargs)
            shapes = [(tensor, geometry(tensor)) for tensor in written if storage_key(tensor) not in made]
            self._save_written(func, args, kwargs)
        if draws(func, args, kwargs):
            self.uses_rng = True
            self._save_generators(args, kwargs)
        result = func(*args, **kwargs)
        if shapes:
            try:
                check_geometry(func, shapes)
            except CaptureError as error:
                self.give_up(error)
        if _is_particular(func):
            self.groups_rows |= func._schema.name in _GROUPING
            self.limits_values = self.limits_values or _limits_values(func, args, result)
        # Where torch fills new memory, eager's answer may hold that.
        if kind is OperatorKind.EMPTY and not _fills_new_memory():
            _mark_unwritten(result)
            self.reserves_memory = True
        if func is _LIFT:  # its argument is what Python values were made into
            outside.pop(storage_key(args[0]), None)
        made_tensors = tensors_in(result)
        if self._labels is not None:
            self._labels.note_made(made_tensors, used)
        for tensor in made_tensors:
            self._note_made(tensor)
        return result

    def give_up(self, error: CaptureError) -> None:
        """Note that the run cannot be captured; raise that if the run must be undone."""
        self.unsaved = self.unsaved or error
        if self._strict:
            raise error

    def _note_made(self, tensor: torch.Tensor) -> None:
        if is_strided(tensor) and (key := storage_key(tensor)) not in self._made and key not in self.outside:
            self._made[key] = StorageWeakRef(tensor.untyped_storage())

    def unwritten(self, value: torch.Tensor) -> torch.Tensor | None:
        """Which elements of a value that the run left hold what ``torch.empty`` gave, as nothing wrote them; or None.

        Types of one byte are not tested: too many of their values look like that.
        """
        if not self.reserves_memory or value.dtype.itemsize == 1 or not is_strided(value):
            return None
        size = value.dtype.itemsize
        marked = (
            value.detach()
            .resolve_conj()
            .resolve_neg()
            .reshape(-1, 1)
            .clone(memory_format=torch.contiguous_format)
            .view(torch.uint8)
            == _UNWRITTEN
        )
        found = marked.view(-1, size).all(1).view(value.shape)
        return found if bool(found.any()) else None

    def made_storages(self) -> set[int]:
        """The keys of the storages that the run made and that something still holds."""
        return {key for key, weak in self._made.items() if not weak.expired()}

    def writes_to(self, tensor: torch.Tensor) -> bool:
        """Whether the run wrote to the memory of ``tensor``."""
        key = storage_key(tensor)
        return any(storage_key(region.target) == key for region in self.regions)

    def _save_written(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in written_tensors(func, args, kwargs):
            try:
                self._save(func, tensor, args)
            except Exception as error:
                self.unsaved = self.unsaved or error
                if self._strict:
                    raise

    def _save(self, func: OpOverload, tensor: torch.Tensor, args: tuple[Any, ...]) -> None:
        view = (storage_key(tensor), *view_key(tensor))
        if storage_key(tensor) in self._made or tensor.numel() == 0 or view in self._saved_views:
            return
        region = indexed_region(func, args) if tensor is args[0] else None
        size = tensor.nbytes if region is None else region.before.nbytes
        if self._saved + size > self._limit:
            raise CaptureError(
                f"{func} writes to a tensor of shape {tuple(tensor.shape)} that the call does not own; saving it "
                f"takes {self._saved + size} bytes in all, above state_limit_bytes={self._limit}; raise the limit",
                Reason.STATE_TOO_LARGE,
            )
        target = tensor.detach()
        self.regions.append(region or Region(target, lambda: target, target.copy_, target.clone()))
        self._saved += size
        if region is None:
            self._saved_views.add(view)

    def _save_exposed(self, name: str, value: Any) -> None:
        if name or self.exposed:
            self._saved += save_exposed(self, name, value, self._saved_views, self._made, self._limit - self._saved)

    def _save_generators(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A generator of the model's own is state, and saved here. Whoever runs the call puts the default one back."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and id(value) not in self._generators:
                self._generators[id(value)] = value
                state = value.get_state()
                self.regions.append(Region(state, value.get_state, value.set_state, state, is_generator=True))


_COMPUTES = (OperatorKind.PURE, OperatorKind.VIEW)
_LIFT = torch.ops.aten.lift_fresh.default
_CHECKING = frozenset(("aten::_assert_async", "aten::multinomial", "aten::bernoulli", "aten::binary_cross_entropy"))
"""Operators that check data on the device."""
_CONVERTING = frozenset(("aten::_to_copy", "aten::copy_", "aten::view"))
"""Those that may make integers of floating-point numbers."""
_GROUPING = frozenset(("aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"))
"""Those that multiply groups of rows whose sizes are data."""


@cache
def _is_particular(func: OpOverload) -> bool:
    return func._schema.name in _CHECKING | _CONVERTING | _GROUPING


def _limits_values(func: OpOverload, args: tuple[Any, ...], result: Any) -> bool:
    """Whether an operator checks data on the device, or makes integers of floating-point numbers."""
    name = func._schema.name
    if name not in _CONVERTING:
        return name in _CHECKING
    if not isinstance(result, torch.Tensor) or result.is_floating_point() or result.is_complex():
        return False
    return result.dtype is not torch.bool and args[int(name == "aten::copy_")].is_floating_point()


def _fills_new_memory() -> bool:
    return torch._C._get_deterministic_algorithms() and torch._C._get_deterministic_fill_uninitialized_memory()


_UNWRITTEN = 0x5B


def _mark_unwritten(made: Any) -> None:
    """Fill new memory with one byte, so that it shows later what was never written."""
    if isinstance(made, torch.Tensor) and is_strided(made) and made.dtype.itemsize > 1:
        torch.empty(0, dtype=torch.uint8, device=made.device).set_(made.untyped_storage()).fill_(_UNWRITTEN)
