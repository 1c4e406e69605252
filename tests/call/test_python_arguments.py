"""Arguments as Python has them: left out, None, mappings, classes registered without keys, NumPy scalars, functions."""

from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from graphdispatch import graphed

from ..helpers import check_calls, make


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
    served = make(lambda batch: batch["ids"] * 2, dynamic={"batch['ids']": 0}, sizes=[4])
    batches = [Tokens(ids=torch.randn(4, 3)) for _ in range(4)]
    check_calls(served, *batches)
    assert "graphs see what a plain dict holds" in served.explain(batches[0])
    check_calls(served, *map(dict, batches))
    assert served.stats.hits == 2


def test_classes_without_keys() -> None:
    """What was registered with torch without keys is reached by place."""
    served = make(lambda pair: pair.left + pair.right, dynamic={"pair[0]": 0, "pair[1]": 0}, sizes=[4])
    check_calls(served, *(Pair(torch.randn(4, 3), torch.randn(4, 3)) for _ in range(4)))
    assert served.stats.hits == 2


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (lambda x, v: x * v.item(), (np.float32(2), np.float32(3), np.float32("nan"))),
        (lambda x, v: x * v.item(), (np.int64(1), np.int64(2))),
        (lambda x, v: x * v.item(), (np.bool_(True), np.bool_(False))),
        (lambda x, v: x[:, v] * 2, (slice(0, 2), slice(1, 2), slice(0, 2, 1), slice(None))),
        (lambda x, v: x * len(v), (range(2), range(3))),
        (lambda x, v: x * len(repr(v)), (frozenset({1}), frozenset({True}), frozenset({1.0}))),
        (lambda x, v: v(x), (torch.sin, torch.cos)),
        (lambda x, v: v(x), (lambda x: x + 1, lambda x: x + 2)),
        (lambda x, v: x * len(v.__name__), (int, float)),
    ],
    ids=["float", "integer", "flag", "slice", "range", "frozenset", "function of torch", "function", "class"],
)
def test_constants_select_the_graph(model: Callable[..., torch.Tensor], values: tuple[Any, ...]) -> None:
    """Constants of NumPy, slices, ranges, frozen sets, functions and classes: each value has its graph."""
    served = graphed(model, dynamic={"x": 0}, sizes=[4])
    check_calls(served, *((torch.randn(4, 3), value) for value in values * 4))
    assert served.stats.hits == len(values)


def test_the_missing_entry_of_dynamic_is_named() -> None:
    """A tensor that follows the batch and is not declared is named, with the entry that lacks."""
    served = graphed(lambda ids, mask: ids * mask, dynamic={"ids": 0}, sizes=[4, 8])
    batch = torch.randn(4, 3), torch.randn(4, 3)
    check_calls(served, batch, batch, batch)
    assert "dynamic= may lack 'mask': 0" in str(served.explain(*batch))


def test_one_class_without_keys_takes_no_names_from_the_others() -> None:
    """Entries beside it keep theirs, and its own are known by place."""
    step = make(lambda b: b["ids"] + b["pair"].left, dynamic={"b['ids']": 0, "b['pair'][0]": 0}, sizes=(4,))
    for rows in (3, 3, 4, 3):
        check_calls(step, {"ids": torch.randn(rows, 2), "pair": Pair(torch.randn(rows, 2), torch.ones(1))})
    assert step.stats.hits >= 1
