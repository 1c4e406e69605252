"""Runs a callable that was found to be quiet, natively watched.

Note [a run that is hardly looked at]
    Runs for other numbers of rows, which comparisons need, cost most of a capture if Python looks at each operator. A
    callable whose eager run only made tensors of others (``EffectRecorder.is_quiet``) is likely to do so again. Where
    the CPU tape's extension is ready, such a run is watched in C++ (``native/tape/watch.cpp``): it notes the memory
    that operators of torch use, and ends the run by an error before any operator that may do more than compute. Nothing
    has been written then, and Python watches another run. So it does for code whose work the dispatcher would not show:
    under autocast, and where torch's compiler is loaded or an operator's kernel was replaced.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from ..backends.insight import COMPILER, is_composite
from ..backends.operators import OperatorKind, kind_of
from ..native.tape import TAPE

__all__ = ["CHECKING", "CONVERTING", "GROUPING", "StoppedError", "can_watch", "is_quiet", "watching"]

CHECKING = frozenset(("aten::_assert_async", "aten::multinomial", "aten::bernoulli", "aten::binary_cross_entropy"))
"""Operators that check data on the device."""
CONVERTING = frozenset(("aten::_to_copy", "aten::copy_", "aten::view"))
"""Those that may make integers of floating-point numbers."""
GROUPING = frozenset(("aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"))
"""Those that multiply groups of rows whose sizes are data."""
_OTHER, _QUIET, _COMPOSITE, _CONVERTS, _LIMITS, _GROUPS = range(6)  # what the core takes an operator for


@cache
def is_quiet(func: OpOverload) -> bool:
    """Whether an operator does no more than to make tensors of others, or views of them."""
    return kind_of(func) in (OperatorKind.PURE, OperatorKind.VIEW) and func._schema.name != "aten::_assert_async"


class StoppedError(BaseException):
    """Ends a run before an operator that may do more than compute; ``except Exception`` of the user must not catch
    it."""


def can_watch() -> bool:
    """Whether a run of the calling thread can be watched natively, as far as can be told before it."""
    return (
        hasattr(TAPE.module, "Watch")
        and not torch._C._is_any_autocast_enabled()
        and COMPILER not in sys.modules
        and torch.library._impls.isdisjoint(_watched)
    )


@contextmanager
def watching() -> Iterator[Any]:
    """A block whose operators are watched natively. What it gives tells afterwards which storages they used, and what
    ``EffectRecorder`` tells under the same names.

    Raises ``StoppedError`` where something was to run that may do more than compute, or anything raised; nothing was
    written then. Another run tells what the callable itself raises.
    """
    assert TAPE.module is not None
    watch: Any = TAPE.module.Watch(_judge, StoppedError)
    watch.enter()
    try:
        yield watch
    except Exception as error:  # the watch may have caused it
        raise StoppedError from error
    finally:
        watch.leave()
    if watch.was_stopped() or not can_watch():
        raise StoppedError


def _judge(name: str, overload: str) -> int:
    namespace, _, base = name.partition("::")
    if namespace != "aten":
        return _OTHER
    func = getattr(getattr(torch.ops.aten, base), overload or "default")
    place = f"aten/{func.name().removeprefix('aten::')}/CPU"
    if place in torch.library._impls:
        return _OTHER
    _watched.add(place)
    if name == "aten::detach_":  # of each torch.tensor(); Python's watch does not meet it, since it is autograd's alone
        return _QUIET
    if is_composite(func):
        return _COMPOSITE
    kinds = ((CONVERTING, _CONVERTS), (CHECKING, _LIMITS), (GROUPING, _GROUPS))
    return next((kind for names, kind in kinds if name in names), _QUIET) if is_quiet(func) else _OTHER


_watched: set[str] = set()
"""Where torch would note a kernel in Python for each operator that the core has met."""
