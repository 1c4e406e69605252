"""Torch modes that see what a device would have to do: operators arrive as their parts, where they have parts.

Note [what arrives as one call]
    An operator of torch that is made of others arrives as these others. So does an operator whose kernel is Python
    (``torch.library.custom_op``, ``Library.impl``): a CUDA graph holds the kernels that the Python launched, and no
    Python. An operator in C++ arrives as one call, whatever it does inside, and its schema says what it writes.

    An operator in C++ that was registered without a dispatch key (``m.def(schema, &fn)``) passes itself off as made of
    others. Torch would run it above all modes, where nobody sees its work on raw memory. ``reveal_operators`` has torch
    pass by that early place, so that the operator runs where all modes see it. Nothing else about it changes.
"""

import sys
import threading
from functools import cache
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import CaptureError
from ..reasons import Reason
from .compiled import CompiledRegion, reveal_compiled
from .operators import tensors_in, user_line
from .tracing import UntracedMode

__all__ = ["COMPILER", "OperatorMode", "is_composite", "python_kernel", "reveal_operators", "run_kernel"]

_MADE_OF_OTHERS = frozenset({"aten", "inductor"})
"""The namespaces whose composite operators are made of other operators."""
_COMPILED = (".cpp", ".cc", ".cxx", ".c", ".cu", ".cuh", ".h", ".hpp", ".hip", ".mm", ".sycl")
COMPILER = "torch._inductor.output_code"
"""The module of torch whose compiled code runs kernels that no mode sees, unless it is revealed."""
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


@cache
def is_composite(func: OpOverload) -> bool:
    """Whether torch itself makes the operator of other operators on every device.

    Under ``torch.inference_mode`` a mode sees such an operator as a whole. The schema does not tell what it does:
    ``reshape`` may copy, ``batch_norm`` writes to buffers. The mode therefore enters itself again and runs
    ``func.decompose``, so that it sees the parts, as it does without inference mode.
    """
    if func.namespace not in _MADE_OF_OTHERS:
        return False
    name = func.name()
    return _has_kernel(name, "CompositeImplicitAutograd") and not (
        _has_kernel(name, "CPU") or _has_kernel(name, "CUDA")
    )


def python_kernel(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The device's dispatch key, if the kernel that the call reaches is a Python function; else None."""
    name = func.name()
    if func.namespace == "aten":  # a kernel of CUDA that somebody replaced launches kernels, and a graph holds those
        is_replaced = f"aten/{name.removeprefix('aten::')}/CPU" in torch.library._impls
        return "CPU" if is_replaced and _device_key(args, kwargs) == "CPU" else None
    device = _device_key(args, kwargs)
    if func.namespace == "_c10d_functional":  # its Python only wraps a tensor that is still on its way
        return None
    for key in (device, "CompositeExplicitAutograd", "CompositeImplicitAutograd"):
        if _has_kernel(name, key):
            return device if _is_python(name, key) else None
    return None


def _is_python(name: str, key: str) -> bool:
    """Whether the kernel was registered in Python: torch notes the file that registered it."""
    for line in torch._C._dispatch_dump(name).splitlines():
        place, _, rest = line.partition(": registered at ")
        if place in (key, f"{key}[alias]"):
            return not rest.partition(" :: ")[0].rpartition(":")[0].endswith(_COMPILED)
    return False


def run_kernel(func: OpOverload, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the operator's kernel for a device's dispatch key, without a way through torch's dispatcher or functions."""
    kernel = torch.library.get_kernel(func, key)
    return kernel.call_boxed(DispatchKeySet(getattr(DispatchKey, key)), *args, **kwargs)


def _device_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    for tensor in tensors_in(args, kwargs):
        if tensor.device.type != "cpu":
            return str(torch._C._dispatch_key_for_device(tensor.device.type))
    return "CPU"


_revealed: dict[str, torch.library.Library] = {}
"""What holds the registrations, by the operator's name. There is one, as torch has one set of operators."""
_reveal_lock = threading.Lock()


def reveal_operators() -> None:
    """Have modes see each C++ operator that is registered without a dispatch key; see the module's text.

    It is registered as nothing to do at autograd's place, for as long as the process lives: torch then goes on to the
    operator's one kernel, from which autograd sees the same operators as before. Costs 0.4 ms. Threads may call it.
    """
    composite = "CompositeImplicitAutograd"
    for full in torch._C._dispatch_get_registrations_for_dispatch_key(composite):
        namespace, _, name = full.partition("::")
        if namespace in _MADE_OF_OTHERS or namespace == "prim" or full in _revealed:
            continue
        with _reveal_lock:
            if full not in _revealed and not _has_kernel(full, "AutogradCPU"):
                library = torch.library.Library(namespace, "IMPL")
                for key in ("AutogradCPU", "AutogradCUDA", "AutogradXPU", "AutogradPrivateUse1"):
                    library.impl(name, torch.library.fallthrough_kernel, key)
                _revealed[full] = library


class OperatorMode(UntracedMode):
    """A mode that sees operators as their parts; see Note [what arrives as one call].

    A subclass has ``watch``, which gets each operator that has no parts and runs it, and may have ``look_inside``. Call
    ``reveal_operators`` before a call is watched.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        compiler = sys.modules.get(COMPILER)
        if compiler is not None:
            reveal_compiled(compiler, OperatorMode)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: torch may compile and run compiled code within the mode, which sees it as one call."""
        return True

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Show one operator to ``watch``, or its parts."""
        kwargs = kwargs or {}
        if type(func) is not OpOverload and isinstance(func, HigherOrderOperator):
            return self.watch_higher_order(func, args, kwargs)
        # A trace of the interpreter shall see the callable's Python, and not what watches it, which is much more. The
        # parts of an operator run none of it. A profiler in compiled code cannot be put back by its name.
        trace = sys.getprofile()
        is_traced = type(trace) in (MethodType, FunctionType)
        if is_traced:
            sys.setprofile(None)
        try:
            if is_composite(func):
                with self:
                    return func.decompose(*args, **kwargs)
            key = python_kernel(func, args, kwargs)
            if key is None:
                with torch._C.DisableTorchFunction():
                    return self.watch(func, args, kwargs)
        finally:
            if is_traced:
                sys.setprofile(trace)
        return self.look_inside(func, key, args, kwargs)

    def look_inside(self, func: OpOverload, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator's Python kernel, within this mode."""
        with self:
            return run_kernel(func, key, args, kwargs)

    def watch_higher_order(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that takes functions: ``flex_attention`` within the mode, any other below all modes."""
        kernel = func.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
        if func.name() == "flex_attention" and kernel is not None:
            with self:
                return kernel(*args, **kwargs)
        self.give_up(
            CaptureError(
                f"{func.name()} takes functions, and what these do is not seen; compile the model, or break there; "
                f"at {user_line()}",
                Reason.CAPTURE_UNSAFE,
            )
        )
        with _disable_current_modes():
            return func(*args, **kwargs)

    def give_up(self, error: CaptureError) -> None:
        """Say that no graph can hold what runs. Raises the error, unless the run must go on."""
        raise error

    def watch_region(self, region: CompiledRegion, args: tuple[Any, ...]) -> Any:
        """Show the call of a compiled graph to ``watch``."""
        with torch._C.DisableTorchFunction():
            return self.watch(cast(OpOverload, region), args, {})

    def watch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator that has no parts. Torch functions are disabled meanwhile."""
        raise NotImplementedError
