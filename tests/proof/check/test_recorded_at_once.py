"""In a prewarm the graph of a further size is recorded in the run that is watched."""

import functools
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from graphdispatch import CUDAGraphOptions, Graphed, Reason, graphed

from ...helpers import check_rows

SIZES = (2, 4, 8)


def counted(run: Callable[[], object]) -> int:
    """How often ``tanh`` runs, which a callable here does once. A mode that passes it on calls another within it."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    return sum(event.name == "aten::tanh" and not _is_within(event) for event in found.events())


def _is_within(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None and parent.name != event.name:
        parent = parent.cpu_parent
    return parent is not None


def served(fn: Callable[..., Tensor], **options: Any) -> Graphed[..., Tensor]:
    """The callable with graphs of these sizes."""
    return graphed(fn, dynamic={"x": 0}, sizes=SIZES, options=CUDAGraphOptions(**options))


def step_of_flag(flag: Path) -> Graphed[..., Tensor]:
    """A callable that does something else while a file exists, which no guard sees."""

    path = str(flag)

    def fn(x: Tensor) -> Tensor:
        if os.path.exists(path):
            if not os.path.getsize(path):
                raise ValueError(path)
            return torch.tanh(x * 2) + 1
        return torch.tanh(x * 2)

    return served(fn)


def test_a_further_size_takes_two_runs() -> None:
    """The one that is watched and recorded, and the replay that is compared with it; a user may want more warm-ups. A
    callable that draws is not timed besides."""
    for warmups, runs in ((1, 2), (3, 5)):
        step = served(lambda x: torch.tanh(x * 2 + torch.rand(3)), warmup_iterations=warmups)
        step.prewarm(torch.randn(8, 3), sizes=[8])
        assert counted(partial(step.prewarm, torch.randn(8, 3), sizes=[4])) == runs
        assert step.captured_sizes == (4, 8)


def test_a_run_that_is_not_like_the_first_is_watched_closely(tmp_path: Path) -> None:
    """Its graph holds what the callable does now, and not what it did for another size."""
    flag = tmp_path / "flag"
    step, x = step_of_flag(flag), torch.randn(8, 3)
    step.prewarm(x, sizes=[8])
    flag.write_text("more")
    step.prewarm(x, sizes=[4])
    assert step.captured_sizes == (4, 8)
    assert torch.equal(step(x[:4]), torch.tanh(x[:4] * 2) + 1)


def test_a_call_that_is_not_like_the_first_has_the_next_one_watched(tmp_path: Path) -> None:
    """The caller's own run is not made again; the next one is watched closely, and captured."""
    flag = tmp_path / "flag"
    step, x = step_of_flag(flag), torch.randn(8, 3)
    step.prewarm(x, sizes=[8])
    flag.write_text("more")
    reasons = check_rows(step, *[4] * 4)
    assert reasons[1:3] == [Reason.CAPTURE_WAITS, Reason.CAPTURED_NOW], reasons
    assert step.captured_sizes == (4, 8)


def test_an_error_of_a_recorded_run_is_the_callables(tmp_path: Path) -> None:
    """It is the reason why there is no graph of that size, as it would be from a run that is not recorded."""
    flag = tmp_path / "flag"
    step, x = step_of_flag(flag), torch.randn(8, 3)
    step.prewarm(x, sizes=[8])
    flag.touch()
    (why,) = step.prewarm(x, sizes=[4]).left_out.values()
    assert "ValueError" in why
    flag.unlink()
    assert step.captured_sizes == (8,)
    step.prewarm(x, sizes=[4])
    assert check_rows(step, 8, 4) == [Reason.EXACT] * 2


@pytest.mark.parametrize("kind", [torch.float64, torch.int64])
def test_a_value_that_changes_from_run_to_run_is_seen(kind: torch.dtype) -> None:
    """The run that is recorded agrees with itself; so the graph serves no batch, not even the same one, before another
    run agreed. Of integers a prewarm makes no other batch."""
    step, x = served(lambda x: torch.tanh(x.double()) + time.perf_counter_ns()), torch.ones(8, 3, dtype=kind)
    step.prewarm(x, sizes=[8])
    latest = time.perf_counter_ns()
    for _ in range(4):
        assert latest < step(x).min()
        latest = time.perf_counter_ns()
    assert step.stats.hits == 0


def test_what_the_first_run_alone_makes_is_not_recorded() -> None:
    """A cache that nobody sees is filled by the first run; its graph is that of a second one, which reads the cache."""
    made = functools.lru_cache(lambda: torch.full((3,), 2.0))
    step = served(lambda x: torch.tanh(x * made()))
    step.prewarm(torch.randn(8, 3), sizes=[8])
    assert check_rows(step, 8) == [Reason.EXACT]
    made().fill_(3.0)
    assert check_rows(step, 8) == [Reason.EXACT]
