"""Python takes other paths for other numbers of rows: what is read there is guarded, and no effect there is lost.

The operators of all paths are alike, so that nothing but the code tells them apart.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphOptions, graphed

ALL_AT_ONCE = CUDAGraphOptions(capture_share=None)
PATHS: dict[str, Callable[[int], bool]] = {
    "few": lambda n: n <= 6,
    "many": lambda n: n > 6,
    "seven": lambda n: n == 7,
    "odd": lambda n: n % 2 == 1,
    "full": lambda n: n in (4, 6, 8, 12, 16),
}
CALLS: dict[tuple[int, ...], list[int]] = {
    (8,): [8, 8, 8, 7, 7, 8, 3, 3, 3, 5, 6, 7],
    (16,): [16, 16, 16, 12, 7, 7, 9, 3, 7],
    (4, 8): [8, 8, 8, 7, 7, 4, 4, 4, 3, 3, 3, 5, 5, 6, 6],
    (4, 6, 8): [6, 6, 6, 5, 5, 4, 4, 4, 3, 8, 8, 8, 7, 7],
    (6, 12): [6, 6, 6, 5, 5, 12, 12, 12, 7, 8, 9],
    (3, 7): [5, 5, 5, 6, 7, 3, 3, 3, 2, 7],
}


class Branching(nn.Module):
    """Calls a method on one path alone."""

    def __init__(self, path: Callable[[int], bool]) -> None:
        super().__init__()
        self.layer, self.path = nn.Linear(8, 8), path
        self.is_doubled, self.sums = False, hashlib.sha256()

    def doubled(self, y: Tensor) -> Tensor:
        """What another method reads is read on one path alone."""
        return y * 2 if self.is_doubled else y

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, 8]`` -> ``[rows, 8]``."""
        y: Tensor = self.layer(x)
        return self.doubled(y) if self.path(x.shape[0]) else y


class Summing(Branching):
    """Has an effect on one path alone, in an object of compiled code."""

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, 8]`` -> ``[rows, 8]``."""
        y: Tensor = self.layer(x)
        if self.path(x.shape[0]):
            self.sums.update(b"1")
        return y


def served(model: nn.Module, sizes: tuple[int, ...], *, is_prewarmed: bool) -> Any:
    """The model by graphs."""
    step = graphed(model, dynamic={"x": 0}, sizes=sizes, options=ALL_AT_ONCE)
    if is_prewarmed:
        step.prewarm(torch.randn(max(sizes), 8))
    return step


@pytest.mark.parametrize("is_prewarmed", [False, True])
@pytest.mark.parametrize("sizes", CALLS)
@pytest.mark.parametrize("path", PATHS)
def test_what_one_path_reads_is_guarded(path: str, sizes: tuple[int, ...], is_prewarmed: bool) -> None:
    """Every number of rows has eager's answer after that changed, whatever was captured and compared before."""
    model = Branching(PATHS[path]).eval()
    step = served(model, sizes, is_prewarmed=is_prewarmed)
    for rows in CALLS[sizes]:
        step(torch.randn(rows, 8))
    for _ in range(2):
        model.is_doubled = not model.is_doubled
        for rows in range(1, max(sizes) + 1):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(step(x), model(x), msg=f"{rows} rows")


@pytest.mark.parametrize("is_prewarmed", [False, True])
@pytest.mark.parametrize("sizes", CALLS)
@pytest.mark.parametrize("path", PATHS)
def test_what_one_path_does_is_done_once(path: str, sizes: tuple[int, ...], is_prewarmed: bool) -> None:
    """Nor does a run that no call made do it."""
    model, plain = Summing(PATHS[path]).eval(), Summing(PATHS[path]).eval()
    step = served(model, sizes, is_prewarmed=is_prewarmed)
    for rows in [*CALLS[sizes], *range(1, max(sizes) + 1)]:
        x = torch.randn(rows, 8)
        step(x)
        plain(x)
    assert model.sums.digest() == plain.sums.digest()


def test_other_paths_are_served() -> None:
    """Those on which nothing stands against it."""
    model = Summing(PATHS["many"]).eval()
    step = served(model, (4, 8), is_prewarmed=False)
    for rows in (4, 4, 4, 3, 3, 4, 3):
        step(torch.randn(rows, 8))
    assert step.stats.hits >= 3
