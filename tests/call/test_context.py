"""``cudagraph_context``: instructions for wrappers, per thread and per task."""

import asyncio
import threading

import pytest
import torch

from graphdispatch import CUDAGraphMode
from graphdispatch.call.context import current_context
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper, cudagraph_context
from graphdispatch.errors import ConfigError

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


def test_wrapper_reads_the_context() -> None:
    """A wrapper that is called without instructions takes those of the context."""
    wrapper = CUDAGraphWrapper(lambda x: x * 2)
    with cudagraph_context(FULL, BatchDescriptor(4)):
        wrapper(torch.randn(4, 3))
    assert wrapper.get_cached_descriptors() == [BatchDescriptor(4)]


def test_argument_beats_the_context() -> None:
    """What is passed to the call wins over the context."""
    wrapper = CUDAGraphWrapper(lambda x: x * 2)
    with cudagraph_context(FULL, BatchDescriptor(4)):
        wrapper(torch.randn(4, 3), cudagraph_runtime_mode=NONE)
        wrapper(torch.randn(4, 3), batch_descriptor=BatchDescriptor(8))
    assert wrapper.get_cached_descriptors() == [BatchDescriptor(8)]


def test_contexts_nest() -> None:
    """The inner block counts, and the outer one is back after it."""
    with cudagraph_context(FULL, BatchDescriptor(4)):
        with cudagraph_context(NONE):
            assert current_context() == (NONE, None)
        assert current_context() == (FULL, BatchDescriptor(4))
    assert current_context() is None


def test_context_ends_with_an_error() -> None:
    """An exception leaves no context behind."""
    with pytest.raises(KeyError), cudagraph_context(PIECEWISE, BatchDescriptor(4)):
        raise KeyError
    assert current_context() is None


def test_thread_has_its_own() -> None:
    """Another thread does not see this thread's context."""
    seen: list[object] = []
    with cudagraph_context(FULL, BatchDescriptor(4)):
        thread = threading.Thread(target=lambda: seen.append(current_context()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_task_has_its_own() -> None:
    """Two asyncio tasks that take turns inside their contexts keep them apart."""

    async def one(rows: int, mine: asyncio.Event, other: asyncio.Event) -> object:
        with cudagraph_context(FULL, BatchDescriptor(rows)):
            mine.set()
            await other.wait()
            return current_context()

    async def both() -> list[object]:
        a, b = asyncio.Event(), asyncio.Event()
        return list(await asyncio.gather(one(1, a, b), one(2, b, a)))

    assert asyncio.run(both()) == [(FULL, BatchDescriptor(1)), (FULL, BatchDescriptor(2))]


def test_composite_mode_is_refused() -> None:
    """One step runs in one mode."""
    with (
        pytest.raises(ConfigError, match="mode must be NONE, PIECEWISE or FULL"),
        cudagraph_context(CUDAGraphMode.FULL_AND_PIECEWISE, BatchDescriptor(4)),
    ):
        pass


def test_graph_mode_needs_a_descriptor() -> None:
    """A mode with graphs comes with a descriptor."""
    with pytest.raises(ConfigError, match="descriptor must be a BatchDescriptor in mode FULL"), cudagraph_context(FULL):
        pass
