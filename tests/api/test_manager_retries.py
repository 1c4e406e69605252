"""``CUDAGraphManager``: keys whose capture failed are tried again, and batches that need gradients get them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from graphdispatch import CUDAGraphOptions, Reason
from graphdispatch.engines import CUDAGraphConfig, CUDAGraphManager
from graphdispatch.errors import ConfigError

X = torch.ones(4, 3)


def unsafe(x: torch.Tensor) -> torch.Tensor:
    """What no graph can hold."""
    return x * float(x.sum())


def manager(**options: int) -> CUDAGraphManager:
    """One that captures four rows at once."""
    settings = CUDAGraphOptions(**options)
    return CUDAGraphManager(
        CUDAGraphConfig(capture_sizes=(4,), max_batch_size=4, options=settings.replace(capture_after=1))
    )


def serve(served: CUDAGraphManager, fn: Callable[[torch.Tensor], torch.Tensor], times: int) -> list[int]:
    """Serve so many batches, each compared with eager; the numbers of those whose capture failed, from 1."""
    failed = []
    for number in range(1, times + 1):
        before, x = served.stats.capture_failures, torch.randn(4, 3)
        with torch.no_grad():
            assert torch.equal(served.execute_or_capture(4, 1, fn, {"x": x}), fn(x))
        failed += [number] * (served.stats.capture_failures - before)
    return failed


def test_a_failed_key_is_tried_again_after_16_and_64_misses() -> None:
    """And then no more, with three failures allowed."""
    served = manager(max_failures=3)
    assert serve(served, unsafe, 200) == [1, 1 + 16, 1 + 16 + 64]
    assert not served.should_capture(4, 1)


def test_a_failure_that_passes_is_forgotten() -> None:
    """What could not be captured for a while is served by a graph once it can be."""
    served = manager()
    is_safe = torch.tensor(0)
    state = {"safe": False}

    def step(x: torch.Tensor) -> torch.Tensor:
        return x + is_safe if state["safe"] else x + is_safe.item()

    assert serve(served, step, 5) == [1]
    state["safe"] = True
    assert serve(served, step, 15) == []
    assert (served.stats.captures, served.stats.hits > 0) == (1, True)


def test_what_failed_for_one_callable_does_not_stop_another() -> None:
    """Under the same key, the next callable is captured at once."""
    served = manager(max_failures=1)
    serve(served, unsafe, 3)
    serve(served, lambda x: x * 2, 3)
    assert (served.stats.captures, served.stats.hits) == (1, 1)


def test_a_module_in_training_keeps_its_gradients() -> None:
    """With gradients on no graph serves it, so that every output can be differentiated."""
    served, model = manager(), nn.Linear(3, 3)
    for _ in range(4):
        served.execute_or_capture(4, 1, lambda x: model(x), {"x": X}).sum().backward()
    assert served.stats.reasons == {Reason.NEEDS_GRADIENTS: 4}
    assert torch.equal(model.bias.grad, torch.full((3,), 16.0))  # type: ignore[arg-type]


def test_evaluation_gives_no_gradient_on_any_path() -> None:
    """Capture, comparison and hit hand out the same kind of tensor, gradients on or not."""
    served, model = manager(), nn.Linear(3, 3).eval()
    outputs = [served.execute_or_capture(4, 1, lambda x: model(x), {"x": torch.randn(4, 3)}) for _ in range(4)]
    assert [y.requires_grad for y in outputs] == [False] * 4
    assert served.stats.hits == 2


def test_a_batch_of_other_rows_is_refused_the_first_time() -> None:
    """Not only when it comes to a capture."""
    served = CUDAGraphManager(CUDAGraphConfig(capture_sizes=(4,), max_batch_size=4))
    with pytest.raises(ConfigError, match=r"input 'x' has shape \(4, 3\), whose dimension 0 is not batch_size=2"):
        served.execute_or_capture(2, 1, torch.neg, {"x": X})
