"""All batches that may come, and the numbers that a program makes of their sizes.

A ``Num`` is what ``x.shape[0]`` gives in a run. It is a ``torch.SymInt``, so that torch takes it wherever a size may
stand, but it has no node of torch's: its value is an array with an entry for each batch. Arithmetic is exact for each
entry. Whatever makes a decision or a plain number of it (``==``, ``bool``, ``range``, ``hash``, text, ``math.sqrt``)
narrows the batches that the run speaks for to those with the outcome of the run.

Note [a batch of one]
    A size of one broadcasts. So a run on several rows, or on a length above one, does not speak for one row, or for one
    element.
"""

import dis
import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...backends.code_events import is_torch_code
from ...backends.operators import short_user_line

Array = NDArray[Any]

_MOST = 2**62
_LONGEST_TEXT = 60


class LeftPathError(BaseException):
    """The run stands for none of the batches any more whose path it was to take; the user's ``except Exception`` must
    not catch it."""


class Restriction(NamedTuple):
    """Something by which the run stands for some batches alone."""

    mask: Array
    """True for the batches with the outcome of the run; it broadcasts to all of them."""
    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what}, {self.where}" if self.where else self.what


class BatchSpace:
    """All batches that may come: their extents along each dynamic axis, and the extents of the run's own batch.

    Args:
        extents: The extents along each axis: the numbers of rows, then lengths.
        own: The extents of the batch that the run is made with.
        like: Batches of which the run is to take the path. Once it stands for none of them, ``LeftPathError`` is raised
            before Python goes on; None: it may take any path.
    """

    def __init__(
        self, extents: Sequence[range], own: Sequence[int], like: Iterable[Sequence[int]] | None = None
    ) -> None:
        self.extents, self.own = tuple(extents), tuple(own)
        self.at = tuple(extent.index(length) for extent, length in zip(extents, own, strict=True))
        self.restrictions: list[Restriction] = []
        self.computed: dict[Any, tuple[Any, Any]] = {}
        """Numbers that were made of others, with these, by what made them."""
        self.stray = ""
        """Where a number made of sizes reached code that takes plain numbers, if it did."""
        many = len(extents)
        names = ["n", "s"] if many <= 2 else ["n", *(f"s{axis}" for axis in range(1, many))]
        self.numbers = tuple(
            Num(
                self, np.arange(e.start, e.stop, e.step).reshape([-1 if i == axis else 1 for i in range(many)]), o, name
            )
            for axis, (e, o, name) in enumerate(zip(extents, own, names, strict=False))
        )
        """The extents as numbers, by axis."""
        self._ones = [number.values < 2 for number in self.numbers if number.own > 1]
        self._like = None if like is None else [extents for extents in like if extents in self]
        self.has_left_path = self._like == []
        """Whether the run stands for none of the batches that it was to be like."""

    def of_run(self, values: Array) -> Any:
        """The entry of the run's own batch in an array that broadcasts to all batches."""
        return entry_at(values, self.at)

    def restrict(self, outcome: Array, what: str, *, at_line: bool = True) -> None:
        """Speak for the batches alone whose outcome is that of the run; ``at_line``: and name the running line."""
        mask = outcome == self.of_run(outcome)
        if mask.all():
            return
        for is_one in self._ones:  # what has a run of its own needs no restriction
            if any(k > 1 and mask.shape[axis] > 1 for axis, k in enumerate(is_one.shape)):
                mask = mask | is_one
        if mask.all() or any(
            one.mask.shape == mask.shape and np.array_equal(one.mask, mask) for one in self.restrictions
        ):
            return
        self.restrictions.append(Restriction(mask, what, short_user_line() if at_line else ""))
        self.has_left_path = self._like is not None and not any(extents in self for extents in self._like)
        if self.has_left_path:
            raise LeftPathError

    def restrict_to_own(self, axes: Iterable[int], what: str) -> None:
        """Speak for the extents of the run alone along these axes."""
        for axis in axes:
            self.restrict(self.numbers[axis].values, what)

    def __contains__(self, extents: Sequence[int]) -> bool:
        return not self.why_not(extents)

    def why_not(self, extents: Sequence[int]) -> str:
        """The first restriction that excludes a batch of these extents, or an empty text; see Note [a batch of one]."""
        at = self.place_of(extents)
        if at is None:
            return f"the run looked at batches of {' x '.join(f'{e.start} to {e[-1]}' for e in self.extents)}"
        if any(extent < 2 and extent != own for extent, own in zip(extents, self.own, strict=True)):
            return "a size of one broadcasts, so that it takes a run of its own"
        return next((str(one) for one in self.restrictions if not entry_at(one.mask, at)), "")

    def place_of(self, extents: Sequence[int]) -> tuple[int, ...] | None:
        """Where a batch lies in arrays over all batches."""
        if len(extents) != len(self.extents) or any(x not in e for x, e in zip(extents, self.extents, strict=True)):
            return None
        return tuple(e.index(x) for x, e in zip(extents, self.extents, strict=True))


def entry_at(values: Array, at: Sequence[int]) -> Any:
    """The entry of the batch that lies there, in an array that broadcasts to all batches."""
    return values[tuple(i if k > 1 else 0 for i, k in zip(at, values.shape, strict=True))]


def is_equal(one: Array, other: Array) -> bool:
    """Whether two arrays are equal for all batches."""
    return bool((one == other).all())


_LOOK_UPS = ("BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR", "CONTAINS_OP", "BINARY_OP", "BUILD_MAP", "BUILD_SET")
"""Instructions that take a key, and keep it at most in a container that is put back after the run."""


class _Node:
    """What torch's code in Python reads of a number before it compares that."""

    def is_nested_int(self) -> bool:
        return False


_NODE = _Node()


class SizeNumber:
    """What integers and reals made of sizes share."""

    def __init__(self, space: BatchSpace, values: Array, own: Any, text: str) -> None:
        self.space, self.values, self.own, self.text = space, values, own, text[:_LONGEST_TEXT]

    @property
    def node(self) -> Any:
        """What torch's own symbols have. Where C++ reads it, no narrowing would see what becomes of the number."""
        caller = sys._getframe(1).f_code
        if caller.co_name == "is_nested_int" and is_torch_code(caller.co_filename):  # as broadcast_shapes does
            return _NODE
        self.space.stray = self.space.stray or short_user_line()
        self.plain()
        raise TypeError("a number made of the sizes of a batch came to code that takes plain numbers")

    @property
    def of_what(self) -> str:
        """The sizes that the number is made of, in words."""
        rows, lengths = self.values.shape[0] > 1, any(k > 1 for k in self.values.shape[1:])
        return "sizes" if rows and lengths else "a length" if lengths else "the number of rows"

    def plain(self) -> Any:
        """The number itself. The run then speaks for batches with this number alone."""
        self.space.restrict(self.values, f"Python computes with {self.of_what} ({self.text})")
        return self.own

    def decide(self, outcome: Array, own: bool, text: str) -> bool:
        """The outcome of a decision. The run then speaks for batches with this outcome alone."""
        self.space.restrict(np.asarray(outcome), f"Python decides by {self.of_what} ({text})")
        return own

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.plain(), name)  # whatever plain numbers have

    def __hash__(self) -> int:
        """As the number, where it is looked up in a dict or set. In a call it has none, as torch's own symbols: a cache
        of results would keep it, and give what was made of it to eager calls."""
        frame = sys._getframe(1)
        if dis.opname[frame.f_code.co_code[frame.f_lasti]] not in _LOOK_UPS:
            raise TypeError("unhashable: a number made of the sizes of a batch")
        return hash(self.plain())

    def __bool__(self) -> bool:
        return self.decide(self.values != 0, bool(self.own), self.text)


_AS_PLAIN = """
    __repr__ __str__ __format__ __int__ __float__ __index__ __pos__ __invert__ __round__ __divmod__ __rdivmod__
    __reduce_ex__ is_integer
"""
"""Methods of plain numbers, which a number made of sizes has of the plain one."""

_SIGNS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "floordiv": "//",
    "truediv": "/",
    "mod": "%",
    "pow": "**",
    "lshift": "<<",
    "rshift": ">>",
    "and_": "&",
    "or_": "|",
    "xor": "^",
}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": operator.neg,
    "abs": abs,
    "ceil": math.ceil,
    "floor": math.floor,
    "trunc": math.trunc,
}


def _own(number: Any) -> Any:
    return number.own if isinstance(number, SizeNumber) else number


def _plain(number: Any) -> Any:
    return number.plain() if isinstance(number, SizeNumber) else number


def _text(number: Any) -> str:
    return number.text if isinstance(number, SizeNumber) else repr(number)


def _is_number(value: Any) -> bool:
    return issubclass(type(value), (int, float, SizeNumber))


def _outcomes(op: Callable[..., Any], numbers: Sequence[Any]) -> Array:
    """What Python makes of numbers, for each batch; None where it makes none, or one that no array holds."""

    def one(*plain: Any) -> Any:
        try:
            made = op(*plain)
        except (ArithmeticError, ValueError):
            return None
        is_held = type(made) in (bool, float) or (type(made) is int and abs(made) < _MOST)
        return made if is_held else None

    values = (number.values if isinstance(number, SizeNumber) else np.asarray(number) for number in numbers)
    return np.asarray(np.frompyfunc(one, len(numbers), 1)(*values))


def _compute(op: Callable[..., Any], text: str, *numbers: Any) -> Any:
    """A number made of others. The run then speaks for batches where it is one of the same kind; if it is none that an
    array holds, for batches with these numbers alone."""
    space = next(number for number in numbers if isinstance(number, SizeNumber)).space
    key = (op, *((id(number),) if isinstance(number, SizeNumber) else (type(number), number) for number in numbers))
    if key not in space.computed:  # which takes long for many batches, and comes again in each layer
        values = _outcomes(op, numbers)
        own = space.of_run(values)
        if own is None:
            return op(*map(_plain, numbers))
        is_same = np.frompyfunc(lambda value: type(value) is type(own), 1, 1)(values).astype(bool)
        space.restrict(is_same, f"Python gets a number of another kind ({text})")
        kind, dtype = (Num, np.int64) if type(own) is int else (Real, np.float64)
        space.computed[key] = numbers, kind(space, np.where(is_same, values, own).astype(dtype), own, text)
    return space.computed[key][1]


def _arithmetic(name: str, sign: str) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    op = pow if name == "pow" else getattr(operator, name)

    def forward(self: Any, other: Any, *modulo: Any) -> Any:
        text = f"({_text(self)} {sign} {_text(other)})"
        return _compute(op, text, self, other, *modulo) if _is_number(other) else NotImplemented

    def backward(self: Any, other: Any) -> Any:
        return (
            _compute(op, f"({_text(other)} {sign} {_text(self)})", other, self) if _is_number(other) else NotImplemented
        )

    return forward, backward


def _comparison(name: str, sign: str) -> Callable[[Any, Any], Any]:
    op = getattr(operator, name)

    def compare(self: Any, other: Any) -> Any:
        if not _is_number(other):
            return NotImplemented
        outcome = _outcomes(op, (self, other)).astype(bool)
        return self.decide(outcome, op(self.own, _own(other)), f"{self.text} {sign} {_text(other)}")

    return compare


def _unary(name: str, op: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: _compute(op, f"{name}({self.text})", self)


def _as_plain(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.plain(), name)(*map(_plain, args))


class Num(SizeNumber, torch.SymInt):
    """An integer made of sizes."""

    __class__ = property(lambda _: int)
    """``isinstance(n, int)`` is true, as without the run."""


class Real(SizeNumber, torch.SymFloat):
    """A real number made of sizes."""

    __class__ = property(lambda _: float)
    """As of integers."""


def _define() -> None:
    """Give both kinds of numbers all operators; torch's classes have some of their own, which would come first."""
    methods: dict[str, Any] = {name: value for name, value in vars(SizeNumber).items() if callable(value)}
    for name, sign in _SIGNS.items():
        plain = name.rstrip("_")
        methods[f"__{plain}__"], methods[f"__r{plain}__"] = _arithmetic(name, sign)
    methods |= {f"__{name}__": _comparison(name, sign) for name, sign in _COMPARISONS.items()}
    methods |= {f"__{name}__": _unary(name, op) for name, op in _UNARY.items()}
    methods |= {name: _as_plain(name) for name in _AS_PLAIN.split()}
    for kind, name in product((Num, Real), methods):
        setattr(kind, name, methods[name])


_define()
