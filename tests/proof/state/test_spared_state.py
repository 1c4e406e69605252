"""A prewarm runs nothing that may change what nobody could put back; what no code names changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphdispatch import Reason, graphed

from ...helpers import AT_ONCE, check_rows


class Holder:
    """Something to hold an iterator besides."""


class Model(nn.Module):
    """A model that was made with the help of an iterator, which it keeps."""

    def __init__(self, use: Callable[[Any, Tensor], Any], place: str) -> None:
        super().__init__()
        self.use, self.name, self.box = use, "settings", Holder()
        left = iter([1, 2, 3])
        if place == "list":
            self.settings, self.others = [left], [left]
            self.settings.append(self.settings)
        elif place == "pair":
            self.settings = self.others = ([left],)
        elif place == "object":
            self.box.settings = left
        else:
            self.settings = left

    def forward(self, x: Tensor) -> Tensor:
        """Twice the batch; and whatever is done with the iterator."""
        self.use(self, x)
        return x * 2


def prewarmed(use: Callable[[Any, Tensor], Any], place: str) -> tuple[Model, Any]:
    """The model, and its served form after a prewarm."""
    model = Model(use, place)
    step = graphed(model, dynamic={"x": 0}, sizes=(2, 4))
    step.prewarm(torch.ones(4, 3))
    return model, step


def kept_by(model: Model, place: str) -> Any:
    """The iterator that the model keeps."""
    held = model.box.settings if place == "object" else model.settings
    while type(held) in (list, tuple):
        held = held[0]
    return held


@pytest.mark.parametrize("place", ["", "list", "object"])
def test_what_no_code_names_does_not_stand_against_a_prewarm(place: str) -> None:
    """Code that runs cannot come to it."""
    model, step = prewarmed(lambda *_: None, place)
    assert check_rows(step, 4, 3, 2) == [Reason.EXACT, Reason.PADDED, Reason.EXACT]
    assert next(kept_by(model, place)) == 1


@pytest.mark.parametrize(
    ("use", "place"),
    [
        (lambda model, _: next(model.settings), ""),
        (lambda model, _: next(getattr(model, "settings")), ""),  # noqa: B009
        (lambda model, _: next(getattr(model, model.name)), ""),
        (lambda model, _: next(vars(model)["settings"]), ""),
        (lambda model, _: [next(one) for name, one in vars(model).items() if name == model.name], ""),
        (lambda model, _: next(model.box.settings), "object"),
        (lambda model, _: next(model.settings[0]), "list"),
        (lambda model, _: next(model.others[0]), "list"),
        (lambda model, _: next(model.others[0][0]), "pair"),
    ],
)
def test_what_code_may_come_to_is_spared(use: Callable[[Any, Tensor], Any], place: str) -> None:
    """By whatever name or path: the run ends before it, and there is no graph."""
    model, step = prewarmed(use, place)
    assert next(kept_by(model, place)) == 1
    assert not step.entries
    assert "nobody can" in step.explain(torch.ones(4, 3))


class Full(Model):
    """It uses the iterator for a full batch alone."""

    def forward(self, x: Tensor) -> Tensor:
        """Twice the batch."""
        return super().forward(x) if len(x) == 4 else x * 2


def test_what_only_padding_comes_to_is_spared() -> None:
    """The caller's own run does not come to it; no run behind that may."""
    model = Full(lambda model, _: next(model.settings), "")
    step = graphed(model, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    assert check_rows(step, 3) == [Reason.STATE_UNSEEN]
    assert next(kept_by(model, "")) == 1


def test_a_function_that_is_watched_meanwhile_is_no_state() -> None:
    """Something stands in for ``torch.tensor_split`` while runs are watched: code that names it changes nothing."""
    step = graphed(lambda x: torch.tensor_split(x, 3, dim=1)[1] * 2, dynamic={"x": 0}, sizes=(2, 4))
    step.prewarm(torch.ones(4, 3))
    assert check_rows(step, 4, 3, 2) == [Reason.EXACT, Reason.PADDED, Reason.EXACT]
