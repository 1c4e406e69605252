"""What a prewarm may meet and does not come to; what does, is among the cases of ``tests/behaviour``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphdispatch import Reason, graphed

from ...behaviour.cases import Box
from ...helpers import check_rows

HOLDERS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda line: Box(settings=line),
    "list": lambda line: Box(settings=[line]),
    "object": lambda line: Box(box=Box(settings=line)),
}


def check_prewarmed(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Graphs serve all sizes behind a prewarm."""
    step = graphed(fn, dynamic={"x": 0}, sizes=(2, 4))
    step.prewarm(torch.ones(4, 3))
    assert check_rows(step, 4, 3, 2) == [Reason.EXACT, Reason.PADDED, Reason.EXACT]


@pytest.mark.parametrize("place", HOLDERS)
def test_what_no_code_names_does_not_stand_against_a_prewarm(place: str) -> None:
    """Code that runs cannot come to the iterator."""
    line = iter([1, 2, 3])
    model = torch.nn.Identity()
    model.held = HOLDERS[place](line)  # type: ignore[assignment]
    check_prewarmed(lambda x: model(x) * 2)
    assert next(line) == 1


def test_a_function_that_is_watched_meanwhile_is_no_state() -> None:
    """Something stands in for ``torch.tensor_split`` while runs are watched: code that names it changes nothing."""
    check_prewarmed(lambda x: torch.tensor_split(x, 3, dim=1)[1] * 2)
