"""Random calls of a random model, as data; what a call did, as a value; and whether two calls did the same."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from graphdispatch.engines import OutputView

from .models import DEVICE, IS_BIT_EXACT, SLOTS, WIDTH, RandomModel


@dataclass(frozen=True)
class Plan:
    """One call; ``make`` gives equal, separate arguments each time."""

    rows: int
    seed: int = 0
    layout: str = "plain"
    fault: str | None = None
    scale: float | int | None = None
    fail: str | None = None
    positional: int = 0
    is_reversed: bool = False
    aliased: bool = False
    context: str = "no_grad"

    @property
    def is_dense(self) -> bool:
        """Whether the arguments leave no gaps in memory; where they do, eager may take other kernels than a graph."""
        return self.layout in ("plain", "transposed") and self.fault != "narrow"

    def make(self, model: RandomModel) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments for a call of ``model``."""
        generator = torch.Generator().manual_seed(self.seed)
        big = torch.randn(2 * SLOTS + 2, 2 * WIDTH, generator=generator, device="cpu").to(DEVICE)
        x = _LAID_OUT[self.layout](big, self.rows)
        x = x.t() if model.spec.batch_dim == 1 else x
        named: dict[str, Any] = {
            "x": x,
            "ids": torch.randint(0, SLOTS, (self.rows,), generator=generator, device="cpu").to(DEVICE),
            "slots": torch.randperm(SLOTS, generator=generator, device="cpu")[: self.rows].to(DEVICE),
        }
        if self.aliased:
            named["ids"] = named["slots"]
        if self.fault is not None:
            _SPOILT[self.fault](named)
        args = tuple(named.pop(name) for name in list(named)[: self.positional])
        if self.scale is not None:
            named["scale"] = self.scale
        if self.fail is not None:
            named["fail"] = self.fail
        return args, dict(reversed(named.items())) if self.is_reversed else named


CONTEXTS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
}


_LAID_OUT: dict[str, Callable[[Tensor, int], Tensor]] = {
    "plain": lambda big, rows: big[:rows, :WIDTH].clone(),
    "strided": lambda big, rows: big[: 2 * rows : 2, ::2],
    "transposed": lambda big, rows: big[:rows, :WIDTH].t().contiguous().t(),
    "expanded": lambda big, rows: big[:1, :WIDTH].expand(rows, WIDTH),
    "offset": lambda big, rows: big[1 : rows + 1, :WIDTH],
}
LAYOUTS = tuple(_LAID_OUT)


_SPOILT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "narrow": lambda named: named.update(x=named["x"][:, :1]),
    "deep": lambda named: named.update(x=named["x"][None]),
    "one_id": lambda named: named.update(ids=named["ids"][:1]),
    "missing": lambda named: named.pop("slots"),
    "no_dims": lambda named: named.update(x=torch.tensor(1.0, device=DEVICE)),
    "double": lambda named: named.update(x=named["x"].double()),
    "half": lambda named: named.update(x=named["x"].bfloat16()),
    "integer": lambda named: named.update(x=named["x"].long()),
    "unknown": lambda named: named.update(surplus=1),
    "object": lambda named: named.update(x=[object()]),
}
FAULTS = tuple(_SPOILT)


_TWISTS: list[dict[str, Any]] = [
    *({"fault": fault} for fault in FAULTS),
    *({"layout": layout} for layout in LAYOUTS),
    *({"context": context} for context in CONTEXTS),
    *({"scale": scale} for scale in (1.0, 1, 0.0, -0.0, None)),
    *({"fail": fail} for fail in ("early", "late")),
    {"is_reversed": True},
    {"aliased": True},
    {"positional": 2},
]


def twists() -> st.SearchStrategy[dict[str, Any]]:
    """Changes of a plan, to be made once a graph serves it."""
    return st.sampled_from(_TWISTS)


def _built(**fields: Any) -> st.SearchStrategy[Plan]:
    common: dict[str, Any] = {
        "seed": st.integers(0, 40),
        "layout": st.sampled_from(("plain",) * 4 + LAYOUTS),
        "positional": st.integers(0, 3),
        "is_reversed": st.booleans(),
        "aliased": st.sampled_from([False] * 5 + [True]),
    }
    return st.builds(Plan, **common, **fields)


def sound_plans() -> st.SearchStrategy[Plan]:
    """Calls that a graph can serve."""
    return _built(
        rows=st.integers(1, 4),
        scale=st.sampled_from([None, None, 0.5]),
        context=st.sampled_from(["no_grad", "enable_grad", "inference"]),
    )


def plans() -> st.SearchStrategy[Plan]:
    """Mostly sound calls, of no rows to more than the largest graph."""
    return _built(
        rows=st.sampled_from([0, 1, 2, 3, 3, 4, 4, 5, 7]),
        fault=st.sampled_from((None,) * 24 + FAULTS),
        scale=st.sampled_from([None, None, None, 1.0, 0.5, 1, -0.0]),
        fail=st.sampled_from([None] * 8 + ["early", "late"]),
        context=st.sampled_from(["no_grad", "no_grad", "enable_grad", "inference"]),
    )


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
