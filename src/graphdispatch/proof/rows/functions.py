"""What Python calls of torch during the run: for sizes, which it gets as numbers made of sizes, and for results.

C++ gets plain numbers. Where a function takes a size, the rules label its result; whatever number no rule has
accounted for narrows the run. Whatever gives Python data, so that it may decide by that, is a fault.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...backends import host_reads
from ...backends.code_events import AROUND_CALLABLES, is_own_code, is_torch_code
from ...backends.operators import tensors_in
from .batches import Array, Num, SizeNumber, is_equal
from .calls import is_whole
from .labels import Dim, Label, is_dynamic, own_size, shape_of

if TYPE_CHECKING:
    from .run import RowRun

_METADATA_NAMES = """
    dim ndim ndimension dtype device layout requires_grad element_size itemsize grad names type get_device
    result_type promote_types can_cast __hash__ output_nr retains_grad _backward_hooks type_as has_names __dir__
    _is_view
"""
_SHAPE_NAMES = "view reshape expand broadcast_to zeros ones empty rand randn new_zeros new_ones new_empty"
_UNSEEN = frozenset({"__deepcopy__", "_shape_as_tensor", "apply_", "map_", "map2_"})
"""What makes tensors of sizes, or of data by way of Python, without operators."""
_OF_DATA = {"is_nonzero", "is_set_to", "is_same_size", "is_contiguous"}
_FLAGS = {name for name in dir(Tensor) if name.startswith("is_")} - _OF_DATA
_METADATA = _FLAGS.union(_METADATA_NAMES.split())
"""What Python may know of a tensor that follows the batch: it is the same for all batches."""
_PLAIN = (Tensor, type(None), torch.dtype, torch.device, torch.layout)
_TAKES_SHAPE = frozenset(_SHAPE_NAMES.split())
"""Functions all of whose numbers are the sizes of their result."""
_MAKES = frozenset({"full", "new_full", "repeat", "tile"})
_SIZE_PLACES = {
    **dict.fromkeys((*_TAKES_SHAPE, "repeat", "tile"), slice(None)),
    "full": slice(0, 1),
    "new_full": slice(1, 2),
    "narrow": slice(3, 4),
    "split": slice(1, 2),
}
"""Which of their arguments functions take as sizes; what no rule takes for one narrows the run."""
_SIZE_NAMES = frozenset({"size", "sizes", "shape", "repeats", "dims", "end", "length"})
_DECIDES: dict[str, Callable[[Array], Array]] = {"cross": lambda size: size == 3, "cdist": lambda size: size > 25}
"""Functions that C++ computes in one way or another by each size of their tensors, and what decides."""
_FOR_USERS = {*AROUND_CALLABLES, host_reads.__file__}
"""Files of this package whose code calls functions of torch for the user's code."""
_TRANSFORMS = os.path.join("torch", "_functorch", "")
"""Where the code of torch.func lies."""
_SETTABLE = frozenset({"requires_grad", "grad", "names"})


@cache
def is_plain(kind: type) -> bool:
    """Whether a class of tensors leaves all functions and operators to torch."""
    functions = kind.__dict__.get("__torch_function__") or getattr(kind, "__torch_function__", None)
    plain = getattr(Tensor.__torch_function__, "__func__", None), torch._C._disabled_torch_function_impl
    return (
        getattr(functions, "__func__", functions) in plain
        and getattr(kind, "__torch_dispatch__", None) is Tensor.__torch_dispatch__
    )


class Functions(TorchFunctionMode):
    """Sees what Python calls of torch."""

    def __init__(self, run: "RowRun") -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer one function, or question for an attribute."""
        run, name, kwargs = self.run, getattr(func, "__name__", ""), kwargs or {}
        path = sys._getframe(1).f_code.co_filename
        if is_own_code(path) and path not in _FOR_USERS:  # of a mode, where code in C++ has called an operator
            return func(*args, **kwargs)
        file = getattr(getattr(func, "__code__", None), "co_filename", "")
        if file and file not in _FOR_USERS and not is_torch_code(file):
            run.doubt(f"{name}() hands itself to torch's modes, which do not see what it does then")
        if not all(map(is_plain, types)):  # other classes see it first, as without this mode, which sees what they do
            with self:
                answers = (kind.__torch_function__(func, types, args, kwargs) for kind in types)
                return next((one for one in answers if one is not NotImplemented), NotImplemented)
        if name in ("__get__", "__set__"):
            attribute = getattr(func.__self__, "__name__", "")
            if name == "__set__" and attribute not in _SETTABLE:
                run.doubt(f"{attribute} of a tensor is set")
            name = attribute if name == "__get__" else name
        answer = _SIZES.get(name)
        if answer is not None and args and isinstance(args[0], Tensor):
            label = run.label_of_size(args[0])
            if label is not None:
                size = answer(run, label, *args, **kwargs)
                return self._size_of_map(size) if type(size) is Num and _TRANSFORMS in path else size
        outer, run.caller = run.caller, (caller := Caller(run, name, args, kwargs))
        try:
            self._look_at(name, args, kwargs)
            plain_args, plain_kwargs = caller.plain() if _has_numbers((args, kwargs)) else (args, kwargs)
            try:
                out = func(*plain_args, **plain_kwargs)
            except Exception:  # whether it raises may depend on sizes, and Python may catch it
                if run.any_follows(args, kwargs) or caller.numbers:
                    run.space.restrict_to_own(range(len(run.space.own)), f"{name}() raises")
                raise
            if name == "data" and (label := run.label(args[0])) is not None:
                run.put(out, label)
            elif type(out) is not Tensor:
                self._check_answer(name, out, args, kwargs)
            if caller.numbers or name in _TAKES_SHAPE:
                caller.check(out)
        finally:
            run.caller = outer
        return out

    def _look_at(self, name: str, args: Any, kwargs: Any) -> None:
        """Note what C++ makes of data in this function past operators, and bind the run to batches for which it takes
        the same way."""
        run, base = self.run, name.partition(".")[0]
        if name in _UNSEEN and run.any_follows(args, kwargs):
            run.doubt(f"{name}() makes tensors without operators")
        if name == "tensor_split" and run.any_follows(args[1:], kwargs):
            run.doubt("tensor_split() by data")
        for tensor in tensors_in(args, kwargs) if base in _DECIDES else ():
            label = run.label(tensor)
            for dim in label.dims if label is not None else ():
                run.space.restrict(_DECIDES[base](run.sizes.values(dim)), f"{base}() decides by sizes")

    def _size_of_map(self, size: Num) -> Any:
        """A plain number for a transform of torch.func, which hands it to C++: what it maps, no rule tells."""
        remedy = "; rows='independent' in the options says that they are independent"
        self.run.doubt("a transform of torch.func maps over rows", remedy)
        return size.own

    def _check_answer(self, name: str, out: Any, args: Any, kwargs: Any) -> None:
        """Python may learn nothing of data."""
        if name in _METADATA or isinstance(out, _PLAIN) or all(isinstance(v, _PLAIN) for v in _leaves(out)):
            return
        if self.run.any_follows(args, kwargs):
            self.run.doubt(f"{name}() tells Python of data")


class Caller:
    """One function that Python called, and the numbers made of sizes that it gave."""

    def __init__(self, run: "RowRun", function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.run, self.function, self.arguments, self.named = run, function, args, kwargs
        self.sizes: tuple[Any, ...] | None = None
        self.numbers: dict[int, Num] = {}
        """The numbers given as sizes, by their value in the run."""
        self._accounted: set[int] = set()
        self._around: dict[int, Dim] | None = None
        if function in _MAKES or function in _TAKES_SHAPE:
            self.sizes = self._given_sizes()

    def size(self, own: int) -> Num | None:
        """The number that Python gave as this plain number; a rule that looks it up accounts for it."""
        number = self.numbers.get(own)
        if number is not None:
            self._accounted.add(own)
        return number

    def around(self) -> Mapping[int, Dim]:
        """The dimensions of the function's tensors that follow the batch, by their size.

        A size that stands for several binds the batch, so that a coincidence is none.
        """
        if self._around is None:
            labels = [self.run.label(t) for t in tensors_in(self.arguments, dict(self.named))]
            dims = {dim for label in labels if label is not None and not label.is_lost for dim in label.dims}
            found: dict[int, Dim] = {}
            for dim in sorted(filter(is_dynamic, dims), key=repr):
                own = own_size(dim)
                if own in found or any(d == (own,) for d in dims):
                    self.run.sizes.lose(Label((dim,)), f"a size of {own} that stands for several")
                found.setdefault(own, dim)
            self._around = found
        return self._around

    def _given_sizes(self) -> tuple[Any, ...]:
        args = self.arguments
        rest = args[1:] if args and isinstance(args[0], Tensor) else args
        if self.function in ("full", "new_full"):
            rest = rest[:1]
        named = [value for name, value in self.named.items() if name in _SIZE_NAMES]
        return tuple(v for v in _leaves((rest, named)) if type(v) is int or isinstance(v, Num))

    # -- plain numbers for C++

    def plain(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with plain numbers. Numbers that are no sizes narrow the run."""
        name, args, named = self.function, self.arguments, self.named
        by_name = {key: (self._size if key in _SIZE_NAMES else _number)(value) for key, value in named.items()}
        if name in ("__getitem__", "__setitem__"):
            self._find_doubles()
            return (args[0], self._index(args[1]), *map(_number, args[2:])), by_name
        if self.sizes is None:
            self._find_doubles()
        end_of_range = slice(len(args) > 1, 2) if name == "arange" else slice(0)
        places = range(len(args))[_SIZE_PLACES.get(name, end_of_range)]
        return tuple((self._size if i in places else _number)(v) for i, v in enumerate(args)), by_name

    def _find_doubles(self) -> None:
        """A plain number of the same call that equals a size by chance would be taken for it: such a size is bound."""
        leaves = list(_leaves((self.arguments, self.named)))
        plain = {v for v in leaves if type(v) is int}
        seen: dict[int, Num] = {}
        for number in leaves:
            if isinstance(number, Num):
                other = seen.setdefault(number.own, number)
                if number.own in plain or (other is not number and not _is_same(other, number)):
                    number.plain()
                    other.plain()

    def _size(self, value: Any) -> Any:
        return _changed(value, self._note_size)

    def _note_size(self, number: SizeNumber) -> Any:
        if not isinstance(number, Num) or number.own < 0:  # it would mean another thing than a size
            return number.plain()
        return self.numbers.setdefault(number.own, number).own

    def _index(self, value: Any) -> Any:
        if isinstance(value, slice):
            return slice(self._size(value.start), self._size(value.stop), _number(value.step))
        return tuple(map(self._index, value)) if isinstance(value, tuple) else _number(value)

    # -- afterwards

    def check(self, out: Any) -> None:
        """Each number given as a size must be that of the result for all batches; any other narrows the run."""
        label = self.run.label(out) if isinstance(out, Tensor) else None
        if label is not None and not label.is_lost and self.sizes is not None and self.function in _TAKES_SHAPE:
            self._check_sizes(self.sizes, label.dims)
        for own, number in self.numbers.items():
            if own not in self._accounted:
                number.plain()

    def _check_sizes(self, given: Sequence[Any], dims: Sequence[Dim]) -> None:
        if len(given) != len(dims):
            return
        for size, dim in zip(given, dims, strict=True):
            self._accounted.add(size.own if isinstance(size, Num) else 0)
            if size is self.run.sizes.number(dim) or (type(size) is int and (size == -1 or not is_dynamic(dim))):
                continue
            values = size.values if isinstance(size, Num) else np.asarray(size)
            outcome = np.broadcast_arrays(self.run.sizes.values(dim) == values, self.run.sizes.values(dim))[0]
            own = size.text if isinstance(size, Num) else str(size)
            self.run.space.restrict(outcome, f"{self.function}() takes {own} for a size of {own_size(dim)}")


def _is_same(one: Num, other: Num) -> bool:
    return one.values.shape == other.values.shape and is_equal(one.values, other.values)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """A nest of lists, tuples and slices with something else in the place of each number made of sizes."""
    if isinstance(value, SizeNumber):
        return change(value)
    if type(value) is slice:
        return slice(*(_changed(one, change) for one in (value.start, value.stop, value.step)))
    if isinstance(value, (list, tuple)) and _has_numbers(value):
        made = [_changed(one, change) for one in value]
        return made if type(value) is list else tuple(made)
    return value


def _number(value: Any) -> Any:
    """A value with plain numbers; they narrow the run."""
    return _changed(value, SizeNumber.plain)


def _leaves(value: Any) -> Iterator[Any]:
    """The values in nests of lists, tuples, dicts and slices."""
    if type(value) is slice:
        value = (value.start, value.stop, value.step)
    elif isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        yield value
        return
    for one in value:
        yield from _leaves(one)


def _has_numbers(value: Any) -> bool:
    return any(isinstance(one, SizeNumber) for one in _leaves(value))


def _size_answer(run: "RowRun", label: Label, tensor: Tensor, dim: Any = None) -> Any:
    shape = shape_of(label, run.sizes)
    return shape if dim is None else shape[dim]


def _numel_answer(run: "RowRun", label: Label, tensor: Tensor) -> Any:
    return run.sizes.numel(label.dims)


def _contiguous_answer(run: "RowRun", label: Label, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if not is_whole(tensor):  # a part of a size may be all of another one
        run.sizes.lose(label, "Python reads how a part lies in memory")
    return tensor.is_contiguous(*args, **kwargs)


_SIZES: dict[str, Callable[..., Any]] = {
    "shape": _size_answer,
    "size": _size_answer,
    "sym_size": _size_answer,
    "numel": _numel_answer,
    "nelement": _numel_answer,
    "is_contiguous": _contiguous_answer,
}
"""Questions that are answered with numbers made of sizes."""
