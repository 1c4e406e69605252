"""``FrontEnd``: the one face of all front ends."""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Reason

from ..helpers import assert_same

__all__ = ["Batch", "FrontEnd", "Open", "one_tensor"]

Batch = Callable[[int], tuple[Any, ...]]


def one_tensor(rows: int) -> tuple[Any, ...]:
    """The usual batch: one tensor of ``rows`` rows and three columns."""
    return (torch.randn(rows, 3),)


class FrontEnd:
    """One callable behind one front end. Close it after use.

    A kind of it has ``_open``, ``_call`` and ``close``; ``forget``, which tells it, or the owner of its graphs, that
    something changed that no guard sees; and ``freeze(is_frozen)``, if it can forbid captures and comparisons.

    ``sizes`` are the capture sizes of front ends that pad; ``dynamic`` names the batch dimensions; ``options`` and
    ``outputs`` are as in ``CUDAGraphOptions``. Other options are those of ``graphed`` that the front end has.
    """

    name: ClassVar[str]
    captures_ahead: ClassVar[bool] = False
    """Whether the caller captures before it serves (``prepare``). Such a front end captures nothing by itself."""
    order: ClassVar[tuple[int, ...]] = (3, 4, 3)
    """The numbers of rows of the calls after which graphs serve three rows and four."""
    front: Any
    """The library's own object, which serves the calls; of ``entry``, the manager that captured its graphs."""
    plain: Callable[[torch.Tensor], Any]
    """The front end alone, for a callable of one tensor ``x``: for a model that calls it from within."""
    hits: int
    """Calls that a graph served."""
    captures: int
    """Graphs that were captured."""
    reasons: Counter[Reason]
    """How often each reason was counted."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        dynamic: Mapping[str, int],
        sizes: Sequence[int] = (4,),
        mode: str = "FULL",
        outputs: str | None = None,
        options: CUDAGraphOptions | None = None,
        **more: Any,
    ) -> None:
        self.fn = fn
        self.dynamic = dict(dynamic)
        self.sizes = tuple(sizes)
        self.mode = CUDAGraphMode[mode]
        self.options = options or CUDAGraphOptions()
        if outputs is not None:
            self.options = self.options.replace(outputs=outputs)
        self.calls = 0
        """Calls so far; what a model counts must agree with it."""
        self._was_hit = False
        self._reason: Reason | None = None
        self._open(**more)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Serve one call through the front end. Raises what the front end raises."""
        hits, before = self.hits, Counter(self.reasons)
        self.calls += 1
        try:
            return self._call(args, kwargs)
        finally:
            self._was_hit = self.hits > hits
            more = Counter(self.reasons) - before
            self._reason = next(iter(more), None)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Capture ahead with an example call, where that is the caller's job. A refusal is kept in ``refusal``."""
        assert not self.captures_ahead

    def renew(self, *args: Any, **kwargs: Any) -> None:
        """Capture again what this example stands for, after a change, where that is the caller's job."""
        assert not self.captures_ahead

    def settle(self, batch: Batch) -> "FrontEnd":
        """Prepare it and call it until a graph serves whatever can be served."""
        if self.captures_ahead:
            for rows in (3, 4):
                self.prepare(*batch(rows))
        for rows in self.order:
            self(*batch(rows))
        return self

    def reason(self) -> Reason | None:
        """The reason of the latest call; None where the front end counts none for a call that a graph served."""
        return self._reason

    def was_hit(self) -> bool:
        """Whether a graph served the latest call."""
        return self._was_hit

    def check_calls(self, *batches: Any, fn: Callable[..., Any] | None = None) -> None:
        """Call it with each batch: its answers are those of ``fn``, or of its callable.

        A batch is a tuple of arguments, the only argument, or a number of rows for a random tensor.
        """
        for batch in batches:
            args = one_tensor(batch) if isinstance(batch, int) else batch if isinstance(batch, tuple) else (batch,)
            assert_same(self(*args), (fn or self.fn)(*args), f"{self.name}: {self.reason()}")

    def check_not_padded(self, *, everywhere: bool = True) -> None:
        """No graph served the latest call, since padding might change its rows: as its operators or its path tell,
        or since nobody knows. With ``everywhere=False`` ``graphed`` alone is checked."""
        expected = (Reason.ROWS_MIX, Reason.PADDING_UNPROVEN, Reason.PATH_CHANGES)
        if everywhere:
            assert not self.was_hit(), f"{self.name}: served"
        assert self.name != "graphed" or self.reason() in expected, self.reason()

    def check(self, expected: Reason, *, everywhere: bool = True) -> None:
        """The latest call was served by a graph if ``expected`` says so, and else it was not, for a reason.

        ``graphed`` must give exactly this reason; with ``everywhere=False`` it alone is checked.
        """
        if everywhere:
            assert self.was_hit() is expected.is_graph, f"{self.name}: {self.reason()} instead of {expected}"
        reason = self.reason()
        assert self.was_hit() or (reason is not None and not reason.is_graph)

    def explanation(self, *args: Any) -> str | None:
        """What the front end says of such a call in words, or None where it says nothing."""
        return None

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name, in the order of the call."""
        fn = self.fn.forward if isinstance(self.fn, torch.nn.Module) else self.fn
        try:
            names = list(inspect.signature(fn).parameters)
        except Exception:  # a scripted module has none, and an odd object raises anything
            names = list(self.dynamic)
        if names[:1] == ["args"]:
            names = list(self.dynamic)
        return dict(zip(names, args, strict=False)) | kwargs

    def rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The number of rows of a call: that of its first argument with a batch dimension."""
        named = self.named(args, kwargs)
        for name, dim in self.dynamic.items():
            for leaf in tree_leaves(named.get(name)):
                if isinstance(leaf, torch.Tensor) and leaf.dim() > dim:
                    return leaf.shape[dim]
        return 1


Open = Callable[..., FrontEnd]
"""A fixture that opens a callable behind the front end, and may call it until graphs serve."""
