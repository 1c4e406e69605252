"""The extension module, bound to the installed torch: what looks at tensors and modes, and the native half of guards.

What it takes from torch and the interpreter is tested before it is trusted.
"""

import gc
import sys
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import EXTENSION, WHY_NO_EXTENSION

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T", bound=type)
_CPU = 0  # the number of the device type
_OF_THREAD: tuple[Callable[[], bool], ...] = (
    torch.is_inference_mode_enabled,
    lambda: torch.is_autocast_enabled("cpu"),
    torch._C._autograd._profiler_enabled,
    lambda: torch._C._functorch.peek_interpreter_stack() is not None,
)
"""Modes of the thread as Python tells them, in the order of the core's ``read_ambient``."""


def _bind() -> tuple[ModuleType | None, str]:
    """The extension module, if it reads of tensors and modes what Python tells in every mode; else why not."""
    if EXTENSION is None:
        return None, WHY_NO_EXTENSION
    home, suffix = Path(torch.__file__).parent / "lib", "dylib" if sys.platform == "darwin" else "so"
    libraries = [str(home / f"lib{name}.{suffix}") for name in ("torch_cpu", "torch_python")]
    with torch.inference_mode():
        made_there = torch.zeros(2)
    with torch.inference_mode(False), torch.enable_grad():
        grid, pair = torch.zeros(2, 3), torch.zeros(2, dtype=torch.complex64)
        trained = torch.nn.Parameter(grid.clone())
        shapes = (grid, grid.t(), grid[1:, 1:], torch.zeros(()), trained, torch.zeros(0, 4))
        kinds = grid.double(), grid.half(), grid.long(), grid.bool(), torch.frombuffer(bytearray(8), dtype=torch.int8)
        plain = (grid, torch.zeros(4, dtype=torch.int64), torch.zeros(3, 2).t(), pair, grid.bfloat16())
        lazy = (torch._neg_view(torch.zeros(2)), pair.conj())
        figures = tuple(map(_figures, (*shapes, *kinds)))
        try:
            EXTENSION.bind(*libraries, torch.Tensor, torch.nn.Parameter, figures, plain, *lazy, made_there)
        except ImportError as error:
            return None, str(error)
    samples = [*((t, True) for t in (*plain, trained, made_there)), *((t, False) for t in lazy)]
    reads_alike = all(_reads_alike(EXTENSION, samples, *modes) for modes in product((False, True), repeat=3))
    reads_alike = reads_alike and _tells_holding(EXTENSION, grid)
    return (EXTENSION, "") if reads_alike else (None, "it reads other things of this torch than Python does")


def _figures(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor with where it lies in memory and how large it is, by which the core finds where torch keeps that."""
    storage, size = tensor.untyped_storage(), (tuple(tensor.shape), tensor.stride())
    places = tensor.storage_offset(), storage._cdata, storage.data_ptr()
    return tensor, tensor._cdata, tensor.data_ptr(), tensor.numel(), *places, *size


def _reads_alike(
    core: ModuleType, samples: list[tuple[torch.Tensor, bool]], inference: bool, autocast: bool, transforms: bool
) -> bool:
    """Whether the core reads in these modes what Python tells of the thread and of samples, which are plain or not."""
    was = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", autocast)
    if transforms:
        torch._C._functorch._vmap_increment_nesting(1, "error")
    try:
        with torch.inference_mode(inference):
            thread = [read() for read in _OF_THREAD]
            return all(
                core.read_ambient(one, _CPU)
                == (*thread, one.dtype is torch.get_autocast_dtype("cpu"), one.requires_grad, is_plain)
                and (transforms or _is_clone(core, one, is_plain))
                for one, is_plain in samples
            )
    except RuntimeError:  # a torch that refuses one of the states
        return False
    finally:
        if transforms:
            torch._C._functorch._vmap_decrement_nesting()
        torch.set_autocast_enabled("cpu", was)


def _is_clone(core: ModuleType, tensor: torch.Tensor, is_plain: bool) -> bool:
    """Whether the core's copy of a tensor is what torch's is; of a lazy view it makes none."""
    with torch.no_grad():
        made, true = core.try_clone(tensor), tensor.clone()
    if not (is_plain and tensor.is_contiguous()):
        return made is None
    figures = ("shape", "dtype", "requires_grad", "grad_fn")
    return (
        type(made) is torch.Tensor
        and all(getattr(made, name) == getattr(true, name) for name in figures)
        and (made.stride(), made.is_inference()) == (true.stride(), true.is_inference())
        and made.data_ptr() != tensor.data_ptr()
        and bool(torch.equal(made, true))
    )


def _tells_holding(core: ModuleType, sample: torch.Tensor) -> bool:
    """Whether what the core reads of a copy tells that somebody holds or has changed it."""
    kind = torch.Tensor
    with torch.inference_mode(False), torch.enable_grad():
        product = sample.clone().requires_grad_().mul  # which keeps one factor for the gradient of the other
        for touch in (kind.detach, kind.untyped_storage, kind.__dlpack__, kind.requires_grad_, kind.t_, product):
            copy = core.try_clone(sample)
            before, _held = core.read_holding(copy), touch(copy)
            if core.read_holding(copy)[0] == before[0]:
                return False
        copy = core.try_clone(sample)
        return (core.read_holding(copy)[1], core.read_holding(copy.zero_())[1]) == (0, 1)


with torch._C.DisableTorchFunction(), _disable_current_modes():  # a default device of the importing thread, for example
    CORE, WHY_NO_CORE = _bind()
"""The extension module after its self-test on this torch, or None; and why there is none, empty if there is one."""

_WARM = 32  # an interpreter has found its fastest way for a line that ran so often
_CHANGES = """
    owner.first = value
    object.__setattr__(owner, "first", value)
    owner.__dict__["first"] = value
    setattr(owner, f"new_{value % 4}", value)
    owner.passing = value; del owner.passing; owner.first = value
    delattr(owner, "passing") if value % 2 else setattr(owner, "passing", value)
    table["a"] = value
    table.update(a=value)
    table |= {"d": value}
    table.pop("a", None) if value % 2 else table.setdefault("a", value)
    table.popitem() if value % 2 else table.update(c=value)
    table.clear() if value % 2 else table.update(b=value, first=0)
    table.clear() if value % 2 else table.update({"b": value, "first": 0})
"""
"""Ways to change an object's attributes, or the dict that holds them."""


class _Plain:
    """An object with attributes as most classes make them."""

    def __init__(self) -> None:
        self.first = self.second = 0


class _Through(_Plain):
    """One whose stores go through a method, as those of modules do."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


class _Crowded(_Plain):
    """One with so many attributes that it shares no table of names."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(40):
            setattr(self, f"attribute_{number}", number)


def versions_tell(version_of: Callable[[dict[str, Any]], int]) -> bool:
    """Whether each way of changing a dict, or attributes of an object or class, gives the dict a new version.

    Each way is taken so often that the interpreter runs it in its fastest form.
    """
    kind = type("Kind", (), {"first": 0})
    (attributes,) = (table for table in gc.get_referents(vars(kind)) if type(table) is dict)
    return _tells(version_of, "type(owner).first = value", kind(), attributes) and all(
        _tells(version_of, line.strip(), owner := made(), vars(owner) if is_given else None)
        for line in _CHANGES.strip().splitlines()
        for made in ((_Plain, _Through, _Crowded) if "owner" in line else (_Plain,))
        for is_given in ((True, False) if "table" not in line else (True,))
    )


def _tells(version_of: Callable[[dict[str, Any]], int], line: str, owner: Any, table: dict[str, Any] | None) -> bool:
    """Whether a way of changing is seen. The owner's table, if it is not given, is first read when all is warm."""
    names: dict[str, Any] = {}
    exec(f"def change(owner, table, value):\n    {line}", names)
    versions = {0}
    for value in range(1000, 1000 + 2 * _WARM):  # no small numbers, which are the same objects each time
        if table is None and value == 1000 + _WARM:
            table = vars(owner)
        names["change"](owner, table, value)
        if table is not None:
            version = version_of(table)
            if version in versions:
                return False
            versions.add(version)
    return True


GUARD: Any = CORE.Guard if CORE is not None else None
"""The class of native guards, or None."""
USES_VERSIONS: bool = CORE is not None and versions_tell(CORE.dict_version)
"""Whether native guards skip dicts whose version is as it was; else they compare every entry."""
USES_CHANGES: bool = CORE is not None and versions_tell(CORE.dict_changes)
"""Whether native guards skip all dicts while the interpreter tells of no change to one that is watched."""
if CORE is not None:
    CORE.skip_dicts(USES_VERSIONS, USES_CHANGES)


class _InCore:
    """Becomes a method of the core as soon as its class is there."""

    def __init__(self, make: Callable[..., Any], facts: Mapping[str, Any]) -> None:
        self._make, self._facts = make, facts

    def __set_name__(self, owner: type, name: str) -> None:
        setattr(owner, name, self._make(owner, self._facts))


def in_core(make: str, facts: Mapping[str, Any]) -> Callable[[_F], _F]:
    """Decorates a method that the core has, too: the core's serves where there is one, and the decorated one elsewhere.

    Args:
        make: The core's function that makes the method for a class.
        facts: What of the package the method needs.
    """

    def choose(fn: _F) -> _F:
        return fn if CORE is None else cast(_F, _InCore(getattr(CORE, make), dict(facts)))

    return choose


def called_in_core(compiler_at_work: Any) -> Callable[[_T], _T]:
    """Decorates a class whose ``__call__`` the core takes where there is one; the class's own serves compiled callers.

    Args:
        compiler_at_work: Says whether torch's compiler looks at the caller.
    """

    def take(cls: _T) -> _T:
        if CORE is not None:
            CORE.take_calls(cls, compiler_at_work)
        return cls

    return take
