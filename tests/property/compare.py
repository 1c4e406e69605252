"""What a call did, as a value, and whether two calls did the same."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from graphdispatch.engines import OutputView

from .calls import CONTEXTS, Plan
from .models import IS_BIT_EXACT, SLOTS, RandomModel

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 5e-2}  # of the largest value, at least of 1.0


@dataclass
class Done:
    """The result or the error of a call, and its arguments as it left them."""

    result: Any
    error: Exception | None
    arguments: Any
    handed_out: Any = None
    """The result, in the handle that it came in."""


def perform(fn: Callable[..., Any], model: RandomModel, plan: Plan) -> Done:
    """Call ``fn`` as the plan says."""
    args, kwargs = plan.make(model)
    with CONTEXTS[plan.context]():
        try:
            result = fn(*args, **kwargs)
        except Exception as error:
            return Done(None, error, (args, kwargs))
        value = result.get() if isinstance(result, OutputView) else result
        return Done(value, None, (args, kwargs), result)


def snapshot(tree: Any) -> Any:
    """A copy of a nest of tensors."""
    return tree_map_only(Tensor, lambda t: t.clone(), tree)


def assert_same(want: Any, got: Any, *, exact: bool) -> None:
    """Both nests have one structure, equal constants, and tensors of equal shape, dtype and values."""
    wanted, spec = tree_flatten(want)
    received, other = tree_flatten(got)
    assert spec == other
    for a, b in zip(wanted, received, strict=True):
        if isinstance(a, Tensor):
            _assert_same_tensor(a, b, exact=exact)
        elif not hasattr(type(a), "__dict__") or a is None:
            assert type(a) is type(b)
            assert repr(a) == repr(b)


def _assert_same_tensor(want: Tensor, got: Tensor, *, exact: bool) -> None:
    tolerance = 0.0 if exact and IS_BIT_EXACT else _TOLERANCE.get(want.dtype, 0.0)
    scale = max(1.0, float(want.abs().max())) if tolerance and want.numel() else 1.0
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * scale)


def assert_same_outcome(want: Done, got: Done, *, exact: bool) -> None:
    """The same kind of error, or the same result; and the same left in the arguments."""
    if want.error is None and got.error is not None:
        raise got.error
    assert type(want.error) is type(got.error)
    assert_same(want.arguments, got.arguments, exact=exact)
    assert_same(want.result, got.result, exact=exact)


def assert_same_state(want: nn.Module, got: nn.Module, *, exact: bool) -> None:
    """Equal buffers, apart from the scratch slots of caches."""
    for (name, a), (_, b) in zip(want.named_buffers(), got.named_buffers(), strict=True):
        kept = SLOTS if name.endswith("memory") else None
        rows = slice(kept) if kept is not None else ...
        assert_same(a[rows], b[rows], exact=exact)
