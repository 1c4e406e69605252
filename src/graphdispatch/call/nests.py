"""Nests of values as callers have them: torch's pytrees, and mappings that torch does not know (``BatchEncoding``).

Torch's table of pytrees is not added to, since compilers read it, too. A mapping is wrapped instead, and rebuilt as a
copy of the caller's own with other values.
"""

import copy
from collections import UserDict
from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils import _pytree as pytree

__all__ = ["flatten", "has_mappings", "leaves_of", "paths_of", "wrapped"]

_SHOWN = (type(None), bool, int, str, bytes)
# What a tokenizer of transformers notes beside the tensors, and its models do not read.
_NOTES = frozenset({"_encodings", "_n_sequences", "tensor_type", "skip_tensor_conversion"})


class _Kind:
    """What tells mappings apart but for their values: class, keys in order, and further attributes."""

    def __init__(self, mapping: Mapping[Any, Any]) -> None:
        self.keys = list(mapping)
        self.more = {name: value for name, value in _attributes(mapping).items() if name not in _NOTES}
        self._empty = _emptied(mapping)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Kind) or type(self._empty) is not type(other._empty):
            return False
        return (self.keys, self.more) == (other.keys, other.more)

    __hash__ = None  # type: ignore[assignment]

    def with_values(self, values: Iterable[Any]) -> Mapping[Any, Any]:
        """A mapping like the caller's, with these values."""
        new: Any = copy.copy(self._empty)
        for key, value in zip(self.keys, values, strict=True):
            new[key] = value
        made: Mapping[Any, Any] = new
        return made


class _Wrapped:
    """A mapping that torch's pytrees take for a leaf."""

    def __init__(self, mapping: Mapping[Any, Any]) -> None:
        self.kind = _Kind(mapping)
        self.values = [wrapped(mapping[key]) for key in self.kind.keys]


pytree.register_pytree_node(
    _Wrapped,
    lambda node: (node.values, node.kind),
    lambda values, kind: kind.with_values(values),
    flatten_with_keys_fn=lambda node: (
        [(pytree.MappingKey(key), value) for key, value in zip(node.kind.keys, node.values, strict=True)],
        node.kind,
    ),
)


def _attributes(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    table = dict(getattr(mapping, "__dict__", {}))
    if isinstance(mapping, UserDict):
        table.pop("data", None)
    return table


def _emptied(mapping: Mapping[Any, Any]) -> Any:
    new: Any = copy.copy(mapping)
    for key in list(new):
        del new[key]
    return new


def _is_mapping(value: Any) -> bool:
    """Whether a value is a mapping that torch takes for a leaf, that can be rebuilt, and that holds nothing unseen."""
    kind = type(value)
    if kind in pytree.SUPPORTED_NODES or not issubclass(kind, (dict, UserDict)):
        return False
    return all(name in _NOTES or type(held) in _SHOWN for name, held in _attributes(value).items())


def has_mappings(values: Any) -> bool:
    """Whether a nest holds mappings that must be wrapped."""
    return any(map(_is_mapping, pytree.tree_leaves(values)))


def wrapped(values: Any) -> Any:
    """The same nest, its mappings wrapped so that torch's pytrees see what they hold."""
    return pytree.tree_map(lambda leaf: _Wrapped(leaf) if _is_mapping(leaf) else leaf, values)


def leaves_of(values: Any) -> list[Any]:
    """The leaves of a nest, with those in its mappings."""
    leaves = pytree.tree_leaves(values)
    return pytree.tree_leaves(wrapped(values)) if any(map(_is_mapping, leaves)) else leaves


def flatten(value: Any, *, wraps: bool) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of one argument, and its structure."""
    return pytree.tree_flatten(wrapped(value) if wraps else value)


def paths_of(value: Any) -> list[str]:
    """How to reach each leaf of a nest, such as ``['ids'][0]``: by place where a class was registered without keys, or
    where a key cannot be printed."""
    value = wrapped(value)
    kind = pytree._get_node_type(value)
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is None:
        return [""]
    keyed: list[tuple[Any, Any]]
    if node.flatten_with_keys_fn is not None:
        keyed = list(node.flatten_with_keys_fn(value)[0])
    else:
        keyed = [(pytree.SequenceKey(place), inner) for place, inner in enumerate(node.flatten_fn(value)[0])]
    return [_shown(key, place) + path for place, (key, inner) in enumerate(keyed) for path in paths_of(inner)]


def _shown(key: Any, place: int) -> str:
    try:
        return pytree.keystr((key,))
    except Exception:  # of a key that cannot be printed
        return f"[{place}]"
