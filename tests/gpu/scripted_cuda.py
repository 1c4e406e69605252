"""A stand-in for the parts of ``torch.cuda`` that the backend calls, with CUDA's rules about captures and pools.

It keeps the books that matter: which stream captures, which handles the allocator records into, how many graphs hold
each handle. Faults are scripted; nothing computes.
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphdispatch.backends.cuda import CUDABackend

Handle = tuple[int, int]


class ScriptedStream:
    """A stream: its number, whether it is being captured, and whether the capture was made invalid."""

    def __init__(self, driver: "ScriptedCUDA", device: int, number: int) -> None:
        self.driver = driver
        self.device = torch.device("cuda", device)
        self.cuda_stream = number
        self.is_capturing = False
        self.spoilt: RuntimeError | None = None

    def wait_stream(self, other: "ScriptedStream") -> None:
        self.driver.log.append(f"stream {self.cuda_stream} waits for {other.cuda_stream}")

    def record_event(self) -> Any:
        return SimpleNamespace(synchronize=lambda: self.driver.log.append("wait until idle"))


class ScriptedGraph:
    """``torch.cuda.CUDAGraph``: what it does to streams and to the allocator's books, and when it throws."""

    driver: "ScriptedCUDA"

    def __init__(self) -> None:
        self.handle: Handle | None = None
        self.is_held = False
        self.may_go = True

    def __del__(self) -> None:
        if not self.may_go:
            self.driver.log.append("the process ends: destroyed a graph that could not begin")

    def capture_begin(self, pool: Handle, capture_error_mode: str) -> None:
        driver, stream = self.driver, self.driver.current
        assert capture_error_mode == "thread_local"
        assert stream.cuda_stream != 0, "CUDA graphs must be captured on a non-default stream"
        assert pool not in driver.recording, "already recording to mempool_id"
        assert pool not in driver.finished, "a handle must not be used again once its last graph is gone"
        self.handle = pool
        driver.recording.add(pool)
        driver.holds[pool] += 1
        self.may_go = False
        driver.throw("begin")
        self.may_go = True
        driver.offset.fill_(0)  # torch writes the generator's seed and offset by ordinary operators
        stream.is_capturing = True
        driver.log.append("begin")

    def capture_end(self) -> None:
        driver, stream = self.driver, self.driver.current
        assert stream.is_capturing, "Capture must end on the same stream it began on"
        stream.is_capturing = False
        driver.log.append("end")
        spoilt, stream.spoilt = stream.spoilt, None
        if spoilt is not None:
            raise spoilt
        driver.recording.remove(self.handle)
        self.is_held = True
        driver.throw("instantiate")
        if driver.warns_of_empty_graphs:
            warnings.warn("The CUDA Graph is empty. This usually means ...", UserWarning, stacklevel=2)

    def replay(self) -> None:
        self.driver.throw("replay")
        self.driver.log.append("replay")

    def reset(self) -> None:
        self.driver.log.append("reset")
        if self.is_held:
            self.is_held = False
            self.driver.release(self.handle)


class ScriptedCUDA:
    """The driver and the allocator of two devices; ``faults`` are raised once each, by place."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.offset = torch.zeros(1, dtype=torch.long)
        self.recording: set[Handle] = set()
        self.holds: Counter[Handle] = Counter()
        self.finished: set[Handle] = set()
        self.faults: dict[str, list[Exception]] = {}
        self.device = 0
        self.defaults = [ScriptedStream(self, index, 0) for index in range(2)]
        self.currents = list(self.defaults)
        self.streams = 0
        self.handles = 0
        self.free, self.reserved, self.allocated = 1000, 100, 50
        self.fraction = 1.0
        self.segments: list[dict[str, Any]] = []
        self.warns_of_empty_graphs = False

    @property
    def current(self) -> ScriptedStream:
        """The current stream of the current device."""
        return self.currents[self.device]

    def throw(self, place: str) -> None:
        """Raise the next fault scripted for ``place``."""
        if self.faults.get(place):
            raise self.faults[place].pop(0)

    def release(self, handle: Handle) -> None:
        """One graph less holds ``handle``."""
        self.holds[handle] -= 1
        assert self.holds[handle] >= 0
        if not self.holds[handle]:
            self.finished.add(handle)

    def held(self) -> dict[Handle, int]:
        """The handles that graphs hold, with their numbers."""
        return {handle: count for handle, count in self.holds.items() if count}

    def new_stream(self, device: torch.device) -> ScriptedStream:
        self.streams += 1
        return ScriptedStream(self, device.index, self.streams)

    def new_handle(self) -> Handle:
        self.handles += 1
        return (0, self.handles)

    def set_stream(self, stream: ScriptedStream) -> None:
        self.set_device(stream.device.index)
        self.currents[self.device] = stream

    def set_device(self, device: int) -> None:
        self.device = device

    @contextlib.contextmanager
    def on_stream(self, stream: ScriptedStream) -> Iterator[None]:
        device, before = self.device, self.currents[stream.device.index]
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)
            self.set_device(device)

    @contextlib.contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device.index
        try:
            yield
        finally:
            self.device = before

    def end_allocate(self, index: int, handle: Handle) -> None:
        if handle not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(handle)

    def memory(self, device: torch.device | None = None) -> tuple[int, int]:
        """Free bytes, and all."""
        return self.free, 2000

    def snapshot(self, include_traces: bool) -> list[dict[str, Any]]:
        return self.segments

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Take the place of ``torch.cuda`` for one test."""
        graph = type("Graph", (ScriptedGraph,), {"driver": self})
        surface: dict[str, Any] = {
            "CUDAGraph": graph,
            "graph_pool_handle": self.new_handle,
            "Stream": self.new_stream,
            "current_stream": lambda device=None: self.currents[device.index if device is not None else self.device],
            "set_stream": self.set_stream,
            "stream": self.on_stream,
            "device": self.on_device,
            "set_device": self.set_device,
            "current_device": lambda: self.device,
            "synchronize": lambda device=None: self.log.append("synchronize"),
            "mem_get_info": self.memory,
            "memory_reserved": lambda device=None: self.reserved,
            "memory_allocated": lambda device=None: self.allocated,
            "get_per_process_memory_fraction": lambda device=None: self.fraction,
            "memory_snapshot": self.snapshot,
            "empty_cache": lambda: self.log.append("empty cache"),
            "is_current_stream_capturing": lambda: self.current.is_capturing,
        }
        for name, value in surface.items():
            patch.setattr(torch.cuda, name, value)
        bindings: dict[str, Any] = {
            "_cuda_endAllocateToPool": self.end_allocate,
            "_cuda_releasePool": lambda index, handle: self.release(handle),
            "_cuda_clearCublasWorkspaces": lambda: self.log.append("clear workspaces"),
            "_cuda_getCurrentRawStream": lambda index: self.currents[index].cuda_stream,
        }
        for name, value in bindings.items():
            patch.setattr(torch._C, name, value, raising=False)


def cuda_backend(index: int | None) -> CUDABackend:
    """The backend of a device, also where torch finds none."""
    return CUDABackend(torch.device("cuda", index) if index is not None else torch.device("cuda"))
