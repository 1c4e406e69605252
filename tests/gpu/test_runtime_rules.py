"""What the CUDA runtime does about capture, replay, events and errors is what a real device printed of it; and what a
capture may not have of tensors on the host."""

import difflib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graphdispatch import Reason
from graphdispatch.backends import Backend, Pool

pytestmark = pytest.mark.gpu

RULES = Path(__file__).parent / "runtime"
GOLDEN = RULES / "golden.txt"


def lines(text: str) -> list[str]:
    """Lines that are no comments."""
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_runtime_keeps_the_rules_of_a_real_device(tmp_path: Path) -> None:
    """Each line that the program prints is one that the device in the golden file's header printed."""
    if not GOLDEN.exists():
        pytest.skip(f"no device has printed {GOLDEN.name} yet")
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    golden = GOLDEN.read_text()
    assert golden.startswith("# ")
    assert "emulated" not in golden.splitlines()[0]
    printed = subprocess.run(
        [str(RULES / "run.sh"), sys.executable, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=True
    )
    assert [*difflib.unified_diff(lines(golden), lines(printed.stdout), "device", "here", lineterm="", n=0)] == []


# What a capture may not have of tensors on the host: a copy.


Work = Callable[[Tensor, Tensor, Tensor], object]
"""Work on numbers of shape (4, 3), on indices of two of their rows, and on a mask of all rows."""

HALF = torch.tensor(0.5)
ROWS = torch.tensor([0, 2])


COPIES: dict[str, Work] = {
    "x[rows] = 1.0": lambda x, rows, mask: x.__setitem__(rows, 1.0),
    "x[1, 1] = 1.0": lambda x, rows, mask: x.__setitem__((1, 1), 1.0),
    "x[host rows] = y": lambda x, rows, mask: x.__setitem__(ROWS, x[:2].clone()),
    "index_put_, accumulate": lambda x, rows, mask: x.index_put_((rows,), HALF, accumulate=True),
    "index_put_, mask, accumulate": lambda x, rows, mask: x.index_put_((mask,), HALF, accumulate=True),
    "x[host rows]": lambda x, rows, mask: x[ROWS],
    "x[[0, 2]]": lambda x, rows, mask: x[[0, 2]],
    "where, a number": lambda x, rows, mask: torch.where(x > 0, x, HALF),
    "where, a condition": lambda x, rows, mask: torch.where(HALF > 0, x, x),
    "copy_": lambda x, rows, mask: x.copy_(HALF),
    "to": lambda x, rows, mask: ROWS.to(x.device),
    "tensor": lambda x, rows, mask: torch.tensor(0.5, device=x.device),
    "_foreach_copy_": lambda x, rows, mask: torch._foreach_copy_([x], [torch.ones(4, 3)]),
}


def inputs(cuda: Backend) -> tuple[Tensor, Tensor, Tensor]:
    """What the work is given, on the device."""
    x = torch.arange(12.0).view(4, 3).to(cuda.device)
    return x, ROWS.to(cuda.device), torch.tensor([True, False, False, True]).to(cuda.device)


@pytest.mark.parametrize("work", COPIES.values(), ids=COPIES)
def test_a_copy_from_pageable_memory_is_not_captured(cuda: Backend, pool: Pool, work: Work) -> None:
    """What works eagerly is refused in a capture, for a reason; the next capture works."""
    given = inputs(cuda)
    work(*given)
    with pytest.raises(RuntimeError) as caught, cuda.begin_capture(pool):
        work(*given)
    assert cuda.classify_error(caught.value) is Reason.CAPTURE_UNSAFE
    with cuda.begin_capture(pool) as capture:
        given[0].fill_(3)
    capture.graph.replay()
    assert given[0].unique().tolist() == [3]
    capture.graph.reset()
