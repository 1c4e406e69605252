"""PIECEWISE graphs: graphs between breaks. A replay runs the graphs, and the broken parts eagerly in between.

Breaks are marked by the user. Where a capture fails, the reason names the method or module to mark.

Note [values across a break]
    A tensor that one graph makes and a later part reads must keep its memory, although the Python that made it is long
    gone at replay. The piecewise graph holds a strong reference to each such tensor from the moment that a break sees
    it. With a weak reference, or none, a later capture of the same pool could take the memory (sglang#37606).

Note [whose memory a break returns]
    A tensor that a break makes is copied, at each replay, to where the break's result lay at the capture. A tensor that
    the break did not make (an argument, a cache) is never copied: copying would change the argument or the cache. It
    must be the same view of the same memory each time. A break that made its result at the capture must not return
    somebody else's memory later if parts behind it write to the result in place: nobody else may hold it then.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import getattr_static
from itertools import starmap
from operator import gt
from pathlib import PurePath
from sys import getrefcount
from threading import get_ident
from traceback import walk_tb
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._pytree import TreeSpec, tree_flatten

from ...backends.base import Graph, Pool
from ...backends.operators import bits_equal, is_strided, storage_key, tensors_in
from ...errors import CaptureError, ReplayError
from ...runtime.flatten import describe, is_tensor
from ..state.walk import StateWalk
from .outputs import is_same_value


@dataclass(eq=False)
class EagerPart:
    """One break: what to call again, and the tensors that its results are copied to."""

    name: str
    where: str
    """The line that called it, as ``file:line: source``."""
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    spec: TreeSpec
    made: list[bool]
    """For each leaf, whether it is a tensor that the break made; see Note [whose memory a break returns]."""
    objects: StateWalk | None
    """A walk over the objects that the call made and gave to the break, or put into its closure: containers, instances.
    Each replay gives it these of the capture, so it must leave them as they are. None if it is given none."""

    is_written: bool = field(default=False, init=False)
    """Whether later parts write to a tensor that the break made."""

    @property
    def may_have_effects(self) -> bool:
        """Whether a run may have effects that nobody notes: any function may; an operator writes what its schema says
        alone."""
        return not isinstance(self.fn, OpOverload) or self.fn._schema.is_mutable

    def __post_init__(self) -> None:
        inside = self.objects.tensors if self.objects is not None else []
        self.given = {storage_key(t) for t in _strided((self.args, self.kwargs, inside))}
        """The storages of the tensors that it is given."""
        self._sharing = _sharing(self.leaves)
        self._is_one_tensor = self.spec.is_leaf() and is_tensor(self.leaves[0])

    def run(self) -> None:
        """Call it on the static arguments and put its results where the next graph reads them.

        Raises ``ReplayError`` if the results differ from those at the capture in structure, shape, type, constant
        values, or in whose memory they are; or if it changed an object that the call made.
        """
        result = self.fn(*self.args, **self.kwargs) if self.objects is None else self._run_on(self.objects)
        if self._is_one_tensor and type(result) is torch.Tensor and not self.is_written:
            self._put(0, result, self.leaves[0])
            return
        leaves, spec = tree_flatten(result)
        del result  # so that nothing but the list holds what the break made
        self._put_all(leaves, spec)

    def _run_on(self, objects: StateWalk) -> Any:
        """Call it, and leave these objects as they were, for the next replay."""
        try:
            result = self.fn(*self.args, **self.kwargs)
        finally:
            change = objects.change()
            if change is not None:
                objects.restore()
        if change is not None:
            raise ReplayError(change_of_given(self.name, change))
        return result

    def _put_all(self, leaves: list[Any], spec: TreeSpec) -> None:
        if spec != self.spec:
            raise ReplayError(f"break {self.name!r} returned another structure than at the capture")
        if len(leaves) > 1 and _sharing(leaves) != self._sharing:
            raise ReplayError(f"break {self.name!r} returned tensors that share memory otherwise than at the capture")
        if self.is_written and any(map(gt, _holders(leaves, self.made), _OF_NEW)):
            raise ReplayError(
                f"break {self.name!r} returned a new tensor at the capture, and now one that is held elsewhere; later "
                "parts would write to it; return a copy of it (.clone()) each time"
            )
        for index, (now, then) in enumerate(zip(leaves, self.leaves, strict=True)):
            if is_tensor(now) and is_tensor(then):
                self._put(index, now, then)
            elif not is_same_value(now, then):
                raise ReplayError(
                    f"break {self.name!r} returned {describe(now)} where it returned {describe(then)} at the capture; "
                    "the graphs after it were captured for that value. Return tensors, or the same value each time"
                )

    def _put(self, index: int, now: torch.Tensor, then: torch.Tensor) -> None:
        if now.shape != then.shape or now.dtype is not then.dtype or now.device != then.device:
            raise ReplayError(
                f"break {self.name!r} returned tensor {index} with {tuple(now.shape)} {now.dtype} on {now.device}, "
                f"and with {tuple(then.shape)} {then.dtype} on {then.device} at the capture; "
                "a break must keep its shapes for one size"
            )
        if now.data_ptr() == then.data_ptr() and now.stride() == then.stride():
            return
        if not self.made[index] or storage_key(now) in self.given:
            raise ReplayError(
                f"break {self.name!r} returned as tensor {index} once a tensor that it made and once memory that it "
                "did not make, or another view of such memory; return a copy of it (.clone()) each time"
            )
        then.copy_(now)


class PiecewiseGraph(Graph):
    """Graphs and eager parts in turn; whoever replays it sees one graph."""

    def __init__(self, parts: list[Graph | EagerPart], held: list[torch.Tensor], pool: Pool) -> None:
        """``held`` are the tensors that cross a break."""
        self._parts = parts
        self._calls = [part.run if isinstance(part, EagerPart) else part.replay for part in parts]
        self._held = held
        self._pool = pool
        self._released = False
        self._watched: Sequence[torch.Tensor] = ()
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Each static input that a break is given and must not write, with memory to keep its numbers in."""
        self.runs_code = any(part.may_have_effects for part in self.breaks)
        # Tensors that cross a break are inference tensors or not, as at the capture; the other mode cannot write them.
        self._inference_mode = torch.is_inference_mode_enabled()

    def replay(self) -> None:
        """Run all parts on the caller's current stream, in order."""
        if self._released:
            raise ReplayError("this graph was released; capture it again")
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled() is not self._inference_mode:
            with torch.inference_mode(self._inference_mode), torch.no_grad():
                self._run_parts()
        else:
            self._run_parts()

    def watch(self, arguments: Sequence[torch.Tensor]) -> None:
        """Notice from now on if breaks write to static inputs that the capture did not write.

        Numpy, ``.data`` and storages write without a trace, so static inputs that a break is given are compared.
        """
        self._watched = arguments
        given = set[int]().union(*(part.given for part in self.breaks))
        with torch.inference_mode(False):
            self._kept = [(one, torch.empty_like(one)) for one in arguments if storage_key(one) in given]

    def _versions(self) -> list[int]:
        """How often what is watched was written."""
        return [tensor._version for tensor in self._watched]

    def _run_parts(self) -> None:
        before = self._versions()
        for argument, kept in self._kept:
            kept.copy_(argument)
        outer, self._pool.replaying_on = self._pool.replaying_on, get_ident()  # a replay of its plan sets it, too
        try:
            for call in self._calls:
                call()
            if self._versions() != before or not all(starmap(bits_equal, self._kept)):
                raise ReplayError("a break writes to an argument, and did not at the capture; return what it makes")
        finally:
            self._pool.replaying_on = outer
        if self.is_unchanged is not None and not self.is_unchanged():
            raise ReplayError(
                "a break changed an attribute, a variable or an entry that code outside of it reads, and the graphs "
                "behind it were captured for the old value; return what they need from the break"
            )

    def reset(self) -> None:
        """Release all graphs, and the tensors held for them."""
        self._released = True
        self.is_unchanged = None
        for graph in self.graphs:
            graph.reset()
        self._parts = []
        self._calls = []
        self._held = []
        self._watched = ()
        self._kept = []

    @property
    def graphs(self) -> list[Graph]:
        """The graphs, in order."""
        return [part for part in self._parts if not isinstance(part, EagerPart)]

    @property
    def breaks(self) -> list[EagerPart]:
        """The eager parts, in order."""
        return [part for part in self._parts if isinstance(part, EagerPart)]

    @property
    def nbytes(self) -> int:
        """Bytes of all graphs, of the tensors that the breaks made and the graphs behind them read, and of what is
        compared."""
        made = [leaf for part in self.breaks for leaf, is_made in zip(part.leaves, part.made, strict=True) if is_made]
        held: dict[int, int] = {storage_key(leaf): leaf.untyped_storage().nbytes() for leaf in made}
        return (
            sum(graph.nbytes for graph in self.graphs) + sum(held.values()) + sum(one.nbytes for _, one in self._kept)
        )

    @property
    def driver_nbytes(self) -> int:
        """The bytes of all graphs that the driver took."""
        return sum(graph.driver_nbytes for graph in self.graphs)

    def describe(self) -> str:
        """How many graphs and breaks it has, and where; a break in a loop counts as one."""
        # ``where`` in short: ``decoder.py:12``.
        counts = Counter(f"{part.name} at {PurePath(part.where.split(': ')[0]).name}" for part in self.breaks)
        texts = [f"{count} x {place}" for place, count in counts.items()]
        return f"graphs: {len(self.graphs)}, breaks: {', '.join(texts) or 'none'}"

    def __repr__(self) -> str:
        return f"<PiecewiseGraph {len(self.graphs)} graphs, {len(self.breaks)} breaks, {self.nbytes} bytes>"


def change_of_given(name: str, change: str) -> str:
    """What a break may not do to objects that the call makes and gives to it."""
    return (
        f"break {name!r} changes an object that the call makes and gives to it ({change}), which later parts may read; "
        "make it in the break, and return what they need"
    )


def _strided(tree: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(tree) if is_strided(tensor)]


def _holders(leaves: list[Any], counts: Sequence[bool]) -> tuple[int, int, int]:
    """How many hold the memory of these tensors, of those that count, without the list itself: the most references to
    one of them, the most to one that they are views of, and the most further tensors in one storage."""
    tensors = {
        id(leaf): leaf for leaf, is_counted in zip(leaves, counts, strict=True) if is_counted and is_tensor(leaf)
    }
    bases = {id(one._base): one._base for one in tensors.values() if one._base is not None}
    listed, every = Counter(map(id, leaves)), tensors | bases
    references = {key: getrefcount(every[key]) - listed[key] - (key in tensors) for key in every}
    storages = Counter(one.untyped_storage()._cdata for one in every.values())
    return (
        max((count for key, count in references.items() if key not in bases), default=0),
        max(map(references.__getitem__, bases), default=0),
        max((torch._C._storage_Use_Count(key) - count for key, count in storages.items()), default=0),
    )


_OF_NEW = _holders([torch.empty(1).view(1)], [True])
"""As many hold a tensor that is new."""


def _sharing(leaves: list[Any]) -> list[int]:
    """For each tensor, the index of the first one that lies in the same storage."""
    keys = [storage_key(t) for t in _strided(leaves)]
    return [keys.index(key) for key in keys]


def places_within(error: BaseException) -> Iterator[tuple[nn.Module, str]]:
    """The methods of modules that an error came through, from the innermost; ``"forward"`` for a whole module."""
    for frame in reversed(_frames(error)):
        code = frame.f_code
        module, name = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None, code.co_name
        if isinstance(module, nn.Module) and (found := getattr_static(type(module), name, None)) is not None:
            is_method = isinstance(found, FunctionType) and name not in _OF_ANY_CALL
            yield module, name if is_method else "forward"


def is_check_of_distribution(error: BaseException) -> bool:
    """Whether an error came from what ``torch.distributions`` checks when one of them is made."""
    return any(frame.f_globals.get("__name__") == torch.distributions.distribution.__name__ for frame in _frames(error))


def optimizer_within(error: BaseException) -> torch.optim.Optimizer | None:
    """The optimizer of torch whose step an error came through, or None."""
    held = (frame.f_locals.get("self") for frame in _frames(error) if frame.f_code.co_name == "step")
    return next((one for one in held if isinstance(one, torch.optim.Optimizer)), None)


def _frames(error: BaseException) -> list[FrameType]:
    """The frames that an error came through, the innermost last."""
    cause = error.__cause__ if isinstance(error, CaptureError) and error.__cause__ is not None else error
    return [frame for frame, _ in walk_tb(cause.__traceback__)]


_OF_ANY_CALL = frozenset(name for name in vars(nn.Module) if callable(getattr(nn.Module, name)))
"""What every module has: marking these would mark no part of a model."""
