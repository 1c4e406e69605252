"""Arguments as Python has them: left out, None, mappings, classes registered without keys, NumPy scalars, functions."""

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from graphdispatch import graphed

from ..helpers import AT_ONCE


class Pair:
    """Two tensors, registered with torch without keys."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right


pytree.register_pytree_node(Pair, lambda pair: ([pair.left, pair.right], None), lambda leaves, _: Pair(*leaves))


def _total(ids: torch.Tensor, mask: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
    ids = ids if mask is None else ids * mask
    return ids if more.get("bias") is None else ids + more["bias"]


def test_declared_arguments_may_be_left_out_or_none() -> None:
    """A call without an argument that ``dynamic`` names, or with None for it, is served: each kind by its own graph."""
    served = graphed(_total, dynamic={"ids": 0, "mask": 0, "bias": 0}, sizes=[4])
    for kind in ({}, {"mask": None}, {"bias": None}, {"bias": torch.ones(4, 3)}, {"mask": torch.zeros(4, 3)}):
        hits = served.stats.hits
        for _ in range(5):
            ids = torch.randn(4, 3)
            assert torch.equal(served(ids, **kind), _total(ids, **kind))
        assert served.stats.hits == hits + 2, kind


class Tokens(UserDict[str, torch.Tensor]):
    """What a tokenizer gives."""


def test_a_mapping_of_its_own_class_is_refused_with_a_hint() -> None:
    """What it holds is not seen; its entries as a dict are."""
    served = graphed(lambda batch: batch["ids"] * 2, dynamic={"batch['ids']": 0}, sizes=[4], options=AT_ONCE)
    for _ in range(3):
        batch = Tokens(ids=torch.randn(4, 3))
        assert torch.equal(served(batch), batch["ids"] * 2)
    assert "graphs see what a plain dict holds" in served.explain(batch)
    for _ in range(4):
        batch = Tokens(ids=torch.randn(4, 3))
        assert torch.equal(served(dict(batch)), batch["ids"] * 2)
    assert served.stats.hits == 2


def test_classes_without_keys() -> None:
    """What was registered with torch without keys is reached by place."""
    served = graphed(lambda pair: pair.left + pair.right, dynamic={"pair[0]": 0, "pair[1]": 0}, sizes=[4])
    for _ in range(5):
        pair = Pair(torch.randn(4, 3), torch.randn(4, 3))
        assert torch.equal(served(pair), pair.left + pair.right)
    assert served.stats.hits == 2


@pytest.mark.parametrize(
    "values",
    [
        (np.float32(2), np.float32(3), np.float32("nan")),
        (np.int64(1), np.int64(2)),
        (np.bool_(True), np.bool_(False)),
        (slice(0, 2), slice(1, 2), slice(0, 2, 1), slice(None)),
        (range(2), range(3)),
        (frozenset({1}), frozenset({True}), frozenset({1.0})),
        (torch.sin, torch.cos),
        (lambda x: x + 1, lambda x: x + 2),
        (int, float),
    ],
    ids=lambda values: " ".join(getattr(value, "__name__", str(value)) for value in values),
)
def test_constants_select_the_graph(values: tuple[Any, ...]) -> None:
    """Constants of NumPy, slices, ranges, frozen sets, functions and classes: each value has its graph."""

    def model(x: torch.Tensor, value: Any) -> torch.Tensor:
        if isinstance(value, slice):
            return x[:, value] * 2
        if isinstance(value, np.generic):
            return x * value.item()
        if isinstance(value, type):
            return x * len(value.__name__)
        if isinstance(value, frozenset):
            return x * len(repr(value))
        out: torch.Tensor = value(x) if callable(value) else x * len(value)
        return out

    served = graphed(model, dynamic={"x": 0}, sizes=[4])
    for _ in range(4):
        for value in values:
            x = torch.randn(4, 3)
            torch.testing.assert_close(served(x, value), model(x, value), rtol=0, atol=0, equal_nan=True)
    assert served.stats.hits == len(values)


def test_the_missing_entry_of_dynamic_is_named() -> None:
    """A tensor that follows the batch and is not declared is named, with the entry that lacks."""
    served = graphed(lambda ids, mask: ids * mask, dynamic={"ids": 0}, sizes=[4, 8])
    for _ in range(3):
        ids, mask = torch.randn(4, 3), torch.randn(4, 3)
        assert torch.equal(served(ids, mask), ids * mask)
    assert "dynamic= may lack 'mask': 0" in str(served.explain(ids, mask))


def test_one_class_without_keys_takes_no_names_from_the_others() -> None:
    """Entries beside it keep theirs, and its own are known by place."""

    def fn(batch: dict[str, Any]) -> torch.Tensor:
        return batch["ids"] + batch["pair"].left

    step = graphed(fn, dynamic={"batch['ids']": 0, "batch['pair'][0]": 0}, sizes=(4,), options=AT_ONCE)
    for rows in (3, 3, 4, 3):
        batch = {"ids": torch.randn(rows, 2), "pair": Pair(torch.randn(rows, 2), torch.ones(1))}
        assert torch.equal(step(batch), fn(batch))
    assert step.stats.hits >= 1
