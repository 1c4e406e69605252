"""Torch modes that see what a device would have to do: operators arrive as their parts, where they have parts.

Note [what arrives as one call]
    An operator of torch that is made of others arrives as these others. So does an operator whose kernel is Python
    (``torch.library.custom_op``, ``Library.impl``): a CUDA graph holds the kernels that the Python launched, and no
    Python. An operator in C++ arrives as one call, whatever it does inside, and its schema says what it writes.

    An operator in C++ that was registered without a dispatch key (``m.def(schema, &fn)``) passes itself off as made of
    others. Torch would run it above all modes, where nobody sees its work on raw memory. ``reveal_operators`` has torch
    pass by that early place, so that the operator runs where all modes see it. Nothing else about it changes.

Note [compiled code]
    Code that torch's inductor compiled reserves memory and calls its kernels past torch's dispatcher, so no mode sees
    them. The call of a compiled graph can be seen instead: its arguments are all that it reads, it says which of them
    it writes, and what it returns is new. So it stands in a recording as one call, and a replay runs the compiled
    kernels.

    So does a Triton kernel that the model launches itself. Its tensors are all that it may write, so each counts as
    written, also one that it only reads.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _pop_mode_temporarily, _push_mode

from ..copying import make_lock
from ..errors import CaptureError
from .code_events import pause, resume
from .operators import OperatorKind, kind_of, per_operator, tensors_in, unsafe
from .tracing import UntracedMode

_MADE_OF_OTHERS = frozenset({"aten", "inductor"})
"""The namespaces whose composite operators are made of other operators."""
_COMPILED = (".cpp", ".cc", ".cxx", ".c", ".cu", ".cuh", ".h", ".hpp", ".hip", ".mm", ".sycl")
COMPILER = "torch._inductor.output_code"
"""The module of torch whose compiled code runs kernels that no mode sees, unless it is revealed."""
LAUNCHER = "triton.runtime.jit"
"""The module of Triton whose kernels no mode sees, unless they are revealed."""
_OPEN = ("flex_attention", "triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional")
"""Operators that take functions of which all is seen."""
_READ_BACK = torch.ops.aten._local_scalar_dense.default
_COMPOSITE = "CompositeImplicitAutograd"
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


@per_operator
def _has_parts(func: OpOverload) -> bool:
    return func.namespace in _MADE_OF_OTHERS and _has_kernel(func.name(), _COMPOSITE)


@per_operator
def _plain_name(func: OpOverload) -> str:
    """Of an operator of torch without parts, the name under which torch keeps what somebody put in the place of its
    compiled kernel; empty for any other."""
    is_plain = isinstance(func, OpOverload) and func is not _READ_BACK and not _has_parts(func)
    return _replacement(func) if is_plain else ""


def python_kernel(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The device's dispatch key, if the kernel that the call reaches is a Python function; else None."""
    of_torch = _replacement(func)
    if of_torch:  # an accelerator's that somebody replaced launches kernels, and a graph holds those
        return "CPU" if of_torch in torch.library._impls and _device_key(args, kwargs) == "CPU" else None
    name = func.name()
    device = _device_key(args, kwargs)
    if func.namespace in ("prim", "_c10d_functional"):  # torch's own Python: it wraps or describes what C++ computes
        return None
    for key in (device, "CompositeExplicitAutograd", _COMPOSITE):
        if _has_kernel(name, key):
            return device if _is_python(name, key) else None
    return None


@per_operator
def _replacement(func: OpOverload) -> str:
    """Under which name torch keeps what somebody put in the place of an operator's kernel; empty for others' own."""
    return f"aten/{func.name().removeprefix('aten::')}/CPU" if func.namespace == "aten" else ""


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
    if torch.accelerator.current_accelerator() is None:
        return "CPU"
    kinds = (tensor.device.type for tensor in tensors_in(args, kwargs))
    return str(torch._C._dispatch_key_for_device(next((kind for kind in kinds if kind != "cpu"), "cpu")))


def _dispatches(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that runs operators in its own way."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


_revealed: dict[tuple[str, str], torch.library.Library] = {}
"""What holds the registrations, by the operator's name and the key. There is one, as torch has one set of operators."""
_of_torch: set[str] = set()
"""Names of torch's own operators, which are seen as their parts."""
_reveal_lock = make_lock()


def reveal_operators(device: torch.device) -> None:
    """Have modes see each C++ operator that is registered without a dispatch key; see the module's text.

    It is registered as nothing to do at autograd's place, for as long as the process lives: torch then goes on to the
    operator's one kernel, from which autograd sees the same operators as before. Costs 0.4 ms. Threads may call it.

    Args:
        device: A device of the call, besides the CPU.
    """
    keys = {f"Autograd{torch._C._dispatch_key_for_device(kind)}" for kind in ("cpu", device.type)}
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(_COMPOSITE)
    for full, key in product([one for one in registered if one not in _of_torch], keys):
        namespace, _, name = full.partition("::")
        if namespace in (*_MADE_OF_OTHERS, "prim"):
            _of_torch.add(full)
            continue
        if (full, key) in _revealed:
            continue
        with _reveal_lock:
            if (full, key) not in _revealed and not _has_kernel(full, key):
                _revealed[full, key] = library = torch.library.Library(namespace, "IMPL")
                library.impl(name, torch.library.fallthrough_kernel, key)


_shown: set[type] = set()
"""The classes whose calls are shown to modes: that of compiled graphs and that of Triton kernels."""


@dataclass(frozen=True)
class CompiledRegion:
    """Looks like an operator to those that watch: ``region(run, *inputs)`` runs compiled code.

    ``mutated`` are the inputs, by position, that it writes; where ``is_guess``, that it may write. It ``hides`` what it
    may write where tensors are inside of other arguments.
    """

    size: int
    mutated: tuple[int, ...]
    what: str = "compiled code"
    is_guess: bool = False
    hides: bool = False
    namespace = "inductor_compiled"
    tags: tuple[torch.Tag, ...] = ()

    @property
    def _schema(self) -> Any:
        writes = [None, *(SimpleNamespace(is_write=True) if i in self.mutated else None for i in range(self.size))]
        arguments = [SimpleNamespace(name=f"input_{i}", alias_info=info) for i, info in enumerate(writes)]
        return SimpleNamespace(name=f"{self.namespace}::region", arguments=arguments, returns=())

    def __call__(self, run: Any, *inputs: Any) -> Any:
        """Run the code, which empties the list that it is given."""
        return run(list(inputs))

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class _Launch:
    """Launches a Triton kernel with ``[*positional, *named]``, of which the last have these names."""

    kernel: Any
    grid: Any = field(compare=False)
    names: tuple[str, ...]

    def __call__(self, inputs: list[Any]) -> None:
        split = len(inputs) - len(self.names)
        named = dict(zip(self.names, inputs[split:], strict=True))
        self.kernel.run(*inputs[:split], grid=self.grid, warmup=False, **named)


def _is_guard_read() -> bool:
    """Whether a guard of compiled code called the mode that calls this: to compare a number of Python, a guard makes a
    tensor of it and reads that back. Nothing of it is the callable's work."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name == "__torch_dispatch__":
        frame = frame.f_back
    return frame.f_code.co_name == "guard" and "___as_tensor" in frame.f_code.co_freevars


class PythonCalls(UntracedMode):
    """Notes the operators in Python that compiled code calls; ``names`` has them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note one operator and run it."""
        kwargs = kwargs or {}
        if python_kernel(func, args, kwargs) is not None:
            self.names.append(func._schema.name)
        return func(*args, **kwargs)


class OperatorMode(UntracedMode):
    """A mode that sees operators as their parts; see Note [what arrives as one call].

    A subclass has ``watch``, which gets each operator that has no parts and runs it, and may have ``look_inside``. Call
    ``reveal_operators`` before a call is watched.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused: CaptureError | None = None
        """Why no graph can hold what ran, if it cannot: the callable, or TorchScript around it, may catch the error."""
        self.raised: CaptureError | None = None
        """What to say of an operator that raised, if one did and the callable caught it."""
        self.is_paused = False
        """Whether operators pass through, and it sees none."""
        self._paused: Any = None
        """Who hears of the callable's Python, while an operator runs of which nothing is to be heard."""
        self._composite: dict[tuple[int, str], bool] = {}
        for module, reveal in ((COMPILER, _reveal_compiled), (LAUNCHER, _reveal_launches)):
            if module in sys.modules:
                reveal(sys.modules[module])

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: torch may compile and run compiled code within the mode, which sees it as one call."""
        return True

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Show one operator to ``watch``, or its parts."""
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if type(func) is not OpOverload and isinstance(func, HigherOrderOperator):
            return self.watch_higher_order(func, args, kwargs)
        if func is _READ_BACK and _is_guard_read():
            with _disable_current_modes():
                return func(*args)
        # Who listens shall hear of the callable's Python, and not of what watches that, which is much more.
        is_outermost = self._paused is None
        if is_outermost:
            self._paused = pause()
        try:
            plain_name = _plain_name(func)
            is_plain = plain_name and plain_name not in torch.library._impls
            if not is_plain and self._is_composite(func, args, kwargs):
                return self._run_parts(func, args, kwargs)
            key = None if is_plain else python_kernel(func, args, kwargs)
            try:
                if key is None:
                    with torch._C.DisableTorchFunction():
                        return self.watch(func, args, kwargs)
                return self._heard(self.look_inside, func, key, args, kwargs)
            except Exception as error:
                self._note_error(func, error)
                raise
        finally:
            if is_outermost:
                paused, self._paused = self._paused, None
                resume(paused)

    def _note_error(self, func: OpOverload, error: Exception) -> None:
        """Note that an operator raised. The values may be why, but for one that only makes a view."""
        if isinstance(error, CaptureError):
            self.refused = self.refused or error
        elif kind_of(func) is not OperatorKind.VIEW:
            what = f"{func} raised {type(error).__name__}, which the callable caught"
            self.raised = unsafe(f"{what}; a graph takes one path for all values")

    def check_refused(self) -> None:
        """Raise the ``CaptureError`` of a run that has ended as if nothing had been refused, nor raised by values."""
        error, self.refused, self.raised = self.refused or self.raised, None, None
        if error is not None:
            raise error

    def _heard(self, run: Callable[..., Any], *args: Any) -> Any:
        """Call what runs Python of the callable, of which who listens shall hear."""
        paused, self._paused = self._paused, None
        resume(paused)
        try:
            return run(*args)
        finally:
            if paused is not None:
                self._paused = pause()

    def _is_composite(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether torch itself makes the operator of other operators on the device of these arguments.

        Under ``torch.inference_mode`` a mode sees such an operator as a whole. The schema does not tell what it does:
        ``reshape`` may copy, ``batch_norm`` writes to buffers. The mode therefore enters itself again and runs the
        kernel that has the parts, so that it sees them, as it does without inference mode.
        """
        if not _has_parts(func) or any(map(_dispatches, tensors_in(args, kwargs))):
            return False
        place = id(func), _device_key(args, kwargs)
        if place not in self._composite:  # torch takes long to tell
            self._composite[place] = not _has_kernel(func.name(), place[1])
        return self._composite[place]

    def _run_parts(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the kernel of an operator that has parts, within this mode."""
        _push_mode(self)  # torch's notes of entered modes say so already
        try:
            if f"aten/{func.name().removeprefix('aten::')}/{_COMPOSITE}" in torch.library._impls:
                return self._heard(partial(func._op_dk, DispatchKey.CompositeImplicitAutograd, *args, **kwargs))
            return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        finally:
            _pop_mode()

    def look_inside(self, func: OpOverload, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator's Python kernel, within this mode."""
        with self:
            return run_kernel(func, key, args, kwargs)

    def watch_higher_order(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that takes functions: those of ``_OPEN`` within the mode, any other below all modes."""
        kernel = func.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
        if func.name() in _OPEN and kernel is not None:
            with self:
                return kernel(*args, **kwargs)
        what = f"{func.name()} takes functions, and what these do is not seen"
        self.give_up(unsafe(f"{what}; compile the model, or break there"))
        with _disable_current_modes():
            return func(*args, **kwargs)

    def give_up(self, error: CaptureError) -> None:
        """Say that no graph can hold what runs. Raises the error, unless the run must go on."""
        self.refused = self.refused or error
        raise error

    def watch_region(self, region: CompiledRegion, args: tuple[Any, ...]) -> Any:
        """Show the call of compiled code to ``watch``."""
        if region.hides:
            what = f"{region} gets tensors inside of other arguments, and nobody sees which of them it writes"
            self.give_up(unsafe(f"{what}; pass the tensors themselves, or make it a custom operator"))
        func = cast(OpOverload, region)
        try:
            with torch._C.DisableTorchFunction():
                return self.watch(func, args, {})
        except Exception as error:
            self._note_error(func, error)
            raise

    def watch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator that has no parts. Torch functions are disabled meanwhile."""
        raise NotImplementedError


def _reveal_compiled(compiler: ModuleType) -> None:
    """Show calls of compiled graphs to entered modes, by ``watch_region``. Costs such calls 0.1 us.

    ``compiler`` is the module that has their class. Does nothing if it is not the one known here: the memory of
    compiled code is then of unknown origin, and a capture refuses it.
    """
    graphs: Any = getattr(compiler, "CompiledFxGraph", None)
    with _reveal_lock:
        if graphs in _shown or "mutated_input_idxs" not in getattr(graphs, "__annotations__", {}):
            return
        plain = graphs.__call__

        def call(self: Any, inputs: Sequence[Any]) -> Any:
            region = CompiledRegion(len(inputs), tuple(sorted(self.mutated_input_idxs)))
            return _shown_to_modes(partial(plain, self, inputs), lambda: (region, (self, *inputs)))

        graphs.__call__ = call
        _shown.add(graphs)


def _reveal_launches(launcher: ModuleType) -> None:
    """Show Triton kernels that the model launches to entered modes. Costs a launch 0.1 us elsewhere."""
    kernels: Any = getattr(launcher, "JITFunction", None)
    with _reveal_lock:
        if kernels is None or kernels in _shown:
            return
        plain = kernels.run

        def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
            def shown() -> tuple[CompiledRegion, tuple[Any, ...]]:
                inputs, what = (*args, *named.values()), f"the Triton kernel {self.__name__!r}"
                tensors = tuple(i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor))
                others = [value for value in inputs if not isinstance(value, torch.Tensor)]
                hides = bool(tensors_in(others)) or any(hasattr(value, "base") for value in others)
                launch = _Launch(self, grid, tuple(named))
                return CompiledRegion(len(inputs), tensors, what, is_guess=True, hides=hides), (launch, *inputs)

            direct, paused = partial(plain, self, *args, grid=grid, warmup=warmup, **named), pause()
            try:
                return direct() if warmup else _shown_to_modes(direct, shown)
            finally:
                resume(paused)

        kernels.run = run
        _shown.add(kernels)


def _shown_to_modes(plain: Callable[[], Any], region: Callable[[], tuple[CompiledRegion, tuple[Any, ...]]]) -> Any:
    """Run compiled code within the innermost mode that watches operators, as a call that it sees; else plainly."""
    depth = torch._C._len_torch_dispatch_stack()
    if not any(isinstance(torch._C._get_dispatch_stack_at(i), OperatorMode) for i in range(depth)):
        return plain()
    with _pop_mode_temporarily() as mode:
        sees = isinstance(mode, OperatorMode) and not mode.is_paused
        return mode.watch_region(*region()) if sees else _shown_to_modes(plain, region)
