"""The long run of ``make soak``, for a moment."""

import torch

from .long_run import LongRun


def test_a_long_run_is_flat_and_right() -> None:
    """Whatever happens between them, answers are eager's in a sample, and memory, handles and threads stay as many."""
    torch.manual_seed(0)
    lines = LongRun().run(4000)
    assert len(lines) == 14
