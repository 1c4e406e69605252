"""Arguments as Python has them: left out, None, mappings, classes registered without keys, NumPy scalars, functions."""

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from graphdispatch import Reason, graphed

from ..helpers import AT_ONCE


class Named(dict[str, torch.Tensor]):
    """A dict of somebody's own class."""


class Tokens(UserDict[str, torch.Tensor]):
    """What a tokenizer gives."""

    def __init__(self, data: Any = None, note: str = "") -> None:
        super().__init__(data)
        self.note = note

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


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


@pytest.mark.parametrize("kind", [Named, Tokens, UserDict])
def test_mappings_are_nests(kind: Any) -> None:
    """A mapping that torch does not know is a nest of its values; the callable gets one of the same class."""

    def model(batch: Any) -> torch.Tensor:
        assert type(batch) is kind
        assert list(batch) == ["ids", "mask"]
        out: torch.Tensor = batch["ids"] * batch["mask"]
        return out

    served = graphed(model, dynamic={"batch['ids']": 0, "batch['mask']": 0}, sizes=[2, 4])
    for rows in (4, 4, 4, 3, 3, 2, 2, 4):
        batch = kind({"ids": torch.randn(rows, 3), "mask": torch.randn(rows, 3)})
        assert torch.equal(served(batch), model(batch))
    assert served.stats.hits >= 2
    swapped = kind({"mask": torch.randn(4, 3), "ids": torch.randn(4, 3)})
    with pytest.raises(AssertionError):
        served(swapped)


def test_attributes_of_mappings_select_the_graph() -> None:
    """Further attributes of a mapping are compared, and one that cannot be compared is refused by name."""

    def model(batch: Tokens) -> torch.Tensor:
        out: torch.Tensor = batch["ids"] * (2 if batch.note else 3)
        return out

    served = graphed(model, dynamic={"batch['ids']": 0}, sizes=[4])
    for note in ["", "", "", "", "a", "a", "a", "a", "", "a"]:
        batch = Tokens({"ids": torch.randn(4, 3)}, note)
        assert torch.equal(served(batch), model(batch))
    assert served.stats.hits >= 4
    odd = Tokens({"ids": torch.randn(4, 3)}, note=[1])  # type: ignore[arg-type]
    assert torch.equal(served(odd), model(odd))
    assert served.stats.reasons[Reason.NO_TENSORS] + served.stats.reasons[Reason.UNGUARDED_ARGUMENT] == 1


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


def test_mappings_within_lists() -> None:
    """As tokenizers give them: a mapping of a class of its own, wherever it stands."""

    class Encoding(UserDict[str, torch.Tensor]):
        pass

    step = graphed(lambda parts: parts[0]["a"] * 2 + parts[1]["deep"]["a"], dynamic={"parts": 0}, sizes=(2,))
    for _ in range(5):
        a, b = torch.randn(2, 3), torch.randn(2, 1)
        parts = [Encoding(a=a, b=b), Encoding(deep=Encoding(a=b, b=a))]
        assert torch.equal(step(parts), a * 2 + b)
    assert step.last_decision.reason.is_graph
