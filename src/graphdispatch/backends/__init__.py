"""Backends by name: those that are here, and what ``register_backend`` is given."""

from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch

from ..copying import make_lock
from ..errors import BackendError
from .base import Backend, Capture, Graph, Pool, Stopwatch

__all__ = ["Backend", "Capture", "Graph", "Pool", "Stopwatch", "available_backends", "get_backend", "register_backend"]

_LOCK = make_lock()
_FACTORIES: dict[str, Callable[[], type[Backend]]] = {
    "cpu": lambda: import_module(".cpu.backend", __name__).CPUBackend,
    "cuda": lambda: import_module(".cuda", __name__).CUDABackend,
    # A capture on XPU has one mode, and does not follow events to side streams
    # (https://github.com/pytorch/pytorch/pull/196490). What a side stream does is then missing in the graph, and the
    # comparison with eager gives that graph up.
    "xpu": cache(lambda: import_module(".accelerator.backend", __name__).backend_of("xpu", "default")),
}
# One object for each name and device, since all captures of it run on one stream.
_INSTANCES: dict[tuple[str, int | None], Backend] = {}


def register_backend(name: str, factory: Callable[[], type[Backend]]) -> None:
    """Add a backend. Thread-safe.

    Args:
        name: The name, which is not taken. ``"auto"`` finds the backend of a device by the type of the device, so it
            takes this one only if the name is that type.
        factory: A function without arguments that imports and returns the backend's class; it is called once,
            when the class is needed.

    Raises:
        BackendError: The name is taken.
    """
    with _LOCK:
        if name in _FACTORIES:
            raise BackendError(f"backend {name!r} is registered already; choose another name")
        _FACTORIES[name] = cache(factory)


def available_backends() -> tuple[str, ...]:
    """The names of the backends whose device can be used in this process."""
    return tuple(name for name, factory in sorted(_FACTORIES.items()) if factory().is_available())


def _accelerator() -> str:
    """The type of torch's accelerator, whether it can be used or not; empty if torch has none."""
    return getattr(torch.accelerator.current_accelerator(), "type", "")


def _default_name() -> str:
    """That of torch's accelerator where it can be used, else the first of another one, else the CPU's."""
    accelerator = _accelerator()
    names = sorted(available_backends(), key=lambda name: name != accelerator)
    return next((name for name in names if _FACTORIES[name]().device_type != "cpu"), "cpu")


def load_default() -> None:
    """Import the backend of torch's accelerator if it has one, else the CPU's, so that no first call waits for it."""
    _FACTORIES.get(_accelerator(), _FACTORIES["cpu"])()


def watching_backend() -> Backend | None:
    """The backend that captures or compares the calling thread's work, of those that were used so far; or None."""
    return next((backend for backend in list(_INSTANCES.values()) if backend.is_watched()), None)


def get_backend(name: str = "auto", device: torch.device | None = None) -> Backend:
    """The backend of a device. The same device always gets the same object. Thread-safe.

    Args:
        name: The name of a backend. ``"auto"`` chooses by ``device``; without a device it takes one of an accelerator
            that can be used here, else the CPU.
        device: The device. None: the backend's current one.

    Returns:
        The backend.

    Raises:
        BackendError: The backend is unknown, has no usable device here, or serves other devices.
    """
    if name == "auto":
        name = device.type if device is not None else _default_name()
    if name not in _FACTORIES:
        known = ", ".join(repr(n) for n in ("auto", *sorted(_FACTORIES)))
        raise BackendError(f"backend {name!r} is unknown; expected one of {known}, or a name given to register_backend")
    cls = _FACTORIES[name]()
    if not cls.is_available():
        raise BackendError(f"backend {name!r} has no usable device here; use backend='cpu' or 'auto'")
    if device is None:
        device = torch.device(cls.device_type)
    if device.type != cls.device_type:
        raise BackendError(f"backend {name!r} serves {cls.device_type!r} devices, got device {str(device)!r}")
    index = device.index if device.index is not None else cls.default_index()
    with _LOCK:
        if (name, index) not in _INSTANCES:
            exact = torch.device(cls.device_type, index) if index is not None else torch.device(cls.device_type)
            _INSTANCES[name, index] = cls(exact)
        return _INSTANCES[name, index]
