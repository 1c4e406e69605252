"""What an operator does to memory, according to its schema.

Which arguments does it write? Does it only make a view? Can a graph hold it? Every module that watches operators
at torch's dispatcher looks here.
"""

import linecache
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import wraps
from operator import attrgetter
from types import FrameType
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.utils._pytree import SUPPORTED_NODES, tree_iter, tree_map

from ..errors import CaptureError
from ..reasons import Reason
from .code_events import is_own_code, is_torch_code

_aten = torch.ops.aten
T = TypeVar("T")


def per_operator(fn: Callable[[OpOverload], T]) -> Callable[[OpOverload], T]:
    """``fn``, called once for each operator. It goes by the object: torch's hash of an operator takes longer."""
    values: dict[int, tuple[OpOverload, T]] = {}

    @wraps(fn)
    def look_up(func: OpOverload) -> T:
        found = values.get(id(func))
        if found is not None:
            return found[1]
        value = fn(func)
        if type(func) is OpOverload:  # compiled code only looks like one, and comes and goes
            values[id(func)] = func, value
        return value

    look_up.cache_clear = values.clear  # type: ignore[attr-defined]
    return look_up


class OperatorKind(Enum):
    """How a recorder treats an operator."""

    VIEW = "view"
    """Makes another view of its input's memory. A replay has nothing to run."""
    EMPTY = "empty"
    """Only reserves memory."""
    WRITE = "write"
    """Writes to at least one argument (in place, ``out=``, collectives)."""
    RANDOM = "random"
    """Draws from a random generator. It must not run twice for a comparison."""
    OPAQUE = "opaque"
    """A custom operator: it makes new tensors, and its schema does not tell how."""
    PURE = "pure"
    """Makes new tensors from its arguments and does nothing else."""


# Operators that write to arguments which their schema does not mark, with the positions of those arguments (from
# torch's native_functions.yaml). Collectives write to every tensor that they get.
_UNMARKED_WRITES = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
}
_TRAINED = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
"""Those of them that write in training alone, which their sixth argument says."""
_EMPTY = {f"aten::{new}empty{how}" for new in ("", "new_") for how in ("", "_like", "_permuted", "_strided")}
_PLAIN_VALUE = frozenset({"bool", "complex", "float", "int", "number", "str"})
_RESULT_DEPENDS_ON_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@per_operator
def is_seeded(func: OpOverload) -> bool:
    """Whether the operator draws from a random generator, by its tags."""
    return torch.Tag.nondeterministic_seeded in func.tags


def draws(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call draws from a random generator: of a seeded operator, unless its dropout is zero, as that of
    attention mostly is."""
    if not is_seeded(func):
        return kwargs.get("generator") is not None
    place = _dropout_place(func)
    return place is None or (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)) != 0.0


@per_operator
def _dropout_place(func: OpOverload) -> int | None:
    return next((place for place, arg in enumerate(func._schema.arguments) if arg.name == "dropout_p"), None)


@per_operator
def is_unsafe(func: OpOverload) -> bool:
    """Whether somebody tagged the operator as one that no graph may hold."""
    return torch.Tag.cudagraph_unsafe in func.tags


@per_operator
def changes_view(func: OpOverload) -> bool:
    """Whether the operator has a tensor look at memory in another way, and writes nothing to that memory."""
    return torch.Tag.inplace_view in func.tags


_KEEPS_ELEMENTS = frozenset(
    f"aten::{name}" for name in ("view", "_unsafe_view", "_reshape_alias", "clone", "detach", "alias")
)


@per_operator
def keeps_elements(func: OpOverload) -> bool:
    """Whether the operator gives all elements of its tensor in order: in another shape, or in memory of their own."""
    return func._schema.name in _KEEPS_ELEMENTS and func._overloadname != "dtype"


_OF_FIXED_SHAPES = frozenset(("aten::_to_copy", "aten::clone", "aten::constant_pad_nd", "aten::full_like"))


@per_operator
def has_fixed_shapes(func: OpOverload) -> bool:
    """Whether the shapes of the arguments alone give the shapes of the results, as a kernel for meta tensors shows; a
    few operators need none."""
    has_kernel, name = torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
    keys = ("Meta", "CompositeExplicitAutogradNonFunctional")
    return func._schema.name in _OF_FIXED_SHAPES or (
        func.namespace == "aten" and any(has_kernel(name, key) for key in keys)
    )


def geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Which memory a strided tensor takes, and how: equal before and after a write that only changes values."""
    return (storage_key(tensor), tensor.untyped_storage().nbytes(), view_key(tensor))


def view_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What tells a view of a storage from its other views."""
    return (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)


@per_operator
def kind_of(func: OpOverload) -> OperatorKind:
    """The kind of an operator, from its schema and tags alone."""
    schema = func._schema
    if schema.name in _UNMARKED_WRITES or func.namespace == "c10d":
        return OperatorKind.WRITE
    if any(arg.alias_info is not None and arg.alias_info.is_write for arg in schema.arguments):
        return OperatorKind.WRITE
    if schema.name in _EMPTY:
        return OperatorKind.EMPTY
    if any(result.alias_info is not None for result in schema.returns):
        return OperatorKind.VIEW
    if is_seeded(func):
        return OperatorKind.RANDOM
    return OperatorKind.PURE if func.namespace == "aten" else OperatorKind.OPAQUE


def copy_with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, in memory of its own."""
    if not tensor.numel():
        return tensor
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether one shape, strides and a storage tell which memory the tensor takes. A nested tensor only claims so."""
    return tensor.layout is torch.strided and not tensor.is_nested


def tensors_in(*trees: Any) -> list[torch.Tensor]:
    """All tensors in nests of arguments or results, in torch's order."""
    found: list[torch.Tensor] = []
    for tree in trees:
        kind = type(tree)
        if kind in LEAVES:
            continue
        if kind is _TENSOR or issubclass(kind, _TENSOR):
            found.append(tree)
        elif kind is tuple or kind is list:
            found += tensors_in(*tree)
        elif kind is dict:
            found += tensors_in(*tree.values())
        elif _is_nest(kind):
            found += (leaf for leaf in tree_iter(tree) if issubclass(type(leaf), torch.Tensor))
    return found


_TENSOR = torch.Tensor
LEAVES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
"""The types of what operators are given beside tensors, for the most part."""


def _is_nest(kind: type) -> bool:
    return kind in SUPPORTED_NODES or issubclass(kind, tuple)


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Arguments or results of an operator, with ``fn`` of each leaf in its place, but for those of ``LEAVES``."""
    kind = type(tree)
    if kind in LEAVES:
        return tree
    if kind is _TENSOR:
        return fn(tree)
    if kind is tuple or kind is list:
        return kind([map_leaves(fn, value) for value in tree])
    if kind is dict:
        return {key: map_leaves(fn, value) for key, value in tree.items()}
    return tree_map(fn, tree) if _is_nest(kind) else fn(tree)


WRITTEN_PLACES: dict[str, Callable[[torch.Tensor, tuple[Any, ...]], Sequence[torch.Tensor | None]]] = {}
"""By the full name of an operator of somebody else's, where it writes in a tensor that it writes to: called with that
tensor and the operator's positional arguments it gives indices, one for each dimension in order, None for all of it.
Whoever knows the operator adds it; others are taken to write the whole tensor."""


def written_tensors(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that the operator writes to."""
    if func.namespace == "c10d":
        return tensors_in(args, kwargs)
    if func._schema.name in _TRAINED and not (args[5] if len(args) > 5 else kwargs.get("training", True)):
        return []
    written: list[torch.Tensor] = []
    for position, name in _written_arguments(func):
        written.extend(tensors_in(args[position] if position < len(args) else kwargs.get(name)))
    return written


@per_operator
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """The positions and names of the arguments that the operator writes to."""
    unmarked, arguments = _UNMARKED_WRITES.get(func._schema.name, ()), enumerate(func._schema.arguments)
    return tuple(
        (position, argument.name)
        for position, argument in arguments
        if position in unmarked or (argument.alias_info is not None and argument.alias_info.is_write)
    )


def check_geometry(func: OpOverload, before: list[tuple[torch.Tensor, tuple[Any, ...]]]) -> None:
    """Raise ``CaptureError`` if the operator changed the shape or memory of one of these tensors, or is made for that.

    ``before`` are tensors that the call did not make, with their ``geometry`` before the operator. A graph would leave
    them as its padded batch did, and would not change them again.
    """
    for tensor, old in before:
        if (changes_view(func) and func is not _aten.detach_.default) or geometry(tensor) != old:
            raise unsafe(
                f"{func} gives a tensor of shape {tuple(old[2][1])} that the call did not make another shape or memory "
                f"({tuple(tensor.shape)}); write into a view of it, x[:n].copy_(...)"
            )


def forbidden(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], tensors: Iterable[Any]) -> str | None:
    """Why no graph can hold this call, which is given these ``tensors``, or None if one can.

    A CUDA stream refuses these calls during a capture: reading a value back to the host, results whose shape depends
    on data, and copies between devices.
    """
    name, why = func._schema.name, _why_forbidden(func)
    if name in _INDEXING:
        return _masked_index(func, args)
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
        return None
    if why is not None:
        return why
    if name != "aten::_to_copy" and all(map(_is_cpu, tensors)):
        return None
    kinds = {"cpu" if t.is_cpu else t.device.type for t in tensors if not t.is_cpu or t.dim()}
    if isinstance(kwargs.get("device"), torch.device) and name == "aten::_to_copy":
        kinds.add(kwargs["device"].type)
    return "copies between devices; do it before the call" if len(kinds) > 1 else None


_is_cpu = attrgetter("is_cpu")
_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})


@per_operator
def _why_forbidden(func: OpOverload) -> str | None:
    """Why no graph can hold any call of the operator, or None."""
    if func is _aten._linalg_check_errors.default:
        return "reads an error code back to the host (linalg); use the *_ex variant"
    if func is _aten._local_scalar_dense.default:
        return "reads a value back to the host (.item(), int(), bool(), if tensor, print); keep it on the device"
    if func is _aten._efficientzerotensor.default:
        return "makes a tensor without memory (a zero tangent); keep forward-mode differentiation outside of the call"
    if func is _aten._nested_tensor_from_mask_left_aligned.default:
        return (
            "reads a padding mask back to the host, to make a nested tensor; give the torch.nn.TransformerEncoder "
            "enable_nested_tensor=False, or call torch.backends.mha.set_fastpath_enabled(False)"
        )
    if func is _aten._pack_padded_sequence.default:
        return "has a result whose shape follows lengths that the host reads; give the recurrent layer padded sequences"
    if isinstance(func, OpOverload) and _gives_host_value(func):  # else it is compiled code
        return "gives the host a value that it may have read from memory; keep it on the device, in a tensor"
    if any(tag in func.tags for tag in _RESULT_DEPENDS_ON_DATA):
        return "has a result whose shape or value the host must know; use a form with a fixed shape"
    return None


def _gives_host_value(func: OpOverload) -> bool:
    """Whether an operator of somebody else takes a tensor and returns a plain value. Nobody knows what it reads, so
    its schema decides; torch's own have tags where that is more than shapes and types tell."""
    schema = func._schema
    given, results = (" ".join(str(each.type) for each in part) for part in (schema.arguments, schema.returns))
    return func.namespace != "aten" and "Tensor" in given and not _PLAIN_VALUE.isdisjoint(re.findall(r"\w+", results))


def _masked_index(func: OpOverload, args: Sequence[Any]) -> str | None:
    masks = [t for t in args[1] if t is not None and t.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return None
    # Writing one value through a mask is masked_fill, which has a fixed shape.
    accumulate = len(args) > 3 and args[3]
    if func._schema.name != "aten::index" and args[2].numel() == 1 and not accumulate:
        return None
    return "indexes with a boolean mask; the host must know how many elements it selects; use torch.where"


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits. NaN equals the same NaN; 0.0 differs from -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype == torch.bool or not (a.dtype.is_floating_point or a.dtype.is_complex):
        return torch.equal(a, b)
    return torch.equal(as_integers(a), as_integers(b))


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of each number as an integer of its size; as two, in a further dimension, if it has 16 bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.dtype is torch.complex128 else plain
    return plain.view(_INTEGERS[plain.dtype.itemsize])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def storage_key(tensor: torch.Tensor) -> int:
    """What tells the storage of a strided tensor from all others, for as long as something holds it."""
    key: int = tensor.untyped_storage()._cdata
    return key


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements along some dimension share one place in memory, as ``expand`` makes them."""
    return any(stride == 0 and extent > 1 for stride, extent in zip(tensor.stride(), tensor.shape, strict=True))


def unsafe(what: str) -> CaptureError:
    """The error that says what no graph can hold, and at which line of the user's it came."""
    return CaptureError(f"{what}; at {user_line()}", Reason.CAPTURE_UNSAFE)


def _user_place() -> tuple[str, int] | None:
    """The file and the number of the innermost line of the running call outside torch and this library."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        is_inside = path.startswith(("<frozen", "<eval_with", "<string")) or is_torch_code(path) or is_own_code(path)
        if not is_inside and f"{os.sep}contextlib.py" not in path:
            return path, frame.f_lineno
        frame = frame.f_back
    return None


def user_line() -> str:
    """The innermost line of the running call outside torch and this library, as ``file:line: source``."""
    place = _user_place()
    return "unknown line" if place is None else f"{place[0]}:{place[1]}: {linecache.getline(*place).strip()}"


def short_user_line() -> str:
    """As ``user_line``, with the name of the file alone and without the source."""
    place = _user_place()
    return "an unknown line" if place is None else f"{os.path.basename(place[0])}:{place[1]}"
