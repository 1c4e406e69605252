"""What a call looks like where its arguments alone decide that no graph can take it."""

from collections import UserDict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from torch.utils import _pytree as pytree

from .signature import PLAIN_TENSORS, is_cache
from .spec import VALUES, is_tensor

__all__ = ["keep_latest", "look_of", "shows_all"]

_COMPARED = (UserDict, dict, list, tuple, slice, frozenset)
"""Subclasses of these may be flattened, or compared part by part."""
_MOST = 1024


def look_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], *, with_values: bool = False) -> tuple[Hashable, ...]:
    """Classes, nesting, and of tensors what may refuse them; ``with_values``: the hashes of constants and dtypes, too.

    It is another one once torch knows another class of containers.
    """
    looks = (_look(value, with_values) for value in (*args, *kwargs.values()))
    return len(pytree.SUPPORTED_NODES), len(args), *kwargs, *looks


def shows_all(values: Iterable[Any]) -> bool:
    """Whether the look shows all that could refuse these values: none of them may be flattened or compared by parts."""
    return all(
        shows_all(value.values() if type(value) is dict else value)
        if type(value) in (dict, list, tuple)
        else type(value) in (*VALUES, *PLAIN_TENSORS)
        or is_tensor(value)
        or not (issubclass(type(value), _COMPARED) or type(value) in pytree.SUPPORTED_NODES or is_cache(value))
        for value in values
    )


def keep_latest(known: dict[Hashable, Any], look: Hashable, value: Any) -> None:
    """Note something of calls by their look, of which the latest 1,024 are kept."""
    known[look] = value
    if len(known) > _MOST:
        del known[next(iter(known))]


def _look(value: Any, with_values: bool) -> Any:
    kind = type(value)
    if kind in PLAIN_TENSORS:
        if value.is_nested:
            return kind, value.layout
        look = kind, value.shape, value.device, value.layout, value.is_conj(), value.is_neg()
        return (*look, value.dtype) if with_values else look
    if kind is dict:
        return kind, *value, *(_look(one, with_values) for one in value.values())
    if kind is list or kind is tuple:
        return kind, *(_look(one, with_values) for one in value)
    return (kind, hash(value)) if with_values and kind in VALUES else kind
