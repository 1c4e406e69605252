"""How far iterators are, and what other compiled objects hold. Loaded only where a callable reaches one."""

import ctypes
import gc
import io
import mmap
import types
import warnings
from contextlib import suppress
from typing import Any

from ..errors import CaptureError
from ..reasons import Reason
from . import objects

__all__ = ["advance_refused", "is_large", "progress", "read_memory", "write_memory"]

_MOST_MAPPED = 1 << 20


def advance_refused(name: str) -> CaptureError:
    """The error of a run that somebody wants for the graph alone, and that would advance what cannot be put back."""
    return CaptureError(
        f"a run for the graph's sake would change for good what nobody can put back: {name}; pass what it gives as an "
        "argument, or capture by calls",
        Reason.STATE_UNSEEN,
    )


def progress(iterator: Any) -> Any:
    """How far an iterator is, as plain data, without a step. Equal: as far, or of a kind that does not tell."""
    is_generator = issubclass(type(iterator), types.GeneratorType)
    frame = iterator.gi_frame if is_generator else None
    if frame is not None:
        return [frame.f_lasti, *map(_place, gc.get_referents(iterator))]
    parts: Any = ()
    if not is_generator and not objects.user_classes(type(iterator)):
        with warnings.catch_warnings(), suppress(TypeError):
            warnings.simplefilter("ignore")  # Python means to take this away from itertools
            parts = iterator.__reduce__()
    return [_place(part) for part in parts[1:]] or [_place(part) for part in gc.get_referents(iterator)]


def _place(part: Any) -> Any:
    if objects.Kinds()[type(part)].iterates:
        return progress(part)
    if issubclass(type(part), tuple):
        return [_place(inner) for inner in part]
    if issubclass(type(part), list):  # made anew for some kinds
        return len(part)
    return repr(part) if issubclass(type(part), (*objects.CONSTANTS, range)) else id(part)


def read_memory(value: Any) -> Any:
    """What a file in memory, or mapped memory, holds and where it stands, or the bytes of an object of ``ctypes``."""
    if isinstance(value, io.IOBase):
        return None if value.closed else _file_class(value).__getstate__(value)[:-1]
    if isinstance(value, mmap.mmap):
        return None if value.closed else (value[:], value.tell())
    own = ctypes.string_at(ctypes.addressof(value), ctypes.sizeof(value))
    target = _target(value)
    return own if target is None else own + ctypes.string_at(ctypes.addressof(target), ctypes.sizeof(target))


def _target(value: Any) -> Any:
    """What a pointer of ``ctypes`` points to; None for anything else."""
    is_pointer = isinstance(value, ctypes._Pointer)
    return value.contents if is_pointer and bool(value) else None


def is_large(value: Any) -> bool:
    """Whether mapped memory holds too much to be read at each run: more than a megabyte."""
    return isinstance(value, mmap.mmap) and not value.closed and len(value) > _MOST_MAPPED


def write_memory(value: Any, before: Any) -> None:
    """Put that back; a file that was closed stays closed."""
    if isinstance(value, mmap.mmap):
        value[:], place = before
        value.seek(place)
    elif not isinstance(value, io.IOBase):
        size = ctypes.sizeof(value)
        ctypes.memmove(ctypes.addressof(value), before, size)
        if len(before) > size:
            ctypes.memmove(ctypes.addressof(_target(value)), before[size:], len(before) - size)
    elif before is not None and not value.closed:
        _file_class(value).__setstate__(value, (*before, None))


def _file_class(value: Any) -> Any:
    return io.BytesIO if issubclass(type(value), io.BytesIO) else io.StringIO
