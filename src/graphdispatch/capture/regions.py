"""Written parts of memory: what they held, how to put that back, and which elements they cover.

Loaded for calls that write to memory which they did not make.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from ..backends.operators import bits_equal, is_strided, storage_key, view_key
from ..errors import CaptureError
from ..reasons import Reason

if TYPE_CHECKING:
    from .effects import EffectRecorder


@dataclass(eq=False)
class Region:
    """A written part of memory: how to read it, how to write it, and what it held before."""

    target: torch.Tensor
    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], Any]
    before: torch.Tensor
    indices: Sequence[torch.Tensor | None] = ()
    """For each dimension of ``target``, in order, the indices that it takes; None, or none left, takes all."""
    after: torch.Tensor | None = None
    """What it held after the run; None until a caller that may ``redo`` the run sets it."""
    is_generator: bool = False
    """Whether it is the state of a random generator that the call was given, rather than memory of a tensor."""


def indexed_region(func: OpOverload, args: tuple[Any, ...]) -> Region | None:
    """What an indexed write touches, or None if the operator writes the whole tensor.

    The indices are copied: their memory may hold other values by the time the region is put back.
    """
    given = _written_places(func._schema.name.removeprefix("aten::"), args) if args[0].dim() else []
    if not given:
        return None
    target = args[0].detach()
    indices = [None if i is None else i.clone() for i in given]
    read = partial(torch.ops.aten.index.Tensor, target, indices)
    return Region(target, read, partial(torch.ops.aten.index_put_.default, target, indices), read(), indices)


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
        apart = [one.view([-1 if dim == place else 1 for dim in places]) for place, one in enumerate(every)]
        return [index if place == args[1] % target.dim() else one for place, one in enumerate(apart)]
    return []


def save_exposed(
    run: "EffectRecorder", name: str, value: Any, views: set[tuple[Any, ...]], made: Collection[int], room: int
) -> int:
    """Save memory of a tensor or storage that the host's code gets hold of by ``name``, where it may write to it
    unseen; without a name, forget what was only read. Returns how many bytes it saved.

    ``views`` are those that are saved already; of storages that the run ``made`` nothing is saved. If there is no
    ``room`` for so many bytes, the run is given up.
    """
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        if not name:
            for held in run.exposed:
                if bits_equal(held.read(), held.before):
                    run.regions.remove(held)
            run.exposed.clear()
            return 0
        region = _exposed_region(value)
    if region is None:
        return 0
    key = storage_key(region.target)
    view = (key, *view_key(region.target))
    # A storage may belong to others, though the run has made a tensor on it.
    if view in views or (key in made and isinstance(value, torch.Tensor)):
        return 0
    if region.before.nbytes > room:
        run.give_up(
            CaptureError(
                f"{name} gives {region.before.nbytes} bytes to the host's code, which may write there; saving them "
                f"takes {region.before.nbytes - room} more than state_limit_bytes; raise the limit",
                Reason.STATE_TOO_LARGE,
            )
        )
        return 0
    views.add(view)
    run.exposed.append(region)
    run.regions.append(region)
    return region.before.nbytes


def _exposed_region(value: Any) -> Region | None:
    """The memory that the host's code gets hold of with a tensor or storage: of one on the CPU, with values."""
    is_storage = isinstance(value, torch.UntypedStorage)
    is_plain = isinstance(value, torch.Tensor) and type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not (is_storage or (is_plain and is_strided(value))) or value.device.type != "cpu":
        return None
    if is_storage or torch._debug_has_internal_overlap(value) == 1:  # nothing can be written to such a tensor
        target = torch.empty(0, dtype=torch.uint8).set_(value if is_storage else value.untyped_storage())
    else:
        target = value.detach()
    return Region(target, lambda: target, target.copy_, target.clone())


def first_uncovered(regions: list[Region], allowed: list[Region]) -> Region | None:
    """The first region with an element that no region of ``allowed`` covers, or None.

    Compares where the regions lie, not what they hold. Reads a result back to the host.
    """
    for region in (region for region in regions if not region.is_generator):
        target = region.target
        near = [r for r in allowed if storage_key(r.target) == storage_key(target) and r.target.dtype is target.dtype]
        if any(not r.indices and view_key(r.target) == view_key(target) for r in near):
            continue
        covered = [element_offsets(other) for other in near]
        if not covered or not bool(torch.isin(element_offsets(region), torch.cat(covered)).all()):
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
        is_told = covered and region.target.dtype is buffer.dtype
        if not is_told or not bool(torch.isin(_places(region, buffer), torch.cat(covered)).all()):
            return region
    return None


def _places(region: Region, whole: torch.Tensor) -> torch.Tensor:
    """Which elements of a tensor without overlaps a region covers, counted by its dimensions in order."""
    rest = element_offsets(region) - int(whole.storage_offset())
    places = torch.zeros_like(rest)
    for dim in sorted(range(whole.dim()), key=lambda dim: whole.stride(dim), reverse=True):
        if whole.shape[dim] > 1:
            steps = rest // whole.stride(dim)
            places, rest = places + steps * prod(whole.shape[dim + 1 :]), rest - steps * whole.stride(dim)
    return places


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
