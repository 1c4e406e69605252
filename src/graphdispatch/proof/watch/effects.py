"""Saves what a run writes to memory that it did not make, so that the write can be undone, and done again.

Note [exactly once]
    A call that captures runs the callable several times: eagerly, to warm up, to record (on backends whose capture
    executes), as a first replay. The caller must see the effects of one run, on the batch as it was given. Each run
    of Python is therefore watched at torch's dispatcher: before an operator first writes to memory that the run did
    not make itself, the recorder saves what is about to be overwritten. Undoing restores in reverse order. Only the
    written part is saved (for an indexed write, the indexed rows), so a large cache costs what a step writes to it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, Self

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ...backends.base import Backend
from ...backends.code_events import pause, resume
from ...backends.host_reads import EXPOSED, HostReads, Listening, given_to_host
from ...backends.operator_mode import CompiledRegion, PythonCalls
from ...backends.operators import (
    WRITTEN_PLACES,
    OperatorKind,
    as_integers,
    bits_equal,
    check_geometry,
    draws,
    geometry,
    is_seeded,
    is_strided,
    keeps_elements,
    kind_of,
    per_operator,
    storage_key,
    tensors_in,
    unsafe,
    view_key,
    written_tensors,
)
from ...errors import CaptureError, error_of_signal
from ...reasons import Reason
from .memory import MemoryWatch, Runner, why_not
from .operator_trace import OperatorTrace, TensorNames


@dataclass(eq=False)
class Region:
    """A written part of memory, or the state of a random generator that the call was given; and what it held before."""

    target: torch.Tensor
    before: torch.Tensor
    indices: Sequence[torch.Tensor | None] = ()
    """For each dimension of ``target``, in order, the indices that it takes; None, or none left, takes all."""
    generator: torch.Generator | None = None
    after: torch.Tensor | None = None
    """What it held after the run; None until a caller that may ``redo`` the run sets it."""

    @property
    def is_generator(self) -> bool:
        """Whether it is the state of a random generator, rather than memory of a tensor."""
        return self.generator is not None

    def read(self) -> torch.Tensor:
        """What it holds now; memory itself, where that is a whole tensor."""
        if self.generator is not None:
            return self.generator.get_state()
        self._check_memory()
        return _elements(self.target, self.indices) if self.indices else self.target

    def write(self, value: torch.Tensor) -> None:
        """Have it hold this."""
        if self.generator is not None:
            self.generator.set_state(value)
            return
        self._check_memory()
        with torch.inference_mode(self.target.is_inference()), torch.no_grad():
            if self.indices:
                torch.ops.aten.index_put_.default(self.target, self.indices, value)
            else:
                self.target.copy_(value)

    def _check_memory(self) -> None:
        """Raise ``CaptureError`` where the storage has become too small to be read: somebody has freed it."""
        spans = zip(self.target.shape, self.target.stride(), strict=True)
        last = self.target.storage_offset() + sum((extent - 1) * stride for extent, stride in spans)
        if self.target.numel() and self.target.untyped_storage().nbytes() < (last + 1) * self.target.itemsize:
            raise CaptureError("the memory of a tensor that the call writes was freed (resize_)", Reason.CAPTURE_UNSAFE)


_elements = torch.ops.aten.index.Tensor


def _indexed_region(func: OpOverload, args: tuple[Any, ...], tensor: torch.Tensor) -> Region | None:
    """What an indexed write touches of a tensor, or None if the operator writes the whole tensor.

    The indices are copied: their memory may hold other values by the time the region is put back.
    """
    given: Sequence[torch.Tensor | None] = []
    if (places := WRITTEN_PLACES.get(func._schema.name)) is not None:
        given = places(tensor, args)
    elif tensor is args[0] and tensor.dim():
        given = _written_places(func._schema.name.removeprefix("aten::"), args)
    indices = [None if i is None else i.clone() for i in given]
    return Region(tensor.detach(), _elements(tensor.detach(), indices), indices) if indices else None


def _written_places(name: str, args: tuple[Any, ...]) -> Sequence[torch.Tensor | None]:
    """The indices at which an operator writes to its first argument; empty if that is all of it."""
    target = args[0]
    if name in ("index_put_", "_index_put_impl_"):
        given: Sequence[torch.Tensor | None] = args[1]
        return given
    if name == "embedding_renorm_":
        return [args[1]]
    if name in ("masked_fill_", "masked_scatter_"):
        return [args[1].expand(target.shape)]
    if name == "put_":
        return [args[1] // prod(target.shape[dim + 1 :]) % extent for dim, extent in enumerate(target.shape)]
    if name in ("index_copy_", "index_add_", "index_fill_", "index_reduce_"):
        return [*[None] * (args[1] % target.dim()), args[2]]
    if name in ("scatter_", "scatter_add_", "scatter_reduce_"):
        index, places = args[2], range(target.dim())
        every = [torch.arange(index.shape[dim], device=index.device) for dim in places]
        shaped = [one.view([-1 if dim == place else 1 for dim in places]) for place, one in enumerate(every)]
        return [index if place == args[1] % target.dim() else one for place, one in enumerate(shaped)]
    return []


def _exposed_memory(value: Any) -> torch.Tensor | None:
    """The memory that the host's code gets hold of with a tensor or storage: of one on the CPU, with values."""
    is_storage = isinstance(value, torch.UntypedStorage)
    is_plain = isinstance(value, torch.Tensor) and type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not (is_storage or (is_plain and is_strided(value))) or value.device.type != "cpu":
        return None
    memory: torch.Tensor
    if is_storage or torch._debug_has_internal_overlap(value) == 1:  # nothing can be written to such a tensor
        memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(value if is_storage else value.untyped_storage())
    else:
        memory = value.detach()
    return memory


def first_uncovered(regions: list[Region], allowed: list[Region]) -> Region | None:
    """The first region with an element that no region of ``allowed`` covers, or None.

    Compares where the regions lie, not what they hold. Reads a result back to the host.
    """
    for region in (region for region in regions if not region.is_generator):
        target = region.target
        near = [r for r in allowed if storage_key(r.target) == storage_key(target) and r.target.dtype is target.dtype]
        if any(not r.indices and view_key(r.target) == view_key(target) for r in near):
            continue
        if not _are_covered(element_offsets(region), [element_offsets(other) for other in near]):
            return region
    return None


def first_uncovered_within(
    buffer: torch.Tensor, regions: list[Region], argument: torch.Tensor, allowed: list[Region]
) -> Region | None:
    """The first of the ``regions`` of a buffer with an element that no region of ``allowed`` covers in the argument
    that was copied there, or None. They may lie in memory in different ways. Reads a result back to the host."""
    near = [region for region in allowed if storage_key(region.target) == storage_key(argument)]
    if any(not region.indices and region.target.numel() == argument.numel() for region in near):
        return None
    covered = [_places(region, argument) for region in near if region.target.dtype is argument.dtype]
    for region in (region for region in regions if storage_key(region.target) == storage_key(buffer)):
        if region.target.dtype is not buffer.dtype or not _are_covered(_places(region, buffer), covered):
            return region
    return None


def _are_covered(places: torch.Tensor, covered: list[torch.Tensor]) -> bool:
    return bool(covered) and bool(torch.isin(places, torch.cat(covered)).all())


def _places(region: Region, whole: torch.Tensor) -> torch.Tensor:
    """Which elements of a tensor without overlaps a region covers, counted by its dimensions in order."""
    order = torch.arange(whole.numel(), device=whole.device).view(whole.shape)
    places = torch.full((whole.untyped_storage().nbytes() // whole.itemsize,), -1, device=whole.device)
    places.as_strided(whole.shape, whole.stride(), whole.storage_offset()).copy_(order)
    return places[element_offsets(region)]


def element_offsets(region: Region) -> torch.Tensor:
    """Where its elements lie in the storage: offsets in elements, in no particular order."""
    wanted: list[torch.Tensor | None] = []
    for index in region.indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        wanted += index.nonzero().unbind(1) if index is not None and is_mask else [index]
    target = region.target
    whole = torch.zeros(1, dtype=torch.int64, device=target.device)
    picked = torch.full_like(whole, int(target.storage_offset()))
    for dim, (extent, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        index = wanted[dim] if dim < len(wanted) else None
        if index is None:
            steps = torch.arange(extent, device=target.device) * stride
            whole = (whole[:, None] + steps).reshape(-1)
        else:
            picked = torch.add(picked, index % extent, alpha=stride)
    return (whole[:, None] + picked.reshape(-1)).reshape(-1)


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
        if not isinstance(first, Exception) or error_of_signal(first) is not None:
            raise


_is_float = attrgetter("is_floating_point")


class Ending(NamedTuple):
    """How the watch of a run ends that itself goes on, once no graph can be made of it."""

    on_end: Callable[[Exception], None]
    """Gets the reason, there and then."""
    is_due: Callable[[OpOverload | None, bool], bool] | None = None
    """Whether what no graph can hold ends it where the code is now: this operator, which may run in the Python kernel
    of another one; or, for None, a read by the host's code. Without it that is not looked at."""


class EffectRecorder(MemoryWatch):
    """Watches one run of a callable, as ``MemoryWatch``, and saves what it overwrites.

    ``limit_bytes`` bounds what is saved. If the limit is passed, or saving fails, the run can no longer be undone, and
    ``given_up`` says why; it goes on undisturbed, and nothing more is watched. ``strict`` is for runs that must be
    undone: the error is raised before the write happens. With ``tensor_names`` it keeps its operators; ``ending`` is
    for the caller's own run.
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        strict: bool = False,
        tensor_names: TensorNames | None = None,
        existed: Callable[[int], bool] | None = None,
        ending: Ending | None = None,
    ) -> None:
        super().__init__(existed)
        self.regions: list[Region] = []
        self.given_up: Exception | None = None
        """Why no graph can be made of the run, if so; nothing of it was watched since."""
        self.uses_rng = False
        """Whether the run drew from a random generator."""
        self.reserves_memory = False
        """Whether the run made memory that it did not write at once; see ``unwritten``."""
        self.runs_custom = False
        """Whether it ran an operator of somebody else's, which may draw without saying so."""
        self._may_have_written = False
        """Whether an operator writes to memory that the run did not make, by its schema and be it no element, or the
        host's code got hold of such memory."""
        self.opaque: dict[tuple[Any, ...], torch.Tensor] = {}
        """What operators of somebody else's, or kernels, may have written, anywhere in it: views, by their keys."""
        self.dispatched = OperatorTrace()
        """What it showed of its operators."""
        self._tensor_names = tensor_names
        self.equated: set[tuple[int, ...]] = set()
        """Pairs of tensors, by ``id``, whose numbers it compared. Python does so with the entries of containers, unless
        they are one object."""
        self._limit = limit_bytes
        self._strict = strict
        self._saved = 0
        self._saved_views: set[tuple[Any, ...]] = set()
        self._generators: dict[int, torch.Generator] = {}
        self._exposed: list[Region] = []
        self._is_inside = False
        """Whether an operator's Python kernel is running."""
        self._on_end, self._is_due = ending or Ending(lambda _: None)

    @contextmanager
    def watching(self, runner: Runner | None = None) -> Iterator[Self]:
        """As of ``MemoryWatch``; saves what the host's code gets hold of, too."""
        reads = HostReads(self._refuse_read) if self._is_due is not None else nullcontext()
        try:
            with Listening(self._save_exposed, EXPOSED), reads, super().watching(runner):
                yield self
        finally:
            self._save_exposed("", None)
        if self._strict and self.given_up is not None:  # the callable caught it
            raise self.given_up

    def look_inside(self, func: OpOverload, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator's Python kernel and save what the operators inside it overwrite.

        What the schema marks as written is saved as a whole. That copy is dropped if an operator inside was seen to
        write there, and the kernel could have done so in no other way: a device runs kernels that no mode sees.
        """
        start, saved, views = len(self.regions), self._saved, set(self._saved_views)
        hidden: list[str] = []
        was_inside, self._is_inside = self._is_inside, True
        self._save_written(func, args, kwargs)
        marked, self.regions[start:] = self.regions[start:], []
        self._saved_views = views
        try:
            with HostReads(lambda name, _: hidden.append(name)):
                return super().look_inside(func, key, args, kwargs)
        except BaseException:
            hidden.append("")
            raise
        finally:
            self._is_inside = was_inside
            seen = {storage_key(region.target) for region in self.regions[start:]}
            self.regions[start:start] = [
                region
                for region in marked
                if hidden or region.target.device.type != "cpu" or storage_key(region.target) not in seen
            ]
            self._saved = saved + sum(region.before.nbytes for region in self.regions[start:])

    def watch_region(self, region: CompiledRegion, args: tuple[Any, ...]) -> Any:
        """Save what compiled code overwrites. Python inside it would not be frozen, so no graph may hold that."""
        before, self.dispatched.has_regions = torch.get_rng_state(), True
        with PythonCalls() as inside:
            result = super().watch_region(region, args)
        # What it draws on a device, and which data it checks there, nobody sees.
        is_hidden = len(args) > 1 and isinstance(args[1], torch.Tensor) and not args[1].is_cpu
        self.uses_rng |= is_hidden and not region.is_guess  # a Triton kernel draws by the seed that it is given
        self.dispatched.limits_values |= is_hidden
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
        traits, names = _traits_of(func), self._tensor_names
        given = tensors_in(*args, *kwargs.values())
        if (
            self._is_due is not None
            and (why := why_not(func, args, kwargs, given))
            and self._is_due(func, self._is_inside)
        ):
            self.give_up(unsafe(f"{func} {why}"))
            return func(*args, **kwargs)
        if func is _EQUATES:
            self.equated.add(tuple(map(id, given)))
        keys = self._note_given(func, given)
        is_shown = names is not None and not traits.keeps_elements
        if names is not None and is_shown:
            taken = _shapes_of(given)
            self.dispatched.operators.append(names.operator(func, args, kwargs, keys))
        self.runs_custom = self.runs_custom or traits.is_custom
        before, written = list[tuple[torch.Tensor, Any]](), list[torch.Tensor]()
        if traits.kind is OperatorKind.WRITE:
            written = written_tensors(func, args, kwargs)
            if not all(map(is_strided, written)):
                what = f"{func} writes to a tensor without strides, which nobody could put back"
                self.give_up(unsafe(f"{what}; keep it in a dense one"))
                return func(*args, **kwargs)
            before = [(tensor, geometry(tensor)) for tensor in written if storage_key(tensor) not in self._made]
            self._save_written(func, args, kwargs)
        if (traits.is_seeded or "generator" in kwargs) and draws(func, args, kwargs):
            self.uses_rng = True
            self._save_generators(args, kwargs)
        if self._strict:
            self._check_geometry(func, before)  # nothing would put another view back
        result = self._run(func, args, kwargs, given)
        self._check_geometry(func, before)
        returned = [result] if type(result) is torch.Tensor else tensors_in(result)
        for tensor in written:
            self._note_result(tensor, is_new=False)
        self._note_results(func, traits.kind, given, returned)
        if names is not None:
            names.note_run(func, given, returned, written, keys)
            self._note_traits(traits, given, written + returned)
            if is_shown:
                self.dispatched.shapes.append((func, (*taken, *_shapes_of(returned))))
        return result

    def _check_geometry(self, func: OpOverload, shapes: list[tuple[torch.Tensor, tuple[Any, ...]]]) -> None:
        if not shapes:
            return
        try:
            check_geometry(func, shapes)
        except CaptureError as error:
            self.give_up(error)

    def _note_traits(self, traits: "_Traits", given: list[torch.Tensor], gives: list[torch.Tensor]) -> None:
        """Note what an operator says of the numbers that the run computes."""
        shown = self.dispatched
        if traits.groups:
            shown.groups_rows = True
        if traits.sums:
            shown.float_types.update(filter(_is_float, (tensor.dtype.to_real() for tensor in gives)))
        if not (shown.names_places or traits.computes):
            shown.names_places = any(map(_has_integers, given))
        if not shown.limits_values:
            shown.limits_values = traits.checks or (not traits.integers_ignore_values and _makes_integers(given, gives))

    def note_outputs(self, output: Any) -> None:
        """Note what the run gave back; call it while that is at hand."""
        if self._tensor_names is not None:
            self.dispatched.outputs = self._tensor_names.outputs(tree_leaves(output))

    def give_up(self, error: CaptureError) -> None:
        """As ``end_watch``."""
        self.end_watch(error)

    def end_watch(self, error: Exception) -> None:
        """Note that no graph can be made of the run, and watch no more of it; raise that if the run must be undone."""
        if self._strict:
            self.given_up = self.given_up or error
            raise error
        if self.given_up is None:
            self.given_up = error
            self._on_end(error)
            self.is_paused, self._paused = True, None  # who listens to the callable's Python may have ended, too

    def _refuse_read(self, name: str, _: Any) -> None:
        """The host's code gets hold of memory by ``name``; in an operator's kernel, what records it refuses that."""
        if self._is_due is None or self.is_paused or self._is_inside:
            return
        self._paused = pause()  # who listens shall hear of the callable's Python alone
        try:
            if self._is_due(None, False):
                self.give_up(given_to_host(name))
        finally:
            paused, self._paused = self._paused, None
            resume(paused)

    def _note_results(
        self, func: OpOverload, kind: OperatorKind, given: list[torch.Tensor], returned: list[torch.Tensor]
    ) -> None:
        """As of ``MemoryWatch``; fills memory that is new, and that nothing has written."""
        if kind is OperatorKind.EMPTY and not _fills_new_memory():  # else eager's answer may hold what torch fills in
            for tensor in returned:
                _mark_unwritten(tensor)
            self.reserves_memory = True
        super()._note_results(func, kind, given, returned)

    def unwritten(self, value: torch.Tensor) -> torch.Tensor | None:
        """Which elements of a value that the run left hold what ``torch.empty`` gave, as nothing wrote them; or None.

        Types of one byte are not tested: too many of their values look like that.
        """
        if not self.reserves_memory or value.dtype.itemsize == 1 or not is_strided(value):
            return None
        held = as_integers(value)
        found = held == int.from_bytes(bytes([_UNWRITTEN]) * held.dtype.itemsize)
        found = found if held.dim() == value.dim() else found.all(-1)
        return found if bool(found.any()) else None

    @property
    def may_leave_effects(self) -> bool:
        """Whether a run of the same operators may leave more than its answer, or memory in it that nothing wrote."""
        return self._may_have_written or self.uses_rng or self.runs_custom or self.reserves_memory

    def writes_to(self, tensor: torch.Tensor) -> bool:
        """Whether the run wrote to the memory of ``tensor``."""
        key = storage_key(tensor)
        return any(storage_key(region.target) == key for region in self.regions)

    def _save_written(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in written_tensors(func, args, kwargs):
            if storage_key(tensor) in self._made:
                continue
            self._may_have_written = True
            if tensor.numel() == 0:
                continue
            is_guess = getattr(func, "is_guess", False)
            if func.namespace not in ("aten", "prims"):
                self.opaque[storage_key(tensor), *view_key(tensor)] = tensor
            if is_guess and self._is_inside:
                continue  # the operator around it says what it writes
            try:
                writes = "may write" if is_guess else "writes"
                what = f"{func} {writes} to a tensor of shape {tuple(tensor.shape)} that the call does not own"
                self._save(tensor, what, _indexed_region(func, args, tensor) if args else None)
            except Exception as error:
                if error_of_signal(error) is not None:
                    raise
                self.end_watch(error)

    def _save(self, tensor: torch.Tensor, what: str, region: Region | None = None) -> Region | None:
        """Save a tensor, or the part ``region`` of it, unless all of it is saved already.

        Raises ``CaptureError``, whose text begins with ``what``, if that is too much.
        """
        view = (storage_key(tensor), *view_key(tensor))
        if view in self._saved_views:
            return None
        size = tensor.nbytes if region is None else region.before.nbytes
        if self._saved + size > self._limit:
            raise CaptureError(
                f"{what}; saving it takes {self._saved + size} bytes in all, above state_limit_bytes={self._limit}; "
                "raise the limit",
                Reason.STATE_TOO_LARGE,
            )
        if region is None:
            self._saved_views.add(view)
            region = Region(tensor.detach(), tensor.detach().clone())
        self._saved += size
        self.regions.append(region)
        return region

    def _save_exposed(self, name: str, value: Any) -> None:
        """Save memory of a tensor or storage that the host's code gets hold of by ``name``, where it may write to it
        unseen; without a name, forget what was only read."""
        if self.is_paused or not (name or self._exposed):
            return
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            if not name:
                for held in self._exposed:
                    if bits_equal(held.read(), held.before):
                        self.regions.remove(held)
                self._exposed.clear()
                return
            is_moved = name.endswith(".share_memory_")
            if name == "UntypedStorage.resize_" or is_moved:
                if is_moved or (value._cdata not in self._made and value.device.type != "meta"):  # the compiler's
                    self._exposed.clear()  # some of it may be gone
                    what = f"the call frees or moves memory ({name})"
                    self.give_up(CaptureError(f"{what}; do that before and after the call", Reason.CAPTURE_UNSAFE))
                return
            target = _exposed_memory(value)
            # A storage may belong to others, though the run has made a tensor on it.
            if target is None or (storage_key(target) in self._made and isinstance(value, torch.Tensor)):
                return
            self._may_have_written = True
            try:
                region = self._save(target, f"{name} gives memory to the host's code, which may write there")
            except CaptureError as error:
                self.end_watch(error)
                return
        if region is not None:
            self._exposed.append(region)

    def _save_generators(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A generator of the model's own is state, and saved here. Whoever runs the call puts the default one back."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and id(value) not in self._generators:
                self._generators[id(value)] = value
                state = value.get_state()
                self.regions.append(Region(state, state, generator=value))


_COMPUTES = (OperatorKind.PURE, OperatorKind.VIEW)
_EQUATES = torch.ops.aten.eq.Tensor
_CHECKING = frozenset(("aten::_assert_async", "aten::multinomial", "aten::bernoulli", "aten::binary_cross_entropy"))
"""Operators that check data on the device."""
_ORDERING_NAMES = """
    argmax argmin argsort cummax cummin kthvalue max median min mode nanmedian sort topk max_pool2d_with_indices
    max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d
"""
_ORDERING = frozenset(f"aten::{name}" for name in _ORDERING_NAMES.split())
"""Operators whose integers are places among the numbers that they are given, whatever these are."""
_COMPUTING = _ORDERING.union(f"aten::{name}" for name in ("_to_copy", "copy_", "cat", "stack", "cumsum"))
"""Operators to which integers are numbers, beside those that torch tags so."""
_GROUPING = frozenset(("aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"))
"""Operators that multiply groups of rows whose sizes are data."""
_SUMMING = ("mm", "mv", "dot", "conv", "linear", "attention", "rnn", "lstm", "gru", "norm", "softmax", "cumsum")
"""Parts of the names of operators that add terms up, beside those that torch tags as reductions."""
_KEEPING = ("attention", "rnn", "lstm", "gru", "batch_norm")
"""Parts of the names of operators whose integers are for themselves: a generator's state, memory for a gradient."""


class _Traits(NamedTuple):
    """What the watch has to know of each operator."""

    kind: OperatorKind
    keeps_elements: bool
    is_seeded: bool
    is_custom: bool
    """Whether it is somebody else's and may do more than make new tensors."""
    groups: bool
    """Whether it multiplies groups of rows whose sizes are data."""
    sums: bool
    """Whether it adds terms up, in an order that may follow the shapes, and its rounding with it: products, reductions,
    and all that is not torch's own."""
    checks: bool
    """Whether it checks data on the device."""
    computes: bool
    """Whether integers that it is given are numbers to it, and name no places."""
    integers_ignore_values: bool
    """Whether the integers that it gives are places among numbers, or what it keeps for itself, whatever these are."""


@per_operator
def _traits_of(func: OpOverload) -> _Traits:
    name, kind = func._schema.name, kind_of(func)
    return _Traits(
        kind,
        keeps_elements(func),
        is_seeded(func),
        is_custom=kind not in _COMPUTES and func.namespace not in ("aten", "prims"),
        groups=name in _GROUPING,
        sums=func.namespace != "aten" or torch.Tag.reduction in func.tags or any(part in name for part in _SUMMING),
        checks=name in _CHECKING,
        computes=kind is OperatorKind.VIEW
        or name in _COMPUTING
        or not {torch.Tag.pointwise, torch.Tag.reduction}.isdisjoint(func.tags),
        integers_ignore_values=name in _ORDERING or any(part in name for part in _KEEPING),
    )


def _shapes_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tensor.shape if is_strided(tensor) else () for tensor in tensors]


def _has_integers(tensor: torch.Tensor) -> bool:
    kind = tensor.dtype
    return not (kind.is_floating_point or kind.is_complex or kind is torch.bool)


def _makes_integers(given: Sequence[torch.Tensor], gives: Sequence[torch.Tensor]) -> bool:
    """Whether an operator made integers of floating-point numbers, which may become indices."""
    return any(map(_has_integers, gives)) and any(
        each.dtype.is_floating_point or each.dtype.is_complex for each in given
    )


def _fills_new_memory() -> bool:
    return torch._C._get_deterministic_algorithms() and torch._C._get_deterministic_fill_uninitialized_memory()


_UNWRITTEN = 0x5B


def _mark_unwritten(made: Any) -> None:
    """Fill new memory with one byte, so that it shows later what was never written."""
    is_plain = type(made) is torch.Tensor and is_strided(made)  # a fake one has no memory
    if is_plain and made.dtype.itemsize > 1:
        with _disable_current_modes():  # those that the call has entered itself
            torch.empty(0, dtype=torch.uint8, device=made.device).set_(made.untyped_storage()).fill_(_UNWRITTEN)
