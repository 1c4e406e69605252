"""Makes the test device ``queued`` of this process: it is compiled once, into ``build/device``, and then registered.

It cannot be taken back, and makes ``queued`` the process's accelerator. So it is loaded by tests that ask for it alone:
as a plug-in of pytest (``make device-test``), or by ``import queued_device`` in a process of their own.
"""

import ctypes
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import cpp_extension

from graphdispatch.backends.base import CopyKernel

__all__ = ["DEVICE", "copy_kernel", "delays", "fail_after", "held", "limit_memory", "lose", "pool_bytes", "recover"]

HERE = Path(__file__).resolve().parent
SOURCES = [HERE / name for name in ("runtime.cpp", "memory.cpp", "device.cpp", "operators.cpp", "copies.cpp")]
FAULTS = ("allocation", "launch", "kernel")
NAME = "queued"
MOST_POOLS = 1000


def build() -> Path:
    """Compile the device if its sources or torch changed, and return the library; 40 seconds the first time.

    ``QUEUED_FLAGS`` has further flags of the compiler, as a sanitizer's.
    """
    flags = os.environ.get("QUEUED_FLAGS", "").split()
    where = HERE.parents[1] / "build" / "-".join(["device", torch.__version__, *(flag.strip("-") for flag in flags)])
    where.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MAX_JOBS", "2")
    os.environ["PATH"] += f"{os.pathsep}{Path(sys.executable).parent}"  # where ninja is, if it came by pip
    with (where / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        (where / "lock").unlink(missing_ok=True)  # torch's own, which a build that was interrupted leaves
        cpp_extension.load(
            f"{NAME}_device",
            [str(source) for source in SOURCES],
            extra_cflags=["-O1", "-g0", "-w", *flags],
            extra_ldflags=list(flags),
            build_directory=str(where),
            is_python_module=False,
        )
    return where / f"{NAME}_device.so"


def register() -> ctypes.CDLL:
    """Load the library and tell torch the device's name and its module in Python."""
    torch.utils.rename_privateuse1_backend(NAME)
    library = ctypes.CDLL(str(build()))
    for function in ("queued_seed_now", "queued_offset_now", "queued_pools"):
        getattr(library, function).restype = ctypes.c_uint64
    library.queued_seed.restype = ctypes.c_bool
    library.queued_seed.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    library.queued_fail_after.argtypes = [ctypes.c_int, ctypes.c_long]
    library.queued_delay.argtypes = [ctypes.c_uint64, ctypes.c_int]
    library.queued_limit.argtypes = [ctypes.c_size_t]
    library.queued_pools.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t]
    torch._register_device_module(NAME, device_module())
    torch.utils.generate_methods_for_privateuse1_backend()
    return library


def device_module() -> ModuleType:
    """``torch.queued``."""
    module: Any = ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = module.manual_seed = lambda seed: set_state(seed % 2**64, 0)
    module.get_rng_state = get_rng_state
    module.set_rng_state = set_rng_state
    module.memory_snapshot = memory_snapshot
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


def get_rng_state(device: object = None) -> torch.Tensor:
    """The default generator's seed, and how often it was drawn from."""
    numbers = (ctypes.c_uint64 * 2)(LIBRARY.queued_seed_now(), LIBRARY.queued_offset_now())
    return torch.frombuffer(bytearray(numbers), dtype=torch.uint8)


def set_rng_state(state: torch.Tensor, device: object = None) -> None:
    """Put a state of the default generator back."""
    set_state(*(ctypes.c_uint64 * 2).from_buffer_copy(bytes(state.tolist())))


def set_state(seed: int, offset: int) -> None:
    """Put the default generator where it is to be. Raises ``RuntimeError`` in a capture."""
    if not LIBRARY.queued_seed(seed, offset):
        raise RuntimeError("a generator's state cannot be set during graph capture")


def fail_after(fault: str, calls: int) -> None:
    """Let an ``allocation``, a ``launch`` or a ``kernel`` fail: the one after so many more. Negative: none."""
    LIBRARY.queued_fail_after(FAULTS.index(fault), calls)


def lose() -> None:
    """Lose the device now."""
    LIBRARY.queued_lose()


def recover() -> None:
    """Have a device again, and no fault to come."""
    for fault in FAULTS:
        fail_after(fault, -1)
    LIBRARY.queued_recover()


def delays(seed: int, microseconds: int) -> None:
    """Let each stream sleep before each piece of work, at most so long; the times come of the seed. 0: no sleep."""
    LIBRARY.queued_delay(seed, microseconds)


@contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Work of the stream that is given within the block, runs after the block."""
    with stream:
        LIBRARY.queued_hold()
    try:
        yield
    finally:
        LIBRARY.queued_let_go()


def limit_memory(nbytes: int = 1 << 30) -> None:
    """Let the device have so much memory."""
    LIBRARY.queued_limit(nbytes)


def copy_kernel() -> CopyKernel:
    """What copies and pads all inputs of a hit, on the first thread that has it."""
    context = ctypes.c_void_p()
    LIBRARY.queued_context(ctypes.byref(context))
    functions = (ctypes.cast(one, ctypes.c_void_p).value for one in (LIBRARY.queued_launch, LIBRARY.queued_context))
    launch, current = (address or 0 for address in functions)
    return CopyKernel(launch, current, 0, context.value or 0, give_outputs)


def give_outputs(places: torch.Tensor, blocks: int, outputs: int) -> None:
    """Put the outputs of a graph where they are wanted, on the current stream."""
    LIBRARY.queued_give(ctypes.c_void_p(places.data_ptr()), blocks, outputs)


def memory_snapshot() -> list[dict[str, Any]]:
    """Which pools have memory, as torch's allocators say it."""
    numbers = (ctypes.c_uint64 * (3 * MOST_POOLS))()
    count = LIBRARY.queued_pools(numbers, MOST_POOLS)
    pools = [numbers[3 * i : 3 * i + 3] for i in range(count)]
    return [{"device": 0, "segment_pool_id": (one, two), "total_size": nbytes} for one, two, nbytes in pools]


def pool_bytes(handle: tuple[int, int]) -> int:
    """The bytes of a pool."""
    return sum(each["total_size"] for each in memory_snapshot() if each["segment_pool_id"] == handle)


LIBRARY = register()
DEVICE = torch.device(NAME, 0)
