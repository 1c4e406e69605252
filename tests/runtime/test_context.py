"""``cudagraph_context``: instructions for wrappers, per thread and per task."""

import asyncio
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphMode
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper, cudagraph_context
from graphdispatch.errors import ConfigError

from ..helpers import in_threads

FULL, NONE = CUDAGraphMode.FULL, CUDAGraphMode.NONE


def test_wrapper_reads_the_context() -> None:
    """A wrapper that is called without instructions takes those of the context; an argument goes before it."""
    wrapper = CUDAGraphWrapper(lambda x: x * 2)
    with cudagraph_context(FULL, BatchDescriptor(4)):
        wrapper(torch.randn(4, 3))
        wrapper(torch.randn(4, 3), cudagraph_runtime_mode=NONE, batch_descriptor=BatchDescriptor(2))
        wrapper(torch.randn(4, 3), batch_descriptor=BatchDescriptor(8))
    assert wrapper.get_cached_descriptors() == [BatchDescriptor(4), BatchDescriptor(8)]


def captured_under() -> list[BatchDescriptor]:
    """Under which descriptor a wrapper captures that is called without instructions; none where it passes through."""
    wrapper = CUDAGraphWrapper(lambda x: x * 2)
    wrapper(torch.ones(4, 3))
    return wrapper.get_cached_descriptors()


def test_contexts_nest_and_end() -> None:
    """The inner block counts, then the outer one; an exception leaves none, and another thread has its own."""
    seen: list[object] = []

    def within() -> None:
        with cudagraph_context(FULL, BatchDescriptor(4)):
            with cudagraph_context(NONE):
                assert captured_under() == []
            assert captured_under() == [BatchDescriptor(4)]
            seen.extend(in_threads(captured_under))
            raise KeyError

    with pytest.raises(KeyError):
        within()
    assert captured_under() == []
    assert seen == [[]]


def test_task_has_its_own() -> None:
    """Two asyncio tasks that take turns inside their contexts keep them apart."""

    async def one(rows: int, mine: asyncio.Event, other: asyncio.Event) -> object:
        with cudagraph_context(FULL, BatchDescriptor(rows)):
            mine.set()
            await other.wait()
            return captured_under()

    async def both() -> list[object]:
        a, b = asyncio.Event(), asyncio.Event()
        return list(await asyncio.gather(one(1, a, b), one(2, b, a)))

    assert asyncio.run(both()) == [[BatchDescriptor(1)], [BatchDescriptor(2)]]


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "two modes": ((CUDAGraphMode.FULL_AND_PIECEWISE, BatchDescriptor(4)), {}, "mode must be NONE, PIECEWISE or FULL"),
    "no descriptor": ((FULL,), {}, "descriptor must be a BatchDescriptor in mode FULL"),
} | {
    f"{rows} rows": ((FULL, BatchDescriptor(8)), {"rows": rows}, "rows must be how many of the descriptor's 8 tokens")
    for rows in (0, 9, True, 1.5)
}


@pytest.mark.parametrize("name", WRONG)
def test_instructions_are_checked(name: str) -> None:
    """One step runs in one mode, a mode with graphs comes with a descriptor, and the real rows are some of its."""
    args, kwargs, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        cudagraph_context(*args, **kwargs).__enter__()
